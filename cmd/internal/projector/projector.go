package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/brokermetrics"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/projections"
)

// Config is the environment of a projector.
type Config struct {
	DatabaseURL            string `env:"DATABASE_URL"` // of the truth; empty: no comparison with the truth
	ProjectionsDatabaseURL string `env:"PROJECTIONS_DATABASE_URL, default=$DATABASE_URL"`
	Postgres               postgres.Config
	Broker                 broker.Config
	// STREAM:PREFIX of each cell whose events the consumer applies; empty: only the streams of
	// Broker
	Cells    map[string]string `env:"NATS_CELLS"`
	Consumer consumers.Config
	Verify   VerifyConfig
}

// Validate reports all values out of bounds.
func (c Config) Validate() error {
	var missing error
	if c.ProjectionsDatabaseURL == "" {
		missing = errors.New("neither PROJECTIONS_DATABASE_URL nor DATABASE_URL is set")
	}
	errs := []error{missing, c.Postgres.Validate(), c.Broker.Validate(), c.Consumer.Validate(), c.Verify.Validate()}
	prefixes := make(map[string]bool)
	for _, cell := range c.cells() {
		if err := cell.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("NATS_CELLS: %w", err))
		}
		if prefixes[cell.Prefix] {
			errs = append(errs, fmt.Errorf("NATS_CELLS gives two cells the subjects %s.>", cell.Prefix))
		}
		prefixes[cell.Prefix] = true
	}
	if _, read := c.Cells[c.Broker.Stream]; !read && len(c.Cells) > 0 && c.DatabaseURL != "" {
		errs = append(errs, fmt.Errorf("NATS_CELLS leaves out %s: the comparison with DATABASE_URL needs its streams (NATS_STREAM)",
			c.Broker.Stream))
	}
	return errors.Join(errs...)
}

// cells returns the streams that the consumer reads, in the order of their names.
func (c Config) cells() []broker.Config {
	if len(c.Cells) == 0 {
		return []broker.Config{c.Broker}
	}
	var all []broker.Config
	for _, stream := range slices.Sorted(maps.Keys(c.Cells)) {
		cell := c.Broker
		cell.Stream, cell.Prefix = stream, c.Cells[stream]
		all = append(all, cell)
	}
	return all
}

// Part returns a part of a process that applies events to the projection until it is stopped. make
// returns the projection; its argument returns the kinds in force. The part waits for unavailable
// servers and for a database that lacks migrations. It returns broker.ErrClosed when the connection
// to NATS is closed permanently. Any number of processes may run it at once and share the work.
func Part[P projections.Projection](cfg Config, make func(now func() *kinds.Set) P) daemon.Run {
	return func(ctx context.Context, h daemon.Host) error { return run(ctx, h, cfg, make) }
}

func run[P projections.Projection](ctx context.Context, h daemon.Host, cfg Config, make func(now func() *kinds.Set) P) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	var current *catalog.Catalog
	projection, log := make(func() *kinds.Set { return current.Now() }), h.Log
	name := projection.Name()
	pool, err := postgres.Open(ctx, cfg.ProjectionsDatabaseURL, cfg.Postgres, postgres.RoleConsumer, name)
	if err != nil {
		return err
	}
	defer pool.Close()
	current = catalog.New(pool, catalog.Projections, log)
	nc, js, err := broker.Open(cfg.Broker, name, log)
	if err != nil {
		return err
	}
	defer nc.Close()
	readers, err := cfg.consumers(projection, consumers.Deps{Pool: pool, Kinds: current, JetStream: js, Registry: h.Metrics, Log: log})
	if err != nil {
		return err
	}
	certificates := map[string]daemon.Expiry{
		"nats": daemon.FileExpiry(cfg.Broker.TLSCert), "postgres_projections": postgres.CertificateExpiry(pool),
	}
	sizes := prometheus.WrapCollectorWith(prometheus.Labels{"database": "projections"}, postgres.NewSizesCollector(pool, log))
	if err := h.Metrics.Register(sizes); err != nil {
		return err
	}
	checks := map[string]func(context.Context) error{"postgres": pool.Ping, "schema": migrations.Ready(pool, migrations.Projections)}
	for name, r := range readers {
		checks[name] = r.Ready
	}
	h.Ready(checks)

	g, ctx := errgroup.WithContext(ctx)
	if cfg.DatabaseURL != "" {
		truth, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleReader, name+" verify")
		if err != nil {
			return err
		}
		defer truth.Close()
		certificates["postgres"] = postgres.CertificateExpiry(truth)
		drift, err := NewDrift(cfg.Verify, truth, pool, js, cfg.Broker, projection, h.Metrics, log)
		if err != nil {
			return err
		}
		g.Go(func() error { return drift.Run(ctx) })
	}
	h.Metrics.MustRegister(daemon.NewCertificates(certificates), brokermetrics.NewCredentials(cfg.Broker.Credentials))
	g.Go(func() error { return broker.Watch(ctx, nc) })
	g.Go(func() error {
		if err := migrations.Await(ctx, pool, migrations.Projections, log); err != nil {
			return err
		}
		// The catalog begins with the built-in kinds. A consumer reloads it when it meets an
		// unknown kind.
		g.Go(func() error { return current.Run(ctx) })
		for _, r := range readers {
			g.Go(func() error { return r.Run(ctx) })
		}
		return nil
	})
	return g.Wait()
}

// consumers returns a consumer for each cell, by the name of its check in /readyz.
func (c Config) consumers(projection projections.Projection, deps consumers.Deps) (map[string]*consumers.Consumer, error) {
	reg, all := deps.Registry, map[string]*consumers.Consumer{}
	for _, cell := range c.cells() {
		what := "consumer"
		if len(c.Cells) > 0 {
			what, deps.Registry = "consumer of "+cell.Stream, prometheus.WrapRegistererWith(prometheus.Labels{"cell": cell.Stream}, reg)
		}
		deps.Streams = consumers.Streams{Name: cell.Stream, Prefix: cell.Prefix, Timeout: cell.Timeout}
		consumer, err := consumers.New(c.Consumer, deps, projection)
		if err != nil {
			return nil, err
		}
		for _, collector := range []prometheus.Collector{NewLagCollector(deps.Pool, deps.JetStream, cell, deps.Log),
			brokermetrics.NewCollector(deps.JetStream, cell, deps.Log)} {
			if err := deps.Registry.Register(collector); err != nil {
				return nil, err
			}
		}
		all[what] = consumer
	}
	return all, nil
}

// lagTimeout limits the reads of one scrape.
const lagTimeout = 3 * time.Second

type lagCollector struct {
	pool *pgxpool.Pool
	js   jetstream.JetStream
	cfg  broker.Config
	log  *slog.Logger

	lag, deadLetters *prometheus.Desc
}

// NewLagCollector returns a collector of the lag and dead letters of every consumer that has
// offsets. It reads the offsets and the streams at each scrape. Every consumer process exports all
// consumers, so a consumer without a running process remains visible.
func NewLagCollector(pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config, log *slog.Logger) prometheus.Collector {
	return &lagCollector{
		pool: pool, js: js, cfg: cfg, log: log.With("component", "lag"),
		lag: prometheus.NewDesc("tidings_consumer_offset_lag_seconds",
			"The lag of each consumer by its stored offsets, exported by every process that applies events. "+
				"So it exists even if the consumer does not run.",
			[]string{"consumer"}, nil),
		deadLetters: prometheus.NewDesc("tidings_consumer_offset_dead_letters",
			"Dead letters of the consumer (counted up to 10,000), even if no process of it runs.", []string{"consumer"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *lagCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.lag; ch <- c.deadLetters }

// Collect implements prometheus.Collector.
func (c *lagCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), lagTimeout)
	defer cancel()
	all, err := consumers.Lag(ctx, c.pool, c.js, c.cfg)
	if err != nil {
		c.log.WarnContext(ctx, "consumer lags left out of this scrape", "err", err)
		return
	}
	for _, l := range all {
		ch <- prometheus.MustNewConstMetric(c.lag, prometheus.GaugeValue, l.Seconds, l.Consumer)
		ch <- prometheus.MustNewConstMetric(c.deadLetters, prometheus.GaugeValue, float64(l.DeadLetters), l.Consumer)
	}
}
