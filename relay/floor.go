package relay

import (
	"context"
	"time"

	"github.com/tidings/tidings/outbox"
)

const (
	floorEvery = time.Second     // between samples of the horizon
	sweepEvery = 2 * time.Second // between sweeps, of one partition each: all of them in a minute
)

// floors raises the partitions' floors, so that a claim does not walk the dead index entries of what was published since the
// last vacuum, and looks below them now and then. (docs/adr/0004-floor.md)
type floors struct {
	sample    outbox.Horizon
	nextRaise time.Time
	nextSweep time.Time
	swept     int // the partition of the last sweep
}

// raise takes a sample, and once every transaction of the one before has ended, lifts the floors to it.
func (s *session) raise(ctx context.Context, f *floors, parts map[int]*partition) error {
	h, err := outbox.ReadHorizon(ctx, s.pool)
	if err != nil {
		return err
	}
	switch {
	case f.sample.Xmax == 0:
		f.sample = h
		return nil
	case h.Xmin < f.sample.Xmax:
		return nil // somebody still writes who was writing then
	}
	ranges := make([]outbox.Range, 0, len(parts))
	for _, p := range parts {
		ranges = append(ranges, outbox.Range{Partition: p.number, Above: p.floor, UpTo: f.sample.LastID})
	}
	oldest, err := outbox.Oldest(ctx, s.pool, ranges)
	if err != nil {
		return err
	}
	for _, r := range ranges {
		p := parts[r.Partition]
		if id, found := oldest[r.Partition]; found {
			p.floor = id - 1
		} else {
			p.floor = max(p.floor, r.UpTo)
		}
	}
	f.sample = h
	return nil
}

// sweep looks below the floor of the next partition. What it finds is claimed; that it finds anything is counted and alerted on,
// because it says that somebody writes outbox rows in a way that the floor does not expect.
func (s *session) sweep(ctx context.Context, f *floors, parts map[int]*partition, of int) error {
	for range of {
		f.swept = (f.swept + 1) % of
		p := parts[f.swept]
		if p == nil || p.floor == 0 {
			continue
		}
		found, err := outbox.Oldest(ctx, s.pool, []outbox.Range{{Partition: p.number, UpTo: p.floor}})
		if id, ok := found[p.number]; ok {
			s.metrics.belowFloor.Inc()
			s.log.ErrorContext(ctx, "a row below the floor: it is published now", "partition", p.number, "id", id, "floor", p.floor)
			p.floor, p.more = id-1, true
		}
		return err
	}
	return nil
}
