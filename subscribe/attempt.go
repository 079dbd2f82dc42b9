package subscribe

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.opentelemetry.io/otel/trace"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tracing"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// deliveries is the number of deliveries after which an event is suspected to end its process. NATS
// also counts those whose event an instance gave back before a call, and those of all other events
// that a process had in hand when one event ended it.
const deliveries = 10

// A suspected event is handled while no other one is, in the order of the stream. So if the process
// ends again, the first one that comes next is guilty, and each process condemns only one. Without
// that, one event would make dead letters of all that come with it, and none of them was tried.

// mostDeliveries is the number of deliveries of an event that is not suspected.
func (r *reader) mostDeliveries() int { return max(r.Attempts, deliveries) }

// suspect adds a message to the suspected ones if it was delivered too often. The caller holds
// r.mu.
func (r *reader) suspect(m *message) {
	if m.attempt <= r.mostDeliveries() {
		return
	}
	m.turn = make(chan struct{})
	if r.suspects = append(r.suspects, m); len(r.suspects) == 1 {
		close(m.turn)
	}
}

// release lets the next suspected message take its turn. The caller holds r.mu.
func (r *reader) release(m *message) {
	i := slices.Index(r.suspects, m)
	if i < 0 {
		return
	}
	if r.suspects = slices.Delete(r.suspects, i, i+1); i == 0 && len(r.suspects) > 0 {
		close(r.suspects[0].turn)
	}
}

// try waits for the turn of a suspected message, and returns the error with which it becomes a dead
// letter if it had its turn in an earlier process. It returns false if ctx ends before.
func (r *reader) try(ctx context.Context, m *message) (guilty error, ok bool) {
	select {
	case <-ctx.Done():
		return nil, false
	case <-m.turn:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.condemned || m.attempt <= r.mostDeliveries()+1 {
		return nil, true
	}
	r.condemned = true
	return fmt.Errorf("the event was delivered %d times, and no attempt finished: each time the process ended first, or lost NATS",
		m.attempt-1), true
}

// handle calls the function with a message until it succeeds or the message becomes a dead letter.
// It returns false if ctx ends before that.
func (r *reader) handle(ctx context.Context, m *message) bool {
	err := m.fault
	if err == nil && m.turn != nil {
		var ok bool
		if err, ok = r.try(ctx, m); !ok {
			return false
		}
	}
	for ; err == nil; m.attempt++ {
		if !r.enter(ctx) {
			return false
		}
		fault := r.invoke(m)
		switch {
		case fault == nil:
			r.metrics.Handled.Inc()
			r.acknowledge(ctx, m)
			return true
		case r.handling.Err() != nil: // Drain is over
			return false
		case event.IsPermanent(fault), m.attempt >= r.Attempts:
			return r.moveToDeadLetters(ctx, m, fault)
		}
		r.metrics.Failures.Inc()
		r.Log.WarnContext(ctx, "handling an event failed, retrying", "event_id", m.event.ID, "tenant", m.event.TenantID, "stream",
			m.event.Stream, "stream_seq", m.event.Seq, "attempt", m.attempt, "err", fault)
		r.failed(m)
		work.Sleep(ctx, r.Pause(m.attempt))
	}
	return r.moveToDeadLetters(ctx, m, err)
}

// enter waits for a place for a call, which invoke frees. It returns false if ctx ends before.
func (r *reader) enter(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case r.slots <- struct{}{}:
	}
	if ctx.Err() != nil { // both were ready
		<-r.slots
		return false
	}
	return true
}

// acknowledge acknowledges a message. If NATS does not get that, the message comes again.
func (r *reader) acknowledge(ctx context.Context, m *message) {
	if err := r.answer(m, m.Ack); err != nil {
		r.Log.WarnContext(ctx, "acknowledging an event failed; it may come again", "event_id", m.event.ID, "err", err)
		return
	}
	r.forget(ctx, m.seq)
}

// errOverdue reports a call that did not return in time.
var errOverdue = errors.New("subscribe: the handler did not return in time; it may still run")

// invoke calls the function with a timeout. A call that does not return keeps its place.
func (r *reader) invoke(m *message) error {
	ctx, cancel := context.WithTimeout(r.handling, r.Timeout)
	defer cancel()
	e, attempt := m.event, m.attempt
	if creation := tracing.Parse(e.TraceParent); creation.IsValid() {
		ctx = trace.ContextWithRemoteSpanContext(ctx, creation)
	}
	late, err := settings.InTime(ctx, r.Timeout, func() error { return r.call(ctx, &e, attempt) })
	if late == nil {
		<-r.slots
		return err
	}
	r.lose(m)
	go func() {
		<-late //nolint:errcheck // the attempt has failed already
		<-r.slots
		r.subscriber.mu.Lock()
		defer r.subscriber.mu.Unlock()
		r.lost--
	}()
	return fmt.Errorf("%w (Timeout is %s)", errOverdue, r.Timeout)
}

// lose counts a call that does not return. It ends the subscriber when such calls take all places.
func (r *reader) lose(m *message) {
	s := r.subscriber
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost++; s.lost == s.Concurrency {
		s.end(fmt.Errorf("%w: all %d places of %s are taken, the last by event %s", ErrStuck, s.lost, s.durable, m.event.ID))
	}
}

// end makes Handle return an error, unless it already has another one.
func (s *subscriber) end(err error) {
	select {
	case s.failed <- err:
	default:
	}
}
