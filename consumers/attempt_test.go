package consumers

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// sequences is a projection of the sequences of its events.
type sequences struct{}

func (sequences) Name() string      { return "sequences" }
func (sequences) Wants(string) bool { return true }

func (sequences) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	all := make([]int64, len(events))
	for i := range events {
		all[i] = int64(events[i].Seq)
	}
	_, err := tx.Exec(ctx, `INSERT INTO sequences SELECT unnest($1::bigint[])`, all)
	return err
}

// TestABatchTakesTwoRoundTrips applies batches to partition 0, whose offset is at 0. An event's
// aggregate is its sequence modulo 100.
func TestABatchTakesTwoRoundTrips(t *testing.T) {
	db := testkit.Postgres(t)
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `CREATE TABLE sequences (seq bigint);
		GRANT ALL ON sequences TO tidings_consumer`); err != nil {
		t.Fatal(err)
	}
	pool, trips := testkit.RoundTrips(t, db.Pool(t, postgres.RoleConsumer))
	c, err := New(Config{BatchEvents: 100, BatchBytes: 1 << 20, ApplyTimeout: time.Minute, LagInterval: time.Minute, Recheck: time.Minute,
		Lease: lease.Config{TTL: 15 * time.Second}}, Deps{Pool: pool, Registry: prometheus.NewRegistry(),
		Log: testkit.Logger(t)}, sequences{})
	if err != nil {
		t.Fatal(err)
	}
	stream := broker.Stream{Partition: broker.Partition{LastSlot: event.Slots - 1}, Name: "EVENTS-0", Created: time.Unix(1, 0)}
	if _, err := c.begin(t.Context(), []broker.Stream{stream}, nil); err != nil {
		t.Fatal(err)
	}
	r := c.newReader(0)
	poison := errors.New("poison")
	applied := 0
	for _, step := range []struct {
		name     string
		from, to uint64
		poison   uint64
		trips    int64 // 0 while the connection prepares statements
		applied  int
		moved    bool
	}{
		{name: "the first batch", to: 2, applied: 2},
		{name: "a batch", from: 2, to: 4, applied: 2, trips: 2},
		{name: "a batch that another instance applied", from: 2, to: 4, moved: true, trips: 2},
		{name: "a poison event", from: 4, to: 6, poison: 5, applied: 1},
		{name: "an event of its aggregate", from: 104, to: 106, applied: 1},
		{name: "another one", from: 204, to: 206, applied: 1, trips: 4},
		{name: "others, of a consumer with dead letters", from: 206, to: 208, applied: 2, trips: 3},
	} {
		if _, err := pool.Exec(t.Context(), `UPDATE consumer_offsets SET last_processed_id = $1`, step.from); err != nil {
			t.Fatal(err)
		}
		if step.moved {
			if _, err := pool.Exec(t.Context(), `UPDATE consumer_offsets SET last_processed_id = $1`, step.to); err != nil {
				t.Fatal(err)
			}
		}
		b := &batch{from: step.from, to: step.to, stored: time.Unix(2, 0)}
		for seq := step.from + 1; seq <= step.to; seq++ {
			d := delivery{event: event.Event{TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: event.IDOf(int64(seq % 100)),
				Stream: stream.Name, Seq: seq}}
			if seq == step.poison {
				d.fault = poison
			}
			b.deliveries = append(b.deliveries, d)
		}
		before := trips()
		err := r.apply(t.Context(), stream, b)
		if step.poison > 0 && errors.Is(err, errLetters) { // the reader reads the batch again, with headers
			r.letters = true
			err = r.apply(t.Context(), stream, b)
		}
		if errors.Is(err, errMoved) != step.moved || (err != nil) != step.moved {
			t.Fatalf("%s: %v", step.name, err)
		}
		if n := trips() - before; step.trips > 0 && n != step.trips {
			t.Errorf("%s took %d round trips, want %d", step.name, n, step.trips)
		}
		applied += step.applied
		var n int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM sequences`).Scan(&n); err != nil || n != applied {
			t.Fatalf("after %s, %d events are applied, want %d: %v", step.name, n, applied, err)
		}
	}
	rows, _ := pool.Query(t.Context(), `SELECT stream_seq FROM consumer_dead_letters ORDER BY 1`)
	parked, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if diff := cmp.Diff([]int64{5, 105, 205}, parked); err != nil || diff != "" {
		t.Errorf("parked events (-want +got), %v:\n%s", err, diff)
	}
}
