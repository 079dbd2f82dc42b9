package threadcache

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/projections"
)

const ownKinds = `
objects: {lecture: lectures}
children:
  question:
    plural: questions
    parent: lecture
    threaded: true
    moderated: true
    attributes:
      votes: {type: integer, minimum: -5, maximum: 5, aggregate: true}
      accuracy: {type: integer, aggregate: true, minimum: 0, maximum: 100}
      topic: {type: string}
`

// TestChildrenOfEveryKind delivers the lives of children of kinds with other capabilities, in
// pieces and more than once. It compares the projection with the truth and with its own count. It
// repeats this after a repair, and after the projection was rebuilt.
func TestChildrenOfEveryKind(t *testing.T) {
	set := testkit.Kinds(t, ownKinds)
	for _, name := range []string{"review", "message", "question", "comment"} {
		kind := set.Children[name]
		t.Run(name, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			ctx := t.Context()
			p := Projection{kinds: func() *kinds.Set { return set }, bucketSize: 3, groupSize: 2, repairStep: 7}
			for _, s := range catalog.Truth.MakeTables(set) {
				if _, err := pool.Exec(ctx, s.SQL, s.Args...); err != nil {
					t.Fatal(err)
				}
			}
			r := rand.New(rand.NewPCG(7, uint64(len(name))))
			last := make(map[string]event.Child)
			var lives []event.Event
			for n := range 60 {
				var parent *event.Child
				if kind.Threaded && n%3 == 2 {
					c := last[made(n-1, nil).ID]
					parent = &c
				}
				first := made(n, parent)
				first.AuthorID = event.IDOf(n + 1) // one child each
				if !kind.Threaded {
					first.Slug, first.Path = "", ""
				}
				for v := range int64(1 + r.IntN(4)) {
					c := at(first, n+r.IntN(6), v+1)
					if len(kind.Attributes) > 0 && event.BodyTravels(c.AuthorState, c.ModerationState) {
						c.Attributes = attributesOf(kind, r)
					}
					lives = append(lives, eventOf(t, kind, c))
					last[c.ID] = c
				}
			}
			fill(t, pool.Exec, kind, last)
			shuffled := slices.Concat(lives, lives[:40])
			r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
			for batch := range slices.Chunk(shuffled, 17) {
				if err := apply(ctx, pool, p, batch); err != nil {
					t.Fatal(err)
				}
			}
			check := func(when string) {
				t.Helper()
				checked, err := p.Verify(ctx, pool, pool, func(d projections.Difference) { t.Errorf("%s: %s", when, d) })
				if err != nil || checked != int64(len(last)) {
					t.Fatalf("%s: %d checked, %v", when, checked, err)
				}
				compareKind(t, pool.BeginTx, when, kind, last)
			}
			check("delivered")

			var found []string // differences that windows report
			exec := func(sql string) {
				t.Helper()
				if _, err := pool.Exec(ctx, sql); err != nil {
					t.Fatal(err)
				}
			}
			exec(`UPDATE child_aggregates SET count = count + 1, sum = sum - 4`)
			exec(`UPDATE child_totals SET total = total + 3`)
			exec(`UPDATE child_lists SET body = body || 'x', version = version + 1
				WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY child_id LIMIT 3)`)
			for at, done := any(nil), false; !done; done = at == nil {
				_, next, err := p.Window(ctx, pool, pool, at, 25, func(d projections.Difference) { found = append(found, d.Field) })
				if err != nil {
					t.Fatal(err)
				}
				at = next
			}
			if !slices.Contains(found, "version") || !slices.Contains(found, "body") {
				t.Errorf("windows found %q", found)
			}
			var keys []projections.Key
			fields := make(map[string]bool)
			if _, err := p.Verify(ctx, pool, pool, func(d projections.Difference) {
				keys,
					fields[d.Field] = append(keys, d.Key), true
			}); err != nil {
				t.Fatal(err)
			}
			for _, name := range kind.Aggregates() {
				if !fields["aggregate of "+name] {
					t.Errorf("verify does not report the wrong aggregate of %s: %v", name, fields)
				}
			}
			repairKeys(t, pool, p, keys, func() {})
			check("repaired")

			for _, table := range p.Tables() {
				exec(`DELETE FROM ` + table)
			}
			var events []event.Event
			for e, err := range p.Truth(ctx, pool) {
				if err != nil {
					t.Fatal(err)
				}
				events = append(events, e)
			}
			if err := apply(ctx, pool, p, events); err != nil {
				t.Fatal(err)
			}
			check("made from the truth")

			var ids []string
			for id := range last {
				ids = append(ids, id)
			}
			if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
				held, err := p.Redact(ctx, tx, 1, ids, true)
				if err != nil {
					return err
				}
				redacted, err := p.Redact(ctx, tx, 1, ids, false)
				if err != nil || held == 0 || held != redacted {
					t.Errorf("%d held, %d redacted, %v", held, redacted, err)
				}
				held, err = p.Redact(ctx, tx, 1, ids, true)
				if held != 0 {
					t.Errorf("%d held after that", held)
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if !kind.Threaded { // rows without a path must have no entry in the indexes on paths
				var n int
				if err := pool.QueryRow(ctx, `SELECT count(*) FROM child_lists WHERE path IS NOT NULL OR slug IS NOT NULL`).Scan(
					&n); err != nil || n > 0 {
					t.Errorf("%d rows with a place, %v", n, err)
				}
			}
		})
	}
}

func attributesOf(k kinds.Child, r *rand.Rand) json.RawMessage {
	all := make(map[string]any)
	for _, name := range k.Aggregates() {
		if k.Attributes[name].Required || r.IntN(3) > 0 {
			all[name] = 1 + r.IntN(5)
		}
	}
	if k.Name == "question" {
		all["topic"] = "a, b"
	}
	raw, err := json.Marshal(all)
	if err != nil {
		panic(err)
	}
	return raw
}

func eventOf(t testing.TB, k kinds.Child, c event.Child) event.Event {
	t.Helper()
	e := toEvent(1, c)
	var err error
	if e.Payload, err = c.Encode(k.Names()); err != nil {
		t.Fatal(err)
	}
	e.AggregateType = k.Name
	return e
}

// fill writes the children to the truth.
func fill[R any](t *testing.T, exec func(context.Context, string, ...any) (R, error), k kinds.Child, all map[string]event.Child) {
	t.Helper()
	for _, c := range all {
		if _, err := exec(t.Context(), `INSERT INTO children_`+k.Name+
			` (tenant_id, kind, child_id, object_id, parent_id, slug, path, author_id, body, attributes, author_state, moderation_state,
		    version, created_at, updated_at) VALUES (1, $1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10, $11, $12, $13, $14)`,
			k.Name, c.ID, c.Parent, orNull(c.ReplyTo), orNull(c.Slug), orNull(c.Path), c.AuthorID, c.Body,
			orNull(string(c.Attributes)), c.AuthorState, c.ModerationState, c.Version, c.CreatedAt.Time, c.UpdatedAt.Time); err != nil {
			t.Fatal(err)
		}
	}
}

// compareKind compares the answers of reads with the children.
func compareKind(t *testing.T, begin func(context.Context, pgx.TxOptions) (pgx.Tx, error), when string, k kinds.Child,
	all map[string]event.Child) {
	t.Helper()
	ctx := t.Context()
	tx, err := begin(ctx, pgx.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, `SET LOCAL tidings.tenant = 1`); err != nil {
		t.Fatal(err)
	}
	var visible []string
	want := make(map[string]Aggregate)
	for _, c := range all {
		if !c.Visible() {
			continue
		}
		visible = append(visible, fmt.Sprint(c.CreatedAt.UnixMicro(), " ", c.ID))
		values := make(map[string]any)
		if len(c.Attributes) > 0 {
			if err := json.Unmarshal(c.Attributes, &values); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range k.Aggregates() {
			if v, ok := values[name].(float64); ok {
				want[name] = Aggregate{name, want[name].Count + 1, want[name].Sum + int64(v)}
			}
		}
	}
	slices.Sort(visible)
	places := func(page []event.Child, err error) (all []string) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range page {
			all = append(all, fmt.Sprint(c.CreatedAt.UnixMicro(), " ", c.ID))
		}
		return all
	}
	oldest := places(Page(ctx, tx, k.Name, "5", Oldest, nil, 100))
	if diff := gocmp.Diff(visible, oldest); diff != "" {
		t.Errorf("%s: oldest (-want +got):\n%s", when, diff)
	}
	for skip := range len(visible) {
		if diff := gocmp.Diff(visible[skip:min(len(visible), skip+4)],
			places(Skip(ctx, tx, k.Name, "5", Oldest, int64(skip), 4))); diff != "" {
			t.Errorf("%s: behind %d (-want +got):\n%s", when, skip, diff)
		}
	}
	newest := places(Page(ctx, tx, k.Name, "5", Newest, nil, 100))
	slices.Reverse(newest)
	if diff := gocmp.Diff(visible, newest); diff != "" {
		t.Errorf("%s: newest (-want +got):\n%s", when, diff)
	}
	five := Object{k.Name, "5"}
	got, err := ReadAggregates(ctx, tx, []string{k.Name}, []event.ID{"5"})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range got[five] {
		if a != want[a.Attribute] && a.Count+want[a.Attribute].Count > 0 {
			t.Errorf("%s: %+v, want %+v", when, a, want[a.Attribute])
		}
		delete(want, a.Attribute)
	}
	if len(want) > 0 {
		t.Errorf("%s: without %v", when, want)
	}
	sums, err := ReadSummaries(ctx, tx, []string{k.Name}, []event.ID{"5"})
	if sum := sums[five]; err != nil || sum.Visible != int64(len(visible)) || sum.Total != int64(len(all)) {
		t.Errorf("%s: %+v, %v; want %d of %d", when, sum, err, len(visible), len(all))
	}
}
