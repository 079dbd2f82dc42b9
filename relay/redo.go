package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

const (
	redoPage = 500 // messages per transaction of a redo
	maxRedos = 3   // attempts, as long as a leader names further messages afterwards
)

// redoAll brings the database up to date with the messages on the streams after its marks. It adds
// partitions that the database lost, calls Redo for messages without a row, and marks all rows.
// Partitions come by number, so those before a resize come first. Relays may run: either side may
// mark a page.
func (r *repairer) redoAll(ctx context.Context) error {
	all, err := r.layout(ctx)
	if err != nil {
		return err
	}
	if len(r.strays) > 0 {
		if err := outbox.Adopt(ctx, r.pool, r.strays); err != nil {
			return err
		}
		all = outbox.Adopted(all, r.strays)
	}
	if err := r.o.at("adopted"); err != nil {
		return err
	}
	for _, p := range all {
		if err := r.redoPartition(ctx, p); err != nil {
			return fmt.Errorf("redo the lost messages of partition %d: %w", p.Number, err)
		}
	}
	return nil
}

// redoMissedSome reports whether an open stream has messages without a row. A redo before it has
// missed them, because the leader that it asked did not know them yet. A repair would delete them.
func (r *repairer) redoMissedSome() bool {
	return slices.ContainsFunc(r.found, func(f *finding) bool { return f.report.Unknown > 0 && !f.p.Closed && !f.lost })
}

func (r *repairer) redoPartition(ctx context.Context, p outbox.Partition) error {
	stream, err := broker.ReadStream(ctx, r.js, r.cfg, p.Number)
	if errors.Is(err, jetstream.ErrStreamNotFound) || err == nil && stream.Last == 0 || p.Closed {
		return nil
	}
	if err != nil {
		return err
	}
	if p.Stream == "" {
		if err := outbox.Bind(ctx, r.pool, p.Number, stream.Name, stream.Created); err != nil {
			return err
		}
		p.Stream, p.Created = stream.Name, stream.Created
	}
	if !stream.Created.Equal(p.Created) || stream.Last <= p.Tail {
		return nil // a repair replaces the stream, or all its messages are marked
	}
	var page []*broker.Stored
	var final uint64
	_, err = broker.Scan(ctx, r.js, r.cfg, p.Number, broker.Scanning{From: p.Tail + 1}, func(m *broker.Stored) error {
		if event.Closes(m.Subject, m.Header) {
			final = m.Seq
			return nil
		}
		if page = append(page, m); len(page) < redoPage {
			return nil
		}
		some := page
		page = nil
		return r.redo(ctx, p, some)
	})
	if err == nil {
		err = r.redo(ctx, p, page)
	}
	if err != nil || final == 0 {
		return err
	}
	if p, err = outbox.ReadPartition(ctx, r.pool, p.Number); err != nil {
		return err
	}
	_, err = outbox.Close(ctx, r.pool, p.Number, p.Tail, final)
	return err
}

// redo brings the database up to date with some messages of one stream.
func (r *repairer) redo(ctx context.Context, p outbox.Partition, page []*broker.Stored) error {
	if len(page) == 0 {
		return nil
	}
	var rows []outbox.Published
	of := make(map[uint64]*broker.Stored, len(page))
	for _, m := range page {
		if event.Ours(m.Header) {
			id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has parsed it
			rows, of[m.Seq] = append(rows, outbox.Published{ID: id, EventID: m.Header.Get(event.HeaderID), Seq: m.Seq}), m
		}
	}
	known, err := outbox.Classify(ctx, r.pool, rows)
	if err != nil {
		return err
	}
	var lost []event.Event
	var seqs []uint64
	highest, seen := int64(0), make(map[string]bool)
	for _, row := range rows {
		if known[row.Seq] != outbox.Unknown || seen[row.EventID] {
			continue
		}
		seen[row.EventID] = true
		m := of[row.Seq]
		e, err := event.Decode(m.Subject, m.Header, m.Data)
		if err != nil {
			return fmt.Errorf("message %d: %w", m.Seq, err)
		}
		lost, seqs, highest = append(lost, e), append(seqs, m.Seq), max(highest, e.OutboxID)
	}
	if lost, err = r.withoutDoomed(ctx, p, lost, seqs); err != nil {
		return err
	}
	if len(lost) > 0 {
		if err := outbox.RaiseIDs(ctx, r.pool, highest); err != nil {
			return err
		}
		moved, err := r.o.Redo(ctx, lost)
		if err != nil {
			return err
		}
		if err := r.o.at("redone"); err != nil {
			return err
		}
		var doomed []outbox.Published
		rows = slices.DeleteFunc(rows, func(row outbox.Published) bool {
			gone := known[row.Seq] == outbox.Unknown && slices.Contains(moved, row.EventID)
			if gone {
				doomed = append(doomed, row)
			}
			return gone
		})
		if err := r.deleteDoomed(ctx, p, doomed); err != nil {
			return err
		}
		r.redone[p.Number] += int64(len(lost))
	}
	return r.markPage(ctx, p, page[len(page)-1].Seq, rows)
}

// deleteDoomed deletes the messages of events that moved to another place.
func (r *repairer) deleteDoomed(ctx context.Context, p outbox.Partition, doomed []outbox.Published) error {
	stream, err := broker.ReadStream(ctx, r.js, r.cfg, p.Number)
	if err != nil {
		return err
	}
	return r.delete(ctx, &finding{p: p, stream: stream, doomed: doomed})
}

// withoutDoomed takes the ids from events whose messages an interrupted repair has recorded as
// deleted. That repair may be frozen, and delete them at any time later. So they get new ids, and
// the relay publishes them again.
func (r *repairer) withoutDoomed(ctx context.Context, p outbox.Partition, lost []event.Event, seqs []uint64) ([]event.Event, error) {
	stay, err := broker.NotErased(ctx, r.js, r.cfg, r.cfg.StreamName(p.Number), seqs)
	if err != nil {
		return nil, err
	}
	for i, seq := range seqs {
		if !slices.Contains(stay, seq) {
			lost[i].OutboxID = 0
		}
	}
	return lost, nil
}

// markPage marks the rows of a page of messages, unless a relay has.
func (r *repairer) markPage(ctx context.Context, p outbox.Partition, last uint64, rows []outbox.Published) error {
	for {
		now, err := outbox.ReadPartition(ctx, r.pool, p.Number)
		if err != nil || now.Tail >= last {
			return err
		}
		rows = slices.DeleteFunc(rows, func(row outbox.Published) bool { return row.Seq <= now.Tail })
		_, err = outbox.MarkCaughtUp(ctx, r.pool, p.Number, outbox.Mark{Created: now.Created, OldTail: now.Tail, NewTail: last, Rows: rows})
		if !errors.Is(err, outbox.ErrMarkFailed) || ctx.Err() != nil {
			return err
		}
	}
}
