package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tidings/tidings/internal/pglocal"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	child, err := serveChild(ctx, os.Args[1:])
	if !child {
		err = compare(ctx, os.Args[1:])
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

// serveChild runs this process as a broker or as a relay, if the arguments say so.
func serveChild(ctx context.Context, args []string) (is bool, err error) {
	switch {
	case len(args) > 0 && args[0] == "nats":
		return true, serveNATS(ctx, args[1:], os.Stdout)
	case len(args) == 2 && args[0] == "relay":
		return true, serveRelay(ctx, args[1])
	}
	return false, nil
}

// compare runs the peers in the scenarios and prints the table.
func compare(ctx context.Context, args []string) (err error) {
	var o options
	var onlyPeers, onlyScenarios string
	var asJSON, verbose bool
	f := flag.NewFlagSet("peers", flag.ContinueOnError)
	f.StringVar(&onlyPeers, "peer", "", "run only these `NAMES`, separated by commas")
	f.StringVar(&onlyScenarios, "scenario", "", "run only these `NAMES`, separated by commas")
	f.Float64Var(&o.seconds, "seconds", 12, "how long each load takes")
	f.IntVar(&o.rate, "rate", 300, "transactions per second of a load")
	f.IntVar(&o.backlog, "backlog", 50_000, "events of the drain")
	f.IntVar(&o.rounds, "rounds", 3, "rounds of calm, two and drain; the table has the sums of their counts and the medians of all else")
	f.DurationVar(&o.settle, "settle", 75*time.Second, "the longest wait after a load for events that still wait")
	f.BoolVar(&o.sync, "sync", false, "the broker syncs each message to disk; by default it does so every two minutes, like NATS")
	f.StringVar(&o.relayBin, "relay", "", "`PATH` of the relay's binary; by default it is built")
	f.BoolVar(&asJSON, "json", false, "print a JSON object per run instead of the table")
	f.BoolVar(&verbose, "verbose", false, "print warnings of the parts too")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() > 0 || o.seconds <= 0 || o.rate < 1 || o.backlog < 1 || o.rounds < 1 || o.settle < 0 {
		return errors.New("want flags only: --seconds, --rate, --backlog and --rounds above 0, --settle of 0 or more")
	}
	ps, err := selected(onlyPeers, peers, peerNamed)
	if err != nil {
		return err
	}
	ss, err := selected(onlyScenarios, scenarios, scenarioNamed)
	if err != nil {
		return err
	}
	if !verbose {
		slog.SetDefault(slog.New(slog.DiscardHandler))
	}
	o.say = func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, time.Now().Format("15:04:05 ")+format+"\n", args...)
	}
	all, err := runAll(ctx, o, ps, ss, func(r result) error {
		if !asJSON {
			return nil
		}
		return json.NewEncoder(os.Stdout).Encode(r)
	})
	if err == nil && !asJSON {
		err = printTable(os.Stdout, o, ps, ss, all)
	}
	return err
}

// selected returns what the names of a flag select, or all.
func selected[T any](names string, all []T, named func(string) (T, error)) (chosen []T, err error) {
	if names == "" {
		return all, nil
	}
	for name := range strings.SplitSeq(names, ",") {
		one, err := named(strings.TrimSpace(name))
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, one)
	}
	return chosen, nil
}

// runAll runs every peer in every scenario. Each round begins with another peer, so none is always
// the first.
func runAll(ctx context.Context, o options, ps []peer, ss []scenario, done func(result) error) (all []result, err error) {
	if o.dir, err = os.MkdirTemp("", "tidings-peers-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(o.dir)) }()
	if err := os.Chmod(o.dir, 0o755); err != nil { // if root runs this, PostgreSQL runs as another user and needs access
		return nil, err
	}
	if o.relayBin == "" {
		o.say("building the relay")
		if o.relayBin, err = buildRelay(ctx, o.dir); err != nil {
			return nil, err
		}
	}
	shared, err := pglocal.Start(ctx, pglocal.Config{Dir: filepath.Join(o.dir, "postgres"), Settings: postgresSettings()})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, shared.Stop()) }()
	turn := 0
	for _, s := range ss {
		rounds := 1
		if s.rounds {
			rounds = o.rounds
		}
		for round := range rounds {
			for i := range ps {
				p := ps[(i+turn)%len(ps)]
				r, err := measure(ctx, o, p, s, shared)
				if err != nil {
					return all, err
				}
				r.Round = round + 1
				o.say("%s", r)
				all = append(all, r)
				if err := done(r); err != nil {
					return all, err
				}
			}
			turn++
		}
	}
	return all, nil
}
