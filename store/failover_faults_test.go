//go:build faults

package store_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

// A synchronous standby stalls during all kinds of writes, something makes their rows visible
// early, and the clients repeat them. Then the primary dies, and the standby takes over without
// what it has not received.
func TestAnAnsweredWriteSurvivesASynchronousFailover(t *testing.T) {
	for what, show := range map[string]func(t *testing.T, pair *testkit.Pair, owner *pgxpool.Pool){
		"nothing happens":                       func(*testing.T, *testkit.Pair, *pgxpool.Pool) {},
		"an administrator cancels the waits":    signalWaiting("pg_cancel_backend"),
		"an administrator ends the connections": signalWaiting("pg_terminate_backend"),
		"the primary crashes and recovers":      func(t *testing.T, pair *testkit.Pair, _ *pgxpool.Pool) { pair.Restart(t) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			pair := testkit.PostgresPair(t)
			db := pair.DB(t)
			f, owner := on(t, db), db.Pool(t, postgres.RoleOwner)
			f.follow(t, "120", "2")
			before, err := f.CreateChildren(t.Context(), tenant, commentKind, []store.NewChild{
				{Meta: meta(), Object: "201", AuthorID: "1", Body: "before"}, {Meta: meta(), Object: "202", AuthorID: "1", Body: "before"}})
			if err != nil {
				t.Fatal(err)
			}
			all := deeds(before[0].Child.ID, before[1].Child.ID)
			pair.Link.Stall()
			answered := make([]bool, len(all))
			var mu sync.Mutex
			try := func(f fixture, within time.Duration) *sync.WaitGroup {
				var writers sync.WaitGroup
				for i, d := range all {
					writers.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), within)
						defer cancel()
						err := d.do(ctx, f)
						mu.Lock()
						defer mu.Unlock()
						if err == nil && !answered[i] {
							t.Logf("answered without a standby: %s", d.what)
						}
						answered[i] = answered[i] || err == nil
					})
				}
				return &writers
			}
			writers := try(f, 8*time.Second)
			testkit.Eventually(t, "commits to wait for the standby", func() (waiting bool, err error) {
				return waiting, owner.QueryRow(t.Context(),
					`SELECT count(*) >= 6 FROM pg_stat_activity WHERE wait_event = 'SyncRep'`).Scan(&waiting)
			})
			show(t, pair, owner)
			writers.Wait()
			if what == "nothing happens" {
				var events int
				if err := owner.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&events); err != nil || events != 3 {
					t.Errorf("the primary shows %d events before the standby has them, %v", events-3, err)
				}
				if slices.Contains(answered, true) {
					t.Error("a write was answered before the standby has it")
				}
			}
			try(f, 3*time.Second).Wait() // the clients repeat what had no answer
			db = pair.FailOver(t, db)
			f = on(t, db)
			count := func(sql string) (n int) {
				if err := f.system.QueryRow(t.Context(), sql).Scan(&n); err != nil {
					t.Fatalf("%s: %v", sql, err)
				}
				return n
			}
			for i, d := range all {
				if n, events := count(d.exists), count(d.events); answered[i] && (n != 1 || events != 1) {
					t.Errorf("%s was answered, and the promoted standby has it %d times with %d events", d.what, n, events)
				}
			}
			for _, d := range all { // nothing is stuck
				if err := d.do(t.Context(), f); err != nil {
					t.Errorf("%s after the failover: %v", d.what, err)
				}
				if n, events := count(d.exists), count(d.events); n != 1 || events != 1 {
					t.Errorf("%s exists %d times with %d events", d.what, n, events)
				}
			}
		})
	}
}
