package services

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/history"
)

type archiverConfig struct {
	DatabaseURL string `env:"DATABASE_URL, required"`
	OpsAddr     string `env:"OPS_ADDR, default=127.0.0.1:9185"`
	Projector   projector.Config
	Upkeep      upkeep.Config
}

// Archiver runs the archiver: it keeps the histories, runs the scheduled jobs, and removes all
// edges of objects on request. It also exports the outbox's gauges, so they remain visible if every
// relay is dead. Any number of processes may run at once.
func Archiver() { daemon.Main(history.Name, runArchiver) }

func runArchiver(ctx context.Context, env envconfig.Lookuper) error {
	var cfg archiverConfig
	if err := daemon.Configure(ctx, env, &cfg); err != nil {
		return err
	}
	truth, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Projector.Postgres, postgres.RoleSystem, history.Name)
	if err != nil {
		return err
	}
	defer truth.Close()
	projected, err := postgres.Open(ctx, cfg.Projector.ProjectionsDatabaseURL, cfg.Projector.Postgres,
		postgres.RoleSystem, history.Name+" jobs")
	if err != nil {
		return err
	}
	defer projected.Close()
	reg, log := prometheus.NewRegistry(), slog.Default()
	reg.MustRegister(outbox.NewCollector(truth, log))
	reg.MustRegister(postgres.NewBlockedCollector(truth, log))
	reg.MustRegister(tokens.NewCollector(truth, log))
	catalog := kinds.NewCatalog(truth, kinds.Truth, log)
	runner, remover, err := NewArchiving(cfg.Upkeep, upkeep.Deps{Truth: truth, Projections: projected, Cell: cfg.Projector.Broker.Stream,
		Kinds: catalog.Now, Registry: reg, Log: log}, nil)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		// The projector waits for the projections' schema itself.
		if err := migrations.Await(ctx, truth, migrations.Truth, log); err != nil {
			return err
		}
		if err := catalog.Load(ctx); err != nil {
			return err
		}
		if s, _, err := upkeep.Read(ctx, truth); err != nil {
			return err
		} else if err := s.KeepsForStreams(cfg.Projector.Broker.MaxAge); err != nil {
			log.Error("the archive expires before the stream", "err", err, "runbook", "ArchiveTooShort")
		}
		g.Go(func() error { return catalog.Run(ctx) })
		g.Go(func() error { return remover.Run(ctx) })
		return runner.Run(ctx)
	})
	g.Go(func() error { return projector.Run(ctx, cfg.OpsAddr, cfg.Projector, history.New, reg) })
	return g.Wait()
}
