package outbox

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
)

var (
	// ErrNotWaiting reports a message that is not delayed. It was published, is in the
	// DLQ or is pending.
	ErrNotWaiting = errors.New("outbox: the message is not waiting")
	// ErrDue reports a delayed message that is due: a relay may be publishing it.
	ErrDue = errors.New("outbox: the message is due, and a relay may be publishing it")
	// ErrBehind reports a message that waits behind another one of its aggregate.
	ErrBehind = errors.New("outbox: the message waits behind another one of its aggregate")
)

// WaitingMessage is a delayed message of the outbox. It waits for its next attempt, for the time
// that its writer set, or behind such a message.
type WaitingMessage struct {
	event.Event // only GetWaiting reads Payload
	Attempts    int
	LastError   string
	InsertedAt  time.Time
	AvailableAt time.Time     // when it is due
	DueIn       time.Duration // by the database's clock; 0 or less if it is due
	Behind      int64         // the id of the message for which it waits; 0 if none
}

// WaitingFilter selects the delayed messages that match every field that is set.
type WaitingFilter struct {
	TenantID      int64
	AggregateType string
	AggregateID   event.ID
	EventType     string
	After         int64 // only higher ids
}

// waitingPage is the number of messages that ListWaiting reads at once.
const waitingPage = 500

const waitingColumns = `id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, event_version::int, occurred_at,
       coalesce(trace_id, ''), slot::int, attempts::int, coalesce(last_error, ''), inserted_at, available_at,
       extract(epoch FROM available_at - clock_timestamp())::float8, coalesce(behind, 0)`

func (m *WaitingMessage) scan(row pgx.Row, more ...any) error {
	var due float64
	err := row.Scan(append([]any{&m.OutboxID, &m.ID, &m.TenantID, &m.AggregateType, &m.AggregateID, &m.Type, &m.Version, &m.OccurredAt,
		&m.TraceParent, &m.Slot, &m.Attempts, &m.LastError, &m.InsertedAt, &m.AvailableAt, &due, &m.Behind}, more...)...)
	m.DueIn = time.Duration(due * float64(time.Second))
	return err
}

const (
	// listWaitingSQL reads a page of delayed messages, without payloads.
	//
	// Index: outbox_messages_delayed_id_idx.   Locks: none.
	listWaitingSQL = `
SELECT /* outbox.list_waiting */ ` + waitingColumns + `
  FROM outbox_messages
 WHERE delayed AND id > @after
   AND (@tenant::bigint IS NULL OR tenant_id = @tenant)
   AND (@aggregate_type::text IS NULL OR aggregate_type = @aggregate_type)
   AND (@aggregate_id::text IS NULL OR aggregate_id = @aggregate_id)
   AND (@event_type::text IS NULL OR event_type = @event_type)
 ORDER BY id LIMIT @limit`
	// getWaitingSQL reads one delayed message. Index: outbox_messages_pkey. Locks: none.
	getWaitingSQL = `SELECT /* outbox.get_waiting */ ` + waitingColumns + `, payload FROM outbox_messages WHERE id = @id AND delayed`
)

// retryingSQL reads the delayed messages that failed, of the first ones by id. A message that
// failed has a lower id than those that wait behind it.
//
// Index: outbox_messages_delayed_id_idx, a bounded number of rows.   Locks: none.
const retryingSQL = `
SELECT /* outbox.retrying */ ` + waitingColumns + `
  FROM (SELECT * FROM outbox_messages WHERE delayed ORDER BY id LIMIT @bound) m
 WHERE attempts > 0 AND (@tenant::bigint IS NULL OR tenant_id = @tenant)
 ORDER BY available_at, id LIMIT @limit`

// retryingBound is the number of delayed messages among which Retrying looks.
const retryingBound = 20_000

// Retrying returns at most limit messages that failed and will be retried, the next one first,
// without payloads. Tenant 0 means any tenant. It looks among the 20,000 delayed messages with the
// lowest ids.
func Retrying(ctx context.Context, pool *pgxpool.Pool, tenant int64, limit int) (all []WaitingMessage, err error) {
	var b pgx.Batch
	b.Queue(walkSQL)
	b.Queue(retryingSQL, pgx.StrictNamedArgs{"tenant": postgres.IfSet(tenant), "bound": retryingBound, "limit": limit}).Query(
		func(rows pgx.Rows) (err error) {
			all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (m WaitingMessage, err error) { return m, m.scan(row) })
			return err
		})
	if err := pool.SendBatch(ctx, &b).Close(); err != nil {
		return nil, fmt.Errorf("list outbox messages that are retried: %w", err)
	}
	return all, nil
}

// ListWaiting yields the first delayed messages that the filter selects, by id and without
// payloads: at most limit, or with a negative limit all. An error is the last element.
func ListWaiting(ctx context.Context, pool *pgxpool.Pool, f WaitingFilter, limit int) iter.Seq2[WaitingMessage, error] {
	return postgres.Pages(limit, waitingPage, func(limit int) (page []WaitingMessage, err error) {
		var b pgx.Batch
		b.Queue(walkSQL)
		b.Queue(listWaitingSQL, pgx.StrictNamedArgs{
			"tenant": postgres.IfSet(f.TenantID), "aggregate_type": postgres.IfSet(f.AggregateType),
			"aggregate_id": postgres.IfSet(f.AggregateID), "event_type": postgres.IfSet(f.EventType), "after": f.After, "limit": limit,
		}).Query(func(rows pgx.Rows) (err error) {
			page, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (m WaitingMessage, err error) { return m, m.scan(row) })
			return err
		})
		if err := pool.SendBatch(ctx, &b).Close(); err != nil {
			return nil, fmt.Errorf("list waiting outbox messages after %d: %w", f.After, err)
		}
		if len(page) > 0 {
			f.After = page[len(page)-1].OutboxID
		}
		return page, nil
	})
}

// GetWaiting returns a delayed message with its payload, or ErrNotWaiting.
func GetWaiting(ctx context.Context, pool *pgxpool.Pool, id int64) (m WaitingMessage, err error) {
	err = m.scan(pool.QueryRow(ctx, getWaitingSQL, pgx.StrictNamedArgs{"id": id}), &m.Payload)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotWaiting
	}
	if err != nil {
		return WaitingMessage{}, fmt.Errorf("read waiting outbox message %d: %w", id, err)
	}
	return m, nil
}

// notedSQL records the action on the message in the CTE taken.
const notedSQL = `
noted AS (
  INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, reason)
  SELECT @actor, @action, id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, @reason FROM taken RETURNING 1)`

// retryWaitingSQL makes a delayed message due and records that. The message remains delayed, so the
// later messages of its aggregate do not overtake it.
//
// Index: outbox_messages_pkey.   Locks: the message.
const retryWaitingSQL = `
WITH taken AS (
  UPDATE outbox_messages SET available_at = greatest(clock_timestamp(), inserted_at + interval '1 microsecond')
   WHERE id = @id AND delayed AND behind IS NULL AND available_at > clock_timestamp() RETURNING *),` + notedSQL + `
SELECT /* outbox.retry_waiting */ count(*) FROM noted`

// RetryWaiting makes a delayed message due now, and with it the messages that wait behind it.
// ErrNotWaiting, ErrDue and ErrBehind are the reasons why it did nothing.
func RetryWaiting(ctx context.Context, pool *pgxpool.Pool, id int64, actor, reason string) error {
	if _, err := Unpark(ctx, pool); err != nil { // the message may wait behind a row that no longer exists
		return err
	}
	var did int
	err := pool.QueryRow(ctx, retryWaitingSQL, pgx.StrictNamedArgs{"id": id, "actor": actor, "action": "retry_waiting",
		"reason": reason}).Scan(&did)
	if err == nil && did == 0 {
		err = refusalOf(ctx, pool, id, true)
	}
	if err != nil {
		return fmt.Errorf("retry waiting outbox message %d: %w", id, err)
	}
	_, err = Unpark(ctx, pool)
	return err
}

// refusalOf returns the reason why a statement did not take a message.
func refusalOf(ctx context.Context, pool *pgxpool.Pool, id int64, first bool) error {
	m, err := GetWaiting(ctx, pool, id)
	switch {
	case err != nil:
		return err
	case first && m.Behind != 0:
		return fmt.Errorf("%w: message %d", ErrBehind, m.Behind)
	}
	return ErrDue
}

// A claim takes no lock, so a lock on a message does not prove that no relay is publishing it. Kill
// therefore first delays the message by far longer than the move takes, and commits. Then it moves
// the message only if its earlier due time is still in the future. In that case no claim that
// missed the delay found the message due, and none will before the move has committed.
const (
	killDelay = 10 * time.Minute
	// putOffSQL delays a message that is not due, and returns its earlier and its new due time.
	//
	// Index: outbox_messages_pkey.   Locks: the message.
	putOffSQL = `
WITH was AS (SELECT id, available_at FROM outbox_messages WHERE id = @id AND delayed FOR UPDATE)
UPDATE /* outbox.put_off */ outbox_messages m SET available_at = m.available_at + @for
  FROM was w WHERE m.id = w.id AND m.delayed AND w.available_at > clock_timestamp()
RETURNING w.available_at, m.available_at`
	// takeBackSQL gives a message that kill has delayed its earlier due time again. Otherwise the
	// next kill would take it for a message that no relay has found due. Index:
	// outbox_messages_pkey. Locks: the message.
	takeBackSQL = `
UPDATE /* outbox.take_back */ outbox_messages SET available_at = @was WHERE id = @id AND delayed AND available_at = @until`
	// killSQL moves a message to the DLQ and records that. Index: outbox_messages_pkey. Locks: the
	// message.
	killSQL = `
WITH taken AS (DELETE FROM outbox_messages WHERE id = @id AND delayed AND clock_timestamp() < @was::timestamptz RETURNING *),
moved AS (
  INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         available_at, attempts, last_error, trace_id, event_id, inserted_at, slot, cause, retries)
  SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         @was, attempts, concat_ws('; ', last_error, 'killed by ' || @actor || ': ' || @reason), trace_id, event_id, inserted_at,
         slot, @cause, ` + retriesSQL + ` FROM taken m
  RETURNING 1),` + notedSQL + `
SELECT /* outbox.kill */ count(*) FROM noted`
)

// KillWaiting moves a delayed message to the DLQ and frees the messages that wait behind it. It
// returns ErrDue for a message that a relay may be publishing. After ErrNotWaiting or ErrDue
// nothing has changed. If the process ends meanwhile, the message may be delayed by ten more
// minutes.
func KillWaiting(ctx context.Context, pool *pgxpool.Pool, id int64, actor, reason string) error {
	if err := kill(ctx, pool, id, actor, reason); err != nil {
		return fmt.Errorf("move waiting outbox message %d to the DLQ: %w", id, err)
	}
	_, err := Unpark(ctx, pool)
	return err
}

func kill(ctx context.Context, pool *pgxpool.Pool, id int64, actor, reason string) error {
	var was, until time.Time
	err := pool.QueryRow(ctx, putOffSQL, pgx.StrictNamedArgs{"id": id, "for": killDelay}).Scan(&was, &until)
	if errors.Is(err, pgx.ErrNoRows) {
		return refusalOf(ctx, pool, id, false)
	}
	if err != nil {
		return err
	}
	did := 0
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, killSQL, pgx.StrictNamedArgs{"id": id, "was": was, "actor": actor, "action": "kill", "reason": reason,
			"cause": deadletter.Cause("killed: " + reason)}).Scan(&did)
	})
	if err != nil || did > 0 {
		return err
	}
	if _, err := pool.Exec(ctx, takeBackSQL, pgx.StrictNamedArgs{"id": id, "was": was, "until": until}); err != nil {
		return err
	}
	return refusalOf(ctx, pool, id, false)
}
