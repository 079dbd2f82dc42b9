package work

import (
	"context"
	"math/rand/v2"
	"time"
)

// MaxRetry is the longest wait that Retry returns.
const MaxRetry = 5 * time.Second

// Retry returns the wait after the nth failure in a row (from 1). It is random between half of a
// bound and the bound, which doubles from 50 ms to MaxRetry.
func Retry(n int) time.Duration {
	d := min(50*time.Millisecond<<min(n-1, 10), MaxRetry)
	return d/2 + rand.N(d/2+1)
}

// Sleep waits for d, or until ctx ends. It returns the context's cause if that has ended.
func Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	return context.Cause(ctx)
}

// Signal wakes a loop. Signals that come before the loop wakes count as one.
type Signal chan struct{}

// NewSignal returns a signal that wakes nobody yet.
func NewSignal() Signal { return make(Signal, 1) }

// Notify wakes the loop. It never waits.
func (s Signal) Notify() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Drain returns a context for the work in progress: it ends a time after ctx has ended. The caller
// calls cancel when that work is done.
func Drain(ctx context.Context, within time.Duration) (_ context.Context, cancel context.CancelFunc) {
	drain, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		_ = Sleep(drain, within)
		end()
	})
	return drain, func() {
		stop()
		end()
	}
}
