package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// swapped gives each row of a statement the tenant of another row.
type swapped struct{ pgx.Tx }

func (s swapped) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	for _, a := range args {
		var tenants []int64
		switch named := a.(type) {
		case postgres.Args:
			tenants, _ = named["tenants"].([]int64)
		case pgx.StrictNamedArgs:
			tenants, _ = named["tenants"].([]int64)
		}
		slices.Reverse(tenants)
	}
	return s.Tx.Query(ctx, sql, args...)
}

// Within a group, row-level security separates no tenant from another. A statement that wrote a row
// for the wrong tenant of the group returns it, and the transaction fails.
func TestARowOfTheWrongTenantOfAGroupFailsIt(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	s := New(db.Pool(t, postgres.RoleAPI), nil)
	comments := s.children(commentKind)
	follows := s.edgesOf(followKind.Name)
	var edges []EdgeWrite
	var created []NewChild
	var edits []ChildEdit
	for tenant := int64(1); tenant <= 2; tenant++ {
		meta := Meta{Actor: "ann", tenant: tenant}
		edges = append(edges, EdgeWrite{Meta: meta, From: event.IDOf(tenant), To: "1000000", kind: &followKind})
		created = append(created, NewChild{Meta: meta, Object: event.IDOf(tenant), AuthorID: "1", Body: "x"})
		out, err := s.CreateChildren(t.Context(), tenant, commentKind, []NewChild{{Meta: meta, Object: "7", AuthorID: "1", Body: "first"}})
		if err != nil || out[0].Err != nil {
			t.Fatal(out, err)
		}
		edits = append(edits, ChildEdit{Meta: meta, ID: out[0].Child.ID, Body: new("second")})
		if _, err := s.PutEdges(t.Context(), tenant, followKind, []EdgeWrite{{Meta: meta, From: event.IDOf(tenant), To: "5"}}); err != nil {
			t.Fatal(err)
		}
	}
	removed := slices.Clone(edges)
	for i := range removed {
		removed[i].To = "5"
	}
	turn := []int{0, 1}
	for what, write := range map[string]func(tx *unit) error{
		"puts": func(tx *unit) error { return follows.putTurn(t.Context(), tx, edges, turn, make([]EdgeOutcome, 2)) },
		"a read of edges": func(tx *unit) error {
			rows := slices.Concat(removed, []EdgeWrite{removed[0], removed[1]})
			rows[2].tenant, rows[3].tenant = 2, 1 // swapped, they name the edges of the others
			return follows.current(t.Context(), tx, rows[2:], turn, getEdgesSQL, make([]EdgeOutcome, 2))
		},
		"creates": func(tx *unit) error {
			todo := []creation{{in: created[0]}, {in: created[1]}}
			for i := range todo {
				if err := todo[i].prepare(comments); err != nil {
					return err
				}
			}
			_, err := comments.tryCreate(t.Context(), tx, todo, turn, make([]ChildOutcome, 2))
			return err
		},
	} {
		err := s.write(t.Context(), place{tenants: []int64{1, 2}}, func(tx *unit) error {
			tx.Tx = swapped{tx.Tx}
			return write(tx)
		})
		if !errors.Is(err, errNotOfGroup) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// A removal or an edit finds no row of the other tenant by these ids, so it changes nothing.
	for what, write := range map[string]func(tx *unit) error{
		"removals": func(tx *unit) error {
			return follows.removeTurn(t.Context(), tx, removed, turn, make([]EdgeOutcome, 2))
		},
		"edits": func(tx *unit) error {
			changes := make([]change, 2)
			for i, e := range edits {
				changes[i] = change{meta: e.Meta, id: e.ID, value: e.Body}
			}
			kind := changeKind{event: event.Edited, sql: childEditSQL}
			return comments.changeTurn(t.Context(), tx, changes, turn, kind, make([]ChildOutcome, 2))
		},
	} {
		if err := s.write(t.Context(), place{tenants: []int64{1, 2}}, func(tx *unit) error {
			tx.Tx = swapped{tx.Tx}
			return write(tx)
		}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	var changed int
	if err := db.Pool(t, postgres.RoleSystem).QueryRow(t.Context(), `SELECT (SELECT count(*) FROM edges WHERE version <> 1 OR to_id <> '5')
		+ (SELECT count(*) FROM children WHERE version <> 1 OR body <> 'first')`).Scan(&changed); err != nil || changed != 0 {
		t.Errorf("%d rows changed, %v", changed, err)
	}
}

// Every way to write of ten tenants at once shares transactions, and none of them fails.
func TestGroupsOfTenantsWriteEachTheirOwn(t *testing.T) {
	t.Parallel()
	const tenants = 10
	db := testkit.Postgres(t)
	s := New(db.Pool(t, postgres.RoleAPI), nil)
	s.slots.groups = make(chan struct{}, 1)
	ids := make([]string, tenants+1)
	all := func(write func(tenant int64, meta Meta) error) {
		t.Helper()
		s.slots.groups <- struct{}{} // until all wait
		var wg sync.WaitGroup
		for tenant := int64(1); tenant <= tenants; tenant++ {
			wg.Go(func() {
				if err := write(tenant, Meta{Actor: fmt.Sprint("of ", tenant)}); err != nil {
					t.Errorf("tenant %d: %v", tenant, err)
				}
			})
		}
		testkit.Eventually(t, "all writes wait", func() (bool, error) { return s.Stats().Waiting == tenants, nil })
		<-s.slots.groups
		wg.Wait()
	}
	edge := func(out []EdgeOutcome, err error) error {
		if err == nil && (out[0].Err != nil || !out[0].Changed) {
			err = fmt.Errorf("%+v", out)
		}
		return err
	}
	child := func(tenant int64, out []ChildOutcome, err error) error {
		if err == nil && (out[0].Err != nil || !out[0].Changed) {
			err = fmt.Errorf("%+v", out)
		}
		if err == nil {
			ids[tenant] = out[0].Child.ID
		}
		return err
	}
	all(func(tenant int64, m Meta) error {
		return edge(s.PutEdges(t.Context(), tenant, followKind, []EdgeWrite{{Meta: m, From: "1", To: "2"}}))
	})
	all(func(tenant int64, m Meta) error {
		return edge(s.RemoveEdges(t.Context(), tenant, followKind, []EdgeWrite{{Meta: m, From: "1", To: "2", IfVersion: 1}}))
	})
	all(func(tenant int64, m Meta) error {
		out, err := s.CreateChildren(t.Context(), tenant, commentKind,
			[]NewChild{{Meta: m, Object: "7", AuthorID: "1", Body: fmt.Sprint("by ", tenant), Key: "k"}})
		return child(tenant, out, err)
	})
	all(func(tenant int64, m Meta) error {
		out, err := s.EditChildren(t.Context(), tenant, commentKind,
			[]ChildEdit{{Meta: m, ID: ids[tenant], IfVersion: 1, Body: new(fmt.Sprint("edited by ", tenant))}})
		return child(tenant, out, err)
	})
	all(func(tenant int64, m Meta) error {
		out, err := s.ModerateChildren(t.Context(), tenant, commentKind,
			[]ChildModeration{{Meta: m, ID: ids[tenant], IfVersion: 2, State: event.ModerationApproved}})
		return child(tenant, out, err)
	})
	all(func(tenant int64, m Meta) error {
		out, err := s.DeleteChildren(t.Context(), tenant, commentKind, []ChildDelete{{Meta: m, ID: ids[tenant], IfVersion: 3}})
		return child(tenant, out, err)
	})
	if got := s.Stats(); got.Alone != 0 || got.Groups != 6 {
		t.Errorf("%+v, want six transactions", got)
	}
	var wrong, events int
	if err := db.Pool(t, postgres.RoleSystem).QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM generate_series(1, $1) tenant
		         WHERE NOT EXISTS (SELECT FROM edges e WHERE e.tenant_id = tenant AND e.status = 'REMOVED' AND e.version = 2)
		            OR NOT EXISTS (SELECT FROM children c WHERE c.tenant_id = tenant AND c.body = 'edited by ' || tenant AND c.version = 4)
		            OR (SELECT count(*) FROM outbox_messages m
		                 WHERE m.tenant_id = tenant AND m.payload ->> 'actor' = 'of ' || tenant) <> 6),
		       (SELECT count(*) FROM outbox_messages)`, tenants).Scan(&wrong, &events); err != nil {
		t.Fatal(err)
	}
	if wrong != 0 || events != 6*tenants {
		t.Errorf("%d tenants are wrong, %d events", wrong, events)
	}
}
