package consumers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
)

const (
	pullHeartbeat     = 2 * time.Second // a silent server is noticed after two of these
	pullExpiry        = 10 * time.Second
	inactiveThreshold = 30 * time.Second      // then the server forgets a reader that is gone
	farBehind         = 256                   // messages that are still to come, from which a full batch is worth waiting for
	moreIsComing      = 20 * time.Millisecond // how long to wait for one of them
	busyWait          = time.Millisecond      // how long to wait for another message before looking whether the database is free
)

// errMoved reports offsets that are no longer where this instance left them: another one applied the same events. What it
// applied stands, ours was rolled back; the offsets are read again.
var errMoved = errors.New("consumers: another instance moved the offsets")

// session is one look at the stream: from reading the offsets until leases move or something fails. Its positions belong to the
// goroutine that reads.
type session struct {
	c         *Consumer
	stream    jetstream.Stream
	origin    origin
	positions map[int]*position
}

// session reads and applies the events of the held partitions until ctx ends, the leases change or it is time to look at stuck
// partitions again (nil), or something fails. progress says whether a batch was applied.
func (c *Consumer) session(ctx context.Context, held []int) (progress bool, err error) {
	s, err := c.open(ctx, held)
	if err != nil {
		return false, err
	}
	var active []int
	highest := uint64(0)
	for _, p := range held {
		if pos := s.positions[p]; !pos.stopped {
			active = append(active, p)
			highest = max(highest, pos.offset)
		}
	}
	ctx, end := context.WithCancel(ctx)
	var g errgroup.Group
	g.Go(func() error {
		defer end()
		c.watch(ctx, s.origin, highest)
		return nil
	})
	defer func() { err = errors.Join(err, g.Wait()) }()
	defer end()
	if len(active) == 0 {
		<-ctx.Done()
		return false, nil
	}
	messages, err := s.read(ctx, active)
	if err != nil {
		return false, err
	}
	batches := make(chan *batch)
	g.Go(func() error { // the next batch is read and decoded while the database works on this one
		defer close(batches)
		return s.collectAll(ctx, messages, batches)
	})
	defer func() {
		end()
		messages.Stop()
	}()
	for b := range batches {
		if ctx.Err() != nil || !slices.Equal(c.group.Held(), held) {
			return progress, nil
		}
		if err := c.apply(ctx, b); err != nil {
			return progress, err
		}
		progress = true
		c.setLast(nil)
	}
	return progress, nil
}

// open reads the offsets and decides which partitions can go on.
func (c *Consumer) open(ctx context.Context, held []int) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, c.deps.Broker.Timeout)
	defer cancel()
	stream, err := c.deps.JetStream.Stream(ctx, c.deps.Broker.Stream)
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w", c.deps.Broker.Stream, err)
	}
	s := &session{c: c, stream: stream, origin: originOf(stream.CachedInfo())}
	if s.positions, err = openOffsets(ctx, c.deps.Pool, c.name, held, s.origin); err != nil {
		return nil, err
	}
	info, err := stream.Info(ctx) // after the offsets, so that none can be above it by mere progress
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w", c.deps.Broker.Stream, err)
	}
	for _, p := range held {
		pos := s.positions[p]
		reason := s.foreign(pos, info)
		if was, ok := c.stuckAt(p); ok && reason == nil && was.offset == pos.offset {
			if reason, err = s.probe(ctx, p, pos); err != nil {
				return nil, err
			}
		}
		if reason != nil {
			s.stop(ctx, p, pos, reason)
		} else {
			c.clearStuck(ctx, p)
		}
	}
	return s, nil
}

func originOf(info *jetstream.StreamInfo) origin {
	generation, err := strconv.ParseInt(info.Config.Metadata[broker.MetaGeneration], 10, 64)
	if err != nil {
		generation = 1 // a stream that nobody repaired
	}
	return origin{created: info.Created.UTC().Truncate(time.Microsecond), generation: generation}
}

// foreign says why offsets of this stream mean nothing here.
func (s *session) foreign(pos *position, info *jetstream.StreamInfo) error {
	if pos.offset == 0 {
		return nil
	}
	now := originOf(info)
	switch {
	case pos.origin.created.UnixMicro() != 0 && !pos.origin.created.Equal(now.created):
		return s.replay("stream %s was made anew at %s, the offset %d belongs to the one of %s", info.Config.Name, now.created.Format(event.TimeFormat), pos.offset, pos.origin.created.Format(event.TimeFormat))
	case now.generation != pos.origin.generation:
		return s.replay("stream %s was repaired and is of generation %d, the offset %d belongs to %d", info.Config.Name, now.generation, pos.offset, pos.origin.generation)
	case pos.offset > info.State.LastSeq:
		return s.replay("stream %s ends at %d, below the offset %d: it has lost events", info.Config.Name, info.State.LastSeq, pos.offset)
	}
	return nil
}

func (s *session) replay(format string, args ...any) error {
	return fmt.Errorf(format+"; run `tidings replay --consumer %s`", append(args, s.c.name)...)
}

// probe looks at the message that a stuck partition stopped at, so that the whole stream need not be read to stop there again.
func (s *session) probe(ctx context.Context, partition int, pos *position) (reason, err error) {
	raw, err := s.next(ctx, partition, pos.reached)
	if err != nil || raw == nil {
		return nil, err
	}
	e, _ := event.Decode(raw.Subject, raw.Header, raw.Data) // what check needs is read even from a damaged event
	_, reason, err = s.check(ctx, partition, pos, &e, raw.Sequence)
	return reason, err
}

// next returns the partition's first event after a sequence, or nil when there is none. It passes over foreign messages.
func (s *session) next(ctx context.Context, partition int, after uint64) (*jetstream.RawStreamMsg, error) {
	for {
		one, cancel := context.WithTimeout(ctx, s.c.deps.Broker.Timeout) // each, for nobody knows how many there are
		raw, err := s.stream.GetMsg(one, after+1, jetstream.WithGetMsgSubject(event.PartitionFilter(s.c.deps.Broker.Prefix, partition)))
		cancel()
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("look up what follows %d in %s: %w", after, event.PartitionKey(partition), err)
		}
		if event.Ours(raw.Header) {
			return raw, nil
		}
		after = raw.Sequence
	}
}

func (s *session) stop(ctx context.Context, partition int, pos *position, reason error) {
	pos.stopped = true
	s.c.setStuck(ctx, partition, pos.reached, fmt.Errorf("partition %s: %w", event.PartitionKey(partition), reason))
}

// watch ends the session when the leases change, when the stream is no longer the one that it reads, and, when partitions are
// stuck, after a while.
func (c *Consumer) watch(ctx context.Context, from origin, highest uint64) {
	look := time.NewTicker(c.cfg.LagInterval)
	defer look.Stop()
	recheck := time.NewTicker(c.cfg.Recheck)
	defer recheck.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.group.Changed():
			return
		case <-recheck.C:
			if c.anyStuck() {
				return
			}
		case <-look.C:
			rctx, cancel := context.WithTimeout(ctx, c.deps.Broker.Timeout)
			stream, err := c.deps.JetStream.Stream(rctx, c.deps.Broker.Stream)
			cancel()
			if errors.Is(err, jetstream.ErrStreamNotFound) {
				return
			}
			if err == nil { // an answer that does not come is the reader's to notice
				if info := stream.CachedInfo(); originOf(info) != from || info.State.LastSeq < highest {
					return
				}
			}
		}
	}
}

// read starts an ordered consumer over the active partitions, from the lowest offset.
func (s *session) read(ctx context.Context, active []int) (jetstream.MessagesContext, error) {
	prefix := s.c.deps.Broker.Prefix
	filters := []string{prefix + ".>"}
	if len(active) < event.Partitions {
		filters = filters[:0]
		for _, p := range active {
			filters = append(filters, event.PartitionFilter(prefix, p))
		}
	}
	from := s.positions[active[0]].offset
	for _, p := range active {
		from = min(from, s.positions[p].offset)
	}
	ctx, cancel := context.WithTimeout(ctx, s.c.deps.Broker.Timeout)
	defer cancel()
	ordered, err := s.c.deps.JetStream.OrderedConsumer(ctx, s.c.deps.Broker.Stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: filters, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from + 1,
		NamePrefix: s.c.name + "-" + nuid.Next(), InactiveThreshold: inactiveThreshold, MaxResetAttempts: 1,
	})
	if err != nil {
		return nil, fmt.Errorf("read stream %s from %d: %w", s.c.deps.Broker.Stream, from+1, err)
	}
	messages, err := ordered.Messages(jetstream.PullMaxMessagesWithBytesLimit(s.c.cfg.BatchEvents, s.c.cfg.BatchBytes),
		jetstream.PullExpiry(pullExpiry), jetstream.PullHeartbeat(pullHeartbeat))
	if err != nil {
		return nil, fmt.Errorf("read stream %s from %d: %w", s.c.deps.Broker.Stream, from+1, err)
	}
	if info := ordered.CachedInfo(); info != nil && info.NumPending == 0 {
		s.c.setLast(nil) // with nothing to apply there is nothing that could fail
	}
	s.c.log.DebugContext(ctx, "reading", "partitions", len(active), "from", from+1)
	return messages, nil
}

// delivery is one message of a batch.
type delivery struct {
	event   event.Event
	headers map[string][]string
	fault   error  // the message's own: it is parked
	skip    string // why it is passed over
}

// move is how a batch moves one partition's offset.
type move struct {
	from, to   uint64
	generation int64     // of the stream that they are of
	stored     time.Time // when the stream stored the last message: everything before it is applied with the batch
}

type batch struct {
	deliveries []delivery
	moves      map[int]move
	taken      int  // messages read for it
	bytes      int  // of their payloads
	more       bool // with the last message the server said that it has many more
}

func (s *session) full(b *batch) bool {
	return b.taken >= s.c.cfg.BatchEvents || b.bytes >= s.c.cfg.BatchBytes
}

// collectAll reads batches and hands them over until ctx ends (nil) or reading fails. Far behind, a batch is filled. Else it is handed
// over as soon as the database is free; while that is busy the batch grows, up to its bounds. So a lone event waits for nothing, a
// stream that never pauses holds no batch back, and the longer a transaction takes the more events share the next one.
func (s *session) collectAll(ctx context.Context, messages jetstream.MessagesContext, batches chan<- *batch) error {
	b := &batch{moves: make(map[int]move)}
	handOver := func() bool {
		select {
		case <-ctx.Done():
			return false
		case batches <- b:
			b = &batch{moves: make(map[int]move)}
			return true
		}
	}
	for {
		wait := jetstream.NextContext(ctx)
		switch {
		case len(b.moves) == 0:
			b.taken, b.bytes, b.more = 0, 0, false // what was read is applied already
		case s.full(b):
			if !handOver() {
				return nil
			}
		case b.more:
			wait = jetstream.NextMaxWait(moreIsComing)
		default:
			select {
			case batches <- b:
				b = &batch{moves: make(map[int]move)}
			default:
				wait = jetstream.NextMaxWait(busyWait)
			}
		}
		msg, err := messages.Next(wait)
		switch {
		case errors.Is(err, nats.ErrTimeout):
			b.more = false
			continue
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			if len(b.moves) > 0 && !handOver() {
				return nil
			}
			return fmt.Errorf("read stream %s: %w", s.c.deps.Broker.Stream, err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", s.c.deps.Broker.Stream, err)
		}
		b.taken++
		b.bytes += len(msg.Data())
		b.more = meta.NumPending >= farBehind
		if err := s.take(ctx, b, msg.Subject(), msg.Headers(), msg.Data(), meta.Sequence.Stream, meta.Timestamp); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

// take puts a message into the batch, unless it is applied already or its partition is stopped.
func (s *session) take(ctx context.Context, b *batch, subject string, headers nats.Header, data []byte, seq uint64, stored time.Time) error {
	partition, ok := partitionOf(s.c.deps.Broker.Prefix, subject)
	if !ok {
		if seq > s.c.strays { // no offset says that it was counted
			s.c.strays = seq
			s.c.skipped(ctx, event.Foreign, 1)
		}
		return nil
	}
	pos := s.positions[partition]
	if pos == nil || pos.stopped || seq <= pos.reached {
		return nil
	}
	if !event.Ours(headers) {
		return s.pass(ctx, b, partition, pos, event.Foreign, seq, stored)
	}
	d := delivery{headers: headers}
	d.event, d.fault = event.Decode(subject, headers, data)
	d.event.Seq = seq
	again, reason, err := s.check(ctx, partition, pos, &d.event, seq)
	if err != nil {
		return err
	}
	if reason != nil {
		s.stop(ctx, partition, pos, reason)
		return nil
	}
	if again {
		return s.pass(ctx, b, partition, pos, event.Duplicate, seq, stored)
	}
	pos.event = seq
	b.move(partition, pos, seq, stored)
	known, _ := event.Known(d.event.AggregateType, d.event.Type, d.event.Version)
	switch {
	case s.c.wants[d.event.AggregateType]:
		if d.fault == nil {
			d.fault = checkKnown(&d.event)
		}
	case known:
		d.skip = skipNotWanted
	default:
		d.skip = skipUnknown
	}
	d.event.Partition = partition
	b.deliveries = append(b.deliveries, d)
	return nil
}

// pass moves the offset over a message that is skipped and counted. Such a message proves nothing of what was before it. Where something may
// have expired unread the offset stays in front of a foreign one, and the next event, which names the one before it, tells; a duplicate, which that
// may name, stops the partition.
func (s *session) pass(ctx context.Context, b *batch, partition int, pos *position, kind string, seq uint64, stored time.Time) error {
	ictx, cancel := context.WithTimeout(ctx, s.c.deps.Broker.Timeout)
	defer cancel()
	info, err := s.stream.Info(ictx)
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", s.c.deps.Broker.Stream, err)
	}
	first := info.State.FirstSeq
	switch proven := first <= pos.reached+1 || broker.ErasedAll(info.Config.Metadata, pos.reached+1, first-1); {
	case !proven && kind == event.Foreign:
		return nil
	case !proven:
		s.stop(ctx, partition, pos, s.replay("the events after %d may have expired: stream %s begins at %d", pos.reached, info.Config.Name, first))
		return nil
	}
	b.move(partition, pos, seq, stored)
	if kind == event.Duplicate {
		pos.event = seq
	}
	b.deliveries = append(b.deliveries, delivery{event: event.Event{Partition: partition, Seq: seq}, skip: kind})
	return nil
}

// move takes a message into the batch's move of its partition.
func (b *batch) move(partition int, pos *position, seq uint64, stored time.Time) {
	m, ok := b.moves[partition]
	if !ok {
		m.from, m.generation = pos.reached, pos.origin.generation
	}
	m.to, m.stored, pos.reached = seq, stored, seq
	b.moves[partition] = m
}

// partitionOf reads the partition from a subject under prefix.
func partitionOf(prefix, subject string) (int, bool) {
	rest, ok := strings.CutPrefix(subject, prefix+".p")
	if !ok || len(rest) < 3 || rest[2] != '.' {
		return 0, false
	}
	p, err := strconv.Atoi(rest[:2])
	return p, err == nil && p >= 0 && p < event.Partitions
}

// check proves that nothing is missing between the partition's position and the message: the message names the event before it, or
// stands directly behind it in its publish. again says that it is a copy of an event that was passed; reason says why the partition cannot go on;
// err is a failure to find out.
func (s *session) check(ctx context.Context, partition int, pos *position, e *event.Event, seq uint64) (again bool, reason, err error) {
	if e.Generation > pos.origin.generation {
		return false, s.replay("message %d is of generation %d, the offset %d belongs to %d: the stream was repaired", seq, e.Generation, pos.reached, pos.origin.generation), nil
	}
	prev := seq - 1
	if e.HasPrev {
		prev = e.Prev
	}
	if prev == pos.event || prev == pos.reached {
		return false, nil, nil
	}
	ictx, cancel := context.WithTimeout(ctx, s.c.deps.Broker.Timeout)
	defer cancel()
	info, err := s.stream.Info(ictx)
	if err != nil {
		return false, nil, fmt.Errorf("look up stream %s: %w", s.c.deps.Broker.Stream, err)
	}
	first := info.State.FirstSeq
	if prev < pos.reached {
		if prev == 0 && first > pos.reached {
			return false, nil, nil // all that was before it has expired, and was applied
		}
		raw, err := s.next(ctx, partition, prev)
		switch {
		case err != nil:
			return false, nil, err
		case raw != nil && raw.Sequence == seq: // what the offset names is foreign
			return false, nil, nil
		case raw != nil && raw.Sequence < seq && raw.Header.Get(event.HeaderID) == e.ID:
			return true, nil, nil
		}
		return false, s.replay("message %d follows %d, below the offset %d: the stream is not the one that was read", seq, prev, pos.reached), nil
	}
	if prev < first && !broker.ErasedAll(info.Config.Metadata, pos.reached+1, prev) {
		return false, s.replay("the events after %d have expired: message %d follows %d, and stream %s begins at %d", pos.reached, seq, prev, info.Config.Name, first), nil
	}
	raw, err := s.next(ctx, partition, pos.reached)
	if err != nil {
		return false, nil, err
	}
	if raw == nil { // there is one: it was delivered. A replica that has not heard of it knows as little of those before it.
		return false, nil, fmt.Errorf("message %d of %s was delivered and is not found", seq, event.PartitionKey(partition))
	}
	if raw.Sequence < seq {
		return false, nil, fmt.Errorf("message %d of %s was not delivered before %d", raw.Sequence, event.PartitionKey(partition), seq)
	}
	s.c.log.InfoContext(ctx, "events were erased from the stream", "partition", event.PartitionKey(partition), "after", pos.reached, "before", seq)
	return false, nil, nil
}

// partitions are those that the batch moves, sorted.
func (b *batch) partitions() []int { return slices.Sorted(maps.Keys(b.moves)) }
