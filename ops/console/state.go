package console

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

const (
	stateFor    = time.Second      // all readers within it share one reading
	evaluate    = 5 * time.Second  // between two evaluations of the health
	idleAfter   = time.Hour        // without a reader for so long, nobody evaluates it
	ratesWithin = 30 * time.Second // readings further apart give no current rate
	probeEvery  = time.Minute      // between two checks of the rules that ask the servers
	probeFor    = 5 * time.Second  // limit for one such check
	healthFor   = 15 * time.Second // pages show the health of a reading for so long
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

// Trees returns the root causes with their consequences.
func (o *observed) Trees() []doctor.Tree { return doctor.Nest(o.Findings) }

// probed is what the doctor found that the state does not show.
type probed struct {
	At       time.Time
	Err      error // why Findings are incomplete
	Findings []doctor.Finding
	External status.State // has the external consumers, and nothing else that is used
}

// level returns the class of the worst finding about the places: bad, warn, or ok without one.
func (o *observed) level(places ...string) string {
	level := "ok"
	for _, f := range o.Findings {
		switch {
		case !slices.Contains(places, f.Where):
		case f.Severity == doctor.Error:
			return "bad"
		default:
			level = "warn"
		}
	}
	return level
}

// observer reads the installation at most once per stateFor.
type observer struct {
	src status.Sources

	busy    chan struct{} // a semaphore: one reading at a time
	probing chan struct{} // likewise: one probe at a time
	mu      sync.Mutex
	last    *observed
	looked  time.Time
	probed  probed
	shown   *observed            // the last one with findings
	since   map[string]time.Time // when a reading first had a finding; zero: the first reading had it
	wanted  chan struct{}        // a page has no health to show
}

func newObserver(src status.Sources) *observer {
	return &observer{src: src, busy: make(chan struct{}, 1), probing: make(chan struct{}, 1), wanted: make(chan struct{}, 1)}
}

// state returns a reading of the installation that is at most stateFor old, with the findings
// about it. Its probe is at most probeEvery old, or is being repeated for another reader. With
// fresh, both begin after the call.
func (o *observer) state(ctx context.Context, fresh bool) (*observed, error) {
	asked := time.Now()
	o.mu.Lock()
	o.looked = asked
	o.mu.Unlock()
	return o.observe(ctx, asked, fresh)
}

func (o *observer) observe(ctx context.Context, asked time.Time, fresh bool) (*observed, error) {
	since := asked.Add(-stateFor)
	if fresh {
		since = asked
	}
	last, err := o.read(ctx, since)
	if err != nil {
		return nil, err
	}
	now := *last
	if now.Probed, err = o.probe(ctx, now.State, asked, fresh); err != nil {
		return nil, err
	}
	now.State.External, now.State.MoreOf, now.State.NotListed = now.Probed.External.External, now.Probed.External.MoreOf,
		now.Probed.External.NotListed
	now.Findings = doctor.Rank(append(doctor.Fleet(now.State), now.Probed.Findings...))
	o.mu.Lock()
	defer o.mu.Unlock()
	o.date(&now)
	if o.shown == nil || !now.At.Before(o.shown.At) {
		o.shown = &now
	}
	return &now, nil
}

// date sets Since of the findings that do not know it, to the first of the readings that had them.
// It stays unknown if none lacked them shortly before. The caller holds o.mu.
func (o *observer) date(now *observed) {
	first := time.Time{}
	if o.shown != nil && now.At.Sub(o.shown.At) < healthFor {
		first = now.At
	}
	dated := make(map[string]time.Time)
	for i, f := range now.Findings {
		key := f.Check + " " + f.Where
		at, known := o.since[key]
		if !known {
			at = first
		}
		if dated[key] = at; f.Since.IsZero() {
			now.Findings[i].Since = at
		}
	}
	o.since = dated
}

// health is what every page shows of the findings.
type health struct {
	Causes int    // root causes
	Level  string // bad: an error; warn: warnings alone; ok: none
}

// health returns the last evaluation without a reading of its own. It is nil if that is too old;
// then Run makes another one.
func (o *observer) health() *health {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.looked = time.Now()
	if o.shown == nil || time.Since(o.shown.At) > healthFor {
		select {
		case o.wanted <- struct{}{}:
		default:
		}
		return nil
	}
	h := &health{Level: "ok"}
	for _, f := range o.shown.Findings {
		if f.FollowsFrom == "" {
			h.Causes++
		}
		if f.Severity == doctor.Error {
			h.Level = "bad"
		} else if h.Level == "ok" {
			h.Level = "warn"
		}
	}
	if h.Level == "ok" && o.shown.Probed.Err != nil {
		return nil // a part is not checked
	}
	return h
}

// probe returns the last probe, or a new one if that is too old. It takes up to probeFor, so a
// reader does not wait for another one's, unless it wants a fresh one.
func (o *observer) probe(ctx context.Context, st status.State, asked time.Time, fresh bool) (probed, error) {
	since := asked.Add(-probeEvery)
	if last := o.lastProbe(); !fresh && (last.At.After(since) || !last.At.IsZero() && len(o.probing) > 0) {
		return last, nil
	}
	if fresh {
		since = asked
	}
	select {
	case o.probing <- struct{}{}:
		defer func() { <-o.probing }()
	case <-ctx.Done():
		return probed{}, context.Cause(ctx)
	}
	if last := o.lastProbe(); last.At.After(since) {
		return last, nil
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeFor)
	defer cancel()
	found, err := doctor.Probe(ctx, o.src, st)
	err = errors.Join(err, status.ReadExternal(ctx, o.src, &st))
	o.mu.Lock()
	defer o.mu.Unlock()
	o.probed = probed{began, err, found, st}
	return o.probed, nil
}

func (o *observer) lastProbe() probed {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.probed
}

// read returns a reading that began after since, without findings.
func (o *observer) read(ctx context.Context, since time.Time) (*observed, error) {
	select {
	case o.busy <- struct{}{}:
		defer func() { <-o.busy }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	o.mu.Lock()
	before := o.last
	o.mu.Unlock()
	if before != nil && before.At.After(since) {
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
	if before != nil && now.At.Sub(before.At) < stateFor { // too short for a rate
		now.Rates, now.Wrote = before.Rates, before.Wrote
	} else if before != nil && now.At.Sub(before.At) < ratesWithin {
		apart := now.At.Sub(before.At)
		now.Rates, now.Wrote = status.Moved(before.State, now.State, apart), -1
		if was, is := before.State.Outbox, now.State.Outbox; was != nil && is != nil && !was.PendingMax && !is.PendingMax {
			now.Wrote = max(0, now.Rates.Published+float64(is.Pending-was.Pending)/apart.Seconds())
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = now
	return now, nil
}

// run evaluates the health, until idleAfter has passed without a reader.
func (o *observer) run(ctx context.Context) {
	tick := time.NewTicker(evaluate)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-o.wanted:
		case <-ctx.Done():
			return
		}
		o.mu.Lock()
		idle := time.Since(o.looked) > idleAfter
		o.mu.Unlock()
		if !idle {
			rctx, cancel := context.WithTimeout(ctx, pageTimeout)
			_, _ = o.observe(rctx, time.Now(), false)
			cancel()
		}
	}
}
