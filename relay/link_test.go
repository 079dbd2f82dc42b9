package relay

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// last waits while a fault lasts.
func (f *fleet) last(d time.Duration) {
	f.t.Helper()
	select {
	case <-time.After(d):
	case <-f.t.Context().Done():
		f.t.Fatal(context.Cause(f.t.Context()))
	}
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

// TestACatchUpOverASlowLinkSharesItsRoundTrips: one by one, 300 messages would take 300 round trips of 200 ms.
func TestACatchUpOverASlowLinkSharesItsRoundTrips(t *testing.T) {
	t.Parallel()
	const messages, patience = 300, 20 * time.Second
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	for n := range int64(messages) {
		insertRow(t, pool, n+1, "created")
	}
	first := newRelay(t, pool, b)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- first.Run(ctx) }()
	awaitDrained(t, t.Context(), pool, patience)
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL`,
		`UPDATE outbox_partitions SET tail_seq = 0, floor_id = 0`} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	p := testkit.NewProxy(t, parse(t, b.URL).Host)
	cfg := b.Config()
	cfg.URL = withHost(t, b.URL, p)
	own := testConfig()
	own.PublishTimeout = time.Minute // one slow answer is no failure here
	r, err := New(own, pool, cfg, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	w := connected(t, r)
	p.Slow(100 * time.Millisecond)
	began := time.Now()
	if err := w.catchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("a catch-up over %d messages took %s", messages, took)
	}
	if w.tail != messages {
		t.Errorf("the catch-up ended at %d", w.tail)
	}
	awaitDrained(t, t.Context(), pool, patience)
}

// TestRowsGoTogetherOnceALinkIsSlow: on a fast link, a relay has measured that single rows cost less. When the link
// becomes slow, it notices at the first slow row.
func TestRowsGoTogetherOnceALinkIsSlow(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	p := testkit.NewProxy(t, parse(t, b.URL).Host)
	cfg := b.Config()
	cfg.URL = withHost(t, b.URL, p)
	r, err := New(testConfig(), pool, cfg, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	start(t, r)
	insertRow(t, pool, 1, "created", `{"version": 1}`)
	awaitDrained(t, t.Context(), pool, time.Minute)
	r.pace.mu.Lock()
	r.pace.single = 0.0002
	for i := range r.pace.many {
		r.pace.many[i] = 0.3 // measured for a batch just when the link became slow
	}
	r.pace.mu.Unlock()
	p.Slow(200 * time.Millisecond)
	if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 1, 'post', g, 'created', '{"version": 1}' FROM generate_series(2, 61) g`); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, 20*time.Second) // one by one they would take 24 s
	p.Heal()
	checkStream(t, t.Context(), pool, b)
}

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
	// Marks wait for the first lock and heartbeats for the second, for longer than a lease. So both of the pool's
	// connections wait.
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
	testkit.Eventually(t, time.Minute, "marks to wait for the lock", func() (bool, error) {
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
