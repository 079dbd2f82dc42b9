package api

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

const (
	asOfInterval = time.Second
	lookShare    = 20  // reads of the outbox take at most 1/20 of one connection's time
	maxLooks     = 512 // readings to keep; half of them are from the last minutes
)

// freshness computes as_of: the time up to which a projection contains every committed write. It
// reads the outbox once a second, whatever the number of requests, and keeps the readings (looks).
// A look tells where the streams ended. The latest look whose ends a consumer has reached tells how
// far that consumer is. The clocks of the database and of NATS are never compared.
type freshness struct {
	read func(context.Context) (outbox.Delivered, error)
	log  *slog.Logger

	mu    sync.Mutex
	looks []outbox.Delivered // ascending
}

// run reads the outbox until ctx ends, and returns nil. If a read fails, as_of does not advance.
func (f *freshness) run(ctx context.Context) error {
	failed := false
	for {
		begun := time.Now()
		err := f.sample(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !failed:
			f.log.WarnContext(ctx, "cannot read the outbox: as_of does not advance", "err", err)
		case err == nil && failed:
			f.log.InfoContext(ctx, "read the outbox again: as_of advances")
		}
		failed = err != nil
		if work.Sleep(ctx, max(asOfInterval, lookShare*time.Since(begun))) != nil {
			return nil
		}
	}
}

// sample reads the outbox once and keeps the reading. A message that is pending in it was pending
// in the previous reading, or committed after that. So as_of never decreases while the streams are
// the same. A repair makes messages pending again, but it also changes the streams.
func (f *freshness) sample(ctx context.Context) error {
	d, err := f.read(ctx)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.looks); n > 0 {
		last := &f.looks[n-1]
		same := slices.EqualFunc(d.Tails, last.Tails, func(a, b outbox.Tail) bool { return a.Stream == b.Stream })
		if same && d.AsOf.Before(last.AsOf) {
			d.AsOf = last.AsOf
		}
	}
	if f.looks = append(f.looks, d); len(f.looks) > maxLooks {
		kept := f.looks[:0]
		for i, l := range f.looks { // keep every second one of the older half
			if i%2 == 0 || i >= maxLooks/2 {
				kept = append(kept, l)
			}
		}
		clear(f.looks[len(kept):])
		f.looks = kept
	}
	return nil
}

// of returns the time up to which the projection contains every committed write of the tenant that
// the consumer wants. progress is the consumer's, read with the projection. The time is the Unix
// epoch until the consumer first ran and reached the ends that the streams had when this process
// began.
func (f *freshness) of(tenant int64, wants func(aggregateType string) bool, progress consumers.Progress) time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(progress.Offsets) > 0 {
		for i := len(f.looks) - 1; i >= 0; i-- {
			if l := &f.looks[i]; l.Reached(progress.Offsets) {
				return l.Of(tenant, wants).UTC()
			}
		}
	}
	return time.Unix(0, 0).UTC()
}

// progress is how far the consumers of a read were.
type progress struct {
	asOf    event.Time        // for the tenant, that of the oldest
	offsets map[string]uint64 // of the first consumer (consumers.Progress)
}

// readProgress returns the progress of the consumers as the transaction of tx sees it.
func (s *server) readProgress(ctx context.Context, tx pgx.Tx, tenant int64, names ...string) (at progress, err error) {
	all, err := consumers.ReadProgress(ctx, tx, names...)
	if err != nil {
		return at, err
	}
	at.offsets = all[0].Offsets
	for i := range all {
		wants := func(string) bool { return true }
		if p := s.fleet[names[i]]; p != nil {
			wants = p.Wants
		}
		if asOf := s.freshness.of(tenant, wants, all[i]); i == 0 || asOf.Before(at.asOf.Time) {
			at.asOf.Time = asOf
		}
	}
	return at, nil
}
