package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/tidings/tidings/event"
)

// appendJSONSQL is appendSQL with one parameter, a text, which every driver of database/sql can
// send. A payload that is JSON's null is NULL in the record.
//
// Index: outbox_messages_pkey.   Locks: only the new rows.
const appendJSONSQL = `
INSERT /* outbox.append_json */ INTO outbox_messages
       (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id)
SELECT e.tenant_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_version, coalesce(e.payload, 'null'::jsonb),
       coalesce(e.occurred_at, now()), e.trace_id
  FROM ROWS FROM (jsonb_to_recordset(CAST($1::text AS jsonb)) AS (tenant_id bigint, aggregate_type text, aggregate_id text, event_type text,
         event_version smallint, payload jsonb, occurred_at timestamptz, trace_id text)) WITH ORDINALITY
    AS e(tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, ord)
 ORDER BY e.ord
RETURNING id, event_id::text AS event_id, slot`

// row is an event in the parameter of appendJSONSQL.
type row struct {
	TenantID      int64           `json:"tenant_id"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   event.ID        `json:"aggregate_id"`
	EventType     string          `json:"event_type"`
	EventVersion  int             `json:"event_version"`
	Payload       json.RawMessage `json:"payload"`
	OccurredAt    *time.Time      `json:"occurred_at"`
	TraceID       *string         `json:"trace_id"`
}

// AppendSQL is Append for transactions of database/sql, and so of GORM, bun, ent and sqlx, whose
// transactions contain a *sql.Tx. It works with every PostgreSQL driver, and through PgBouncer. A
// payload that is not JSON is an *event.InvalidError too.
func AppendSQL(ctx context.Context, tx *sql.Tx, events []event.Event) error {
	return Schema("").AppendSQL(ctx, tx, events)
}

// AppendSQL is the function AppendSQL for the outbox in the schema.
func (s Schema) AppendSQL(ctx context.Context, tx *sql.Tx, events []event.Event) (err error) {
	if len(events) == 0 {
		return nil
	}
	if err := checkAll(events); err != nil {
		return err
	}
	all := make([]row, len(events))
	for i := range events {
		e := &events[i]
		if !json.Valid(e.Payload) {
			return fmt.Errorf("append outbox message %d of %d: %w", i+1, len(events),
				&event.InvalidError{Field: "payload", Reason: "is not JSON"})
		}
		all[i] = row{e.TenantID, e.AggregateType, e.AggregateID, e.Type, e.Version, e.Payload, nil, nil}
		if !e.OccurredAt.IsZero() {
			at := e.OccurredAt.UTC().Truncate(time.Microsecond) // PostgreSQL would round up
			all[i].OccurredAt = &at
		}
		if e.TraceParent != "" {
			all[i].TraceID = &e.TraceParent
		}
	}
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("append %d outbox messages: %w", len(events), err)
	}
	rows, err := tx.QueryContext(ctx, s.statement(appendJSONSQL), string(text))
	if err != nil {
		return fmt.Errorf("append %d outbox messages: %w", len(events), err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	var got []appended
	for rows.Next() {
		var a appended
		if err := rows.Scan(&a.ID, &a.EventID, &a.Slot); err != nil {
			return fmt.Errorf("append %d outbox messages: %w", len(events), err)
		}
		got = append(got, a)
	}
	return setAppended(events, got, rows.Err())
}
