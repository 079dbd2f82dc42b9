package cli

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/term"
)

// watchEvery is between two looks of `tidings status --watch`.
const watchEvery = time.Second

// perSecond is how fast events moved between two looks.
type perSecond struct {
	Published float64            `json:"published"`
	Applied   map[string]float64 `json:"applied"` // by consumer
}

// moved compares two states, of which the later one is so much younger. What is unknown in one of them has not moved.
func moved(before, now systemState, apart time.Duration) *perSecond {
	last := make(map[int]uint64)
	for _, p := range before.Partitions {
		last[p.Partition] = p.LastSeq
	}
	var published float64
	for _, p := range now.Partitions {
		if was, known := last[p.Partition]; known && p.LastSeq > was {
			published += float64(p.LastSeq - was)
		}
	}
	behind := make(map[string]int64)
	for _, c := range before.Consumers {
		if c.Unknown == "" {
			behind[c.Consumer] = c.Messages
		}
	}
	r := &perSecond{Published: published / apart.Seconds(), Applied: make(map[string]float64)}
	for _, c := range now.Consumers {
		if was, known := behind[c.Consumer]; known && c.Unknown == "" {
			r.Applied[c.Consumer] = max(published+float64(was-c.Messages), 0) / apart.Seconds()
		}
	}
	return r
}

// watch calls show with a new look each second until ctx ends, and returns nil then. Each look connects anew, so that servers may come and go.
func (p Process) watch(ctx context.Context, data string, show func(systemState) error) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var before systemState
	var at time.Time
	for {
		st, err := p.look(ctx, data)
		now := time.Now()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case !at.IsZero():
			st.PerSecond = moved(before, st, now.Sub(at))
		}
		before, at = st, now
		if err := p.clear(now); err != nil {
			return err
		}
		if err := show(st); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// clear begins a new page on a terminal.
func (p Process) clear(now time.Time) error {
	if f, ok := p.Stdout.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	_, err := fmt.Fprintf(p.Stdout, "\x1b[H\x1b[2J%s\n\n", now.Format(time.RFC3339))
	return err
}

// look is one look at everything, with the subscribers.
func (p Process) look(ctx context.Context, data string) (st systemState, err error) {
	y, err := p.someSystem(ctx, data, "status")
	if err != nil {
		return st, err
	}
	defer y.close()
	if st, err = y.await(ctx, patience, systemState.seen); err != nil {
		return st, err
	}
	return st, y.subscribers(ctx, &st)
}
