package services

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/projections/followercounts"
)

type followerCountsConfig struct {
	OpsAddr   string `env:"OPS_ADDR, default=127.0.0.1:9183"`
	Projector projector.Config
}

// FollowerCounts runs the consumer that keeps the counts and lists of edges of every kind (follows,
// likes). Any number of processes may run at once.
func FollowerCounts() { daemon.Main(followercounts.Name, runFollowerCounts) }

func runFollowerCounts(ctx context.Context, env envconfig.Lookuper) error {
	var cfg followerCountsConfig
	if err := daemon.Configure(ctx, env, &cfg); err != nil {
		return err
	}
	return projector.Run(ctx, cfg.OpsAddr, cfg.Projector, followercounts.New, prometheus.NewRegistry())
}
