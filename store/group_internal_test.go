package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/postgres"
)

// fakeLanes writes ints. value/10 is the entity; 0 is a new one. Each run takes a second and is
// recorded.
type fakeLanes struct {
	*lanes[int, int]
	mu   sync.Mutex
	ran  []string
	fail error // of groups
}

func newFakeLanes(slotsOfGroups int) *fakeLanes {
	f := &fakeLanes{}
	key := func(w int) any {
		if w < 10 {
			return nil
		}
		return w / 10
	}
	f.lanes = newLanes(&slots{turns: make(chan struct{}, slotsOfGroups), groups: make(chan struct{}, slotsOfGroups),
		alone: make(chan struct{}, 1), locked: make(chan struct{}, 1)}, key,
		func(ctx context.Context, writes []int, at place) ([]int, error) {
			f.mu.Lock()
			// synctest orders runs that are a second apart
			f.ran = append(f.ran, fmt.Sprintf("%s: %v %s", strings.Trim(fmt.Sprint(slices.Sorted(slices.Values(at.tenants))), "[]"),
				slices.Sorted(slices.Values(writes)), at.lockTimeout))
			f.mu.Unlock()
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.fail != nil && at.lockTimeout == groupLockTimeout {
				return nil, f.fail
			}
			return writes, nil
		})
	f.shared = true
	return f
}

// start writes in a goroutine and returns a channel with its result. It returns once the earlier
// writes wait.
func (f *fakeLanes) start(ctx context.Context, tenant int64, w int) chan string {
	ended := make(chan string, 1)
	began := time.Now()
	go func() {
		out, err := f.do(ctx, tenant, []int{w})
		ended <- fmt.Sprintf("%v %v %s", out, err, time.Since(began))
	}()
	synctest.Wait()
	return ended
}

func wantEnds(t *testing.T, ends map[chan string]string) {
	t.Helper()
	for c, want := range ends {
		if got := <-c; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func (f *fakeLanes) wantRan(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, f.ran); diff != "" {
		t.Errorf("what ran (-want +got):\n%s", diff)
	}
	if len(f.open) > 0 || len(f.slots.turns) > 0 || len(f.slots.groups) > 0 || len(f.slots.alone) > 0 || f.slots.waiting.Load() != 0 {
		t.Errorf("%d lanes remain, %d and %d slots, %d wait", len(f.open), len(f.slots.groups),
			len(f.slots.alone), f.slots.waiting.Load())
	}
}

func TestALoneWriteWaitsForNobodyAndTheNextOnesGoTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(2)
		wantEnds(t, map[chan string]string{
			f.start(t.Context(), 1, 1):  "[1] <nil> 1s",
			f.start(t.Context(), 1, 2):  "[2] <nil> 2s",
			f.start(t.Context(), 1, 30): "[30] <nil> 2s",
			f.start(t.Context(), 1, 31): "[31] <nil> 3s", // the same entity as 30
			f.start(t.Context(), 1, 3):  "[3] <nil> 2s",
			f.start(t.Context(), 2, 4):  "[4] <nil> 1s", // another tenant
		})
		f.wantRan(t, "1: [1] 50ms", "2: [4] 50ms", "1: [2 3 30] 50ms", "1: [31] 50ms")
	})
}

// With one slot, the groups of three tenants that wait for it share a transaction.
func TestTenantsThatWaitForASlotShareATransaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(1)
		ends := map[chan string]string{f.start(t.Context(), 1, 1): "[1] <nil> 1s", f.start(t.Context(), 1, 2): "[2] <nil> 2s"}
		for w := range 3 {
			ends[f.start(t.Context(), 2, w+5)] = fmt.Sprintf("[%d] <nil> 2s", w+5)
		}
		ends[f.start(t.Context(), 3, 8)] = "[8] <nil> 2s"
		impatient, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		ends[f.start(impatient, 4, 9)] = "[9] <nil> 2s" // gives up while its write is under way
		wantEnds(t, ends)
		if got := f.slots.runs.Load(); got != 2 {
			t.Errorf("%d transactions, want 2", got)
		}
		f.wantRan(t, "1: [1] 50ms", "1 2 3 4: [2 5 6 7 8 9] 50ms")
	})
}

// With as many groups under way as there are turns, the lanes that wait become one group. It runs
// beside them only once they have proved slow.
func TestGroupsWithoutATurnWaitForALittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(8)
		f.slots.turns = make(chan struct{}, 1)
		first := f.start(t.Context(), 1, 1)
		began := time.Now()
		others := []chan string{f.start(t.Context(), 2, 2), f.start(t.Context(), 3, 3)}
		for _, c := range append(others, first) {
			<-c
		}
		if took := time.Since(began); took != time.Second+patience {
			t.Errorf("took %s", took)
		}
		f.wantRan(t, "1: [1] 50ms", "2 3: [2 3] 50ms")
	})
}

// While half of the turns are taken, another group begins at once only if many writes wait: those
// of all tenants.
func TestTheOtherTurnsAreForManyWrites(t *testing.T) {
	for tenants, want := range map[int]time.Duration{busy - 1: time.Second + patience, busy: time.Second} {
		t.Run(fmt.Sprint(tenants), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeLanes(8)
				f.slots.turns, f.slots.more = make(chan struct{}, 1), make(chan struct{}, 1)
				began := time.Now()
				all := []chan string{f.start(t.Context(), 1, 1)}
				for tenant := range tenants {
					all = append(all, f.start(t.Context(), int64(tenant+2), 2))
				}
				for _, c := range all {
					<-c
				}
				if took := time.Since(began); took != want || len(f.ran) != 2 {
					t.Errorf("took %s, want %s; groups: %q", took, want, f.ran)
				}
			})
		})
	}
}

// While a group of a tenant is under way, twelve more writes make a second one, and no more a
// third.
func TestABusyTenantHasTwoGroupsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(8)
		ends := map[chan string]string{f.start(t.Context(), 1, 1): "[1] <nil> 1s"}
		for w := range busy {
			ends[f.start(t.Context(), 1, w%10)] = fmt.Sprintf("[%d] <nil> 1s", w%10)
		}
		for w := range 2 * busy {
			ends[f.start(t.Context(), 1, w%10)] = fmt.Sprintf("[%d] <nil> 2s", w%10)
		}
		wantEnds(t, ends)
		if len(f.ran) != 3 {
			t.Errorf("groups: %q", f.ran)
		}
	})
}

func TestAGroupThatFailsRunsOneByOneWhileTheNextGroupGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(1)
		f.fail = errors.New("locked")
		ends := map[chan string]string{f.start(t.Context(), 1, 10): "[10] <nil> 2s", f.start(t.Context(), 1, 11): "[11] <nil> 3.5s"}
		time.Sleep(1500 * time.Millisecond) // 10 runs alone
		f.mu.Lock()
		f.fail = nil
		f.mu.Unlock()
		ends[f.start(t.Context(), 1, 20)] = "[20] <nil> 1s" // waits neither for 10 nor for 11
		wantEnds(t, ends)
		f.wantRan(t, "1: [10] 50ms", "1: [10] 100ms", "1: [20] 50ms", "1: [11] 50ms")
	})
}

// A group of two tenants fails. The write of tenant 2 fails alone too, so it may have been the
// cause: for a while the tenant's groups are its own. Tenant 3 shares with the others.
func TestATenantWhoseWriteFailedSharesNoTransaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(1)
		f.slots.alone = make(chan struct{}, 2)
		bad := errors.New("bad")
		run := f.run
		f.run = func(ctx context.Context, writes []int, at place) ([]int, error) {
			out, err := run(ctx, writes, at)
			if slices.Contains(writes, 20) {
				return nil, bad
			}
			return out, err
		}
		together := func(want []string, writes ...int) {
			t.Helper()
			ends := []chan string{f.start(t.Context(), 9, 1)} // holds the slot
			for tenant, w := range writes {
				ends = append(ends, f.start(t.Context(), int64(tenant+1), w))
			}
			for _, c := range ends {
				<-c
			}
			slices.Sort(f.ran)
			f.wantRan(t, want...)
			f.ran = nil
		}
		together([]string{"1 2: [3 20] 50ms", "1: [3] 100ms", "2: [20] 100ms", "9: [1] 50ms"}, 3, 20)
		together([]string{"1 3: [4 6] 50ms", "2: [5] 50ms", "9: [1] 50ms"}, 4, 5, 6)
		time.Sleep(separateFor)
		together([]string{"1 2: [4 5] 50ms", "9: [1] 50ms"}, 4, 5)
	})
}

// The same holds for a statement that mixed up tenants: its error is not hidden by a second run.
func TestAnUnknownOutcomeIsNotTriedAgain(t *testing.T) {
	for _, fail := range []error{postgres.ErrUnknown, errNotOfGroup} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakeLanes(1)
			f.fail = fail
			wantEnds(t, map[chan string]string{f.start(t.Context(), 1, 1): "[] " + fail.Error() + " 1s"})
			f.wantRan(t, "1: [1] 50ms")
		})
	}
}

func TestCallersThatGiveUpLeaveTheOthersInPeace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(1)
		impatient, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		wantEnds(t, map[chan string]string{
			f.start(impatient, 1, 10):   "[10] <nil> 1s", // runs already, on behalf of others too
			f.start(impatient, 1, 20):   "[] " + "wait for a group of writes of tenant 1: context deadline exceeded 500ms",
			f.start(impatient, 1, 21):   "[] " + "wait for a group of writes of tenant 1: context deadline exceeded 500ms",
			f.start(t.Context(), 1, 22): "[22] <nil> 2s", // behind two that gave up
			f.start(t.Context(), 1, 1):  "[1] <nil> 2s",
			f.start(impatient, 2, 1):    "[] wait to write for tenant 2: context deadline exceeded 500ms", // the leader of its lane
			f.start(t.Context(), 2, 2):  "[2] <nil> 2s",
		})
		f.wantRan(t, "1: [10] 50ms", "1 2: [1 2 22] 50ms")
	})
}

func TestAPanicOfAGroupIsToldToAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(1)
		first := f.start(t.Context(), 1, 1)
		run := f.run
		f.run = func(ctx context.Context, writes []int, at place) ([]int, error) {
			if writes[0] == 20 {
				panic("a bug")
			}
			return run(ctx, writes, at)
		}
		panicked := make(chan any, 1)
		go func() {
			defer func() { panicked <- recover() }()
			_, _ = f.do(t.Context(), 1, []int{20})
		}()
		synctest.Wait()
		wantEnds(t, map[chan string]string{
			first:                       "[1] <nil> 1s",
			f.start(t.Context(), 1, 3):  "[3] <nil> 2s",
			f.start(t.Context(), 1, 21): "[21] <nil> 2s", // the same entity as the leader's
		})
		if p := <-panicked; p != "a bug" {
			t.Errorf("the leader panicked with %v", p)
		}
		slices.Sort(f.ran) // two began at the same time
		f.wantRan(t, "1: [1] 50ms", "1: [21] 50ms", "1: [3] 100ms")
	})
}

func TestTooManyWaitingWritesAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeLanes(1)
		ends := map[chan string]string{f.start(t.Context(), 1, 1): "[1] <nil> 1s"}
		var waiting sync.WaitGroup
		for range maxWaiting {
			waiting.Go(func() { _, _ = f.do(t.Context(), 1, []int{2}) })
		}
		synctest.Wait()
		if _, err := f.do(t.Context(), 1, []int{3}); !errors.Is(err, ErrOverloaded) {
			t.Errorf("error %v", err)
		}
		ends[f.start(t.Context(), 2, 4)] = "[4] <nil> 2s" // another tenant is not affected
		wantEnds(t, ends)
		waiting.Wait()
		if want := 1 + maxWaiting/maxGroup; len(f.ran) != want {
			t.Errorf("%d groups, want %d", len(f.ran), want)
		}
	})
}

// TestACallerThatHasNotReadBlocksNobody: a caller was told to lead, and before it runs, another
// leader writes its group and its context ends.
func TestACallerThatHasNotReadBlocksNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLanes(&slots{}, func(w int) any { return w }, func(context.Context, []int, place) ([]int, error) { return nil, nil })
		caller := newTicket[int, int](7, 7)
		ln, err := l.join(1, caller)
		if err != nil {
			t.Fatal(err)
		}
		settled := false
		go func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.dequeue(ln)
			p := l.take(ln)
			p.outs = []int{7}
			l.settle(p)
			settled = true
		}()
		synctest.Wait()
		if !settled {
			t.Fatal("the outcome waits for the caller, and holds the mutex")
		}
		if l.leave(ln, caller) {
			t.Error("the caller leaves with a verdict")
		}
		if v := <-caller.told; !v.lead {
			t.Errorf("the first verdict is %+v", v)
		}
		if v := <-caller.told; !slices.Equal(v.outs, []int{7}) || v.err != nil {
			t.Errorf("the outcome is %+v", v)
		}
	})
}

// TestALeaderWhoseGroupAnotherTookGetsItsOutcome: a leader gets a slot at the moment when another
// leader has written its group. By then the lane has its next leader, whose group it must leave
// alone.
func TestALeaderWhoseGroupAnotherTookGetsItsOutcome(t *testing.T) {
	run := func(_ context.Context, writes []int, _ place) ([]int, error) { return writes, nil }
	for range 64 { // the slot and the outcome are there at once, so each time one of the two may win
		l := newLanes(&slots{turns: make(chan struct{}, 1), groups: make(chan struct{}, 1)}, func(w int) any { return w }, run)
		join := func(w int) (*lane[int, int], *ticket[int, int]) {
			ticket := newTicket[int, int](w, w)
			ln, err := l.join(1, ticket)
			if err != nil || !(<-ticket.told).lead {
				t.Fatalf("write %d does not lead: %v", w, err)
			}
			return ln, ticket
		}
		ln, old := join(7)
		l.mu.Lock()
		if len(l.queue) != 1 || len(l.take(ln).tickets) != 1 {
			t.Fatal("the lane does not wait for a slot")
		}
		l.dequeue(ln)
		l.free(ln, old)
		old.tell(told, verdict[int]{outs: []int{7}})
		ln.running--
		l.mu.Unlock()
		_, next := join(8)
		for _, leader := range []*ticket[int, int]{old, next} {
			if err := l.lead(t.Context(), ln, leader); err != nil {
				t.Fatal(err)
			}
			if got := <-leader.told; !slices.Equal(got.outs, []int{leader.write}) || got.err != nil {
				t.Fatalf("the leader of write %d gets %+v", leader.write, got)
			}
		}
	}
}
