package services

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/projections/threadcache"
)

type threadCacheConfig struct {
	OpsAddr   string `env:"OPS_ADDR, default=127.0.0.1:9184"`
	Projector projector.Config
}

// ThreadCache runs the consumer that keeps the threads of children. Any number of processes may run
// at once.
func ThreadCache() { daemon.Main(threadcache.Name, runThreadCache) }

func runThreadCache(ctx context.Context, env envconfig.Lookuper) error {
	var cfg threadCacheConfig
	if err := daemon.Configure(ctx, env, &cfg); err != nil {
		return err
	}
	return projector.Run(ctx, cfg.OpsAddr, cfg.Projector, threadcache.New, prometheus.NewRegistry())
}
