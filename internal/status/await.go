package status

import (
	"context"
	"slices"
	"time"

	"github.com/tidings/tidings/internal/broker"
)

const (
	// Patience is how long somebody who does not wait for anything else waits for a broker that cannot answer now: longer than an
	// election takes.
	Patience = 10 * time.Second
	// AwaitEvery is between two looks of whoever waits.
	AwaitEvery = 200 * time.Millisecond
)

// Await reads the state until it is as wanted, for so long at most, and returns the last one. While a server that was there does not answer it
// asks again, as long as it waits, and never for less than Patience.
func Await(ctx context.Context, src Sources, wait time.Duration, wanted func(State) bool) (st State, err error) {
	began := time.Now()
	for {
		st, err = Read(ctx, src)
		left := wait - time.Since(began)
		lost := len(st.Away) > len(src.Away)
		if !broker.IsTransient(err) && (err != nil || wanted(st) && !lost) || ctx.Err() != nil {
			return st, err
		}
		if err != nil || lost || !st.Seen() {
			left = max(wait, Patience) - time.Since(began)
		}
		if left <= 0 {
			return st, err
		}
		select {
		case <-ctx.Done():
			return st, context.Cause(ctx)
		case <-time.After(AwaitEvery):
		}
	}
}

// Seen reports whether the streams and the lags of all consumers are known, or as much as can be known while a server is away.
func (st State) Seen() bool {
	if len(st.Away) > 0 {
		return true
	}
	return !slices.ContainsFunc(st.Partitions, func(p Partition) bool { return p.NoLeader != "" }) &&
		!slices.ContainsFunc(st.Consumers, func(c Consumer) bool { return c.Unknown != "" })
}

// Settled reports whether everything has arrived everywhere.
func (st State) Settled() bool { return len(st.Lagging()) == 0 }

// Retry runs fn again while the broker cannot answer, for so long at most.
func Retry(ctx context.Context, wait time.Duration, fn func() error) error {
	for began := time.Now(); ; {
		err := fn()
		if !broker.IsTransient(err) || time.Since(began) > wait || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(AwaitEvery):
		}
	}
}
