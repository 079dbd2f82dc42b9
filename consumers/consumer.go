package consumers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
)

// Projection is what a consumer does with events. Its name is the consumer's in consumer_offsets and leases.
type Projection interface {
	Name() string
	// Aggregates returns the aggregate types whose events Apply gets.
	Aggregates() []string
	// Apply changes the projection's tables in tx, by events in stream order, of several tenants and aggregates; it touches
	// nothing but tx, and may be called again for the same events after a rollback. An error that event.IsPermanent parks an
	// event; so does any other that is not the database's own trouble.
	Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error
}

// Config is the environment of every consumer.
type Config struct {
	BatchEvents  int           `env:"CONSUMER_BATCH_EVENTS, default=4000"`    // events per transaction at most, 1..20000
	BatchBytes   int           `env:"CONSUMER_BATCH_BYTES, default=8388608"`  // payload bytes per transaction at most, 1 MiB..256 MiB
	ApplyTimeout time.Duration `env:"CONSUMER_APPLY_TIMEOUT, default=60s"`    // of one transaction, also of the last one at shutdown
	LagInterval  time.Duration `env:"CONSUMER_LAG_INTERVAL, default=5s"`      // between looks at the stream for the lag, and for its identity
	Recheck      time.Duration `env:"CONSUMER_RECHECK_INTERVAL, default=10s"` // between looks at partitions that are stuck
	Lease        lease.Config
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
	for name, d := range map[string]time.Duration{"CONSUMER_APPLY_TIMEOUT": c.ApplyTimeout, "CONSUMER_LAG_INTERVAL": c.LagInterval, "CONSUMER_RECHECK_INTERVAL": c.Recheck} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s is %s: want more than 0", name, d))
		}
	}
	return errors.Join(append(errs, c.Lease.Validate())...)
}

// Deps are what a consumer works with. The pool is the projections' and acts as the system role.
type Deps struct {
	Pool      *pgxpool.Pool
	JetStream jetstream.JetStream
	Broker    broker.Config
	Registry  prometheus.Registerer
	Log       *slog.Logger
}

// Consumer is one instance of a consumer. Others of the same name may run anywhere; they share the partitions.
type Consumer struct {
	cfg        Config
	deps       Deps
	projection Projection
	name       string
	wants      map[string]bool
	group      *lease.Group
	metrics    *metrics
	log        *slog.Logger
	lag        lagClock
	strays     uint64       // last message outside of every partition that was counted; the reader's of the session
	step       func(string) // nil but in fault tests: called at the named crash points

	mu    sync.Mutex
	stuck map[int]stuck
	last  error // of the last session; nil once a batch went through
}

// stuck is why a partition does not go on, and the offset it stands at.
type stuck struct {
	offset uint64
	err    error
}

// New returns a consumer that applies projection. It starts nothing.
func New(cfg Config, deps Deps, projection Projection) (*Consumer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	name := projection.Name()
	log := deps.Log.With("component", "consumer", "consumer", name)
	group, err := lease.New(cfg.Lease, deps.Pool, name, lease.Owner(name), event.Partitions, log)
	if err != nil {
		return nil, err
	}
	c := &Consumer{
		cfg: cfg, deps: deps, projection: projection, name: name, wants: make(map[string]bool), group: group, log: log,
		stuck: make(map[int]stuck), lag: lagClock{stale: 3 * cfg.LagInterval},
	}
	for _, a := range projection.Aggregates() {
		c.wants[a] = true
	}
	if c.metrics, err = newMetrics(deps.Registry, name, func() float64 { return c.lag.seconds(time.Now()) }); err != nil {
		return nil, fmt.Errorf("register the metrics of consumer %s: %w", name, err)
	}
	return c, nil
}

// Run works until ctx ends: then it takes no more, finishes the batch in hand within ApplyTimeout, frees its leases and returns
// nil. While NATS does not answer that can take 10 s longer: its client does not stop asking before. Failures are logged and
// tried again.
func (c *Consumer) Run(ctx context.Context) error {
	c.lag.start(time.Now())
	leases, free := context.WithCancel(context.WithoutCancel(ctx))
	var g errgroup.Group
	g.Go(func() error { return c.group.Run(leases) })
	g.Go(func() error {
		c.watchLag(ctx)
		return nil
	})
	g.Go(func() error {
		defer free() // only now may another instance have the partitions
		c.loopUnpaused(ctx)
		return nil
	})
	return g.Wait()
}

// Ready returns why the consumer does not do its work: partitions that are stuck, or the last failure when nothing has gone
// through since. A consumer that is paused is ready.
func (c *Consumer) Ready(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := []error{c.last}
	for _, s := range c.stuck {
		errs = append(errs, s.err)
	}
	return errors.Join(errs...)
}

// at is a crash point of the fault tests.
func (c *Consumer) at(step string) {
	if c.step != nil {
		c.step(step)
	}
}

// idle is how long to wait for a lease before looking again, should its news be missed.
const idle = time.Second

func (c *Consumer) loop(ctx context.Context) {
	wait := backoff{least: 50 * time.Millisecond, most: 5 * time.Second}
	for ctx.Err() == nil {
		held := c.group.Held()
		c.metrics.held.Set(float64(len(held)))
		c.keepStuck(held)
		if len(held) == 0 {
			select {
			case <-ctx.Done():
			case <-c.group.Changed():
			case <-time.After(idle):
			}
			continue
		}
		progress, err := c.session(ctx, held)
		if progress {
			wait.reset()
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		c.setLast(err)
		c.metrics.failures.Inc()
		c.log.WarnContext(ctx, "reading or applying events, trying again", "err", err)
		wait.sleep(ctx)
	}
}

func (c *Consumer) setLast(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = err
}

// setStuck records that a partition does not go on, and says so once per reason.
func (c *Consumer) setStuck(ctx context.Context, partition int, offset uint64, err error) {
	c.mu.Lock()
	before, known := c.stuck[partition]
	c.stuck[partition] = stuck{offset, err}
	n := len(c.stuck)
	c.mu.Unlock()
	c.metrics.stuck.Set(float64(n))
	if !known || before.err.Error() != err.Error() {
		c.log.ErrorContext(ctx, "partition stopped", "partition", event.PartitionKey(partition), "offset", offset, "err", err)
	}
}

func (c *Consumer) clearStuck(ctx context.Context, partition int) {
	c.mu.Lock()
	_, known := c.stuck[partition]
	delete(c.stuck, partition)
	n := len(c.stuck)
	c.mu.Unlock()
	c.metrics.stuck.Set(float64(n))
	if known {
		c.log.InfoContext(ctx, "partition goes on", "partition", event.PartitionKey(partition))
	}
}

func (c *Consumer) stuckAt(partition int) (stuck, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.stuck[partition]
	return s, ok
}

func (c *Consumer) anyStuck() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.stuck) > 0
}

// keepStuck forgets the partitions that are no longer held: they are another instance's to report.
func (c *Consumer) keepStuck(held []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p := range c.stuck {
		if !slices.Contains(held, p) {
			delete(c.stuck, p)
		}
	}
	c.metrics.stuck.Set(float64(len(c.stuck)))
}

// backoff waits longer after each failure, by chance between half and all of a bound that doubles.
type backoff struct{ least, most, next time.Duration }

func (b *backoff) reset() { b.next = 0 }

func (b *backoff) sleep(ctx context.Context) {
	b.next = min(max(2*b.next, b.least), b.most)
	select {
	case <-ctx.Done():
	case <-time.After(b.next/2 + rand.N(b.next/2)):
	}
}
