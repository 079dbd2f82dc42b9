package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/sethvargo/go-envconfig"
)

// Main runs a binary and exits the process: with 0 when run returns nil, else with 1 after one log line. ctx ends at the first
// SIGINT or SIGTERM; run then has to finish what it holds and return nil. A second signal kills. Main makes the process's
// default logger, which run takes from slog.Default and hands on. It answers --version, and --help with what run's Configure reads; run calls that first.
func Main(name string, run func(ctx context.Context, env envconfig.Lookuper) error) {
	env := envconfig.OsLookuper()
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "--version":
			fmt.Println(name, Version())
			os.Exit(0)
		case "--help", "-h":
			env = helpLookuper{name, os.Stdout}
		default:
			fmt.Fprintf(os.Stderr, "%s takes --help and --version alone, not %q: it is configured by its environment\n", name, os.Args[1])
			os.Exit(2)
		}
	}
	os.Exit(execute(context.Background(), name, env, os.Stderr, run))
}

func execute(ctx context.Context, name string, env envconfig.Lookuper, stderr io.Writer, run func(context.Context, envconfig.Lookuper) error) int {
	if _, help := env.(helpLookuper); help {
		if err := run(ctx, env); !errors.Is(err, errHelp) {
			fmt.Fprintf(stderr, "%s: %v\n", name, err)
			return 1
		}
		return 0
	}
	var cfg LogConfig
	cfg.Level, _ = env.Lookup("LOG_LEVEL")
	cfg.Format, _ = env.Lookup("LOG_FORMAT")
	log, flush, err := NewLogger(stderr, cfg)
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return 1
	}
	defer flush()
	log = log.With("binary", name)
	slog.SetDefault(log)
	log = log.With("component", "daemon")
	log.Info("starting", "version", Version())
	ctx, stopTracing, err := Trace(ctx, env, name, log, nil)
	if err != nil {
		log.Error("ended", "err", err, "runbook", "ProcessEnded")
		return 1
	}
	defer stopTracing()

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	defer context.AfterFunc(ctx, func() {
		stop() // gives the signals back their default action
		log.Info("stopping; a second signal kills")
	})()
	switch err := run(ctx, env); {
	case err == nil:
		return 0
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return 0 // the stop that was asked for
	default:
		log.Error("ended", "err", err, "runbook", "ProcessEnded")
		return 1
	}
}

// Delay returns a context that ends d after ctx has, or with cancel.
func Delay(ctx context.Context, d time.Duration) (later context.Context, cancel context.CancelFunc) {
	later, cancel = context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { time.AfterFunc(d, cancel) })
	return later, cancel
}
