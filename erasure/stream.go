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
	earlier    []message      // that stand before their comment's last comment.erased: to be deleted
	late       []string       // comments with content behind it, or without any: to be erased once more
	ends       map[int]uint64 // the last comment.erased of each partition
	left       int            // messages to be deleted, of earlier and of late
}

type message struct {
	seq      uint64
	outboxID int64
	eventID  string
	msgID    string
	comment  string
	content  bool // it has not been redacted
}

// scan reads every message of the tenant's comments.
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
	found.ends = make(map[int]uint64)
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
	author := strconv.FormatInt(e.o.AuthorID, 10)
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
		c, ok := event.PeekComment(m.Data())
		if _, of := e.comments[c.CommentID]; !ok || !of || c.AuthorID != author {
			continue
		}
		ev, err := event.Decode(m.Subject(), m.Headers(), nil)
		if err != nil {
			return found, fmt.Errorf("message %d of %s: %w", seq, filter, err)
		}
		if ev.Type == event.Erased {
			erasedAt[c.CommentID], found.ends[ev.Partition] = seq, seq
			continue
		}
		all = append(all, message{seq, ev.OutboxID, ev.ID, m.Headers().Get(event.HeaderMsgID), c.CommentID, !c.Erased})
	}
	late := make(map[string]bool)
	for _, m := range all {
		switch {
		case m.seq < erasedAt[m.comment]:
			found.earlier = append(found.earlier, m)
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

// deleteEarlier takes messages off the stream, a slice at a time: first the rows say that they stand nowhere, then they are deleted.
func (e *eraser) deleteEarlier(ctx context.Context, found onStream) error {
	for some := range slices.Chunk(found.earlier, slice) {
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
