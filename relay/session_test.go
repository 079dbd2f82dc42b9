package relay

import (
	"context"
	"testing"
	"time"
	"unsafe"

	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

// turned returns the time as a process reads it after its wall clock was turned. Its monotonic
// clock, by which two such times compare, is the same.
func turned(t *testing.T, at time.Time, by time.Duration) time.Time {
	t.Helper()
	is := at
	wall := (*uint64)(unsafe.Pointer(&is)) // a flag, 33 bits of seconds, 30 bits of nanoseconds
	*wall += uint64(int64(by/time.Second)) << 30
	if is.Sub(at) != 0 || is.Round(0).Sub(at.Round(0)) != by {
		t.Fatalf("the clock was not turned: %s became %s", at, is)
	}
	return is
}

// A clock that is turned neither keeps a session that has heard nothing for long, nor ends one that
// has heard something just now.
func TestATurnedClockDecidesOnNoSession(t *testing.T) {
	t.Parallel()
	s := &session{Relay: &Relay{}}
	s.writers.Ended = work.NewSignal()
	defer s.writers.Close()
	lost, other := newWriter(s, outbox.Partition{Number: 0}), newWriter(s, outbox.Partition{Number: 1})
	for _, w := range []*writer{lost, other} {
		s.writers.Start(t.Context(), w.p.Number, w, func(ctx context.Context) { <-ctx.Done() })
	}
	lost.heard.Store(new(time.Now()))
	if s.reaches(lost, time.Now().Add(-time.Hour)) {
		t.Error("a stream that has not answered is reached")
	}
	for _, by := range []time.Duration{0, -24 * time.Hour, 24 * time.Hour} {
		for ago, want := range map[time.Duration]bool{time.Second: true, time.Minute: false} {
			now := turned(t, time.Now(), by)
			other.heard.Store(new(time.Now().Add(-ago)))
			if got := s.reaches(lost, now.Add(-10*time.Second)); got != want {
				t.Errorf("%s after an answer and a turn by %s: reached %t", ago, by, got)
			}
		}
	}
}
