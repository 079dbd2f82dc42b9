package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
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

// Run applies events to the projection until ctx ends. make returns the projection; its argument
// returns the kinds in force. Run serves its metrics and those of reg on opsAddr. It waits for
// unavailable servers and for a database that lacks migrations. It returns broker.ErrClosed when
// the connection to NATS is closed permanently. Any number of processes may run at once and share
// the work.
func Run[P projections.Projection](ctx context.Context, opsAddr string, cfg Config, make func(now func() *kinds.Set) P,
	reg *prometheus.Registry) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	var catalog *kinds.Catalog
	projection, log := make(func() *kinds.Set { return catalog.Now() }), slog.Default()
	name := projection.Name()
	pool, err := postgres.Open(ctx, cfg.ProjectionsDatabaseURL, cfg.Postgres, postgres.RoleConsumer, name)
	if err != nil {
		return err
	}
	defer pool.Close()
	catalog = kinds.NewCatalog(pool, kinds.Projections, log)
	nc, err := broker.Connect(cfg.Broker, name, log)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	ops := daemon.NewOps(name, opsAddr, reg, log)
	readers, err := cfg.consumers(projection, consumers.Deps{Pool: pool, Kinds: catalog, JetStream: js, Registry: reg, Log: log}, ops)
	if err != nil {
		return err
	}
	certificates := map[string]daemon.Expiry{
		"nats": daemon.FileExpiry(cfg.Broker.TLSCert), "postgres_projections": postgres.CertificateExpiry(pool),
	}
	sizes := prometheus.WrapCollectorWith(prometheus.Labels{"database": "projections"}, postgres.NewSizesCollector(pool, log))
	if err := reg.Register(sizes); err != nil {
		return err
	}
	ops.Ready("postgres", pool.Ping)
	ops.Ready("schema", migrations.Ready(pool, migrations.Projections))

	g, ctx := errgroup.WithContext(ctx)
	if cfg.DatabaseURL != "" {
		truth, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleReader, name+" verify")
		if err != nil {
			return err
		}
		defer truth.Close()
		certificates["postgres"] = postgres.CertificateExpiry(truth)
		drift, err := NewDrift(cfg.Verify, truth, pool, js, cfg.Broker, projection, reg, log)
		if err != nil {
			return err
		}
		g.Go(func() error { return drift.Run(ctx) })
	}
	reg.MustRegister(daemon.NewCertificates(certificates), broker.NewCredentials(cfg.Broker.Credentials))
	g.Go(func() error { return ops.Run(ctx) })
	g.Go(func() error { return broker.Watch(ctx, nc) })
	g.Go(func() error {
		if err := migrations.Await(ctx, pool, migrations.Projections, log); err != nil {
			return err
		}
		// The catalog begins with the built-in kinds. The consumer reloads it when it meets an
		// unknown kind.
		g.Go(func() error { return catalog.Run(ctx) })
		for _, r := range readers {
			g.Go(func() error { return r.Run(ctx) })
		}
		return nil
	})
	return g.Wait()
}

// consumers returns a consumer for each cell. ops reports their readiness.
func (c Config) consumers(projection projections.Projection, deps consumers.Deps, ops *daemon.Ops) (all []*consumers.Consumer, err error) {
	reg := deps.Registry
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
			broker.NewCollector(deps.JetStream, cell, deps.Log)} {
			if err := deps.Registry.Register(collector); err != nil {
				return nil, err
			}
		}
		ops.Ready(what, consumer.Ready)
		all = append(all, consumer)
	}
	return all, nil
}
