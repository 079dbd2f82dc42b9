package subscribe

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// Event is an event with its payload.
type Event[T any] struct {
	event.Event
	Data    T   // the payload: see Decode
	Attempt int // 1 when a handler gets the event for the first time
}

// Handle calls fn with the events of a type, for example "follow.created" or "comment.*", until ctx
// ends. Each event comes at least once. When ctx ends, running calls may finish (Drain), all other
// events return to NATS, and Handle returns nil. fn chooses the type of the payload: see Decode.
//
// Handle acknowledges an event after fn returned nil, and never before. An error, a panic or the
// end of Timeout is a failed attempt. Handle retries it after BackOff. Meanwhile it delays the
// later events of the same aggregate in this instance, but no others. An event becomes a dead
// letter (HandlerDeadLetters) after Attempts, after an error marked Permanent, or if its payload
// does not match its type.
//
// The context of fn has the span context of the event's creation, if the event has one. A span that
// fn starts is its child; trace.LinkFromContext turns that into a link.
//
// Instances of the same name share the work by durable JetStream consumers, one per stream, named
// NAME-KIND-EVENT. Handle begins the new streams of a resize after their predecessors are handled.
// The package comment states the order of events.
//
// It returns ErrName, ErrType, ErrOption, ErrFilter, ErrNoStreams and ErrClosed. It returns
// ErrStuck if calls that do not return take all places (Concurrency), or if some have not returned
// after Drain.
func Handle[T any](ctx context.Context, nc *nats.Conn, name, eventType string,
	fn func(context.Context, Event[T]) error, opts ...Option) error {
	s, err := settings.New(name, settings.Handle, opts)
	if err != nil {
		return err
	}
	if err := checkType[T](s, eventType); err != nil {
		return err
	}
	if err := checkBootstrap(s, eventType); err != nil {
		return err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("use JetStream: %w", err)
	}
	return newSubscriber(s, js, eventType, func(ctx context.Context, e *event.Event, attempt int) error {
		data, err := Decode[T](s.Kinds, e)
		if err != nil {
			return err
		}
		return fn(ctx, Event[T]{Event: *e, Data: data, Attempt: attempt})
	}).run(ctx)
}

// subscriber is one instance of a handler.
type subscriber struct {
	*settings.Settings
	js        jetstream.JetStream
	eventType string
	durable   string // the name of its consumers
	filter    string // of subjects
	call      func(ctx context.Context, e *event.Event, attempt int) error
	metrics   *settings.Metrics
	slots     chan struct{} // one value per running call
	failed    chan error    // why Handle returns
	kept      atomic.Bool   // an operator created the consumers, and only an operator changes them
	readers   work.Crew[string, *reader]
	boot      *bootstrap // nil without the option
	crowded   int        // successive looks at which this instance had more than its share of turns

	mu       sync.Mutex
	lost     int // calls that did not return in time and still run
	troubles map[string]error
	done     map[string]bool // streams that have ended and are handled to their ends
	known    map[string]time.Time
}

func newSubscriber(s *settings.Settings, js jetstream.JetStream, eventType string,
	call func(context.Context, *event.Event, int) error) *subscriber {
	kind, of, _ := strings.Cut(eventType, ".")
	durable, filter := broker.HandlerName(s.Name, kind, of), event.TypeFilter(s.Broker.Prefix, kind, of)
	if s.Tenant > 0 {
		durable, filter = broker.TenantName(s.Tenant, s.Name), fmt.Sprintf("%s.*.t%d.%s", s.Broker.Prefix, s.Tenant, eventType)
	}
	s.Log = s.Log.With("component", "subscriber", "subscriber", durable)
	return &subscriber{
		Settings: s, js: js, eventType: eventType, durable: durable, filter: filter, call: call,
		slots: make(chan struct{}, s.Concurrency), failed: make(chan error, 1),
		troubles: make(map[string]error), done: make(map[string]bool), known: make(map[string]time.Time),
	}
}

func (s *subscriber) run(ctx context.Context) (err error) {
	streams, err := s.AwaitStreams(ctx, s.js, s.list)
	if err != nil || ctx.Err() != nil {
		return err
	}
	if s.metrics, err = s.Registry.Handler(s.durable); err != nil {
		return fmt.Errorf("register the metrics of %s: %w", s.durable, err)
	}
	if s.Tenant == 0 {
		dctx, cancel := context.WithTimeout(ctx, s.Broker.Timeout)
		defer cancel()
		if err := broker.DeclareDead(dctx, s.js, s.Broker, streams[0]); err != nil {
			return err
		}
	}
	reading, stop := context.WithCancel(ctx)
	defer stop()
	handling, end := work.Drain(reading, s.Drain) // the context of the functions
	defer end()
	if s.boot, err = s.newBootstrap(ctx, handling, streams[0]); err != nil {
		return err
	}
	settings.SetReady(s.Health, s.ready)
	var exports sync.WaitGroup
	if s.boot != nil {
		exports.Go(func() { s.boot.run(reading) })
	}
	s.read(reading, handling, source{stream: deadStream(s.Settings), subject: s.deadSubject(retryLetter), again: true})
	closed := settings.Watch(reading, s.js.Conn())
	tick := time.NewTicker(settings.Recheck)
	defer tick.Stop()
	for ctx.Err() == nil && err == nil {
		s.assignReaders(reading, handling)
		select {
		case <-ctx.Done():
		case err = <-s.failed:
		case err = <-closed:
		case <-tick.C:
		}
	}
	stop()
	s.readers.Close()
	exports.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && s.lost > 0 {
		err = fmt.Errorf("%w: %d calls of %s", ErrStuck, s.lost, s.durable)
	}
	return err
}

// ready returns why events are not handled, or nil.
func (s *subscriber) ready(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, err := range s.troubles {
		errs = append(errs, err)
	}
	if s.boot != nil && !s.boot.joined.Load() {
		errs = append(errs, errUnjoined)
	}
	if s.lost > 0 {
		errs = append(errs, fmt.Errorf("subscribe: %d calls of %s do not return", s.lost, s.durable))
	}
	return errors.Join(errs...)
}

// trouble records why a stream does not continue, and logs each reason once. A nil err means that
// it continues. of is the name of the stream, or of all streams.
func (s *subscriber) trouble(ctx context.Context, of string, err error) {
	s.mu.Lock()
	before := s.troubles[of]
	if err == nil {
		delete(s.troubles, of)
	} else {
		s.troubles[of] = err
	}
	s.mu.Unlock()
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		s.Log.WarnContext(ctx, "events wait, retrying", "stream", of, "err", err)
	case err == nil && before != nil:
		s.Log.InfoContext(ctx, "handling events again", "stream", of)
	}
}

// source is the origin of a reader's messages.
type source struct {
	stream, subject string
	again           bool // the messages are retried dead letters
}

// read starts a reader.
func (s *subscriber) read(ctx, handling context.Context, of source) {
	r := s.newReader(handling, of)
	s.readers.Start(ctx, of.stream, r, r.run)
}

func (s *subscriber) newReader(handling context.Context, of source) *reader {
	return &reader{subscriber: s, source: of, handling: handling, room: work.NewSignal(),
		undone: make(map[uint64]*message), queues: make(map[aggregate][]*message), failing: make(map[aggregate]bool)}
}

// list returns the streams. From the account of a tenant only the durable consumers are visible.
func (s *subscriber) list(ctx context.Context) ([]broker.Stream, error) {
	if s.Tenant > 0 {
		return broker.StreamsOf(ctx, s.js, s.Broker, s.durable)
	}
	return broker.Streams(ctx, s.js, s.Broker)
}

// ended reports whether a stream gets no more events. From the account of a tenant the closing
// message is not visible. But relays publish to a stream only after they have closed its
// predecessors.
func (s *subscriber) ended(ctx context.Context, st broker.Stream, all []broker.Stream) (bool, error) {
	if s.Tenant == 0 {
		return broker.Ended(ctx, s.js, s.Broker, st, all)
	}
	for _, next := range all {
		if !slices.Contains(next.After, st.Number) {
			continue
		}
		if later, _ := s.ended(ctx, next, all); later || next.Last > 0 {
			return true, nil
		}
	}
	return false, nil
}

// assignReaders starts a reader on each stream whose predecessors are done, and stops readers of
// finished streams.
func (s *subscriber) assignReaders(ctx, handling context.Context) {
	qctx, cancel := context.WithTimeout(ctx, s.Broker.Timeout)
	defer cancel()
	asked := time.Now()
	streams, err := s.list(qctx)
	if ctx.Err() != nil {
		return
	}
	s.trouble(ctx, s.Broker.Stream, err)
	if err != nil {
		return // a missing stream may be a predecessor of another
	}
	there, pending := make(map[int]bool), 0
	for _, st := range streams {
		there[st.Number] = true
		s.logRecreated(ctx, st)
	}
	s.stopGone(ctx, there)
	if s.boot != nil && !s.boot.joined.Load() {
		return
	}
	var reading []*reader
	for _, st := range streams {
		s.mu.Lock()
		done := s.done[st.Name] || s.boot != nil && s.boot.startOf(st).Whole
		s.done[st.Name] = done
		s.mu.Unlock()
		r, busy := s.readers.Of(st.Name)
		switch {
		case done:
		case busy:
			r.saw(asked)
			n, err := r.pending(qctx, st)
			pending, reading = pending+n, append(reading, r)
			if err == nil && n == 0 {
				s.finish(qctx, st, streams, r)
			}
		case s.mayBegin(st, there):
			s.read(ctx, handling, source{stream: st.Name, subject: s.filter})
		}
	}
	s.metrics.Lag.Set(float64(pending))
	if s.InOrder {
		s.shareTurns(reading)
	}
}

// distant is later than anything is stored.
var distant = time.Unix(1<<40, 0)

// logRecreated logs that a stream was recreated.
func (s *subscriber) logRecreated(ctx context.Context, st broker.Stream) {
	s.mu.Lock()
	before, known := s.known[st.Name]
	s.known[st.Name] = st.Created
	again := known && !before.Equal(st.Created)
	if again {
		delete(s.done, st.Name)
	}
	s.mu.Unlock()
	if again {
		s.disown(st.Name, st.Created)
		s.Log.ErrorContext(ctx, "the stream was recreated, reading it from its beginning; events left on the former stream are not handled",
			"stream", st.Name, "before", before, "now", st.Created, "runbook", "SubscriberStreamLost")
	}
}

// disown tells the reader of a stream, if it has one, that the stream of that time is no more.
func (s *subscriber) disown(stream string, before time.Time) {
	if r, ok := s.readers.Of(stream); ok {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.disown(before)
	}
}

// stopGone stops the readers of streams that no longer exist.
func (s *subscriber) stopGone(ctx context.Context, there map[int]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.known {
		if n, ok := s.Broker.Number(name); !ok || there[n] {
			continue
		}
		delete(s.known, name)
		s.disown(name, distant) // a stream may get this name again while they are in hand
		s.readers.Stop(name)
		if !s.done[name] {
			s.Log.ErrorContext(ctx, "the stream is gone; events left on it are not handled", "stream", name,
				"runbook", "SubscriberStreamLost")
		}
		delete(s.troubles, name)
	}
}

// mayBegin reports whether all predecessors of the stream are done, or gone.
func (s *subscriber) mayBegin(st broker.Stream, there map[int]bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range st.After {
		if there[n] && !s.done[s.Broker.StreamName(n)] {
			return false
		}
	}
	return true
}

// finish stops the reader of a stream that has ended and has no events left.
func (s *subscriber) finish(ctx context.Context, st broker.Stream, all []broker.Stream, r *reader) {
	if ended, err := s.ended(ctx, st, all); err != nil || !ended {
		return
	}
	if n, err := r.pending(ctx, st); err != nil || n > 0 { // it was closed meanwhile, after further events
		return
	}
	s.mu.Lock()
	s.done[st.Name] = true
	s.mu.Unlock()
	s.readers.Stop(st.Name)
	s.Log.InfoContext(ctx, "the stream has ended, and all its events are handled", "stream", st.Name)
}
