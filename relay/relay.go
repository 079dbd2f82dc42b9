package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
)

// LeaseKind is the kind of the relays' leases.
const LeaseKind = "relay"

// Config is relay's environment; the default in the tag is the only place it is written.
type Config struct {
	BatchSize       int           `env:"RELAY_BATCH_SIZE, default=1000"`      // rows per publish, 1..1000 (the server's limit for an atomic batch)
	BatchBytes      int           `env:"RELAY_BATCH_BYTES, default=4194304"`  // payload bytes per publish, 64 KiB..64 MiB
	PollInterval    time.Duration `env:"RELAY_POLL_INTERVAL, default=100ms"`  // the longest an idle relay waits before it looks again, 1ms..10s
	RoundInterval   time.Duration `env:"RELAY_ROUND_INTERVAL, default=2ms"`   // the least between two rounds of a partition that finds few rows, 0..1s
	PublishTimeout  time.Duration `env:"RELAY_PUBLISH_TIMEOUT, default=2s"`   // for an answer of the broker; after a publish the outcome is then unknown, 100ms..1m
	DrainTimeout    time.Duration `env:"RELAY_DRAIN_TIMEOUT, default=10s"`    // for the work in hand at a stop, 1s..5m
	CheckInterval   time.Duration `env:"RELAY_CHECK_INTERVAL, default=5s"`    // between looks whether a stream is still the same, 100ms..10m
	DatabaseTimeout time.Duration `env:"RELAY_DATABASE_TIMEOUT, default=30s"` // for one transaction; then the outcome is unknown, 1s..10m
	Heartbeat       time.Duration `env:"HEARTBEAT_INTERVAL, default=1m"`      // between heartbeats of a partition, 1s..1m; 0 for none
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
	between := func(name string, d, least, most time.Duration) {
		check(d >= least && d <= most, "%s is %s: want %s..%s", name, d, least, most)
	}
	check(c.BatchSize >= 1 && c.BatchSize <= 1000, "RELAY_BATCH_SIZE is %d: want 1..1000", c.BatchSize)
	check(c.BatchBytes >= 64<<10 && c.BatchBytes <= 64<<20, "RELAY_BATCH_BYTES is %d: want 65536..67108864", c.BatchBytes)
	between("RELAY_POLL_INTERVAL", c.PollInterval, time.Millisecond, 10*time.Second)
	between("RELAY_ROUND_INTERVAL", c.RoundInterval, 0, time.Second)
	between("RELAY_PUBLISH_TIMEOUT", c.PublishTimeout, 100*time.Millisecond, time.Minute)
	between("RELAY_DRAIN_TIMEOUT", c.DrainTimeout, time.Second, 5*time.Minute)
	between("RELAY_CHECK_INTERVAL", c.CheckInterval, 100*time.Millisecond, 10*time.Minute)
	between("RELAY_DATABASE_TIMEOUT", c.DatabaseTimeout, time.Second, 10*time.Minute)
	if c.Heartbeat != 0 {
		between("HEARTBEAT_INTERVAL", c.Heartbeat, time.Second, time.Minute) // the rules count on one each minute
	}
	return errors.Join(append(errs, c.Lease.Validate())...)
}

// Relay publishes the outbox of one database. Run may be called once.
type Relay struct {
	cfg     Config
	pool    *pgxpool.Pool
	broker  broker.Config
	owner   string
	log     *slog.Logger
	base    *slog.Logger // without a component, for parts that have one of their own
	metrics *metrics

	mu         sync.Mutex
	state      error                 // why nothing is published; nil while a session runs
	leaderless bool                  // the brokers had no leader for JetStream when it was last asked for
	trouble    map[int]error         // why a partition is not
	doubts     map[int]*broker.Doubt // about partitions' streams; they outlive sessions

	sessions   int           // that were tried: each connects to another server
	pace       pace          // what publishes cost, of all partitions
	floorEvery time.Duration // between samples of the horizon while there is nothing to mark; the constant but in tests
	sureAfter  time.Duration // as broker.Doubt's After; 0 but in tests
	step       func(string)  // nil but in fault tests: called at the named crash points
}

// New returns a relay over pool, which acts as the system role. It starts nothing.
func New(cfg Config, pool *pgxpool.Pool, brokerCfg broker.Config, log *slog.Logger, reg prometheus.Registerer) (*Relay, error) {
	if err := errors.Join(cfg.Validate(), brokerCfg.Validate()); err != nil {
		return nil, err
	}
	return &Relay{
		cfg: cfg, pool: pool, broker: brokerCfg, owner: lease.Owner("relay"), log: log.With("component", "relay"), base: log, metrics: newMetrics(reg),
		state: errors.New("starting"), trouble: make(map[int]error), doubts: make(map[int]*broker.Doubt), floorEvery: floorEvery,
		sessions: rand.Int(),
	}, nil
}

// forDB bounds calls of the database.
func (r *Relay) forDB(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.cfg.DatabaseTimeout)
}

// forBroker bounds calls of the broker.
func (r *Relay) forBroker(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.cfg.PublishTimeout)
}

// Ready returns why the relay cannot publish now, all of it or a partition that it holds, or nil.
func (r *Relay) Ready(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	errs := []error{r.state}
	for _, p := range slices.Sorted(maps.Keys(r.trouble)) {
		errs = append(errs, r.trouble[p])
	}
	return errors.Join(errs...)
}

func (r *Relay) setState(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = err
}

// setTrouble notes why a partition does not go on, nil when it does, and reports whether that is news.
func (r *Relay) setTrouble(partition int, err error) (news bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.trouble[partition]
	if delete(r.trouble, partition); err != nil {
		r.trouble[partition] = err
	}
	r.gauge()
	return (before == nil) != (err == nil) || err != nil && before.Error() != err.Error()
}

// setLeaderless notes whether the brokers have a leader for JetStream. Without one there is no session, and nobody holds a partition.
func (r *Relay) setLeaderless(is bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leaderless = is
	r.gauge()
}

// gauge counts the partitions that do not go on. r.mu is held.
func (r *Relay) gauge() {
	stuck, waiting := 0, 0
	for _, err := range r.trouble {
		if errors.Is(err, ErrStreamRefused) {
			stuck++
		}
		if errors.Is(err, broker.ErrNoLeader) {
			waiting++
		}
	}
	if r.leaderless {
		waiting = max(waiting, 1)
	}
	r.metrics.stuck.Set(float64(stuck))
	r.metrics.waiting.Set(float64(waiting))
}

// doubt is about the partition's stream. It is for the writer of the partition.
func (r *Relay) doubt(partition int) *broker.Doubt {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.doubts[partition] == nil {
		r.doubts[partition] = &broker.Doubt{After: r.sureAfter}
	}
	return r.doubts[partition]
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
	maxApart = time.Second // sessions: whoever stands by finds a new leader soon
)

// retryAfter is the jittered wait before attempt n (from 1) is repeated.
func retryAfter(n int) time.Duration {
	d := min(minRetry<<min(n-1, 10), maxRetry)
	return d/2 + rand.N(d/2+1)
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// Run publishes until ctx ends, then finishes the work in hand, frees its leases and returns nil. An outage of either server is waited
// out; a stream that is not this database's is refused, and looked at again, until somebody has repaired it.
func (r *Relay) Run(ctx context.Context) error {
	var beats sync.WaitGroup
	beats.Go(func() { r.beat(ctx) })
	defer beats.Wait()
	for attempt := 1; ctx.Err() == nil; attempt++ {
		s, err := r.connect(ctx)
		if err == nil {
			began := time.Now()
			r.setState(nil)
			err = s.run(ctx)
			s.nc.Close()
			if time.Since(began) > maxRetry {
				attempt = 0
			}
		}
		if ctx.Err() != nil {
			break
		}
		wait := min(retryAfter(attempt+1), maxApart)
		r.setState(err)
		r.log.WarnContext(ctx, "relay session ended, trying again", "wait", wait, "err", err)
		sleep(ctx, wait)
	}
	r.setState(errors.New("stopped"))
	return nil
}
