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
	pullHeartbeat     = time.Second // a silent server is noticed after two of these
	pullExpiry        = 10 * time.Second
	inactiveThreshold = 30 * time.Second      // then the server forgets a reader that is gone
	farBehind         = 256                   // messages that are still to come, from which a full batch is worth waiting for
	moreIsComing      = 20 * time.Millisecond // how long to wait for one of them
	readAhead         = 64                    // messages that are decoded and wait for a place in a batch
	// A relay publishes some events at a time, and a transaction costs the same for one as for ten: a batch is handed over when nothing more
	// has come for quiet, or after gather.
	quiet  = 500 * time.Microsecond
	gather = 5 * time.Millisecond
)

// delivery is one message of a stream.
type delivery struct {
	event   event.Event
	headers map[string][]string
	stored  time.Time
	size    int
	more    bool   // the server said that it has many more
	fault   error  // the message's own: it is parked
	skip    string // why it is passed over
	closing []broker.Stream
}

// batch is what one transaction applies.
type batch struct {
	from, to   uint64
	stored     time.Time // when the stream stored the last message: everything before it is applied with the batch
	deliveries []delivery
	bytes      int
	closing    []broker.Stream // the successors, when the last message closes the stream
}

// events are those that are not passed over.
func (b *batch) events(yield func(*event.Event) bool) {
	for i := range b.deliveries {
		if d := &b.deliveries[i]; d.skip == "" && d.closing == nil && !yield(&d.event) {
			return
		}
	}
}

// session is one way through the stream, from the offset until something ends it. Its fields belong to the goroutine that reads.
type session struct {
	*reader
	stream   broker.Stream
	reached  uint64 // the last message that was taken
	consumer string // that delivered it: the client replaces it after a failure
}

// session applies events until the reader is stopped, or is to look anew, or the partition is no longer held (nil), or something fails.
// progress says whether a batch was applied.
func (r *reader) session() (progress bool, err error) {
	c := r.c
	ctx, end := context.WithCancel(r.ctx)
	defer end()
	c.mu.Lock()
	r.again = end
	c.mu.Unlock()
	o, stream, err := r.open(ctx)
	if err != nil {
		return false, err
	}
	if o.Seq, err = r.passOver(ctx, o, stream); err != nil {
		return false, err
	}
	s := &session{reader: r, stream: stream, reached: o.Seq}
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
			r.stop()
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

// passOver moves the offset to behind messages that were erased, as far as no other message follows. It returns where the offset is.
func (r *reader) passOver(ctx context.Context, o offset, s broker.Stream) (uint64, error) {
	if o.Seq == s.Last {
		return o.Seq, nil
	}
	rctx, cancel := context.WithTimeout(ctx, r.c.broker.Timeout)
	defer cancel()
	next, err := broker.Next(rctx, r.c.deps.JetStream, r.name, o.Seq+1)
	if err != nil || next != nil && next.Seq == o.Seq+1 {
		return o.Seq, err
	}
	last := s.Last
	if next != nil {
		last = next.Seq - 1
	}
	if err := r.prove(ctx, o.Seq+1, last); err != nil || next != nil {
		return o.Seq, err
	}
	return last, r.apply(ctx, s, &batch{from: o.Seq, to: last, stored: o.AsOf})
}

// subscribe starts an ordered consumer behind what was taken.
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
		s.c.clear(ctx, s.partition) // with nothing to apply there is nothing that could fail
	}
	s.doubt.Clear()
	s.c.log.DebugContext(ctx, "reading", "stream", s.name, "from", s.reached+1)
	return messages, nil
}

// read sends the stream's messages to out until ctx ends (nil), the stream is closed, or reading fails.
func (s *session) read(ctx context.Context, out chan<- delivery) error {
	messages, err := s.subscribe(ctx)
	if err != nil {
		return s.unless(ctx, err)
	}
	defer messages.Stop()
	next := jetstream.NextContext(ctx)
	for {
		msg, err := messages.Next(next)
		if err != nil {
			return s.unless(ctx, fmt.Errorf("read stream %s: %w", s.name, err))
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", s.name, err)
		}
		d, err := s.take(ctx, msg, meta)
		if err != nil {
			return s.unless(ctx, err)
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

func (s *session) unless(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// take makes a delivery of a message, once it is proven that nothing is missing before it.
func (s *session) take(ctx context.Context, msg jetstream.Msg, meta *jetstream.MsgMetadata) (d delivery, err error) {
	seq := meta.Sequence.Stream
	if meta.Consumer != s.consumer {
		if err := s.identify(ctx, seq); err != nil {
			return d, err
		}
		s.consumer = meta.Consumer
	}
	if seq > s.reached+1 {
		if err := s.prove(ctx, s.reached+1, seq-1); err != nil {
			return d, err
		}
	}
	s.reached = seq
	d = delivery{headers: msg.Headers(), stored: meta.Timestamp, size: len(msg.Data()), more: meta.NumPending >= farBehind}
	switch {
	case event.Closes(msg.Subject(), msg.Headers()):
		d.closing, err = s.successors(ctx, s.stream)
		d.event.Seq = seq
		return d, err
	case !event.Ours(d.headers):
		if !s.foreign {
			s.foreign = true
			s.c.log.ErrorContext(ctx, "skipping messages that no relay of ours published", "stream", s.name, "stream_seq", seq, "subject", msg.Subject(), "runbook", "StreamForeignMessages")
		}
		d.skip = event.Foreign
	default:
		d.event, d.fault = event.Decode(msg.Subject(), d.headers, msg.Data())
		s.c.classify(&d)
	}
	d.event.Stream, d.event.Seq = s.name, seq
	return d, nil
}

// identify proves that a message that a new consumer delivered is of the stream that is being read: the client makes its
// consumers anew by the stream's name, and another stream may have it by then.
func (s *session) identify(ctx context.Context, seq uint64) error {
	ctx, cancel := context.WithTimeout(ctx, s.c.broker.Timeout)
	defer cancel()
	now, err := broker.ReadStream(ctx, s.c.deps.JetStream, s.c.broker, s.partition)
	if err != nil {
		return err
	}
	if !now.Created.Equal(s.stream.Created) || now.Last < seq {
		return fmt.Errorf("stream %s is not the one of %s any more", s.name, s.stream.Created.Format(time.RFC3339Nano))
	}
	return nil
}

// classify decides what becomes of an event: it is applied, parked for its fault, or passed over.
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

// meet reads the kinds again for a batch with events of types that nobody knew when they came, and decides anew what becomes of those. A kind is in
// the projections' database before the first event of it is written, so what is unknown then is of no kind, or of none any more.
func (c *Consumer) meet(ctx context.Context, b *batch) error {
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

// collect makes batches of deliveries and hands them over until ctx ends or there are no more. Far behind, a batch is filled. Else it is handed
// over when no more come for a moment. While the database is busy it grows, up to its bounds. So a stream that never pauses holds no batch
// back for long, and the longer a transaction takes the more events share the next one.
func (s *session) collect(ctx context.Context, from uint64, deliveries <-chan delivery, batches chan<- *batch) {
	pause := time.NewTimer(quiet)
	defer pause.Stop()
	var first time.Time // when b got its first delivery
	ready := false      // nothing has come for a moment
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
			b, ready = &batch{from: b.to}, false
		case <-pause.C:
			ready = true
		case d, ok := <-in:
			if !ok {
				deliveries = nil
				continue
			}
			if len(b.deliveries) == 0 {
				first = time.Now()
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
