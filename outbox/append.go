package outbox

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// appendSQL inserts a slice of events in its order, so their ids rise in that order. It returns
// slot and event_id, which only the table computes.
//
// Index: outbox_messages_pkey.   Locks: only the new rows.
const appendSQL = `
INSERT /* outbox.append */ INTO outbox_messages
       (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id)
SELECT e.tenant_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_version, e.payload, coalesce(e.occurred_at, now()), e.trace_id
  FROM unnest(@tenant_ids::bigint[], @aggregate_types::text[], @aggregate_ids::text[], @event_types::text[], @event_versions::smallint[],
              @payloads::jsonb[], @occurred_ats::timestamptz[], @trace_ids::text[]) WITH ORDINALITY
    AS e(tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, ord)
 ORDER BY e.ord
RETURNING id, event_id::text AS event_id, slot`

type appended struct {
	ID      int64
	EventID string
	Slot    int
}

// MaxMessage is the limit in bytes for a message in Append: the default of NATS. If the broker's
// limit is lower, the relay refuses larger messages. If it is higher, a writer can insert larger
// events with SQL.
const MaxMessage = 1 << 20

// check refuses an event that the relay could never publish or the table could not hold.
func check(e *event.Event) error {
	if e.Version < 0 || e.Version > math.MaxInt16 {
		return &event.InvalidError{Field: "event_version", Reason: fmt.Sprintf("is %d: want 1 to %d", e.Version, math.MaxInt16)}
	}
	room := MaxMessage
	// The table's text has a blank after each comma and colon. It also expands exponents, but only
	// the relay checks that.
	if len(e.Payload) > room/4 {
		room -= bytes.Count(e.Payload, []byte(",")) + bytes.Count(e.Payload, []byte(":"))
	}
	return e.Validate(room)
}

// Schema is the schema of an outbox that its writers do not have in their search_path. "" means
// that they have it there.
type Schema string

// statement returns sql with the schema before the table.
func (s Schema) statement(sql string) string {
	if s == "" {
		return sql
	}
	return strings.Replace(sql, " outbox_messages", " "+pgx.Identifier{string(s), "outbox_messages"}.Sanitize(), 1)
}

// Append writes the events to the outbox in the caller's transaction, in the slice's order. It sets
// OutboxID, ID and Slot of each event. Without an OccurredAt an event occurs now, by the database's
// clock. Version 0 means 1.
//
// The caller must write the entity's state first, in the same transaction. That write locks the
// entity, so the ids of one entity's events are in the order of their commits.
//
// If an event could never be published, Append writes nothing and returns an *event.InvalidError
// that names the column. The transaction remains usable. But PostgreSQL ends it for a payload that
// jsonb cannot store: one that is not JSON, or that has an escaped NUL character.
func Append(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	return Schema("").Append(ctx, tx, events)
}

// Append is the function Append for the outbox in the schema.
func (s Schema) Append(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	n := len(events)
	if n == 0 {
		return nil
	}
	if err := checkAll(events); err != nil {
		return err
	}
	var (
		tenants, aggregates   = make([]int64, n), make([]string, n) // every mode of pgx encodes strings
		aggregateTypes, types = make([]string, n), make([]string, n)
		versions              = make([]int16, n)
		payloads              = make([]json.RawMessage, n)
		occurred              = make([]*time.Time, n)
		traces                = make([]*string, n)
	)
	for i := range events {
		e := &events[i]
		tenants[i], aggregates[i], aggregateTypes[i], types[i] = e.TenantID, string(e.AggregateID), e.AggregateType, e.Type
		versions[i], payloads[i] = int16(e.Version), e.Payload
		if !e.OccurredAt.IsZero() {
			occurred[i] = &e.OccurredAt
		}
		if e.TraceParent != "" {
			traces[i] = &e.TraceParent
		}
	}
	rows, _ := tx.Query(ctx, s.statement(appendSQL), postgres.Args{
		"tenant_ids": tenants, "aggregate_types": aggregateTypes, "aggregate_ids": aggregates, "event_types": types,
		"event_versions": versions, "payloads": payloads, "occurred_ats": occurred, "trace_ids": traces,
	})
	got, err := pgx.AppendRows(make([]appended, 0, n), rows, pgx.RowToStructByPos[appended])
	return setAppended(events, got, err)
}

// checkAll checks all events, and sets a Version of 0 to 1 if they are valid.
func checkAll(events []event.Event) error {
	for i := range events {
		if err := check(&events[i]); err != nil {
			return fmt.Errorf("append outbox message %d of %d: %w", i+1, len(events), err)
		}
	}
	for i := range events {
		events[i].Version = max(events[i].Version, 1)
	}
	return nil
}

// setAppended sets the fields that the table returned.
func setAppended(events []event.Event, got []appended, err error) error {
	n := len(events)
	if err != nil {
		return fmt.Errorf("append %d outbox messages: %w", n, err)
	}
	if len(got) != n {
		return fmt.Errorf("append %d outbox messages: the table returned %d", n, len(got))
	}
	for i, a := range got {
		events[i].OutboxID, events[i].ID, events[i].Slot = a.ID, a.EventID, a.Slot
	}
	return nil
}

// appendedSQL searches for events in all places: the outbox, the DLQ, the notes of DLQ actions and
// of repairs, and the archive. It compares event_id as well as id, because PostgreSQL assigns some
// ids again after a crash.
//
// Index: outbox_messages_pkey, outbox_messages_dlq_event_id_key, outbox_dlq_actions_event_idx,
// outbox_requeued_pkey, the primary keys of the archive's ranges. Locks: none.
const appendedSQL = `
SELECT /* outbox.appended */
       EXISTS (SELECT FROM unnest(@ids::bigint[], @event_ids::uuid[]) AS w(id, event_id)
                 JOIN outbox_messages m ON m.id = w.id AND m.event_id = w.event_id)
    OR EXISTS (SELECT FROM outbox_messages_dlq WHERE event_id = ANY(@event_ids::uuid[]))
    OR EXISTS (SELECT FROM outbox_dlq_actions WHERE tenant_id = ANY(@tenants::bigint[]) AND event_id = ANY(@event_ids::uuid[]))
    OR EXISTS (SELECT FROM outbox_requeued WHERE event_id = ANY(@event_ids::uuid[]))
    OR EXISTS (SELECT FROM unnest(@ids::bigint[], @event_ids::uuid[]) AS w(id, event_id)
                 JOIN outbox_messages_archive m ON m.id = w.id AND m.event_id = w.event_id)`

// Appended reports whether the transaction in which Append set the ids of these events has
// committed. tx must see the rows of the events' tenants. It reports false while that transaction
// still runs.
func Appended(ctx context.Context, tx pgx.Tx, events []event.Event) (there bool, err error) {
	tenants, ids, eventIDs := make([]int64, len(events)), make([]int64, len(events)), make([]string, len(events))
	for i, e := range events {
		tenants[i], ids[i], eventIDs[i] = e.TenantID, e.OutboxID, e.ID
	}
	err = tx.QueryRow(ctx, appendedSQL, pgx.StrictNamedArgs{"tenants": tenants, "ids": ids, "event_ids": eventIDs}).Scan(&there)
	if err != nil {
		return false, fmt.Errorf("search for %d outbox messages: %w", len(events), err)
	}
	return there, nil
}
