package cli

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/consumers"
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
	c := p.command(command{
		use:   "consume --consumer NAME",
		short: "Run one consumer until it is stopped",
		long: `Consume runs the consumer of one projection as a process. Use it for a projection of your own, which
has no binary. Several instances share the partitions. The process reads the same environment as
followercounts.`,
		check: func(*session, []string) error { return checkConsumer("--consumer", consumer, false) },
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			var cfg consumeConfig
			if err := daemon.Configure(ctx, s.Env, &cfg); err != nil {
				return nil, &usageError{fmt.Errorf("read the environment: %w", err)}
			}
			log, flush, err := daemon.NewLogger(s.Stderr, cfg.Log)
			if err != nil {
				return nil, &usageError{err}
			}
			defer flush()
			log = log.With("binary", consumer)
			slog.SetDefault(log)
			ctx, stop, err := daemon.Trace(ctx, s.Env, consumer, log, nil)
			if err != nil {
				return nil, &usageError{err}
			}
			defer stop()
			consumers.CollectLess()
			return nil, daemon.Alone(ctx, consumer, cfg.OpsAddr,
				projector.Part(cfg.Projector, func(now func() *kinds.Set) projections.Projection {
					return fleet.Projections(now)[slices.Index(fleet.Names(), consumer)]
				}))
		},
	})
	c.Flags().StringVar(&consumer, "consumer", "", "the consumer: "+strings.Join(fleet.Names(), ", "))
	return c
}
