//go:build faults

package relay

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// A synchronous standby stalls, and the primary shows commits that the standby does not have. The
// relay must wait. Then the primary dies, the standby takes over without these commits, and a relay
// continues there.
func TestNoRelayPublishesWhatAFailoverTakesBack(t *testing.T) {
	const insert = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 1, 'post', %d, 'lost', '{}' FROM generate_series(1, %d)`
	const shown = `SELECT count(*) = %d FROM outbox_messages WHERE event_type = 'lost'`
	cancel := func(t *testing.T, _ *testkit.Pair, owner *pgxpool.Pool) {
		if _, err := owner.Exec(t.Context(), `SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'
			AND application_name = 'writer'`); err != nil {
			t.Error(err)
		}
	}
	crash := func(t *testing.T, pair *testkit.Pair, _ *pgxpool.Pool) { pair.Restart(t) }
	for what, c := range map[string]struct {
		lost string // a statement that waits for the standby
		seen string // checks whether the primary shows it
		show func(t *testing.T, pair *testkit.Pair, owner *pgxpool.Pool)
	}{
		"somebody cancels the wait of a row": {fmt.Sprintf(insert, 1, 1), fmt.Sprintf(shown, 1), cancel},
		"the primary recovers many rows":     {fmt.Sprintf(insert, 1, 300), fmt.Sprintf(shown, 300), crash},
		"a resize": {`UPDATE outbox_partitions SET closing = true WHERE partition = 0`,
			`SELECT closing FROM outbox_partitions WHERE partition = 0`, cancel},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			pair, b := testkit.PostgresPair(t), testkit.NATS(t)
			db := pair.DB(t)
			pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
			rng := seeded(t)
			if err := appendPairs(t.Context(), pool, rng, 20); err != nil {
				t.Fatal(err)
			}
			stop := start(t, newRelay(t, pool, b))
			awaitDrained(t, t.Context(), pool, time.Minute)
			js, err := jetstream.New(b.Connect(t))
			if err != nil {
				t.Fatal(err)
			}
			messages := func() (n uint64) {
				streams, err := broker.Streams(t.Context(), js, b.Config())
				for _, s := range streams {
					n += s.Messages
				}
				if err != nil {
					t.Error(err)
				}
				return n
			}
			before := messages()

			pair.Link.Stall()
			told := make(chan struct{})
			go func() {
				defer close(told)
				_, err := owner.Exec(t.Context(), `SET application_name = 'writer'; `+c.lost)
				t.Logf("the writer got %v", err)
			}()
			testkit.Eventually(t, "the writer to wait for the standby", func() (waits bool, err error) {
				return waits, owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'
					AND application_name = 'writer')`).Scan(&waits)
			})
			c.show(t, pair, owner)
			<-told
			testkit.Eventually(t, "the primary to show the change", func() (seen bool, err error) {
				return seen, owner.QueryRow(t.Context(), c.seen).Scan(&seen)
			})
			testkit.Eventually(t, "the relay to wait for the standby", func() (waits bool, err error) {
				err = owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'
					AND query LIKE '%postgres.durable%')`).Scan(&waits)
				return waits || messages() > before, err
			})
			if messages() > before {
				t.Error("the relay published what the standby does not have")
			}
			db = pair.FailOver(t, db)
			stop()
			pool = db.Pool(t, postgres.RoleSystem)
			if err := appendPairs(t.Context(), pool, rng, 20); err != nil {
				t.Fatal(err)
			}
			start(t, newRelay(t, pool, b))
			awaitDrained(t, t.Context(), pool, time.Minute)
			checkStream(t, t.Context(), pool, b)
			if all, err := outbox.Partitions(t.Context(), pool); err != nil || all[0].Closed {
				t.Errorf("%+v, %v", all, err)
			}
		})
	}
}

// TestAFrozenPrimaryThatThawsPublishesNothing: the primary freezes, and its synchronous standby
// takes over. When the old primary thaws, a writer and a relay still use it.
func TestAFrozenPrimaryThatThawsPublishesNothing(t *testing.T) {
	t.Parallel()
	pair, b := testkit.PostgresPair(t), testkit.NATS(t)
	db, rng := pair.DB(t), seeded(t)
	old, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	if err := appendPairs(t.Context(), old, rng, 20); err != nil {
		t.Fatal(err)
	}
	start(t, newRelay(t, old, b))
	awaitDrained(t, t.Context(), old, time.Minute)
	if err := owner.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	pair.Freeze(t)
	promoted := pair.Promote(t, db).Pool(t, postgres.RoleSystem)
	start(t, newRelay(t, promoted, b))
	more := func() {
		t.Helper()
		if err := appendPairs(t.Context(), promoted, rng, 20); err != nil {
			t.Fatal(err)
		}
		awaitDrained(t, t.Context(), promoted, time.Minute)
	}
	more()
	pair.Thaw(t)
	ctx, leave := context.WithCancel(t.Context())
	told := make(chan error, 1)
	defer func() { leave(); <-told }()
	go func() {
		_, err := owner.Exec(ctx, `SET application_name = 'writer'; INSERT INTO outbox_messages
			(tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES (1, 'post', 1, 'lost', '{}')`)
		told <- err
	}()
	testkit.Eventually(t, "the old primary to show a row that its standby does not have", func() (shown bool, err error) {
		if _, err := owner.Exec(t.Context(), `SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'
			AND application_name = 'writer'`); err != nil {
			return false, err
		}
		err = old.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM outbox_messages WHERE event_type = 'lost')`).Scan(&shown)
		return shown, err
	})
	for range 3 { // the old relay polls meanwhile
		more()
	}
	checkStream(t, t.Context(), promoted, b)
}
