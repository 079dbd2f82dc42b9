//go:build faults

package relay

import (
	"context"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestAPoolGivesUpIdleConnectionsThatTheNetworkHasLost(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	p := testkit.NewProxy(t, parse(t, db.URL).Host)
	pool, err := postgres.Open(t.Context(), withHost(t, db.URL, p), postgres.Config{MaxConns: 2, ConnectTimeout: 3 * time.Second},
		postgres.RoleSystem, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	defer p.Cut() // otherwise the pool waits for their end
	if err := pool.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.Lose()
	<-time.After(1100 * time.Millisecond) // the pool does not check a connection that was used within the last second
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := pool.Ping(ctx); err != nil {
		t.Errorf("no new connection was tried: %v", err)
	}
}

func TestARelayWhoseFewConnectionsAllWaitForALockGoesOnAfterwards(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	f := newFleet(t, db)
	f.resize(manyPartitions)
	o := options{maxConns: 2}
	f.awaitShares(time.Minute, "three relays to share the partitions", f.start(o), f.start(o), f.start(o))
	// Marks wait for the first lock and heartbeats for the second, for longer than a lease. So both
	// of the pool's connections wait.
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // ErrTxClosed, except after a failure
	for _, sql := range []string{`SELECT FROM outbox_partitions FOR UPDATE`, `SELECT FROM leases FOR UPDATE`} {
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	owner := db.Pool(t, postgres.RoleOwner) // it may read the statements of other sessions
	testkit.Eventually(t, "marks to wait for the lock", func() (bool, error) {
		var waiting int
		err := owner.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND wait_event_type = 'Lock'
			AND query LIKE '%UPDATE outbox_partitions%'`).Scan(&waiting)
		return waiting >= 3, err
	})
	f.last(leaseTTL * 3 / 2)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.awaitTakeover()
	f.check()
}

func TestLinksThatAreCutSlowOrStalledLoseAndDoubleNothing(t *testing.T) {
	for name, pick := range map[string]func(links) *testkit.Proxy{
		"NATS":       func(l links) *testkit.Proxy { return l.nats },
		"PostgreSQL": func(l links) *testkit.Proxy { return l.db },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t, testkit.Postgres(t))
			var proxies []*testkit.Proxy
			for range 3 {
				l := f.links()
				// A heartbeat takes seven round trips, and must finish within half of its lease.
				f.start(options{via: l, ttl: 4 * time.Second})
				proxies = append(proxies, pick(l))
			}
			f.awaitTakeover()

			for _, p := range proxies { // all three, so that no relay publishes
				p.Cut()
			}
			f.last(500 * time.Millisecond)
			for _, p := range proxies {
				p.Heal()
			}
			f.awaitTakeover()

			proxies[0].Slow(200 * time.Millisecond)
			proxies[1].Slow(200 * time.Millisecond)
			f.awaitTakeover()
			proxies[1].Heal()

			proxies[2].Stall() // stall for longer than a publish may take; then all data arrives at once
			f.last(testConfig().PublishTimeout + 500*time.Millisecond)
			proxies[2].Heal()
			f.awaitTakeover()
			proxies[0].Heal() // over a slow link, the rest takes longer the faster the writers were
			f.check()
		})
	}
}
