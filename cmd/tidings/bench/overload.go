package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
)

// overloadOptions are the flags of `tidings bench overload`.
type overloadOptions struct {
	factor      float64
	duration    time.Duration
	clients     int
	connections int
}

// The limits of a successful run.
const (
	overloadP99      = 2 * time.Second // of accepted writes: twice API_MAX_WAIT
	overloadRecovery = 5 * time.Second
	overloadGrowth   = 32.0 // MiB of peak memory from the middle of the flood to its end
)

func overloadCommand() *cobra.Command {
	var o overloadOptions
	cmd := &cobra.Command{
		Use: "overload", Args: cobra.NoArgs,
		Short: "Offer many times the sustained load: accepted writes, latency, memory and recovery",
		Long: `The case sustained measures the accepted writes per second of --clients connections, each with one
follow after the other. The case overload then offers --factor times as many writes per second for
--duration, without waiting for earlier answers. --connections and the machine limit it. The load
generator shares the machine. A refusal takes 200 ms, so 2,000 connections can send at most 10,000
requests a second. offered_per_second is the rate of sent requests, and offered_factor its ratio to
the sustained rate. At the end one client writes until ten writes in a row are accepted.
recovery_seconds is the time that this takes.

The command fails if an accepted write is missing or has two events. It also fails if the 99th
percentile of the accepted writes' latency is above 2 s, or if recovery takes longer than 5 s. The
API's peak memory may rise by at most 32 MiB in the second half.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.factor <= 1 || o.duration <= 0 || o.clients < 1 || o.connections < o.clients {
				return errors.New("want a --factor above 1, a --duration above 0, --clients of 1 or more, and at least " +
					"as many --connections")
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), progress(cmd))
		},
	}
	f := cmd.Flags()
	f.Float64Var(&o.factor, "factor", 10, "offer this many times the sustained rate")
	f.DurationVar(&o.duration, "duration", 60*time.Second, "how long the overload lasts")
	f.IntVar(&o.clients, "clients", 32, "connections that measure the sustained rate")
	f.IntVar(&o.connections, "connections", 2000,
		"connections of the overload; each has one request in flight, and the API accepts 4,096 connections")
	return cmd
}

// overloadResult is the output line of a case.
type overloadResult struct {
	writeResult
	Offered     float64 `json:"offered_per_second,omitempty"`
	Wanted      float64 `json:"wanted_per_second,omitempty"`
	Factor      float64 `json:"offered_factor,omitempty"` // ratio to the sustained rate
	PeakRSSHalf float64 `json:"peak_rss_half_way_mib,omitempty"`
	Recovery    float64 `json:"recovery_seconds,omitempty"`
}

func (o overloadOptions) run(ctx context.Context, out io.Writer, say func(string, ...any)) (err error) {
	say("starting servers")
	s, err := startServers(ctx, syncDefault, slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	set, err := s.settings(ctx)
	if err != nil {
		return err
	}
	if err := declareStream(ctx, s); err != nil {
		return err
	}
	a, err := startAPI(ctx, s, 1, logTo(say))
	if err != nil {
		return err
	}
	defer a.child.kill()

	calm := newWriters(a, o.clients, follows)
	measured := min(10*time.Second, o.duration)
	say("sustained: %d clients for %s", o.clients, measured)
	start := time.Now()
	if err := calm.run(ctx, measured); err != nil {
		return err
	}
	sustained := overloadResult{writeResult: writeResult{Case: "sustained", Clients: o.clients, settings: set}}
	calm.fill(&sustained.writeResult, time.Since(start))
	if err := writeLine(out, sustained); err != nil {
		return err
	}

	flood := newWriters(a, o.connections, follows)
	r := overloadResult{writeResult: writeResult{Case: "overload", Clients: o.connections, settings: set},
		Wanted: round(o.factor*sustained.AcceptedPerSecond, 0)}
	say("overload: %.0f writes per second for %s", r.Wanted, o.duration)
	if err := r.flood(ctx, a.child, flood, o.duration); err != nil {
		return err
	}
	r.Factor = round(r.Offered/sustained.AcceptedPerSecond, 1)
	say("recovery")
	after := newWriters(a, 1, follows)
	if err := r.recover(ctx, after.each[0]); err != nil {
		return err
	}
	if _, err := a.child.stop(); err != nil {
		return err
	}
	say("searching for every accepted write")
	missing, duplicates, err := after.check(ctx, s, calm, flood)
	if err != nil {
		return err
	}
	r.Missing, r.Duplicates = &missing, &duplicates
	return errors.Join(writeLine(out, r), r.held())
}

// flood offers the wanted rate and sets the results of r.
func (r *overloadResult) flood(ctx context.Context, api *child, writers *writers, d time.Duration) error {
	half := time.AfterFunc(d/2, func() {
		api.sample()
		api.mu.Lock()
		defer api.mu.Unlock()
		r.PeakRSSHalf = round(api.peak, 1)
	})
	defer half.Stop()
	start := time.Now()
	sent := writers.offer(ctx, r.Wanted, d)
	took := time.Since(start)
	if err := ctx.Err(); err != nil {
		return err
	}
	api.sample()
	r.PeakRSS = ptr(round(api.peak, 1))
	writers.fill(&r.writeResult, took)
	r.Offered = round(float64(sent)/took.Seconds(), 0)
	return nil
}

// recover writes until ten writes in a row are accepted, and sets the time of r.
func (r *overloadResult) recover(ctx context.Context, w *writer) error {
	defer w.wire.close()
	start := time.Now()
	for inARow, n := 0, 0; inARow < 10; n++ {
		before := len(w.accepted)
		w.write(0, n, follows)
		if inARow++; len(w.accepted) == before {
			inARow = 0
			if err := pause(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		}
		if time.Since(start) > time.Minute {
			return fmt.Errorf("the API did not accept ten writes in a row within a minute after the overload: %w", w.lastErr)
		}
	}
	r.Recovery = round(time.Since(start).Seconds(), 3)
	return nil
}

// held returns an error if the run exceeds a limit.
func (r *overloadResult) held() error {
	switch {
	case *r.Missing+*r.Duplicates > 0:
		return fmt.Errorf("%d accepted writes are missing, and %d have a second event", *r.Missing, *r.Duplicates)
	case r.P99 == nil || *r.P99 > float64(overloadP99.Milliseconds()):
		return fmt.Errorf("no write was accepted, or the p99 of accepted writes is above %s", overloadP99)
	case *r.PeakRSS-r.PeakRSSHalf > overloadGrowth:
		return fmt.Errorf("memory grew from %.1f to %.1f MiB in the second half", r.PeakRSSHalf, *r.PeakRSS)
	case r.Recovery > overloadRecovery.Seconds():
		return fmt.Errorf("recovery took %.1f s", r.Recovery)
	}
	return nil
}

// offer sends writes at a rate, whether or not earlier ones are done, as long as a connection is
// free, and returns how many it sent.
func (ws *writers) offer(ctx context.Context, perSecond float64, d time.Duration) (sent int64) {
	var next atomic.Int64
	start := time.Now()
	ctx, cancel := context.WithDeadline(ctx, start.Add(d))
	defer cancel()
	var wg sync.WaitGroup
	for client, w := range ws.each {
		wg.Go(func() {
			defer w.wire.close()
			for {
				n := next.Add(1) - 1
				due := start.Add(time.Duration(float64(n) / perSecond * float64(time.Second)))
				if pause(ctx, time.Until(due)) != nil {
					return
				}
				w.write(client, int(n), ws.make)
			}
		})
	}
	wg.Wait()
	return next.Load() - int64(len(ws.each)) // each writer took one number that it did not send
}
