package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// The table that holds an event's row.
const (
	InOutbox  = "outbox"
	InArchive = "archive"
	InDLQ     = "dlq"
)

// Found is an event's row and the table that holds it.
type Found struct {
	event.Event // Payload only if the query asks for it
	Where       string
	Partition   int    // the partition that published it; -1 before
	StreamSeq   uint64 // 0 if not on the stream, or erased
	ProcessedAt time.Time
	Attempts    int
	LastError   string
	InsertedAt  time.Time // when the row was written
	DeadAt      time.Time // when the row moved to the DLQ; zero elsewhere
}

// FindQuery selects events by exactly one of OutboxID, EventID, the aggregate, or the time alone.
type FindQuery struct {
	OutboxID      int64
	EventID       string
	TenantID      int64 // required with the aggregate; a filter for the others
	AggregateType string
	AggregateID   event.ID
	EventType     string    // a filter; "" for all
	Since, Until  time.Time // occurred at or after Since and before Until; required if nothing else selects
	Limit         int
	Payload       bool
}

// ErrFindQuery reports a query for which no index exists.
var ErrFindQuery = errors.New("outbox: find needs an id, an event id, an aggregate with its tenant, or a range of time")

// findColumns returns the select list for a table. The outbox and the DLQ lack some columns.
func findColumns(where, processed, partition, seq, dead string) string {
	return `'` + where + `', id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, event_version::int,
       CASE WHEN @payload::boolean THEN payload::text END, occurred_at, coalesce(trace_id, ''), slot::int, ` + processed + `, ` +
		partition + `, coalesce(` + seq + `, 0),
       attempts::int, coalesce(last_error, ''), inserted_at, ` + dead
}

// ofType is a part of all filters.
const ofType = ` AND (@event_type::text IS NULL OR event_type = @event_type)`

// findFilter filters the rows that the index found.
const findFilter = `
   AND (@tenant::bigint IS NULL OR tenant_id = @tenant)` + ofType + `
   AND (@since::timestamptz IS NULL OR occurred_at >= @since) AND (@until::timestamptz IS NULL OR occurred_at < @until)`

const fromArchive, fromKept, fromDLQ, fromOutbox = ` FROM outbox_messages_archive WHERE `, ` FROM outbox_messages_kept WHERE `,
	` FROM outbox_messages_dlq WHERE `, ` FROM outbox_messages WHERE `

// The statements of Find. Each reads rows in the order of an index and stops at the limit. Locks:
// none.
var (
	archiveRow = `SELECT /* outbox.find */ ` + findColumns(InArchive, "processed_at", "partition", "stream_seq", "NULL::timestamptz") +
		fromArchive
	keptRow = `SELECT /* outbox.find */ ` + findColumns(InArchive, "processed_at", "partition", "stream_seq", "NULL::timestamptz") +
		fromKept
	dlqRow    = `SELECT /* outbox.find */ ` + findColumns(InDLQ, "NULL::timestamptz", "NULL::int", "NULL::bigint", "dead_at") + fromDLQ
	outboxRow = `SELECT /* outbox.find */ ` + findColumns(InOutbox, "processed_at", "partition", "stream_seq", "NULL::timestamptz") +
		fromOutbox
	byID    = `id = @id` + findFilter + ` LIMIT @limit`
	byEvent = `event_id = @event_id::uuid` + findFilter + ` LIMIT @limit`
	// The event_id contains the first id of an event (docs/adr/0010-outbox-archive.md).
	// idsOfEventSQL reads its later ids. Find passes one id at a time: for a list, the generic plan
	// would search every range.
	byIDAndEvent = `id = @id AND event_id = @event_id::uuid` + findFilter + ` LIMIT @limit`
	// A row comparison, not equalities: for an aggregate with many rows the planner would use the
	// index by id, and filter.
	byAggregate = `(tenant_id, aggregate_type, aggregate_id, id) >= (@tenant::bigint, @aggregate_type::text, @aggregate_id::text, 0)
   AND (tenant_id, aggregate_type, aggregate_id, id) <=
       (@tenant::bigint, @aggregate_type::text, @aggregate_id::text, 9223372036854775807)` + ofType + `
   AND (@since::timestamptz IS NULL OR occurred_at >= @since) AND (@until::timestamptz IS NULL OR occurred_at < @until)
 ORDER BY tenant_id, aggregate_type, aggregate_id, id LIMIT @limit`
	dlqByAggregate = `tenant_id = @tenant AND aggregate_type = @aggregate_type AND aggregate_id = @aggregate_id` + findFilter +
		` ORDER BY id LIMIT @limit`
	byTime = `occurred_at >= @since AND occurred_at < @until AND (@tenant::bigint IS NULL OR tenant_id = @tenant)` + ofType +
		` ORDER BY occurred_at, id LIMIT @limit`
	// The outbox and the archive have no index by time. Ids are in the order of insertion, and Find
	// first looks up the ids of the time range.
	byIDRange = `id >= @first AND id <= @last` + findFilter + ` ORDER BY id LIMIT @limit`
)

// skew is the longest time between the occurrence of an event and the insertion of its row, in
// either order, with which a query by time still finds the event.
const skew = 10 * time.Minute

// Find returns at most Limit events that the query selects. A query by time returns them by time of
// occurrence, any other by id. Find searches all tables. By time it finds events of the outbox and
// the archive only if they occurred at most skew before or after their insertion. By aggregate it
// reads the whole outbox, which has no index for that: about two seconds per million messages.
//
// The pool acts as the system role. A row that is archived during the call may come twice.
func Find(ctx context.Context, pool *pgxpool.Pool, q FindQuery) ([]Found, error) {
	args := q.args()
	plan, err := q.plan(ctx, pool, args)
	if err != nil {
		return nil, err
	}
	var all []Found
	if q.AggregateID != "" {
		if all, err = inOutbox(ctx, pool, args, q.Limit); err != nil {
			return nil, err
		}
	}
	find := func(sql string) error {
		rows, _ := pool.Query(ctx, sql, args)
		found, err := pgx.CollectRows(rows, readFound)
		if err != nil {
			return fmt.Errorf("find events: %w", err)
		}
		all = append(all, found...)
		return nil
	}
	if plan.once != "" {
		if err := find(plan.once); err != nil {
			return nil, err
		}
	}
	for _, args["id"] = range plan.ids {
		for _, sql := range plan.statements {
			if err := find(sql); err != nil {
				return nil, err
			}
		}
	}
	slices.SortFunc(all, plan.order)
	return all[:min(len(all), q.Limit)], nil
}

func (q FindQuery) args() pgx.NamedArgs {
	args := pgx.NamedArgs{
		"id": q.OutboxID, "event_id": q.EventID, "tenant": postgres.IfSet(q.TenantID), "aggregate_type": q.AggregateType,
		"aggregate_id": q.AggregateID, "event_type": nil, "since": nil, "until": nil, "limit": q.Limit, "payload": q.Payload,
	}
	if q.EventType != "" {
		args["event_type"] = q.EventType
	}
	if !q.Since.IsZero() {
		args["since"] = q.Since
	}
	if !q.Until.IsZero() {
		args["until"] = q.Until
	}
	return args
}

// findPlan has the statements of a query.
type findPlan struct {
	once       string   // or ""
	statements []string // for each id
	ids        []int64
	order      func(a, b Found) int
}

// plan returns the plan of a query by time, id, event or aggregate. It completes the arguments.
func (q FindQuery) plan(ctx context.Context, pool *pgxpool.Pool, args pgx.NamedArgs) (p findPlan, err error) {
	p.statements, p.ids = []string{outboxRow + byID, archiveRow + byID, keptRow + byID, dlqRow + byID}, []int64{q.OutboxID}
	p.order = func(a, b Found) int { return cmp.Compare(a.OutboxID, b.OutboxID) }
	switch {
	case q.OutboxID != 0:
	case q.EventID != "":
		if err := pool.QueryRow(ctx, idsOfEventSQL, pgx.StrictNamedArgs{"event_id": q.EventID}).Scan(&p.ids); err != nil {
			return p, fmt.Errorf("read the ids of event %s: %w", q.EventID, err)
		}
		p.once = dlqRow + byEvent // the DLQ has an index by event
		p.statements = []string{outboxRow + byIDAndEvent, archiveRow + byIDAndEvent, keptRow + byIDAndEvent}
	case q.AggregateType != "" && q.AggregateID != "" && q.TenantID != 0:
		p.statements = []string{archiveRow + byAggregate, keptRow + byAggregate, dlqRow + dlqByAggregate}
	case !q.Since.IsZero() && q.AggregateType == "" && q.AggregateID == "":
		if q.Until.IsZero() {
			args["until"] = time.Now().Add(time.Hour)
		}
		first, last, err := idsBetween(ctx, pool, q.Since.Add(-skew), args["until"].(time.Time).Add(skew))
		if err != nil {
			return p, err
		}
		args["first"], args["last"] = first, last
		p.statements = []string{outboxRow + byIDRange, archiveRow + byIDRange, keptRow + byTime, dlqRow + byTime}
		p.order = func(a, b Found) int {
			return cmp.Or(a.OccurredAt.Compare(b.OccurredAt), cmp.Compare(a.OutboxID, b.OutboxID))
		}
	default:
		return p, ErrFindQuery
	}
	return p, nil
}

// inOutbox returns an aggregate's rows with the lowest ids in the outbox. It reads the open ranges,
// and the delayed rows below them by their index.
func inOutbox(ctx context.Context, pool *pgxpool.Pool, args pgx.NamedArgs, limit int) (all []Found, err error) {
	w := walk{pool: pool, args: maps.Clone(args), limit: math.MaxInt, windows: searchWindows}
	w.args["before"], w.args["limit"] = int64(math.MaxInt64), searchWindow
	if all, err = w.read(ctx, waitingOfAggregate); err != nil {
		return nil, err
	}
	var open int64
	if err := pool.QueryRow(ctx, lowestOpenSQL).Scan(&open); err != nil {
		return nil, fmt.Errorf("read where the outbox begins: %w", err)
	}
	for before := int64(math.MaxInt64); before != 0; {
		s, err := w.down(ctx, open, before, []string{outboxRow})
		if err != nil {
			return nil, err
		}
		s.Found = append(s.Found, all...)
		s.cut(math.MaxInt)
		all, before = s.Found[max(0, len(s.Found)-limit):], s.Next // the lowest ids are last
	}
	return all, nil
}

func readFound(row pgx.CollectableRow) (f Found, err error) {
	var payload *string
	var processed, dead *time.Time
	var seq int64
	var partition *int
	err = row.Scan(&f.Where, &f.OutboxID, &f.ID, &f.TenantID, &f.AggregateType, &f.AggregateID, &f.Type, &f.Version,
		&payload, &f.OccurredAt, &f.TraceParent, &f.Slot, &processed, &partition, &seq, &f.Attempts, &f.LastError, &f.InsertedAt, &dead)
	if dead != nil {
		f.DeadAt = *dead
	}
	if payload != nil {
		f.Payload = []byte(*payload)
	}
	if processed != nil {
		f.ProcessedAt = *processed
	}
	f.Partition, f.StreamSeq = -1, uint64(seq)
	if partition != nil {
		f.Partition = *partition
	}
	return f, err
}

// idsOfEventSQL reads the ids that an event has had. The event_id begins with its first id. The
// others came by a retry from the DLQ or by a repair.
//
// Index: outbox_dlq_actions_event_idx, outbox_requeued_pkey.   Locks: none.
const idsOfEventSQL = `
SELECT /* outbox.ids_of_event */ array_agg(id) FROM (
  SELECT ('x' || left(translate(@event_id::uuid::text, '-', ''), 12))::bit(48)::bigint AS id
  UNION SELECT new_id FROM outbox_dlq_actions WHERE event_id = @event_id AND new_id IS NOT NULL
  UNION SELECT id FROM outbox_requeued WHERE event_id = @event_id) ids`

// probeSQL reads when the first message from an id on was inserted.
//
// Index: the ranges' primary keys, one probe each.   Locks: none.
const probeSQL = `
SELECT id, inserted_at FROM (
  (SELECT id, inserted_at FROM outbox_messages WHERE id >= @from ORDER BY id LIMIT 1) UNION ALL
  (SELECT id, inserted_at FROM outbox_messages_archive WHERE id >= @from ORDER BY id LIMIT 1)) first ORDER BY id LIMIT 1`

// edgesSQL reads the lowest and highest id of the ranges. Rows that were delayed for long are below
// the first range.
//
// Index: none, a row per range.   Locks: none.
const edgesSQL = `SELECT coalesce(min(from_id), 1), (` + lastIDSQL + `) FROM outbox_ranges WHERE state <> 'GONE'`

// idsBetween returns the ids of rows inserted from since up to until, by bisection with about 40
// probes. Ids and times of insertion rise together, except for overlapping transactions. skew is
// much longer than these.
func idsBetween(ctx context.Context, pool *pgxpool.Pool, since, until time.Time) (first, last int64, err error) {
	var low, high int64
	if err := pool.QueryRow(ctx, edgesSQL).Scan(&low, &high); err != nil {
		return 0, 0, fmt.Errorf("read the range of outbox ids: %w", err)
	}
	at := func(t time.Time) (int64, error) { // returns the first id whose row was inserted at t or later
		a, b := low, high+1
		for a < b {
			mid := a + (b-a)/2
			var id int64
			var inserted time.Time
			err := pool.QueryRow(ctx, probeSQL, pgx.StrictNamedArgs{"from": mid}).Scan(&id, &inserted)
			switch {
			case errors.Is(err, pgx.ErrNoRows) || err == nil && !inserted.Before(t):
				b = mid
			case err != nil:
				return 0, fmt.Errorf("search for the first message inserted at %s: %w", t, err)
			default:
				a = id + 1
			}
		}
		return a, nil
	}
	if first, err = at(since); err != nil {
		return 0, 0, err
	}
	last, err = at(until)
	return first, last - 1, err
}

// countPublishedSQL counts a partition's published rows and the distinct sequences that they name,
// including archived rows.
//
// Index: none, it reads everything.   Locks: none.
const countPublishedSQL = `
SELECT /* outbox.count_published */ count(stream_seq), count(DISTINCT stream_seq)
  FROM (SELECT stream_seq FROM outbox_messages WHERE partition = @partition AND stream_seq >= @first
        UNION ALL
        SELECT stream_seq FROM outbox_messages_archive WHERE partition = @partition AND stream_seq >= @first) published`

// CountPublished counts the rows of a partition whose stream sequence is at least first, and their
// distinct sequences. Both numbers equal the stream's messages from first on, unless an erasure
// deleted some of those. It reads every row, so use it only for verification.
func CountPublished(ctx context.Context, pool *pgxpool.Pool, partition int, first uint64) (rows, distinct int64, err error) {
	args := pgx.StrictNamedArgs{"partition": partition, "first": int64(first)}
	if err := pool.QueryRow(ctx, countPublishedSQL, args).Scan(&rows, &distinct); err != nil {
		return 0, 0, fmt.Errorf("count the published outbox messages of partition %d: %w", partition, err)
	}
	return rows, distinct, nil
}

// inPlaceSQL finds the messages whose rows name their sequence.
//
// Index: outbox_messages_pkey, the primary keys of the archive's ranges.   Locks: none.
const inPlaceSQL = `
SELECT /* outbox.in_place */ r.seq FROM unnest(@ids::bigint[], @event_ids::uuid[], @seqs::bigint[]) AS r(id, event_id, seq)
 WHERE EXISTS (SELECT FROM outbox_messages m
                WHERE m.id = r.id AND m.event_id = r.event_id AND m.partition = @partition AND m.stream_seq = r.seq)
    OR EXISTS (SELECT FROM outbox_messages_archive a
                WHERE a.id = r.id AND a.event_id = r.event_id AND a.partition = @partition AND a.stream_seq = r.seq)`

// InPlace returns the sequences of a partition's messages whose rows name that sequence. Any other
// message has no row, or its event is on a stream more than once. Classify distinguishes the two.
func InPlace(ctx context.Context, pool *pgxpool.Pool, partition int, messages []Published) (map[uint64]bool, error) {
	args := (&Mark{Rows: messages}).args(partition)
	in := make(map[uint64]bool, len(messages))
	var seq uint64
	rows, _ := pool.Query(ctx, inPlaceSQL, pgx.StrictNamedArgs{"partition": partition, "ids": args["ids"],
		"event_ids": args["event_ids"], "seqs": args["seqs"]})
	if _, err := pgx.ForEachRow(rows, []any{&seq}, func() error { in[seq] = true; return nil }); err != nil {
		return nil, fmt.Errorf("look up the rows of %d messages of partition %d: %w", len(messages), partition, err)
	}
	return in, nil
}
