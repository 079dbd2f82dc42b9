package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
)

// ErrNotInDLQ reports a message that is not in the DLQ. It never was there, or somebody retried or
// discarded it.
var ErrNotInDLQ = deadletter.ErrNotFound

// A message of the DLQ keeps its former id in the outbox, and a filter with a consumer selects
// none.
type (
	DLQMessage = deadletter.Letter
	DLQFilter  = deadletter.Filter
	DLQAction  = deadletter.Action // a row of outbox_dlq_actions
)

// MaxDLQBatch is the limit of messages of one Retry or Discard. A retry copies payloads within one
// transaction.
const MaxDLQBatch = deadletter.MaxBatch

// deadTable describes the DLQ's table.
var deadTable = deadletter.Table{Source: deadletter.Outbox, Name: "outbox_messages_dlq", Consumer: "''", Error: "coalesce(last_error, '')",
	Behind: "false", Any: "true",
	Columns: "d.occurred_at, coalesce(d.trace_id, ''), d.slot::int, d.attempts::int, d.inserted_at, d.id", Body: "d.payload",
	Fields: func(l *DLQMessage) (columns, body []any) {
		return []any{&l.Event.OccurredAt, &l.Event.TraceParent, &l.Event.Slot, &l.Attempts, &l.InsertedAt, &l.Event.OutboxID},
			[]any{&l.Event.Payload}
	}}

// DLQ has the operations on the outbox's dead letter queue. It is safe for concurrent use.
//
// With a pool of postgres.RoleSystem it works on every tenant. With one of postgres.RoleAPI,
// row-level security shows it only the filter's tenant, and no row without a tenant.
type DLQ struct {
	deadletter.Reader
	pool *pgxpool.Pool
	wake func(slot int)
}

// NewDLQ returns the operations on pool. After the commit of a retry it calls wake for every slot
// that got messages (broker.Waker). wake must not block. With nil the relay finds them when it
// polls.
func NewDLQ(pool *pgxpool.Pool, wake func(slot int)) *DLQ {
	if wake == nil {
		wake = func(int) {}
	}
	return &DLQ{deadletter.NewReader(pool, deadTable), pool, wake}
}

// DLQRequest selects messages to retry or to discard, and names the actor and the reason.
type DLQRequest struct {
	DLQFilter
	Limit  int    // most messages, lowest ids first; never more than MaxDLQBatch
	Actor  string // required
	Token  string // the name and fingerprint of the API token; "" without one
	Reason string // may be empty
	DryRun bool   // change nothing: only return the actions

	// Within runs in the transaction, before its commit, with the actions. An error rolls
	// everything back. After a serialization failure it is called again.
	Within func(ctx context.Context, tx pgx.Tx, did []DLQAction) error
}

// takeDLQSQL begins the statements that remove messages from the DLQ. It locks the chosen rows in
// the order of their ids, so two operators do not deadlock. The second operator finds the rows
// deleted and takes the next ones.
var takeDLQSQL = `
WITH chosen AS (
  SELECT id FROM outbox_messages_dlq d
   WHERE ` + deadTable.Where() + `
   ORDER BY id LIMIT @limit FOR UPDATE),
gone AS (
  DELETE FROM outbox_messages_dlq d USING chosen c WHERE d.id = c.id RETURNING d.*),`

// actionColumns are the columns of DLQAction before Slot, in order.
const actionColumns = `at, actor, action, dlq_id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, ` +
	`coalesce(new_id, 0), reason, token, '', ''`

// retryDLQSQL moves messages back to the outbox and records that. The new rows get new ids above
// every floor, in the order of the old ones.
//
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: the chosen messages.
var retryDLQSQL = takeDLQSQL + `
fresh AS (
  INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id)
  SELECT tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id FROM gone ORDER BY id
  RETURNING id, event_id, slot),
noted AS (
  INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, new_id, reason,
         token)
  SELECT @actor, 'retry', g.id, g.event_id, g.tenant_id, g.aggregate_type, g.aggregate_id, g.event_type, f.id, @reason, @token
    FROM gone g JOIN fresh f USING (event_id) ORDER BY g.id
  RETURNING *)
SELECT /* outbox.retry_dlq */ ` + actionColumns + `, (SELECT f.slot FROM fresh f WHERE f.id = noted.new_id)::int
  FROM noted ORDER BY dlq_id`

// Retry moves messages from the DLQ to the end of the outbox. They keep event_id, payload, times
// and trace. They get a new id and no attempts, and are due at once.
//
// Retry returns its actions by old id. A requested message without an action is not in the DLQ (any
// more). Of two callers for the same message one gets it.
func (d *DLQ) Retry(ctx context.Context, r DLQRequest) ([]DLQAction, error) {
	return d.act(ctx, deadletter.Retry, retryDLQSQL, r)
}

// discardDLQSQL deletes messages and records that.
//
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: the chosen messages.
var discardDLQSQL = takeDLQSQL + `
noted AS (
  INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, reason, token)
  SELECT @actor, 'discard', id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, @reason, @token FROM gone ORDER BY id
  RETURNING *)
SELECT /* outbox.discard_dlq */ ` + actionColumns + `, (SELECT g.slot FROM gone g WHERE g.id = noted.dlq_id)::int
  FROM noted ORDER BY dlq_id`

// Discard deletes messages from the DLQ forever, with their payloads. It keeps only the records of
// the actions (DLQAction), and returns them as Retry does.
func (d *DLQ) Discard(ctx context.Context, r DLQRequest) ([]DLQAction, error) {
	return d.act(ctx, deadletter.Discard, discardDLQSQL, r)
}

// act runs one of the two statements. In a dry run it only lists the messages.
func (d *DLQ) act(ctx context.Context, action, sql string, r DLQRequest) ([]DLQAction, error) {
	if r.DryRun {
		var would []DLQAction
		for m, err := range d.List(ctx, r.DLQFilter, min(max(r.Limit, 0), MaxDLQBatch)) {
			if err != nil {
				return nil, err
			}
			would = append(would, DLQAction{Actor: r.Actor, Action: action, ID: m.ID, EventID: m.Event.ID, TenantID: m.Event.TenantID,
				AggregateType: m.Event.AggregateType, AggregateID: m.Event.AggregateID, EventType: m.Event.Type,
				Reason: r.Reason, Token: r.Token, Slot: m.Event.Slot})
		}
		return would, nil
	}
	args := r.Args()
	args["limit"], args["actor"], args["reason"], args["token"] = min(r.Limit, MaxDLQBatch), r.Actor, r.Reason, r.Token
	var actions []DLQAction
	err := deadletter.InTx(ctx, d.pool, r.TenantID, pgx.ReadWrite, func(tx pgx.Tx) (err error) {
		rows, _ := tx.Query(ctx, sql, args)
		actions, err = pgx.CollectRows(rows, pgx.RowToStructByPos[DLQAction])
		if err == nil && r.Within != nil {
			err = r.Within(ctx, tx, actions)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s up to %d messages of the DLQ: %w", action, r.Limit, err)
	}
	if action == deadletter.Retry {
		for _, a := range actions {
			d.wake(a.Slot)
		}
	}
	return actions, nil
}

const (
	// deadAggregatesSQL reads the aggregates with messages in the DLQ.
	//
	// Index: outbox_messages_dlq_tenant_aggregate_idx.   Locks: none.
	deadAggregatesSQL = `SELECT /* outbox.dead_aggregates */ DISTINCT tenant_id, aggregate_type, aggregate_id FROM outbox_messages_dlq`
	// waitingAggregatesSQL reads the aggregates with delayed messages. Index:
	// outbox_messages_held_idx. Locks: none.
	waitingAggregatesSQL = `
SELECT /* outbox.waiting_aggregates */ DISTINCT tenant_id, aggregate_type, aggregate_id FROM outbox_messages WHERE delayed`
)

// Dead returns a function that reports whether an aggregate has messages in the DLQ, as of this
// call. The pool acts as the system role.
func Dead(ctx context.Context, pool *pgxpool.Pool) (dead func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	if dead, err = aggregates(ctx, pool, deadAggregatesSQL); err != nil {
		return nil, fmt.Errorf("read the aggregates in the DLQ: %w", err)
	}
	return dead, nil
}

// Waiting returns a function that reports whether an aggregate has delayed messages: for a retry,
// for the time that their writer set, or behind such a message. The pool acts as the system role.
func Waiting(ctx context.Context,
	pool *pgxpool.Pool) (waiting func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	if waiting, err = aggregates(ctx, pool, waitingAggregatesSQL); err != nil {
		return nil, fmt.Errorf("read the aggregates with delayed messages: %w", err)
	}
	return waiting, nil
}

func aggregates(ctx context.Context, pool *pgxpool.Pool,
	sql string) (among func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	all := make(map[Aggregate]bool)
	rows, _ := pool.Query(ctx, sql)
	var a Aggregate
	if _, err := pgx.ForEachRow(rows, []any{&a.TenantID, &a.Type, &a.ID}, func() error {
		all[a] = true
		return nil
	}); err != nil {
		return nil, err
	}
	return func(tenant int64, aggregateType string, aggregateID event.ID) bool {
		return all[Aggregate{tenant, aggregateType, aggregateID}]
	}, nil
}
