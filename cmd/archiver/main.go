// Command archiver keeps the history of comments and follows. It also shows the outbox's gauges, so that a relay that is dead is
// seen. Any number of them may run at once.
package main

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/archive"
)

type config struct {
	DatabaseURL string `env:"DATABASE_URL, required"`
	OpsAddr     string `env:"OPS_ADDR, default=127.0.0.1:9185"`
	Projector   projector.Config
}

func main() { daemon.Main(archive.Name, run) }

func run(ctx context.Context, env envconfig.Lookuper) error {
	var cfg config
	if err := envconfig.ProcessWith(ctx, &envconfig.Config{Target: &cfg, Lookuper: env}); err != nil {
		return err
	}
	if err := cfg.Projector.Validate(); err != nil {
		return err
	}
	truth, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Projector.Postgres, postgres.RoleSystem, archive.Name)
	if err != nil {
		return err
	}
	defer truth.Close()
	if err := migrations.Check(ctx, truth, migrations.Truth); err != nil {
		return err
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(outbox.NewCollector(truth, slog.Default()))
	return projector.Run(ctx, cfg.OpsAddr, cfg.Projector, archive.New(), reg)
}
