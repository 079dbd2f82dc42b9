package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// SearchQuery says which events to search for, the latest first: of an aggregate, or of a range of time, or all; each narrowed down by what else is set.
type SearchQuery struct {
	TenantID      int64 // required with the aggregate
	AggregateType string
	AggregateID   int64 // 0: of any aggregate
	EventType     string
	Since, Until  time.Time // occurred at or after, and before
	Before        int64     // with a lower id: where the page before ended; 0 for the first page
	Limit         int
}

// Searched is a page of events, by descending id.
type Searched struct {
	Found []Found
	// Next is the Before of the next page; 0 when there is none. A page may have few events, or none, and another page behind it: one look reads a bounded number of rows.
	Next int64
	// Back is when the last row that was looked at was inserted; zero at the end.
	Back time.Time
}

const (
	searchWindow  = 20_000 // ids that one statement walks over
	searchWindows = 10     // of one page
)

// searchFilter narrows down the rows of a window.
const searchFilter = `id > @low AND id < @before
   AND (@tenant::bigint IS NULL OR tenant_id = @tenant)
   AND (@aggregate_type::text IS NULL OR aggregate_type = @aggregate_type)
   AND (@aggregate_id::bigint IS NULL OR aggregate_id = @aggregate_id)
   AND (@event_type::text IS NULL OR event_type = @event_type)
   AND (@since::timestamptz IS NULL OR occurred_at >= @since) AND (@until::timestamptz IS NULL OR occurred_at < @until)
 ORDER BY id DESC LIMIT @limit`

// searchRows read a window of each table.
// Index: the primary keys, one range.   Locks: none.
var searchRows = []string{outboxRow + searchFilter, archiveRow + searchFilter, keptRow + searchFilter, dlqRow + searchFilter}

// olderOfAggregate finds the latest rows of an aggregate, in the tables that have an index for it.
const olderOfAggregate = `(tenant_id, aggregate_type, aggregate_id) = (@tenant::bigint, @aggregate_type::text, @aggregate_id::bigint) AND id < @before
   AND (@event_type::text IS NULL OR event_type = @event_type)
   AND (@since::timestamptz IS NULL OR occurred_at >= @since) AND (@until::timestamptz IS NULL OR occurred_at < @until)
 ORDER BY id DESC LIMIT @limit`

// waitingOfAggregate finds those that wait, for which the outbox has an index too.
// Index: outbox_messages_held_idx.   Locks: none.
var waitingOfAggregate = outboxRow + `delayed AND ` + olderOfAggregate

// olderSQL finds the next row below an id, over a gap.
// Index: the primary keys, a probe of each.   Locks: none.
const olderSQL = `
SELECT /* outbox.older */ coalesce(max(id), 0), max(inserted_at) FROM (
  (SELECT id, inserted_at FROM outbox_messages WHERE id < @before ORDER BY id DESC LIMIT 1) UNION ALL
  (SELECT id, inserted_at FROM outbox_messages_archive WHERE id < @before ORDER BY id DESC LIMIT 1) UNION ALL
  (SELECT id, inserted_at FROM outbox_messages_kept WHERE id < @before ORDER BY id DESC LIMIT 1) UNION ALL
  (SELECT id, inserted_at FROM outbox_messages_dlq WHERE id < @before ORDER BY id DESC LIMIT 1)) rows`

// lowestOpenSQL reads where the outbox begins, below which the archive has an index by aggregate.
// Index: none, a row per range.   Locks: none.
const lowestOpenSQL = `SELECT /* outbox.lowest_open */ coalesce(min(from_id), 1) FROM outbox_ranges WHERE state = 'OPEN'`

// Search returns the latest events that the query selects: in the outbox, in its archive, among what is kept, and in the DLQ. Of an aggregate the archive and the DLQ are searched
// by index; the outbox, and everything where no aggregate is given, by walking down the ids, at most 200,000 of them for one page. The pool acts as the system role.
func Search(ctx context.Context, pool *pgxpool.Pool, q SearchQuery) (s Searched, err error) {
	if q.AggregateID != 0 && (q.TenantID == 0 || q.AggregateType == "") || q.Limit < 1 {
		return s, ErrFindQuery
	}
	w := walk{pool: pool, limit: q.Limit, args: pgx.NamedArgs{"tenant": ifSet(q.TenantID), "aggregate_type": ifSet(q.AggregateType), "aggregate_id": ifSet(q.AggregateID),
		"event_type": ifSet(q.EventType), "since": ifSet(q.Since), "until": ifSet(q.Until), "limit": q.Limit + 1, "payload": false}}
	first, last, err := q.ids(ctx, pool)
	if err != nil {
		return s, err
	}
	before := last + 1
	if q.Before != 0 {
		before = min(before, q.Before)
	}
	if q.AggregateID == 0 {
		return w.down(ctx, first, before, searchRows)
	}
	var open int64
	if err := pool.QueryRow(ctx, lowestOpenSQL).Scan(&open); err != nil {
		return s, fmt.Errorf("read where the outbox begins: %w", err)
	}
	if s, err = w.down(ctx, max(first, open), before, searchRows[:1]); err != nil {
		return s, err
	}
	w.args["before"] = before
	for _, sql := range []string{archiveRow + olderOfAggregate, keptRow + olderOfAggregate, dlqRow + olderOfAggregate, waitingOfAggregate} { // as far down as the outbox was read
		rows, err := w.read(ctx, sql)
		if err != nil {
			return s, err
		}
		s.Found = append(s.Found, slices.DeleteFunc(rows, func(f Found) bool { return f.OutboxID < s.Next })...)
	}
	s.cut(q.Limit)
	return s, nil
}

// ids returns the ids that the events have which occurred in the query's time.
func (q *SearchQuery) ids(ctx context.Context, pool *pgxpool.Pool) (first, last int64, err error) {
	const highest = 1<<63 - 2
	if q.Since.IsZero() && q.Until.IsZero() {
		return 0, highest, nil
	}
	until := q.Until
	if until.IsZero() {
		until = time.Now().Add(time.Hour)
	}
	if first, last, err = idsBetween(ctx, pool, q.Since.Add(-skew), until.Add(skew)); q.Since.IsZero() {
		first = 0
	}
	return first, last, err
}

// walk reads rows in descending windows of ids.
type walk struct {
	pool  *pgxpool.Pool
	args  pgx.NamedArgs
	limit int
}

func (w *walk) read(ctx context.Context, sql string) ([]Found, error) {
	rows, _ := w.pool.Query(ctx, sql, w.args)
	found, err := pgx.CollectRows(rows, readFound)
	if err != nil {
		return nil, fmt.Errorf("search events: %w", err)
	}
	return found, nil
}

// down reads windows from before down to first until it has a page.
func (w *walk) down(ctx context.Context, first, before int64, statements []string) (s Searched, err error) {
	for range searchWindows {
		var top int64
		var at *time.Time
		if err := w.pool.QueryRow(ctx, olderSQL, pgx.StrictNamedArgs{"before": before}).Scan(&top, &at); err != nil {
			return s, fmt.Errorf("look for events below %d: %w", before, err)
		}
		if top < max(first, 1) {
			s.Next, s.Back = 0, time.Time{}
			break
		}
		before = top + 1
		low := max(top-searchWindow, first-1)
		w.args["low"], w.args["before"] = low, before
		for _, sql := range statements {
			rows, err := w.read(ctx, sql)
			if err != nil {
				return s, err
			}
			s.Found = append(s.Found, rows...)
		}
		before, s.Next, s.Back = low+1, low+1, *at
		if len(s.Found) > w.limit {
			break
		}
	}
	s.cut(w.limit)
	return s, nil
}

// cut orders the page, takes what came twice because it was archived meanwhile, and leaves what is too much to the next page.
func (s *Searched) cut(limit int) {
	slices.SortFunc(s.Found, func(a, b Found) int { return cmp.Or(cmp.Compare(b.OutboxID, a.OutboxID), cmp.Compare(a.ID, b.ID)) })
	s.Found = slices.CompactFunc(s.Found, func(a, b Found) bool { return a.OutboxID == b.OutboxID && a.ID == b.ID })
	if len(s.Found) > limit {
		s.Found = s.Found[:limit]
		s.Next = s.Found[limit-1].OutboxID
		s.Back = s.Found[limit-1].InsertedAt
	}
}

const seqWindow = 20_000 // ids around a sequence's place

// probeSeqSQL reads the first row of a partition from an id on.
// Index: the primary keys, a bounded range.   Locks: none.
const probeSeqSQL = `
SELECT /* outbox.probe_sequence */ id, stream_seq FROM (
  (SELECT id, stream_seq FROM outbox_messages WHERE id >= @from AND id < @to AND partition = @partition AND stream_seq IS NOT NULL ORDER BY id LIMIT 1) UNION ALL
  (SELECT id, stream_seq FROM outbox_messages_archive WHERE id >= @from AND id < @to AND partition = @partition AND stream_seq IS NOT NULL ORDER BY id LIMIT 1)) first
 ORDER BY id LIMIT 1`

// bySeq finds the row of a sequence among some ids.
const bySeq = `id >= @first AND id <= @last AND partition = @partition AND stream_seq = @seq LIMIT 1`

// FindPublished returns the event that a sequence of a partition's stream is, of the tenant or with 0 of any; none when it does not find it. The outbox has no index by
// sequence: it looks where the sequence must be by the order of ids, which a message that was put off is not in. The stream itself knows while it has the message.
func FindPublished(ctx context.Context, pool *pgxpool.Pool, tenant int64, p Partition, seq uint64) (found []Found, err error) {
	var low, high int64
	if err := pool.QueryRow(ctx, edgesSQL).Scan(&low, &high); err != nil {
		return nil, fmt.Errorf("read the range of outbox ids: %w", err)
	}
	if p.Stream != "" { // nothing was published to it before it was there
		if first, _, err := idsBetween(ctx, pool, p.Created.Add(-skew), p.Created); err == nil {
			low = max(low, first)
		}
	}
	for a, b := low, high+1; a < b; {
		mid := a + (b-a)/2
		var id, at int64
		var inserted time.Time
		err := pool.QueryRow(ctx, probeSQL, pgx.StrictNamedArgs{"from": mid}).Scan(&id, &inserted) // over a gap
		if err == nil {
			err = pool.QueryRow(ctx, probeSeqSQL, pgx.StrictNamedArgs{"from": id, "to": id + seqWindow, "partition": p.Number}).Scan(&id, &at)
		}
		switch {
		case errors.Is(err, pgx.ErrNoRows): // others' ids alone, or none: the partition has ended
			b = mid
		case err != nil:
			return nil, fmt.Errorf("look for sequence %d of partition %d: %w", seq, p.Number, err)
		case uint64(at) >= seq:
			b, high = mid, id
		default:
			a, low = id+1, id
		}
	}
	args := pgx.NamedArgs{"first": low - seqWindow, "last": high + seqWindow, "partition": p.Number, "seq": int64(seq), "payload": false}
	for _, table := range []string{outboxRow, archiveRow, keptRow} {
		rows, _ := pool.Query(ctx, table+bySeq, args)
		some, err := pgx.CollectRows(rows, readFound)
		if err != nil {
			return nil, fmt.Errorf("read sequence %d of partition %d: %w", seq, p.Number, err)
		}
		found = append(found, slices.DeleteFunc(some, func(f Found) bool { return tenant != 0 && f.TenantID != tenant })...)
	}
	return found[:min(len(found), 1)], nil
}

// maxActions is how many of the acts on an event are read.
const maxActions = 100

// actionsOnEventSQL reads what was done to an event in the DLQ, or while it waited.
// Index: outbox_dlq_actions_event_idx.   Locks: none.
const actionsOnEventSQL = `
SELECT /* outbox.actions_on_event */ ` + actionColumns + `, 0 FROM outbox_dlq_actions
 WHERE event_id = @event::uuid AND (@tenant::bigint IS NULL OR tenant_id = @tenant) ORDER BY at, id LIMIT @limit`

// ActionsOn returns what operators did to an event in the DLQ, or while it waited, in its order; of a tenant, or with 0 of any.
func ActionsOn(ctx context.Context, pool *pgxpool.Pool, tenant int64, eventID string) ([]DLQAction, error) {
	rows, _ := pool.Query(ctx, actionsOnEventSQL, pgx.StrictNamedArgs{"event": eventID, "tenant": ifSet(tenant), "limit": maxActions})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[DLQAction])
	if err != nil {
		return nil, fmt.Errorf("read what was done to event %s: %w", eventID, err)
	}
	return all, nil
}

// IDsOf returns the outbox ids that an event has had, the lowest first.
func IDsOf(ctx context.Context, pool *pgxpool.Pool, eventID string) (ids []int64, err error) {
	if err := pool.QueryRow(ctx, idsOfEventSQL, pgx.StrictNamedArgs{"event_id": eventID}).Scan(&ids); err != nil {
		return nil, fmt.Errorf("read the ids of event %s: %w", eventID, err)
	}
	slices.Sort(ids)
	return ids, nil
}

// Place is the range that an id is in, whatever became of it. Times that have not come are zero.
type Place struct {
	From, To              int64
	State                 string // RangeOpen, RangeArchived or RangeGone
	ArchivedAt, DroppedAt time.Time
}

// rangeOfSQL reads the range of an id. Of two that were, the later one counts.
// Index: outbox_ranges_pkey.   Locks: none.
const rangeOfSQL = `
SELECT /* outbox.range_of */ from_id, to_id, state, archived_at, gone_at FROM outbox_ranges WHERE from_id <= @id AND to_id > @id ORDER BY from_id DESC LIMIT 1`

// PlaceOf returns the range that an id is in; false when none has it.
func PlaceOf(ctx context.Context, pool *pgxpool.Pool, id int64) (p Place, ok bool, err error) {
	var archived, dropped *time.Time
	err = pool.QueryRow(ctx, rangeOfSQL, pgx.StrictNamedArgs{"id": id}).Scan(&p.From, &p.To, &p.State, &archived, &dropped)
	if errors.Is(err, pgx.ErrNoRows) {
		return p, false, nil
	}
	if err != nil {
		return p, false, fmt.Errorf("read the range of message %d: %w", id, err)
	}
	if archived != nil {
		p.ArchivedAt = *archived
	}
	if dropped != nil {
		p.DroppedAt = *dropped
	}
	return p, true, nil
}
