package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
)

const (
	pullHeartbeat     = time.Second // the client notices a silent server after two of these
	pullExpiry        = 10 * time.Second
	inactiveThreshold = 30 * time.Second      // after it the server deletes the consumer of a reader that is gone
	farBehind         = 256                   // with so many pending messages the reader waits for a full batch
	moreIsComing      = 20 * time.Millisecond // the wait for the next of them
	readAhead         = 64                    // decoded messages that wait for a place in a batch
	// A relay publishes several events at a time, and a transaction costs the same for one event as
	// for ten. So collect hands over a batch after quiet without a new message, or after gather. It
	// waits for no others while they come one by one: to wait wakes the process once more.
	quiet  = 500 * time.Microsecond
	gather = 5 * time.Millisecond
)

// delivery is one message of a stream.
type delivery struct {
	event   event.Event
	headers map[string][]string // nil unless the session keeps them
	stored  time.Time
	size    int
	more    bool   // farBehind or more messages are pending behind it
	fault   error  // the message's own fault, for which it is parked
	skip    string // why the consumer skips it
	closing []broker.Stream
}

// batch is what one transaction applies.
type batch struct {
	from, to   uint64    // it moves the offset from one to the other
	stored     time.Time // when the stream stored the last message; the batch's commit makes this the offset's as_of
	deliveries []delivery
	bytes      int
	closing    []broker.Stream // the successors, when the last message closes the stream
}

// events yields the events that the consumer does not skip.
func (b *batch) events(yield func(*event.Event) bool) {
	for i := range b.deliveries {
		if d := &b.deliveries[i]; d.skip == "" && d.closing == nil && !yield(&d.event) {
			return
		}
	}
}

// session reads the stream from the offset until it fails or is stopped. Its fields belong to the
// goroutine that reads.
type session struct {
	*reader
	stream   broker.Stream
	headers  bool      // for dead letters
	reached  uint64    // the last message that take accepted
	stored   time.Time // when the stream stored it; the epoch or zero if unknown
	consumer string    // the JetStream consumer that delivered it; the client replaces it after a failure
}

// session applies events until an error, or until the reader is stopped, is kicked or no longer
// holds the partition; for these three it returns nil. progress reports whether it applied a batch.
func (r *reader) session(ctx context.Context) (progress bool, err error) {
	c := r.c
	ctx, end := context.WithCancel(ctx)
	defer end()
	c.mu.Lock()
	r.again = end
	c.mu.Unlock()
	o, stream, err := r.open(ctx)
	if err != nil {
		return false, unless(ctx, err)
	}
	if o, err = r.skipErased(ctx, o, stream); err != nil {
		return false, unless(ctx, err)
	}
	s := &session{reader: r, stream: stream, headers: r.letters, reached: o.Seq, stored: o.Stored}
	var g errgroup.Group
	deliveries, batches := make(chan delivery, readAhead), make(chan *batch)
	g.Go(func() error {
		defer close(deliveries)
		return s.read(ctx, deliveries)
	})
	g.Go(func() error { // the next batch is read while the database works on this one
		defer close(batches)
		s.collect(ctx, o.Seq, deliveries, batches)
		return nil
	})
	progress, err = r.applyAll(ctx, stream, batches)
	end()
	return progress, errors.Join(err, g.Wait())
}

// applyAll applies batches until there are no more.
func (r *reader) applyAll(ctx context.Context, stream broker.Stream, batches <-chan *batch) (progress bool, err error) {
	for {
		b, ok := <-batches
		if !slices.Contains(r.c.group.Held(), r.partition) {
			r.c.readers.Stop(r.partition)
		}
		if !ok || ctx.Err() != nil {
			return progress, nil
		}
		if err := r.apply(ctx, stream, b); err != nil {
			return progress, err
		}
		progress = true
		r.c.clear(ctx, r.partition)
	}
}

// skipErased moves the offset past erased messages if no other message follows them. It returns the
// offset.
func (r *reader) skipErased(ctx context.Context, o offset, s broker.Stream) (offset, error) {
	if o.Seq == s.Last {
		return o, nil
	}
	rctx, cancel := context.WithTimeout(ctx, r.c.broker.Timeout)
	defer cancel()
	next, err := broker.Next(rctx, r.c.deps.JetStream, r.name, o.Seq+1)
	if err != nil || next != nil && next.Seq == o.Seq+1 {
		return o, err
	}
	last := s.Last
	if next != nil {
		last = next.Seq - 1
	}
	if err := r.proveErased(ctx, o.Seq+1, last); err != nil || next != nil {
		return o, err
	}
	err = r.apply(ctx, s, &batch{from: o.Seq, to: last, stored: o.AsOf})
	o.Seq, o.Stored = last, time.Time{}
	return o, err
}

// subscribe starts an ordered consumer after the last message that take accepted.
func (s *session) subscribe(ctx context.Context) (jetstream.MessagesContext, error) {
	ctx, cancel := context.WithTimeout(ctx, s.c.broker.Timeout)
	defer cancel()
	ordered, err := s.c.deps.JetStream.OrderedConsumer(ctx, s.name, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: s.reached + 1,
		NamePrefix: s.c.name + "-" + nuid.Next(), InactiveThreshold: inactiveThreshold, MaxResetAttempts: 1,
	})
	if err != nil {
		return nil, fmt.Errorf("read stream %s from %d: %w", s.name, s.reached+1, err)
	}
	messages, err := ordered.Messages(jetstream.PullMaxMessagesWithBytesLimit(s.c.cfg.BatchEvents, s.c.cfg.BatchBytes),
		jetstream.PullExpiry(pullExpiry), jetstream.PullHeartbeat(pullHeartbeat))
	if err != nil {
		return nil, fmt.Errorf("read stream %s from %d: %w", s.name, s.reached+1, err)
	}
	info := ordered.CachedInfo()
	if t, ok := s.c.troubleOf(s.partition); ok && (t.kind != failing || info != nil && info.NumPending == 0) {
		s.c.clear(ctx, s.partition) // no message is pending, so no apply can clear the trouble
	}
	s.doubt.Clear()
	s.c.log.DebugContext(ctx, "reading", "stream", s.name, "from", s.reached+1)
	return messages, nil
}

// read sends the stream's messages to out. It returns nil when ctx ends or the stream is closed, or
// the error that ended the reading.
func (s *session) read(ctx context.Context, out chan<- delivery) error {
	messages, err := s.subscribe(ctx)
	if err != nil {
		return unless(ctx, err)
	}
	defer messages.Stop()
	next := jetstream.NextContext(ctx)
	for {
		msg, err := messages.Next(next)
		if err != nil {
			return unless(ctx, fmt.Errorf("read stream %s: %w", s.name, err))
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", s.name, err)
		}
		d, err := s.take(ctx, msg, meta)
		if err != nil {
			return unless(ctx, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case out <- d:
		}
		if d.closing != nil {
			return nil
		}
	}
}

// unless returns err, or nil if ctx has ended, which may have caused it.
func unless(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// take turns a message into a delivery after it has proven that no message is missing before it.
func (s *session) take(ctx context.Context, msg jetstream.Msg, meta *jetstream.MsgMetadata) (d delivery, err error) {
	seq := meta.Sequence.Stream
	if meta.Consumer != s.consumer {
		if err := s.identify(ctx, seq); err != nil {
			return d, err
		}
		s.consumer = meta.Consumer
	}
	if seq > s.reached+1 {
		if err := s.proveErased(ctx, s.reached+1, seq-1); err != nil {
			return d, err
		}
	}
	s.reached, s.stored = seq, meta.Timestamp
	headers := msg.Headers()
	d = delivery{stored: meta.Timestamp, size: len(msg.Data()), more: meta.NumPending >= farBehind}
	if s.headers {
		d.headers = headers
	}
	switch {
	case event.Closes(msg.Subject(), headers):
		d.closing, err = s.successors(ctx, s.stream)
		d.event.Seq = seq
		return d, err
	case !event.Ours(headers):
		if !s.foreign {
			s.foreign = true
			s.c.log.ErrorContext(ctx, "skipping messages that no relay published", "stream", s.name, "stream_seq", seq, "subject",
				msg.Subject(), "runbook", "StreamForeignMessages")
		}
		d.skip = skipForeign
	default:
		d.event, d.fault = event.Decode(msg.Subject(), headers, msg.Data())
		s.c.classify(&d)
	}
	d.event.Stream, d.event.Seq = s.name, seq
	return d, nil
}

// identify verifies that the message of a new consumer continues the stream of this session. The
// client recreates its consumers by the stream's name. By then another stream may have that name,
// or the stream may have lost its end and have grown again.
func (s *session) identify(ctx context.Context, seq uint64) error {
	ctx, cancel := context.WithTimeout(ctx, s.c.broker.Timeout)
	defer cancel()
	now, err := broker.ReadStream(ctx, s.c.deps.JetStream, s.c.broker, s.partition)
	if err != nil {
		return err
	}
	reason, err := lost(ctx, s.c.deps.JetStream, offset{Stream: s.name, Seq: s.reached, Created: s.stream.Created, Stored: s.stored}, now)
	if err == nil && reason == nil && (seq <= s.reached || seq > now.Last) {
		reason = fmt.Errorf("stream %s, which ends at %d, delivered message %d after %d", s.name, now.Last, seq, s.reached)
	}
	return errors.Join(err, reason)
}

// classify decides whether the consumer applies an event, parks it for its fault, or skips it.
func (c *Consumer) classify(d *delivery) {
	e := &d.event
	known, _ := event.Known(e.AggregateType, e.Type, e.Version)
	known = known || c.deps.Kinds != nil && c.deps.Kinds.Now().Has(e.AggregateType)
	switch {
	case c.projection.Wants(e.AggregateType):
		if d.fault == nil {
			d.fault = checkKnown(e)
		}
	case known:
		d.skip = skipNotWanted
	default:
		d.skip = skipUnknown
	}
}

// reclassifyUnknown reads the kinds again if the batch has events of unknown types, and classifies
// these events again. A kind is in the projections' database before its first event is written. So
// a type that is still unknown belongs to no current kind.
func (c *Consumer) reclassifyUnknown(ctx context.Context, b *batch) error {
	unknown := func(d delivery) bool { return d.skip == skipUnknown }
	if c.deps.Kinds == nil || !slices.ContainsFunc(b.deliveries, unknown) {
		return nil
	}
	if _, err := c.deps.Kinds.Refresh(ctx); err != nil {
		return fmt.Errorf("read the kinds for events of types that are unknown: %w", err)
	}
	for i := range b.deliveries {
		if d := &b.deliveries[i]; unknown(*d) {
			d.skip = ""
			c.classify(d)
		}
	}
	return nil
}

// collect makes batches of deliveries and hands them over until ctx ends or there are no more. If
// the reader is far behind, collect fills each batch. Otherwise it hands a batch over when no
// message has come for a moment. While the database is busy, the batch grows up to its bounds. So a
// stream that never pauses delays no batch for long. The longer a transaction takes, the more
// events share the next one.
func (s *session) collect(ctx context.Context, from uint64, deliveries <-chan delivery, batches chan<- *batch) {
	pause := time.NewTimer(quiet)
	defer pause.Stop()
	var first time.Time // when b got its first delivery
	ready := false      // no message has come for a moment
	single := false     // the last batch had one delivery
	b := &batch{from: from}
	for {
		in, out := deliveries, batches
		full := len(b.deliveries) >= int(s.limit.Load()) || b.bytes >= s.c.cfg.BatchBytes || b.closing != nil
		switch {
		case full:
			in = nil
		case len(b.deliveries) == 0 || !ready && in != nil:
			out = nil
		}
		if in == nil && out == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case out <- b:
			single = len(b.deliveries) == 1
			b, ready = &batch{from: b.to, deliveries: make([]delivery, 0, len(b.deliveries))}, false
		case <-pause.C:
			ready = true
		case d, ok := <-in:
			if !ok {
				deliveries = nil
				continue
			}
			if len(b.deliveries) == 0 {
				first, ready = time.Now(), single
			}
			b.deliveries = append(b.deliveries, d)
			b.to, b.stored, b.closing = d.event.Seq, d.stored, d.closing
			b.bytes += d.size
			switch {
			case d.more:
				ready = false
				pause.Reset(moreIsComing)
			case !ready:
				pause.Reset(min(quiet, gather-time.Since(first)))
			}
		}
	}
}

func (r *reader) label() string { return strconv.Itoa(r.partition) }
