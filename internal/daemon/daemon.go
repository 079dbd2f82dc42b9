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
	"golang.org/x/sys/unix"
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
	level, _ := env.Lookup("LOG_LEVEL")
	log, err := NewLogger(stderr, level)
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return 1
	}
	log = log.With("binary", name)
	slog.SetDefault(log)
	log.Info("starting", "version", Version())

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
		log.Error("ended", "err", err)
		return 1
	}
}

// Delay returns a context that ends d after ctx has, or with cancel.
func Delay(ctx context.Context, d time.Duration) (later context.Context, cancel context.CancelFunc) {
	later, cancel = context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { time.AfterFunc(d, cancel) })
	return later, cancel
}

// NewLogger returns a logger that writes to w: text when w is a terminal, else JSON, in both durations as people write them (1.5s) and errors by Plain. level is debug, info, warn or error, and
// info when empty.
func NewLogger(w io.Writer, level string) (*slog.Logger, error) {
	var at slog.Level
	if level != "" {
		if err := at.UnmarshalText([]byte(level)); err != nil {
			return nil, fmt.Errorf("LOG_LEVEL is %q: want debug, info, warn or error", level)
		}
	}
	opts := &slog.HandlerOptions{Level: at, ReplaceAttr: readable}
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		return slog.New(slog.NewTextHandler(w, opts)), nil
	}
	return slog.New(slog.NewJSONHandler(w, opts)), nil
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
