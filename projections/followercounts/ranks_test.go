package followercounts

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/threadcache"
)

// answersFile has a kind whose sum ranks children, and one whose number does.
const answersFile = `
objects: {question: questions}
edges:
  verdict: {plural: verdicts, from: user, to: answer, forward: judged_answers, reverse: judges,
    attributes: {value: {enum: [-1, 1], aggregate: true, required: true}, face: {enum: [smile, frown], aggregate: true},
      weight: {type: integer}}}
  bookmark: {plural: bookmarks, from: user, to: hint, forward: bookmarked_hints, reverse: bookmarkers}
children:
  answer: {plural: answers, parent: question, ranked_by: verdict}
  hint: {plural: hints, parent: question, ranked_by: bookmark}
`

// site is a model of edges to children, and the events that lead to it.
type site struct {
	set      *kinds.Set
	rng      *rand.Rand
	children map[childKey]event.Child
	edges    map[string]map[key]event.Edge
	sent     []event.Event
}

func newSite(t *testing.T, seed uint64) *site {
	t.Logf("seed %d", seed)
	return &site{testkit.Kinds(t, answersFile), rand.New(rand.NewPCG(seed, 0)), map[childKey]event.Child{},
		map[string]map[key]event.Edge{"verdict": {}, "bookmark": {}}, nil}
}

func childID(n int) string { return fmt.Sprintf("01900000-0000-7000-8000-%012x", n) }

// child writes a version of a child: another one of three is not visible.
func (s *site) child(kind string, tenant int64, n int) {
	k := s.set.Children[kind]
	at := childKey{tenant, childID(n), kind}
	c, there := s.children[at]
	if !there {
		c = event.Child{ID: at.child, Parent: event.ID(fmt.Sprint("q", n%3)), AuthorID: "7", Body: "text", AuthorState: "ACTIVE",
			CreatedAt: event.Time{Time: start.Add(time.Duration(n/2) * time.Second)}, Actor: "test"}
	}
	c.Version++
	c.UpdatedAt, c.ModerationState = event.Time{Time: start.Add(time.Duration(c.Version) * time.Hour)}, "NONE"
	if s.rng.IntN(3) == 0 {
		c.ModerationState = "HIDDEN"
	}
	s.children[at] = c
	payload, err := c.Encode(k.Names())
	if err != nil {
		panic(err)
	}
	s.send(tenant, kind, c.Parent, event.Edited, payload)
}

// edge writes a version of an edge: it appears, changes its attributes or goes.
func (s *site) edge(kind string, tenant int64, user, n int) {
	k := s.set.Edges[kind]
	at := key{tenant, event.IDOf(int64(user)), event.ID(childID(n))}
	e, there := s.edges[kind][at]
	if !there {
		e = event.Edge{From: at.from, To: at.to, CreatedAt: event.Time{Time: start}, PositionedAt: event.Time{Time: start}, Actor: "test"}
	}
	e.Version++
	e.UpdatedAt = event.Time{Time: start.Add(time.Duration(e.Version) * time.Minute)}
	typ := event.Created
	if e.Status = event.StatusActive; there && s.rng.IntN(3) == 0 {
		e.Status, typ = event.StatusRemoved, event.Removed
	}
	if len(k.Attributes) > 0 && e.Status == event.StatusActive {
		attributes := map[string]any{"value": 2*s.rng.IntN(2) - 1, "weight": s.rng.IntN(9)}
		if s.rng.IntN(3) > 0 {
			attributes["face"] = []string{"smile", "frown"}[s.rng.IntN(2)]
		}
		e.Attributes, _ = json.Marshal(attributes)
	}
	s.edges[kind][at] = e
	payload, err := e.Encode(k.Names())
	if err != nil {
		panic(err)
	}
	s.send(tenant, kind, at.to, typ, payload)
}

func (s *site) send(tenant int64, kind string, aggregate event.ID, typ string, payload []byte) {
	s.sent = append(s.sent, event.Event{ID: fmt.Sprint(len(s.sent)), TenantID: tenant, AggregateType: kind, AggregateID: aggregate,
		Type: typ, Version: 1, Payload: payload})
}

// write makes events of both kinds.
func (s *site) write(n int) {
	for range n {
		tenant, child := 1+s.rng.Int64N(2), s.rng.IntN(12)
		switch s.rng.IntN(5) {
		case 0:
			s.child("answer", tenant, child)
		case 1:
			s.child("hint", tenant, child)
		case 2:
			s.edge("bookmark", tenant, s.rng.IntN(6), child)
		default:
			s.edge("verdict", tenant, s.rng.IntN(6), child)
		}
	}
}

// batches returns the events in the order of two partitions, in batches, some of them twice.
func (s *site) batches() (all [2][][]event.Event) {
	var parts [2][]event.Event
	for _, e := range s.sent {
		p := shardHash(e.AggregateID) % 2
		parts[p] = append(parts[p], e)
	}
	for p, events := range parts {
		for len(events) > 0 {
			n := min(len(events), 1+s.rng.IntN(7))
			for range 1 + s.rng.IntN(4)/3 {
				all[p] = append(all[p], events[:n])
			}
			events = events[n:]
		}
	}
	return all
}

// want returns the model's aggregates and orders.
func (s *site) want() (sums map[string]Sum, tops map[string][]threadcache.Ranked) {
	sums, tops = map[string]Sum{}, map[string][]threadcache.Ranked{}
	scores := map[childKey]int64{}
	for kind, edges := range s.edges {
		for k, e := range edges {
			if !e.Active() {
				continue
			}
			if kind == "bookmark" {
				scores[childKey{k.tenant, k.to.String(), "hint"}]++
				continue
			}
			var a struct {
				Value int64
				Face  string
			}
			if err := json.Unmarshal(e.Attributes, &a); err != nil {
				panic(err)
			}
			scores[childKey{k.tenant, k.to.String(), "answer"}] += a.Value
			add := func(attribute, value string, sum int64) {
				at := fmt.Sprint(k.tenant, " ", k.to, " ", attribute, " ", value)
				sums[at] = Sum{sums[at].Count + 1, sums[at].Sum + sum}
			}
			add("value", "", a.Value)
			add("value", fmt.Sprint(a.Value), 0)
			if a.Face != "" {
				add("face", a.Face, 0)
			}
		}
	}
	for k, c := range s.children {
		if c.Visible() {
			at := fmt.Sprint(k.tenant, " ", k.kind, " ", c.Parent)
			tops[at] = append(tops[at], threadcache.Ranked{ID: k.child, Score: scores[k], CreatedAt: c.CreatedAt.Time})
		}
	}
	for _, all := range tops {
		slices.SortFunc(all, func(a, b threadcache.Ranked) int {
			return -cmp.Or(cmp.Compare(a.Score, b.Score), a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
		})
	}
	return sums, tops
}

func (s *site) check(t *testing.T, pool *pgxpool.Pool, when string) {
	t.Helper()
	sums, tops := map[string]Sum{}, map[string][]threadcache.Ranked{}
	for tenant := range int64(3) {
		inTenant(t, pool, tenant, func(ctx context.Context, tx pgx.Tx) error {
			var ids []event.ID
			for n := range 12 {
				ids = append(ids, event.ID(childID(n)))
			}
			all, err := ReadAggregates(ctx, tx, []string{"verdict", "bookmark"}, ids)
			for o, some := range all {
				for _, a := range some {
					if a.Count != 0 || a.Sum.Sum != 0 {
						sums[fmt.Sprint(tenant, " ", o.ID, " ", a.Attribute, " ", a.Value)] = a.Sum
					}
				}
			}
			for _, kind := range []string{"answer", "hint"} {
				for _, object := range []event.ID{"q0", "q1", "q2"} {
					at := fmt.Sprint(tenant, " ", kind, " ", object)
					for after := (*threadcache.Ranked)(nil); ; { // pages of two
						page, err := threadcache.Top(ctx, tx, kind, object, after, 2)
						for i := range page {
							page[i].CreatedAt = page[i].CreatedAt.UTC()
						}
						if tops[at] = append(tops[at], page...); err != nil || len(page) < 2 {
							break
						}
						after = &page[1]
					}
					if len(tops[at]) == 0 {
						delete(tops, at)
					}
				}
			}
			return err
		})
	}
	wantSums, wantTops := s.want()
	if diff := gocmp.Diff(wantSums, sums); diff != "" {
		t.Errorf("%s: aggregates (-want +got):\n%s", when, diff)
	}
	if diff := gocmp.Diff(wantTops, tops); diff != "" {
		t.Errorf("%s: orders (-want +got):\n%s", when, diff)
	}
}

// TestAggregatesAndRanksAreThoseOfTheEdges applies two partitions at the same time, with batches
// twice, and all of it again.
func TestAggregatesAndRanksAreThoseOfTheEdges(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	s := newSite(t, rand.Uint64())
	p := New(func() *kinds.Set { return s.set })
	for round := range 4 {
		s.write(300)
		all := s.batches()
		done := make(chan error, len(all))
		for _, batches := range all {
			go func() {
				var failed error
				for _, events := range batches {
					failed = errors.Join(failed, onceApplied(t.Context(), pool, p, events))
				}
				done <- failed
			}()
		}
		for range all {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		s.check(t, pool, fmt.Sprint("round ", round))
	}
}

// onceApplied applies events without another try: a deadlock is an error.
func onceApplied(ctx context.Context, pool *pgxpool.Pool, p Projection, events []event.Event) error {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	if err := p.Apply(ctx, tx, events); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	return tx.Commit(ctx)
}

// TestVerifyAndRepairCoverAggregatesAndRanks damages each table.
func TestVerifyAndRepairCoverAggregatesAndRanks(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner, ctx := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner), t.Context()
	s := newSite(t, 7)
	p := New(func() *kinds.Set { return s.set })
	for _, m := range catalog.Truth.MakeTables(s.set) {
		if _, err := pool.Exec(ctx, m.SQL, m.Args...); err != nil {
			t.Fatal(err)
		}
	}
	s.write(400)
	for _, batches := range s.batches() {
		for _, events := range batches {
			if err := onceApplied(ctx, pool, p, events); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := pool.Exec(ctx, `INSERT INTO edges (tenant_id, kind, from_id, to_id, status, version, positioned_at, attributes)
	  SELECT tenant_id, kind, from_id, to_id, CASE WHEN active THEN 'ACTIVE' ELSE 'REMOVED' END, version, positioned_at, attributes
	  FROM edge_lists`); err != nil {
		t.Fatal(err)
	}
	for k, c := range s.children {
		if _, err := owner.Exec(ctx, `INSERT INTO children (tenant_id, kind, child_id, object_id, author_id, body, author_state,
			moderation_state, version, created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)`,
			k.tenant, k.kind, k.child, c.Parent, c.AuthorID, c.Body, c.AuthorState, c.ModerationState, c.Version,
			c.CreatedAt.Time, c.UpdatedAt.Time); err != nil {
			t.Fatal(err)
		}
	}
	var keys []projections.Key
	verify := func() (got []string) {
		keys = nil
		if _, err := p.Verify(ctx, pool, pool, func(d projections.Difference) {
			got, keys = append(got, d.String()), append(keys, d.Key)
		}); err != nil {
			t.Fatal(err)
		}
		return got
	}
	windows := func() (n int, found []string) {
		for next := any(nil); ; {
			checked, after, err := p.Window(ctx, pool, pool, next, 3, func(d projections.Difference) { found = append(found, d.String()) })
			if err != nil {
				t.Fatal(err)
			}
			n += int(checked)
			if next = after; next == nil {
				return n, found
			}
		}
	}
	if got := verify(); len(got) > 0 {
		t.Fatalf("equal tables differ: %q", got)
	}
	if n, got := windows(); len(got) > 0 || n != len(s.edges["verdict"])+len(s.edges["bookmark"])+len(s.children) {
		t.Errorf("windows compared %d rows and found %q", n, got)
	}
	for name, sql := range map[string]string{
		"a sum":           `UPDATE edge_aggregates SET sum = sum + 1 WHERE attribute = 'value' AND value = ''`,
		"a count":         `UPDATE edge_aggregates SET count = count + 1 WHERE attribute = 'face' AND value = 'smile'`,
		"a missing value": `DELETE FROM edge_aggregates WHERE value = '1' AND count > 0`,
		"a score":         `UPDATE child_ranks SET score = score + 1`,
		"a hidden child":  `UPDATE child_ranks SET visible = NOT visible`,
		"a version":       `UPDATE child_ranks SET version = version + 1 WHERE version > 0`,
		"missing ranks":   `DELETE FROM child_ranks WHERE kind = 'answer'`,
		"missing edges":   `DELETE FROM edge_lists WHERE active AND kind = 'verdict'`,
	} {
		tag, err := pool.Exec(ctx, sql)
		if err != nil || tag.RowsAffected() == 0 {
			t.Fatal(name, tag, err)
		}
		if _, found := windows(); len(found) == 0 {
			t.Errorf("%s: no window finds it", name)
		}
		if len(verify()) == 0 {
			t.Errorf("%s: verify does not find it", name)
		}
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			_, err := p.Repair(ctx, tx, pool, keys, func(int64, string, event.ID) bool { return false })
			return err
		}); err != nil {
			t.Fatal(name, err)
		}
		if got := verify(); len(got) > 0 {
			t.Errorf("%s: after the repair: %q", name, got)
		}
		s.check(t, pool, name)
	}
}

// TestAttributesThatOnlySQLWritersGiveAreNotCounted compares what the projection and the truth's
// statements make of them.
func TestAttributesThatOnlySQLWritersGiveAreNotCounted(t *testing.T) {
	pool, ctx := testkit.Postgres(t).Pool(t, postgres.RoleSystem), t.Context()
	s := newSite(t, 1)
	p := New(func() *kinds.Set { return s.set })
	if _, err := pool.Exec(ctx, `SELECT make_edge_kind('verdict', 'verdicts', 'user_id', 'answer_id', true, 0)`); err != nil {
		t.Fatal(err)
	}
	for n, attributes := range []string{`{"value": 1}`, `{"value": 1.5}`, `{"value": 99999999999999999999}`, `{"value": 2000000000}`,
		`{"value": "1"}`, `{"value": null}`, `{"value": [1]}`, `{"value": true}`, `{"face": "` + strings.Repeat("x", 3000) + `"}`,
		`{"face": {"a": 1}}`,
		`{"face": 7}`, `{"face": "other"}`, `{}`} {
		if _, err := pool.Exec(ctx, `INSERT INTO edges (tenant_id, kind, from_id, to_id, attributes) VALUES (1, 'verdict', $1, $2, $3)`,
			fmt.Sprint(n+1), childID(n%2), attributes); err != nil {
			t.Fatal(err)
		}
	}
	for e, err := range p.Truth(ctx, pool) {
		if err == nil {
			err = onceApplied(ctx, pool, p, []event.Event{e})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Verify(ctx, pool, pool, func(d projections.Difference) { t.Error(d) }); err != nil {
		t.Fatal(err)
	}
	inTenant(t, pool, 1, func(ctx context.Context, tx pgx.Tx) error {
		all, err := ReadAggregates(ctx, tx, []string{"verdict"}, []event.ID{event.ID(childID(0)), event.ID(childID(1))})
		var sum, count int64
		for _, some := range all {
			for _, a := range some {
				if a.Attribute == "value" && a.Value == "" {
					sum, count = sum+a.Sum.Sum, count+a.Count
				}
			}
		}
		if sum != 1 || count != 1 {
			t.Errorf("%d values with a sum of %d are counted, want 1", count, sum)
		}
		return err
	})
}

func TestAVoteForSomethingElseIsPermanent(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	s := newSite(t, 1)
	s.edge("verdict", 1, 1, 1)
	e := s.sent[0]
	e.AggregateID = "42"
	e.Payload = []byte(`{"user_id":"1","answer_id":"42","status":"ACTIVE","version":1,"attributes":{"value":1}}`)
	if err := onceApplied(t.Context(), pool, New(func() *kinds.Set { return s.set }), []event.Event{e}); !event.IsPermanent(err) {
		t.Errorf("%v", err)
	}
}
