package letters

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
)

var (
	// ErrNotFound reports an operation that does not exist or belongs to another tenant.
	ErrNotFound = errors.New("letters: no such operation")
	// ErrFinished reports an operation that has ended.
	ErrFinished = errors.New("letters: the operation has ended")
	errLost     = errors.New("letters: another process works on the operation")
)

// Operation retries or discards the dead letters that a filter selects.
type Operation struct {
	ID        string // a UUID
	Source    string // deadletter.Outbox or deadletter.Consumers
	TenantID  int64  // 0: all tenants
	Action    string // deadletter.Retry or deadletter.Discard
	Filter    deadletter.Filter
	Actor     string // required
	Reason    string
	Requested time.Time
	// Total is the number of letters that the filter selected at the request. For a retry of
	// consumers' letters it counts only the first letter of each aggregate, because its retry
	// includes the letters behind it.
	Total  int64
	Seen   int64 // of Total
	Done   int64 // letters that were retried or discarded
	Failed int64 // letters that failed, and remain
	// WorkedAt is the time of the last slice, FinishedAt that of the end; nil before.
	WorkedAt, FinishedAt *time.Time
	StoppedBy            string // the operator who ended it early
	LastError            string

	after int64
}

const operationColumns = `operation_id::text, tenant_id, action, filter, actor, reason, requested_at, total, seen, done, failed, ` +
	`worked_at, finished_at, stopped_by, last_error, after_id`

func (o *Operation) fields() []any {
	return []any{&o.ID, &o.TenantID, &o.Action, &o.Filter, &o.Actor, &o.Reason, &o.Requested, &o.Total, &o.Seen, &o.Done, &o.Failed,
		&o.WorkedAt, &o.FinishedAt, &o.StoppedBy, &o.LastError, &o.after}
}

// The statements on a table of operations.
const (
	// startSQL inserts an operation, unless its id exists. Index: the table's primary key. Locks:
	// the new row.
	startSQL = `
INSERT /* letters.start */ INTO {table} (operation_id, tenant_id, action, filter, actor, reason, total)
VALUES (@id, @tenant, @action, @filter, @actor, @reason, @total) ON CONFLICT (operation_id) DO NOTHING`
	// getSQL reads an operation. Index: the table's primary key. Locks: none.
	getSQL = `SELECT /* letters.get */ ` + operationColumns + ` FROM {table} WHERE operation_id = @id::uuid`
	// listSQL reads the latest operations on a group, or on any. Index: by group, or by time.
	// Locks: none.
	listSQL = `
SELECT /* letters.list */ ` + operationColumns + ` FROM {table}
 WHERE (@group::text IS NULL OR filter ->> 'group' = @group) AND (@tenant::bigint = 0 OR tenant_id = @tenant)
 ORDER BY requested_at DESC, operation_id LIMIT @limit`
	// unfinishedSQL finds an operation without a process. Index: that of unfinished ones. Locks:
	// none.
	unfinishedSQL = `
SELECT /* letters.unfinished */ operation_id::text FROM {table} WHERE finished_at IS NULL AND lease_until < now()
 ORDER BY requested_at LIMIT 1`
	// claimSQL takes the lease. Index: the table's primary key. Locks: the row.
	claimSQL = `
UPDATE /* letters.claim */ {table} SET worker = @worker, lease_until = now() + @lease::interval
 WHERE operation_id = @id::uuid AND finished_at IS NULL AND (lease_until < now() OR worker = @worker) RETURNING ` + operationColumns
	// moveSQL records the result of a slice, if its process still has the operation.
	// Index: the table's primary key. Locks: the row.
	moveSQL = `
UPDATE /* letters.move */ {table}
   SET seen = seen + CASE WHEN after_id < @after OR @stays THEN @seen ELSE 0 END,
       after_id = CASE WHEN @stays THEN after_id ELSE greatest(after_id, @after) END,
       done = done + @done, failed = failed + @failed, last_error = coalesce(nullif(@error, ''), last_error), worked_at = clock_timestamp(),
       lease_until = clock_timestamp() + @lease::interval, finished_at = CASE WHEN @finished THEN clock_timestamp() END
 WHERE operation_id = @id::uuid AND worker = @worker AND finished_at IS NULL RETURNING ` + operationColumns
	// releaseSQL ends the lease. Index: the table's primary key. Locks: the row.
	releaseSQL = `
UPDATE /* letters.release */ {table} SET lease_until = '-infinity', last_error = coalesce(nullif(@error, ''), last_error)
 WHERE operation_id = @id::uuid AND worker = @worker AND finished_at IS NULL`
	// stopSQL ends an operation. Index: the table's primary key. Locks: the row.
	stopSQL = `
UPDATE /* letters.stop */ {table} SET finished_at = clock_timestamp(), stopped_by = @actor
 WHERE operation_id = @id::uuid AND (@tenant::bigint = 0 OR tenant_id = @tenant) AND finished_at IS NULL`
)

// ledger is the table of operations in one database.
type ledger struct {
	source string
	pool   *pgxpool.Pool
	table  string
}

func (l ledger) sql(sql string) string { return strings.ReplaceAll(sql, "{table}", l.table) }

func (l ledger) get(ctx context.Context, id string) (o Operation, err error) {
	o.Source = l.source
	err = l.pool.QueryRow(ctx, l.sql(getSQL), pgx.StrictNamedArgs{"id": id}).Scan(o.fields()...)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Operation{}, fmt.Errorf("read operation %s: %w", id, err)
	}
	return o, nil
}

func (l ledger) list(ctx context.Context, tenant int64, group string, limit int) ([]Operation, error) {
	args := pgx.StrictNamedArgs{"tenant": tenant, "group": nil, "limit": limit}
	if group != "" {
		args["group"] = group
	}
	rows, _ := l.pool.Query(ctx, l.sql(listSQL), args)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (o Operation, err error) {
		o.Source = l.source
		return o, row.Scan(o.fields()...)
	})
	if err != nil {
		return nil, fmt.Errorf("list the operations on dead letters: %w", err)
	}
	return all, nil
}

// moved is the result of a slice.
type moved struct {
	after              int64 // the last letter that the slice processed
	seen, done, failed int64
	stays              bool // after_id does not move
	finished           bool
	err                error
}

// move records the result of a slice in its transaction, and returns the updated operation. errLost
// must roll the slice back.
func (l ledger) move(ctx context.Context, q postgres.Querier, worker string, lease time.Duration, id string,
	m moved) (o Operation, err error) {
	o.Source = l.source
	text := ""
	if m.err != nil {
		text = strings.ToValidUTF8(strings.ReplaceAll(m.err.Error(), "\x00", ""), "")
	}
	err = q.QueryRow(ctx, l.sql(moveSQL), pgx.StrictNamedArgs{"id": id, "worker": worker, "lease": lease, "after": m.after,
		"seen": m.seen, "done": m.done, "failed": m.failed, "stays": m.stays, "finished": m.finished, "error": text}).Scan(o.fields()...)
	if errors.Is(err, pgx.ErrNoRows) {
		err = errLost
	}
	if err != nil {
		return Operation{}, fmt.Errorf("move operation %s: %w", id, err)
	}
	return o, nil
}
