package erasure

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
)

// beginSQL records a new erasure, or another run of an unfinished one. Index:
// erasures_unfinished_idx. Locks: the row.
const beginSQL = `
INSERT /* erasure.begin */ INTO erasures AS e (tenant_id, author_id, requested_by, reason) VALUES (@tenant, @author, @actor, @reason)
    ON CONFLICT (tenant_id, author_id) WHERE finished_at IS NULL DO UPDATE SET runs = e.runs + 1
RETURNING requested_at, requested_by, runs, counts`

// saveSQL records the counts so far. Index: erasures_unfinished_idx. Locks: the row.
const saveSQL = `
UPDATE /* erasure.save */ erasures SET counts = @counts, finished_at = CASE WHEN @finished THEN now() END
 WHERE tenant_id = @tenant AND author_id = @author AND finished_at IS NULL
RETURNING coalesce(finished_at, now())`

func (e *eraser) begin(ctx context.Context) error {
	err := e.tx(ctx, func(tx pgx.Tx) error {
		clear(e.report.Counts)
		return tx.QueryRow(ctx, beginSQL, pgx.StrictNamedArgs{
			"tenant": e.o.TenantID, "author": e.o.AuthorID, "actor": e.o.Actor, "reason": e.o.Reason,
		}).Scan(&e.report.RequestedAt, &e.report.RequestedBy, &e.report.Runs, &e.report.Counts)
	})
	if err != nil {
		return fmt.Errorf("record the erasure: %w", err)
	}
	e.report.RequestedAt = e.report.RequestedAt.UTC()
	// If a restore sets the truth back to a time before the erasure, it reads the erasure from the
	// broker.
	return broker.RecordErasure(ctx, e.JetStream, e.Broker,
		broker.ErasedPerson{TenantID: e.o.TenantID, PersonID: e.o.AuthorID, Requested: e.report.RequestedAt})
}

// tell writes person.erased into each partition, behind the events of the steps before. So a
// subscriber learns of the erasure even if it lacks events that the erasure deletes from the
// streams.
func (e *eraser) tell(ctx context.Context) error {
	return e.tx(ctx, func(tx pgx.Tx) (err error) {
		e.told, err = outbox.Broadcast(ctx, tx, e.o.TenantID, event.AggregatePerson, event.Erased,
			event.PersonErased{PersonID: e.o.AuthorID, RequestedAt: event.Time{Time: e.report.RequestedAt}})
		return err
	})
}

// toldAll reports whether each active partition has the last person.erased.
func (e *eraser) toldAll(ctx context.Context) (bool, error) {
	all, err := outbox.Partitions(ctx, e.Truth)
	for _, p := range outbox.Active(all) {
		if !slices.Contains(e.told, p.FirstSlot) {
			return false, err
		}
	}
	return true, err
}

func (e *eraser) save(ctx context.Context, finished bool) error {
	var at time.Time
	err := e.tx(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, saveSQL, pgx.StrictNamedArgs{
			"tenant": e.o.TenantID, "author": e.o.AuthorID, "counts": e.report.Counts, "finished": finished,
		}).Scan(&at)
	})
	if err != nil {
		return fmt.Errorf("record the counts of the erasure: %w", err)
	}
	if finished {
		at = at.UTC()
		e.report.FinishedAt = &at
	}
	return nil
}

// tx runs fn in a transaction of the truth. While it runs, no other process can take the jobs'
// lease.
func (e *eraser) tx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	return postgres.InTx(ctx, e.Truth, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := e.Fence(ctx, tx); err != nil {
			return err
		}
		return fn(tx)
	})
}

// listSQL reads the requested erasures, newest first. Index: none, a row for each. Locks: none.
const listSQL = `
SELECT /* erasure.list */ tenant_id, author_id, requested_at, requested_by, reason, runs, finished_at, counts
  FROM erasures WHERE requested_at < coalesce(@before, 'infinity'::timestamptz) ORDER BY requested_at DESC, tenant_id, author_id
  LIMIT @limit`

// Record is a recorded erasure. FinishedAt is the time of the final scan that found nothing; if it
// is nil, the erasure must be requested again.
type Record struct {
	TenantID    int64
	AuthorID    event.ID
	RequestedAt time.Time
	RequestedBy string
	Reason      string
	Runs        int
	FinishedAt  *time.Time
	Counts      map[string]int // rows, messages and rows in files, by store
}

// List returns up to limit erasures that were requested before a time, newest first; nil begins
// with the newest. The pool acts as the system role.
func List(ctx context.Context, pool *pgxpool.Pool, before *time.Time, limit int) ([]Record, error) {
	rows, _ := pool.Query(ctx, listSQL, pgx.StrictNamedArgs{"before": before, "limit": limit})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Record])
	if err != nil {
		return nil, fmt.Errorf("list erasures: %w", err)
	}
	return all, nil
}

// unfinishedSQL searches for an erasure. Index: erasures_unfinished_idx. Locks: none.
const unfinishedSQL = `
SELECT /* erasure.unfinished */ EXISTS (SELECT FROM erasures
 WHERE tenant_id = @tenant AND author_id = @author AND finished_at IS NULL)`

// Unfinished reports whether the erasure of a person has begun and not ended. The pool acts as the
// system role.
func Unfinished(ctx context.Context, pool *pgxpool.Pool, tenant int64, author event.ID) (is bool, err error) {
	err = pool.QueryRow(ctx, unfinishedSQL, pgx.StrictNamedArgs{"tenant": tenant, "author": author}).Scan(&is)
	if err != nil {
		return false, fmt.Errorf("search for the erasure of user %s, tenant %d: %w", author, tenant, err)
	}
	return is, nil
}
