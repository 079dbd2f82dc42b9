package consumers

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

// ErrNotParked reports a dead letter that does not exist. Another operator may have retried or
// discarded it.
var ErrNotParked = deadletter.ErrNotFound

// A DeadLetter is an event that a consumer has parked. Its stream is its partition.
type (
	DeadLetter       = deadletter.Letter
	DeadLetterFilter = deadletter.Filter
	DeadLetterAction = deadletter.Action
)

// NotFirstError reports a dead letter behind an earlier one of its aggregate, which has to be
// retried or discarded first.
type NotFirstError struct{ ID, First int64 }

func (e *NotFirstError) Error() string {
	return fmt.Sprintf("dead letter %d is behind dead letter %d of the same aggregate; retry or discard that one first", e.ID, e.First)
}

const (
	// MaxDeadLetters is the largest number of dead letters that one transaction of Retry applies.
	MaxDeadLetters = deadletter.MaxBatch
	// maxRetryBytes bounds the payloads that one transaction of Retry reads. The first one may be
	// larger.
	maxRetryBytes = 8 << 20
	// retryTimeout bounds one transaction. During it the consumer waits for the partition.
	retryTimeout = time.Minute
	// retryIdle is the time that the server waits in a transaction for an operator's frozen
	// process.
	retryIdle = 10 * time.Second
)

// DeadLetters has the operations on the dead letters of all consumers. It is safe for concurrent
// use, also while consumers run: each transaction that parks or unparks events of a partition first
// locks its offset.
type DeadLetters struct {
	deadletter.Reader
	pool        *pgxpool.Pool
	projections map[string]Projection
}

// NewDeadLetters returns the operations on pool, which is the projections' and acts as the system
// role. Retry applies a dead letter through the projection that has the name of its consumer.
func NewDeadLetters[P Projection](pool *pgxpool.Pool, projections ...P) *DeadLetters {
	d := &DeadLetters{deadletter.NewReader(pool, deadTable), pool, make(map[string]Projection)}
	for _, p := range projections {
		d.projections[p.Name()] = p
	}
	return d
}

// deadTable describes the table of dead letters. Behind finds an earlier letter of the aggregate;
// its index is consumer_dead_letters_aggregate_idx.
var deadTable = deadletter.Table{Source: deadletter.Consumers, Name: "consumer_dead_letters", Consumer: "consumer_name", Error: "error",
	Behind: `EXISTS (SELECT FROM consumer_dead_letters e WHERE (e.consumer_name, e.tenant_id, e.aggregate_type, e.aggregate_id)
       = (d.consumer_name, d.tenant_id, d.aggregate_type, d.aggregate_id) AND e.id < d.id)`,
	Any: `d.consumer_name = ANY(ARRAY(WITH RECURSIVE c(name) AS (
  (SELECT consumer_name FROM consumer_dead_letters ORDER BY consumer_name LIMIT 1)
  UNION ALL
  SELECT (SELECT n.consumer_name FROM consumer_dead_letters n WHERE n.consumer_name > c.name ORDER BY n.consumer_name LIMIT 1)
    FROM c WHERE c.name IS NOT NULL) SELECT name FROM c WHERE name IS NOT NULL))`,
	Columns: "d.partition_key, d.stream_seq", Body: "d.payload, d.headers",
	Fields: func(l *DeadLetter) (columns, body []any) {
		return []any{&l.Event.Stream, &l.Event.Seq}, []any{(*[]byte)(&l.Event.Payload), &l.Headers}
	}}

// DeadLetterRequest names a dead letter, which must be the first of its aggregate, and the operator
// who acts on it.
type DeadLetterRequest struct {
	ID     int64
	Actor  string // required
	Reason string // may be empty
	DryRun bool   // act, then roll back

	// Within is called in each transaction before its commit. gone is the number of letters that
	// the transaction removed; fault is the reason why the next letter stays, if it does. An error
	// rolls the transaction back. After a rollback Within may be called again with the same
	// arguments.
	Within func(ctx context.Context, tx pgx.Tx, gone int, fault error) error
}

// DeadLetterResult is the result of a request for the dead letters of one aggregate.
type DeadLetterResult struct {
	DeadLetter       // the one that the request names
	Gone       int   // dead letters that were applied, or the one that was discarded
	Left       int64 // dead letters that remain; maxDeadLetters means that many or more
	Next       int64 // the id of the first that remains; 0 if none remain and the aggregate continues
	Fault      error // why Next could not be applied; nil unless a retry ended with it
}

// Retry applies the dead letters of one aggregate through its projection, in the order of the
// stream. It ends when none is left or one cannot be applied. That one stays, with its new error,
// and all behind it stay too. Retry uses a transaction for every MaxDeadLetters letters, and each
// of these is consistent alone. With an error, Retry returns the result of the transactions that
// were committed before. A dry run tries only the letters of the first transaction. Errors:
// ErrNotParked, *NotFirstError.
func (d *DeadLetters) Retry(ctx context.Context, r DeadLetterRequest) (DeadLetterResult, error) {
	l, err := d.Get(ctx, 0, r.ID)
	if err != nil {
		return DeadLetterResult{}, err
	}
	p := d.projections[l.Consumer]
	if p == nil {
		return DeadLetterResult{}, fmt.Errorf("retry dead letter %d: this program does not know consumer %s", r.ID, l.Consumer)
	}
	res := DeadLetterResult{DeadLetter: l}
	for first := true; first || res.Next != 0 && res.Fault == nil && !r.DryRun; first = false {
		if err := d.act(ctx, r, &res, func(tx pgx.Tx, res *DeadLetterResult) error { return retryBatch(ctx, tx, p, r, res) }); err != nil {
			return res, fmt.Errorf("retry dead letter %d: %w", r.ID, err)
		}
	}
	return res, nil
}

// Discard deletes a dead letter, which must be the first of its aggregate. The next letter becomes
// the first; Retry applies it. Errors: ErrNotParked, *NotFirstError.
func (d *DeadLetters) Discard(ctx context.Context, r DeadLetterRequest) (DeadLetterResult, error) {
	l, err := d.Get(ctx, 0, r.ID)
	if err != nil {
		return DeadLetterResult{}, err
	}
	res := DeadLetterResult{DeadLetter: l}
	if err := d.act(ctx, r, &res, func(tx pgx.Tx, res *DeadLetterResult) error {
		res.Gone = 1
		return remove(ctx, tx, deadletter.Discard, r, []int64{r.ID})
	}); err != nil {
		return DeadLetterResult{}, fmt.Errorf("discard dead letter %d: %w", r.ID, err)
	}
	return res, nil
}

// errDryRun rolls a transaction back.
var errDryRun = errors.New("consumers: dry run")

// lockOffsetSQL blocks the consumer and all other operators from the stream.
// Index: consumer_offsets_pkey. Locks: the row.
const lockOffsetSQL = `
SELECT /* consumers.lock_offset */ closed FROM consumer_offsets WHERE consumer_name = @consumer AND partition_key = @key FOR UPDATE`

// lockOffset blocks the consumer from the aggregates of a stream. If the stream is closed, their
// later events are on other streams, so lockOffset locks the offsets of all streams.
func lockOffset(ctx context.Context, tx pgx.Tx, consumer, stream string) error {
	var closed bool
	err := tx.QueryRow(ctx, lockOffsetSQL, pgx.StrictNamedArgs{"consumer": consumer, "key": stream}).Scan(&closed)
	if err == nil && closed {
		_, err = tx.Exec(ctx, holdSQL, pgx.StrictNamedArgs{"consumer": consumer})
	}
	if err != nil {
		return fmt.Errorf("lock the offset of consumer %s on %s: %w", consumer, stream, err)
	}
	return nil
}

// act runs do in one transaction that has locked the partition's offset. The dead letter of the
// request must be the first of its aggregate. After a commit, a retry continues with the letter
// that is the first one then. Only a commit or a dry run changes res.
func (d *DeadLetters) act(ctx context.Context, r DeadLetterRequest, res *DeadLetterResult, do func(pgx.Tx, *DeadLetterResult) error) error {
	ctx, cancel := context.WithTimeout(ctx, retryTimeout)
	defer cancel()
	var now DeadLetterResult
	err := postgres.InTx(ctx, d.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		now = *res
		if err := lockOffset(ctx, tx, now.Consumer, now.Event.Stream); err != nil {
			return err
		}
		if err := now.count(ctx, tx); err != nil {
			return err
		}
		switch {
		case now.Gone > 0 && now.Next == 0: // another operator removed the rest
			return nil
		case now.Gone == 0 && (now.Next == 0 || now.Next > r.ID):
			return ErrNotParked
		case now.Gone == 0 && now.Next < r.ID:
			return &NotFirstError{r.ID, now.Next}
		}
		if err := do(tx, &now); err != nil {
			return err
		}
		if err := now.count(ctx, tx); err != nil {
			return err
		}
		if r.Within != nil {
			if err := r.Within(ctx, tx, now.Gone-res.Gone, now.Fault); err != nil {
				return err
			}
		}
		if r.DryRun {
			return errDryRun
		}
		return nil
	})
	if err != nil && !errors.Is(err, errDryRun) {
		return err
	}
	*res = now
	return nil
}

// leftSQL finds the first dead letter of an aggregate, and counts its dead letters up to a bound.
// Index: consumer_dead_letters_aggregate_idx. Locks: none.
const leftSQL = `
SELECT /* consumers.left_dead_letters */ coalesce(min(id), 0), count(*) FROM (
  SELECT id FROM consumer_dead_letters
   WHERE consumer_name = @consumer AND tenant_id = @tenant AND aggregate_type = @type AND aggregate_id = @id ORDER BY id LIMIT @most) d`

// count reads the first dead letter of the aggregate and the number of them.
func (res *DeadLetterResult) count(ctx context.Context, tx pgx.Tx) error {
	row := tx.QueryRow(ctx, leftSQL, pgx.StrictNamedArgs{
		"consumer": res.Consumer, "tenant": res.Event.TenantID, "type": res.Event.AggregateType, "id": res.Event.AggregateID,
		"most": maxDeadLetters,
	})
	if err := row.Scan(&res.Next, &res.Left); err != nil {
		return fmt.Errorf("count the dead letters of %s %s: %w", res.Event.AggregateType, res.Event.AggregateID, err)
	}
	return nil
}

// parkedEventsSQL reads the first dead letters of an aggregate, the very first one even if it
// exceeds the bound of bytes. Index: consumer_dead_letters_aggregate_idx. Locks: none; the offset
// is locked.
const parkedEventsSQL = `
SELECT /* consumers.parked_events */ id, stream_seq, event_type, headers, payload FROM (
  SELECT *, sum(octet_length(payload)) OVER (ORDER BY id) AS bytes, row_number() OVER (ORDER BY id) AS n FROM (
    SELECT * FROM consumer_dead_letters
     WHERE consumer_name = @consumer AND tenant_id = @tenant AND aggregate_type = @type AND aggregate_id = @id ORDER BY id LIMIT @most) d) d
 WHERE n = 1 OR bytes <= @bytes ORDER BY id`

// retryBatch applies the first dead letters of an aggregate in tx, which has locked the offset.
func retryBatch(ctx context.Context, tx pgx.Tx, p Projection, r DeadLetterRequest, res *DeadLetterResult) error {
	rows, _ := tx.Query(ctx, parkedEventsSQL, pgx.StrictNamedArgs{
		"consumer": res.Consumer, "tenant": res.Event.TenantID, "type": res.Event.AggregateType, "id": res.Event.AggregateID,
		"most": MaxDeadLetters, "bytes": maxRetryBytes,
	})
	var ids []int64
	var events []event.Event // up to the first that cannot be decoded
	var damaged error
	var id, seq int64
	var eventType string
	var headers map[string][]string
	var payload []byte
	if _, err := pgx.ForEachRow(rows, []any{&id, &seq, &eventType, &headers, &payload}, func() error {
		ids = append(ids, id)
		if damaged != nil {
			return nil
		}
		e, fault := event.Decode(fmt.Sprintf("parked.t%d.%s.%s", res.Event.TenantID, res.Event.AggregateType, eventType), headers, payload)
		if fault == nil {
			fault = checkKnown(&e)
		}
		if damaged = fault; fault == nil {
			e.Stream, e.Seq = res.Event.Stream, uint64(seq)
			events = append(events, e)
		}
		headers, payload = nil, nil // the events keep them
		return nil
	}); err != nil {
		return fmt.Errorf("read the dead letters of %s %s: %w", res.Event.AggregateType, res.Event.AggregateID, err)
	}
	if _, err := tx.Exec(ctx, planSQL, planArgs(retryIdle, len(ids))); err != nil {
		return fmt.Errorf("set the planner: %w", err)
	}
	n, fault, err := applyParked(ctx, tx, p, events)
	if err != nil {
		return err
	}
	if fault == nil {
		fault = damaged
	}
	res.Gone += n
	if err := remove(ctx, tx, deadletter.Retry, r, ids[:n]); err != nil || fault == nil {
		return err
	}
	res.Fault = fault
	return keep(ctx, tx, r, ids[n], fault)
}

// applyParked applies events up to the first that fails. It returns the number of applied events
// and the fault.
func applyParked(ctx context.Context, tx pgx.Tx, p Projection, events []event.Event) (n int, fault, err error) {
	if len(events) == 0 {
		return 0, nil, nil
	}
	if fault, err = try(ctx, tx, p, events...); err != nil || fault == nil {
		return len(events), nil, err
	}
	for i, e := range events {
		if fault, err = try(ctx, tx, p, e); err != nil || fault != nil {
			return i, fault, err
		}
	}
	return len(events), nil, nil
}

// actionsOnEventSQL reads the actions on the dead letters of an event.
// Index: consumer_dead_letter_actions_tenant_event_idx. Locks: none.
const actionsOnEventSQL = `
SELECT /* consumers.actions_on_event */ at, actor, action, dead_letter_id, event_id::text, tenant_id, aggregate_type, aggregate_id,
       event_type, 0, reason, '', consumer_name, error, 0
  FROM consumer_dead_letter_actions
 WHERE tenant_id = @tenant AND event_id = @event_id::uuid ORDER BY at, id LIMIT 100`

// ActionsOn returns up to 100 actions of operators on the dead letters of a tenant's event, oldest
// first.
func (d *DeadLetters) ActionsOn(ctx context.Context, tenant int64, eventID string) ([]DeadLetterAction, error) {
	rows, _ := d.pool.Query(ctx, actionsOnEventSQL, pgx.StrictNamedArgs{"tenant": tenant, "event_id": eventID})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[DeadLetterAction])
	if err != nil {
		return nil, fmt.Errorf("read the actions on the dead letters of event %s: %w", eventID, err)
	}
	return all, nil
}

// removeSQL deletes dead letters and records the action. Index: consumer_dead_letters_pkey. Locks:
// the rows.
const removeSQL = `
WITH gone AS (DELETE FROM consumer_dead_letters WHERE id = ANY(@ids) RETURNING *)
INSERT /* consumers.remove_dead_letters */ INTO consumer_dead_letter_actions
       (actor, action, dead_letter_id, consumer_name, stream_seq, tenant_id, aggregate_type, aggregate_id, event_id, event_type, reason)
SELECT @actor, @action, id, consumer_name, stream_seq, tenant_id, aggregate_type, aggregate_id, event_id, event_type, @reason
  FROM gone ORDER BY id`

func remove(ctx context.Context, tx pgx.Tx, action string, r DeadLetterRequest, ids []int64) error {
	if _, err := tx.Exec(ctx, removeSQL, pgx.StrictNamedArgs{"ids": ids, "actor": r.Actor, "action": action,
		"reason": r.Reason}); err != nil {
		return fmt.Errorf("delete %d dead letters: %w", len(ids), err)
	}
	return nil
}

// keepSQL records why a dead letter stays. Index: consumer_dead_letters_pkey. Locks: the row.
const keepSQL = `
WITH kept AS (UPDATE consumer_dead_letters SET error = @error, cause = @cause, retries = retries + 1 WHERE id = @id RETURNING *)
INSERT /* consumers.keep_dead_letter */ INTO consumer_dead_letter_actions
       (actor, action, dead_letter_id, consumer_name, stream_seq, tenant_id, aggregate_type, aggregate_id, event_id, event_type,
        error, reason)
SELECT @actor, 'retry', id, consumer_name, stream_seq, tenant_id, aggregate_type, aggregate_id, event_id, event_type, error, @reason
  FROM kept`

func keep(ctx context.Context, tx pgx.Tx, r DeadLetterRequest, id int64, fault error) error {
	text := cleanText(fault.Error())
	if _, err := tx.Exec(ctx, keepSQL, pgx.StrictNamedArgs{"id": id, "error": text, "cause": deadletter.Cause(text), "actor": r.Actor,
		"reason": r.Reason}); err != nil {
		return fmt.Errorf("record why dead letter %d stays: %w", id, err)
	}
	return nil
}
