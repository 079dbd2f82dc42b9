package bench

import (
	"context"
	"errors"
	"time"

	"github.com/tidings/tidings/outbox"
)

// rttSummary is the last output line of `tidings bench relay --rtt`.
type rttSummary struct {
	Case        string    `json:"case"`
	RTT         *float64  `json:"rtt_ms"`
	DrainRatio  float64   `json:"drain_ratio"` // median, with the network to without
	DrainRatios []float64 `json:"drain_ratios"`
	losses
	settings
}

// runRTT drains a backlog with and without a network between the relay and the servers, in turn.
func (o relayOptions) runRTT(ctx context.Context, s *servers) error {
	if _, err := outbox.Resize(ctx, s.pool, o.partitions); err != nil {
		return err
	}
	env, took, err := s.far(ctx, o.rtt)
	if err != nil {
		return err
	}
	written := 0
	measure := func(far bool) (result, error) {
		r := result{Case: "without-network", Relays: 1, Payload: o.payload, Tenants: o.tenants, Partitions: o.partitions}
		var to []string
		if far {
			r.Case, r.RTT, to = "with-network", took, env
		}
		s.say("%s: writing %d rows", r.Case, o.messages)
		if err := o.write(ctx, s, written, written+o.messages, 50_000); err != nil {
			return r, err
		}
		if err := s.exec(ctx, `CHECKPOINT`); err != nil {
			return r, err
		}
		s.say("draining")
		if err := o.drainOnce(ctx, s, &r, written, to...); err != nil {
			return r, err
		}
		written += o.messages
		return r, s.print(&r)
	}
	if _, err := measure(false); err != nil { // to warm up
		return err
	}
	with, without, err := alternate(o.pairs, true, measure)
	if err != nil {
		return err
	}
	sum := rttSummary{Case: "network", RTT: took}
	sum.DrainRatios, sum.DrainRatio = ratios(with, without, func(r result) float64 { return r.EventsPerSecond })
	if sum.losses, err = s.losses(ctx, written); err != nil {
		return err
	}
	return errors.Join(s.print(&sum), sum.lossless())
}

// drainOnce lets a relay publish the messages after the first before ones. The time of r is from
// the first event on the stream to the last mark. env adds to the relay's environment.
func (o relayOptions) drainOnce(ctx context.Context, s *servers, r *result, before int, env ...string) error {
	c, err := s.startChild(partRelay, env...)
	if err != nil {
		return err
	}
	var start time.Time
	if err := o.drain(ctx, s, before+o.messages, func(stored int) {
		if start.IsZero() && stored > before {
			start = time.Now()
		}
	}); err != nil {
		return err
	}
	r.rate(o.messages, time.Since(start))
	r.RelayCPU = perEvent(c.used(), o.messages)
	_, _, err = stop(c)
	return err
}
