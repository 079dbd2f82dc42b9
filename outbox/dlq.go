package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
)

// ErrNotInDLQ reports a message that the DLQ does not hold, or holds no more: somebody retried or discarded it.
var ErrNotInDLQ = errors.New("outbox: the DLQ holds no such message")

// MaxDLQBatch is how many messages one List, Retry or Discard takes at most. A retry copies payloads within one transaction.
const MaxDLQBatch = 500

// DLQ are the operations on the outbox's dead letter queue. It is safe for concurrent use.
//
// On a pool of postgres.RoleSystem it works on every tenant. On one of postgres.RoleAPI, row-level security lets it see the
// filter's tenant alone, and without a tenant nothing.
type DLQ struct {
	pool *pgxpool.Pool
	wake func(slot int)
}

// NewDLQ returns the operations on pool. After each commit of a retry wake is called, without waiting, with every slot
// that got messages (broker.Waker); nil leaves it to the relay's polling.
func NewDLQ(pool *pgxpool.Pool, wake func(slot int)) *DLQ {
	if wake == nil {
		wake = func(int) {}
	}
	return &DLQ{pool: pool, wake: wake}
}

// DLQFilter selects messages of the DLQ: those that meet all that is set. The zero filter selects every message.
type DLQFilter struct {
	TenantID      int64   // 0: of every tenant
	IDs           []int64 // ids of the DLQ; nil: any
	AggregateType string
	AggregateID   int64
	EventType     string
	Group         string    // the id of a group (Groups)
	DeadBefore    time.Time // moved to the DLQ before
	DeadAfter     time.Time // moved to the DLQ at this time or after
	After         int64     // with an id above: where the page before ended
}

// dlqFilterSQL is the WHERE of every statement that takes a filter.
const dlqFilterSQL = `
       (@tenant::bigint IS NULL OR tenant_id = @tenant)
   AND (@ids::bigint[] IS NULL OR id = ANY(@ids))
   AND (@aggregate_type::text IS NULL OR aggregate_type = @aggregate_type)
   AND (@aggregate_id::bigint IS NULL OR aggregate_id = @aggregate_id)
   AND (@event_type::text IS NULL OR event_type = @event_type)
   AND (@group::uuid IS NULL OR group_id = @group)
   AND (@dead_before::timestamptz IS NULL OR dead_at < @dead_before)
   AND (@dead_after::timestamptz IS NULL OR dead_at >= @dead_after)
   AND id > @after`

func (f DLQFilter) args() pgx.StrictNamedArgs {
	args := pgx.StrictNamedArgs{
		"tenant": ifSet(f.TenantID), "ids": f.IDs, "aggregate_type": ifSet(f.AggregateType), "aggregate_id": ifSet(f.AggregateID),
		"event_type": ifSet(f.EventType), "group": ifSet(f.Group), "dead_before": nil, "dead_after": nil, "after": f.After,
	}
	if !f.DeadBefore.IsZero() {
		args["dead_before"] = f.DeadBefore
	}
	if !f.DeadAfter.IsZero() {
		args["dead_after"] = f.DeadAfter
	}
	return args
}

func ifSet[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// DLQMessage is a message of the DLQ. Its OutboxID is the id that it had in the outbox, and names it here.
type DLQMessage struct {
	event.Event // Payload is read by Get alone
	Attempts    int
	LastError   string
	InsertedAt  time.Time // into the outbox
	DeadAt      time.Time // moved to the DLQ
	Group       string    // the id of its group
	Retries     int       // how often it was retried before
}

// dlqColumns are what scanDLQ reads.
const dlqColumns = `id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, event_version::int, occurred_at, coalesce(trace_id, ''),
       slot::int, attempts::int, coalesce(last_error, ''), inserted_at, dead_at, group_id::text, retries`

func (m *DLQMessage) fields() []any {
	return []any{&m.OutboxID, &m.ID, &m.TenantID, &m.AggregateType, &m.AggregateID, &m.Type, &m.Version, &m.OccurredAt, &m.TraceParent,
		&m.Slot, &m.Attempts, &m.LastError, &m.InsertedAt, &m.DeadAt, &m.Group, &m.Retries}
}

func scanDLQ(row pgx.CollectableRow) (m DLQMessage, err error) { return m, row.Scan(m.fields()...) }

// listDLQSQL reads a page of the DLQ without payloads.
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: none.
const listDLQSQL = `
SELECT /* outbox.list_dlq */ ` + dlqColumns + `
  FROM outbox_messages_dlq
 WHERE ` + dlqFilterSQL + `
 ORDER BY id LIMIT @limit`

// List returns the first messages that the filter selects, by id, at most limit and MaxDLQBatch of them, without payloads. A
// message that dies while pages are read may have an id of a page before.
func (d *DLQ) List(ctx context.Context, f DLQFilter, limit int) ([]DLQMessage, error) {
	args := f.args()
	args["limit"] = min(limit, MaxDLQBatch)
	var all []DLQMessage
	err := d.tx(ctx, f.TenantID, pgx.ReadOnly, func(tx pgx.Tx) (err error) {
		rows, _ := tx.Query(ctx, listDLQSQL, args)
		all, err = pgx.CollectRows(rows, scanDLQ)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the DLQ after %d: %w", f.After, err)
	}
	return all, nil
}

// countDLQSQL counts what a filter selects.
// Index: as listDLQSQL; it reads all that the filter selects.   Locks: none.
const countDLQSQL = `SELECT /* outbox.count_dlq */ count(*) FROM outbox_messages_dlq WHERE ` + dlqFilterSQL

// Count returns how many messages the filter selects. It reads them all.
func (d *DLQ) Count(ctx context.Context, f DLQFilter) (n int64, err error) {
	err = d.tx(ctx, f.TenantID, pgx.ReadOnly, func(tx pgx.Tx) error { return tx.QueryRow(ctx, countDLQSQL, f.args()).Scan(&n) })
	if err != nil {
		return 0, fmt.Errorf("count the DLQ: %w", err)
	}
	return n, nil
}

// deadTable is the DLQ's table for package deadletter.
var deadTable = deadletter.Table{Name: "outbox_messages_dlq", Consumer: "''", Error: "coalesce(last_error, '')"}

// Groups returns the groups of the tenant's messages, of all tenants' when it is 0, by event type and cause: that with the latest message first, without counts. With more
// than deadletter.MaxGroups it returns some of them, and more is true.
func (d *DLQ) Groups(ctx context.Context, tenant int64) (all []deadletter.Group, more bool, err error) {
	err = d.tx(ctx, tenant, pgx.ReadOnly, func(tx pgx.Tx) (err error) {
		all, more, err = deadletter.Groups(ctx, tx, deadTable, tenant)
		return err
	})
	return all, more, err
}

// Group returns a group by its id, without counts; nil when the tenant has no message of it.
func (d *DLQ) Group(ctx context.Context, tenant int64, id string) (g *deadletter.Group, err error) {
	err = d.tx(ctx, tenant, pgx.ReadOnly, func(tx pgx.Tx) (err error) {
		g, err = deadletter.One(ctx, tx, deadTable, tenant, id)
		return err
	})
	return g, err
}

// CountGroups fills the counts of groups, of the tenant's messages that died since a time.
func (d *DLQ) CountGroups(ctx context.Context, tenant int64, groups []deadletter.Group, since time.Time) error {
	return d.tx(ctx, tenant, pgx.ReadOnly, func(tx pgx.Tx) error { return deadletter.Count(ctx, tx, deadTable, tenant, groups, since) })
}

// getDLQSQL reads one message with its payload.
// Index: outbox_messages_dlq_pkey.   Locks: none.
const getDLQSQL = `
SELECT /* outbox.get_dlq */ ` + dlqColumns + `, payload
  FROM outbox_messages_dlq
 WHERE id = @id AND (@tenant::bigint IS NULL OR tenant_id = @tenant)`

// Get returns a message of the tenant, of any when it is 0, with its payload, or ErrNotInDLQ.
func (d *DLQ) Get(ctx context.Context, tenant, id int64) (m DLQMessage, err error) {
	err = d.tx(ctx, tenant, pgx.ReadOnly, func(tx pgx.Tx) error {
		row := tx.QueryRow(ctx, getDLQSQL, pgx.StrictNamedArgs{"id": id, "tenant": ifSet(tenant)})
		err := row.Scan(append(m.fields(), &m.Payload)...)
		if errors.Is(err, pgx.ErrNoRows) {
			return ErrNotInDLQ
		}
		return err
	})
	if err != nil {
		return DLQMessage{}, fmt.Errorf("read message %d of the DLQ: %w", id, err)
	}
	return m, nil
}

// What an operator does to a message of the DLQ.
const (
	DLQRetry   = "retry"
	DLQDiscard = "discard"
)

// DLQRequest says which messages to retry or to discard, who wants it and why.
type DLQRequest struct {
	DLQFilter
	Limit  int    // messages at most, the lowest ids first; never more than MaxDLQBatch
	Actor  string // required
	Reason string // may be empty
	DryRun bool   // only says what it would do

	// Within is called in the transaction, before its commit, with what it did; an error takes everything back. It may be called again with the same.
	Within func(ctx context.Context, tx pgx.Tx, did []DLQAction) error
}

// DLQAction is what was done to one message: a row of outbox_dlq_actions. In a dry run At is zero, and NewID 0.
type DLQAction struct {
	At            time.Time
	Actor         string
	Action        string // DLQRetry or DLQDiscard
	DLQID         int64  // the id that it had in the DLQ
	EventID       string
	TenantID      int64
	AggregateType string
	AggregateID   int64
	EventType     string
	NewID         int64 // the id of the message in the outbox; 0 when it was discarded
	Reason        string
	Slot          int // of the message
}

// takeDLQSQL begins the statements that take messages out of the DLQ: the rows chosen are locked in the order of their ids, so
// that two operators do not deadlock, and who comes second finds them gone and takes the next ones.
const takeDLQSQL = `
WITH chosen AS (
  SELECT id FROM outbox_messages_dlq
   WHERE ` + dlqFilterSQL + `
   ORDER BY id LIMIT @limit FOR UPDATE),
gone AS (
  DELETE FROM outbox_messages_dlq d USING chosen c WHERE d.id = c.id RETURNING d.*),`

// actionColumns are DLQAction's, in its order.
const actionColumns = `at, actor, action, dlq_id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, coalesce(new_id, 0), reason`

// retryDLQSQL moves messages back into the outbox and notes it. The new rows get new ids, which no floor has passed, in the
// order of the old ones.
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: the messages chosen.
const retryDLQSQL = takeDLQSQL + `
fresh AS (
  INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id)
  SELECT tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id FROM gone ORDER BY id
  RETURNING id, event_id, slot),
noted AS (
  INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, new_id, reason)
  SELECT @actor, 'retry', g.id, g.event_id, g.tenant_id, g.aggregate_type, g.aggregate_id, g.event_type, f.id, @reason
    FROM gone g JOIN fresh f USING (event_id) ORDER BY g.id
  RETURNING *)
SELECT /* outbox.retry_dlq */ ` + actionColumns + `, (SELECT f.slot FROM fresh f WHERE f.id = noted.new_id)::int
  FROM noted ORDER BY dlq_id`

// Retry moves messages from the DLQ back to the end of the outbox, as they are now: with their event_id, payload, times and
// trace, a new id, no attempts, due at once. It returns what it did, by the old ids; a message that is not in it is not in
// the DLQ (any more). Of two callers that want the same message one gets it.
func (d *DLQ) Retry(ctx context.Context, r DLQRequest) ([]DLQAction, error) {
	return d.act(ctx, DLQRetry, retryDLQSQL, r)
}

// discardDLQSQL deletes messages and notes it.
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: the messages chosen.
const discardDLQSQL = takeDLQSQL + `
noted AS (
  INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, reason)
  SELECT @actor, 'discard', id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, @reason FROM gone ORDER BY id
  RETURNING *)
SELECT /* outbox.discard_dlq */ ` + actionColumns + `, (SELECT g.slot FROM gone g WHERE g.id = noted.dlq_id)::int
  FROM noted ORDER BY dlq_id`

// Discard deletes messages from the DLQ for good: their payload is kept nowhere, what was discarded is (DLQAction). It returns
// what it did, as Retry does.
func (d *DLQ) Discard(ctx context.Context, r DLQRequest) ([]DLQAction, error) {
	return d.act(ctx, DLQDiscard, discardDLQSQL, r)
}

// act runs one of the two statements, or only lists what it would take.
func (d *DLQ) act(ctx context.Context, action, sql string, r DLQRequest) ([]DLQAction, error) {
	if r.DryRun {
		would, err := d.List(ctx, r.DLQFilter, r.Limit)
		if err != nil {
			return nil, err
		}
		actions := make([]DLQAction, len(would))
		for i, m := range would {
			actions[i] = DLQAction{
				Actor: r.Actor, Action: action, DLQID: m.OutboxID, EventID: m.ID, TenantID: m.TenantID, AggregateType: m.AggregateType,
				AggregateID: m.AggregateID, EventType: m.Type, Reason: r.Reason, Slot: m.Slot,
			}
		}
		return actions, nil
	}
	args := r.args()
	args["limit"], args["actor"], args["reason"] = min(r.Limit, MaxDLQBatch), r.Actor, r.Reason
	var actions []DLQAction
	err := d.tx(ctx, r.TenantID, pgx.ReadWrite, func(tx pgx.Tx) (err error) {
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
	if action == DLQRetry {
		for _, a := range actions {
			d.wake(a.Slot)
		}
	}
	return actions, nil
}

// tx runs fn in a transaction of the tenant, or of none.
func (d *DLQ) tx(ctx context.Context, tenant int64, mode pgx.TxAccessMode, fn func(tx pgx.Tx) error) error {
	if tenant == 0 {
		return postgres.InTx(ctx, d.pool, pgx.TxOptions{AccessMode: mode}, fn)
	}
	return postgres.InTenant(ctx, d.pool, tenant, pgx.TxOptions{AccessMode: mode}, fn)
}
