package subscribe

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// TestTheReaderOfAStreamThatIsGoneStops: a reader that continues would report the missing stream
// forever, and would read a new stream of the same name beside its new reader.
func TestTheReaderOfAStreamThatIsGoneStops(t *testing.T) {
	all := &settings.Settings{Name: "mailer", Log: testkit.Logger(t)}
	all.Broker.Stream, all.Broker.Prefix = "EVENTS", "events"
	s := newSubscriber(all, nil, "follow.*", nil)
	readers, begun := make(map[string]context.Context), make(chan context.Context)
	for _, name := range []string{"EVENTS-0", "EVENTS-1", "EVENTS-2"} {
		s.known[name] = time.Now()
		if name == "EVENTS-2" { // its stream had ended, and all its events were handled
			s.done[name] = true
			continue
		}
		s.readers.Start(t.Context(), name, &reader{}, func(ctx context.Context) {
			begun <- ctx
			<-ctx.Done()
		})
		readers[name] = <-begun
	}
	defer s.readers.Close()
	for range 2 {
		s.stopGone(context.Background(), map[int]bool{0: true})
	}
	for name, ctx := range readers {
		if stopped := ctx.Err() != nil; stopped != (name == "EVENTS-1") {
			t.Errorf("the reader of %s is stopped: %t", name, stopped)
		}
	}
}

// turns is a durable consumer in order: which turn it is, and how many events are not acknowledged.
type turns struct {
	jetstream.Consumer
	pin     string
	pending int
}

func (c *turns) Info(context.Context) (*jetstream.ConsumerInfo, error) {
	return &jetstream.ConsumerInfo{NumAckPending: c.pending,
		PriorityGroups: []jetstream.PriorityGroupState{{Group: broker.OrderGroup, PinnedClientID: c.pin}}}, nil
}

// delivered is a message of a turn.
type delivered struct {
	jetstream.Msg
	seq    uint64
	number uint64 // of the delivery
	pin    string
	naks   *[]uint64
	data   []byte
}

func (m delivered) Metadata() (*jetstream.MsgMetadata, error) {
	return &jetstream.MsgMetadata{Sequence: jetstream.SequencePair{Stream: m.seq, Consumer: m.number}, NumDelivered: 1}, nil
}
func (m delivered) Headers() nats.Header { return nats.Header{"Nats-Pin-Id": {m.pin}} }
func (m delivered) Subject() string      { return "" }
func (m delivered) Data() []byte         { return m.data }
func (m delivered) Nak() error           { *m.naks = append(*m.naks, m.seq); return nil }

// TestATurnAfterAnOwnTurnKeepsTheOrder gives an instance three turns one after the other, as NATS
// does when it stalls for longer than Takeover: a call still runs from the first turn, an event
// waits behind it, and another is held in the second.
func TestATurnAfterAnOwnTurnKeepsTheOrder(t *testing.T) {
	all := &settings.Settings{Name: "mailer", Log: testkit.Logger(t), InOrder: true, Concurrency: 1}
	all.Broker.Timeout = time.Second
	consumer, naks := &turns{}, []uint64{}
	r := &reader{subscriber: newSubscriber(all, nil, "follow.*", nil), source: source{again: true}, reading: t.Context(),
		consumer: consumer, undone: make(map[uint64]*message), queues: make(map[aggregate][]*message)}
	r.term, r.endTerm = context.WithCancel(t.Context())
	defer func() { r.endTerm() }()
	take := func(seq uint64, pin string) *message {
		t.Helper()
		if err := r.take(t.Context(), delivered{seq: seq, pin: pin, naks: &naks}); err != nil {
			t.Fatal(err)
		}
		return r.undone[seq]
	}
	settle := func(pending int, want ...uint64) {
		t.Helper()
		consumer.pin, consumer.pending = r.pin, pending
		if err := r.settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		var got []uint64
		for _, m := range r.queues[aggregate{}] {
			got = append(got, m.seq)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("the queue of %d unfinished events: %s", pending, diff)
		}
	}
	over, end := context.WithCancel(t.Context())
	end()
	begun := &message{seq: 1, term: over} // its call has begun, so no other worker begins
	r.undone[1], r.queues[aggregate{}] = begun, []*message{begun}
	take(2, "first")
	settle(2, 1)
	settle(1, 1, 2)
	r.undone[1] = begun

	take(3, "second")
	settle(3, 1, 2) // 2 is of the first turn, and goes back after 1
	take(4, "third")
	if diff := cmp.Diff([]uint64{3}, naks); diff != "" {
		t.Errorf("given back: %s", diff)
	}
	settle(4, 1, 2)
	if m := r.undone[2]; m.term.Err() == nil {
		t.Error("2 may begin in the third turn before it comes again")
	}
	delete(r.undone, 1)
	delete(r.undone, 2)
	r.queues[aggregate{}] = []*message{begun}
	take(2, "third")
	settle(3, 1) // 3 has not come again
	take(3, "third")
	settle(3, 1, 2, 3, 4)
}

// TestALostDeliveryDelaysTheLaterEvents loses the third of four deliveries in one turn, for example
// with a connection.
func TestALostDeliveryDelaysTheLaterEvents(t *testing.T) {
	all := &settings.Settings{Name: "mailer", Log: testkit.Logger(t), InOrder: true, Concurrency: 1}
	all.Broker.Timeout = time.Second
	begun := &message{seq: 1, term: t.Context()}
	consumer := &turns{pin: "first", pending: 4}
	r := &reader{subscriber: newSubscriber(all, nil, "follow.*", nil), source: source{again: true}, reading: t.Context(),
		consumer: consumer, pin: "first", term: t.Context(), latest: 1, undone: map[uint64]*message{1: begun},
		queues: map[aggregate][]*message{{}: {begun}}}
	number := uint64(1)
	for _, step := range []struct {
		seq  uint64
		want []uint64 // the queue afterwards
	}{{2, []uint64{1, 2}}, {4, []uint64{1, 2}}, {3, []uint64{1, 2, 3, 4}}} {
		if number++; step.seq == 4 {
			number++
		}
		if err := r.take(t.Context(), delivered{seq: step.seq, number: number, pin: "first"}); err != nil {
			t.Fatal(err)
		}
		if err := r.settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		var got []uint64
		for _, m := range r.queues[aggregate{}] {
			got = append(got, m.seq)
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("the queue after %d: %s", step.seq, diff)
		}
	}
}

// TestEventsBehindAFailingOneTakeRoomBeyondABound fills the memory for them, and empties it again.
func TestEventsBehindAFailingOneTakeRoomBeyondABound(t *testing.T) {
	all := &settings.Settings{Name: "mailer", Log: testkit.Logger(t), Concurrency: 1, Takeover: time.Millisecond}
	r := newSubscriber(all, nil, "follow.*", nil).newReader(t.Context(), source{again: true})
	a, count := aggregate{}, 0
	add := func(n int, data []byte) {
		for range n {
			count++
			m := &message{Msg: delivered{data: data}, seq: uint64(count)}
			r.undone[m.seq] = m
			if r.queues[a] == nil {
				r.queues[a] = []*message{m} // its call has begun, so no other worker begins
				continue
			}
			r.dispatch(m)
		}
	}
	room := func(what string, want int) {
		t.Helper()
		if got := r.awaitRoom(t.Context()); got != want {
			t.Errorf("%s: room for %d events, want %d", what, got, want)
		}
	}
	room("at first", 16)
	add(20, nil)
	room("behind a call", 1)
	r.failed(r.queues[a][0])
	r.failed(r.queues[a][0]) // another attempt
	room("behind a failed event", 15)
	add(100, make([]byte, 1<<10))
	room("with more behind it", 15)
	add(maxParked>>20, make([]byte, 1<<20))
	room("with 8 MiB behind it", 1)
	r.park(-1, r.queues[a][1:]...)
	if r.parked.events != 0 || r.parked.bytes != 0 {
		t.Errorf("nothing waits, and is counted: %+v", r.parked)
	}
}

// TestAnInstancePassesWhatIsBeyondItsShare looks at six streams, of which the instance reads some.
func TestAnInstancePassesWhatIsBeyondItsShare(t *testing.T) {
	for name, c := range map[string]struct {
		turns, waiting, looks, want int
	}{
		"alone":                           {6, 0, looks, 0},
		"another waits":                   {6, 1, looks, 3},
		"another has waited for a moment": {6, 1, looks - 1, 0},
		"three others wait":               {6, 3, looks, 4},
		"each has its share":              {2, 3, looks, 0},
		"more instances than streams":     {1, 9, looks, 0},
	} {
		s := newSubscriber(&settings.Settings{Log: testkit.Logger(t)}, nil, "follow.*", nil)
		var all []*reader
		for i := range 6 {
			r := &reader{subscriber: s}
			if i < c.turns {
				r.pin = "mine"
			}
			r.pulls.Store(2)
			r.countOthers(&jetstream.ConsumerInfo{NumWaiting: c.waiting}, 2)
			all = append(all, r)
		}
		for range c.looks {
			s.shareTurns(all)
		}
		got := 0
		for _, r := range all {
			if r.yield.Load() {
				got++
			}
		}
		if got != c.want {
			t.Errorf("%s: the instance passes %d of %d turns, want %d", name, got, c.turns, c.want)
		}
	}
}

// TestAnOwnRequestIsNoOtherInstance: NATS counts the requests of all instances.
func TestAnOwnRequestIsNoOtherInstance(t *testing.T) {
	for name, c := range map[string]struct {
		before, after uint64
		want          int
	}{
		"none of its own":          {2, 2, 3},
		"one of its own":           {3, 3, 2},
		"one that began meanwhile": {2, 3, 2},
		"one that ended meanwhile": {3, 4, 2},
		"one that came and went":   {2, 4, 2},
	} {
		r := &reader{}
		r.pulls.Store(c.after)
		if r.countOthers(&jetstream.ConsumerInfo{NumWaiting: 3}, c.before); r.others != c.want {
			t.Errorf("%s: %d other instances, want %d", name, r.others, c.want)
		}
	}
}

// TestAStateThatIsGivenUpIsNoTrouble: another instance has taken the claim over, and handles it.
func TestAStateThatIsGivenUpIsNoTrouble(t *testing.T) {
	ctx, lost := context.WithCancel(t.Context())
	all := &settings.Settings{Name: "cache", Log: testkit.Logger(t), Concurrency: 1, Timeout: time.Minute,
		Pause: func(int) time.Duration { lost(); return time.Hour }}
	s := newSubscriber(all, nil, "follow.*", func(context.Context, *event.Event, int) error { return errors.New("not yet") })
	var err error
	if s.metrics, err = (settings.Unmeasured{}).Handler(s.durable); err != nil {
		t.Fatal(err)
	}
	r := &reader{subscriber: s, handling: t.Context()}
	if r.snapshot(ctx, &message{}) {
		t.Error("a state whose claim is lost counts as handled")
	}
	if err := s.ready(t.Context()); err != nil {
		t.Errorf("an instance that no longer reads exports is not ready: %v", err)
	}
}
