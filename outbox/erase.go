package outbox

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Selection names the events of one aggregate type. What their payloads say is the caller's to read, as whoever applies them does.
type Selection struct {
	TenantID      int64
	AggregateType string
	AggregateIDs  []int64 // in the archive, of which nobody reads all
}

// Querier is a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// The tables that hold payloads. A retry takes a message from the DLQ to the outbox, an archiver from there to the archive: a sweep goes
// the same way.
const (
	TableDLQ     = "outbox_messages_dlq"
	TableOutbox  = "outbox_messages"
	TableArchive = "outbox_messages_archive"
	TableKept    = "outbox_messages_kept"
)

// Swept is a message that a sweep has met.
type Swept struct {
	ID          int64
	EventID     string
	AggregateID int64
	EventType   string
	Payload     []byte
	Pending     bool // not published yet; what is in the DLQ is not
}

const (
	sweepWindow     = 4000 // messages of the outbox that one statement walks over
	sweepAggregates = 100  // whose messages one statement reads
)

// sweepEndSQL finds where the next window of the outbox ends.
// Index: outbox_messages_pkey, one range.   Locks: none.
const sweepEndSQL = `
SELECT /* outbox.sweep_end */ coalesce(max(id), 0) FROM (SELECT id FROM outbox_messages WHERE id > @after ORDER BY id LIMIT @window) w`

// sweepOutboxSQL reads what is selected of a window. The outbox has no index by tenant: it would cost each write.
// Index: outbox_messages_pkey, one range.   Locks: none.
const sweepOutboxSQL = `
SELECT /* outbox.sweep */ id, event_id::text, aggregate_id, event_type, payload, processed_at IS NULL
  FROM outbox_messages
 WHERE id > @after AND id <= @upto AND tenant_id = @tenant AND aggregate_type = @type
 ORDER BY id`

// sweepDLQSQL reads what is selected.
// Index: outbox_messages_dlq_tenant_aggregate_idx, one range.   Locks: none.
const sweepDLQSQL = `
SELECT /* outbox.sweep_dlq */ id, event_id::text, aggregate_id, event_type, payload, false
  FROM outbox_messages_dlq
 WHERE tenant_id = @tenant AND aggregate_type = @type
 ORDER BY id`

// sweepArchiveSQL reads what is selected of some aggregates.
// Index: by aggregate, in each range.   Locks: none.
const sweepArchiveSQL = `
SELECT /* outbox.sweep_archive */ id, event_id::text, aggregate_id, event_type, payload, false
  FROM {table}
 WHERE tenant_id = @tenant AND aggregate_type = @type AND aggregate_id = ANY(@aggregates::bigint[])
 ORDER BY id`

// Sweep calls fn with every message of the table that is selected, and done after each statement that read any: what fn has gathered is
// then to be dealt with. The pool acts as the system role. It walks over the whole outbox.
func Sweep(ctx context.Context, q Querier, table string, sel Selection, fn func(Swept) error, done func() error) error {
	read := func(sql string, args pgx.StrictNamedArgs) error {
		var m Swept
		n := 0
		rows, _ := q.Query(ctx, sql, args)
		_, err := pgx.ForEachRow(rows, []any{&m.ID, &m.EventID, &m.AggregateID, &m.EventType, &m.Payload, &m.Pending}, func() error {
			n++
			err := fn(m)
			m.Payload = nil
			return err
		})
		if err == nil && n > 0 {
			err = done()
		}
		if err != nil {
			return fmt.Errorf("sweep %s: %w", table, err)
		}
		return nil
	}
	args := pgx.StrictNamedArgs{"tenant": sel.TenantID, "type": sel.AggregateType}
	switch table {
	case TableDLQ:
		return read(sweepDLQSQL, args)
	case TableOutbox:
		for after := int64(0); ; {
			var upto int64
			if err := q.QueryRow(ctx, sweepEndSQL, pgx.StrictNamedArgs{"after": after, "window": sweepWindow}).Scan(&upto); err != nil {
				return fmt.Errorf("sweep %s: %w", table, err)
			}
			if upto == 0 {
				return nil
			}
			args["after"], args["upto"] = after, upto
			if err := read(sweepOutboxSQL, args); err != nil {
				return err
			}
			after = upto
		}
	}
	for some := range slices.Chunk(sel.AggregateIDs, sweepAggregates) {
		args["aggregates"] = some
		if err := read(ofTable(sweepArchiveSQL, table), args); err != nil {
			return err
		}
	}
	return nil
}

// Redacted is a message and the payload that it is to have.
type Redacted struct {
	ID      int64
	EventID string
	Payload string
}

// redactSQL takes content out of messages. They keep their ids and their place; that they have been published and stand nowhere on the
// stream says that they were erased: a repair publishes them never again (compareSQL). One that is still pending is published as it is now.
// Index: the primary key, or that of each range.   Locks: the messages.
const redactSQL = `
WITH redacted AS (SELECT * FROM unnest(@ids::bigint[], @event_ids::uuid[], @payloads::jsonb[]) AS r(id, event_id, payload)),
held AS MATERIALIZED (
  SELECT m.id FROM {table} m JOIN redacted r ON m.id = r.id AND m.event_id = r.event_id ORDER BY m.id FOR NO KEY UPDATE OF m
)
UPDATE /* outbox.redact */ {table} m SET payload = r.payload{unmark}
  FROM redacted r
 WHERE m.id = r.id AND m.event_id = r.event_id AND m.id IN (SELECT id FROM held)`

func redactSQLOf(table string) string {
	unmark := ", stream_seq = NULL"
	if table == TableDLQ { // what is there was never published
		unmark = ""
	}
	return strings.NewReplacer("{table}", table, "{unmark}", unmark).Replace(redactSQL)
}

// Redact replaces payloads in the caller's transaction and returns how many of the messages were still in the table.
func Redact(ctx context.Context, tx pgx.Tx, table string, messages []Redacted) (int64, error) {
	ids, eventIDs, payloads := make([]int64, len(messages)), make([]string, len(messages)), make([]string, len(messages))
	for i, m := range messages {
		ids[i], eventIDs[i], payloads[i] = m.ID, m.EventID, m.Payload
	}
	tag, err := tx.Exec(ctx, redactSQLOf(table), pgx.StrictNamedArgs{"ids": ids, "event_ids": eventIDs, "payloads": payloads})
	if err != nil {
		return 0, fmt.Errorf("redact %d messages of %s: %w", len(messages), table, err)
	}
	return tag.RowsAffected(), nil
}

// unmarkSQL lets messages say that they stand nowhere on the stream.
// Index: the primary key, or that of each range.   Locks: the messages.
const unmarkSQL = `
UPDATE /* outbox.unmark */ {table} m SET stream_seq = NULL
  FROM unnest(@ids::bigint[], @event_ids::uuid[]) AS r(id, event_id)
 WHERE m.id = r.id AND m.event_id = r.event_id AND m.stream_seq IS NOT NULL`

// Unmark makes published messages, in the caller's transaction, ones that are not on the stream. It comes before they are deleted there: what
// the stream has more than the rows say is found again by whoever deletes, what it lacks a repair would publish again.
func Unmark(ctx context.Context, tx pgx.Tx, messages []Published) error {
	ids, eventIDs := make([]int64, len(messages)), make([]string, len(messages))
	for i, m := range messages {
		ids[i], eventIDs[i] = m.ID, m.EventID
	}
	for _, table := range []string{TableOutbox, TableArchive} {
		if _, err := tx.Exec(ctx, ofTable(unmarkSQL, table), pgx.StrictNamedArgs{"ids": ids, "event_ids": eventIDs}); err != nil {
			return fmt.Errorf("unmark %d messages of %s: %w", len(messages), table, err)
		}
	}
	return nil
}

// pendingOfSQL reads what is selected and not published yet.
// Index: the pending indexes, all of what is pending.   Locks: none.
const pendingOfSQL = `
SELECT /* outbox.pending_of */ payload FROM outbox_messages WHERE processed_at IS NULL AND tenant_id = @tenant AND aggregate_type = @type`

// PendingOf calls fn with the payload of every message that is selected and not published yet. It reads all that is pending.
func PendingOf(ctx context.Context, pool *pgxpool.Pool, sel Selection, fn func(payload []byte)) error {
	var payload pgtype.DriverBytes
	rows, _ := pool.Query(ctx, pendingOfSQL, pgx.StrictNamedArgs{"tenant": sel.TenantID, "type": sel.AggregateType})
	if _, err := pgx.ForEachRow(rows, []any{&payload}, func() error {
		fn(payload)
		return nil
	}); err != nil {
		return fmt.Errorf("look for pending messages: %w", err)
	}
	return nil
}
