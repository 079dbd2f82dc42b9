package erasure

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/redact"
	"github.com/tidings/tidings/outbox"
)

// onStream is the result of a scan of the streams for the erased children and for edges.
type onStream struct {
	created map[string]time.Time // of the streams, in microseconds
	// doomed are the messages to delete: those before their child's last KIND.erased, those on an
	// object that is not the child's, and all messages of edges.
	doomed []message
	lateOf map[*erasing][]string // children with content after their KIND.erased, or with content but no KIND.erased: to be erased again
	late   int                   // the number of these children
	ends   map[string]uint64     // the last KIND.erased of each stream, or a later doomed message
	heads  map[string]uint64     // the last message of each stream at the start of the scan
	left   int                   // number of messages to delete, doomed and late
}

type message struct {
	stream   string
	at       place
	outboxID int64
	eventID  string
	child    string
	stray    bool // on an object that is not the child's, so no KIND.erased follows it
	content  bool // not redacted
}

// place is the position of a message. A partition that takes over slots has a higher number than
// its predecessors.
type place struct {
	partition int
	seq       uint64
}

func (p place) before(o place) bool {
	return p.partition < o.partition || p.partition == o.partition && p.seq < o.seq
}

// scan reads the streams of all partitions. It reads every message of the tenant's children, of the
// kinds in which the author has children, as consumers do; and every message of the tenant's edges.
// It skips lost streams: a repair publishes the redacted rows.
func (e *eraser) scan(ctx context.Context) (onStream, error) {
	found := onStream{created: make(map[string]time.Time), ends: make(map[string]uint64), heads: make(map[string]uint64),
		lateOf: make(map[*erasing][]string)}
	streams, err := broker.Streams(ctx, e.JetStream, e.Broker)
	if err != nil {
		return found, err
	}
	for _, s := range streams {
		found.created[s.Name], found.heads[s.Name] = s.Created, s.Last
	}
	for _, k := range e.found() {
		if err := e.scanKind(ctx, k, streams, &found); err != nil {
			return found, err
		}
	}
	for _, k := range e.edges {
		if err := e.scanEdges(ctx, k, streams, &found); err != nil {
			return found, err
		}
	}
	return found, nil
}

// scanEdges finds every message of the kind that names the person. The erasure deletes them only
// after every consumer has applied the removal.
func (e *eraser) scanEdges(ctx context.Context, k *edgeErasure, streams []broker.Stream, found *onStream) error {
	filter := event.AggregateFilter(e.Broker.Prefix, e.o.TenantID, k.Name)
	for _, s := range streams {
		read, err := broker.Scan(ctx, e.JetStream, e.Broker, s.Number, broker.Scanning{Filter: filter}, func(m *broker.Stored) error {
			if !event.Ours(m.Header) || !k.names(m.Data, e.o.AuthorID) {
				return nil
			}
			ev, err := event.Decode(m.Subject, m.Header, nil)
			if err != nil {
				return fmt.Errorf("message %d of stream %s: %w", m.Seq, s.Name, err)
			}
			k.objects[ev.AggregateID] = true
			found.ends[s.Name] = max(found.ends[s.Name], m.Seq)
			found.doomed = append(found.doomed, message{stream: s.Name, at: place{s.Number, m.Seq}, outboxID: ev.OutboxID, eventID: ev.ID})
			found.left++
			return nil
		})
		if err != nil {
			return err
		}
		found.created[s.Name] = read.Created
	}
	return nil
}

func (e *eraser) scanKind(ctx context.Context, k *erasing, streams []broker.Stream, found *onStream) error {
	var (
		filter   = event.AggregateFilter(e.Broker.Prefix, e.o.TenantID, k.Name)
		erasedAt = make(map[string]place)
		all      []message
	)
	for _, s := range streams {
		ends := func(seq uint64) { found.ends[s.Name] = max(found.ends[s.Name], seq) } // over all kinds
		read, err := broker.Scan(ctx, e.JetStream, e.Broker, s.Number, broker.Scanning{Filter: filter}, func(m *broker.Stored) error {
			if !event.Ours(m.Header) { // no reader takes it for an event (tidings repair stream --delete-foreign)
				return nil
			}
			child, object, is := k.of(m.Data)
			if !is {
				return nil
			}
			ev, err := event.Decode(m.Subject, m.Header, nil)
			if err != nil {
				return fmt.Errorf("message %d of stream %s: %w", m.Seq, s.Name, err)
			}
			k.objects[ev.AggregateID] = true
			at, stray, redacted := place{s.Number, m.Seq}, ev.AggregateID != object, redact.IsRedacted(k.Names(), ev.Type, m.Data)
			switch {
			case ev.Type == event.Erased && redacted && !stray:
				erasedAt[child] = at
				ends(m.Seq)
				return nil
			case stray && redacted:
				return nil
			case stray:
				ends(m.Seq)
			}
			all = append(all, message{s.Name, at, ev.OutboxID, ev.ID, child, stray, !redacted})
			return nil
		})
		if err != nil {
			return err
		}
		found.created[s.Name] = read.Created
	}
	late := make(map[string]bool)
	for _, m := range all {
		switch {
		case m.stray || m.at.before(erasedAt[m.child]):
			found.doomed = append(found.doomed, m)
			found.left++
		case m.content:
			late[m.child] = true
			found.left++
		}
	}
	found.lateOf[k] = slices.Sorted(maps.Keys(late))
	found.late += len(late)
	return nil
}

// deleteDoomed deletes messages from the streams, in slices. It first clears the sequences in their
// rows, then deletes them.
func (e *eraser) deleteDoomed(ctx context.Context, found onStream) error {
	byStream := make(map[string][]message)
	for _, m := range found.doomed {
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

// deleteLetters deletes the dead letters of subscribers with content of an erased child, or of an
// edge of the person; with dryRun it only counts them. It runs after their events are recorded as
// erased: a subscriber that stores one later finds the record, and deletes the letter itself.
func (e *eraser) deleteLetters(ctx context.Context, dryRun bool, counts tally) error {
	doomed := func(subject string, headers map[string][]string, data []byte) (bool, error) {
		ev, fault := event.Decode(subject, headers, nil)
		if ev.TenantID != e.o.TenantID {
			return false, nil
		}
		_, off, err := e.redact(ev.AggregateType, ev.Type, data)
		if err != nil && fault != nil {
			err = nil // it is no event of ours, and no content that a consumer would read
		}
		return off, err
	}
	n, err := broker.EraseLetters(ctx, e.JetStream, e.Broker, dryRun, doomed)
	counts.add(SubscriberLetters, n)
	return err
}

func (e *eraser) deleteSlice(ctx context.Context, stream string, some []message) error {
	rows, doomed := make([]outbox.Published, len(some)), make([]broker.ToErase, len(some))
	for i, m := range some {
		rows[i] = outbox.Published{ID: m.outboxID, EventID: m.eventID, Seq: m.at.seq}
		doomed[i] = broker.ToErase{Seq: m.at.seq, EventID: m.eventID}
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
