//go:build faults

package relay

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestARelayWhoseBrokerReadsNothingStopsInTime(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATSProcess(t)
	r := newRelay(t, pool, b)
	r.cfg.CheckInterval = time.Hour // otherwise that finds the frozen broker first
	r.broker.Ping = time.Hour       // or the connection does
	r.cfg.Lease.TTL = time.Minute   // otherwise the large transaction below may delay a renewal for too long
	claimed := make(chan struct{}, 100)
	awaitClaim := func() {
		t.Helper()
		select {
		case <-claimed:
		case <-time.After(time.Minute):
			t.Fatal("no row was claimed")
		}
	}
	r.step = func(step string) {
		if step == "after claim" {
			select {
			case claimed <- struct{}{}:
			default: // after a failed test, nobody receives
			}
		}
	}
	stop := start(t, r)
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	awaitClaim()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// More data than the buffers of both ends hold. Only its COMMIT comes after the freeze: a relay
	// notices that within seconds.
	if _, err := tx.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 1, 'post', 1 + n % 8, 'created', to_jsonb(repeat('x', 800000)) FROM generate_series(1, 40) n`); err != nil {
		t.Fatal(err)
	}
	b.Freeze(t)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitClaim()
	begun := time.Now()
	stop()
	if took := time.Since(begun); took > 40*time.Second { // a blocked write ends by itself after a minute
		t.Errorf("the stop took %s: want at most the drain timeout and a publish timeout, %s", took,
			r.cfg.DrainTimeout+r.cfg.PublishTimeout)
	}
}

func TestACatchUpThatGetsNoAnswerGivesUp(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATSProcess(t)
	r := newRelay(t, pool, b)
	r.broker.Ping = time.Hour // otherwise the connection finds the frozen broker
	w := connected(t, r)
	r.cfg.PublishTimeout = testConfig().PublishTimeout
	var err error
	if w.js, err = jetstream.New(w.nc, jetstream.WithDefaultTimeout(time.Hour)); err != nil { // only the relay's own limit is shorter
		t.Fatal(err)
	}
	w.broker.Timeout = time.Hour
	b.Freeze(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := w.catchUp(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("%v: want an error of the publish timeout, %s", err, w.cfg.PublishTimeout)
	}
}

func TestARelayLeavesDatabaseConnectionsThatPassNothingAnyMore(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	f := &fleet{t: t, url: db.URL, b: testkit.NATS(t)}
	via := f.links().db
	relayPool := (&testkit.DB{URL: withHost(t, db.URL, via)}).Pool(t, postgres.RoleSystem)
	cfg := testConfig()
	cfg.DatabaseTimeout = time.Second
	r, err := New(cfg, relayPool, f.b.Config(), testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	// No reset and no end, as when a firewall forgets connections. New ones work, so the relay
	// keeps its leases.
	claimed := sync.OnceFunc(via.Lose) // before the relay reads the names of the first event's type
	r.step = func(step string) {
		if step == "after claim" {
			claimed()
		}
	}
	stop := start(t, r)
	insertRow(t, pool, 1, "created", `{"version": 1}`)
	awaitDrained(t, t.Context(), pool, time.Minute)
	via.Lose()
	insertRow(t, pool, 1, "edited", `{"version": 2}`)
	awaitDrained(t, t.Context(), pool, time.Minute)
	checkStream(t, t.Context(), pool, f.b)
	stop()
	via.Cut() // otherwise the pool waits for their end
}
