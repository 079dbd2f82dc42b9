package subscribe_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
	"github.com/tidings/tidings/subscribe/prom"
)

// diary records the calls of handlers.
type diary struct {
	mu       sync.Mutex
	versions map[event.ID][]int64 // by followee, in the order in which they were handled
	attempts map[event.ID]int     // calls, by follower
}

func newDiary() *diary {
	return &diary{versions: map[event.ID][]int64{}, attempts: map[event.ID]int{}}
}

func (d *diary) call(e subscribe.Event[event.Edge]) (attempt int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attempts[e.Data.From]++
	return d.attempts[e.Data.From]
}

func (d *diary) note(e subscribe.Event[event.Edge]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.versions[e.Data.To] = append(d.versions[e.Data.To], e.Data.Version)
}

// has reports whether each followee from 1 to n has had all versions up to last. The error names a
// missing one.
func (d *diary) has(n int, last int64) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range n {
		to := event.IDOf(1 + i)
		seen := map[int64]bool{}
		for _, v := range d.versions[to] {
			seen[v] = true
		}
		if int64(len(seen)) != last {
			return false, fmt.Errorf("followee %s has had %v, want 1 to %d", to, d.versions[to], last)
		}
	}
	return true, nil
}

// firstsInOrder fails the test if a version was handled for the first time after a later version.
func (d *diary) firstsInOrder(t *testing.T) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for to, versions := range d.versions {
		most := int64(0)
		seen := map[int64]bool{}
		for _, v := range versions {
			if !seen[v] && v < most {
				t.Errorf("followee %s has had %v: the first %d came after %d", to, versions, v, most)
			}
			seen[v], most = true, max(most, v)
		}
	}
}

// takeover is the Takeover of tests that count calls. It is longer than a busy machine stalls,
// because NATS delivers an event again when it has not heard of the event for so long.
const takeover = 5 * time.Second

// Followers whose events have a special effect.
const (
	failsTwice = event.ID("500")
	isRefused  = event.ID("501")
	panics     = event.ID("502")
	takesLong  = event.ID("503")
)

// publishMischief publishes versions 1 to 5 of 20 followees, some of them from followers with
// special effects. It also publishes events that a handler of follow.created must not get.
func (r *rig) publishMischief() {
	r.t.Helper()
	removed := follow("9", "3", 1)
	removed.Type = event.Removed
	r.publish(follow(failsTwice, "1", 1), follow(isRefused, "1000", 1), follow(panics, "1001", 1),
		follow(takesLong, "2", 1), removed, damaged("1002"))
	r.send(&nats.Msg{Subject: "events.0.t1.follow.created", Data: []byte("a stranger's")})
	for v := int64(1); v <= 5; v++ {
		for to := int64(1); to <= 20; to++ {
			if v > 1 || to > 2 {
				r.publish(follow("9", event.IDOf(to), v))
			}
		}
	}
}

// mischief returns a handler with the effects of the followers.
func (d *diary) mischief(t *testing.T, healed <-chan struct{}) func(context.Context, subscribe.Event[event.Edge]) error {
	return func(ctx context.Context, e subscribe.Event[event.Edge]) error {
		n := d.call(e)
		switch e.Data.From {
		case failsTwice:
			if n != e.Attempt {
				t.Errorf("call %d is attempt %d", n, e.Attempt)
			}
			if n <= 2 {
				return errors.New("not yet")
			}
		case isRefused:
			return subscribe.Permanent(errors.New("no such\nuser"))
		case panics:
			select {
			case <-healed:
			default:
				panic("oh no")
			}
		case takesLong:
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(takeover * 6 / 5):
			}
		}
		d.note(e)
		return nil
	}
}

func TestAHandlerGetsEveryEventAndOnlyWhatItHasDoneIsAcknowledged(t *testing.T) {
	r := newRig(t, 2)
	ctx := t.Context()
	d, health, reg := newDiary(), &subscribe.Health{}, prometheus.NewRegistry()
	healed := make(chan struct{})
	run := func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.created", d.mischief(t, healed), subscribe.Log(testkit.Logger(t)),
			subscribe.Report(health), prom.Metrics(reg), subscribe.Concurrency(6), subscribe.Attempts(3),
			subscribe.Takeover(takeover), subscribe.Timeout(30*time.Second),
			subscribe.BackOff(func(int) time.Duration { return 10 * time.Millisecond }))
	}
	r.publishMischief()
	w := r.start(run)
	r.await("all that can be handled", func() (bool, error) { return d.has(20, 5) })
	r.resize(3)
	for to := int64(1); to <= 20; to++ {
		r.publish(follow("9", event.IDOf(to), 6))
	}
	r.await("the events of the new streams", func() (bool, error) { return d.has(20, 6) })
	letters, err := subscribe.HandlerDeadLetters(r.nc)
	if err != nil {
		t.Fatal(err)
	}
	var all []subscribe.Letter
	r.await("the dead letters", func() (bool, error) {
		all, err = postgres.Collect(letters.List(ctx, "mailer-follow-created", 0))
		return len(all) == 3, err
	})
	checkLetters(t, all)
	d.firstsInOrder(t)
	for from, want := range map[event.ID]int{failsTwice: 3, isRefused: 1, panics: 3, takesLong: 1} {
		if got := d.attempts[from]; got != want {
			t.Errorf("%d calls for follower %s, want %d", got, from, want)
		}
	}
	if err := health.Ready(ctx); err != nil {
		t.Errorf("not ready: %v", err)
	}

	close(healed)
	retryPanics(t, letters, all)
	r.await("the retry", func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions["1001"]) > 0, nil
	})
	if err := w.stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if s, err := r.js.Stream(ctx, "EVENTS-dead"); err != nil || s.CachedInfo().State.Msgs != 0 || !s.CachedInfo().Config.DenyPurge {
		t.Errorf("the stream of dead letters: %+v, %v, want no messages and no purges", s.CachedInfo(), err)
	}
	r.nothingPending("mailer-follow-created")
	for name, want := range map[string]float64{"handled_total": 121, "foreign_total": 3, "failures_total": 4, "dead_letters_total": 3} {
		n := testkit.Metric(t, reg, "tidings_subscriber_"+name, "mailer-follow-created")
		mayCome := name == "handled_total" || name == "foreign_total" // again, when the machine stalls for Takeover
		if n != want && !(mayCome && n > want) {
			t.Errorf("tidings_subscriber_%s is %v, want %v", name, n, want)
		}
	}
}

// TestAHandlerThatStartsAfterAClosingMessageHasExpiredReadsTheNewStreams starts a handler again,
// and another one for the first time.
func TestAHandlerThatStartsAfterAClosingMessageHasExpiredReadsTheNewStreams(t *testing.T) {
	r := newRig(t, 1)
	handle := func(name string, d *diary) *running {
		return r.start(func(ctx context.Context) error {
			return subscribe.Handle(ctx, r.nc, name, "follow.created", func(_ context.Context, e subscribe.Event[event.Edge]) error {
				d.note(e)
				return nil
			}, subscribe.Log(testkit.Logger(t)))
		})
	}
	known, first := newDiary(), newDiary()
	r.publish(follow("9", "1", 1))
	w := handle("known", known)
	r.await("the event of the old stream", func() (bool, error) { return known.has(1, 1) })
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	old := r.open[0].Name
	r.resize(2)
	s, err := r.js.Stream(t.Context(), old)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Expire(t, s, 0) // as NATS_MAX_AGE does later
	handle("known", known)
	handle("first", first)
	r.publish(follow("9", "1", 2))
	r.await("the event of the new stream", func() (bool, error) { return known.has(1, 2) })
	r.await("the event of the new stream at another handler", func() (bool, error) {
		first.mu.Lock()
		defer first.mu.Unlock()
		return slices.Equal(first.versions["1"], []int64{2}), nil
	})
}

// TestADeadLetterOfAnErasedEventDoesNotStay: an erasure has searched the dead letters while a
// handler held the event.
func TestADeadLetterOfAnErasedEventDoesNotStay(t *testing.T) {
	r := newRig(t, 1)
	ctx := t.Context()
	entered, erased := make(chan struct{}), make(chan struct{})
	r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.created", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			if e.Data.From == "1" {
				close(entered)
				<-erased
			}
			return subscribe.Permanent(errors.New("no such user"))
		}, subscribe.Log(testkit.Logger(t)))
	})
	r.publish(follow("1", "1", 1))
	<-entered
	if err := broker.RecordErased(ctx, r.js, r.cfg, r.open[0].Name, []uint64{1}); err != nil {
		t.Fatal(err)
	}
	close(erased)
	r.publish(follow("2", "2", 1))
	letters, err := subscribe.HandlerDeadLetters(r.nc)
	if err != nil {
		t.Fatal(err)
	}
	r.await("two dead letters, of which the other event's stays", func() (bool, error) {
		s, err := r.js.Stream(ctx, "EVENTS-dead")
		if errors.Is(err, jetstream.ErrStreamNotFound) ||
			err == nil && (s.CachedInfo().State.LastSeq != 2 || s.CachedInfo().State.Msgs != 1) {
			return false, nil
		}
		all, lerr := postgres.Collect(letters.List(ctx, "*", 0))
		return len(all) == 1 && all[0].Event.AggregateID == "2", errors.Join(err, lerr)
	})
}

// retryPanics retries the dead letter of a panic, and discards the others.
func retryPanics(t *testing.T, letters *subscribe.Letters, all []subscribe.Letter) {
	t.Helper()
	for _, l := range all {
		act := letters.Discard
		if strings.HasPrefix(l.Error, "panic") {
			act = letters.Retry
		}
		if err := act(t.Context(), l.ID); err != nil {
			t.Error(err)
		}
		if err := letters.Retry(t.Context(), l.ID); !errors.Is(err, subscribe.ErrNoLetter) {
			t.Errorf("a second time: %v, want ErrNoLetter", err)
		}
	}
}

func checkLetters(t *testing.T, all []subscribe.Letter) {
	t.Helper()
	want := map[event.ID]string{"1000": "no such user", "1001": "panic: oh no", "1002": "decode the payload of event"}
	for _, l := range all {
		if text, ok := want[l.Event.AggregateID]; !ok || !strings.Contains(l.Error, text) || l.Subscriber != "mailer-follow-created" ||
			l.Event.Stream == "" || l.Event.Seq == 0 || l.Event.TenantID != 1 {
			t.Errorf("dead letter %+v", l)
		}
		delete(want, l.Event.AggregateID)
	}
}

// nothingPending fails the test unless all events of the streams are acknowledged. NATS counts an
// acknowledgment a little after it was sent.
func (r *rig) nothingPending(durable string) {
	r.t.Helper()
	streams, err := broker.Streams(context.Background(), r.js, r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, s := range streams {
		r.await("every event of "+s.Name+" to be acknowledged", func() (bool, error) {
			c, err := r.js.Consumer(context.Background(), s.Name, durable)
			if err != nil {
				return false, err
			}
			if i := c.CachedInfo(); i.NumPending != 0 || i.NumAckPending != 0 {
				return false, fmt.Errorf("%d events to deliver and %d to acknowledge", i.NumPending, i.NumAckPending)
			}
			return true, nil
		})
	}
}

func TestHandleSaysWhatIsWrongBeforeItTakesAnything(t *testing.T) {
	r := newRig(t, 1)
	ctx := t.Context()
	none := func(context.Context, subscribe.Event[event.Edge]) error { return nil }
	if err := subscribe.Handle(ctx, r.nc, "my mailer", "follow.created", none); !errors.Is(err, subscribe.ErrName) {
		t.Errorf("a bad name: %v", err)
	}
	for eventType, want := range map[string]string{
		"folow.created":   `this program knows no kind or upstream "folow"`,
		"follow.edited":   "the events of follow are created, removed, updated, or * for all",
		"follow":          "the events of follow are",
		"comment.created": "the payload of comment is not of type event.Edge",
	} {
		if err := subscribe.Handle(ctx, r.nc, "mailer", eventType, none); !errors.Is(err, subscribe.ErrType) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want ErrType: %s", eventType, err, want)
		}
	}
	if err := subscribe.Handle(ctx, r.nc, "mailer", "follow.created", none, subscribe.Streams("OTHERS", "others")); !errors.Is(err,
		subscribe.ErrNoStreams) {
		t.Errorf("no streams: %v", err)
	}
	if _, err := r.js.CreateConsumer(ctx, r.cfg.StreamName(0),
		jetstream.ConsumerConfig{Durable: "mailer-follow", AckPolicy: jetstream.AckExplicitPolicy}); err != nil {
		t.Fatal(err)
	}
	if err := subscribe.Handle(ctx, r.nc, "mailer", "follow.*",
		func(context.Context, subscribe.Event[json.RawMessage]) error { return nil },
		subscribe.Log(testkit.Logger(t))); !errors.Is(err, subscribe.ErrFilter) ||
		!strings.Contains(err.Error(), "is not this subscriber's") {
		t.Errorf("a consumer of somebody else: %v, want ErrFilter", err)
	}
}

func TestAHandlerThatNeverReturnsEndsTheSubscriberAndIsNotAcknowledged(t *testing.T) {
	r := newRig(t, 1)
	never := make(chan struct{})
	stuck := func(context.Context, subscribe.Event[event.Edge]) error {
		<-never
		return nil
	}
	r.publish(follow("1", "2", 1), follow("1", "3", 1))
	health := &subscribe.Health{}
	once := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "impatient", "follow.*", stuck, subscribe.Attempts(1), subscribe.Concurrency(3),
			subscribe.Timeout(100*time.Millisecond), subscribe.Report(health), subscribe.Log(testkit.Logger(t)))
	})
	letters, err := subscribe.HandlerDeadLetters(r.nc)
	if err != nil {
		t.Fatal(err)
	}
	r.await("dead letters of what does not return", func() (bool, error) {
		all, err := postgres.Collect(letters.List(t.Context(), "impatient-follow", 0))
		return len(all) == 2 && strings.Contains(all[0].Error, "did not return in time"), err
	})
	if err := health.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "2 calls of impatient-follow do not return") {
		t.Errorf("ready: %v", err)
	}
	if err := once.stop(); !errors.Is(err, subscribe.ErrStuck) {
		t.Errorf("stop with calls that do not return: %v, want ErrStuck", err)
	}
	err = subscribe.Handle(t.Context(), r.nc, "mailer", "follow.*", stuck, subscribe.Concurrency(2),
		subscribe.Timeout(200*time.Millisecond), subscribe.Takeover(time.Second), subscribe.Log(testkit.Logger(t)))
	if !errors.Is(err, subscribe.ErrStuck) || !strings.Contains(err.Error(), "all 2 places of mailer-follow are taken") {
		t.Errorf("%v, want ErrStuck", err)
	}
	close(never)
	d := newDiary()
	w := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			d.note(e)
			return nil
		}, subscribe.Log(testkit.Logger(t)), subscribe.Takeover(time.Second))
	})
	r.await("both events", func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions["2"]) > 0 && len(d.versions["3"]) > 0, nil
	})
	// A recreated stream is read from its beginning.
	r.recreate()
	r.publish(follow("1", "4", 1))
	r.await("the event of the new stream", func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions["4"]) > 0, nil
	})
	if err := w.stop(); err != nil {
		t.Error(err)
	}
}

// TestAClosedConnectionEndsTheSubscriberAtOnce: NATS can get no answer for the event in hand.
func TestAClosedConnectionEndsTheSubscriberAtOnce(t *testing.T) {
	r := newRig(t, 1)
	r.publish(follow("1", "2", 1))
	nc := r.b.Connect(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	w := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, nc, "mailer", "follow.*", func(context.Context, subscribe.Event[event.Edge]) error {
			close(entered)
			<-leave
			return nil
		}, subscribe.Log(testkit.Logger(t)), subscribe.Timeout(time.Hour), subscribe.Drain(time.Hour))
	})
	<-entered
	nc.Close()
	close(leave)
	r.await("Handle to return", func() (bool, error) {
		select {
		case <-w.done:
			return true, nil
		default:
			return false, nil
		}
	})
	if err := w.stop(); !errors.Is(err, subscribe.ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}

// TestAnEventOfARecreatedStreamIsNotTakenForOneInHand: both have the same sequence, and a durable
// consumer knows an acknowledgment by its sequence alone. A second copy of either would only be
// superfluous.
func TestAnEventOfARecreatedStreamIsNotTakenForOneInHand(t *testing.T) {
	r := newRig(t, 1)
	old := follow("1", "2", 1)
	r.publish(old)
	entered, leave := make(chan struct{}), make(chan struct{})
	d := newDiary()
	w := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			if e.ID == old.ID {
				close(entered)
				<-leave
				return subscribe.Permanent(errors.New("no such user"))
			}
			d.note(e)
			if e.Data.To == "3" {
				return subscribe.Permanent(errors.New("no such user either"))
			}
			return nil
		}, subscribe.Log(testkit.Logger(t)), subscribe.Takeover(time.Second))
	})
	<-entered
	r.recreate()
	r.publish(follow("1", "3", 1))
	r.await("the new event in hand or handled", func() (bool, error) {
		c, err := r.js.Consumer(t.Context(), r.cfg.StreamName(0), "mailer-follow")
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			return false, nil
		}
		return err == nil && c.CachedInfo().Delivered.Stream == 1, err
	})
	close(leave)
	r.await("the new event", func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions["3"]) > 0, nil
	})
	letters, err := subscribe.HandlerDeadLetters(r.nc)
	if err != nil {
		t.Fatal(err)
	}
	r.await("the dead letters of both", func() (bool, error) {
		all, err := postgres.Collect(letters.List(t.Context(), "mailer-follow", 0))
		return len(all) == 2, err
	})
	if err := w.stop(); err != nil {
		t.Error(err)
	}
}

// watch is a log that reports a line with a text.
type watch struct {
	text string
	said chan struct{} // has room for one
}

func (w watch) Write(line []byte) (int, error) {
	if strings.Contains(string(line), w.text) {
		select {
		case w.said <- struct{}{}:
		default:
		}
	}
	return len(line), nil
}

// TestAnEventOfAStreamThatWasSeenToBeGoneIsNotAcknowledged: it is in hand while the stream is
// missing, and still when the stream exists again and another instance has the new event with its
// sequence in hand.
func TestAnEventOfAStreamThatWasSeenToBeGoneIsNotAcknowledged(t *testing.T) {
	r := newRig(t, 1)
	old := follow("1", "2", 1)
	r.publish(old)
	gone := watch{"the stream is gone", make(chan struct{}, 1)}
	entered, leave := make(chan struct{}), make(chan struct{})
	first := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			if e.ID == old.ID {
				close(entered)
				<-leave
			}
			return nil
		}, subscribe.Log(slog.New(slog.NewTextHandler(gone, nil))), subscribe.Takeover(time.Minute))
	})
	<-entered
	p := r.remove()
	<-gone.said
	r.declare(p)
	r.publish(follow("1", "3", 1))
	inHand := make(chan struct{})
	second := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.*", func(ctx context.Context, _ subscribe.Event[event.Edge]) error {
			close(inHand)
			<-ctx.Done()
			return ctx.Err() // gives it back
		}, subscribe.Log(testkit.Logger(t)), subscribe.Takeover(time.Minute), subscribe.Drain(testkit.Stretched(time.Second)))
	})
	<-inHand
	close(leave)
	if err := errors.Join(first.stop(), second.stop()); err != nil {
		t.Error(err)
	}
	d := newDiary()
	third := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			d.note(e)
			return nil
		}, subscribe.Log(testkit.Logger(t)), subscribe.Takeover(time.Minute))
	})
	r.await("the new event", func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions["3"]) > 0, nil
	})
	if err := third.stop(); err != nil {
		t.Error(err)
	}
}

// TestAnEventThatEndsItsProcessTakesNoOthersWithIt: the first of 20 events has ended eleven
// processes that had all of them in hand.
func TestAnEventThatEndsItsProcessTakesNoOthersWithIt(t *testing.T) {
	r := newRig(t, 1)
	var all []event.Event
	for i := range 20 {
		all = append(all, follow("1", event.IDOf(1+i), 1))
	}
	r.publish(all...)
	c, err := r.js.CreateConsumer(t.Context(), r.cfg.StreamName(0), jetstream.ConsumerConfig{Durable: "mailer-follow-created",
		FilterSubject: event.TypeFilter(r.cfg.Prefix, "follow", "created"), AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		t.Fatal(err)
	}
	for range 11 {
		batch, err := c.Fetch(len(all))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for m := range batch.Messages() {
			n++
			if err := m.Nak(); err != nil {
				t.Fatal(err)
			}
		}
		if n != len(all) || batch.Error() != nil {
			t.Fatalf("%d events, %v", n, batch.Error())
		}
	}
	d := newDiary()
	var running, most atomic.Int32
	r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.created", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			if n := running.Add(1); n > most.Load() {
				most.Store(n)
			}
			defer running.Add(-1)
			d.note(e)
			return nil
		}, subscribe.Log(testkit.Logger(t)))
	})
	letters, err := subscribe.HandlerDeadLetters(r.nc)
	if err != nil {
		t.Fatal(err)
	}
	r.await("all events to be handled or dead", func() (bool, error) {
		dead, err := postgres.Collect(letters.List(t.Context(), "mailer-follow-created", 0))
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions)+len(dead) == len(all), err
	})
	dead, err := postgres.Collect(letters.List(t.Context(), "mailer-follow-created", 0))
	if err != nil || len(dead) != 1 || dead[0].Event.ID != all[0].ID || most.Load() != 1 {
		t.Errorf("%d dead letters, %v; up to %d calls at once; want the first event alone, and one call", len(dead), err, most.Load())
	}
}

// share is the work that three instances of a handler share. One of them dies with events in hand.
type share struct {
	*rig
	d          *diary
	opts       []subscribe.Option
	busy       sync.WaitGroup // until the instance that dies has ten events in hand
	dying      chan struct{}
	entered    int
	started    int         // instances
	byInstance map[int]int // events by instance, without the one that dies
}

const followees = 40

// instance returns when each instance waits for events of the first stream, so none is too late for
// its share.
func (w *share) instance(nc *nats.Conn, fn func(context.Context, subscribe.Event[event.Edge]) error) *running {
	var health subscribe.Health
	run := w.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, nc, "mailer", "follow.created", fn,
			append(w.opts, subscribe.Log(testkit.Logger(w.t)), subscribe.Takeover(time.Second), subscribe.Report(&health))...)
	})
	w.started++
	w.await("the instances to wait for events", func() (bool, error) {
		if err := health.Ready(context.Background()); err != nil {
			return false, err
		}
		c, err := w.js.Consumer(context.Background(), w.cfg.StreamName(0), "mailer-follow-created")
		if err != nil {
			return false, err
		}
		return c.CachedInfo().NumWaiting == w.started, nil
	})
	return run
}

// hangs handles some events, and hangs on the others until its instance dies.
func (w *share) hangs(_ context.Context, e subscribe.Event[event.Edge]) error {
	if testkit.Number(e.Data.To)%4 != 0 {
		w.d.note(e)
		return nil
	}
	w.d.mu.Lock()
	if w.entered++; w.entered <= 10 {
		w.busy.Done()
	}
	w.d.mu.Unlock()
	<-w.dying
	return errors.New("dying")
}

func (w *share) lives(i int) func(context.Context, subscribe.Event[event.Edge]) error {
	return func(_ context.Context, e subscribe.Event[event.Edge]) error {
		// followee 1's version 4 takes long, so that the instances find the new streams meanwhile
		if e.Data.To == "1" && e.Data.Version == 4 {
			<-time.After(1600 * time.Millisecond)
		}
		w.d.note(e)
		w.d.mu.Lock()
		defer w.d.mu.Unlock()
		w.byInstance[i]++
		return nil
	}
}

func (w *share) publishAll(version int64) {
	for to := int64(1); to <= followees; to++ {
		w.publish(follow("9", event.IDOf(to), version))
	}
}

// TestTheTurnToReadInOrderMovesAtAnyMoment makes NATS take the turn from the reading instance again
// and again. That instance has failing and slow events in hand.
func TestTheTurnToReadInOrderMovesAtAnyMoment(t *testing.T) {
	r := newRig(t, 1)
	d := newDiary()
	const last = 20
	for range 3 {
		nc := r.b.Connect(t)
		w := r.start(func(ctx context.Context) error {
			return subscribe.Handle(ctx, nc, "mailer", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
				if d.call(e)%7 == 0 {
					return errors.New("now and then")
				}
				d.note(e)
				return nil
			}, subscribe.InOrder(), subscribe.Takeover(time.Second), subscribe.Concurrency(4), subscribe.Attempts(1000),
				subscribe.Log(testkit.Logger(t)), subscribe.BackOff(func(int) time.Duration { return 5 * time.Millisecond }))
		})
		defer func() {
			if err := w.stop(); err != nil {
				t.Error(err)
			}
		}()
	}
	r.await("the consumer", func() (bool, error) {
		_, err := r.js.Consumer(t.Context(), "EVENTS-0", "mailer-follow")
		return err == nil, nil
	})
	stream, err := r.js.Stream(t.Context(), "EVENTS-0")
	if err != nil {
		t.Fatal(err)
	}
	for v := int64(1); v <= last; v++ {
		for to := int64(1); to <= followees; to++ {
			r.publish(follow("9", event.IDOf(to), v))
		}
		if err := stream.UnpinConsumer(t.Context(), "mailer-follow", "order"); err != nil {
			t.Fatal(err)
		}
	}
	r.await("all events", func() (bool, error) { return d.has(followees, last) })
	d.firstsInOrder(t)
}

// TestWhatWaitsBehindAFailingEventDelaysNoOtherAggregate has more events of a failing aggregate
// than an instance with one place holds.
func TestWhatWaitsBehindAFailingEventDelaysNoOtherAggregate(t *testing.T) {
	r, d := newRig(t, 1), newDiary()
	const events, aggregates = 60, 12
	for v := int64(1); v <= events; v++ {
		r.publish(follow("9", "1", v))
	}
	others := func(v int64) {
		for to := int64(2); to <= aggregates; to++ {
			r.publish(follow("9", event.IDOf(to), v))
		}
	}
	others(1)
	mended := make(chan struct{})
	r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.created", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			select {
			case <-mended:
			default:
				if e.Data.To == "1" {
					return errors.New("not yet")
				}
			}
			d.note(e)
			return nil
		}, subscribe.Concurrency(1), subscribe.Takeover(time.Minute), subscribe.Attempts(1_000_000), subscribe.Log(testkit.Logger(t)),
			subscribe.BackOff(func(int) time.Duration { return 50 * time.Millisecond }))
	})
	had := func(v int) {
		t.Helper()
		r.await(fmt.Sprintf("%d events of each other aggregate", v), func() (bool, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			if len(d.versions["1"]) > 0 {
				return false, fmt.Errorf("the failing aggregate: %v", d.versions["1"])
			}
			for to := int64(2); to <= aggregates; to++ {
				if got := d.versions[event.IDOf(to)]; len(got) < v {
					return false, fmt.Errorf("followee %d has had %v", to, got)
				}
			}
			return true, nil
		})
	}
	had(1)
	others(2)
	had(2)
	close(mended)
	r.await("the failing aggregate", func() (bool, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.versions["1"]) == events, nil
	})
	d.firstsInOrder(t)
}

// TestAnEventThatIsGivenBackHasNotFailed: NATS counts a delivery, although no call began. The
// second event waits behind the first of its aggregate when the instance ends.
func TestAnEventThatIsGivenBackHasNotFailed(t *testing.T) {
	r, d := newRig(t, 1), newDiary()
	r.publish(follow("9", "1", 1), follow("9", "1", 2))
	handler := func(fn func(context.Context, subscribe.Event[event.Edge]) error) *running {
		return r.start(func(ctx context.Context) error {
			return subscribe.Handle(ctx, r.nc, "mailer", "follow.created", fn, subscribe.Attempts(1), subscribe.Drain(0),
				subscribe.Log(testkit.Logger(t)))
		})
	}
	begun := make(chan struct{})
	w := handler(func(ctx context.Context, _ subscribe.Event[event.Edge]) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	})
	<-begun
	r.await("both events in hand", func() (bool, error) {
		c, err := r.js.Consumer(t.Context(), r.cfg.StreamName(0), "mailer-follow-created")
		return err == nil && c.CachedInfo().NumAckPending == 2, err
	})
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	handler(func(_ context.Context, e subscribe.Event[event.Edge]) error {
		d.note(e)
		return nil
	})
	r.await("both events", func() (bool, error) { return d.has(1, 2) })
}

// TestAnEndedTurnGivesItsEventsBackWhileNATSHasNoneToDeliver lets another instance, a program of
// the test, keep an event in hand, so that NATS has none to deliver. Nobody has the turn then.
func TestAnEndedTurnGivesItsEventsBackWhileNATSHasNoneToDeliver(t *testing.T) {
	r := newRig(t, 1)
	ctx := t.Context()
	instance := func() *running {
		return r.start(func(ctx context.Context) error {
			return subscribe.Handle(ctx, r.b.Connect(t), "mailer", "follow.*",
				func(context.Context, subscribe.Event[event.Edge]) error { return nil },
				subscribe.InOrder(), subscribe.Takeover(time.Second), subscribe.Log(testkit.Logger(t)))
		})
	}
	var consumer jetstream.Consumer
	first := instance()
	r.await("the consumer", func() (_ bool, err error) {
		consumer, err = r.js.Consumer(ctx, "EVENTS-0", "mailer-follow")
		return err == nil, nil
	})
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	state := func() *jetstream.ConsumerInfo {
		i, err := consumer.Info(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	endTurn := func() {
		stream, err := r.js.Stream(ctx, "EVENTS-0")
		if err == nil {
			err = stream.UnpinConsumer(ctx, "mailer-follow", broker.OrderGroup)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r.publish(follow("9", "1", 1))
	batch, err := consumer.Fetch(1, jetstream.FetchPriorityGroup(broker.OrderGroup))
	if err != nil {
		t.Fatal(err)
	}
	kept := <-batch.Messages()
	r.start(func(ctx context.Context) error {
		for ; ctx.Err() == nil; <-time.After(100 * time.Millisecond) {
			_ = kept.InProgress()
		}
		return nil
	})
	endTurn()
	instance()
	r.publish(follow("9", "1", 2)) // the instance holds it, because the event before is not finished
	r.await("the instance to hold an event", func() (bool, error) { return state().NumAckPending == 2, nil })
	endTurn()
	r.await("the event to be delivered in a new turn", func() (bool, error) { return state().NumRedelivered == 1, nil })
}

func TestASubscriberReadsWhatAServiceAppendsFromATimeOn(t *testing.T) {
	r := newRig(t, 1)
	bookmark := func() event.Event {
		e := follow("1", "2", 1)
		e.AggregateType = "bookmark"
		return e
	}
	r.publish(bookmark())
	s, err := r.js.Stream(t.Context(), "EVENTS-0")
	if err != nil {
		t.Fatal(err)
	}
	since := s.CachedInfo().State.LastTime.Add(1)
	second := bookmark()
	r.publish(second)
	got := make(chan string, 2)
	fn := func(_ context.Context, e subscribe.Event[json.RawMessage]) error {
		got <- e.ID
		return nil
	}
	if err := subscribe.Handle(t.Context(), r.nc, "reader", "bookmark.created", fn); !errors.Is(err, subscribe.ErrType) {
		t.Errorf("without Upstreams: %v, want ErrType", err)
	}
	declared, err := kindfile.ReadUpstream([]byte("upstream: bookmark\ntype_prefix: com.example\nsource: /bookmarks\n" +
		"events: {created: {versions: {1: {type: object}}}}"))
	if err != nil {
		t.Fatal(err)
	}
	if err := subscribe.Handle(t.Context(), r.nc, "reader", "bookmark.made", fn, subscribe.Upstreams(declared)); !errors.Is(err,
		subscribe.ErrType) {
		t.Errorf("an event type that nobody declared: %v, want ErrType", err)
	}
	pool := r.logged()
	if err := projector.Project(t.Context(), r.nc, pool, "reader", logbook, subscribe.Upstreams(declared),
		subscribe.Only("bookmark", "bookmrk")); !errors.Is(err, subscribe.ErrType) || !strings.Contains(err.Error(), `Only("bookmrk")`) {
		t.Errorf("Only of a type that nobody declared: %v, want ErrType", err)
	}
	w := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "reader", "bookmark.created", fn, subscribe.Upstreams(declared), subscribe.Since(since),
			subscribe.Log(testkit.Logger(t)))
	})
	if id := <-got; id != second.ID {
		t.Errorf("the first event is %s, want %s, the first one after Since", id, second.ID)
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
}

// TestAConnectionThatIsClosedForGoodEndsTheSubscriber uses a connection with nats.go's defaults,
// which two refusals of the password close.
func TestAConnectionThatIsClosedForGoodEndsTheSubscriber(t *testing.T) {
	r := newRig(t, 1)
	pool := r.logged()
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	for name, subscriber := range map[string]func(context.Context, *nats.Conn, *subscribe.Health) error{
		"Handle": func(ctx context.Context, nc *nats.Conn, h *subscribe.Health) error {
			return subscribe.Handle(ctx, nc, "mailer", "follow.*", func(context.Context, subscribe.Event[event.Edge]) error { return nil },
				subscribe.Report(h), subscribe.Log(testkit.Logger(t)))
		},
		"Project": func(ctx context.Context, nc *nats.Conn, h *subscribe.Health) error {
			return projector.Project(ctx, nc, pool, "search", func(context.Context, pgx.Tx, []event.Event) error { return nil },
				subscribe.Report(h), subscribe.Log(testkit.Logger(t)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			nc, err := nats.Connect(r.b.URL)
			if err != nil {
				t.Fatal(err)
			}
			var h subscribe.Health
			w := r.start(func(ctx context.Context) error { return subscriber(ctx, nc, &h) })
			r.await("it is ready", func() (bool, error) { err := h.Ready(t.Context()); return err == nil, err })
			nc.Close()
			select {
			case <-w.done:
			case <-time.After(20 * time.Second):
				t.Errorf("the subscriber still runs 20 s after its connection was closed, ready: %v", h.Ready(t.Context()))
			}
			if err := w.stop(); !errors.Is(err, subscribe.ErrClosed) {
				t.Errorf("the subscriber returned %v, want ErrClosed", err)
			}
			if err := subscriber(t.Context(), nc, &h); !errors.Is(err, subscribe.ErrClosed) {
				t.Errorf("with a closed connection the subscriber returned %v, want ErrClosed", err)
			}
		})
	}
}
