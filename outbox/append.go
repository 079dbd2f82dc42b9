package outbox

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// appendSQL inserts a slice of events in its order, so that their ids rise with it. slot and event_id come back from
// the table, which alone computes them.
// Index: outbox_messages_pkey.   Locks: none but the new rows.
const appendSQL = `
INSERT /* outbox.append */ INTO outbox_messages
       (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id)
SELECT e.tenant_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_version, e.payload, coalesce(e.occurred_at, now()), e.trace_id
  FROM unnest(@tenant_ids::bigint[], @aggregate_types::text[], @aggregate_ids::bigint[], @event_types::text[], @event_versions::smallint[],
              @payloads::jsonb[], @occurred_ats::timestamptz[], @trace_ids::text[]) WITH ORDINALITY
    AS e(tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, ord)
 ORDER BY e.ord
RETURNING id, event_id::text AS event_id, slot`

type appended struct {
	ID      int64
	EventID string
	Slot    int
}

// MaxMessage is the most bytes that a message may take for Append: NATS's own limit. A broker that takes less makes the relay refuse what
// is larger; to one that takes more, larger events go by SQL.
const MaxMessage = 1 << 20

// check reports what the relay would never publish, and what the table cannot hold.
func check(e *event.Event) error {
	if e.Version < 0 || e.Version > math.MaxInt16 {
		return &event.InvalidError{Field: "event_version", Reason: fmt.Sprintf("is %d: want 1 to %d", e.Version, math.MaxInt16)}
	}
	room := MaxMessage
	if len(e.Payload) > room/4 { // the table's text of it has a blank behind each of these (and writes exponents out: left to the relay)
		room -= bytes.Count(e.Payload, []byte(",")) + bytes.Count(e.Payload, []byte(":"))
	}
	return e.Validate(room)
}

// Append writes the events into the outbox in the caller's transaction and in the slice's order, and fills in each one's
// OutboxID, ID and Slot. The caller has already written the state that they tell of in the same transaction: that write
// holds the entity's lock, so the ids of one entity are in commit order. An event with no OccurredAt occurs now, by the
// database's clock; version 0 is 1.
//
// When one of them could never be published, nothing is written: the error is an *event.InvalidError that names the column, and the
// transaction can go on.
func Append(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	n := len(events)
	if n == 0 {
		return nil
	}
	for i := range events {
		if err := check(&events[i]); err != nil {
			return fmt.Errorf("append outbox message %d of %d: %w", i+1, n, err)
		}
	}
	var (
		tenants, aggregates   = make([]int64, n), make([]int64, n)
		aggregateTypes, types = make([]string, n), make([]string, n)
		versions              = make([]int16, n)
		payloads              = make([]string, n)
		occurred              = make([]*time.Time, n)
		traces                = make([]*string, n)
	)
	for i := range events {
		e := &events[i]
		e.Version = max(e.Version, 1)
		tenants[i], aggregates[i], aggregateTypes[i], types[i] = e.TenantID, e.AggregateID, e.AggregateType, e.Type
		versions[i], payloads[i] = int16(e.Version), string(e.Payload)
		if !e.OccurredAt.IsZero() {
			occurred[i] = &e.OccurredAt
		}
		if e.TraceParent != "" {
			traces[i] = &e.TraceParent
		}
	}
	rows, _ := tx.Query(ctx, appendSQL, pgx.StrictNamedArgs{
		"tenant_ids": tenants, "aggregate_types": aggregateTypes, "aggregate_ids": aggregates, "event_types": types,
		"event_versions": versions, "payloads": payloads, "occurred_ats": occurred, "trace_ids": traces,
	})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[appended])
	if err != nil {
		return fmt.Errorf("append %d outbox messages: %w", n, err)
	}
	if len(got) != n {
		return fmt.Errorf("append %d outbox messages: %d came back", n, len(got))
	}
	for i, a := range got {
		events[i].OutboxID, events[i].ID, events[i].Slot = a.ID, a.EventID, a.Slot
	}
	return nil
}

// appendedSQL looks for events wherever they can be: pending or published, given up, taken out of the DLQ, archived. Their ids alone would not
// name them: after a crash they are given to others.
// Index: outbox_messages_pkey, outbox_messages_dlq_event_id_key, outbox_dlq_actions_event_idx, the archive's ranges' primary keys.
// Locks: none.
const appendedSQL = `
SELECT /* outbox.appended */
       EXISTS (SELECT FROM unnest(@ids::bigint[], @event_ids::uuid[]) AS w(id, event_id) JOIN outbox_messages m ON m.id = w.id AND m.event_id = w.event_id)
    OR EXISTS (SELECT FROM outbox_messages_dlq WHERE event_id = ANY(@event_ids::uuid[]))
    OR EXISTS (SELECT FROM outbox_dlq_actions WHERE tenant_id = @tenant::bigint AND event_id = ANY(@event_ids::uuid[]))
    OR EXISTS (SELECT FROM unnest(@ids::bigint[], @event_ids::uuid[]) AS w(id, event_id) JOIN outbox_messages_archive m ON m.id = w.id AND m.event_id = w.event_id)`

// Appended reports whether the transaction in which Append filled these events in was committed. They are of one tenant, whose rows tx sees. Of a
// transaction that has not ended it reports false.
func Appended(ctx context.Context, tx pgx.Tx, events []event.Event) (there bool, err error) {
	ids, eventIDs := make([]int64, len(events)), make([]string, len(events))
	for i, e := range events {
		ids[i], eventIDs[i] = e.OutboxID, e.ID
	}
	err = tx.QueryRow(ctx, appendedSQL, pgx.StrictNamedArgs{"tenant": events[0].TenantID, "ids": ids, "event_ids": eventIDs}).Scan(&there)
	if err != nil {
		return false, fmt.Errorf("look for %d outbox messages: %w", len(events), err)
	}
	return there, nil
}
