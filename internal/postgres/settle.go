package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/work"
)

// ErrUnknown reports a transaction whose outcome no server could tell.
var ErrUnknown = errors.New("postgres: it is unknown whether the transaction was committed")

// errAborted reports a transaction whose COMMIT had no answer and that was not committed.
var errAborted = errors.New("postgres: the transaction was aborted")

// errRunning reports a transaction that may still commit, or a server that cannot tell.
var errRunning = errors.New("postgres: the transaction still runs, or the server is a standby")

// Landed searches for a result that only one transaction can have produced. It reports whether the
// result exists, so that the transaction was committed.
type Landed func(ctx context.Context, tx pgx.Tx) (bool, error)

// lostCommit is a COMMIT without an answer.
type lostCommit struct{ err error }

func (l *lostCommit) Error() string { return fmt.Sprintf("commit: %v", l.err) }
func (l *lostCommit) Unwrap() error { return l.err }

// provesRollback reports an error of COMMIT that proves that nothing was committed: an ERROR of the
// server, which keeps the connection. An error that ends the connection may come after the commit.
func provesRollback(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.SeverityUnlocalized == "ERROR" || errors.Is(err, pgx.ErrTxCommitRollback)
}

// The limit and the interval of settle's attempts.
const (
	settleTimeout  = 5 * time.Second
	settleInterval = 10 * time.Millisecond
)

// endedSQL takes the lock that the transaction holds until it ends. A committed transaction is
// visible before its locks are free, and a crash ends every transaction before the server answers
// again. A standby may lack the transaction so far.
//
// Index: none.   Locks: the advisory lock, if it is free.
const endedSQL = `SELECT /* postgres.ended */ NOT pg_is_in_recovery() AND pg_try_advisory_xact_lock($1::bigint)`

// durableSQL writes a record to the log. A COMMIT after it waits until earlier commits are as
// durable as that record: on disk, and on the standbys if the server waits for them. A crash loses
// the wait of the lost COMMIT, but not the transaction.
//
// Index: none.   Locks: none.
const durableSQL = `SELECT /* postgres.durable */ pg_logical_emit_message(true, 'tidings', ''), ` + durableCommit

// repeatedSQL commits a transaction that wrote nothing, and whose caller hears that its write
// exists. Where a server waits for standbys, it writes a record to the log like durableSQL: the
// COMMIT of a transaction without one does not wait.
//
// Index: none.   Locks: none.
const repeatedSQL = `
SELECT /* postgres.repeated */ CASE WHEN current_setting('synchronous_standby_names') <> ''
       THEN pg_logical_emit_message(true, 'tidings', '') END;
commit`

// Durable makes the data that tx has read durable. Once tx has committed, a crash of the server
// undoes no transaction that tx has seen. This includes transactions that did not wait for the
// disk.
func Durable(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, durableSQL); err != nil {
		return fmt.Errorf("wait for the disk: %w", err)
	}
	return nil
}

// AwaitDurable waits until everything that conn has seen is as durable as Durable makes it. This
// includes transactions whose own COMMIT did not wait for the standbys: somebody canceled the wait,
// or a crash of the primary ended it. If ctx ends, the server stops waiting too, because
// AwaitDurable writes nothing that it could show early.
func AwaitDurable(ctx context.Context, conn *pgx.Conn) error {
	takeWarning(conn)
	_, err := conn.Exec(ctx, durableSQL)
	if err == nil && takeWarning(conn) {
		err = errNotReplicated
	}
	if err != nil {
		return fmt.Errorf("wait for the standbys: %w", err)
	}
	return nil
}

// settle returns nil if the transaction that held the lock was committed, errAborted if it was not,
// and ErrUnknown if no server could tell. The transaction may outlive its connection for a moment.
// ctx may have ended with the connection, but the caller still needs the answer.
//
// The transaction's id proves nothing: after a crash or a failover the server assigns ids that it
// lost to other transactions.
func settle(ctx context.Context, pool *pgxpool.Pool, tenants []int64, lock int64, landed Landed, lost error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	for {
		var there bool
		err := InTx(ctx, pool, pgx.TxOptions{BeginQuery: "begin" + setTenants(tenants...)}, func(tx pgx.Tx) error {
			var ended bool
			if err := tx.QueryRow(ctx, endedSQL, lock).Scan(&ended); err != nil {
				return err
			}
			if !ended {
				return errRunning
			}
			var err error
			// landed runs separate statements, so that it sees what was committed before the lock
			// was free.
			if there, err = landed(ctx, tx); err != nil || !there {
				return err
			}
			return Durable(ctx, tx)
		})
		switch {
		case err == nil && there:
			return nil
		case err == nil:
			return fmt.Errorf("%w: %w", errAborted, lost)
		}
		if work.Sleep(ctx, settleInterval) != nil {
			return fmt.Errorf("%w: %w", ErrUnknown, errors.Join(lost, err))
		}
	}
}
