package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A row of the archive travels outside the database as a line of JSON: one object whose members are the columns, in the table's
// order. 64-bit numbers are strings, times are ISO 8601 in UTC, the payload is as jsonb prints it. The database makes the line, so
// equal rows are equal bytes.
const archiveLine = `
json_build_object('id', id::text, 'tenant_id', tenant_id::text, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id::text,
  'event_type', event_type, 'event_version', event_version, 'payload', payload, 'occurred_at', occurred_at, 'available_at', available_at,
  'processed_at', processed_at, 'attempts', attempts, 'last_error', last_error, 'trace_id', trace_id, 'event_id', event_id,
  'stream_seq', stream_seq::text, 'inserted_at', inserted_at, 'partition', partition, 'slot', slot)::text`

// archiveColumns are the columns of a line.
const archiveColumns = `id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
  processed_at, attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition, slot`

// ArchiveKey is where a row stands in the archive's order.
type ArchiveKey struct {
	OccurredAt time.Time `json:"occurred_at"`
	ID         int64     `json:"id,string"`
}

// walkArchiveSQL reads the rows of a time after a key, in order.
// Index: the partitions' primary keys (occurred_at, id).   Locks: none.
const walkArchiveSQL = `
SELECT /* outbox.walk_archive */ occurred_at, id, ` + archiveLine + `
  FROM outbox_messages_archive
 WHERE occurred_at >= @after AND occurred_at < @before AND (occurred_at, id) > (@after, @after_id)
 ORDER BY occurred_at, id LIMIT @limit`

const (
	maxArchivePage   = 5000    // rows per statement of WalkArchive, when they are small
	archivePageBytes = 4 << 20 // of lines in memory, and at most one line more
)

// WalkArchive calls fn with every archived row that occurred from from on and before before, in the order of their keys, as a
// line of JSON without its end. The line is fn's to keep. No statement is open while fn runs, so what is written meanwhile may
// be seen or not; the caller keeps others from writing. Memory is bounded, whatever the size of the archive.
func WalkArchive(ctx context.Context, pool *pgxpool.Pool, from, before time.Time, fn func(key ArchiveKey, line []byte) error) error {
	type row struct {
		key  ArchiveKey
		line []byte
	}
	after, limit := ArchiveKey{from, math.MinInt64}, 100
	for {
		var page []row
		bytes := 0
		// Planned for these values each time: a plan for any values might sort all that is left of the month for every page.
		rows, _ := pool.Query(ctx, walkArchiveSQL, pgx.QueryExecModeCacheDescribe, pgx.StrictNamedArgs{"after": after.OccurredAt, "after_id": after.ID, "before": before, "limit": limit})
		var r row
		_, err := pgx.ForEachRow(rows, []any{&r.key.OccurredAt, &r.key.ID, &r.line}, func() error {
			page, bytes = append(page, r), bytes+len(r.line)
			if bytes > archivePageBytes {
				return errPageFull
			}
			return nil
		})
		full := errors.Is(err, errPageFull)
		if err != nil && !full {
			return fmt.Errorf("read up to %d archived outbox messages after %s, %d: %w", limit, after.OccurredAt, after.ID, err)
		}
		for _, r := range page {
			if err := fn(r.key, r.line); err != nil {
				return err
			}
			after = r.key
		}
		switch {
		case full:
			limit = len(page) // what was asked for beyond was read in vain
		case len(page) < limit:
			return nil
		default:
			limit = min(2*limit, maxArchivePage)
		}
	}
}

var errPageFull = errors.New("outbox: the page is full")

// countArchiveSQL counts the rows of a time.
// Index: the partitions' primary keys, an index-only scan of the time.   Locks: none.
const countArchiveSQL = `SELECT /* outbox.count_archive */ count(*) FROM outbox_messages_archive WHERE occurred_at >= @from AND occurred_at < @before`

// CountArchive counts the archived rows that occurred from from on and before before.
func CountArchive(ctx context.Context, pool *pgxpool.Pool, from, before time.Time) (n int64, err error) {
	if err := pool.QueryRow(ctx, countArchiveSQL, pgx.StrictNamedArgs{"from": from, "before": before}).Scan(&n); err != nil {
		return 0, fmt.Errorf("count the archived outbox messages of %s to %s: %w", from, before, err)
	}
	return n, nil
}

// nextArchivedSQL finds the first row from a time on.
// Index: the partitions' primary keys, one probe of each.   Locks: none.
const nextArchivedSQL = `
SELECT /* outbox.next_archived */ occurred_at FROM outbox_messages_archive
 WHERE occurred_at >= @from AND occurred_at < @before ORDER BY occurred_at LIMIT 1`

// ArchivedMonths returns the first moments, in UTC, of the months that ended at before or earlier and of which the archive has
// rows, oldest first. Times before the year 1 belong to no month (ArchivedInNoMonth).
func ArchivedMonths(ctx context.Context, pool *pgxpool.Pool, before time.Time) (months []time.Time, err error) {
	before = monthOf(before)
	for from := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC); ; {
		var at time.Time
		err := pool.QueryRow(ctx, nextArchivedSQL, pgx.StrictNamedArgs{"from": from, "before": before}).Scan(&at)
		if errors.Is(err, pgx.ErrNoRows) {
			return months, nil
		}
		if err != nil {
			return nil, fmt.Errorf("look for archived outbox messages from %s on: %w", from, err)
		}
		month := monthOf(at)
		months, from = append(months, month), month.AddDate(0, 1, 0)
	}
}

// noMonthSQL looks for a row of before the year 1.
// Index: the partitions' primary keys, one probe of each.   Locks: none.
const noMonthSQL = `SELECT /* outbox.no_month */ EXISTS (SELECT FROM outbox_messages_archive WHERE occurred_at < '0001-01-01 00:00:00+00')`

// ArchivedInNoMonth reports whether the archive has rows that say they occurred before the year 1.
func ArchivedInNoMonth(ctx context.Context, pool *pgxpool.Pool) (any bool, err error) {
	if err := pool.QueryRow(ctx, noMonthSQL).Scan(&any); err != nil {
		return false, fmt.Errorf("look for archived outbox messages of no month: %w", err)
	}
	return any, nil
}

// restoreArchiveSQL puts lines back. A row that is there stays as it is, and one that is in the outbox again (of an older backup, or put
// back there by a repair) is to come from there. Of a payload that is null the lines say what they say of none.
// Index: the partitions' primary keys, outbox_messages_pkey.   Locks: the new rows, and those of their months.
var restoreArchiveSQL = `
WITH here AS (
  INSERT INTO outbox_messages_archive (` + archiveColumns + `)
  SELECT ` + strings.Replace(archiveColumns, "payload", "coalesce(payload, 'null')", 1) + `
    FROM json_populate_recordset(NULL::outbox_messages_archive, @lines::json) r
   WHERE NOT EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id)
      ON CONFLICT (occurred_at, id) DO NOTHING
  RETURNING occurred_at, processed_at),
counted AS (` + countMonthsSQL + `)
SELECT /* outbox.restore_archive */ count(*) FROM here`

// RestoreArchive puts rows back into the archive, given as WalkArchive gives them, and returns how many were neither there nor in the outbox.
func RestoreArchive(ctx context.Context, tx pgx.Tx, lines [][]byte) (n int64, err error) {
	if err := tx.QueryRow(ctx, restoreArchiveSQL, pgx.StrictNamedArgs{"lines": jsonArray(lines)}).Scan(&n); err != nil {
		return 0, fmt.Errorf("restore %d archived outbox messages: %w", len(lines), err)
	}
	return n, nil
}

// canonicalArchiveSQL makes a line what it would be had it come from the table.
const canonicalArchiveSQL = `
SELECT /* outbox.canonical_archive */ ` + archiveLine + ` FROM json_populate_record(NULL::outbox_messages_archive, @line::json)`

// CanonicalArchiveLine returns the line as WalkArchive would give it, had the archive such a row.
func CanonicalArchiveLine(ctx context.Context, pool *pgxpool.Pool, line []byte) (canonical []byte, err error) {
	if err := pool.QueryRow(ctx, canonicalArchiveSQL, pgx.StrictNamedArgs{"line": string(line)}).Scan(&canonical); err != nil {
		return nil, fmt.Errorf("bring an archived outbox message of %d bytes into its form: %w", len(line), err)
	}
	return canonical, nil
}

func jsonArray(lines [][]byte) string {
	n := 1 + len(lines)
	for _, l := range lines {
		n += len(l)
	}
	b := append(make([]byte, 0, n), '[')
	for i, l := range lines {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, l...)
	}
	return string(append(b, ']'))
}
