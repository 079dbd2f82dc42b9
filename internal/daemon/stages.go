package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Host is where a part of a process runs: it has the part's log and metrics, and reports its
// readiness.
type Host struct {
	Log     *slog.Logger
	Metrics prometheus.Registerer

	ops    *Ops
	prefix string // of the names of the part's checks
}

// Host returns the host of a part. name is "" if the process is one binary. Otherwise the part's
// metrics and log lines have it as the label and the attribute part, and /readyz puts it in front
// of the part's checks. The process is not ready before the part calls Ready.
func (o *Ops) Host(name string, log *slog.Logger) Host {
	h := Host{Log: log, Metrics: o.reg, ops: o}
	if name != "" {
		h.Log, h.Metrics = log.With("part", name), prometheus.WrapRegistererWith(prometheus.Labels{"part": name}, o.reg)
		h.prefix = name + ": "
		o.reg.MustRegister(buildInfo(name)) // without the label part, as a binary exports it
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.starting[h.prefix]++
	return h
}

// Ready adds all checks of the part to /readyz. The part calls it once. Each request calls the
// checks, from several goroutines.
func (h Host) Ready(checks map[string]func(context.Context) error) {
	h.ops.mu.Lock()
	defer h.ops.mu.Unlock()
	h.ops.starting[h.prefix]--
	for name, check := range checks {
		h.ops.checks[h.prefix+name] = check
	}
}

// Run runs a part on its host until ctx ends. Then it finishes the work in progress and returns
// nil. An error ends the process.
type Run func(ctx context.Context, h Host) error

// Alone runs parts that are one binary, and its ops port on addr. The port stays open until all
// parts have ended.
func Alone(ctx context.Context, binary, addr string, parts ...Run) error {
	log := slog.Default()
	ops := NewOps(binary, addr, prometheus.NewRegistry(), log)
	return RunStages(ctx, ops.stage(binary, log, parts), []Part{{"ops", ops.Run}})
}

// stage returns the parts with their hosts, which are there before any part runs: without them, the
// process would be ready before its parts had started.
func (o *Ops) stage(binary string, log *slog.Logger, parts []Run) (stage []Part) {
	for _, run := range parts {
		h := o.Host("", log)
		stage = append(stage, Part{binary, func(ctx context.Context) error { return run(ctx, h) }})
	}
	return stage
}

// Part is a function that runs until its context ends.
type Part struct {
	Name string
	Run  func(ctx context.Context) error
}

// RunStages runs all parts at once until ctx ends or a part returns, which is an error. Then it
// stops them stage by stage: the parts of the next stage keep running until all parts of the stage
// before have returned.
func RunStages(ctx context.Context, stages ...[]Part) error {
	type running struct {
		cancel context.CancelFunc
		wg     sync.WaitGroup
	}
	var (
		started = make([]running, len(stages))
		ended   = make(chan struct{}) // closed when a part has returned
		once    sync.Once
		mu      sync.Mutex
		errs    []error
	)
	for i, stage := range stages {
		sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		started[i].cancel = cancel
		for _, p := range stage {
			started[i].wg.Go(func() {
				err := p.Run(sctx)
				switch {
				case sctx.Err() != nil && errors.Is(err, context.Canceled):
					err = nil // stopped while it started
				case err == nil && sctx.Err() == nil:
					err = errors.New("ended by itself")
				}
				if err != nil {
					mu.Lock()
					errs = append(errs, fmt.Errorf("%s: %w", p.Name, err))
					mu.Unlock()
				}
				once.Do(func() { close(ended) })
			})
		}
	}
	select {
	case <-ctx.Done():
	case <-ended:
	}
	for i := range started {
		started[i].cancel()
		started[i].wg.Wait()
	}
	return errors.Join(errs...)
}
