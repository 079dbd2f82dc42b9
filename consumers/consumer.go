package consumers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds/catalog"
)

// Projection is what a consumer does with events. Its name is the consumer's in consumer_offsets
// and leases.
type Projection interface {
	Name() string
	// Wants reports whether Apply gets the events of an aggregate type.
	Wants(aggregateType string) bool
	// Apply changes the projection's tables in tx, by events in stream order, of several tenants
	// and aggregates. It uses nothing but tx. After a rollback it may be called again for the same
	// events. The consumer parks an event for which Apply returns an error that event.IsPermanent
	// reports, or any other error that is not the database's own trouble.
	Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error
}

// Config is the environment of every consumer.
type Config struct {
	BatchEvents  int           `env:"CONSUMER_BATCH_EVENTS, default=4000"`   // events per transaction at most, 1..20000
	BatchBytes   int           `env:"CONSUMER_BATCH_BYTES, default=8388608"` // payload bytes per transaction at most, 1 MiB..256 MiB
	ApplyTimeout time.Duration `env:"CONSUMER_APPLY_TIMEOUT, default=60s"`   // of one transaction, also of the last one at shutdown
	// LagInterval is the time between two reads of the streams, for the lag and for the identity of
	// each stream.
	LagInterval time.Duration `env:"CONSUMER_LAG_INTERVAL, default=5s"`
	Recheck     time.Duration `env:"CONSUMER_RECHECK_INTERVAL, default=10s"` // between two checks of a partition that is stuck
	Lease       lease.Config
}

// Validate reports every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	if c.BatchEvents < 1 || c.BatchEvents > 20000 {
		errs = append(errs, fmt.Errorf("CONSUMER_BATCH_EVENTS is %d: want 1..20000", c.BatchEvents))
	}
	if c.BatchBytes < 1<<20 || c.BatchBytes > 256<<20 {
		errs = append(errs, fmt.Errorf("CONSUMER_BATCH_BYTES is %d: want 1 MiB..256 MiB", c.BatchBytes))
	}
	for name, d := range map[string]time.Duration{"CONSUMER_APPLY_TIMEOUT": c.ApplyTimeout, "CONSUMER_LAG_INTERVAL": c.LagInterval,
		"CONSUMER_RECHECK_INTERVAL": c.Recheck} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s is %s: want more than 0", name, d))
		}
	}
	return errors.Join(append(errs, c.Lease.Validate())...)
}

// Streams names the streams that carry the events, and bounds the wait for an answer about one. The
// zero value fits the configuration that Tidings ships with.
type Streams struct {
	Name    string        // NATS_STREAM of the relays: partition 0's stream is NAME-0; "EVENTS" when empty
	Prefix  string        // NATS_SUBJECT_PREFIX of the relays; "events" when empty
	Timeout time.Duration // of one request about a stream; 5 seconds when 0
}

const defaultStream = "EVENTS"

func (s Streams) config() broker.Config {
	return broker.Config{Stream: cmp.Or(s.Name, defaultStream), Prefix: cmp.Or(s.Prefix, "events"),
		Timeout: cmp.Or(s.Timeout, 5*time.Second)}
}

// Deps are the dependencies of a consumer. The pool's login may read and write the projection's
// tables and the tables of the set migrations.Consumers.
type Deps struct {
	Pool      *pgxpool.Pool
	Kinds     *catalog.Catalog // the projection's catalog, which its Wants uses; nil for a projection of the built-in kinds
	JetStream jetstream.JetStream
	Streams   Streams
	Remedy    string // the command that helps after unread events expired; "run `tidings replay --consumer NAME`" when empty
	Registry  prometheus.Registerer
	Log       *slog.Logger
	// Expired is called when the consumer finds that events after its position on a stream expired
	// before it read them, and again while that remains so. It may be nil, and must not block.
	Expired func(Start)
}

// LeaseKind returns the kind of a consumer's leases on the partitions of the streams with a name
// (broker.Config.Stream). All cells number their partitions from 0, so the kind contains the name
// of the streams unless it is the default one.
func LeaseKind(consumer, stream string) string {
	if stream == defaultStream {
		return consumer
	}
	return consumer + "@" + stream
}

// Consumer is one instance of a consumer. Other instances of the same name may run anywhere; they
// share the partitions. An instance that reads streams of another name reads another cell
// (docs/adr/0018-cells.md) into the same tables.
type Consumer struct {
	cfg        Config
	deps       Deps
	broker     broker.Config // Deps.Streams
	projection Projection
	name       string
	group      *lease.Group
	metrics    *metrics
	log        *slog.Logger
	lag        lagClock
	sampleNow  work.Signal  // a read of the streams is due at once
	step       func(string) // nil but in fault tests: called at the named crash points

	readers work.Crew[int, *reader] // of the partitions that this instance holds

	mu       sync.Mutex
	streams  map[string]broker.Stream // by name, as last read
	troubles map[int]trouble          // why held partitions do not continue
	cutOff   error                    // why this instance takes no partitions; nil when it does
}

// CollectLess lets the heap of this process grow to three times what is in use, instead of two,
// unless GOGC is set. Use it for a process that only runs a consumer. One that catches up holds
// thousands of events, and allocates a few KB for each. The garbage collector then takes a tenth
// less of the processor time, for 20 MiB.
func CollectLess() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(200)
	}
}

// New returns a consumer that applies projection. It starts nothing.
func New(cfg Config, deps Deps, projection Projection) (*Consumer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	name := projection.Name()
	deps.Remedy = cmp.Or(deps.Remedy, "run `tidings replay --consumer "+name+"`")
	log := deps.Log.With("component", "consumer", "consumer", name)
	group, err := lease.New(cfg.Lease, deps.Pool, LeaseKind(name, deps.Streams.config().Stream), lease.Owner(name), deps.Log)
	if err != nil {
		return nil, err
	}
	c := &Consumer{
		cfg: cfg, deps: deps, broker: deps.Streams.config(), projection: projection, name: name, group: group, log: log,
		lag: lagClock{stale: 3 * cfg.LagInterval}, sampleNow: work.NewSignal(),
		streams: make(map[string]broker.Stream), troubles: make(map[int]trouble),
	}
	if c.metrics, err = newMetrics(deps.Registry, name, func() float64 { return c.lag.seconds(time.Now()) }); err != nil {
		return nil, fmt.Errorf("register the metrics of consumer %s: %w", name, err)
	}
	return c, nil
}

// Run works until ctx ends. Then it takes no more events, finishes the batches in hand within
// ApplyTimeout, frees its leases and returns nil. If NATS does not answer, that can take 10 s
// longer, because the NATS client does not stop its requests earlier. Run logs failures and
// retries.
func (c *Consumer) Run(ctx context.Context) error {
	c.lag.start(time.Now())
	leases, free := context.WithCancel(context.WithoutCancel(ctx))
	var watching sync.WaitGroup
	watching.Go(func() { c.watch(leases) })
	c.loopUnpaused(ctx)
	free() // only now may another instance have the partitions
	watching.Wait()
	return nil
}

// Ready returns why the consumer does not do its work: it has no connection to the broker,
// partitions are stuck or wait for a leader, or the last attempt failed. A consumer that is paused
// is ready.
func (c *Consumer) Ready(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := []error{c.cutOff, c.group.Err()}
	for _, t := range c.troubles {
		errs = append(errs, t.err)
	}
	return errors.Join(errs...)
}

// at is a crash point of the fault tests.
func (c *Consumer) at(step string) {
	if c.step != nil {
		c.step(step)
	}
}

// idle is the time between two checks for a lease or for a closed predecessor.
const idle = time.Second

// loop runs a reader for each partition that this instance holds, until ctx ends.
func (c *Consumer) loop(ctx context.Context) {
	defer c.readers.Close()
	for ctx.Err() == nil {
		held := c.group.Held()
		c.metrics.held.Set(float64(len(held)))
		c.readers.Assign(ctx, held, func(n int) (*reader, func(context.Context)) {
			r := c.newReader(n)
			return r, r.run
		})
		select {
		case <-ctx.Done():
		case <-c.group.Changed():
		case <-time.After(idle):
		}
	}
}

// trouble is the reason why a partition does not continue.
type trouble struct {
	kind troubleKind
	err  error
}

type troubleKind int

const (
	failing troubleKind = iota // the last attempt failed
	waiting                    // the stream has no leader that answers
	stuck                      // an operator has to act
)

// trouble records why a partition does not continue. It logs each failed attempt; another reason it
// logs once.
func (c *Consumer) trouble(ctx context.Context, partition int, kind troubleKind, err error) {
	c.mu.Lock()
	before, known := c.troubles[partition]
	c.troubles[partition] = trouble{kind, err}
	c.count()
	c.mu.Unlock()
	same := known && before.kind == kind && before.err.Error() == err.Error()
	switch stream := c.broker.StreamName(partition); {
	case kind == stuck && !same:
		c.log.ErrorContext(ctx, "partition stopped", "stream", stream, "err", err, "runbook", "ConsumerPartitionStuck")
	case kind == waiting && !same:
		c.log.WarnContext(ctx, "partition waits for a leader of its stream", "stream", stream, "err", err)
	case kind == failing:
		c.metrics.failures.Inc()
		c.log.WarnContext(ctx, "reading or applying events failed, retrying", "stream", stream, "err", err)
	}
}

// clear records that a partition continues.
func (c *Consumer) clear(ctx context.Context, partition int) {
	c.mu.Lock()
	t, known := c.troubles[partition]
	delete(c.troubles, partition)
	c.count()
	c.mu.Unlock()
	if known && t.kind != failing {
		c.log.InfoContext(ctx, "partition continues", "stream", c.broker.StreamName(partition))
	}
}

// count sets the gauges of partitions that do not continue. The caller holds c.mu.
func (c *Consumer) count() {
	n := make(map[troubleKind]int)
	for _, t := range c.troubles {
		n[t.kind]++
	}
	if c.cutOff != nil {
		n[waiting] += len(c.streams)
	}
	c.metrics.stuck.Set(float64(n[stuck]))
	c.metrics.waiting.Set(float64(n[waiting]))
}

func (c *Consumer) troubleOf(partition int) (trouble, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, ok := c.troubles[partition]
	return t, ok
}
