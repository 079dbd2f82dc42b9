//go:build faults

package subscribe_test

import (
	"context"
	"errors"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
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

// TestAnAnswerThatWaitedIsNotTakenForThatOfARecreatedStream: an instance is cut off while the
// stream is recreated, and its function returns before it can know. NATS would take its answer for
// that of the new event with the same sequence, which another instance has in hand and never
// handles.
func TestAnAnswerThatWaitedIsNotTakenForThatOfARecreatedStream(t *testing.T) {
	r := newRig(t, 1)
	u, err := url.Parse(r.b.URL)
	if err != nil {
		t.Fatal(err)
	}
	link := testkit.NewProxy(t, u.Host)
	u.Host = link.Addr()
	nc, err := nats.Connect(u.String())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()

	old := follow("1", "2", 1)
	r.publish(old)
	entered, leave, returned := make(chan struct{}), make(chan struct{}), make(chan struct{})
	d, health := newDiary(), &subscribe.Health{}
	cutOff := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, nc, "mailer", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			if e.ID == old.ID {
				close(entered)
				<-leave
				close(returned)
				return nil
			}
			d.note(e)
			return nil
		}, subscribe.Log(testkit.Logger(t)), subscribe.Report(health), subscribe.Takeover(time.Minute), subscribe.Timeout(time.Minute))
	})
	<-entered
	link.Stall()
	r.recreate()
	r.publish(follow("1", "3", 1))
	inHand := make(chan struct{})
	other := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.*", func(ctx context.Context, _ subscribe.Event[event.Edge]) error {
			close(inHand)
			<-ctx.Done()
			return ctx.Err()
		}, subscribe.Log(testkit.Logger(t)), subscribe.Takeover(time.Minute), subscribe.Timeout(time.Minute),
			subscribe.Drain(testkit.Stretched(time.Second)))
	})
	<-inHand
	r.await("the instance to know that NATS does not answer", func() (bool, error) { return health.Ready(t.Context()) != nil, nil })
	close(leave)
	<-returned
	link.Heal()
	r.await("the instance to reach NATS", func() (bool, error) { return health.Ready(t.Context()) == nil, nil })
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := other.stop(); err != nil {
		t.Error(err)
	}
	r.await("the new event", func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions["3"]) > 0, nil
	})
	if err := cutOff.stop(); err != nil {
		t.Error(err)
	}
}
