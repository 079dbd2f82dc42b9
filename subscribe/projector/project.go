package projector

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tracing"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// ErrTables reports a database without the tables that a projection needs, or with tables of an
// older release. Call Migrate.
var ErrTables = errors.New("projector: the tables are missing or older than this release; call projector.Migrate")

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
func Project(ctx context.Context, nc *nats.Conn, pool *pgxpool.Pool, name string, apply Apply, opts ...subscribe.Option) error {
	s, err := settings.New(name, settings.Project, opts)
	if err != nil {
		return err
	}
	p, err := newProjection(s, apply)
	if err != nil {
		return err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("use JetStream: %w", err)
	}
	if err := awaitTables(ctx, s, pool); err != nil || ctx.Err() != nil {
		return err
	}
	if _, err := s.AwaitStreams(ctx, js, func(ctx context.Context) ([]broker.Stream, error) {
		return broker.Streams(ctx, js, s.Broker)
	}); err != nil || ctx.Err() != nil {
		return err
	}
	if err := keepFilter(ctx, s, pool); err != nil || ctx.Err() != nil {
		return err
	}
	f := p.filler(pool)
	filling, end := context.WithCancel(ctx)
	defer end() // a function that does not return must not keep the claim
	filled := make(chan error, 1)
	go func() { filled <- f.fill(filling) }()
	select {
	case err := <-filled:
		if err != nil || ctx.Err() != nil {
			return err
		}
	case err := <-p.stuck:
		settings.SetReady(s.Health, func(context.Context) error { return err })
		return err
	}
	reg, measured := s.Registry.(prometheus.Registerer)
	if !measured {
		reg = prometheus.NewRegistry()
	}
	consumer, err := consumers.New(consumers.Config{
		BatchEvents: s.Batch, BatchBytes: 8 << 20, ApplyTimeout: s.Timeout, LagInterval: 5 * time.Second, Recheck: 10 * time.Second,
		Lease: lease.Config{TTL: s.Takeover},
	}, consumers.Deps{
		Pool: pool, JetStream: js, Registry: reg, Log: s.Log,
		Streams: consumers.Streams{Name: s.Broker.Stream, Prefix: s.Broker.Prefix, Timeout: s.Broker.Timeout},
		Remedy:  "begin the projection again (docs/subscribe-reference.md, \"Begin again\")",
		Expired: f.expire,
	}, p)
	if err != nil {
		return err
	}
	settings.SetReady(s.Health, consumer.Ready)
	return p.run(ctx, s, nc, consumer, f)
}

// run runs the consumer and fills its gaps, until ctx or the connection ends, or the function is
// stuck.
func (p *projection) run(ctx context.Context, s *settings.Settings, nc *nats.Conn, consumer *consumers.Consumer, f *filler) (err error) {
	provider := otel.GetTracerProvider() // the program's; without one there are no spans
	run, stop := context.WithCancel(tracing.With(ctx, tracing.New(provider, provider, false, tracing.MaxLinks)))
	defer stop()
	done, refilled := make(chan error, 1), make(chan error, 1)
	go func() { done <- consumer.Run(run) }()
	go func() { refilled <- f.refill(run, consumer.Ready) }()
	watched := settings.Watch(run, nc)
	for {
		select {
		case closed := <-watched:
			err = closed
			stop()
		case refused := <-refilled:
			err, refilled = errors.Join(err, refused), nil
			stop()
		case ended := <-done:
			stop()
			if refilled != nil {
				err = errors.Join(err, <-refilled)
			}
			return errors.Join(err, ended)
		case err := <-p.stuck:
			settings.SetReady(s.Health, func(context.Context) error { return err })
			return err
		}
	}
}

// awaitTables waits while the database is unavailable, and returns ErrTables if the tables are
// missing or older.
func awaitTables(ctx context.Context, s *settings.Settings, pool *pgxpool.Pool) error {
	err := migrations.Await(ctx, pool, migrations.Consumers, s.Log)
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
func keepFilter(ctx context.Context, s *settings.Settings, pool *pgxpool.Pool) error {
	types, was := slices.AppendSeq([]string{}, maps.Keys(s.Only)), []string{}
	slices.Sort(types)
	err := pool.QueryRow(ctx, filterSQL, pgx.StrictNamedArgs{"consumer": s.Name, "types": types}).Scan(&was)
	switch {
	case ctx.Err() != nil:
		return nil
	case postgres.IsTransient(err):
		s.Log.WarnContext(ctx, "waiting for the database", "err", err)
		work.Sleep(ctx, settings.Recheck)
		return keepFilter(ctx, s, pool)
	case err != nil:
		return fmt.Errorf("read the filter of projection %s: %w", s.Name, err)
	case !slices.Equal(was, types):
		return fmt.Errorf("%w: Only of projection %s was %q and is %q (none is all): events that were left out would be missing; "+
			"begin again with Replay, or take another name", subscribe.ErrFilter, s.Name, was, types)
	}
	return nil
}

// projection is the consumers.Projection that calls your function.
type projection struct {
	*settings.Settings
	options
	apply Apply
	stuck chan error
}

func newProjection(s *settings.Settings, apply Apply) (*projection, error) {
	p := &projection{Settings: s, apply: apply, stuck: make(chan error, 1)}
	if o, ok := s.Fill.(*options); ok {
		p.options = *o
	}
	return p, p.check()
}

// Name returns the subscriber's name.
func (p *projection) Name() string { return p.Settings.Name }

// Wants reports whether Project delivers the events of an aggregate type.
func (p *projection) Wants(aggregateType string) bool {
	return p.Only[aggregateType] || p.Only == nil && !event.System(aggregateType) ||
		p.erased != nil && aggregateType == event.AggregatePerson
}

// Apply calls the function, and turns a panic into an error.
func (p *projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	late, err := settings.InTime(ctx, p.Timeout, func() error { return p.deliver(ctx, tx, events) })
	if late == nil {
		return err
	}
	select {
	case p.stuck <- fmt.Errorf("%w: projection %s, %d events of %s from %d on", subscribe.ErrStuck, p.Settings.Name, len(events),
		events[0].Stream, events[0].Seq):
	default: // Project returns the first such error, and nobody reads those of DeadLetters
	}
	return <-late // the function uses the transaction until it returns
}

// deliver calls apply with the events, and the function of Erased at its place between them.
func (p *projection) deliver(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	for len(events) > 0 {
		n := slices.IndexFunc(events, func(e event.Event) bool { return p.erased != nil && e.AggregateType == event.AggregatePerson })
		if n == 0 {
			var person event.PersonErased
			if err := events[0].DecodePayload(&person); err != nil {
				return err
			}
			if err := p.erased(ctx, tx, events[0].TenantID, person.PersonID); err != nil {
				return err
			}
			events = events[1:]
			continue
		}
		if n < 0 {
			n = len(events)
		}
		if err := p.apply(ctx, tx, events[:n]); err != nil {
			return err
		}
		events = events[n:]
	}
	return nil
}

// DeadLetters returns the operations on the parked events of a projection. Retry calls apply, the
// projection's function.
func DeadLetters(pool *pgxpool.Pool, name string, apply Apply, opts ...subscribe.Option) (*Letters, error) {
	s, err := settings.New(name, settings.Project, opts)
	if err != nil {
		return nil, err
	}
	p, err := newProjection(s, apply)
	if err != nil {
		return nil, err
	}
	return consumers.NewDeadLetters(pool, p), nil
}

// Lag returns how far a projection is behind the streams. It reads the database and NATS, never a
// running instance.
func Lag(ctx context.Context, nc *nats.Conn, pool *pgxpool.Pool, name string, opts ...subscribe.Option) (Lagging, error) {
	s, err := settings.New(name, settings.Project, opts)
	if err != nil {
		return Lagging{}, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return Lagging{}, fmt.Errorf("use JetStream: %w", err)
	}
	all, err := consumers.Lag(ctx, pool, js, s.Broker, name)
	if err != nil {
		return Lagging{}, err
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
		if err := consumers.EndBootstrap(ctx, tx, name); err != nil { // before the offsets, as Join does
			return err
		}
		if err := consumers.Forget(ctx, tx, name); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, forgetFilterSQL, pgx.StrictNamedArgs{"consumer": name}); err != nil {
			return fmt.Errorf("forget the filter of projection %s: %w", name, err)
		}
		return clear(ctx, tx)
	})
}

// These types and errors belong to what this package returns, so your program imports no other one.
type (
	// Lagging is how far a projection is behind the streams.
	Lagging = consumers.ConsumerLag
	// Letters has the operations on the dead letters of a projection.
	Letters = consumers.DeadLetters
	// Letter is a parked event.
	Letter = consumers.DeadLetter
	// LetterFilter selects dead letters.
	LetterFilter = consumers.DeadLetterFilter
	// LetterRequest names a dead letter, and who retries or discards it and why.
	LetterRequest = consumers.DeadLetterRequest
	// LetterResult is what a retry or a discard did.
	LetterResult = consumers.DeadLetterResult
	// NotFirstError reports a dead letter behind an earlier one of its aggregate.
	NotFirstError = consumers.NotFirstError
)

// ErrNoLetter reports a dead letter that does not exist. It may have been retried or discarded.
var ErrNoLetter = consumers.ErrNotParked

// Pause makes every instance of a projection finish its batch in hand and take no more events until
// Resume, also after a restart. If the projection is already paused, Pause changes nothing and
// returns false. It does not check that the projection exists.
func Pause(ctx context.Context, pool *pgxpool.Pool, name, actor, reason string) (bool, error) {
	return consumers.Pause(ctx, pool, name, consumers.Paused{Actor: actor, Reason: reason})
}

// Resume ends the pause of a projection. It returns false if the projection was not paused.
func Resume(ctx context.Context, pool *pgxpool.Pool, name string) (bool, error) {
	return consumers.Resume(ctx, pool, name)
}
