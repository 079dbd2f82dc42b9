package subscribe_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
	"github.com/tidings/tidings/subscribe/prom"
)

// logbook records its events without comparing versions, so an event that is applied twice has two
// rows.
func logbook(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
	for i := range batch {
		f, err := subscribe.Decode[event.Edge](kinds.Builtin(), &batch[i])
		if err != nil {
			return err
		}
		if f.From == "666" {
			panic("the number of the beast")
		}
		if _, err := tx.Exec(ctx, `INSERT INTO log (tenant_id, aggregate_id, version) VALUES ($1, $2, $3)`, batch[i].TenantID, f.To,
			f.Version); err != nil {
			return err
		}
	}
	return nil
}

// refusals checks that Project reports problems before it reads anything. It leaves the tables up
// to date.
func (r *rig) refusals(pool *pgxpool.Pool, run func(context.Context) error) {
	t, ctx := r.t, context.Background()
	t.Helper()
	if err := run(ctx); !errors.Is(err, projector.ErrTables) {
		t.Fatalf("a database without the tables: %v, want ErrTables", err)
	}
	for range 2 {
		if err := projector.Migrate(ctx, pool); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := pool.Exec(ctx, `UPDATE tidings_consumers_migrations SET is_applied = false WHERE version_id > 0`); err != nil {
		t.Fatal(err)
	}
	if err := run(ctx); !errors.Is(err, projector.ErrTables) {
		t.Fatalf("a database with older tables: %v, want ErrTables", err)
	}
	if _, err := pool.Exec(ctx, `UPDATE tidings_consumers_migrations SET is_applied = true`); err != nil {
		t.Fatal(err)
	}
	if err := projector.Project(ctx, r.nc, pool, "no.name", logbook); !errors.Is(err, subscribe.ErrName) {
		t.Errorf("a bad name: %v, want ErrName", err)
	}
	if err := projector.Project(ctx, r.nc, pool, "search", logbook, subscribe.Streams("OTHERS", "others")); !errors.Is(err,
		subscribe.ErrNoStreams) {
		t.Errorf("no streams: %v, want ErrNoStreams", err)
	}
}

// unpark discards the event that panics, and retries the next one of its aggregate.
func unpark(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	ctx := t.Context()
	letters, err := projector.DeadLetters(pool, "search", logbook)
	if err != nil {
		t.Fatal(err)
	}
	parked, err := postgres.Collect(letters.List(ctx, projector.LetterFilter{Consumer: "search"}, 10))
	if err != nil || len(parked) != 3 || !strings.Contains(parked[0].Error, "panic: the number of the beast") ||
		!strings.Contains(parked[1].Error, "earlier event") || !strings.Contains(parked[2].Error, "decode the payload") {
		t.Fatalf("parked %+v, %v, want the event that panics, the next one of its aggregate and the damaged one", parked, err)
	}
	if _, err := letters.Discard(ctx, projector.LetterRequest{ID: parked[0].ID, Actor: "ann"}); err != nil {
		t.Error(err)
	}
	if res, err := letters.Retry(ctx, projector.LetterRequest{ID: parked[1].ID, Actor: "ann"}); err != nil || res.Gone != 1 {
		t.Errorf("retry: %+v, %v", res, err)
	}
}

func TestAProjectionInASchemaOfItsOwnIsExact(t *testing.T) {
	r := newRig(t, 1)
	ctx := t.Context()
	pool := r.logged()
	reg, health := prometheus.NewRegistry(), &subscribe.Health{}
	run := func(ctx context.Context) error {
		return projector.Project(ctx, r.nc, pool, "search", logbook, subscribe.Only("follow"), subscribe.Log(testkit.Logger(t)),
			prom.Metrics(reg), subscribe.Report(health))
	}
	r.refusals(pool, run)
	r.publish(follow("1", "2", 1), follow("666", "3", 1), follow("4", "3", 1), damaged("5"), follow("1", "2", 2))
	p := r.start(run)
	settled := func() {
		t.Helper()
		r.await("all to be applied", func() (bool, error) {
			lag, err := projector.Lag(ctx, r.nc, pool, "search")
			return err == nil && lag.Messages == 0, err
		})
	}
	settled()
	if err := health.Ready(ctx); err != nil {
		t.Errorf("not ready: %v", err)
	}
	rows := func() (n int) {
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM log`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := rows(); n != 2 {
		t.Errorf("%d events were applied, want 2: the others are parked", n)
	}
	unpark(t, pool)
	if n := rows(); n != 3 {
		t.Errorf("%d events are applied after the retry, want 3", n)
	}
	if n := testkit.Metric(t, reg, "tidings_consumer_parked_total"); n != 3 {
		t.Errorf("tidings_consumer_parked_total is %v, want 3", n)
	}

	all, err := reg.Gather()
	if err != nil || len(all) == 0 {
		t.Errorf("%d metrics, %v", len(all), err)
	}
	for _, f := range all {
		if !strings.HasPrefix(f.GetName(), "tidings_") {
			t.Errorf("the metric %s has no prefix", f.GetName())
		}
	}

	// Replay from the beginning while an instance runs.
	if err := projector.Replay(ctx, pool, "search", func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `TRUNCATE log`)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	r.resize(2)
	r.publish(follow("1", "2", 3), follow("1", "20", 1))
	r.await("the replay to reach the new streams", func() (bool, error) { return rows() == 4, nil })
	settled()
	if err := p.stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
}

func TestAProjectionStopsBeforeAStreamThatWasMadeAnewAndReportsAFunctionThatNeverReturns(t *testing.T) {
	r := newRig(t, 1)
	ctx := t.Context()
	pool := r.logged()
	if err := projector.Migrate(ctx, pool); err != nil {
		t.Fatal(err)
	}
	r.publish(follow("1", "2", 1))
	health := &subscribe.Health{}
	p := r.start(func(ctx context.Context) error {
		return projector.Project(ctx, r.nc, pool, "search", logbook, subscribe.Report(health), subscribe.Log(testkit.Logger(t)))
	})
	applied := func() (n int) {
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM log`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	r.await("the first event", func() (bool, error) { return applied() == 1, nil })
	if err := p.stop(); err != nil {
		t.Fatal(err)
	}
	never := make(chan struct{})
	released := make(chan struct{})
	r.publish(follow("1", "2", 2))
	err := projector.Project(ctx, r.nc, pool, "search", func(context.Context, pgx.Tx, []event.Event) error {
		defer close(released)
		<-never
		return errors.New("too late")
	}, subscribe.Timeout(500*time.Millisecond), subscribe.Log(testkit.Logger(t)))
	if !errors.Is(err, subscribe.ErrStuck) || !strings.Contains(err.Error(), "1 events of EVENTS-0 from 2 on") {
		t.Errorf("a function that never returns: %v, want ErrStuck and the event", err)
	}
	close(never)
	<-released
	if n := applied(); n != 1 {
		t.Errorf("%d events are applied, want 1", n)
	}

	r.recreate()
	r.publish(follow("1", "9", 1))
	p = r.start(func(ctx context.Context) error {
		return projector.Project(ctx, r.nc, pool, "search", logbook, subscribe.Report(health), subscribe.Log(testkit.Logger(t)))
	})
	r.await("the stop", func() (bool, error) {
		err := health.Ready(ctx)
		return err != nil && strings.Contains(err.Error(), "stream EVENTS-0 was recreated") &&
			strings.Contains(err.Error(), "begin the projection again"), nil
	})
	if n := applied(); n != 1 {
		t.Errorf("%d events are applied, want 1", n)
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}

// positions returns the ends of the open streams, as an export contains them.
func (r *rig) positions() (all []projector.Position) {
	r.t.Helper()
	for _, o := range r.open {
		s, err := broker.ReadStream(context.Background(), r.js, r.cfg, o.Number)
		if err != nil {
			r.t.Fatal(err)
		}
		all = append(all, projector.Position{Partition: s.Number, Stream: s.Name, Created: s.Created, Sequence: s.Last})
	}
	return all
}

// TestAProjectionBeginsBehindExports has two exports with a resize between them. The first two
// streams were removed since.
func TestAProjectionBeginsBehindExports(t *testing.T) {
	r := newRig(t, 2)
	ctx := t.Context()
	pool := r.logged()
	if err := projector.Migrate(ctx, pool); err != nil {
		t.Fatal(err)
	}
	r.publish(follow("1", "20", 1), follow("1", "2", 1)) // partitions 1 and 0
	r.resize(2)
	r.publish(follow("1", "20", 2), follow("1", "2", 2)) // 3 and 2
	first := r.positions()
	r.publish(follow("1", "2", 3)) // after the first export
	r.resize(1)
	r.publish(follow("1", "2", 4))
	second := append(r.positions(), projector.Position{Partition: 5})
	r.publish(follow("1", "2", 5))
	for n := range 2 {
		if err := r.js.DeleteStream(ctx, r.cfg.StreamName(n)); err != nil {
			t.Fatal(err)
		}
	}
	begin := func() error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return projector.Begin(ctx, tx, "search", first, second) })
	}
	if err := begin(); err != nil {
		t.Fatal(err)
	}
	if err := begin(); !errors.Is(err, projector.ErrBegun) {
		t.Errorf("a second Begin: %v, want ErrBegun", err)
	}
	p := r.start(func(ctx context.Context) error {
		return projector.Project(ctx, r.nc, pool, "search", logbook, subscribe.Log(testkit.Logger(t)))
	})
	var got []int64
	r.await("what the exports do not cover", func() (bool, error) {
		rows, _ := pool.Query(ctx, `SELECT version FROM log ORDER BY id`)
		var err error
		got, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		return len(got) == 3, err
	})
	if !slices.Equal(got, []int64{3, 4, 5}) {
		t.Errorf("applied the versions %v, want those after the first export, in order", got)
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	if lag, err := projector.Lag(ctx, r.nc, pool, "search"); err != nil || lag.Messages != 0 {
		t.Errorf("lag %+v, %v", lag, err)
	}
}

// TestAProjectionReadsAStreamThatNoExportLists: a stream that began and ended between two exports,
// and one that had no stream yet when its neighbor had one.
func TestAProjectionReadsAStreamThatNoExportLists(t *testing.T) {
	for name, c := range map[string]struct {
		exports func(r *rig) [][]projector.Position
		want    []int64
	}{
		"two resizes between exports": {func(r *rig) [][]projector.Position {
			first := r.positions()
			r.publish(follow("1", "2", 2))
			r.resize(2)
			r.publish(follow("1", "2", 3))
			r.resize(1)
			second := r.positions()
			r.publish(follow("1", "2", 4))
			return [][]projector.Position{first, second}
		}, []int64{2, 3, 4}},
		"a partition without a stream": {func(r *rig) [][]projector.Position {
			r.publish(follow("1", "2", 2))
			r.resize(2)
			only := r.positions()
			only[0] = projector.Position{Partition: only[0].Partition}
			r.publish(follow("1", "2", 3), follow("1", "20", 4))
			return [][]projector.Position{only}
		}, []int64{3, 4}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1)
			pool := r.logged()
			if err := projector.Migrate(t.Context(), pool); err != nil {
				t.Fatal(err)
			}
			r.publish(follow("1", "2", 1))
			exports := c.exports(r)
			if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				return projector.Begin(t.Context(), tx, "search", exports...)
			}); err != nil {
				t.Fatal(err)
			}
			p := r.start(func(ctx context.Context) error {
				return projector.Project(ctx, r.nc, pool, "search", logbook, subscribe.Log(testkit.Logger(t)))
			})
			r.await("the ends of the streams", func() (bool, error) {
				lag, err := projector.Lag(t.Context(), r.nc, pool, "search")
				return lag.Messages == 0, err
			})
			rows, _ := pool.Query(t.Context(), `SELECT DISTINCT version FROM log ORDER BY version`)
			if got, err := pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("applied the versions %v, %v, want %v", got, err, c.want)
			}
			if err := p.stop(); err != nil {
				t.Error(err)
			}
		})
	}
}
