package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/work"
)

// LeaseKind is the kind of the relays' leases in package lease.
const LeaseKind = "relay"

// Config is the relay's environment. The tags are the only place of the defaults.
type Config struct {
	// rows per publish, 1..1000 (the server's limit for an atomic batch)
	BatchSize  int `env:"RELAY_BATCH_SIZE, default=1000"`
	BatchBytes int `env:"RELAY_BATCH_BYTES, default=4194304"` // payload bytes per publish, 64 KiB..64 MiB
	// the longest wait of an idle relay before its next claim, 1ms..10s
	PollInterval time.Duration `env:"RELAY_POLL_INTERVAL, default=100ms"`
	// the least time between two rounds of a partition with few rows, 0..1s
	RoundInterval time.Duration `env:"RELAY_ROUND_INTERVAL, default=2ms"`
	// for an answer of the broker, 100ms..1m; after a publish without one the outcome is unknown
	PublishTimeout time.Duration `env:"RELAY_PUBLISH_TIMEOUT, default=2s"`
	DrainTimeout   time.Duration `env:"RELAY_DRAIN_TIMEOUT, default=10s"` // at shutdown, for the work in progress, 1s..5m
	// between two comparisons of a stream with the database, 100ms..10m
	CheckInterval   time.Duration `env:"RELAY_CHECK_INTERVAL, default=5s"`
	DatabaseTimeout time.Duration `env:"RELAY_DATABASE_TIMEOUT, default=30s"` // for one transaction, 1s..10m; then its outcome is unknown
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
		between("HEARTBEAT_INTERVAL", c.Heartbeat, time.Second, time.Minute) // alert rules expect one per minute
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
	base    *slog.Logger // without a component: for parts that have their own
	metrics *metrics
	names   names
	objects *objects // nil without NATS_LIVE_OBJECTS

	mu         sync.Mutex
	state      error                  // why the relay publishes nothing; nil during a session
	leaderless bool                   // the brokers had no JetStream leader at the last attempt
	trouble    map[int]error          // why a partition does not publish
	doubts     map[loss]*broker.Doubt // they outlive sessions
	leases     *lease.Group           // of the session; nil without one
	durables   *durables              // nil if another relay exports them

	sessions      int           // attempted: each connects to another server
	pace          pace          // measured cost of publishes, over all partitions
	markWithin    time.Duration // the constant; tests change it
	floorEvery    time.Duration // between samples of the horizon while there is nothing to mark; tests change it
	durablesEvery time.Duration // between readings of the durable consumers; tests change it
	sureAfter     time.Duration // broker.Doubt's After; 0 except in tests
	step          func(string)  // called at the named crash points; nil except in fault tests
}

// New returns a relay over pool, which acts as the system role. It starts nothing.
func New(cfg Config, pool *pgxpool.Pool, brokerCfg broker.Config, log *slog.Logger, reg prometheus.Registerer) (*Relay, error) {
	if err := errors.Join(cfg.Validate(), brokerCfg.Validate()); err != nil {
		return nil, err
	}
	r := &Relay{
		cfg: cfg, pool: pool, broker: brokerCfg, owner: lease.Owner("relay"), log: log.With("component", "relay"), base: log,
		metrics: newMetrics(reg), names: names{pool: pool, source: brokerCfg.Source},
		state: errors.New("starting"), trouble: make(map[int]error), doubts: make(map[loss]*broker.Doubt), floorEvery: floorEvery,
		markWithin: markWithin, sessions: rand.Int(), durablesEvery: durablesEvery,
	}
	if brokerCfg.LiveObjects {
		r.objects = newObjects(r)
	}
	return r, reg.Register(newDurables(r))
}

// forDB bounds calls to the database.
func (r *Relay) forDB(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.cfg.DatabaseTimeout)
}

// forBroker bounds calls to the broker.
func (r *Relay) forBroker(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.cfg.PublishTimeout)
}

// Ready returns why the relay, or a partition that it holds, cannot publish now; nil if all can.
func (r *Relay) Ready(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	errs := []error{r.state}
	if r.leases != nil {
		errs = append(errs, r.leases.Err())
	}
	for _, p := range slices.Sorted(maps.Keys(r.trouble)) {
		errs = append(errs, r.trouble[p])
	}
	return errors.Join(errs...)
}

func (r *Relay) setLeases(g *lease.Group) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leases = g
}

func (r *Relay) setState(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = err
}

// setTrouble records why a partition does not publish, or nil if it does. It reports whether that
// differs from before.
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

// setLeaderless records whether the brokers lack a leader for JetStream. Without one there is no
// session, so no relay holds a partition.
func (r *Relay) setLeaderless(is bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leaderless = is
	r.gauge()
}

// gauge counts the partitions that do not publish. The caller holds r.mu.
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

// loss is what a partition's stream seems to have lost.
type loss struct {
	partition int
	middle    bool // messages that no mark covers; otherwise the stream or its end
}

// doubt returns the doubt about a loss. Only the partition's writer may use it.
func (r *Relay) doubt(of loss) *broker.Doubt {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.doubts[of] == nil {
		r.doubts[of] = &broker.Doubt{After: r.sureAfter}
	}
	return r.doubts[of]
}

// at calls the fault tests at a crash point.
func (r *Relay) at(step string) {
	if r.step != nil {
		r.step(step)
	}
}

// maxReconnectDelay is the longest time between sessions: a standby finds a new leader soon.
const maxReconnectDelay = time.Second

// Run publishes until ctx ends. Then it finishes the work in progress, frees its leases and returns
// nil. It waits for an unavailable server. It refuses a stream that does not continue its database,
// and checks the stream again until an operator has repaired it.
func (r *Relay) Run(ctx context.Context) error {
	var beats sync.WaitGroup
	beats.Go(func() { r.beat(ctx) })
	defer beats.Wait()
	if r.objects != nil {
		beats.Go(func() { r.objects.run(ctx) })
		defer close(r.objects.queue)
	}
	for attempt := 1; ctx.Err() == nil; attempt++ {
		s, err := r.connect(ctx)
		if err == nil {
			began := time.Now()
			r.setState(nil)
			err = s.run(ctx)
			s.nc.Close()
			if time.Since(began) > work.MaxRetry {
				attempt = 0
			}
		}
		if ctx.Err() != nil {
			break
		}
		wait := min(work.Retry(attempt+1), maxReconnectDelay)
		r.setState(err)
		r.log.WarnContext(ctx, "relay session ended; retrying", "wait", wait, "err", err)
		work.Sleep(ctx, wait)
	}
	r.setState(errors.New("stopped"))
	return nil
}

// UseOneProcessor limits this process to one processor at a time, unless GOMAXPROCS is set. Use it
// for a process that only runs a relay. A relay mostly waits for its two servers, some microseconds
// at a time. On several processors, the Go runtime spends more on waking them than the work takes
// (docs/performance.md). One processor publishes as fast as a broker accepts.
func UseOneProcessor() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
}
