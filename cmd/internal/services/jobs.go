package services

import (
	"context"

	"github.com/sethvargo/go-envconfig"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// jobsName is the name of the part that runs the jobs.
const jobsName = "jobs"

type jobsConfig struct {
	DatabaseURL            string `env:"DATABASE_URL, required"`
	ProjectionsDatabaseURL string `env:"PROJECTIONS_DATABASE_URL, default=$DATABASE_URL"`
	Postgres               postgres.Config
	Broker                 broker.Config // names the streams: the jobs do not connect to NATS
	Upkeep                 upkeep.Config
}

// jobsPart returns the scheduled jobs, and the removals of all edges of an object, as a part of a
// process. It needs DATABASE_URL and PROJECTIONS_DATABASE_URL.
func jobsPart(ctx context.Context, env envconfig.Lookuper) (daemon.Run, error) {
	var cfg jobsConfig
	err := daemon.Configure(ctx, env, &cfg)
	return cfg.run, err
}

func (cfg jobsConfig) run(ctx context.Context, h daemon.Host) error {
	log := h.Log
	truth, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleSystem, "archiver")
	if err != nil {
		return err
	}
	defer truth.Close()
	projected, err := postgres.Open(ctx, cfg.ProjectionsDatabaseURL, cfg.Postgres, postgres.RoleSystem, "archiver jobs")
	if err != nil {
		return err
	}
	defer projected.Close()
	h.Metrics.MustRegister(outbox.NewCollector(truth, log), postgres.NewBlockedCollector(truth, log), tokens.NewCollector(truth, log))
	catalog := kinds.NewCatalog(truth, kinds.Truth, log)
	deps := upkeep.Deps{Truth: truth, Projections: projected, Cell: cfg.Broker.Stream, Kinds: catalog.Now, Registry: h.Metrics, Log: log}
	list, err := upkeep.Jobs(cfg.Upkeep, deps, upkeep.Current(truth))
	if err != nil {
		return err
	}
	runner, err := jobs.New(truth, list, log, h.Metrics)
	if err != nil {
		return err
	}
	remover, err := store.NewRemover(truth, nil, catalog.Now, log, h.Metrics) // it wakes no relay: they poll
	if err != nil {
		return err
	}
	h.Ready(map[string]func(context.Context) error{"truth": truth.Ping, "truth schema": migrations.Ready(truth, migrations.Truth)})

	if err := migrations.Await(ctx, truth, migrations.Truth, log); err != nil {
		return err
	}
	if err := catalog.Load(ctx); err != nil {
		return err
	}
	if s, _, err := upkeep.Read(ctx, truth); err != nil {
		return err
	} else if err := s.KeepsForStreams(cfg.Broker.MaxAge); err != nil {
		log.Error("the archive expires before the stream", "err", err, "runbook", "ArchiveTooShort")
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return catalog.Run(ctx) })
	g.Go(func() error { return remover.Run(ctx) })
	g.Go(func() error { return runner.Run(ctx) })
	return g.Wait()
}
