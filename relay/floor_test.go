package relay

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestAFloorRisesOnlyPastWhatCanNoLongerAppear(t *testing.T) {
	// A server of its own: a transaction anywhere on it that writes holds floors back.
	server := testkit.PostgresProcess(t)
	pool := server.DB(t).Pool(t, postgres.RoleSystem)
	s := &session{Relay: &Relay{pool: pool, log: testkit.Logger(t), metrics: newMetrics(prometheus.NewRegistry())}}
	var f floors
	parts := map[int]*partition{}
	for n := range event.Partitions {
		parts[n] = &partition{number: n}
	}
	raise := func() {
		t.Helper()
		for range 2 { // a sample, and the next, which may find that all of its transactions have ended
			if err := s.raise(t.Context(), &f, parts); err != nil {
				t.Fatal(err)
			}
		}
	}
	floorOf := func(aggregate int64) (int64, int) {
		t.Helper()
		var p int
		if err := pool.QueryRow(t.Context(), `SELECT partition FROM outbox_messages WHERE aggregate_id = $1 LIMIT 1`, aggregate).Scan(&p); err != nil {
			t.Fatal(err)
		}
		return parts[p].floor, p
	}
	publish := func(id int64) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET processed_at = now() WHERE id = $1`, id); err != nil {
			t.Fatal(err)
		}
	}

	first := insertRow(t, pool, 1, "created")
	raise()
	if floor, _ := floorOf(1); floor != first-1 {
		t.Errorf("with row %d pending the floor is %d", first, floor)
	}
	publish(first)

	// A writer has its id and is not done; a later one commits.
	slow, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var held int64
	if err := slow.QueryRow(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'post', 1, 'created', '{}') RETURNING id`).Scan(&held); err != nil {
		t.Fatal(err)
	}
	publish(insertRow(t, pool, 1, "created"))
	raise()
	raise()
	if floor, _ := floorOf(1); floor >= held {
		t.Fatalf("the floor rose to %d past row %d, which is not committed yet", floor, held)
	}
	if err := slow.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	raise()
	if floor, _ := floorOf(1); floor != held-1 {
		t.Errorf("after the commit the floor is %d: want %d", floor, held-1)
	}
	publish(held)
	raise()
	floor, number := floorOf(1)
	if floor <= held {
		t.Errorf("with nothing pending the floor is %d", floor)
	}

	// The sweep finds nothing in order, and what is out of order.
	if err := s.sweep(t.Context(), &f, parts, event.Partitions); err != nil {
		t.Fatal(err)
	}
	if n := testutil.ToFloat64(s.metrics.belowFloor); n != 0 {
		t.Errorf("a sweep of a healthy outbox counted %v", n)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET processed_at = NULL WHERE id = $1`, held); err != nil {
		t.Fatal(err)
	}
	for range event.Partitions {
		if err := s.sweep(t.Context(), &f, parts, event.Partitions); err != nil {
			t.Fatal(err)
		}
	}
	if n := testutil.ToFloat64(s.metrics.belowFloor); n != 1 || parts[number].floor != held-1 || !parts[number].more {
		t.Errorf("a row below the floor: counted %v, floor %d, claimed at once %t", n, parts[number].floor, parts[number].more)
	}
}

func TestAReleaseWithoutAnAnswerTakesTheFloorsBack(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	s := &session{Relay: &Relay{cfg: testConfig(), pool: pool, log: testkit.Logger(t), metrics: newMetrics(prometheus.NewRegistry())}}
	parts := map[int]*partition{3: {number: 3, floor: 1000}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var next time.Time
	if err := s.keep(ctx, &next, parts, []int{3}); err == nil {
		t.Fatal("the release was answered")
	}
	if parts[3].floor != 0 {
		t.Errorf("the floor is still %d: a row that was released below it would wait for the sweep", parts[3].floor)
	}
}
