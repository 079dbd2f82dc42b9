package subscribe_test

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
)

// TestInstancesInOrderShareThePartitionsEvenly starts a second instance when the first reads all
// partitions, stops the first, and starts a third.
func TestInstancesInOrderShareThePartitionsEvenly(t *testing.T) {
	r, d := newRig(t, 4), newDiary()
	var version int64
	at := map[string]int{} // the last instance at each stream
	instance := func(i int) *running {
		nc := r.b.Connect(t)
		return r.start(func(ctx context.Context) error {
			return subscribe.Handle(ctx, nc, "mailer", "follow.created", func(_ context.Context, e subscribe.Event[event.Edge]) error {
				d.note(e)
				d.mu.Lock()
				defer d.mu.Unlock()
				at[e.Stream] = i
				return nil
			}, subscribe.InOrder(), subscribe.Takeover(time.Second), subscribe.Log(testkit.Logger(t).With("instance", i)))
		})
	}
	await := func(want map[int]int) {
		t.Helper()
		r.await(fmt.Sprintf("streams by instance to be %v", want), func() (bool, error) {
			version++
			for to := int64(1); to <= followees; to++ {
				r.publish(follow("9", event.IDOf(to), version))
			}
			<-time.After(50 * time.Millisecond)
			d.mu.Lock()
			defer d.mu.Unlock()
			got := map[int]int{}
			for _, i := range at {
				got[i]++
			}
			if !maps.Equal(got, want) {
				return false, fmt.Errorf("streams by instance: %v", got)
			}
			return true, nil
		})
	}
	first := instance(1)
	await(map[int]int{1: 4})
	instance(2)
	await(map[int]int{1: 2, 2: 2})
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	await(map[int]int{2: 4})
	instance(3)
	await(map[int]int{2: 2, 3: 2})
	r.await("all events", func() (bool, error) { return d.has(followees, version) })
	d.firstsInOrder(t)
}
