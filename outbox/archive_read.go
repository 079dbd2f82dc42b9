package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// archiveLine is a row of the archive as a line of JSON, for use outside the database. It is one
// object with the columns in the table's order. 64-bit numbers are strings, times are ISO 8601 in
// UTC, and the payload is in jsonb's form. The database makes the line, so equal rows give equal
// bytes.
const archiveLine = `
json_build_object('id', id::text, 'tenant_id', tenant_id::text, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id,
  'event_type', event_type, 'event_version', event_version, 'payload', payload, 'occurred_at', occurred_at, 'available_at', available_at,
  'processed_at', processed_at, 'attempts', attempts, 'last_error', last_error, 'trace_id', trace_id, 'event_id', event_id,
  'stream_seq', stream_seq::text, 'inserted_at', inserted_at, 'partition', partition, 'slot', slot)::text`

// insertColumns are the columns of a line that the table does not compute.
const insertColumns = `id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
  processed_at, attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition`

// ArchiveKey names a row of the archive, and has the time of its event.
type ArchiveKey struct {
	OccurredAt time.Time `json:"occurred_at"`
	ID         int64     `json:"id,string"`
}

// toldSQL excludes heartbeats: nobody needs old ones.
const toldSQL = `aggregate_type <> '` + event.AggregateHeartbeat + `'`

// walkArchiveSQL reads the rows of a range after an id, in order. Index: the range's primary key.
// Locks: none.
const walkArchiveSQL = `
SELECT /* outbox.walk_archive */ occurred_at, id, ` + archiveLine + `
  FROM outbox_messages_archive WHERE id > @after AND id < @to AND ` + toldSQL + ` ORDER BY id LIMIT @limit`

const (
	maxArchivePage   = 5000    // rows per statement of WalkArchive, if they are small
	archivePageBytes = 4 << 20 // bytes of lines in memory, plus at most one line
)

// WalkArchive calls fn for every archived row with an id of at least from and below to, by id,
// except heartbeats. line is the row as a line of JSON without a newline; fn may keep it. An error
// of fn ends the walk.
//
// No statement is open while fn runs, so the walk may or may not see concurrent writes: the caller
// must prevent these. Memory is bounded for any size of the archive.
func WalkArchive(ctx context.Context, pool *pgxpool.Pool, from, to int64, fn func(key ArchiveKey, line []byte) error) error {
	type row struct {
		key  ArchiveKey
		line []byte
	}
	after, limit := from-1, 100
	for {
		var page []row
		bytes := 0
		rows, _ := pool.Query(ctx, walkArchiveSQL, pgx.StrictNamedArgs{"after": after, "to": to, "limit": limit})
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
			return fmt.Errorf("read up to %d archived outbox messages after %d: %w", limit, after, err)
		}
		for _, r := range page {
			if err := fn(r.key, r.line); err != nil {
				return err
			}
			after = r.key.ID
		}
		switch {
		case full:
			limit = len(page) // the rest of the statement's rows were read in vain
		case len(page) < limit:
			return nil
		default:
			limit = min(2*limit, maxArchivePage)
		}
	}
}

var errPageFull = errors.New("outbox: the page is full")

// anyArchivedSQL checks whether a range of ids has rows other than heartbeats.
//
// Index: the range's primary key, its first entries.   Locks: none.
const anyArchivedSQL = `
SELECT /* outbox.any_archived */ EXISTS (SELECT FROM outbox_messages_archive WHERE id >= @from AND id < @to AND ` + toldSQL + `)`

// AnyArchived reports whether the archive has a row with an id of at least from and below to, other
// than a heartbeat.
func AnyArchived(ctx context.Context, pool *pgxpool.Pool, from, to int64) (some bool, err error) {
	if err := pool.QueryRow(ctx, anyArchivedSQL, pgx.StrictNamedArgs{"from": from, "to": to}).Scan(&some); err != nil {
		return false, fmt.Errorf("search for archived outbox messages from %d to %d: %w", from, to, err)
	}
	return some, nil
}

// restoreArchiveSQL adds lines of a time range to the kept rows, unless the outbox or the archive
// has the row. A line does not distinguish a JSON null payload from a missing one, so it restores a
// JSON null.
//
// Index: outbox_messages_pkey, the ranges' primary keys, outbox_messages_kept_pkey. Locks: the new
// rows.
var restoreArchiveSQL = `
WITH here AS (
  INSERT INTO outbox_messages_kept (` + insertColumns + `)
  SELECT ` + strings.Replace(insertColumns, "payload", "coalesce(payload, 'null')", 1) + `
    FROM json_populate_recordset(NULL::outbox_messages_kept, @lines::json) r
   WHERE r.occurred_at >= @from AND r.occurred_at < @before
     AND NOT EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id)
     AND NOT EXISTS (SELECT FROM outbox_messages_archive a WHERE a.id = r.id AND a.event_id = r.event_id)
      ON CONFLICT (id, event_id) DO NOTHING
  RETURNING 1)
SELECT /* outbox.restore_archive */ count(*) FROM here`

// RestoreArchive adds rows that occurred at from or later and before before to the kept rows. The
// lines are as WalkArchive gives them. It returns the number of rows that no table had.
func RestoreArchive(ctx context.Context, tx pgx.Tx, lines [][]byte, from, before time.Time) (n int64, err error) {
	args := pgx.StrictNamedArgs{"lines": jsonArray(lines), "from": from, "before": before}
	if err := tx.QueryRow(ctx, restoreArchiveSQL, args).Scan(&n); err != nil {
		return 0, fmt.Errorf("restore %d archived outbox messages: %w", len(lines), err)
	}
	return n, nil
}

// canonicalArchiveSQL gives a line the form that it would have if it came from the table.
const canonicalArchiveSQL = `
SELECT /* outbox.canonical_archive */ ` + archiveLine + ` FROM json_populate_record(NULL::outbox_messages_kept, @line::json)`

// CanonicalArchiveLine returns the line in the form that WalkArchive would give it.
func CanonicalArchiveLine(ctx context.Context, pool *pgxpool.Pool, line []byte) (canonical []byte, err error) {
	if err := pool.QueryRow(ctx, canonicalArchiveSQL, pgx.StrictNamedArgs{"line": string(line)}).Scan(&canonical); err != nil {
		return nil, fmt.Errorf("normalize an archived outbox message of %d bytes: %w", len(line), err)
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
