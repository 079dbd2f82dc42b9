package api

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tidings/tidings/store"
)

var perSecond = store.Rate{N: 5, Window: time.Second}

// TestWhatTheQuotaSaysIsSo lets clients that go by the headers, and some that do not, send at random times.
func TestWhatTheQuotaSaysIsSo(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, rate := range []store.Rate{perSecond, {N: 1, Window: 3 * time.Second}, {N: 100, Window: time.Minute}} {
		l := newLimiter[int](10)
		at := time.Now()
		var taken []time.Time
		var until time.Time // as the last answer said
		var left int64
		for range 10_000 {
			at = at.Add(time.Duration(random.Int64N(int64(rate.Window))))
			if random.IntN(3) == 0 {
				at = at.Add(-1 * time.Duration(random.Int64N(1000))) // whoever asked the clock first need not be the first here
			}
			q, ok := l.take(1, rate, 1, at)
			if ok {
				taken = append(taken, at)
			}
			if promised := at.After(until) || left > 0; promised && !ok {
				t.Fatalf("%v: refused at %s, with %d left until %s", rate, at, left, until)
			} else if !promised && ok {
				t.Fatalf("%v: taken at %s, with nothing left until %s", rate, at, until)
			}
			if q.left < 0 || q.left >= rate.N || q.t <= 0 || q.t > rate.Window {
				t.Fatalf("%v: %+v", rate, q)
			}
			left, until = q.left, at.Add(q.t)
		}
		for i := int(2 * rate.N); i < len(taken); i++ {
			if span := taken[i].Sub(taken[i-int(2*rate.N)]); span < rate.Window {
				t.Fatalf("%v: %d requests were taken within %s", rate, 2*rate.N+1, span)
			}
		}
	}
}

func TestABatchIsPaidByLaterWindows(t *testing.T) {
	l := newLimiter[int](10)
	at := time.Now()
	if q, ok := l.take(1, perSecond, 12, at); !ok || q.left != 0 || q.t != 2*time.Second {
		t.Errorf("a batch of 12: %+v, %t, want nothing left for 2s", q, ok)
	}
	if q, ok := l.take(1, perSecond, 1, at.Add(1500*time.Millisecond)); ok || q.t != 500*time.Millisecond {
		t.Errorf("in the second window: %+v, %t, want 500ms to wait", q, ok)
	}
	if q, ok := l.take(1, perSecond, 1, at.Add(2500*time.Millisecond)); !ok || q.left != 2 {
		t.Errorf("in the third window: %+v, %t, want 2 of 5 left", q, ok)
	}
	if q, ok := l.take(1, perSecond, 1, at.Add(time.Hour)); !ok || q.left != 4 {
		t.Errorf("an hour later: %+v, %t, want 4 of 5 left", q, ok)
	}
}

func TestAFloodOfAuthorsTakesNoMemory(t *testing.T) {
	const keep = 100
	l := newLimiter[authorKey](keep)
	at, busy := time.Now(), authorKey{1, 7}
	for i := range int64(100_000) {
		l.take(authorKey{2, i}, perSecond, 1, at)
		if i%(keep/2) == 0 {
			if _, ok := l.take(busy, perSecond, 1, at); ok != (i/(keep/2) < perSecond.N) {
				t.Fatalf("after %d other authors a busy one begins anew", i)
			}
		}
		if n := len(l.now) + len(l.older); n > 2*keep {
			t.Fatalf("%d authors are kept, want at most %d", n, 2*keep)
		}
	}
}
