package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrUnknown reports a transaction of which nobody could be asked whether it was committed.
var ErrUnknown = errors.New("postgres: it is unknown whether the transaction was committed")

// errAborted reports a transaction whose COMMIT had no answer, and which has done nothing.
var errAborted = errors.New("postgres: the transaction was aborted")

// errRunning reports a transaction that may still commit, or a server that cannot tell.
var errRunning = errors.New("postgres: the transaction still runs, or the server is a standby")

// Landed looks for what a transaction made and no other one can have made. It reports whether that is there, and so was committed.
type Landed func(ctx context.Context, tx pgx.Tx) (bool, error)

// lostCommit is a COMMIT without an answer.
type lostCommit struct{ err error }

func (l *lostCommit) Error() string { return fmt.Sprintf("commit: %v", l.err) }
func (l *lostCommit) Unwrap() error { return l.err }

// decided reports an error of COMMIT that says that nothing was committed: one of the server's, which goes on with the connection.
// What ends the connection may come after the commit.
func decided(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.SeverityUnlocalized == "ERROR" || errors.Is(err, pgx.ErrTxCommitRollback)
}

// How long and how often settle asks.
const (
	settleTimeout  = 5 * time.Second
	settleInterval = 10 * time.Millisecond
)

// endedSQL takes the lock that the transaction holds until it has ended: a committed one is visible before its locks are free, and a crash
// ends every transaction before the server answers again. A standby may not have heard of the transaction yet.
// Index: none.   Locks: the advisory lock, if it is free.
const endedSQL = `SELECT /* postgres.ended */ NOT pg_is_in_recovery() AND pg_try_advisory_xact_lock($1::bigint)`

// durableSQL is for a COMMIT that waits until what was committed before it is as durable as its own record: on disk, and where the server
// waits for standbys, there too. A crash takes away the wait of the lost COMMIT, not the transaction.
// Index: none.   Locks: none.
const durableSQL = `SELECT /* postgres.durable */ pg_logical_emit_message(true, 'tidings', ''), ` + durably

// Durable makes what tx has read last: when tx has committed, a crash of the server takes back no transaction that tx has seen, not even one
// that did not wait for the disk.
func Durable(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, durableSQL); err != nil {
		return fmt.Errorf("wait for the disk: %w", err)
	}
	return nil
}

// settle returns nil when the transaction that held the lock was committed, errAborted when it was not, else ErrUnknown. The connection may
// have ended before the transaction did, so it may run for a moment yet. ctx may have ended with the connection; the answer is owed all the
// same.
//
// The transaction's id proves nothing: after a crash or a failover the server gives the ids that it has forgotten to other transactions.
func settle(ctx context.Context, pool *pgxpool.Pool, tenant, lock int64, landed Landed, lost error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	for {
		var there bool
		err := InTenant(ctx, pool, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error {
			var ended bool
			if err := tx.QueryRow(ctx, endedSQL, lock).Scan(&ended); err != nil {
				return err
			}
			if !ended {
				return errRunning
			}
			var err error
			if there, err = landed(ctx, tx); err != nil || !there { // in a statement of its own: it sees what the lock has waited for
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
		select {
		case <-time.After(settleInterval):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrUnknown, errors.Join(lost, err))
		}
	}
}
