package services

import (
	"context"
	"sync/atomic"

	"github.com/sethvargo/go-envconfig"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds/catalog"
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
// process. It needs DATABASE_URL and PROJECTIONS_DATABASE_URL. If the outbox is alone in its
// database, the part runs the jobs of the outbox, and needs DATABASE_URL.
func jobsPart(ctx context.Context, env envconfig.Lookuper) (daemon.Run, error) {
	var cfg jobsConfig
	err := daemon.Configure(ctx, env, &cfg)
	return cfg.run, err
}

func (cfg jobsConfig) run(ctx context.Context, h daemon.Host) error {
	truth, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleSystem, "archiver")
	if err != nil {
		return err
	}
	defer truth.Close()
	h.Metrics.MustRegister(outbox.NewCollector(truth, h.Log), postgres.NewBlockedCollector(truth, h.Log))
	var alone atomic.Bool
	whole := migrations.Ready(truth, migrations.Truth)
	h.Ready(map[string]func(context.Context) error{"truth": truth.Ping, "truth schema": func(ctx context.Context) error {
		if alone.Load() {
			return nil
		}
		return whole(ctx)
	}})

	if err := migrations.Await(ctx, truth, migrations.Outbox, h.Log); err != nil {
		return err
	}
	guest, err := migrations.IsOutboxAlone(ctx, truth)
	if err != nil {
		return err
	}
	if alone.Store(guest); guest {
		return cfg.work(ctx, h, upkeep.Deps{Truth: truth})
	}
	if err := migrations.Await(ctx, truth, migrations.Truth, h.Log); err != nil {
		return err
	}
	h.Metrics.MustRegister(tokens.NewCollector(truth, h.Log))
	projected, err := postgres.Open(ctx, cfg.ProjectionsDatabaseURL, cfg.Postgres, postgres.RoleSystem, "archiver jobs")
	if err != nil {
		return err
	}
	defer projected.Close()
	catalog := catalog.New(truth, catalog.Truth, h.Log)
	remover, err := store.NewRemover(truth, nil, catalog.Now, h.Log, h.Metrics) // it wakes no relay: they poll
	if err != nil {
		return err
	}
	if err := catalog.Load(ctx); err != nil {
		return err
	}
	return cfg.work(ctx, h, upkeep.Deps{Truth: truth, Projections: projected, Kinds: catalog.Now}, catalog.Run, remover.Run)
}

// work runs the jobs, and beside them the loops.
func (cfg jobsConfig) work(ctx context.Context, h daemon.Host, deps upkeep.Deps, loops ...func(context.Context) error) error {
	deps.Cell, deps.Registry, deps.Log = cfg.Broker.Stream, h.Metrics, h.Log
	list, err := upkeep.Jobs(cfg.Upkeep, deps, upkeep.Current(deps.Truth))
	if err != nil {
		return err
	}
	runner, err := jobs.New(deps.Truth, list, h.Log, h.Metrics)
	if err != nil {
		return err
	}
	if s, _, err := upkeep.Read(ctx, deps.Truth); err != nil {
		return err
	} else if err := s.KeepsForStreams(cfg.Broker.MaxAge); err != nil {
		h.Log.Error("the archive expires before the stream", "err", err, "runbook", "ArchiveTooShort")
	}
	g, ctx := errgroup.WithContext(ctx)
	for _, loop := range append(loops, runner.Run) {
		g.Go(func() error { return loop(ctx) })
	}
	return g.Wait()
}
