package erasure

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// onStream is what a scan of the streams has found of the erased comments.
type onStream struct {
	created map[string]time.Time // of the streams, to the microsecond
	earlier []message            // that stand before their comment's last comment.erased: to be deleted
	late    []string             // comments with content behind it, or without any: to be erased once more
	ends    map[string]uint64    // the last comment.erased of each stream
	left    int                  // messages to be deleted, of earlier and of late
}

type message struct {
	stream   string
	at       place
	outboxID int64
	eventID  string
	msgID    string
	comment  string
	content  bool // it has not been redacted
}

// place is where a message stands. A partition that takes over slots has a higher number than those before it.
type place struct {
	partition int
	seq       uint64
}

func (p place) before(o place) bool {
	return p.partition < o.partition || p.partition == o.partition && p.seq < o.seq
}

// scan reads every message of the tenant's comments, on the streams of all partitions. A stream that is lost is none of them: a repair publishes
// what is redacted now.
func (e *eraser) scan(ctx context.Context) (onStream, error) {
	found := onStream{created: make(map[string]time.Time), ends: make(map[string]uint64)}
	streams, err := broker.Streams(ctx, e.JetStream, e.Broker)
	if err != nil {
		return found, err
	}
	var (
		filter   = event.AggregateFilter(e.Broker.Prefix, e.o.TenantID, event.AggregateComment)
		author   = strconv.FormatInt(e.o.AuthorID, 10)
		erasedAt = make(map[string]place)
		all      []message
	)
	for _, s := range streams {
		read, err := broker.Scan(ctx, e.JetStream, e.Broker, s.Number, broker.Scanning{Filter: filter}, func(m *broker.Stored) error {
			if !event.Ours(m.Header) { // nobody reads it as an event (tidings repair stream --delete-foreign)
				return nil
			}
			c, ok := event.PeekComment(m.Data)
			if _, of := e.comments[c.CommentID]; !ok || !of || c.AuthorID != author {
				return nil
			}
			ev, err := event.Decode(m.Subject, m.Header, nil)
			if err != nil {
				return fmt.Errorf("message %d of stream %s: %w", m.Seq, s.Name, err)
			}
			at := place{s.Number, m.Seq}
			if ev.Type == event.Erased {
				erasedAt[c.CommentID], found.ends[s.Name] = at, m.Seq
				return nil
			}
			all = append(all, message{s.Name, at, ev.OutboxID, ev.ID, m.Header.Get(event.HeaderMsgID), c.CommentID, !c.Erased})
			return nil
		})
		if err != nil {
			return found, err
		}
		found.created[s.Name] = read.Created
	}
	late := make(map[string]bool)
	for _, m := range all {
		switch {
		case m.at.before(erasedAt[m.comment]):
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

// deleteEarlier takes messages off the streams, a slice at a time: first the rows say that they stand nowhere, then they are deleted.
func (e *eraser) deleteEarlier(ctx context.Context, found onStream) error {
	byStream := make(map[string][]message)
	for _, m := range found.earlier {
		byStream[m.stream] = append(byStream[m.stream], m)
	}
	for _, stream := range slices.Sorted(maps.Keys(byStream)) {
		for some := range slices.Chunk(byStream[stream], slice) {
			if err := e.deleteSlice(ctx, stream, some); err != nil {
				return err
			}
		}
	}
	return nil
}

func (e *eraser) deleteSlice(ctx context.Context, stream string, some []message) error {
	rows, doomed := make([]outbox.Published, len(some)), make([]broker.Doomed, len(some))
	for i, m := range some {
		rows[i] = outbox.Published{ID: m.outboxID, EventID: m.eventID, Seq: m.at.seq}
		doomed[i] = broker.Doomed{Seq: m.at.seq, MsgID: m.msgID}
	}
	if err := e.tx(ctx, func(tx pgx.Tx) error { return outbox.Unmark(ctx, tx, rows) }); err != nil {
		return err
	}
	if err := e.at("unmarked"); err != nil {
		return err
	}
	n, err := broker.Erase(ctx, e.JetStream, e.Broker, stream, doomed)
	e.count(Stream, n)
	if err != nil {
		return err
	}
	if err := e.at("deleted"); err != nil {
		return err
	}
	return e.save(ctx, false)
}
