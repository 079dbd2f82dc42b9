package api

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

var perSecond = tokens.Rate{N: 5, Window: time.Second}

// TestWhatTheQuotaSaysIsSo sends requests at random times. Some clients obey the headers, and some
// do not.
func TestWhatTheQuotaSaysIsSo(t *testing.T) {
	seed, _ := testkit.Seed(t)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, rate := range []tokens.Rate{perSecond, {N: 1, Window: 3 * time.Second}, {N: 100, Window: time.Minute}} {
		l := newLimiter[int](10)
		at := time.Now()
		var taken []time.Time
		var until time.Time // the end of the window in the last answer
		var left int64
		for range 10_000 {
			at = at.Add(time.Duration(random.Int64N(int64(rate.Window))))
			if random.IntN(3) == 0 {
				at = at.Add(-1 * time.Duration(random.Int64N(1000))) // requests may arrive in another order than they read the clock
			}
			q, ok := l.take(1, rate, at)
			if ok {
				taken = append(taken, at)
			}
			if promised := !at.Before(until) || left > 0; promised && !ok {
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

// A request may read the clock before the request that begins the window, and be counted after it.
func TestNoRequestIsToldToWaitLongerThanAWindow(t *testing.T) {
	l := newLimiter[int](10)
	at := time.Now()
	l.take(1, perSecond, at)
	if q, ok := l.take(1, perSecond, at.Add(-1)); !ok || q.left != 3 || q.t != time.Second || q.seconds() != "1" {
		t.Errorf("%+v, %t, want 3 left for 1s", q, ok)
	}
}

func TestABatchIsPaidByTheNextWindowAndNoOther(t *testing.T) {
	l := newLimiter[int](10)
	at := time.Now()
	for range 2 { // two batches at once
		l.take(1, perSecond, at)
	}
	if q, ok := l.more(1, perSecond, 4, at); !ok || q.left != 0 || q.t != time.Second {
		t.Errorf("a batch of 5: %+v, %t, want it taken and nothing left for 1s", q, ok)
	}
	if q, ok := l.more(1, perSecond, 4, at); ok || q.left != 0 || q.t != time.Second {
		t.Errorf("the other one: %+v, %t, want it refused for 1s", q, ok)
	}
	if q, ok := l.take(1, perSecond, at.Add(900*time.Millisecond)); ok || q.t != 100*time.Millisecond {
		t.Errorf("in this window: %+v, %t, want 100ms to wait", q, ok)
	}
	if q, ok := l.take(1, perSecond, at.Add(1500*time.Millisecond)); !ok || q.left != 3 || q.t != 500*time.Millisecond {
		t.Errorf("in the next window: %+v, %t, want 3 of 5 left", q, ok)
	}
	if q, ok := l.take(1, perSecond, at.Add(time.Hour)); !ok || q.left != 4 {
		t.Errorf("an hour later: %+v, %t, want 4 of 5 left", q, ok)
	}
	// A token of the same name with a hundredth of the rate must not wait longer.
	less := tokens.Rate{N: 2, Window: time.Second}
	more := tokens.Rate{N: 200, Window: time.Second}
	l.take(2, more, at)
	l.more(2, more, 199, at)
	if _, ok := l.take(2, less, at); ok {
		t.Error("the window is used up, and takes one more")
	}
	if _, ok := l.take(2, less, at.Add(time.Second)); !ok {
		t.Error("the next window takes none")
	}
}

func TestAFloodOfAuthorsTakesNoMemory(t *testing.T) {
	const keep = 100
	l := newLimiter[authorKey](keep)
	at, busy := time.Now(), authorKey{1, "7"}
	for i := range int64(100_000) {
		l.take(authorKey{2, event.IDOf(i)}, perSecond, at)
		if i%(keep/2) == 0 {
			if _, ok := l.take(busy, perSecond, at); ok != (i/(keep/2) < perSecond.N) {
				t.Fatalf("after %d other authors a busy one has a new window", i)
			}
		}
		if n := l.windows.Len(); n > keep {
			t.Fatalf("%d authors are kept, want at most %d", n, keep)
		}
	}
}
