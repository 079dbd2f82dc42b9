//go:build faults

package subscribe_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
)

// TestInstancesShareAPartitionAndOneThatIsCutOffLosesNothing runs three instances. One loses its
// connection with events in hand, while the partitions are resized.
func TestInstancesShareAPartitionAndOneThatIsCutOffLosesNothing(t *testing.T) {
	for name, opts := range map[string][]subscribe.Option{"shared": nil, "in order": {subscribe.InOrder()}} {
		t.Run(name, func(t *testing.T) {
			w := &share{rig: newRig(t, 1), d: newDiary(), opts: opts, dying: make(chan struct{}), byInstance: map[int]int{}}
			w.busy.Add(10)
			for v := range int64(3) {
				w.publishAll(v + 1)
			}
			mortal := w.b.Connect(t)
			all := []*running{w.instance(mortal, w.hangs)}
			w.busy.Wait()
			for i := range 2 {
				all = append(all, w.instance(w.b.Connect(t), w.lives(i)))
			}
			mortal.Close()
			close(w.dying)
			w.publishAll(4)
			w.resize(2)
			w.publishAll(5)
			w.await("all events", func() (bool, error) { return w.d.has(followees, 5) })
			w.d.mu.Lock()
			if got := w.d.versions["1"]; slices.Index(got, 5) < slices.Index(got, 4) {
				t.Errorf("followee 1 has had %v: an instance began a new stream before the old one was handled", got)
			}
			shared := w.byInstance[0] > 0 && w.byInstance[1] > 0
			w.d.mu.Unlock()
			switch {
			case name == "in order":
				w.d.firstsInOrder(t)
			case !shared:
				t.Errorf("events by instance: %v, want some for each", w.byInstance)
			}
			if err := all[0].stop(); !errors.Is(err, subscribe.ErrClosed) {
				t.Errorf("the instance without a connection: %v", err)
			}
			for _, in := range all[1:] {
				if err := in.stop(); err != nil {
					t.Error(err)
				}
			}
			w.nothingPending("mailer-follow-created")
		})
	}
}

// TestWhatTakesLongerThanTakeoverIsNotDeliveredAgain lets two instances handle events that take
// longer than Takeover.
func TestWhatTakesLongerThanTakeoverIsNotDeliveredAgain(t *testing.T) {
	r, d := newRig(t, 1), newDiary()
	for range 2 {
		nc := r.b.Connect(t)
		r.start(func(ctx context.Context) error {
			return subscribe.Handle(ctx, nc, "mailer", "follow.created", func(_ context.Context, e subscribe.Event[event.Edge]) error {
				<-time.After(takeover * 6 / 5)
				d.note(e)
				return nil
			}, subscribe.Takeover(takeover), subscribe.Log(testkit.Logger(t)))
		})
	}
	for to := int64(1); to <= 8; to++ {
		r.publish(follow("1", event.IDOf(to), 1))
	}
	again := 0
	r.await("the events", func() (bool, error) {
		c, err := r.js.Consumer(t.Context(), r.cfg.StreamName(0), "mailer-follow-created")
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			return false, nil // no instance has begun
		}
		if err != nil {
			return false, err
		}
		again = max(again, c.CachedInfo().NumRedelivered)
		return d.has(8, 1)
	})
	if again > 0 {
		t.Errorf("%d events that take longer than Takeover were delivered again: an instance did not report progress", again)
	}
}
