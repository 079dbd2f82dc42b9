package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

// ended is a Store with a kind of children, and a kind of edges that lead to them.
type ended struct {
	shelved
	child kinds.Child
	edge  kinds.Edge
}

// eachEnded runs the test for a kind of edges without attributes in hash partitions, to children in
// hash partitions, and for one with attributes.
func eachEnded(t *testing.T, test func(t *testing.T, f ended)) {
	t.Helper()
	for _, name := range []string{"cheer", "nod"} {
		t.Run(name, func(t *testing.T) { test(t, openEnded(t, name)) })
	}
}

func openEnded(t *testing.T, edge string) ended {
	t.Helper()
	f := ended{shelved: openShelved(t), edge: testSet.Edges[edge]}
	makeKinds(t, f.db, testSet)
	f.child = testSet.Children[f.edge.To]
	f.shelver.kinds = func() *kinds.Set { return &kinds.Set{Children: map[string]kinds.Child{f.edge.To: f.child}} }
	return f
}

// write makes a child and returns its id.
func (f ended) write(object, author event.ID, replyTo string) string {
	f.t.Helper()
	out, err := f.CreateChildren(f.t.Context(), 1, f.child, []NewChild{{Meta: tester, Object: object, AuthorID: author, Body: "body",
		ReplyTo: replyTo}})
	if err != nil || out[0].Err != nil {
		f.t.Fatal(err, out)
	}
	return out[0].Child.ID
}

func (f ended) edgeTo(child string, from event.ID) EdgeWrite {
	w := EdgeWrite{Meta: tester, From: from, To: event.ID(child)}
	if len(f.edge.Attributes) > 0 {
		w.Attributes = json.RawMessage(`{"value": 1}`)
	}
	return w
}

// puts puts edges from a user to children in one slice.
func (f ended) puts(from event.ID, children ...string) []EdgeOutcome {
	var all []EdgeWrite
	for _, c := range children {
		all = append(all, f.edgeTo(c, from))
	}
	out, err := f.PutEdges(f.t.Context(), 1, f.edge, all)
	if err != nil {
		f.t.Error(err)
		return make([]EdgeOutcome, len(children))
	}
	return out
}

func (f ended) erase(ids ...string) int {
	f.t.Helper()
	n, err := New(f.system, nil).EraseChildren(f.t.Context(), 1, f.child, testSet.EdgesTo(f.child.Name), ids, false, Meta{Actor: "officer"},
		(&free{}).Fence)
	if err != nil {
		f.t.Error(err)
	}
	return n
}

func (f ended) remover() *Remover {
	r := newRemover(f.t, f.system)
	r.kinds = func() *kinds.Set { return testSet }
	return r
}

// edges returns the edges with their states, ordered, and how many events they have.
func (f ended) edges() (all []string, events int) {
	f.t.Helper()
	rows, _ := f.system.Query(f.t.Context(), `SELECT from_id || ' ' || to_id || ' ' || status FROM edges WHERE kind = $1
		ORDER BY from_id, to_id`, f.edge.Name)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil {
		err = f.system.QueryRow(f.t.Context(), `SELECT count(*) FROM outbox_messages WHERE aggregate_type = $1`, f.edge.Name).Scan(&events)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return all, events
}

// begin opens a transaction that rolls back when the test ends, and runs statements in it.
func (f ended) begin(sql string, args ...any) pgx.Tx {
	f.t.Helper()
	tx, err := f.db.Pool(f.t, postgres.RoleOwner).Begin(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = tx.Rollback(f.t.Context()) })
	if _, err := tx.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
	return tx
}

func (f ended) commit(tx pgx.Tx) {
	f.t.Helper()
	if err := tx.Commit(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
}

// waiting waits until n sessions of the database wait for a lock.
func (f ended) waiting(n int) {
	f.t.Helper()
	testkit.Eventually(f.t, fmt.Sprint(n, " sessions to wait for a lock"), func() (bool, error) {
		var have int
		err := f.db.Pool(f.t, postgres.RoleOwner).QueryRow(f.t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&have)
		return have == n, err
	})
}

// isFree reports whether another transaction can lock a child against everybody.
func (f ended) isFree(table, id string) bool {
	f.t.Helper()
	_, err := f.system.Exec(f.t.Context(), `SELECT FROM `+table+` WHERE child_id = $1 FOR UPDATE NOWAIT`, id)
	if err != nil && !postgres.IsLockTimeout(err) {
		f.t.Fatal(err)
	}
	return err == nil
}

func TestAnEdgeToAChildNeedsAChildThatEverybodyMaySee(t *testing.T) {
	t.Parallel()
	eachEnded(t, func(t *testing.T, f ended) {
		ctx := t.Context()
		moderated := func(object event.ID, state string) string {
			id := f.write(object, "7", "")
			out, err := f.ModerateChildren(ctx, 1, f.child, []ChildModeration{{Meta: tester, ID: id, State: state}})
			if err != nil || out[0].Err != nil {
				t.Fatal(err, out)
			}
			return id
		}
		visible, pending := f.write("1", "7", ""), moderated("2", event.ModerationPending)
		hidden, removed := moderated("3", event.ModerationHidden), moderated("4", event.ModerationRemoved)
		deleted, erased, shelved := f.write("5", "7", ""), f.write("6", "7", ""), f.write("9", "7", "")
		if out := f.puts("1", visible, deleted, erased); out[0].Err != nil || out[1].Err != nil || out[2].Err != nil {
			t.Fatal(out)
		}
		if out, err := f.DeleteChildren(ctx, 1, f.child, []ChildDelete{{Meta: tester, ID: deleted}}); err != nil || out[0].Err != nil {
			t.Fatal(err, out)
		}
		f.erase(erased)
		for f.run()[CountThreadsShelved] > 0 {
		}
		// Writes bring back all threads but the one under 9.
		for _, id := range []string{visible, pending, hidden, removed} {
			if _, err := f.ModerateChildren(ctx, 1, f.child, []ChildModeration{{Meta: tester, ID: id,
				State: event.ModerationApproved}}); err != nil {
				t.Fatal(err)
			}
		}
		for id, state := range map[string]string{pending: event.ModerationPending, hidden: event.ModerationHidden,
			removed: event.ModerationRemoved} {
			if _, err := f.ModerateChildren(ctx, 1, f.child, []ChildModeration{{Meta: tester, ID: id, State: state}}); err != nil {
				t.Fatal(err)
			}
		}
		var there bool
		if err := f.system.QueryRow(ctx, `SELECT EXISTS (SELECT FROM children_archive WHERE child_id = $1)`, shelved).
			Scan(&there); err != nil || !there {
			t.Fatal("the thread is not on the shelf", err)
		}
		unknown, foreign := uuid.NewString(), ""
		other, err := f.CreateChildren(ctx, 2, f.child, []NewChild{{Meta: tester, Object: "1", AuthorID: "7", Body: "body"}})
		if err != nil || other[0].Err != nil {
			t.Fatal(err, other)
		}
		foreign = other[0].Child.ID
		_, before := f.edges()
		cases := []struct {
			name, id, state string // state is that of a child that takes no edges
			err             error
		}{
			{"a visible child", visible, "", nil}, {"a pending child", pending, "", nil}, {"a shelved child", shelved, "", nil},
			{"a hidden child", hidden, event.StateHidden, nil}, {"a removed child", removed, event.StateRemoved, nil},
			{"a deleted child", deleted, event.StateDeleted, nil}, {"an erased child", erased, event.StateErased, nil},
			{"an unknown child", unknown, "", ErrTargetUnknown}, {"a child of another tenant", foreign, "", ErrNotFound},
			{"no UUID", "x", "", ErrInvalid}, {"another form", strings.ToUpper(visible), "", ErrInvalid},
		}
		check := func(how string, from event.ID, out []EdgeOutcome) (made int) {
			t.Helper()
			for i, c := range cases {
				var gone *TargetGoneError
				is := errors.As(out[i].Err, &gone)
				if is != (c.state != "") || is && (gone.State != c.state || gone.Kind != f.child.Name || string(gone.ID) != c.id) ||
					c.err != nil && !errors.Is(out[i].Err, c.err) || out[i].Changed != (out[i].Err == nil) {
					t.Errorf("%s: %s: %+v", how, c.name, out[i])
				}
				if c.state == "" && c.err == nil && (out[i].Err != nil || out[i].Edge.From != from || string(out[i].Edge.To) != c.id) {
					t.Errorf("%s: %s: %+v", how, c.name, out[i])
				}
				if out[i].Changed {
					made++
				}
			}
			return made
		}
		var ids []string
		var single []EdgeOutcome
		for _, c := range cases {
			ids = append(ids, c.id)
			single = append(single, f.puts("2", c.id)...)
		}
		made := check("alone", "2", single) + check("in a slice", "3", f.puts("3", ids...))
		if _, after := f.edges(); after != before+made || made != 6 {
			t.Errorf("%d events of %d puts", after-before, made)
		}

		// An edge that exists is refused like a new one, and can be removed.
		var gone *TargetGoneError
		if out := f.puts("1", deleted); !errors.As(out[0].Err, &gone) {
			t.Errorf("an edge that exists: %+v", out)
		}
		if out, err := f.RemoveEdges(ctx, 1, f.edge, []EdgeWrite{f.edgeTo(deleted, "1"), f.edgeTo(unknown, "1"),
			f.edgeTo("x", "1")}); err != nil || out[0].Err != nil || !out[0].Changed || out[1].Err != nil ||
			!errors.Is(out[2].Err, ErrInvalid) {
			t.Errorf("removals: %+v, %v", out, err)
		}
		if len(f.edge.Attributes) > 0 {
			merge := f.edgeTo(visible, "1")
			merge.Merge, merge.Attributes = true, json.RawMessage(`{"value": -1}`)
			late := merge
			late.To = event.ID(hidden)
			out, err := f.PutEdges(ctx, 1, f.edge, []EdgeWrite{merge, late})
			if err != nil || !out[0].Changed || !errors.As(out[1].Err, &gone) || gone.State != event.StateHidden {
				t.Errorf("merges: %+v, %v", out, err)
			}
		}
	})
}

// A writer with SQL cannot make an edge whose target nobody would find.
func TestTheTableRefusesATargetInAnotherForm(t *testing.T) {
	t.Parallel()
	eachEnded(t, func(t *testing.T, f ended) {
		for target, fits := range map[string]bool{"0196b2d4-7c00-7000-8000-00000000000a": true,
			"0196B2D4-7C00-7000-8000-00000000000A": false, "42": false} {
			_, err := f.db.Pool(t, postgres.RoleWriter).Exec(t.Context(), fmt.Sprintf(`INSERT INTO %s (tenant_id, %s, %s)
				VALUES (1, '7', $1)`, f.edge.Plural, f.edge.Ends[0], f.edge.Ends[1]), target)
			if postgres.IsCheck(err) == fits || fits && err != nil {
				t.Errorf("%s: %v", target, err)
			}
		}
	})
}

// The put has found the child, and has not committed. The erasure waits for it, finds its edge, and
// has it removed.
func TestAnErasureRemovesAnEdgeWhoseWriterWasFaster(t *testing.T) {
	t.Parallel()
	eachEnded(t, func(t *testing.T, f ended) {
		c, d := f.write("1", "7", ""), f.write("2", "7", "")
		holder := f.begin(fmt.Sprintf(`INSERT INTO edges_%s (tenant_id, from_id, to_id) VALUES (1, '8', $1)`, f.edge.Name), c)
		put, erased := make(chan []EdgeOutcome, 1), make(chan int, 1)
		go func() { put <- f.puts("8", c, d) }()
		f.waiting(1) // the put, for the edge
		go func() { erased <- f.erase(c) }()
		f.waiting(2)
		if err := holder.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if out := <-put; !out[0].Created || !out[1].Created {
			t.Errorf("put: %+v", out)
		}
		if n := <-erased; n != 1 {
			t.Errorf("erased %d", n)
		}
		f.remover().finish(t)
		want := []string{"8 " + c + " REMOVED", "8 " + d + " ACTIVE"}
		if c > d {
			want[0], want[1] = want[1], want[0]
		}
		if all, events := f.edges(); !cmp.Equal(all, want) || events != 3 {
			t.Errorf("%d events, edges %v", events, all)
		}
	})
}

// The erasure has erased the child, and has not committed. The put waits for it, and is refused.
func TestAnEdgeIsRefusedIfTheErasureWasFaster(t *testing.T) {
	t.Parallel()
	eachEnded(t, func(t *testing.T, f ended) {
		c, d := f.write("1", "7", ""), f.write("2", "7", "")
		holder := f.begin(`SELECT FROM children WHERE child_id = $1 FOR UPDATE`, d)
		put, erased := make(chan []EdgeOutcome, 1), make(chan int, 1)
		go func() { erased <- f.erase(c, d) }()
		f.waiting(1)
		go func() { put <- f.puts("8", c, f.write("3", "7", "")) }()
		f.waiting(2)
		if err := holder.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		var gone *TargetGoneError
		if out := <-put; !errors.As(out[0].Err, &gone) || gone.State != event.StateErased || !out[1].Created {
			t.Errorf("put: %+v", out)
		}
		if n := <-erased; n != 2 {
			t.Errorf("erased %d", n)
		}
		var removals int
		if err := f.system.QueryRow(t.Context(), `SELECT count(*) FROM edge_removals`).Scan(&removals); err != nil || removals != 0 {
			t.Errorf("%d removals of children without edges, %v", removals, err)
		}
	})
}

// A put waits for a child that moves to or from the shelf, and then finds it on the other side.
func TestAnEdgeFollowsItsChildToTheOtherTable(t *testing.T) {
	t.Parallel()
	eachEnded(t, func(t *testing.T, f ended) {
		c := f.write("1", "7", "")
		for n, tables := range [][2]string{{"children_" + f.child.Name, "children_archive_" + f.child.Name},
			{"children_archive_" + f.child.Name, "children_" + f.child.Name}} {
			mover := f.begin(fmt.Sprintf(`WITH gone AS (DELETE FROM %[1]s WHERE child_id = $1 RETURNING *)
				INSERT INTO %[2]s (%[3]s) SELECT %[3]s FROM gone`, tables[0], tables[1], movedColumns), c)
			put := make(chan []EdgeOutcome, 1)
			go func() { put <- f.puts(event.IDOf(n+8), c) }()
			f.waiting(1)
			f.commit(mover)
			if out := <-put; !out[0].Created {
				t.Errorf("to %s: %+v", tables[1], out)
			}
		}
	})
}

// Writers of edges, erasures and returns wait for children in one order: those on the shelf first,
// each table by id.
func TestAPutAndAReturnLockChildrenInTheSameOrder(t *testing.T) {
	t.Parallel()
	eachEnded(t, func(t *testing.T, f ended) {
		here := f.write("1", "7", "")
		// In the order of the thread, the last one is the second.
		first := f.write("2", "7", "")
		second, third := f.write("2", "8", ""), f.write("2", "9", first)
		f.shelver.after = 0
		table, shelf := "children_"+f.child.Name, "children_archive_"+f.child.Name
		mover := f.begin(fmt.Sprintf(`WITH gone AS (DELETE FROM %[1]s WHERE object_id = '2' RETURNING *)
			INSERT INTO %[2]s (%[3]s) SELECT %[3]s FROM gone ORDER BY child_id DESC`, table, shelf, movedColumns))
		if _, err := mover.Exec(t.Context(), `INSERT INTO archived_threads (tenant_id, kind, object_id, archive_id, state, children)
			VALUES (1, $1, '2', 1, 'ARCHIVED', 3)`, f.child.Name); err != nil {
			t.Fatal(err)
		}
		f.commit(mover)
		// The planner then reads the shelf as it is on disk, from the last child to the first.
		if _, err := f.db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `ANALYZE `+shelf); err != nil {
			t.Fatal(err)
		}

		holder := f.begin(`SELECT FROM children_archive WHERE child_id = $1 FOR UPDATE`, second)
		put := make(chan []EdgeOutcome, 1)
		go func() { put <- f.puts("8", here, third, second, first) }()
		f.waiting(1)
		if f.isFree(shelf, first) || !f.isFree(shelf, third) || !f.isFree(table, here) {
			t.Error("the put locks children in another order")
		}
		if err := holder.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, o := range <-put {
			if !o.Created {
				t.Errorf("edge %d: %+v", i, o)
			}
		}

		holder = f.begin(`SELECT FROM children_archive WHERE child_id = $1 FOR KEY SHARE`, second)
		back := make(chan error, 1)
		go func() {
			_, err := f.returnSome(t.Context(), 1, f.children(f.child), "2")
			back <- err
		}()
		f.waiting(1)
		if f.isFree(shelf, first) || !f.isFree(shelf, third) {
			t.Error("the return locks children in another order")
		}
		if err := holder.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-back; err != nil {
			t.Error(err)
		}
	})
}

// An erasure has all edges to its children removed, shelved or not: each once, by an ordinary
// removal in the name of the erasure.
func TestAnErasureRemovesTheEdgesToItsChildren(t *testing.T) {
	t.Parallel()
	eachEnded(t, func(t *testing.T, f ended) {
		ctx := t.Context()
		shelved := f.write("1", "7", "")
		f.puts("3", shelved)
		f.puts("4", shelved)
		if f.run()[CountThreadsShelved] != 1 {
			t.Fatal("the thread is not on the shelf")
		}
		here, bare, other := f.write("2", "7", ""), f.write("3", "7", ""), f.write("4", "8", "")
		f.puts("3", here, other)
		if n := f.erase(shelved, here, bare, uuid.NewString()); n != 3 {
			t.Errorf("erased %d", n)
		}
		rows, _ := f.system.Query(ctx, `SELECT concat_ws(' ', tenant_id, object, object_id, kinds, direction, actor)
			FROM edge_removals ORDER BY 1`)
		asked, err := pgx.CollectRows(rows, pgx.RowTo[string])
		want, by := []string{}, strings.Join(names(testSet.EdgesTo(f.child.Name)), ",")
		for _, id := range []string{shelved, here} {
			want = append(want, fmt.Sprintf("1 %s %s {%s} to officer", f.child.Name, id, by))
		}
		if err != nil || cmp.Diff(want, asked) != "" {
			t.Errorf("%v (-want +got):\n%s", err, cmp.Diff(want, asked))
		}
		f.remover().finish(t)
		all, events := f.edges()
		want = []string{"3 " + shelved + " REMOVED", "3 " + here + " REMOVED", "3 " + other + " ACTIVE", "4 " + shelved + " REMOVED"}
		if diff := cmp.Diff(want, all); diff != "" || events != 7 {
			t.Errorf("%d events (-want +got):\n%s", events, diff)
		}
		// A second erasure finds edges that somebody put past the API.
		if _, err := f.system.Exec(ctx, `UPDATE edges SET status = 'ACTIVE', version = version + 1 WHERE to_id = $1`, here); err != nil {
			t.Fatal(err)
		}
		f.erase(here)
		f.remover().finish(t)
		if again, _ := f.edges(); cmp.Diff(want, again) != "" {
			t.Errorf("(-want +got):\n%s", cmp.Diff(want, again))
		}
	})
}

func names(edges []kinds.Edge) (all []string) {
	for _, e := range edges {
		all = append(all, e.Name)
	}
	return all
}

// A lost edge that is written again after the erasure of its child is removed again, whichever of
// both the truth had lost.
func TestALostEdgeToAnErasedChildIsRemovedAgain(t *testing.T) {
	t.Parallel()
	f, ctx := openEnded(t, "nod"), t.Context()
	c, d := f.write("1", "7", ""), f.write("2", "7", "")
	f.puts("4", d)
	at := event.Time{Time: time.Now().UTC().Truncate(time.Microsecond)}
	lost, err := EdgeEvent(f.edge, &State[event.Edge]{TenantID: 1, Object: event.Edge{From: "3", To: event.ID(c),
		Status: event.StatusActive, Version: 1, CreatedAt: at, PositionedAt: at, UpdatedAt: at,
		Attributes: f.edgeTo(c, "3").Attributes, Actor: "tester"}})
	if err != nil {
		t.Fatal(err)
	}
	state, err := f.GetChild(ctx, 1, f.child, d)
	if err != nil {
		t.Fatal(err)
	}
	state.AuthorState, state.Body, state.Attributes, state.Actor = event.AuthorErased, "", nil, "officer"
	state.Version++
	erasure, err := ChildEvent(f.child, &State[event.Child]{TenantID: 1, Object: state})
	if err != nil {
		t.Fatal(err)
	}
	odd := lost // of a writer with SQL
	odd.AggregateID, odd.Payload = "x", json.RawMessage(strings.ReplaceAll(string(lost.Payload), c, "x"))
	f.erase(c)
	if _, err := New(f.system, nil).RedoFromHistory(ctx, testSet, []event.Event{lost, odd, erasure}, "restore"); err != nil {
		t.Fatal(err)
	}
	if all, _ := f.edges(); !cmp.Equal(all, []string{"3 " + c + " ACTIVE", "4 " + d + " ACTIVE"}) {
		t.Errorf("edges %v", all)
	}
	f.remover().finish(t)
	if all, _ := f.edges(); !cmp.Equal(all, []string{"3 " + c + " REMOVED", "4 " + d + " REMOVED"}) {
		t.Errorf("edges %v", all)
	}
}

// Random writers put and remove edges to children while others delete, hide and erase these, and
// threads move to the shelf and back. No call fails. In the end no edge leads to an erased child,
// and no put was accepted after its child was gone.
func TestRandomEdgesToChildrenThatGo(t *testing.T) {
	t.Parallel()
	seed, _ := testkit.Seed(t)
	eachEnded(t, func(t *testing.T, f ended) {
		ctx := t.Context()
		var all []string
		for i := range 12 {
			all = append(all, f.write(event.IDOf(i%4), event.IDOf(i), "")) // one per author and object
		}
		var gone sync.Map    // children that are gone for good
		var lease sync.Mutex // of the jobs that shelve and erase
		var writers, movers sync.WaitGroup
		moving, stop := context.WithCancel(ctx)
		defer stop()
		movers.Go(func() {
			for moving.Err() == nil {
				lease.Lock()
				err := f.shelver.Run(moving, &free{})
				lease.Unlock()
				if err != nil && moving.Err() == nil {
					t.Error(err)
				}
			}
		})
		movers.Go(func() {
			r := f.remover()
			for moving.Err() == nil {
				if _, err := r.runOnce(moving); err != nil && moving.Err() == nil {
					t.Error(err)
				}
			}
		})
		stores := []*Store{f.Store, New(f.db.Pool(t, postgres.RoleAPI), nil)}
		for worker := range uint64(8) {
			r := rand.New(rand.NewPCG(seed, worker))
			s := stores[worker%2]
			writers.Go(func() {
				for range 40 {
					var some []EdgeWrite
					before := map[string]bool{}
					for range 1 + r.IntN(2)*r.IntN(6) {
						id := all[r.IntN(len(all))]
						_, before[id] = gone.Load(id)
						some = append(some, f.edgeTo(id, event.IDOf(r.IntN(3))))
					}
					var err error
					if r.IntN(4) == 0 {
						_, err = s.RemoveEdges(ctx, 1, f.edge, some)
					} else {
						var out []EdgeOutcome
						out, err = s.PutEdges(ctx, 1, f.edge, some)
						for i, o := range out {
							var target *TargetGoneError
							if is := errors.As(o.Err, &target); o.Err != nil && !is || !is && before[string(some[i].To)] {
								t.Errorf("seed %d: a put: %+v", seed, o)
							}
						}
					}
					if err != nil {
						t.Errorf("seed %d: %v", seed, err)
					}
				}
			})
		}
		writers.Go(func() {
			r := rand.New(rand.NewPCG(seed, 99))
			for _, i := range r.Perm(len(all))[:9] {
				id := all[i]
				var out []ChildOutcome
				var err error
				switch r.IntN(3) {
				case 0:
					lease.Lock()
					f.erase(id, all[r.IntN(len(all))])
					lease.Unlock()
				case 1:
					out, err = f.DeleteChildren(ctx, 1, f.child, []ChildDelete{{Meta: tester, ID: id}})
				default:
					out, err = f.ModerateChildren(ctx, 1, f.child, []ChildModeration{{Meta: tester, ID: id,
						State: event.ModerationRemoved}})
				}
				if err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
				if len(out) > 0 && out[0].Err != nil && !errors.As(out[0].Err, new(*StateError)) {
					continue // its thread still returns
				}
				gone.Store(id, true)
			}
		})
		writers.Wait()
		stop()
		movers.Wait()
		// The last slice of a mover that was stopped may still hold a removal in the server.
		testkit.Eventually(t, "no removal is unfinished", func() (bool, error) {
			f.remover().finish(t)
			var left int
			err := f.system.QueryRow(ctx, `SELECT count(*) FROM edge_removals WHERE finished_at IS NULL`).Scan(&left)
			return left == 0, err
		})
		var toErased, toOthers, doubled, lacking int
		if err := f.system.QueryRow(ctx, `
			SELECT count(*) FILTER (WHERE c.author_state = 'ERASED'), count(*) FILTER (WHERE c.author_state <> 'ERASED')
			  FROM edges e LEFT JOIN (SELECT * FROM children UNION ALL SELECT * FROM children_archive) c ON c.child_id = e.to_id::uuid
			 WHERE e.kind = $1 AND e.status = 'ACTIVE'`, f.edge.Name).
			Scan(&toErased, &toOthers); err != nil || toErased > 0 || toOthers == 0 {
			t.Errorf("seed %d: %d edges lead to erased children, %d to others: %v", seed, toErased, toOthers, err)
		}
		if err := f.system.QueryRow(ctx, `
			SELECT count(*) FILTER (WHERE events <> versions), count(*) FILTER (WHERE versions <> newest) FROM (
			  SELECT count(*) AS events, count(DISTINCT m.payload ->> 'version') AS versions, max(e.version) AS newest
			    FROM edges e JOIN outbox_messages m ON m.aggregate_type = e.kind AND m.aggregate_id = e.to_id
			     AND m.payload ->> 'user_id' = e.from_id WHERE e.kind = $1 GROUP BY e.from_id, e.to_id) x`, f.edge.Name).
			Scan(&doubled, &lacking); err != nil || doubled+lacking > 0 {
			t.Errorf("seed %d: %d edges have an event twice, %d lack one: %v", seed, doubled, lacking, err)
		}
	})
}
