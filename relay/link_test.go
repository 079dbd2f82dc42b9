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

// TestACatchUpOverASlowLinkSharesItsRoundTrips: one by one, 300 messages would take 300 round trips
// of 200 ms.
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

// TestRowsGoTogetherOnceALinkIsSlow: on a fast link, a relay has measured that single rows cost
// less. When the link becomes slow, it notices at the first slow row.
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
