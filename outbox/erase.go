package outbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// Selection selects the messages of a tenant for a sweep. The caller interprets their payloads, as
// consumers do.
type Selection struct {
	TenantID   int64
	Aggregates map[string][]event.ID // ids by type, for the archive, which a sweep does not read completely
	Actor      string                // whose acts to read in the archive too; "" for none
	Pending    bool                  // in the outbox, only unpublished messages
}

// Querier is a pool or a transaction.
type Querier = postgres.Querier

// The tables that hold payloads. A retry moves a message from the DLQ to the outbox, and the
// archiver moves it to the archive. A sweep visits the tables in the same order, so it misses no
// message.
const (
	TableDLQ     = "outbox_messages_dlq"
	TableOutbox  = "outbox_messages"
	TableArchive = "outbox_messages_archive"
	TableKept    = "outbox_messages_kept"
)

// Swept is a message that a sweep read.
type Swept struct {
	ID            int64
	EventID       string
	AggregateType string
	AggregateID   event.ID
	EventType     string
	Payload       []byte
	Pending       bool // not yet published; false in the DLQ
}

const (
	sweepWindow     = 4000 // messages of the outbox or the DLQ per statement
	sweepPage       = 1000 // messages of the archive per statement
	sweepAggregates = 100  // aggregates per statement
)

const sweptColumns = `id, event_id::text, aggregate_type, aggregate_id, event_type, payload`

// sweepEndSQL finds the end of the table's next window. Index: the primary key, one range. Locks:
// none.
const sweepEndSQL = `
SELECT /* outbox.sweep_end */ coalesce(max(id), 0) FROM (SELECT id FROM {table} WHERE id > @after ORDER BY id LIMIT @window) w`

// sweepOutboxSQL reads the selected messages of a window. The outbox has no index by tenant, which
// would cost each write.
//
// Index: outbox_messages_pkey, one range.   Locks: none.
const sweepOutboxSQL = `
SELECT /* outbox.sweep */ ` + sweptColumns + `, processed_at IS NULL
  FROM outbox_messages
 WHERE id > @after AND id <= @upto AND tenant_id = @tenant AND (NOT @pending OR processed_at IS NULL)
 ORDER BY id`

// sweepDLQSQL reads the selected messages of a window of the DLQ.
// Index: outbox_messages_dlq_pkey, one range. Locks: none.
const sweepDLQSQL = `
SELECT /* outbox.sweep_dlq */ ` + sweptColumns + `, false
  FROM outbox_messages_dlq
 WHERE id > @after AND id <= @upto AND tenant_id = @tenant
 ORDER BY id`

// sweepArchiveSQL reads the next messages of some aggregates, except those of the actor, after a
// message of the first aggregate. The rows come in the order of the aggregates, because no plan
// reorders a LATERAL with a limit.
//
// Index: by aggregate, in each range: one probe per aggregate, a page in all.   Locks: none.
const sweepArchiveSQL = `
SELECT /* outbox.sweep_archive */ page.*
  FROM unnest(@aggregates::text[]) WITH ORDINALITY AS a(id, n)
 CROSS JOIN LATERAL (
   SELECT ` + sweptColumns + `, false
     FROM {table} m
    WHERE m.tenant_id = @tenant AND m.aggregate_type = @type AND m.aggregate_id = a.id
      AND (m.id, m.event_id) > (CASE WHEN a.n = 1 THEN @after::bigint ELSE 0 END,
                                CASE WHEN a.n = 1 THEN @after_event::uuid ELSE '00000000-0000-0000-0000-000000000000' END)
      AND m.payload ->> 'actor' IS DISTINCT FROM @actor::text
    ORDER BY m.id, m.event_id LIMIT @limit) page
 LIMIT @limit`

// sweepActorSQL reads the next messages about a user's acts. Only users' acts have an index.
//
// Index: by actor, in each range.   Locks: none.
const sweepActorSQL = `
SELECT /* outbox.sweep_actor */ ` + sweptColumns + `, false
  FROM {table}
 WHERE tenant_id = @tenant AND payload ->> 'actor' = @actor::text AND payload ->> 'actor' LIKE 'user:%'
   AND (id, event_id) > (@after::bigint, @after_event::uuid)
 ORDER BY id, event_id LIMIT @limit`

// sweeping is a sweep of a table.
type sweeping struct {
	q     Querier
	table string
	fn    func(Swept) error
	done  func() error
}

// Sweep calls fn for every selected message of the table. After each statement that read a message
// it calls done, which then handles what fn collected. The pool acts as the system role. A sweep
// walks over the whole outbox, one window or page per statement.
func Sweep(ctx context.Context, q Querier, table string, sel Selection, fn func(Swept) error, done func() error) error {
	s := sweeping{q, table, fn, done}
	err := s.run(ctx, sel)
	if err != nil {
		return fmt.Errorf("sweep %s: %w", table, err)
	}
	return nil
}

func (s sweeping) run(ctx context.Context, sel Selection) error {
	switch s.table {
	case TableOutbox:
		return s.windows(ctx, sweepOutboxSQL, pgx.StrictNamedArgs{"tenant": sel.TenantID, "pending": sel.Pending})
	case TableDLQ:
		return s.windows(ctx, sweepDLQSQL, pgx.StrictNamedArgs{"tenant": sel.TenantID})
	}
	if sel.Actor != "" {
		if err := s.actor(ctx, sel); err != nil {
			return err
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(sel.Aggregates)) {
		for some := range slices.Chunk(sel.Aggregates[kind], sweepAggregates) {
			if err := s.aggregates(ctx, sel, kind, some); err != nil {
				return err
			}
		}
	}
	return nil
}

// read runs a statement, and returns the number of messages that it read and the last of them.
func (s sweeping) read(ctx context.Context, sql string, args pgx.StrictNamedArgs) (n int, last Swept, err error) {
	var m Swept
	rows, _ := s.q.Query(ctx, ofTable(sql, s.table), args)
	_, err = pgx.ForEachRow(rows, []any{&m.ID, &m.EventID, &m.AggregateType, &m.AggregateID, &m.EventType, &m.Payload, &m.Pending},
		func() error {
			n++
			err := s.fn(m)
			m.Payload = nil
			return err
		})
	if err == nil && n > 0 {
		err = s.done()
	}
	return n, m, err
}

func (s sweeping) windows(ctx context.Context, sql string, args pgx.StrictNamedArgs) error {
	for after := int64(0); ; {
		var upto int64
		if err := s.q.QueryRow(ctx, ofTable(sweepEndSQL, s.table),
			pgx.StrictNamedArgs{"after": after, "window": sweepWindow}).Scan(&upto); err != nil || upto == 0 {
			return err
		}
		args["after"], args["upto"] = after, upto
		if _, _, err := s.read(ctx, sql, args); err != nil {
			return err
		}
		after = upto
	}
}

const noEvent = "00000000-0000-0000-0000-000000000000"

func (s sweeping) actor(ctx context.Context, sel Selection) error {
	args := pgx.StrictNamedArgs{"tenant": sel.TenantID, "actor": sel.Actor, "after": int64(0), "after_event": noEvent, "limit": sweepPage}
	for {
		n, last, err := s.read(ctx, sweepActorSQL, args)
		if err != nil || n < sweepPage {
			return err
		}
		args["after"], args["after_event"] = last.ID, last.EventID
	}
}

func (s sweeping) aggregates(ctx context.Context, sel Selection, kind string, ids []event.ID) error {
	args := pgx.StrictNamedArgs{"tenant": sel.TenantID, "type": kind, "actor": sel.Actor, "aggregates": ids, "after": int64(0),
		"after_event": noEvent, "limit": sweepPage}
	for {
		n, last, err := s.read(ctx, sweepArchiveSQL, args)
		if err != nil || n < sweepPage {
			return err
		}
		ids = ids[slices.Index(ids, last.AggregateID):]
		args["aggregates"], args["after"], args["after_event"] = ids, last.ID, last.EventID
	}
}

// Redacted is a message and its new payload.
type Redacted struct {
	ID      int64
	EventID string
	Payload string
	Stays   bool // the message stays on the stream unchanged
}

// redactSQL removes content from messages, and an error that may quote it: in the DLQ the cause,
// which has no quotations, takes its place. They keep their ids and places. A published row without
// a stream_seq is an erased one, and a repair never publishes it again. A pending row is published
// with its new payload.
//
// Index: the primary key, or that of each range.   Locks: the messages.
const redactSQL = `
WITH redacted AS (
  SELECT * FROM unnest(@ids::bigint[], @event_ids::uuid[], @payloads::jsonb[], @stays::boolean[]) AS r(id, event_id, payload, stays)),
held AS MATERIALIZED (
  SELECT m.id FROM {table} m JOIN redacted r ON m.id = r.id AND m.event_id = r.event_id ORDER BY m.id FOR NO KEY UPDATE OF m
)
UPDATE /* outbox.redact */ {table} m SET payload = r.payload,
       last_error = CASE WHEN r.stays THEN m.last_error ELSE {error} END{unmark}
  FROM redacted r
 WHERE m.id = r.id AND m.event_id = r.event_id AND m.id IN (SELECT id FROM held)`

func redactSQLOf(table string) string {
	unmark, fault := ", stream_seq = CASE WHEN r.stays THEN m.stream_seq END", "NULL"
	if table == TableDLQ { // messages in the DLQ were never published
		unmark, fault = "", "m.cause"
	}
	return strings.NewReplacer("{table}", table, "{unmark}", unmark, "{error}", fault).Replace(redactSQL)
}

// Redact replaces payloads in the caller's transaction. It returns the number of messages that the
// table still had.
func Redact(ctx context.Context, tx pgx.Tx, table string, messages []Redacted) (int64, error) {
	n := len(messages)
	ids, eventIDs, payloads, stays := make([]int64, n), make([]string, n), make([]string, n), make([]bool, n)
	for i, m := range messages {
		ids[i], eventIDs[i], payloads[i], stays[i] = m.ID, m.EventID, m.Payload, m.Stays
	}
	args := pgx.StrictNamedArgs{"ids": ids, "event_ids": eventIDs, "payloads": payloads, "stays": stays}
	tag, err := tx.Exec(ctx, redactSQLOf(table), args)
	if err != nil {
		return 0, fmt.Errorf("redact %d messages of %s: %w", n, table, err)
	}
	return tag.RowsAffected(), nil
}

// unmarkSQL records that messages are not on the stream.
// Index: the primary key, or that of each range. Locks: the messages.
const unmarkSQL = `
UPDATE /* outbox.unmark */ {table} m SET stream_seq = NULL
  FROM unnest(@ids::bigint[], @event_ids::uuid[]) AS r(id, event_id)
 WHERE m.id = r.id AND m.event_id = r.event_id AND m.stream_seq IS NOT NULL`

// Unmark records, in the caller's transaction, that published messages are not on the stream. Call
// it before you delete them there. A repeated deletion finds messages that the stream still has. In
// the other order, a repair would publish the deleted messages again.
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
