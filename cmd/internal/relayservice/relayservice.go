package relayservice

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

type config struct {
	DatabaseURL string `env:"DATABASE_URL, required"`
	OpsAddr     string `env:"OPS_ADDR, default=127.0.0.1:9182"`
	Postgres    postgres.Config
	Broker      broker.Config
	Relay       relay.Config
}

// Main runs the relay, which publishes the outbox to JetStream, until SIGTERM. Any number of
// processes may run at once.
func Main() {
	relay.UseOneProcessor()
	daemon.Main("relay", run)
}

func run(ctx context.Context, env envconfig.Lookuper) error {
	var cfg config
	if err := daemon.Configure(ctx, env, &cfg); err != nil {
		return err
	}
	log, reg := slog.Default(), prometheus.NewRegistry()
	pool, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleRelay, "relay")
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := relay.New(cfg.Relay, pool, cfg.Broker, log, reg)
	if err != nil {
		return err
	}
	reg.MustRegister(outbox.NewCollector(pool, log))
	reg.MustRegister(daemon.NewCertificates(map[string]daemon.Expiry{
		"nats": daemon.FileExpiry(cfg.Broker.TLSCert), "postgres": postgres.CertificateExpiry(pool),
	}), broker.NewCredentials(cfg.Broker.Credentials))
	reg.MustRegister(postgres.NewBlockedCollector(pool, log),
		prometheus.WrapCollectorWith(prometheus.Labels{"database": "truth"}, postgres.NewSizesCollector(pool, log)))
	ops := daemon.NewOps("relay", cfg.OpsAddr, reg, log)
	ops.Ready("relay", r.Ready)
	ops.Ready("postgres", pool.Ping)
	ops.Ready("schema", migrations.Ready(pool, migrations.Outbox))

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return ops.Run(ctx) })
	g.Go(func() error {
		if err := migrations.Await(ctx, pool, migrations.Outbox, log); err != nil {
			return err
		}
		return r.Run(ctx)
	})
	return g.Wait()
}
