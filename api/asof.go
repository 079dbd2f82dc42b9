package api

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/outbox"
)

const (
	asOfInterval = time.Second
	lookShare    = 20  // looks take at most one part in so many of a connection's time
	maxLooks     = 512 // that are kept; half of them from the last minutes
)

// freshness knows up to when committed writes are in a projection (as_of). It looks at the outbox once a second, whatever the number of reads,
// and keeps the looks: the latest one whose ends of streams a consumer has reached says how far that consumer has come. The clocks of the database and
// of NATS are never compared.
type freshness struct {
	read func(context.Context) (outbox.Delivered, error)
	log  *slog.Logger

	mu    sync.Mutex
	looks []outbox.Delivered // ascending
}

// run looks until ctx ends, and returns nil. A look that fails leaves what is known: as_of then stays where it is.
func (f *freshness) run(ctx context.Context) error {
	failed := false
	for {
		begun := time.Now()
		err := f.look(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !failed:
			f.log.WarnContext(ctx, "as_of stays where it is: the outbox cannot be read", "err", err)
		case err == nil && failed:
			f.log.InfoContext(ctx, "as_of moves again")
		}
		failed = err != nil
		t := time.NewTimer(max(asOfInterval, lookShare*time.Since(begun)))
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
	}
}

// look adds one look. What it shows to be pending committed after the look before it, or was pending there: so on the same streams as_of never moves back.
// After a repair, which makes messages pending again, streams differ.
func (f *freshness) look(ctx context.Context) error {
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
		for i, l := range f.looks { // of the older half every second one
			if i%2 == 0 || i >= maxLooks/2 {
				kept = append(kept, l)
			}
		}
		clear(f.looks[len(kept):])
		f.looks = kept
	}
	return nil
}

// of returns up to when everything of the tenant that was committed, and that the consumer wants, is in the projection whose progress this is. It is the Unix
// epoch before the consumer has first run, and until it has reached where the streams ended when this process began.
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

// readProgress returns how far the consumer has come as the transaction of tx sees it, with up to when that has the tenant's writes.
func (s *server) readProgress(ctx context.Context, tx pgx.Tx, tenant int64, consumer string) (consumers.Progress, error) {
	progress, err := consumers.ReadProgress(ctx, tx, consumer)
	if err != nil {
		return progress, err
	}
	wants := func(string) bool { return true }
	if p := s.fleet[consumer]; p != nil {
		wants = p.Wants
	}
	progress.AsOf = s.fresh.of(tenant, wants, progress)
	return progress, nil
}
