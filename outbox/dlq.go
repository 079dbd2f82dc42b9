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

// ErrNotInDLQ reports a message that is not in the DLQ. It never was there, or somebody retried or
// discarded it.
var ErrNotInDLQ = errors.New("outbox: the DLQ holds no such message")

// MaxDLQBatch is the limit of messages of one List, Retry or Discard. A retry copies payloads
// within one transaction.
const MaxDLQBatch = 500

// DLQ has the operations on the outbox's dead letter queue. It is safe for concurrent use.
//
// With a pool of postgres.RoleSystem it works on every tenant. With one of postgres.RoleAPI,
// row-level security shows it only the filter's tenant, and no row without a tenant.
type DLQ struct {
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
	return &DLQ{pool: pool, wake: wake}
}

// DLQFilter selects the messages of the DLQ that match every field that is set. The zero filter
// selects all.
type DLQFilter struct {
	TenantID      int64   // 0: every tenant
	IDs           []int64 // in the DLQ; nil: any
	AggregateType string
	AggregateID   int64
	EventType     string
	Group         string    // the id of a group (Groups)
	DeadBefore    time.Time // moved to the DLQ before this time
	DeadAfter     time.Time // moved to the DLQ at this time or later
	After         int64     // only higher ids: the last id of the previous page
}

// dlqFilterSQL is the WHERE of every statement with a filter.
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

// DLQMessage is a message of the DLQ. Its OutboxID is its former id in the outbox, and its id here.
type DLQMessage struct {
	event.Event // only Get reads Payload
	Attempts    int
	LastError   string
	InsertedAt  time.Time // when the row was written to the outbox
	DeadAt      time.Time // when the row moved to the DLQ
	Group       string    // the id of its group
	Retries     int       // earlier retries
}

// dlqColumns is the select list for scanDLQ.
const dlqColumns = `id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, event_version::int, occurred_at,
       coalesce(trace_id, ''), slot::int, attempts::int, coalesce(last_error, ''), inserted_at, dead_at, group_id::text, retries`

func (m *DLQMessage) fields() []any {
	return []any{&m.OutboxID, &m.ID, &m.TenantID, &m.AggregateType, &m.AggregateID, &m.Type, &m.Version, &m.OccurredAt, &m.TraceParent,
		&m.Slot, &m.Attempts, &m.LastError, &m.InsertedAt, &m.DeadAt, &m.Group, &m.Retries}
}

func scanDLQ(row pgx.CollectableRow) (m DLQMessage, err error) { return m, row.Scan(m.fields()...) }

// listDLQSQL reads a page of the DLQ without payloads.
//
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: none.
const listDLQSQL = `
SELECT /* outbox.list_dlq */ ` + dlqColumns + `
  FROM outbox_messages_dlq
 WHERE ` + dlqFilterSQL + `
 ORDER BY id LIMIT @limit`

// List returns the first messages that the filter selects, by id and without payloads. It returns
// at most limit and at most MaxDLQBatch of them. A message that enters the DLQ between two pages
// may have an id of an earlier page.
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

// countDLQSQL counts the messages that a filter selects, and reads all of them. Index: as
// listDLQSQL. Locks: none.
const countDLQSQL = `SELECT /* outbox.count_dlq */ count(*) FROM outbox_messages_dlq WHERE ` + dlqFilterSQL

// Count returns the number of messages that the filter selects. It reads all of them.
func (d *DLQ) Count(ctx context.Context, f DLQFilter) (n int64, err error) {
	err = d.tx(ctx, f.TenantID, pgx.ReadOnly, func(tx pgx.Tx) error { return tx.QueryRow(ctx, countDLQSQL, f.args()).Scan(&n) })
	if err != nil {
		return 0, fmt.Errorf("count the DLQ: %w", err)
	}
	return n, nil
}

// deadTable describes the DLQ's table for package deadletter.
var deadTable = deadletter.Table{Name: "outbox_messages_dlq", Consumer: "''", Error: "coalesce(last_error, '')"}

// Groups returns the groups of the tenant's messages by event type and cause, without counts.
// Tenant 0 means all tenants. The group with the latest message comes first. If more than
// deadletter.MaxGroups exist, it returns some of them and more is true.
func (d *DLQ) Groups(ctx context.Context, tenant int64) (all []deadletter.Group, more bool, err error) {
	err = d.tx(ctx, tenant, pgx.ReadOnly, func(tx pgx.Tx) (err error) {
		all, more, err = deadletter.Groups(ctx, tx, deadTable, tenant)
		return err
	})
	return all, more, err
}

// Group returns a group by its id, without counts, or nil if the tenant has no message in it.
func (d *DLQ) Group(ctx context.Context, tenant int64, id string) (g *deadletter.Group, err error) {
	err = d.tx(ctx, tenant, pgx.ReadOnly, func(tx pgx.Tx) (err error) {
		g, err = deadletter.One(ctx, tx, deadTable, tenant, id)
		return err
	})
	return g, err
}

// CountGroups sets the counts of groups: the tenant's messages that entered the DLQ at since or
// later.
func (d *DLQ) CountGroups(ctx context.Context, tenant int64, groups []deadletter.Group, since time.Time) error {
	return d.tx(ctx, tenant, pgx.ReadOnly, func(tx pgx.Tx) error { return deadletter.Count(ctx, tx, deadTable, tenant, groups, since) })
}

// getDLQSQL reads one message with its payload. Index: outbox_messages_dlq_pkey. Locks: none.
const getDLQSQL = `
SELECT /* outbox.get_dlq */ ` + dlqColumns + `, payload
  FROM outbox_messages_dlq
 WHERE id = @id AND (@tenant::bigint IS NULL OR tenant_id = @tenant)`

// Get returns a message of the tenant with its payload, or ErrNotInDLQ. Tenant 0 means any tenant.
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

// The actions of an operator on a message of the DLQ.
const (
	DLQRetry   = "retry"
	DLQDiscard = "discard"
)

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

// DLQAction is an action on one message: a row of outbox_dlq_actions. In a dry run At is zero, and
// NewID 0.
type DLQAction struct {
	At            time.Time
	Actor         string
	Action        string // DLQRetry or DLQDiscard
	DLQID         int64  // the message's id in the DLQ
	EventID       string
	TenantID      int64
	AggregateType string
	AggregateID   int64
	EventType     string
	NewID         int64 // the message's new id in the outbox; 0 if discarded
	Reason        string
	Token         string // with which an API's caller acted, whatever Actor says; "" for commands and the console
	Slot          int    // the message's slot
}

// takeDLQSQL begins the statements that remove messages from the DLQ. It locks the chosen rows in
// the order of their ids, so two operators do not deadlock. The second operator finds the rows
// deleted and takes the next ones.
const takeDLQSQL = `
WITH chosen AS (
  SELECT id FROM outbox_messages_dlq
   WHERE ` + dlqFilterSQL + `
   ORDER BY id LIMIT @limit FOR UPDATE),
gone AS (
  DELETE FROM outbox_messages_dlq d USING chosen c WHERE d.id = c.id RETURNING d.*),`

// actionColumns are DLQAction's columns, in order.
const actionColumns = `at, actor, action, dlq_id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, ` +
	`coalesce(new_id, 0), reason, token`

// retryDLQSQL moves messages back to the outbox and records that. The new rows get new ids above
// every floor, in the order of the old ones.
//
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: the chosen messages.
const retryDLQSQL = takeDLQSQL + `
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
	return d.act(ctx, DLQRetry, retryDLQSQL, r)
}

// discardDLQSQL deletes messages and records that.
//
// Index: outbox_messages_dlq_pkey, or that of tenant and aggregate.   Locks: the chosen messages.
const discardDLQSQL = takeDLQSQL + `
noted AS (
  INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, reason, token)
  SELECT @actor, 'discard', id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, @reason, @token FROM gone ORDER BY id
  RETURNING *)
SELECT /* outbox.discard_dlq */ ` + actionColumns + `, (SELECT g.slot FROM gone g WHERE g.id = noted.dlq_id)::int
  FROM noted ORDER BY dlq_id`

// Discard deletes messages from the DLQ forever, with their payloads. It keeps only the records of
// the actions (DLQAction), and returns them as Retry does.
func (d *DLQ) Discard(ctx context.Context, r DLQRequest) ([]DLQAction, error) {
	return d.act(ctx, DLQDiscard, discardDLQSQL, r)
}

// act runs one of the two statements. In a dry run it only lists the messages.
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
				AggregateID: m.AggregateID, EventType: m.Type, Reason: r.Reason, Token: r.Token, Slot: m.Slot,
			}
		}
		return actions, nil
	}
	args := r.args()
	args["limit"], args["actor"], args["reason"], args["token"] = min(r.Limit, MaxDLQBatch), r.Actor, r.Reason, r.Token
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

// tx runs fn in a transaction of the tenant, or without a tenant if it is 0.
func (d *DLQ) tx(ctx context.Context, tenant int64, mode pgx.TxAccessMode, fn func(tx pgx.Tx) error) error {
	if tenant == 0 {
		return postgres.InTx(ctx, d.pool, pgx.TxOptions{AccessMode: mode}, fn)
	}
	return postgres.InTenant(ctx, d.pool, tenant, pgx.TxOptions{AccessMode: mode}, fn)
}
