// Command threadcache keeps the threads of comments. Any number of them may run at once.
package main

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/projections/threadcache"
)

type config struct {
	OpsAddr   string `env:"OPS_ADDR, default=127.0.0.1:9184"`
	Projector projector.Config
}

func main() { daemon.Main(threadcache.Name, run) }

func run(ctx context.Context, env envconfig.Lookuper) error {
	var cfg config
	if err := daemon.Configure(ctx, env, &cfg); err != nil {
		return err
	}
	return projector.Run(ctx, cfg.OpsAddr, cfg.Projector, threadcache.New, prometheus.NewRegistry())
}
