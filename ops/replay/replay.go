package replay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
)

// ErrRunning reports that another replay of the consumer is running.
var ErrRunning = errors.New("replay: another replay of this consumer is running")

// Source is where a replay gets the contents of a projection.
type Source string

// The sources. Auto is the stream if the streams have every event that was ever published,
// otherwise the truth.
const (
	Auto   Source = "auto"
	Stream Source = "stream"
	Truth  Source = "truth"
)

// Deps are the dependencies of a replay.
type Deps struct {
	URL       string           // the projections' database; the login owns the tables, as for migrations
	Postgres  postgres.Config  // for the pool of the replay's consumer
	Truth     *pgxpool.Pool    // acts as the system role
	Kinds     *catalog.Catalog // the projection's catalog; nil for a projection of the built-in kinds
	JetStream jetstream.JetStream
	Broker    broker.Config
	Log       *slog.Logger
}

// Options control a replay.
type Options struct {
	From     Source
	DryRun   bool
	Stall    time.Duration  // give up after this time without progress if the consumer reports an error; 0 means 30 s
	Progress func(Progress) // called now and then, by one goroutine at a time; may be nil

	at func(ctx context.Context, step string) // for tests; called between steps
}

// Progress is the progress of a replay.
type Progress struct {
	Step  string // the current step: reading the truth, applying the stream, switching
	Done  int64  // events applied
	Total int64  // events to apply as far as known; 0 if unknown
}

// Report is the result of a replay, or the plan of a dry run.
type Report struct {
	Consumer        string   `json:"consumer"`
	From            Source   `json:"from"`
	Because         string   `json:"because"` // why it reads that source
	Messages        uint64   `json:"stream_messages"`
	Tables          []string `json:"tables"`  // the rebuilt tables; none for a record
	Events          int64    `json:"events"`  // applied, including entities of the truth
	Seconds         float64  `json:"seconds"` // in total
	EventsPerSecond float64  `json:"events_per_second"`
	DeadLetters     int64    `json:"dead_letters"` // of the consumer after the replay
	Switched        bool     `json:"switched"`
	SwitchSeconds   float64  `json:"switch_seconds"` // the time that live batches waited in the last attempt
	SwitchTries     int      `json:"switch_tries"`
}

const (
	pollInterval = 100 * time.Millisecond
	nearlyThere  = 2 * time.Second // the lag at which follow prepares the new tables for readers, and then switches
	defaultStall = 30 * time.Second
)

// replay is one run.
type replay struct {
	deps   Deps
	opts   Options
	p      projections.Projection
	name   string // the consumer's
	shadow string // the schema of the new tables
	old    string // the schema that the live tables go to
	live   string // the schema of the live tables
	conn   *pgx.Conn
	pool   *pgxpool.Pool // search_path is the shadow's
	why    string        // the last attempt to switch failed
	events atomic.Int64

	streams streamsState // at the beginning of the replay
}

// Run replays the projection. It may run again after any interruption. When ctx ends, Run stops and
// leaves the live tables unchanged. It returns ErrRunning if another replay of the consumer is
// running.
func Run(ctx context.Context, deps Deps, p projections.Projection, opts Options) (report Report, err error) {
	start := time.Now()
	if opts.Stall == 0 {
		opts.Stall = defaultStall
	}
	if opts.Progress == nil {
		opts.Progress = func(Progress) {}
	}
	if opts.at == nil {
		opts.at = func(context.Context, string) {}
	}
	if record, ok := p.(projections.Record); ok { // it has no tables of its own to build
		p = record.ForReplay()
	}
	r := &replay{deps: deps, opts: opts, p: p, name: p.Name()}
	if err := r.lock(ctx); err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, r.unlock(context.WithoutCancel(ctx))) }()
	if ours, err := cells.Read(ctx, r.conn, deps.Broker.Stream); err != nil {
		return report, err
	} else if err := ours.RequireSole(); err != nil { // the new tables would lack the events of other cells
		return report, fmt.Errorf("replay %s from one truth or its streams: %w", r.name, err)
	}
	var known []outbox.Partition
	if deps.Truth != nil {
		if known, err = outbox.Partitions(ctx, deps.Truth); err != nil {
			return report, err
		}
	}
	if r.streams, err = readStreams(ctx, deps.JetStream, deps.Broker, known); err != nil {
		return report, err
	}
	from, because, err := r.streams.choose(opts.From)
	if err != nil {
		return report, err
	}
	report = Report{Consumer: r.name, From: from, Because: because, Messages: r.streams.messages, Tables: append([]string{}, p.Tables()...)}
	if opts.DryRun {
		return report, nil
	}
	opts.at(ctx, "start")
	if err := r.makeShadow(ctx); err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, r.drop(context.WithoutCancel(ctx))) }()
	if err := r.build(ctx, from, &report); err != nil {
		return report, err
	}
	report.Events, report.Seconds = r.events.Load(), time.Since(start).Seconds()
	report.EventsPerSecond = float64(report.Events) / report.Seconds
	return report, nil
}

// build fills the new tables, catches up and switches.
func (r *replay) build(ctx context.Context, from Source, report *Report) error {
	path := pgx.Identifier{r.shadow}.Sanitize()
	if len(r.p.Tables()) == 0 {
		path += ", " + pgx.Identifier{r.live}.Sanitize()
	}
	var err error
	r.pool, err = postgres.OpenWith(ctx, r.deps.URL, r.deps.Postgres, postgres.RoleSystem, r.name+suffix, map[string]string{
		"search_path": path,
		// A crash of the server takes commits back together with their offsets. The switch uses
		// another connection and waits for the disk.
		"synchronous_commit": "off",
		// The same settings as in a consumer's transactions: the tables grow from empty, under
		// plans from when they were empty.
		"plan_cache_mode": "force_custom_plan", "enable_seqscan": "off", "random_page_cost": "1.1",
	})
	if err != nil {
		return err
	}
	defer r.pool.Close()
	if from == Truth {
		if err := r.setOffsets(ctx); err != nil {
			return err
		}
		if err := r.readTruth(ctx); err != nil {
			return err
		}
	}
	r.opts.at(ctx, "filled")
	consumer, err := consumers.New(consumers.Config{
		BatchEvents: 10000, BatchBytes: 16 << 20, ApplyTimeout: time.Minute, LagInterval: 5 * time.Second, Recheck: 5 * time.Second,
		Lease: lease.Config{TTL: 10 * time.Second},
	}, consumers.Deps{Pool: r.pool, Kinds: r.deps.Kinds, JetStream: r.deps.JetStream, Registry: prometheus.NewRegistry(), Log: r.deps.Log,
		Streams: consumers.Streams{Name: r.deps.Broker.Stream, Prefix: r.deps.Broker.Prefix, Timeout: r.deps.Broker.Timeout},
	}, counted{r.p, r})
	if err != nil {
		return err
	}
	cctx, stop := context.WithCancel(ctx)
	var g errgroup.Group
	g.Go(func() error { return consumer.Run(cctx) })
	err = r.follow(ctx, consumer, report)
	stop()
	return errors.Join(err, g.Wait())
}

// follow waits until the new tables have caught up, and switches to them.
func (r *replay) follow(ctx context.Context, consumer *consumers.Consumer, report *Report) error {
	if err := r.catchUp(ctx, consumer); err != nil {
		return err
	}
	r.opts.at(ctx, "caught up")
	r.opts.Progress(Progress{Step: "preparing the tables for readers", Done: r.events.Load()})
	if err := r.vacuum(ctx); err != nil {
		return err
	}
	for {
		if err := r.catchUp(ctx, consumer); err != nil {
			return err
		}
		report.SwitchTries++
		step := "switching"
		if r.why != "" {
			step += " again (" + r.why + ")"
		}
		r.opts.Progress(Progress{Step: step, Done: r.events.Load()})
		done, err := r.trySwitch(ctx, report)
		if err != nil || done {
			return err
		}
		if err := work.Sleep(ctx, min(time.Duration(report.SwitchTries)*pollInterval, 20*pollInterval)); err != nil {
			return err
		}
	}
}

// catchUp returns when the lag of the new tables is below nearlyThere.
func (r *replay) catchUp(ctx context.Context, consumer *consumers.Consumer) error {
	last, moved, total := int64(-1), time.Now(), int64(0)
	for {
		lags, err := consumers.Lag(ctx, r.pool, r.deps.JetStream, r.deps.Broker, r.name+suffix)
		if err != nil && !postgres.IsTransient(err) && !errors.Is(err, broker.ErrNoLeader) {
			return err
		}
		why := errors.Join(err, consumer.Ready(ctx))
		if err == nil {
			lag := lags[0]
			if lag.Messages == 0 || lag.Seconds < nearlyThere.Seconds() && why == nil {
				return nil
			}
			done := r.events.Load()
			total = max(total, done+lag.Messages)
			r.opts.Progress(Progress{Step: "applying the stream", Done: done, Total: total})
			if lag.Messages != last {
				last, moved = lag.Messages, time.Now()
			}
		}
		if why != nil && time.Since(moved) > r.opts.Stall {
			return fmt.Errorf("the new tables of %s do not catch up with the stream: %w", r.name, why)
		}
		if err := work.Sleep(ctx, pollInterval); err != nil {
			return err
		}
	}
}

// counted is the projection under the name of the replay's consumer. It counts the applied events.
type counted struct {
	projections.Projection
	r *replay
}

// suffix is the end of the name of the replay's consumer, which is also part of names on the
// broker.
const suffix = "-replay"

func (c counted) Name() string { return c.r.name + suffix }

func (c counted) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	err := c.Projection.Apply(ctx, tx, events)
	if err == nil {
		c.r.events.Add(int64(len(events)))
	}
	return err
}
