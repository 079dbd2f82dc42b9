package erasure

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
)

// beginSQL notes a new erasure, or that one that was interrupted goes on.
// Index: erasures_unfinished_idx.   Locks: the row.
const beginSQL = `
INSERT /* erasure.begin */ INTO erasures AS e (tenant_id, author_id, requested_by, reason) VALUES (@tenant, @author, @actor, @reason)
    ON CONFLICT (tenant_id, author_id) WHERE finished_at IS NULL DO UPDATE SET runs = e.runs + 1
RETURNING requested_at, requested_by, runs, counts`

// saveSQL notes what has been redacted so far.
// Index: erasures_unfinished_idx.   Locks: the row.
const saveSQL = `
UPDATE /* erasure.save */ erasures SET counts = @counts, finished_at = CASE WHEN @finished THEN now() END
 WHERE tenant_id = @tenant AND author_id = @author AND finished_at IS NULL
RETURNING coalesce(finished_at, now())`

func (e *eraser) begin(ctx context.Context) error {
	err := e.tx(ctx, func(tx pgx.Tx) error {
		clear(e.report.Counts)
		return tx.QueryRow(ctx, beginSQL, pgx.StrictNamedArgs{"tenant": e.o.TenantID, "author": e.o.AuthorID, "actor": e.o.Actor, "reason": e.o.Reason}).
			Scan(&e.report.RequestedAt, &e.report.RequestedBy, &e.report.Runs, &e.report.Counts)
	})
	if err != nil {
		return fmt.Errorf("note the erasure: %w", err)
	}
	e.report.RequestedAt = e.report.RequestedAt.UTC()
	// A truth that a restore takes back to before this learns of it from there.
	return broker.RecordErasure(ctx, e.JetStream, e.Broker, broker.ErasedPerson{TenantID: e.o.TenantID, PersonID: e.o.AuthorID, Requested: e.report.RequestedAt})
}

func (e *eraser) save(ctx context.Context, finished bool) error {
	var at time.Time
	err := e.tx(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, saveSQL, pgx.StrictNamedArgs{
			"tenant": e.o.TenantID, "author": e.o.AuthorID, "counts": e.report.Counts, "finished": finished,
		}).Scan(&at)
	})
	if err != nil {
		return fmt.Errorf("note what was erased: %w", err)
	}
	if finished {
		at = at.UTC()
		e.report.FinishedAt = &at
	}
	return nil
}

// tx runs fn in a transaction of the truth in which nobody else takes the jobs' lease.
func (e *eraser) tx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	return postgres.InTx(ctx, e.Truth, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := e.Fence(ctx, tx); err != nil {
			return err
		}
		return fn(tx)
	})
}

// listSQL reads the erasures that were asked for, the last ones first.
// Index: none, a row for each.   Locks: none.
const listSQL = `
SELECT /* erasure.list */ tenant_id, author_id, requested_at, requested_by, reason, runs, finished_at, counts
  FROM erasures WHERE requested_at < coalesce(@before, 'infinity'::timestamptz) ORDER BY requested_at DESC, tenant_id, author_id LIMIT @limit`

// Record is an erasure as it is kept. FinishedAt is when a scan of everything has found nothing more; nil: it has to be asked for again.
type Record struct {
	TenantID, AuthorID int64
	RequestedAt        time.Time
	RequestedBy        string
	Reason             string
	Runs               int
	FinishedAt         *time.Time
	Counts             map[string]int // rows, messages and files' rows by store
}

// List returns up to limit erasures, the last ones first, that were asked for before a time; nil begins with the last. The pool acts as the system role.
func List(ctx context.Context, pool *pgxpool.Pool, before *time.Time, limit int) ([]Record, error) {
	rows, _ := pool.Query(ctx, listSQL, pgx.StrictNamedArgs{"before": before, "limit": limit})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Record])
	if err != nil {
		return nil, fmt.Errorf("list erasures: %w", err)
	}
	return all, nil
}
