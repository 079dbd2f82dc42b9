package services

import (
	"context"

	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

type followerCountsConfig struct {
	OpsAddr   string `env:"OPS_ADDR, default=127.0.0.1:9183"`
	Projector projector.Config
}

// FollowerCounts runs the consumer that keeps the counts and lists of edges of every kind (follows,
// likes). Any number of processes may run at once.
func FollowerCounts() {
	consumers.CollectLess()
	daemon.Main(followercounts.Name, func(ctx context.Context, env envconfig.Lookuper) error {
		var cfg followerCountsConfig
		if err := daemon.Configure(ctx, env, &cfg); err != nil {
			return err
		}
		return daemon.Alone(ctx, followercounts.Name, cfg.OpsAddr, projector.Part(cfg.Projector, followercounts.New))
	})
}

type threadCacheConfig struct {
	OpsAddr   string `env:"OPS_ADDR, default=127.0.0.1:9184"`
	Projector projector.Config
}

// ThreadCache runs the consumer that keeps the threads of children. Any number of processes may run
// at once.
func ThreadCache() {
	consumers.CollectLess()
	daemon.Main(threadcache.Name, func(ctx context.Context, env envconfig.Lookuper) error {
		var cfg threadCacheConfig
		if err := daemon.Configure(ctx, env, &cfg); err != nil {
			return err
		}
		return daemon.Alone(ctx, threadcache.Name, cfg.OpsAddr, projector.Part(cfg.Projector, threadcache.New))
	})
}

type archiverConfig struct {
	OpsAddr   string `env:"OPS_ADDR, default=127.0.0.1:9185"`
	Jobs      jobsConfig
	Projector projector.Config
}

// Archiver runs the archiver: the consumer that keeps the histories, and the jobs. It also exports
// the outbox's gauges, so they remain visible if every relay is dead. Any number of processes may
// run at once.
func Archiver() {
	consumers.CollectLess()
	daemon.Main(history.Name, func(ctx context.Context, env envconfig.Lookuper) error {
		var cfg archiverConfig
		if err := daemon.Configure(ctx, env, &cfg); err != nil {
			return err
		}
		return daemon.Alone(ctx, history.Name, cfg.OpsAddr, projector.Part(cfg.Projector, history.New), cfg.Jobs.run)
	})
}

// consumer returns the consumer of a projection as a part of a process. It needs
// PROJECTIONS_DATABASE_URL and NATS; with DATABASE_URL it compares the projection with the truth.
func consumer(make func(now func() *kinds.Set) projections.Projection) configure {
	return func(ctx context.Context, env envconfig.Lookuper) (daemon.Run, error) {
		var cfg struct{ Projector projector.Config }
		err := daemon.Configure(ctx, env, &cfg)
		return projector.Part(cfg.Projector, make), err
	}
}
