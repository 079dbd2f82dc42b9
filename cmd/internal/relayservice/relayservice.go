package relayservice

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/brokermetrics"
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
	return daemon.Alone(ctx, "relay", cfg.OpsAddr, cfg.run)
}

// Part returns the relay as a part of a process. It needs DATABASE_URL and NATS.
func Part(ctx context.Context, env envconfig.Lookuper) (daemon.Run, error) {
	var cfg config
	err := daemon.Configure(ctx, env, &cfg)
	return cfg.run, err
}

func (cfg config) run(ctx context.Context, h daemon.Host) error {
	pool, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleRelay, "relay")
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := relay.New(cfg.Relay, pool, cfg.Broker, h.Log, h.Metrics)
	if err != nil {
		return err
	}
	h.Metrics.MustRegister(outbox.NewCollector(pool, h.Log))
	h.Metrics.MustRegister(daemon.NewCertificates(map[string]daemon.Expiry{
		"nats": daemon.FileExpiry(cfg.Broker.TLSCert), "postgres": postgres.CertificateExpiry(pool),
	}), brokermetrics.NewCredentials(cfg.Broker.Credentials))
	h.Metrics.MustRegister(postgres.NewBlockedCollector(pool, h.Log),
		prometheus.WrapCollectorWith(prometheus.Labels{"database": "truth"}, postgres.NewSizesCollector(pool, h.Log)))
	h.Ready(map[string]func(context.Context) error{
		"relay": r.Ready, "postgres": pool.Ping, "schema": migrations.Ready(pool, migrations.Outbox),
	})

	if err := migrations.Await(ctx, pool, migrations.Outbox, h.Log); err != nil {
		return err
	}
	return r.Run(ctx)
}
