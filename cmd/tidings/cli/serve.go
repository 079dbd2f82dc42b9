package cli

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/services"
	"github.com/tidings/tidings/internal/daemon"
)

// serveConfig is the environment of serve beside that of its parts.
type serveConfig struct {
	OpsAddr string `env:"OPS_ADDR, default=127.0.0.1:9180"`
	Log     daemon.LogConfig
}

func (p Process) serveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "serve [PART...]",
		Short: "Run the parts in one process, on your PostgreSQL and NATS",
		Long: `Serve runs the parts that you name in one process, until SIGTERM. Without names it runs all parts:
- api: the HTTP API, and with CONSOLE=true the console.
- relay: publishes the outbox.
- followercounts, threadcache, archiver: the consumers of edges, of children and of histories.
- jobs: the scheduled jobs, and removals of all edges of an object.

Each part reads the same environment as its own binary, and has its own connections with the
database role of that binary, so serve needs no owner's rights. It waits until tidings migrate has
run. relay needs DATABASE_URL and NATS; followercounts, threadcache and archiver need
PROJECTIONS_DATABASE_URL and NATS, and compare the projection with the truth if DATABASE_URL is set;
jobs needs both databases, and api all of them. In a database that has the outbox alone
(docs/your-tables.md), run tidings serve relay jobs: there, jobs needs DATABASE_URL.

Any number of serve processes, and of the single binaries, share the work by leases. If a part
fails, the process ends, and its supervisor starts it again. On SIGTERM the API finishes its
requests first, then the consumers and the jobs stop, and then the relay. A second signal ends the
process at once.

OPS_ADDR has /readyz, which names the part that is not ready, and the metrics of all parts, with the
label part. /readyz?part=api is about the API alone, which needs no NATS: use it for a load
balancer.`,
		ValidArgs: services.Parts(),
		RunE: func(c *cobra.Command, names []string) error {
			var cfg serveConfig
			if err := daemon.Configure(c.Context(), p.Env, &cfg); err != nil {
				return &usageError{fmt.Errorf("read the environment: %w", err)}
			}
			parts, err := services.Configure(c.Context(), p.Env, names, nil)
			if err != nil {
				return &usageError{err}
			}
			if err := services.CheckOutboxAlone(c.Context(), p.Env, names); err != nil {
				return &usageError{err}
			}
			log, flush, err := daemon.NewLogger(p.Stderr, cfg.Log)
			if err != nil {
				return &usageError{err}
			}
			defer flush()
			log = log.With("binary", "serve")
			slog.SetDefault(log)
			ctx, stop, err := daemon.Trace(c.Context(), p.Env, "serve", log, nil)
			if err != nil {
				return &usageError{err}
			}
			defer stop()
			return serve(ctx, cfg, parts, log)
		},
	}
}

func serve(ctx context.Context, cfg serveConfig, parts services.Together, log *slog.Logger) error {
	own := log.With("component", "daemon")
	own.Info("starting", "version", daemon.Version())
	defer context.AfterFunc(ctx, func() { own.Info("stopping; a second signal kills") })()
	ops := daemon.NewOps("serve", cfg.OpsAddr, prometheus.NewRegistry(), log)
	err := daemon.RunStages(ctx, append(parts.Stages(ops, log), []daemon.Part{{Name: "ops", Run: ops.Run}})...)
	if err != nil {
		own.Error("ended", "err", err, "runbook", "ProcessEnded")
		return errReported
	}
	return nil
}
