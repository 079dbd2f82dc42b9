package bench

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/work"
)

// workload says when calls start. In a closed loop each worker makes one call after the other. In
// an open loop the calls have a schedule, whether or not earlier ones are done, as long as a worker
// is free.
type workload struct {
	workers  int
	rate     float64       // calls per second of the open loop; 0 is a closed loop
	calls    int           // the number of calls; 0 is no limit
	duration time.Duration // no call starts after it; 0 is no limit
	start    time.Time     // of the schedule; zero is the start of run
}

// due returns when the n-th call of an open loop is due, from 0.
func (w workload) due(n int) time.Time {
	return w.start.Add(time.Duration(float64(n) / w.rate * float64(time.Second)))
}

// run makes the calls, and returns how many it made. due is the time at which a call was to start.
// A latency that counts from it includes the wait for a free worker, which a latency from the
// actual start leaves out, just when the system is slow. run ends at the first error of call.
func (w workload) run(ctx context.Context, call func(worker, n int, due time.Time) error) (made int, err error) {
	if w.start.IsZero() {
		w.start = time.Now()
	}
	var next, begun atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for worker := range w.workers {
		g.Go(func() error {
			for {
				n, now := int(next.Add(1))-1, time.Now()
				due := now
				if w.rate > 0 {
					due = w.due(n)
				}
				if w.calls > 0 && n >= w.calls || w.duration > 0 && max(now.Sub(w.start), due.Sub(w.start)) >= w.duration {
					return nil
				}
				if wait := time.Until(due); wait > 0 {
					if err := work.Sleep(ctx, wait); err != nil {
						return err
					}
				} else if ctx.Err() != nil {
					return ctx.Err()
				}
				begun.Add(1)
				if err := call(worker, n, due); err != nil {
					return err
				}
			}
		})
	}
	err = g.Wait()
	return int(begun.Load()), err
}

// recorder collects the times of calls that succeeded, and counts the others. It is safe for
// concurrent use.
type recorder struct {
	mu      sync.Mutex
	took    []time.Duration
	failed  int
	lastErr error
}

// note records a call, and reports whether it is the first that failed.
func (r *recorder) note(took time.Duration, err error) (firstError bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.took = append(r.took, took)
		return false
	}
	r.failed, r.lastErr = r.failed+1, err
	return r.failed == 1
}
