package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
)

// LeaseKind is the kind of the relays' leases.
const LeaseKind = "relay"

// Config is relay's environment; the default in the tag is the only place it is written.
type Config struct {
	BatchSize      int           `env:"RELAY_BATCH_SIZE, default=500"`      // rows per publish, 1..1000 (the server's limit for an atomic batch)
	BatchBytes     int           `env:"RELAY_BATCH_BYTES, default=4194304"` // payload bytes per publish, 64 KiB..64 MiB
	PollInterval   time.Duration `env:"RELAY_POLL_INTERVAL, default=100ms"` // the longest an idle relay waits before it looks again, 1ms..10s
	PublishTimeout time.Duration `env:"RELAY_PUBLISH_TIMEOUT, default=5s"`  // for an answer of the broker; after a publish the outcome is then unknown, 100ms..1m
	StreamInterval time.Duration `env:"RELAY_STREAM_INTERVAL, default=5s"`  // between looks whether the stream is still there and the same, 100ms..1m
	Publishers     int           `env:"RELAY_PUBLISHERS, default=4"`        // publishes and catch-ups at once, 1..32
	DrainTimeout   time.Duration `env:"RELAY_DRAIN_TIMEOUT, default=10s"`   // for the work in hand at a stop, 1s..5m
	// The database ends a statement by its own limit; this is for a connection that passes nothing any more.
	DatabaseTimeout time.Duration `env:"RELAY_DATABASE_TIMEOUT, default=30s"` // for one transaction; then the outcome is unknown, 1s..10m
	Lease           lease.Config
}

// Validate reports every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.BatchSize >= 1 && c.BatchSize <= 1000, "RELAY_BATCH_SIZE is %d: want 1..1000", c.BatchSize)
	check(c.BatchBytes >= 64<<10 && c.BatchBytes <= 64<<20, "RELAY_BATCH_BYTES is %d: want 65536..67108864", c.BatchBytes)
	check(c.PollInterval >= time.Millisecond && c.PollInterval <= 10*time.Second, "RELAY_POLL_INTERVAL is %s: want 1ms..10s", c.PollInterval)
	check(c.PublishTimeout >= 100*time.Millisecond && c.PublishTimeout <= time.Minute, "RELAY_PUBLISH_TIMEOUT is %s: want 100ms..1m", c.PublishTimeout)
	check(c.StreamInterval >= 100*time.Millisecond && c.StreamInterval <= time.Minute, "RELAY_STREAM_INTERVAL is %s: want 100ms..1m", c.StreamInterval)
	check(c.Publishers >= 1 && c.Publishers <= 32, "RELAY_PUBLISHERS is %d: want 1..32", c.Publishers)
	check(c.DrainTimeout >= time.Second && c.DrainTimeout <= 5*time.Minute, "RELAY_DRAIN_TIMEOUT is %s: want 1s..5m", c.DrainTimeout)
	check(c.DatabaseTimeout >= time.Second && c.DatabaseTimeout <= 10*time.Minute, "RELAY_DATABASE_TIMEOUT is %s: want 1s..10m", c.DatabaseTimeout)
	return errors.Join(append(errs, c.Lease.Validate())...)
}

// Relay publishes the outbox of one database. Run may be called once.
type Relay struct {
	cfg     Config
	pool    *pgxpool.Pool
	broker  broker.Config
	owner   string
	log     *slog.Logger
	metrics *metrics
	state   atomic.Pointer[string]   // why the relay is not ready; nil when it is
	strays  [event.Partitions]uint64 // last foreign message that was counted; each is its partition's job's

	atomicFrom int           // the constant but in tests
	floorEvery time.Duration // the constant but in tests
	step       func(string)  // nil but in fault tests: called at the named crash points
}

// New returns a relay over pool, which acts as the system role. It starts nothing.
func New(cfg Config, pool *pgxpool.Pool, brokerCfg broker.Config, log *slog.Logger, reg prometheus.Registerer) (*Relay, error) {
	if err := errors.Join(cfg.Validate(), brokerCfg.Validate()); err != nil {
		return nil, err
	}
	r := &Relay{
		cfg: cfg, pool: pool, broker: brokerCfg, owner: lease.Owner("relay"),
		log: log.With("component", "relay"), metrics: newMetrics(reg),
		atomicFrom: atomicFrom, floorEvery: floorEvery,
	}
	r.notReady("starting")
	return r, nil
}

// forDB bounds calls of the database.
func (r *Relay) forDB(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.cfg.DatabaseTimeout)
}

func (r *Relay) notReady(why string) { r.state.Store(&why) }

// Ready returns why the relay cannot publish now, or nil.
func (r *Relay) Ready(context.Context) error {
	if why := r.state.Load(); why != nil {
		return errors.New(*why)
	}
	return nil
}

// at is a crash point of the fault tests.
func (r *Relay) at(step string) {
	if r.step != nil {
		r.step(step)
	}
}

const (
	minRetry = 50 * time.Millisecond
	maxRetry = 5 * time.Second
)

// retryAfter is the jittered wait before attempt n (from 1) is repeated.
func retryAfter(n int) time.Duration {
	d := min(minRetry<<min(n-1, 10), maxRetry)
	return d/2 + rand.N(d/2+1)
}

// Run publishes until ctx ends, then finishes the work in hand, frees its leases and returns nil. An outage of either server
// is waited out; a stream that is not this database's is refused, and looked at again, until somebody has repaired it.
func (r *Relay) Run(ctx context.Context) error {
	for attempt := 1; ctx.Err() == nil; attempt++ {
		s, err := r.connect(ctx)
		if err == nil {
			attempt = 0
			r.state.Store(nil)
			r.metrics.refused.Set(0)
			r.metrics.stuck.Set(0)
			err = s.run(ctx)
			s.nc.Close()
		}
		if ctx.Err() != nil {
			break
		}
		wait := retryAfter(attempt + 1)
		r.notReady(err.Error())
		if errors.Is(err, ErrStreamRefused) {
			wait = maxRetry
			r.metrics.refused.Set(1)
			r.metrics.stuck.Set(event.Partitions)
			r.log.ErrorContext(ctx, "nothing is published until the stream is repaired", "err", err)
		} else {
			r.log.WarnContext(ctx, "relay session ended, trying again", "wait", wait, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
	r.notReady("stopped")
	return nil
}
