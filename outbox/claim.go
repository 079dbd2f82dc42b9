package outbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// Row is a claimed outbox message: its event, and how often it has failed.
type Row struct {
	event.Event
	Attempts int
}

// Batch is what a claim found of one partition, in id order.
type Batch struct {
	Partition int
	Rows      []Row   // due, and with no earlier row of their aggregate put off
	Held      []int64 // ids of rows behind one of their aggregate that is put off; Park takes them out of the way
	More      bool    // the limit ended the batch, so there may be more
}

// claimSQL reads the pending rows of several partitions in one round trip. It takes no lock: who may publish is decided by the
// stream (the tail check), and who tries by the leases. A row is held when an earlier one of its aggregate is put off.
// Partition and id are compared and ordered as a pair, because only the pending index has that order: of "partition = p ORDER BY
// id" the planner thinks that the primary key serves it, when most rows were pending at the last ANALYZE, and then filters.
// The floors are of the same snapshot as the rows.
// Index: outbox_messages_pending_idx, one range scan per partition from its floor; outbox_messages_held_idx, one probe per row, empty but for failures.
const claimSQL = `
SELECT /* outbox.claim */ m.partition::int, m.id, m.event_id::text, m.tenant_id, m.aggregate_type, m.aggregate_id, m.event_type,
       m.event_version::int, m.payload::text, m.occurred_at, coalesce(m.trace_id, ''), m.attempts::int,
       EXISTS (SELECT FROM outbox_messages d
                WHERE d.tenant_id = m.tenant_id AND d.aggregate_type = m.aggregate_type AND d.aggregate_id = m.aggregate_id
                  AND d.id < m.id AND d.processed_at IS NULL AND d.delayed) AS held
  FROM outbox_partitions p
 CROSS JOIN LATERAL (
       SELECT * FROM outbox_messages
        WHERE (partition, id) > (p.partition, p.floor) AND (partition, id) < (p.partition + 1::smallint, 0) AND processed_at IS NULL AND NOT delayed
        ORDER BY partition, id LIMIT @limit) m
 WHERE p.partition = ANY(@partitions::smallint[])`

// errEnough ends the reading of a claim early: what it has fills the memory that it may take.
var errEnough = errors.New("enough")

// Claim returns up to limit pending messages and about maxBytes of payload of each of the partitions, and about maxTotal
// bytes in all, oldest id first. A partition without any is left out. Read the tail of each partition before calling it
// (docs/adr/0003-exactly-once-publish.md). Cost: one index range scan per partition, whatever the backlog.
func Claim(ctx context.Context, pool *pgxpool.Pool, partitions []int, limit, maxBytes, maxTotal int) ([]Batch, error) {
	type filling struct {
		Batch
		bytes, seen int
	}
	found := make(map[int]*filling, len(partitions))
	var (
		row     Row
		payload pgtype.DriverBytes // valid until the next row
		held    bool
		total   int
	)
	rows, _ := pool.Query(ctx, claimSQL, pgx.StrictNamedArgs{"partitions": partitions, "limit": limit})
	_, err := pgx.ForEachRow(rows, []any{
		&row.Partition, &row.OutboxID, &row.ID, &row.TenantID, &row.AggregateType, &row.AggregateID, &row.Type,
		&row.Version, &payload, &row.OccurredAt, &row.TraceParent, &row.Attempts, &held,
	}, func() error {
		b := found[row.Partition]
		if b == nil {
			b = &filling{Batch: Batch{Partition: row.Partition}}
			found[row.Partition] = b
		}
		b.seen++
		switch {
		case b.bytes > 0 && b.bytes+len(payload) > maxBytes:
			b.bytes, b.More = maxBytes, true // nothing after a row that is left out: the order would break
			return nil
		case held:
			b.Held = append(b.Held, row.OutboxID)
		default:
			r := row
			r.Payload = append(json.RawMessage(nil), payload...)
			b.Rows = append(b.Rows, r)
			b.bytes += len(payload)
			total += len(payload)
		}
		if b.seen == limit {
			b.More = true
		}
		if total >= maxTotal {
			b.More = true
			return errEnough
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, fmt.Errorf("claim from %d partitions: %w", len(partitions), err)
	}
	batches := make([]Batch, 0, len(found))
	for _, b := range found {
		if !slices.IsSortedFunc(b.Rows, func(x, y Row) int { return cmp.Compare(x.OutboxID, y.OutboxID) }) {
			return nil, fmt.Errorf("claim from %d partitions: the rows of partition %d came out of order", len(partitions), b.Partition)
		}
		batches = append(batches, b.Batch)
	}
	slices.SortFunc(batches, func(x, y Batch) int { return x.Partition - y.Partition })
	return batches, nil
}

// parkSQL puts held rows off until the last of the rows that hold them falls due, so that no claim meets them before.
// Index: outbox_messages_pkey, outbox_messages_held_idx.   Locks: the rows.
const parkSQL = `
UPDATE /* outbox.park */ outbox_messages m SET available_at = hold.until, released_at = NULL
  FROM unnest(@ids::bigint[]) AS p(id)
  JOIN outbox_messages r ON r.id = p.id
 CROSS JOIN LATERAL (
       SELECT max(d.available_at) AS until FROM outbox_messages d
        WHERE d.tenant_id = r.tenant_id AND d.aggregate_type = r.aggregate_type AND d.aggregate_id = r.aggregate_id
          AND d.id < r.id AND d.processed_at IS NULL AND d.delayed) hold
 WHERE m.id = r.id AND m.processed_at IS NULL AND hold.until > m.available_at`

// Park puts the held rows of a claim off until what holds them falls due.
func Park(ctx context.Context, pool *pgxpool.Pool, ids []int64) error {
	if _, err := pool.Exec(ctx, parkSQL, pgx.StrictNamedArgs{"ids": ids}); err != nil {
		return fmt.Errorf("park %d held rows: %w", len(ids), err)
	}
	return nil
}

// releaseSQL puts rows that have fallen due back among those that a claim finds, at most limit per partition, and takes the floors back
// to below them. The partition comes first: RaiseFloors sees a released row, or the row's release sees the raised floor.
// It passes over partitions that a mark holds now, so it waits for none.
// Index: outbox_messages_delayed_idx, one range scan per partition; outbox_messages_pkey.   Locks: the partition rows, the rows.
const releaseSQL = `
WITH ask AS (
  SELECT partition FROM outbox_partitions p
   WHERE partition = ANY(@partitions::smallint[])
     AND EXISTS (SELECT FROM outbox_messages m WHERE m.partition = p.partition AND m.processed_at IS NULL AND m.delayed AND m.available_at <= now())
     FOR UPDATE SKIP LOCKED),
due AS MATERIALIZED (
  SELECT ask.partition, d.id FROM ask
   CROSS JOIN LATERAL (
         SELECT id FROM outbox_messages
          WHERE partition = ask.partition AND processed_at IS NULL AND delayed AND available_at <= now()
          ORDER BY available_at LIMIT @limit) d),
lowered AS (
  UPDATE outbox_partitions p SET floor = least(p.floor, d.first - 1)
    FROM (SELECT partition, min(id) AS first FROM due GROUP BY partition) d WHERE p.partition = d.partition
  RETURNING p.partition)
UPDATE /* outbox.release */ outbox_messages SET released_at = now()
 WHERE id IN (SELECT due.id FROM due JOIN lowered USING (partition))
RETURNING partition::int`

// Release puts up to limit rows of each partition that were put off and have fallen due back among the claimable ones, and returns the
// partition of each. Call it again until it returns none. Cost: one index probe per partition when none is due.
func Release(ctx context.Context, pool *pgxpool.Pool, partitions []int, limit int) ([]int, error) {
	rows, _ := pool.Query(ctx, releaseSQL, pgx.StrictNamedArgs{"partitions": partitions, "limit": limit})
	released, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return nil, fmt.Errorf("release due rows of %d partitions: %w", len(partitions), err)
	}
	return released, nil
}

// Failure is a row that cannot be published as it is.
type Failure struct {
	Row   Row
	Error string
}

// MaxAttempts is how often a row may fail before it is moved to the DLQ (the spec's "attempts > 10").
const MaxAttempts = 10

// failSQL counts a failure of each row and puts it off by 30 s per attempt, 4 minutes at most; past max attempts it moves it
// to the DLQ. attempts is compared, so that two relays at once count one failure.
// Index: outbox_messages_pkey.   Locks: the rows.
const failSQL = `
WITH failed AS (SELECT * FROM unnest(@ids::bigint[], @event_ids::uuid[], @attempts::smallint[], @errors::text[]) AS f(id, event_id, attempts, error)),
dead AS (
  DELETE FROM outbox_messages m USING failed f
   WHERE m.id = f.id AND m.event_id = f.event_id AND m.attempts = f.attempts AND m.processed_at IS NULL AND m.attempts >= @max::int
  RETURNING m.*, f.error),
moved AS (
  INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         available_at, attempts, last_error, trace_id, event_id, inserted_at, partition)
  SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         available_at, attempts + 1, error, trace_id, event_id, inserted_at, partition FROM dead
  RETURNING 1),
put_off AS (
  UPDATE outbox_messages m SET attempts = m.attempts + 1, last_error = f.error, released_at = NULL,
         available_at = now() + LEAST(m.attempts + 1, 8) * interval '30 seconds'
    FROM failed f
   WHERE m.id = f.id AND m.event_id = f.event_id AND m.attempts = f.attempts AND m.processed_at IS NULL AND m.attempts < @max::int
  RETURNING 1)
SELECT /* outbox.fail */ (SELECT count(*) FROM put_off)::int, (SELECT count(*) FROM moved)::int`

// Fail counts a failure of each row: it is put off, or moved to the DLQ past MaxAttempts. It returns how many went either way.
func Fail(ctx context.Context, pool *pgxpool.Pool, failures []Failure) (putOff, dead int, err error) {
	n := len(failures)
	ids, eventIDs, attempts, texts := make([]int64, n), make([]string, n), make([]int16, n), make([]string, n)
	for i, f := range failures {
		ids[i], eventIDs[i], attempts[i], texts[i] = f.Row.OutboxID, f.Row.ID, int16(f.Row.Attempts), f.Error
	}
	err = pool.QueryRow(ctx, failSQL, pgx.StrictNamedArgs{
		"ids": ids, "event_ids": eventIDs, "attempts": attempts, "errors": texts, "max": MaxAttempts,
	}).Scan(&putOff, &dead)
	if err != nil {
		return 0, 0, fmt.Errorf("count the failures of %d rows: %w", n, err)
	}
	return putOff, dead, nil
}
