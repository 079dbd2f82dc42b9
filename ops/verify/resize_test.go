package verify_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// TestNoToolAsksForARepairDuringAResize resizes again and again while writers and two relays work,
// and meanwhile asks every tool that compares the streams with the database.
func TestNoToolAsksForARepairDuringAResize(t *testing.T) {
	db, b := testkit.Postgres(t), testkit.NATS(t)
	pool, nc := db.Pool(t, postgres.RoleSystem), b.Connect(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var working sync.WaitGroup
	t.Cleanup(func() { stop(); working.Wait() })
	for range 2 {
		r := system.Relay(t, system.RelayConfig(), db.Pool(t, postgres.RoleRelay), b.Config())
		working.Go(func() {
			if err := r.Run(ctx); err != nil {
				t.Errorf("relay: %v", err)
			}
		})
	}
	// until calls fn, over and over, until the test ends.
	until := func(what string, fn func() error) {
		working.Go(func() {
			for ctx.Err() == nil {
				if err := fn(); err != nil && ctx.Err() == nil {
					t.Errorf("%s: %v", what, err)
					return
				}
			}
		})
	}
	until("write", func() error {
		_, err := pool.Exec(ctx, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			SELECT 1, 'post', (random() * 1000)::bigint, 'created', '{}' FROM generate_series(1, 20), pg_sleep(0.005)`)
		return err
	})
	asked := func(tool, answer string) {
		if strings.Contains(answer, "`tidings ") {
			t.Errorf("%s: %s", tool, answer)
		}
	}
	until("Check", func() error {
		checks, err := relay.Check(ctx, pool, js, b.Config())
		for _, c := range checks {
			if c.Err != nil {
				asked("Check", c.Err.Error())
			}
		}
		return err
	})
	src := status.Sources{Truth: pool, Projections: pool, NATS: nc, JetStream: js, Broker: b.Config()}
	until("status, verify, doctor and repair", func() error {
		st, err := status.Read(ctx, src)
		if err != nil {
			return err
		}
		asked("status", strings.Join(st.Stopped(), "; "))
		var partitions []broker.Partition
		for _, p := range st.Partitions {
			partitions = append(partitions, broker.Partition{Number: p.Partition, FirstSlot: p.FirstSlot, LastSlot: p.LastSlot,
				After: p.After})
		}
		findings, err := doctor.Broker(ctx, nc, b.Config(), partitions)
		if err != nil {
			return err
		}
		for _, f := range findings {
			if f.Severity == doctor.Error {
				t.Errorf("doctor: %+v", f)
			}
		}
		v, err := verify.Run(ctx, verify.Deps{Sources: src, Kinds: kinds.Builtin}, verify.Options{})
		if err != nil {
			return err
		}
		asked("verify", strings.Join(v.Stopped, "; "))
		for _, s := range v.Streams {
			asked("verify", s.Trouble)
		}
		plan, err := relay.Repair(ctx, pool, b.Config(), testkit.Logger(t), relay.RepairOptions{DryRun: true})
		if err == nil && !plan.Healthy {
			t.Errorf("repair: %+v", plan)
		}
		return err
	})
	for _, to := range []int{4, 1, 16, 2, 8, 1, 32, 1} {
		testkit.Eventually(t, "a resize to begin", func() (bool, error) {
			_, err := outbox.Resize(t.Context(), pool, to)
			return err == nil, nil
		})
		testkit.Eventually(t, "every new partition to have messages", func() (bool, error) {
			var open, filled int
			err := pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE tail_seq > 0) FROM outbox_partitions
				WHERE final_seq IS NULL`).Scan(&open, &filled)
			return open == to && filled == to, err
		})
	}
	stop()
}
