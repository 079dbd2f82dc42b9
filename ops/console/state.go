package console

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

const (
	stateFor    = time.Second      // all readers within it share one reading
	sampleEvery = 5 * time.Second  // one point of a line
	sampleKept  = 720              // points: one hour
	sampleAfter = time.Hour        // without a reader for so long, sampling stops
	ratesWithin = 30 * time.Second // readings further apart give no current rate
	probeEvery  = time.Minute      // between two checks of the rules that ask the servers
	probeFor    = 5 * time.Second  // limit for one such check
)

// observed is one reading of the whole installation.
type observed struct {
	At    time.Time
	State status.State
	Slots []outbox.Slot // nil: the outbox is unknown
	More  bool          // the slots have more rows than ReadSlots counted
	Rates *status.Rates // nil: no reading in the last ratesWithin
	Wrote float64       // events written per second, if Rates are known; negative: unknown

	Findings []doctor.Finding // root causes first
	Probed   probed
}

// probed is what the doctor found that the state does not show.
type probed struct {
	At       time.Time
	Err      error // why Findings are incomplete
	Findings []doctor.Finding
}

// look returns the class of the worst finding about the places: bad, warn, or ok without one.
func (o *observed) look(places ...string) string {
	look := "ok"
	for _, f := range o.Findings {
		switch {
		case !slices.Contains(places, f.Where):
		case f.Severity == doctor.Error:
			return "bad"
		default:
			look = "warn"
		}
	}
	return look
}

// observer reads the installation at most once per stateFor, and keeps the lag of each consumer
// over time.
type observer struct {
	src status.Sources

	busy   chan struct{} // a semaphore: one reading at a time
	mu     sync.Mutex
	last   *observed
	looked time.Time
	probed probed             // the holder of busy reads and writes it
	lines  map[string][]point // by consumer name
}

// point is a consumer's lag at one moment.
type point struct {
	at  time.Time
	lag int64
}

func newObserver(src status.Sources) *observer {
	return &observer{src: src, busy: make(chan struct{}, 1), lines: make(map[string][]point)}
}

// state returns a reading of the installation that is at most stateFor old. Its probe is at most
// probeEvery old.
func (o *observer) state(ctx context.Context) (*observed, error) {
	o.mu.Lock()
	o.looked = time.Now()
	o.mu.Unlock()
	return o.read(ctx, false)
}

// read returns a reading that is at most stateFor old, or a new one with a new probe.
func (o *observer) read(ctx context.Context, probe bool) (*observed, error) {
	select {
	case o.busy <- struct{}{}:
		defer func() { <-o.busy }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	o.mu.Lock()
	before := o.last
	o.mu.Unlock()
	if before != nil && time.Since(before.At) < stateFor && !probe {
		return before, nil
	}
	now := &observed{At: time.Now()}
	var err error
	if now.State, err = status.Read(ctx, o.src); err != nil {
		return nil, err
	}
	if now.State.Outbox != nil {
		if now.Slots, now.More, err = outbox.ReadSlots(ctx, o.src.Truth); err != nil {
			return nil, err
		}
	}
	if probe || now.At.Sub(o.probed.At) >= probeEvery {
		pctx, cancel := context.WithTimeout(ctx, probeFor)
		found, err := doctor.Probe(pctx, o.src, now.State)
		cancel()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		o.probed = probed{now.At, err, found}
	}
	now.Probed, now.Findings = o.probed, doctor.Rank(append(doctor.Fleet(now.State), o.probed.Findings...))
	if before != nil && now.At.Sub(before.At) < ratesWithin {
		apart := now.At.Sub(before.At)
		now.Rates, now.Wrote = status.Moved(before.State, now.State, apart), -1
		if was, is := before.State.Outbox, now.State.Outbox; was != nil && is != nil && !was.PendingMax && !is.PendingMax {
			now.Wrote = max(0, now.Rates.Published+float64(is.Pending-was.Pending)/apart.Seconds())
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = now
	for _, c := range now.State.Consumers {
		line := o.lines[c.Consumer]
		if c.Unknown != "" || len(line) > 0 && now.At.Sub(line[len(line)-1].at) < sampleEvery {
			continue
		}
		line = append(line, point{now.At, c.Messages})
		o.lines[c.Consumer] = line[max(0, len(line)-sampleKept):]
	}
	return now, nil
}

// line returns the lag of the consumer over time, oldest point first.
func (o *observer) line(consumer string) []point {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.lines[consumer])
}

// run samples the lag of consumers until sampleAfter has passed without a reader. A failed reading
// leaves a gap in the lines.
func (o *observer) run(ctx context.Context) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		o.mu.Lock()
		idle := time.Since(o.looked) > sampleAfter
		o.mu.Unlock()
		if !idle {
			rctx, cancel := context.WithTimeout(ctx, pageTimeout)
			_, _ = o.read(rctx, false)
			cancel()
		}
	}
}
