package cli

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

// consumeConfig is the environment of consume.
type consumeConfig struct {
	OpsAddr   string `env:"OPS_ADDR, default=127.0.0.1:9186"`
	Log       daemon.LogConfig
	Projector projector.Config
}

func (p Process) consumeCommand() *cobra.Command {
	var consumer string
	c := &cobra.Command{
		Use:   "consume --consumer NAME",
		Short: "Run one consumer until it is stopped",
		Long: `Consume runs the consumer of one projection as a process. Use it for a projection of your own, which
has no binary. Several instances share the partitions. The process reads the same environment as
followercounts.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkConsumer("--consumer", consumer, false); err != nil {
				return err
			}
			var cfg consumeConfig
			if err := daemon.Configure(c.Context(), p.Env, &cfg); err != nil {
				return &usageError{fmt.Errorf("read the environment: %w", err)}
			}
			log, flush, err := daemon.NewLogger(p.Stderr, cfg.Log)
			if err != nil {
				return &usageError{err}
			}
			defer flush()
			log = log.With("binary", consumer)
			slog.SetDefault(log)
			ctx, stop, err := daemon.Trace(c.Context(), p.Env, consumer, log, nil)
			if err != nil {
				return &usageError{err}
			}
			defer stop()
			return projector.Run(ctx, cfg.OpsAddr, cfg.Projector, func(now func() *kinds.Set) projections.Projection {
				return fleet.Projections(now)[slices.Index(fleet.Names(), consumer)]
			}, prometheus.NewRegistry())
		},
	}
	c.Flags().StringVar(&consumer, "consumer", "", "the consumer: "+strings.Join(fleet.Names(), ", "))
	return c
}
