package subscribe

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// Headers of a dead letter, in addition to those of its event.
const (
	HeaderDeadSubject    = broker.HeaderDeadSubject  // the subject on which the event was published
	HeaderDeadStream     = "Tidings-Dead-Stream"     // the stream of the event
	HeaderDeadSeq        = "Tidings-Dead-Sequence"   // the sequence of the event on that stream
	HeaderDeadAttempts   = "Tidings-Dead-Attempts"   // the number of attempts
	HeaderDeadError      = "Tidings-Dead-Error"      // the error of the last attempt
	HeaderDeadSubscriber = "Tidings-Dead-Subscriber" // NAME-KIND-EVENT
)

// The subjects of the stream of dead letters.
const (
	deadLetter  = "letter"
	retryLetter = "retry"
)

// maxReason bounds the text of an error in a header.
const maxReason = 4 << 10

// ErrNoLetter reports a dead letter that does not exist. It may have been retried or discarded.
var ErrNoLetter = errors.New("subscribe: there is no such dead letter")

func deadStream(s *settings.Settings) string { return broker.DeadLetters(s.Broker.Stream) }

func (s *subscriber) deadSubject(what string) string {
	return deadStream(s.Settings) + "." + what + "." + s.durable
}

// moveToDeadLetters makes a message a dead letter, and then ends its delivery. It returns false if
// ctx ends before that.
func (r *reader) moveToDeadLetters(ctx context.Context, m *message, why error) bool {
	subject, stream, seq := m.Subject(), r.stream, strconv.FormatUint(m.seq, 10)
	if r.again {
		h := m.Headers()
		subject, stream, seq = h.Get(HeaderDeadSubject), h.Get(HeaderDeadStream), h.Get(HeaderDeadSeq)
	}
	letter := &nats.Msg{Subject: r.deadSubject(deadLetter), Header: ownHeaders(m.Headers()), Data: m.Data()}
	for name, value := range map[string]string{
		HeaderDeadSubject: subject, HeaderDeadStream: stream, HeaderDeadSeq: seq, HeaderDeadAttempts: strconv.Itoa(m.attempt),
		HeaderDeadError: oneLine(why.Error()), HeaderDeadSubscriber: r.durable,
	} {
		letter.Header.Set(name, value)
	}
	id := fmt.Sprintf("%s:%s:%d:%s", r.durable, r.stream, m.seq, m.Headers().Get(event.HeaderID)) // a recreated stream has other events
	var stored *jetstream.PubAck
	for attempt := 1; ; attempt++ {
		var err error
		pctx, cancel := context.WithTimeout(r.handling, r.Broker.Timeout)
		stored, err = r.js.PublishMsg(pctx, letter, jetstream.WithMsgID(id))
		cancel()
		if err == nil {
			break
		}
		r.trouble(ctx, deadStream(r.Settings), fmt.Errorf("store a dead letter: %w", err))
		if work.Sleep(ctx, r.Pause(attempt)) != nil {
			return false
		}
	}
	r.trouble(ctx, deadStream(r.Settings), nil)
	r.unlessErased(ctx, stream, seq, stored.Sequence)
	r.metrics.Dead.Inc()
	r.Log.ErrorContext(ctx, "an event became a dead letter", "event_id", m.event.ID, "tenant", m.event.TenantID, "stream", stream,
		"stream_seq", seq, "attempts", m.attempt, "err", why, "runbook", "SubscriberDeadLetters")
	if err := r.answer(m, func() error { return m.TermWithReason("a dead letter of " + deadStream(r.Settings)) }); err != nil {
		r.Log.WarnContext(ctx, "ending the delivery of a dead letter failed; it may come again", "event_id", m.event.ID, "err", err)
	}
	r.forget(ctx, m.seq)
	return true
}

// unlessErased deletes a dead letter again if its event was erased before the letter was stored:
// the erasure has searched the dead letters. One that searches later finds the letter. A subscriber
// whose consumers an operator created may neither read the record of erasures nor delete
// (docs/erasure.md has this limit).
func (r *reader) unlessErased(ctx context.Context, stream, seq string, letter uint64) {
	n, err := strconv.ParseUint(seq, 10, 64)
	if err != nil || r.kept.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.Broker.Timeout)
	defer cancel()
	erased, err := broker.Erased(ctx, r.js, broker.Config{Stream: r.Broker.Stream}, stream, n, n)
	if erased {
		r.remove(ctx, letter)
	}
	if err != nil {
		r.Log.WarnContext(ctx, "could not look up whether the event of a dead letter was erased", "stream", stream, "stream_seq", seq,
			"letter", letter, "err", err)
	}
}

// forget deletes a finished request for another attempt from the stream of dead letters. A
// subscriber whose durable consumers an operator created may delete nothing there; Letters does it.
func (r *reader) forget(ctx context.Context, seq uint64) {
	if r.again && !r.kept.Load() {
		r.remove(ctx, seq)
	}
}

// remove deletes a message from the stream of dead letters.
func (r *reader) remove(ctx context.Context, seq uint64) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.Broker.Timeout)
	defer cancel()
	stream, err := r.js.Stream(ctx, deadStream(r.Settings))
	if err == nil {
		err = stream.SecureDeleteMsg(ctx, seq)
	}
	if err != nil && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) && !errors.Is(err, jetstream.ErrMsgNotFound) {
		r.Log.WarnContext(ctx, "deleting a message from the stream of dead letters failed",
			"stream_seq", seq, "err", err)
	}
}

// ownHeaders returns the headers without those of the publish (Nats-*), which another stream would
// obey.
func ownHeaders(h nats.Header) nats.Header {
	own := nats.Header{}
	for name, values := range h {
		if !strings.HasPrefix(name, "Nats-") {
			own[name] = values
		}
	}
	return own
}

// oneLine makes a text valid as the value of a header.
func oneLine(text string) string {
	if len(text) > maxReason {
		text = text[:maxReason]
	}
	return strings.ToValidUTF8(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text), "\uFFFD")
}

// decodeLetter reads the event of a dead letter.
func decodeLetter(m interface {
	Headers() nats.Header
	Data() []byte
}) (event.Event, error) {
	h := m.Headers()
	e, fault := event.Decode(h.Get(HeaderDeadSubject), h, m.Data())
	e.Stream = h.Get(HeaderDeadStream)
	e.Seq, _ = strconv.ParseUint(h.Get(HeaderDeadSeq), 10, 64)
	return e, fault
}

// Letter is an event that a handler could not handle.
type Letter struct {
	ID         uint64 // its sequence on the stream of dead letters
	Subscriber string // NAME-KIND-EVENT
	Event      event.Event
	Attempts   int
	Error      string // the error of the last attempt, in one line
	At         time.Time
}

// Letters has the operations on the dead letters of handlers: messages of the stream EVENTS-dead.
// They need only a connection to NATS. Letters is safe for concurrent use.
type Letters struct {
	*settings.Settings
	js jetstream.JetStream
}

// HandlerDeadLetters returns the operations on the dead letters of all handlers.
func HandlerDeadLetters(nc *nats.Conn, opts ...Option) (*Letters, error) {
	s, err := settings.New("letters", settings.Handle, opts)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("use JetStream: %w", err)
	}
	return &Letters{s, js}, nil
}

// List yields the dead letters of a subscriber (NAME-KIND-EVENT, or * for all) with an id above
// after, by id. It reads each when the loop asks for it. An error is the last element.
func (l *Letters) List(ctx context.Context, subscriber string, after uint64) iter.Seq2[Letter, error] {
	return func(yield func(Letter, error) bool) {
		stream, err := l.js.Stream(ctx, deadStream(l.Settings))
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return
		}
		var m *jetstream.RawStreamMsg
		for ; err == nil; after = m.Sequence {
			m, err = stream.GetMsg(ctx, after+1, jetstream.WithGetMsgSubject(deadStream(l.Settings)+"."+deadLetter+"."+subscriber))
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				return
			}
			if err != nil {
				break
			}
			if !yield(letterOf(m), nil) {
				return
			}
		}
		yield(Letter{}, fmt.Errorf("list the dead letters of %s after %d: %w", deadStream(l.Settings), after, err))
	}
}

// stored gives a stored message the methods of a delivered one.
type stored struct{ *jetstream.RawStreamMsg }

func (s stored) Headers() nats.Header { return s.Header }
func (s stored) Data() []byte         { return s.RawStreamMsg.Data }

func letterOf(m *jetstream.RawStreamMsg) Letter {
	e, _ := decodeLetter(stored{m}) // without the parts that cannot be read
	attempts, _ := strconv.Atoi(m.Header.Get(HeaderDeadAttempts))
	return Letter{ID: m.Sequence, Subscriber: m.Header.Get(HeaderDeadSubscriber), Event: e, Attempts: attempts,
		Error: m.Header.Get(HeaderDeadError), At: m.Time}
}

// Retry makes the subscriber handle a dead letter again, from its first attempt, when an instance
// runs. It returns ErrNoLetter if the letter does not exist.
func (l *Letters) Retry(ctx context.Context, id uint64) error {
	return l.act(ctx, id, func(m *jetstream.RawStreamMsg) error {
		subscriber := strings.TrimPrefix(m.Subject, deadStream(l.Settings)+"."+deadLetter+".")
		again := &nats.Msg{Subject: deadStream(l.Settings) + "." + retryLetter + "." + subscriber, Header: ownHeaders(m.Header),
			Data: m.Data}
		_, err := l.js.PublishMsg(ctx, again, jetstream.WithMsgID(fmt.Sprintf("retry:%d", id))) // a repeated call changes nothing
		return err
	})
}

// Discard deletes a dead letter. It returns ErrNoLetter if the letter does not exist.
func (l *Letters) Discard(ctx context.Context, id uint64) error {
	return l.act(ctx, id, func(*jetstream.RawStreamMsg) error { return nil })
}

func (l *Letters) act(ctx context.Context, id uint64, do func(*jetstream.RawStreamMsg) error) error {
	stream, err := l.js.Stream(ctx, deadStream(l.Settings))
	var m *jetstream.RawStreamMsg
	if err == nil {
		m, err = stream.GetMsg(ctx, id)
	}
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrMsgNotFound),
		err == nil && !strings.HasPrefix(m.Subject, deadStream(l.Settings)+"."+deadLetter+"."):
		return fmt.Errorf("%w: %d", ErrNoLetter, id)
	case err != nil:
		return fmt.Errorf("read dead letter %d: %w", id, err)
	}
	if err = do(m); err == nil {
		err = stream.SecureDeleteMsg(ctx, id)
	}
	if err == nil {
		err = l.sweep(ctx, stream, strings.TrimPrefix(m.Subject, deadStream(l.Settings)+"."+deadLetter+"."))
	}
	if err != nil {
		return fmt.Errorf("retry or discard dead letter %d: %w", id, err)
	}
	return nil
}

// sweep deletes the subscriber's finished requests for another attempt.
func (l *Letters) sweep(ctx context.Context, stream jetstream.Stream, subscriber string) error {
	c, err := stream.Consumer(ctx, subscriber)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	for floor := c.CachedInfo().AckFloor.Stream; ; {
		m, err := stream.GetMsg(ctx, 1, jetstream.WithGetMsgSubject(deadStream(l.Settings)+"."+retryLetter+"."+subscriber))
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound), err == nil && m.Sequence > floor:
			return nil
		case err != nil:
			return err
		}
		err = stream.SecureDeleteMsg(ctx, m.Sequence)
		if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
			return nil // the subscriber has just deleted it, and deletes the others
		}
		if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
			return err
		}
	}
}
