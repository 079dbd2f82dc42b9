package subscribe

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tracing"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/migrations"
)

// Migrate creates the tables that projections need, or upgrades them to this release: in the first
// schema of the search_path of pool's connections, with their login. It changes nothing if they are
// up to date. Several processes may call it at once.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error { return migrations.UpConsumers(ctx, pool) }

// Apply changes your tables in tx by events in the order of their streams. It uses nothing but tx.
// After a rollback it gets the same events again.
type Apply func(ctx context.Context, tx pgx.Tx, batch []event.Event) error

// Project applies every message exactly once, in the transaction that also moves the projection's
// offset, until ctx ends. Then it finishes the batches in hand and returns nil. After a repair an
// event may be two messages. Instances of the same name share the partitions.
//
// An error of apply rolls the batch back. If it is the database's own trouble, Project retries the
// batch. Otherwise Project applies event by event, and parks the one that fails together with the
// later ones of its aggregate (DeadLetters). It treats a panic in the same way. After ErrStuck end
// the process, because the function still runs.
//
// If the program has a TracerProvider (otel.SetTracerProvider), a batch with an event of a sampled
// trace has a span with links to the creations. The context of apply has that span.
//
// It returns ErrName, ErrOption, ErrType (of Only), ErrFilter, ErrTables, ErrNoStreams, ErrClosed
// and ErrStuck.
func Project(ctx context.Context, nc *nats.Conn, pool *pgxpool.Pool, name string, apply Apply, opts ...Option) error {
	s, err := settingsOf(name, ofProject, opts)
	if err != nil {
		return err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("use JetStream: %w", err)
	}
	if err := s.awaitTables(ctx, pool); err != nil || ctx.Err() != nil {
		return err
	}
	if _, err := s.awaitStreams(ctx, js, func(ctx context.Context) ([]broker.Stream, error) {
		return broker.Streams(ctx, js, s.broker())
	}); err != nil || ctx.Err() != nil {
		return err
	}
	if err := s.keepFilter(ctx, pool); err != nil || ctx.Err() != nil {
		return err
	}
	p := &projection{settings: s, apply: apply, stuck: make(chan error, 1)}
	consumer, err := consumers.New(consumers.Config{
		BatchEvents: s.batch, BatchBytes: 8 << 20, ApplyTimeout: s.timeout, LagInterval: 5 * time.Second, Recheck: 10 * time.Second,
		Lease: lease.Config{TTL: s.takeover},
	}, consumers.Deps{
		Pool: pool, JetStream: js, Streams: s.streams, Registry: s.registry, Log: s.log,
		Remedy: "begin the projection again (docs/subscribe.md, \"Begin again\")",
	}, p)
	if err != nil {
		return err
	}
	s.health.set(consumer.Ready)
	provider := otel.GetTracerProvider() // the program's; without one there are no spans
	run, stop := context.WithCancel(tracing.With(ctx, tracing.New(provider, provider, false, tracing.MaxLinks)))
	defer stop()
	done := make(chan error, 1)
	go func() { done <- consumer.Run(run) }()
	watched := watch(run, nc)
	for {
		select {
		case closed := <-watched:
			err = closed
			stop()
		case ended := <-done:
			return errors.Join(err, ended)
		case err := <-p.stuck:
			s.health.set(func(context.Context) error { return err })
			return err
		}
	}
}

// awaitTables waits while the database is unavailable, and returns ErrTables if the tables are
// missing or older.
func (s *settings) awaitTables(ctx context.Context, pool *pgxpool.Pool) error {
	err := migrations.Await(ctx, pool, migrations.Consumers, s.log)
	if errors.Is(err, migrations.ErrOutdated) {
		return fmt.Errorf("%w: %w", ErrTables, err)
	}
	return err
}

// filterSQL records the filter of a new projection, and returns the recorded one. Index:
// consumer_filters_pkey. Locks: the row.
const filterSQL = `
INSERT /* subscribe.filter */ INTO consumer_filters AS f (consumer_name, aggregate_types) VALUES (@consumer, @types)
    ON CONFLICT (consumer_name) DO UPDATE SET aggregate_types = f.aggregate_types RETURNING aggregate_types`

// keepFilter returns ErrFilter if Only differs from that of the projection's first start. It waits
// while the database is unavailable.
func (s *settings) keepFilter(ctx context.Context, pool *pgxpool.Pool) error {
	types, was := slices.AppendSeq([]string{}, maps.Keys(s.only)), []string{}
	slices.Sort(types)
	err := pool.QueryRow(ctx, filterSQL, pgx.StrictNamedArgs{"consumer": s.name, "types": types}).Scan(&was)
	switch {
	case ctx.Err() != nil:
		return nil
	case postgres.IsTransient(err):
		s.log.WarnContext(ctx, "waiting for the database", "err", err)
		work.Sleep(ctx, assignInterval)
		return s.keepFilter(ctx, pool)
	case err != nil:
		return fmt.Errorf("read the filter of projection %s: %w", s.name, err)
	case !slices.Equal(was, types):
		return fmt.Errorf("%w: Only of projection %s was %q and is %q (none is all): events that were left out would be missing; "+
			"begin again with Replay, or take another name", ErrFilter, s.name, was, types)
	}
	return nil
}

// projection is the consumers.Projection that calls your function.
type projection struct {
	*settings
	apply Apply
	stuck chan error
}

// Name returns the subscriber's name.
func (p *projection) Name() string { return p.name }

// Wants reports whether Project delivers the events of an aggregate type.
func (p *projection) Wants(aggregateType string) bool {
	return p.only[aggregateType] || p.only == nil && !event.System(aggregateType)
}

// grace is the longest time that a function gets to return after its context has ended.
const grace = 5 * time.Second

// Apply calls the function, and turns a panic into an error.
func (p *projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	late, err := inTime(ctx, p.timeout, func() error { return p.apply(ctx, tx, events) })
	if late == nil {
		return err
	}
	p.stuck <- fmt.Errorf("%w: projection %s, %d events of %s from %d on", ErrStuck, p.name, len(events), events[0].Stream, events[0].Seq)
	return <-late // the function uses the transaction until it returns
}

// inTime calls fn. If fn has not returned some time after the end of ctx, late gets its error
// later.
func inTime(ctx context.Context, timeout time.Duration, fn func() error) (late <-chan error, err error) {
	done := make(chan error, 1)
	go func() { done <- guard(fn) }()
	select {
	case err = <-done:
		return nil, err
	case <-ctx.Done():
	}
	select {
	case err = <-done:
		return nil, err
	case <-time.After(min(grace, timeout)):
		return done, nil
	}
}

// guard calls fn, and returns a panic as an error.
func guard(fn func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return fn()
}

// DeadLetters returns the operations on the parked events of a projection. Retry calls apply, the
// projection's function.
func DeadLetters(pool *pgxpool.Pool, name string, apply Apply, opts ...Option) (*consumers.DeadLetters, error) {
	s, err := settingsOf(name, ofProject, opts)
	if err != nil {
		return nil, err
	}
	return consumers.NewDeadLetters(pool, &projection{settings: s, apply: apply, stuck: make(chan error, 1)}), nil
}

// Lag returns how far a projection is behind the streams. It reads the database and NATS, never a
// running instance.
func Lag(ctx context.Context, nc *nats.Conn, pool *pgxpool.Pool, name string, opts ...Option) (consumers.ConsumerLag, error) {
	s, err := settingsOf(name, ofProject, opts)
	if err != nil {
		return consumers.ConsumerLag{}, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return consumers.ConsumerLag{}, fmt.Errorf("use JetStream: %w", err)
	}
	all, err := consumers.Lag(ctx, pool, js, s.broker(), name)
	if err != nil {
		return consumers.ConsumerLag{}, err
	}
	return all[0], nil
}

// forgetFilterSQL deletes the record of a filter. Index: consumer_filters_pkey. Locks: the row.
const forgetFilterSQL = `DELETE /* subscribe.forget_filter */ FROM consumer_filters WHERE consumer_name = @consumer`

// Replay makes a projection begin again with the oldest events of the streams. clear empties its
// tables, in the transaction that deletes its offsets and its dead letters. Instances may run
// meanwhile, unless Only changes: end them first. If streams no longer have their first events, the
// projection stops: fill it from exports instead.
func Replay(ctx context.Context, pool *pgxpool.Pool, name string, clear func(ctx context.Context, tx pgx.Tx) error) error {
	return postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := consumers.Forget(ctx, tx, name); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, forgetFilterSQL, pgx.StrictNamedArgs{"consumer": name}); err != nil {
			return fmt.Errorf("forget the filter of projection %s: %w", name, err)
		}
		return clear(ctx, tx)
	})
}
