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

// Main runs a binary and exits the process: with 0 if run returns nil, else with 1 after one log
// line. Its ctx ends at the first SIGINT or SIGTERM. Then run must finish its work in progress and
// return nil. A second signal kills the process. Main sets the default logger of the process, which
// run gets from slog.Default.
//
// Main answers --version, and --help with the variables that run passes to Configure. So run must
// call Configure first.
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
			fmt.Fprintf(os.Stderr, "%s takes only --help and --version, not %q: environment variables configure it\n", name, os.Args[1])
			os.Exit(2)
		}
	}
	os.Exit(execute(context.Background(), name, env, os.Stderr, run))
}

func execute(ctx context.Context, name string, env envconfig.Lookuper, stderr io.Writer,
	run func(context.Context, envconfig.Lookuper) error) int {
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
	said := make(chan struct{})
	unneeded := context.AfterFunc(ctx, func() {
		defer close(said)
		stop() // restores the default action of the signals
		log.Info("stopping; a second signal kills")
	})
	defer func() {
		if !unneeded() {
			<-said // run may return at once
		}
	}()
	switch err := run(ctx, env); {
	case err == nil:
		return 0
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return 0 // the requested stop
	default:
		log.Error("ended", "err", err, "runbook", "ProcessEnded")
		return 1
	}
}

// Delay returns a context that ends d after ctx ends, or when cancel is called.
func Delay(ctx context.Context, d time.Duration) (later context.Context, cancel context.CancelFunc) {
	later, cancel = context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { time.AfterFunc(d, cancel) })
	return later, cancel
}
