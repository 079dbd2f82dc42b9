//go:build faults

package threadcache

import (
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

// A huge thread is repaired in steps, between which the consumer works on it. Each statement reads
// few of its children.
func TestAHugeThreadIsMendedInSlicesBetweenWhichTheConsumerGoesOn(t *testing.T) {
	db := testkit.Postgres(t)
	pool, ctx := db.Pool(t, postgres.RoleSystem), t.Context()
	p := New(kinds.Builtin)
	p.repairStep = 40
	const n = 400
	var all []event.Child
	write := func(changed ...event.Child) {
		t.Helper()
		var events []event.Event
		for _, c := range changed {
			if _, err := pool.Exec(ctx, putSQL, c.ID, c.Parent, c.ReplyTo, c.Slug, c.Path, c.AuthorID, c.Body, c.AuthorState,
				c.ModerationState, c.Version, c.CreatedAt.Time, c.UpdatedAt.Time); err != nil {
				t.Fatal(err)
			}
			events = append(events, toEvent(1, c))
		}
		if err := apply(ctx, pool, p, events); err != nil {
			t.Fatal(err)
		}
	}
	add := func() {
		var parent *event.Child
		if i := len(all); i%3 > 0 {
			parent = &all[i/2]
		}
		all = append(all, made(len(all), parent))
		write(all[len(all)-1])
	}
	for range n {
		add()
	}
	verify := func() (keys []projections.Key) {
		t.Helper()
		if _, err := p.Verify(ctx, pool, pool, func(d projections.Difference) { keys = append(keys, d.Key); t.Log(d) }); err != nil {
			t.Fatal(err)
		}
		return keys
	}
	if keys := verify(); len(keys) > 0 {
		t.Fatal("the projection is not what the events make it")
	}
	for _, sql := range []string{`UPDATE child_totals SET total = total + 7`, `UPDATE child_buckets SET visible = visible + 3`,
		`DELETE FROM child_lists WHERE right(child_id::text, 1) = '4'`} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	keys := verify()
	db.RowsPerStatement(t, 8*p.repairStep, "child_lists")
	steps := 0
	repairKeys(t, pool, p, keys, func() {
		steps++
		add() // new comments at the end, and changes in the whole thread
		for _, i := range []int{steps * 37 % n, n - 1 - steps*11%n} {
			all[i] = at(all[i], i, all[i].Version+1)
			write(all[i])
		}
	})
	if steps < 2*n/p.repairStep {
		t.Errorf("the repair took %d steps, want one for each %d children deleted and written", steps, p.repairStep)
	}
	db.RowsPerStatement(t, 1_000_000, "child_lists")
	if keys := verify(); len(keys) > 0 {
		t.Errorf("%d differences remain", len(keys))
	}
}
