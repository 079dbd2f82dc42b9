package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// SearchQuery selects events, latest first: of an aggregate, of a range of time, or all. All other
// fields filter further.
type SearchQuery struct {
	TenantID      int64 // required with the aggregate
	AggregateType string
	AggregateID   event.ID // "": any aggregate
	EventType     string
	State         State
	TraceID       string    // of a search without an aggregate: 32 hexadecimal digits
	Since, Until  time.Time // occurred at or after Since and before Until
	Before        int64     // only lower ids: Searched.Next of the previous page; 0 for the first page
	Limit         int
	// Windows is how many windows of 20,000 ids one page reads at most; 0 for 10. A reader who
	// returns every second asks for few.
	Windows int
}

// State is how far an event has come.
type State string

const (
	StatePending   State = "pending"   // in the outbox, and not published
	StatePublished State = "published" // in the outbox or its archive
	StateDead      State = "dead"      // in the DLQ
)

// Searched is a page of events, by descending id.
type Searched struct {
	Found []Found
	// Next is the Before of the next page; 0 at the end. A page may have few events or none
	// although another page follows: one search reads a bounded number of rows.
	Next int64
	// Back is when the last row that the search read was inserted; zero at the end.
	Back time.Time
}

const (
	searchWindow  = 20_000 // ids per statement
	searchWindows = 10     // statements per page
)

// searchFilter filters the rows of a window. Index: the primary keys, one range. Locks: none.
const searchFilter = `id > @low AND id < @before
   AND (@tenant::bigint IS NULL OR tenant_id = @tenant)
   AND (@aggregate_type::text IS NULL OR aggregate_type = @aggregate_type)
   AND (@aggregate_id::text IS NULL OR aggregate_id = @aggregate_id)
   AND (@event_type::text IS NULL OR event_type = @event_type)
   AND (@trace::text IS NULL OR substr(trace_id, 4, 32) = @trace)
   AND (@since::timestamptz IS NULL OR occurred_at >= @since) AND (@until::timestamptz IS NULL OR occurred_at < @until)
 ORDER BY id DESC LIMIT @limit`

// searchRows select the rows of each table, the outbox first, by state.
var searchRows = map[State][]string{
	"":             {outboxRow, archiveRow, keptRow, dlqRow},
	StatePending:   {outboxRow + `processed_at IS NULL AND `},
	StatePublished: {outboxRow + `processed_at IS NOT NULL AND `, archiveRow, keptRow},
	StateDead:      {dlqRow},
}

// olderOfAggregate selects the latest rows of an aggregate, in tables with an index for it.
const olderOfAggregate = `(tenant_id, aggregate_type, aggregate_id) = (@tenant::bigint, @aggregate_type::text, @aggregate_id::text)
   AND id < @before
   AND (@event_type::text IS NULL OR event_type = @event_type)
   AND (@since::timestamptz IS NULL OR occurred_at >= @since) AND (@until::timestamptz IS NULL OR occurred_at < @until)
 ORDER BY id DESC LIMIT @limit`

// waitingOfAggregate reads an aggregate's delayed rows, for which the outbox has an index.
//
// Index: outbox_messages_held_idx.   Locks: none.
var waitingOfAggregate = delayedRow + olderOfAggregate

var delayedRow = outboxRow + `delayed AND `

// olderSQL finds the next row below an id, across any gap. Index: the primary keys, one probe each.
// Locks: none.
const olderSQL = `
SELECT /* outbox.older */ coalesce(max(id), 0), max(inserted_at) FROM (
  (SELECT id, inserted_at FROM outbox_messages WHERE id < @before ORDER BY id DESC LIMIT 1) UNION ALL
  (SELECT id, inserted_at FROM outbox_messages_archive WHERE id < @before ORDER BY id DESC LIMIT 1) UNION ALL
  (SELECT id, inserted_at FROM outbox_messages_kept WHERE id < @before ORDER BY id DESC LIMIT 1) UNION ALL
  (SELECT id, inserted_at FROM outbox_messages_dlq WHERE id < @before ORDER BY id DESC LIMIT 1)) rows`

// lowestOpenSQL reads the lowest id of the outbox. Below it the archive has an index by aggregate.
//
// Index: none, a row per range.   Locks: none.
const lowestOpenSQL = `SELECT /* outbox.lowest_open */ coalesce(min(from_id), 1) FROM outbox_ranges WHERE state = 'OPEN'`

// Search returns the latest events that the query selects, in the outbox, its archive, the kept
// rows and the DLQ. For an aggregate it searches the archive and the DLQ by index, and the outbox
// by walking down the ids. Without an aggregate it walks all tables. One page walks at most 200,000
// ids, or fewer windows if the query says so. The pool acts as the system role.
func Search(ctx context.Context, pool *pgxpool.Pool, q SearchQuery) (s Searched, err error) {
	if q.AggregateID != "" && (q.TenantID == 0 || q.AggregateType == "") || q.Limit < 1 {
		return s, ErrFindQuery
	}
	tables, ok := searchRows[q.State]
	if !ok {
		return s, ErrFindQuery
	}
	w := walk{pool: pool, limit: q.Limit, windows: cmp.Or(q.Windows, searchWindows), args: pgx.NamedArgs{
		"tenant": postgres.IfSet(q.TenantID), "aggregate_type": postgres.IfSet(q.AggregateType),
		"aggregate_id": postgres.IfSet(q.AggregateID), "event_type": postgres.IfSet(q.EventType), "since": postgres.IfSet(q.Since),
		"until": postgres.IfSet(q.Until), "limit": q.Limit + 1, "payload": false, "trace": postgres.IfSet(q.TraceID),
	}}
	first, last, err := q.ids(ctx, pool)
	if err != nil {
		return s, err
	}
	before := last + 1
	if q.Before != 0 {
		before = min(before, q.Before)
	}
	if q.AggregateID == "" {
		return w.down(ctx, first, before, tables)
	}
	var open int64
	if err := pool.QueryRow(ctx, lowestOpenSQL).Scan(&open); err != nil {
		return s, fmt.Errorf("read where the outbox begins: %w", err)
	}
	indexed := slices.DeleteFunc(slices.Clone(tables), func(t string) bool { return strings.HasPrefix(t, outboxRow) })
	if q.State != StateDead {
		if s, err = w.down(ctx, max(first, open), before, tables[:1]); err != nil {
			return s, err
		}
		if q.State != StatePublished {
			indexed = append(indexed, delayedRow)
		}
	}
	w.args["before"] = before
	for _, table := range indexed { // down to the same id as the outbox
		rows, err := w.read(ctx, table+olderOfAggregate)
		if err != nil {
			return s, err
		}
		s.Found = append(s.Found, slices.DeleteFunc(rows, func(f Found) bool { return f.OutboxID < s.Next })...)
	}
	s.cut(q.Limit)
	return s, nil
}

// ids returns the range of ids of the events that occurred in the query's time.
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
	pool           *pgxpool.Pool
	args           pgx.NamedArgs
	limit, windows int
}

func (w *walk) read(ctx context.Context, sql string) ([]Found, error) {
	rows, _ := w.pool.Query(ctx, sql, w.args)
	found, err := pgx.CollectRows(rows, readFound)
	if err != nil {
		return nil, fmt.Errorf("search events: %w", err)
	}
	return found, nil
}

// down reads windows of the tables from before down to first until it has a page.
func (w *walk) down(ctx context.Context, first, before int64, tables []string) (s Searched, err error) {
	for range w.windows {
		var top int64
		var at *time.Time
		if err := w.pool.QueryRow(ctx, olderSQL, pgx.StrictNamedArgs{"before": before}).Scan(&top, &at); err != nil {
			return s, fmt.Errorf("search for events below %d: %w", before, err)
		}
		if top < max(first, 1) {
			s.Next, s.Back = 0, time.Time{}
			break
		}
		before = top + 1
		low := max(top-searchWindow, first-1)
		w.args["low"], w.args["before"] = low, before
		for _, table := range tables {
			rows, err := w.read(ctx, table+searchFilter)
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

// cut sorts the page, removes rows that came twice because they were archived meanwhile, and leaves
// the excess to the next page.
func (s *Searched) cut(limit int) {
	slices.SortFunc(s.Found, func(a, b Found) int { return cmp.Or(cmp.Compare(b.OutboxID, a.OutboxID), cmp.Compare(a.ID, b.ID)) })
	s.Found = slices.CompactFunc(s.Found, func(a, b Found) bool { return a.OutboxID == b.OutboxID && a.ID == b.ID })
	if len(s.Found) > limit {
		s.Found = s.Found[:limit]
		s.Next = s.Found[limit-1].OutboxID
		s.Back = s.Found[limit-1].InsertedAt
	}
}

const seqWindow = 20_000 // ids around the place of a sequence

// probeSeqSQL reads the first row of a partition from an id on. Index: the primary keys, a bounded
// range. Locks: none.
const probeSeqSQL = `
SELECT /* outbox.probe_sequence */ id, stream_seq FROM (
  (SELECT id, stream_seq FROM outbox_messages
    WHERE id >= @from AND id < @to AND partition = @partition AND stream_seq IS NOT NULL ORDER BY id LIMIT 1) UNION ALL
  (SELECT id, stream_seq FROM outbox_messages_archive
    WHERE id >= @from AND id < @to AND partition = @partition AND stream_seq IS NOT NULL ORDER BY id LIMIT 1)) first
 ORDER BY id LIMIT 1`

// bySeq selects the row with a sequence within a range of ids.
const bySeq = `id >= @first AND id <= @last AND partition = @partition AND stream_seq = @seq LIMIT 1`

// FindPublished returns the event with a sequence of a partition's stream, or none if it does not
// find one. Tenant 0 means any tenant. The outbox has no index by sequence, so the search uses the
// order of ids. It misses messages that were delayed, because their ids are out of that order.
// While the stream still has the message, read it there.
func FindPublished(ctx context.Context, pool *pgxpool.Pool, tenant int64, p Partition, seq uint64) (found []Found, err error) {
	var low, high int64
	if err := pool.QueryRow(ctx, edgesSQL).Scan(&low, &high); err != nil {
		return nil, fmt.Errorf("read the range of outbox ids: %w", err)
	}
	if p.Stream != "" { // no row was published to the stream before its creation
		if first, _, err := idsBetween(ctx, pool, p.Created.Add(-skew), p.Created); err == nil {
			low = max(low, first)
		}
	}
	for a, b := low, high+1; a < b; {
		mid := a + (b-a)/2
		var id, at int64
		var inserted time.Time
		err := pool.QueryRow(ctx, probeSQL, pgx.StrictNamedArgs{"from": mid}).Scan(&id, &inserted) // across any gap
		if err == nil {
			args := pgx.StrictNamedArgs{"from": id, "to": id + seqWindow, "partition": p.Number}
			err = pool.QueryRow(ctx, probeSeqSQL, args).Scan(&id, &at)
		}
		switch {
		case errors.Is(err, pgx.ErrNoRows): // only rows of other partitions, or none: the partition has ended
			b = mid
		case err != nil:
			return nil, fmt.Errorf("search for sequence %d of partition %d: %w", seq, p.Number, err)
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

// maxActions is the limit of ActionsOn.
const maxActions = 100

// actionsOnEventSQL reads the actions on an event in the DLQ or while it was delayed.
//
// Index: outbox_dlq_actions_event_idx.   Locks: none.
const actionsOnEventSQL = `
SELECT /* outbox.actions_on_event */ ` + actionColumns + `, 0 FROM outbox_dlq_actions
 WHERE event_id = @event::uuid AND (@tenant::bigint IS NULL OR tenant_id = @tenant) ORDER BY at, id LIMIT @limit`

// ActionsOn returns the actions of operators on an event in the DLQ or while it was delayed, in
// order. Tenant 0 means any tenant.
func ActionsOn(ctx context.Context, pool *pgxpool.Pool, tenant int64, eventID string) ([]DLQAction, error) {
	rows, _ := pool.Query(ctx, actionsOnEventSQL,
		pgx.StrictNamedArgs{"event": eventID, "tenant": postgres.IfSet(tenant), "limit": maxActions})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[DLQAction])
	if err != nil {
		return nil, fmt.Errorf("read the actions on event %s: %w", eventID, err)
	}
	return all, nil
}

// IDsOf returns the outbox ids that an event has had, lowest first.
func IDsOf(ctx context.Context, pool *pgxpool.Pool, eventID string) (ids []int64, err error) {
	if err := pool.QueryRow(ctx, idsOfEventSQL, pgx.StrictNamedArgs{"event_id": eventID}).Scan(&ids); err != nil {
		return nil, fmt.Errorf("read the ids of event %s: %w", eventID, err)
	}
	slices.Sort(ids)
	return ids, nil
}

// Place is the range of an id, in whatever state. Times of later states are zero.
type Place struct {
	From, To              int64
	State                 string // RangeOpen, RangeArchived or RangeGone
	ArchivedAt, DroppedAt time.Time
}

// rangeOfSQL reads the range of an id. If two ranges had it, the later one counts.
// Index: outbox_ranges_pkey. Locks: none.
const rangeOfSQL = `
SELECT /* outbox.range_of */ from_id, to_id, state, archived_at, gone_at
  FROM outbox_ranges WHERE from_id <= @id AND to_id > @id ORDER BY from_id DESC LIMIT 1`

// PlaceOf returns the range of an id, or false if no range has it.
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

// neighborSQL reads the event of an aggregate next to an id, at most at @end. The outbox has an
// index by aggregate for delayed rows only, so it reads the others from @from to @until.
//
// Index: outbox_messages_pkey, a window; outbox_messages_held_idx; the archive's and the kept
// rows' by aggregate; outbox_messages_dlq_tenant_aggregate_idx. Locks: none.
func neighborSQL(order, beyond, within string) string {
	const of = `(tenant_id, aggregate_type, aggregate_id) = (@tenant::bigint, @aggregate_type::text, @aggregate_id::text) AND id `
	all := []string{fromOutbox + of + beyond + ` @from AND id ` + within + ` @until ORDER BY id ` + order}
	for _, table := range []string{fromOutbox + `delayed AND `, fromDLQ} {
		all = append(all, table+of+beyond+` @id ORDER BY id `+order)
	}
	for _, table := range []string{fromArchive, fromKept} { // a row comparison, as in byAggregate
		all = append(all, table+of+within+` @end AND (tenant_id, aggregate_type, aggregate_id, id) `+beyond+
			` (@tenant, @aggregate_type, @aggregate_id, @id::bigint)
 ORDER BY tenant_id `+order+`, aggregate_type `+order+`, aggregate_id `+order+`, id `+order)
	}
	return `SELECT /* outbox.neighbor */ event_id::text FROM ((SELECT id, event_id` +
		strings.Join(all, ` LIMIT 1) UNION ALL (SELECT id, event_id`) + ` LIMIT 1)) n WHERE id ` + within + ` @end ORDER BY id ` + order +
		` LIMIT 1`
}

var (
	beforeSQL = neighborSQL("DESC", "<", ">=")
	afterSQL  = neighborSQL("ASC", ">", "<=")
)

// NeighborIDs is how many ids of the outbox Neighbors reads in each direction.
const NeighborIDs = searchWindow

// Neighbors returns the ids of the events of an event's aggregate before and after it. One is ""
// if there is none, or if it is unknown because it is more than NeighborIDs away in the outbox.
func Neighbors(ctx context.Context, pool *pgxpool.Pool, e event.Event) (before, after string, err error) {
	var low, high, open int64
	if err := pool.QueryRow(ctx, edgesSQL).Scan(&low, &high); err != nil {
		return "", "", fmt.Errorf("read the range of outbox ids: %w", err)
	}
	if err := pool.QueryRow(ctx, lowestOpenSQL).Scan(&open); err != nil {
		return "", "", fmt.Errorf("read where the outbox begins: %w", err)
	}
	read := func(sql string, from, until, end int64) (id string) {
		if err != nil {
			return ""
		}
		err = pool.QueryRow(ctx, sql, pgx.StrictNamedArgs{"tenant": e.TenantID, "aggregate_type": e.AggregateType,
			"aggregate_id": e.AggregateID, "id": e.OutboxID, "from": from, "until": until, "end": end}).Scan(&id)
		if errors.Is(err, pgx.ErrNoRows) {
			err = nil
		}
		return id
	}
	until := e.OutboxID - NeighborIDs
	end := until
	if until <= open { // the window has the rest of the outbox, so an event of another table is the next one
		end = 0
	}
	before = read(beforeSQL, e.OutboxID, until, end)
	from := max(e.OutboxID, open-1)
	until = from + NeighborIDs
	if end = until; until >= high {
		end = high
	}
	after = read(afterSQL, from, until, end)
	if err != nil {
		return "", "", fmt.Errorf("read the events beside %s: %w", e.ID, err)
	}
	return before, after, nil
}
