package erasure

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// onStream is what a scan of the stream has found of the erased comments.
type onStream struct {
	created    time.Time // of the stream, to the microsecond
	generation int64
	doomed     []message      // to be deleted: those before their comment's last comment.erased, and those of a post that is not the comment's
	late       []string       // comments with content behind it, or without any: to be erased once more
	ends       map[int]uint64 // the last comment.erased of each partition, or a doomed message behind it
	last       map[int]uint64 // where a doomed message may be its partition's last: it has no comment.erased behind it
	left       int            // messages to be deleted, doomed ones and late ones
}

type message struct {
	seq      uint64
	outboxID int64
	eventID  string
	msgID    string
	comment  string
	stray    bool // of a post that is not the comment's, so that no comment.erased comes behind it
	content  bool // it has not been redacted
}

// scan reads every message of the tenant's comments, as consumers do.
func (e *eraser) scan(ctx context.Context) (found onStream, err error) {
	stream, err := e.JetStream.Stream(ctx, e.Broker.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) { // nothing was ever published, or it is lost: then a repair publishes what is redacted now
		return found, nil
	}
	if err != nil {
		return found, fmt.Errorf("look up stream %s: %w", e.Broker.Stream, err)
	}
	info := stream.CachedInfo()
	found.created, found.generation = info.Created.UTC().Truncate(time.Microsecond), 1
	if text := info.Config.Metadata[broker.MetaGeneration]; text != "" {
		if found.generation, err = strconv.ParseInt(text, 10, 64); err != nil {
			return found, fmt.Errorf("the generation of stream %s is %.80q", e.Broker.Stream, text)
		}
	}
	found.ends, found.last = make(map[int]uint64), make(map[int]uint64)
	filter := event.AggregateFilter(e.Broker.Prefix, e.o.TenantID, event.AggregateComment)
	last, err := stream.GetLastMsgForSubject(ctx, filter)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return found, nil
	}
	if err != nil {
		return found, fmt.Errorf("look up the last message of %s: %w", filter, err)
	}
	consumer, err := e.JetStream.OrderedConsumer(ctx, e.Broker.Stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverAllPolicy, InactiveThreshold: time.Minute,
	})
	if err != nil {
		return found, fmt.Errorf("read %s: %w", filter, err)
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessagesWithBytesLimit(5000, 8<<20), jetstream.PullHeartbeat(time.Second), jetstream.PullExpiry(5*time.Second))
	if err != nil {
		return found, fmt.Errorf("read %s: %w", filter, err)
	}
	defer messages.Stop()
	erasedAt := make(map[string]uint64)
	var all []message
	for seq := uint64(0); seq < last.Sequence; {
		m, err := next(ctx, messages)
		if err != nil {
			return found, fmt.Errorf("read %s after %d: %w", filter, seq, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return found, fmt.Errorf("read %s after %d: %w", filter, seq, err)
		}
		seq = meta.Sequence.Stream
		comment, post, is := e.of(m.Data())
		if !is {
			continue
		}
		ev, err := event.Decode(m.Subject(), m.Headers(), nil)
		if err != nil {
			return found, fmt.Errorf("message %d of %s: %w", seq, filter, err)
		}
		e.posts[ev.AggregateID] = true
		stray, redacted := ev.AggregateID != post, event.Redacted(ev.Type, m.Data())
		switch {
		case ev.Type == event.Erased && redacted && !stray:
			erasedAt[comment], found.ends[ev.Partition] = seq, seq
			continue
		case stray && redacted:
			continue
		case stray:
			found.ends[ev.Partition], found.last[ev.Partition] = seq, seq
		}
		all = append(all, message{seq, ev.OutboxID, ev.ID, m.Headers().Get(event.HeaderMsgID), comment, stray, !redacted})
	}
	late := make(map[string]bool)
	for _, m := range all {
		switch {
		case m.stray || m.seq < erasedAt[m.comment]:
			found.doomed = append(found.doomed, m)
			found.left++
		case m.content:
			late[m.comment] = true
			found.left++
		}
	}
	found.late = slices.Sorted(maps.Keys(late))
	return found, nil
}

// next returns the next message. One that has expired since it was known to come ends the wait.
func next(ctx context.Context, messages jetstream.MessagesContext) (jetstream.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return messages.Next(jetstream.NextContext(ctx))
}

// pass has a message published behind the last doomed one of each partition where none is yet: the relay refuses a partition that ends below its
// mark, and one that holds a doomed message in memory is refused by the stream when the partition has moved on.
func (e *eraser) pass(ctx context.Context, found onStream) error {
	stream, err := e.JetStream.Stream(ctx, e.Broker.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", e.Broker.Stream, err)
	}
	ends := func() (all []int, err error) {
		for _, p := range slices.Sorted(maps.Keys(found.last)) {
			last, err := stream.GetLastMsgForSubject(ctx, event.PartitionFilter(e.Broker.Prefix, p))
			if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
				return nil, fmt.Errorf("look up the last message of partition %d: %w", p, err)
			}
			if err == nil && last.Sequence <= found.last[p] {
				all = append(all, p)
			}
		}
		return all, nil
	}
	partitions, err := ends()
	if err != nil || len(partitions) == 0 {
		return err
	}
	if err := e.tx(ctx, func(tx pgx.Tx) error {
		for _, p := range partitions {
			if err := outbox.Pass(ctx, tx, e.o.TenantID, p); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return e.await(ctx, func() (waiting []string, err error) {
		partitions, err := ends()
		if len(partitions) > 0 {
			waiting = append(waiting, fmt.Sprintf("the relay: it has published nothing behind the author's last messages of %d partitions", len(partitions)))
		}
		return waiting, err
	})
}

// deleteDoomed takes messages off the stream, a slice at a time: first the rows say that they stand nowhere, then they are deleted.
func (e *eraser) deleteDoomed(ctx context.Context, found onStream) error {
	for some := range slices.Chunk(found.doomed, slice) {
		rows, doomed := make([]outbox.Published, len(some)), make([]broker.Doomed, len(some))
		for i, m := range some {
			rows[i] = outbox.Published{ID: m.outboxID, EventID: m.eventID, Seq: m.seq}
			doomed[i] = broker.Doomed{Seq: m.seq, MsgID: m.msgID}
		}
		if err := e.tx(ctx, func(tx pgx.Tx) error { return outbox.Unmark(ctx, tx, rows) }); err != nil {
			return err
		}
		if err := e.at("unmarked"); err != nil {
			return err
		}
		n, err := broker.Erase(ctx, e.JetStream, e.Broker, doomed)
		e.count(Stream, n)
		if err != nil {
			return err
		}
		if err := e.at("deleted"); err != nil {
			return err
		}
		if err := e.save(ctx, false); err != nil {
			return err
		}
	}
	return nil
}
