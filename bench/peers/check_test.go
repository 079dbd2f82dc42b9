package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// sound is a run without a fault: two entities with three versions each. Each event is stored 10 ms
// after its COMMIT, and a COMMIT is sent every 100 ms.
func sound() evidence {
	began := time.Unix(1_000, 0)
	e := evidence{committed: map[change]bool{}, sent: map[change]time.Time{}, waiting: map[change]bool{}, poison: map[change]bool{}}
	for i := range 6 {
		c := change{Entity: string(rune('a' + i%2)), Version: int64(i/2 + 1)}
		at := began.Add(time.Duration(i) * 100 * time.Millisecond)
		e.committed[c], e.sent[c] = true, at
		e.stream = append(e.stream, stored{c, at.Add(10 * time.Millisecond)})
	}
	e.loaded, e.end = began.Add(time.Second), began.Add(3*time.Second)
	return e
}

// TestTheCheckerFindsEachFault seeds one fault at a time.
func TestTheCheckerFindsEachFault(t *testing.T) {
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		seed func(e *evidence)
		want verdict
	}{
		"none": {func(*evidence) {}, verdict{Events: 6, Stalled: 10 * ms, P50: 10 * ms, P99: 10 * ms, Max: 10 * ms}},
		"an event is neither on the stream nor in the outbox": {
			func(e *evidence) { e.stream = e.stream[:5] },
			verdict{Events: 6, Lost: 1, Stalled: 500 * ms, P50: 10 * ms, P99: 2500 * ms, Max: 2500 * ms},
		},
		"an event is in the outbox until the end": {
			func(e *evidence) { e.waiting[e.stream[5].change] = true; e.stream = e.stream[:5] },
			verdict{Events: 6, Stuck: 1, Stalled: 500 * ms, P50: 10 * ms, P99: 2500 * ms, Max: 2500 * ms},
		},
		"a poison event waits, and the others do not": {
			func(e *evidence) {
				e.waiting[e.stream[5].change], e.poison[e.stream[5].change] = true, true
				e.stream = e.stream[:5]
			},
			verdict{Events: 6, Stuck: 1, Stalled: 10 * ms, P50: 10 * ms, P99: 10 * ms, Max: 10 * ms},
		},
		"an event is on the stream twice": {
			func(e *evidence) { e.stream = append(e.stream, e.stream[2]) },
			verdict{Events: 6, Doubled: 1, Stalled: 10 * ms, P50: 10 * ms, P99: 10 * ms, Max: 10 * ms},
		},
		"two versions of an entity are swapped": {
			func(e *evidence) {
				e.stream[2].change, e.stream[4].change = e.stream[4].change, e.stream[2].change
			},
			// Version 3 comes 190 ms before its COMMIT, which no real stream shows.
			verdict{Events: 6, Inverted: 1, Stalled: 100 * ms, P50: 10 * ms, P99: 210 * ms, Max: 210 * ms},
		},
		"an event was never committed": {
			func(e *evidence) { delete(e.committed, e.stream[5].change) },
			verdict{Events: 5, Invented: 1, Stalled: 10 * ms, P50: 10 * ms, P99: 10 * ms, Max: 10 * ms},
		},
		"an event comes after the load": {
			func(e *evidence) { e.stream[5].at = e.loaded.Add(time.Second) },
			verdict{Events: 6, Stalled: 500 * ms, P50: 10 * ms, P99: 1500 * ms, Max: 1500 * ms},
		},
		"nothing is published for half a second": {
			func(e *evidence) {
				for i := 1; i < 6; i++ {
					e.stream[i].at = e.sent[e.stream[1].change].Add(500 * ms)
				}
			},
			verdict{Events: 6, Stalled: 500 * ms, P50: 200 * ms, P99: 500 * ms, Max: 500 * ms},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := sound()
			c.seed(&e)
			if diff := cmp.Diff(c.want, judge(e)); diff != "" {
				t.Errorf("the verdict (-want +got):\n%s", diff)
			}
		})
	}
}
