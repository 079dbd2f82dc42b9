package outbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Selection says which of a tenant's messages a sweep reads. What their payloads say is the caller's to read, as whoever applies them does.
type Selection struct {
	TenantID   int64
	Aggregates map[string][]int64 // by type, in the archive, of which nobody reads all
	Actor      string             // whose acts, in the archive too; "" for nobody's
	Pending    bool               // of the outbox only what is not published yet
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
	ID            int64
	EventID       string
	AggregateType string
	AggregateID   int64
	EventType     string
	Payload       []byte
	Pending       bool // not published yet; what is in the DLQ is not
}

const (
	sweepWindow     = 4000 // messages of the outbox or the DLQ that one statement walks over
	sweepPage       = 1000 // messages of the archive that one statement reads
	sweepAggregates = 100  // whose messages one statement reads
)

const sweptColumns = `id, event_id::text, aggregate_type, aggregate_id, event_type, payload`

// sweepEndSQL finds where the next window of the table ends.
// Index: the primary key, one range.   Locks: none.
const sweepEndSQL = `
SELECT /* outbox.sweep_end */ coalesce(max(id), 0) FROM (SELECT id FROM {table} WHERE id > @after ORDER BY id LIMIT @window) w`

// sweepOutboxSQL reads what is selected of a window. The outbox has no index by tenant: it would cost each write.
// Index: outbox_messages_pkey, one range.   Locks: none.
const sweepOutboxSQL = `
SELECT /* outbox.sweep */ ` + sweptColumns + `, processed_at IS NULL
  FROM outbox_messages
 WHERE id > @after AND id <= @upto AND tenant_id = @tenant AND (NOT @pending OR processed_at IS NULL)
 ORDER BY id`

// sweepDLQSQL reads what is selected of a window of the DLQ.
// Index: outbox_messages_dlq_pkey, one range.   Locks: none.
const sweepDLQSQL = `
SELECT /* outbox.sweep_dlq */ ` + sweptColumns + `, false
  FROM outbox_messages_dlq
 WHERE id > @after AND id <= @upto AND tenant_id = @tenant
 ORDER BY id`

// sweepArchiveSQL reads the next messages of some aggregates, but for the actor's, behind a message of the first of them. The rows are in the order of the aggregates, for no plan
// turns a limited LATERAL around.
// Index: by aggregate, in each range: one probe for each aggregate, a page in all.   Locks: none.
const sweepArchiveSQL = `
SELECT /* outbox.sweep_archive */ page.*
  FROM unnest(@aggregates::bigint[]) WITH ORDINALITY AS a(id, n)
 CROSS JOIN LATERAL (
   SELECT ` + sweptColumns + `, false
     FROM {table} m
    WHERE m.tenant_id = @tenant AND m.aggregate_type = @type AND m.aggregate_id = a.id
      AND (m.id, m.event_id) > (CASE WHEN a.n = 1 THEN @after::bigint ELSE 0 END, CASE WHEN a.n = 1 THEN @after_event::uuid ELSE '00000000-0000-0000-0000-000000000000' END)
      AND m.payload ->> 'actor' IS DISTINCT FROM @actor::text
    ORDER BY m.id, m.event_id LIMIT @limit) page
 LIMIT @limit`

// sweepActorSQL reads the next messages of what a user did. Only users' acts have an index.
// Index: by actor, in each range.   Locks: none.
const sweepActorSQL = `
SELECT /* outbox.sweep_actor */ ` + sweptColumns + `, false
  FROM {table}
 WHERE tenant_id = @tenant AND payload ->> 'actor' = @actor::text AND payload ->> 'actor' LIKE 'user:%' AND (id, event_id) > (@after::bigint, @after_event::uuid)
 ORDER BY id, event_id LIMIT @limit`

// sweeping is a sweep of a table.
type sweeping struct {
	q     Querier
	table string
	fn    func(Swept) error
	done  func() error
}

// Sweep calls fn with every message of the table that is selected, and done after each statement that read any: what fn has gathered is
// then to be dealt with. The pool acts as the system role. It walks over the whole outbox, a window or a page per statement.
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

// read runs a statement, and returns how many messages it read and the last of them.
func (s sweeping) read(ctx context.Context, sql string, args pgx.StrictNamedArgs) (n int, last Swept, err error) {
	var m Swept
	rows, _ := s.q.Query(ctx, ofTable(sql, s.table), args)
	_, err = pgx.ForEachRow(rows, []any{&m.ID, &m.EventID, &m.AggregateType, &m.AggregateID, &m.EventType, &m.Payload, &m.Pending}, func() error {
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
		if err := s.q.QueryRow(ctx, ofTable(sweepEndSQL, s.table), pgx.StrictNamedArgs{"after": after, "window": sweepWindow}).Scan(&upto); err != nil || upto == 0 {
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

func (s sweeping) aggregates(ctx context.Context, sel Selection, kind string, ids []int64) error {
	args := pgx.StrictNamedArgs{"tenant": sel.TenantID, "type": kind, "actor": sel.Actor, "aggregates": ids, "after": int64(0), "after_event": noEvent, "limit": sweepPage}
	for {
		n, last, err := s.read(ctx, sweepArchiveSQL, args)
		if err != nil || n < sweepPage {
			return err
		}
		ids = ids[slices.Index(ids, last.AggregateID):]
		args["aggregates"], args["after"], args["after_event"] = ids, last.ID, last.EventID
	}
}

// Redacted is a message and the payload that it is to have.
type Redacted struct {
	ID      int64
	EventID string
	Payload string
	Stays   bool // on the stream, as it was
}

// redactSQL takes content out of messages. They keep their ids and their place; that they have been published and stand nowhere on the
// stream says that they were erased: a repair publishes them never again (compareSQL). One that is still pending is published as it is now.
// Index: the primary key, or that of each range.   Locks: the messages.
const redactSQL = `
WITH redacted AS (SELECT * FROM unnest(@ids::bigint[], @event_ids::uuid[], @payloads::jsonb[], @stays::boolean[]) AS r(id, event_id, payload, stays)),
held AS MATERIALIZED (
  SELECT m.id FROM {table} m JOIN redacted r ON m.id = r.id AND m.event_id = r.event_id ORDER BY m.id FOR NO KEY UPDATE OF m
)
UPDATE /* outbox.redact */ {table} m SET payload = r.payload{unmark}
  FROM redacted r
 WHERE m.id = r.id AND m.event_id = r.event_id AND m.id IN (SELECT id FROM held)`

func redactSQLOf(table string) string {
	unmark := ", stream_seq = CASE WHEN r.stays THEN m.stream_seq END"
	if table == TableDLQ { // what is there was never published
		unmark = ""
	}
	return strings.NewReplacer("{table}", table, "{unmark}", unmark).Replace(redactSQL)
}

// Redact replaces payloads in the caller's transaction and returns how many of the messages were still in the table.
func Redact(ctx context.Context, tx pgx.Tx, table string, messages []Redacted) (int64, error) {
	ids, eventIDs, payloads, stays := make([]int64, len(messages)), make([]string, len(messages)), make([]string, len(messages)), make([]bool, len(messages))
	for i, m := range messages {
		ids[i], eventIDs[i], payloads[i], stays[i] = m.ID, m.EventID, m.Payload, m.Stays
	}
	tag, err := tx.Exec(ctx, redactSQLOf(table), pgx.StrictNamedArgs{"ids": ids, "event_ids": eventIDs, "payloads": payloads, "stays": stays})
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
