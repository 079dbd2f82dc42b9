package status

import (
	"context"
	"slices"
	"time"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
)

const (
	// Patience is how long a command that has no other time limit waits for a broker that cannot
	// answer now. It is longer than an election takes.
	Patience = 10 * time.Second
	// AwaitEvery is the time between two attempts of Await and Retry.
	AwaitEvery = 200 * time.Millisecond
)

// Await reads the state until wanted accepts it, and returns the last state that it read. It waits
// for at most wait. While a server that answered before does not answer, Await tries again for
// wait, but for at least Patience.
func Await(ctx context.Context, src Sources, wait time.Duration, wanted func(State) bool) (st State, err error) {
	began := time.Now()
	for {
		st, err = Read(ctx, src)
		left := wait - time.Since(began)
		lost := len(st.Unavailable) > len(src.Unavailable)
		if !broker.IsTransient(err) && (err != nil || wanted(st) && !lost) || ctx.Err() != nil {
			return st, err
		}
		if err != nil || lost || !st.Seen() {
			left = max(wait, Patience) - time.Since(began)
		}
		if left <= 0 {
			return st, err
		}
		if err := work.Sleep(ctx, AwaitEvery); err != nil {
			return st, err
		}
	}
}

// Seen reports whether the streams and the lags of all consumers are known. While a server is
// unavailable or a table is locked it reports true, because a further read shows nothing more.
func (st State) Seen() bool {
	if len(st.Unavailable) > 0 || len(st.Unread) > 0 {
		return true
	}
	return !slices.ContainsFunc(st.Partitions, func(p Partition) bool { return p.NoLeader != "" }) &&
		!slices.ContainsFunc(st.Consumers, func(c Consumer) bool { return c.Unknown != "" })
}

// Settled reports whether every consumer has applied every event, no server is unavailable, no
// table is locked, and nothing has stopped.
func (st State) Settled() bool { return len(st.Lagging())+len(st.Stopped()) == 0 }

// Retry calls fn again while the broker cannot answer, for at most wait. It returns the last error
// of fn, or the cause of ctx.
func Retry(ctx context.Context, wait time.Duration, fn func() error) error {
	for began := time.Now(); ; {
		err := fn()
		if !broker.IsTransient(err) || time.Since(began) > wait || ctx.Err() != nil {
			return err
		}
		if err := work.Sleep(ctx, AwaitEvery); err != nil {
			return err
		}
	}
}
