package bench

import (
	"context"
	"errors"
	"fmt"
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
			return onServers(cmd, "", syncDefault, o.run)
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

func (o overloadOptions) run(ctx context.Context, s *servers) error {
	a, err := s.startAPI(ctx, 1)
	if err != nil {
		return err
	}
	next := integerIDs.follows
	calm, flood, after := newCallers(a, o.clients, next), newCallers(a, o.connections, next), newCallers(a, 1, next)
	measured := min(10*time.Second, o.duration)
	s.say("sustained: %d clients for %s", o.clients, measured)
	start := time.Now()
	if _, err := calm.run(ctx, workload{duration: measured}); err != nil {
		return err
	}
	sustained := overloadResult{writeResult: writeResult{Case: "sustained", Clients: o.clients}}
	sustained.fill(calm, time.Since(start))
	if err := s.print(&sustained); err != nil {
		return err
	}

	r := overloadResult{writeResult: writeResult{Case: "overload", Clients: o.connections},
		Wanted: round(o.factor*sustained.AcceptedPerSecond, 0)}
	s.say("overload: %.0f writes per second for %s", r.Wanted, o.duration)
	if err := r.flood(ctx, a.child, flood, o.duration); err != nil {
		return err
	}
	r.Factor = round(r.Offered/sustained.AcceptedPerSecond, 1)
	s.say("recovery")
	if err := r.recover(ctx, after); err != nil {
		return err
	}
	if _, _, err := stop(a.child); err != nil {
		return err
	}
	s.say("searching for every accepted write")
	if err := r.check(ctx, s, calm, flood, after); err != nil {
		return err
	}
	return errors.Join(s.print(&r), r.held())
}

// flood offers the wanted rate and sets the results of r. The latency counts from when a request
// was sent: the connections cannot keep up with the rate, and each waits for its answer.
func (r *overloadResult) flood(ctx context.Context, api *child, c *callers, d time.Duration) error {
	half := make(chan float64, 1)
	timer := time.AfterFunc(d/2, func() {
		peak, _ := api.sample()
		half <- round(peak, 1)
	})
	defer timer.Stop()
	start := time.Now()
	sent, err := c.run(ctx, workload{rate: r.Wanted, duration: d})
	if err != nil {
		return err
	}
	took := time.Since(start)
	peak, _ := api.sample()
	r.PeakRSS, r.PeakRSSHalf = ptr(round(peak, 1)), <-half
	r.fill(c, took)
	r.Offered = perSecond(sent, took)
	return nil
}

// recover writes until ten writes in a row are accepted, and sets the time of r.
func (r *overloadResult) recover(ctx context.Context, c *callers) error {
	defer c.wires[0].close()
	start, inARow, n := time.Now(), 0, 0
	err := await(ctx, 10*time.Millisecond, time.Minute, func() (bool, error) {
		for inARow = 0; inARow < 10 && c.call(0, n, time.Now()); n++ {
			inARow++
		}
		n++
		return inARow == 10, nil
	})
	if err != nil {
		return fmt.Errorf("the API did not accept ten writes in a row after the overload: %w", errors.Join(err, c.lastErr))
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
