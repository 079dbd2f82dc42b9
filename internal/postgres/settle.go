package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrUnknown reports a transaction of which nobody could be asked whether it was committed.
var ErrUnknown = errors.New("postgres: it is unknown whether the transaction was committed")

// errAborted reports a transaction whose COMMIT had no answer, and which has done nothing.
var errAborted = errors.New("postgres: the transaction was aborted")

// xidSQL names the transaction to those who will have to ask about it, by its id, empty as long as it has written nothing, and the
// timeline of the server's log.
// Index: none.   Locks: none.
const xidSQL = `SELECT /* postgres.xid */ coalesce(pg_current_xact_id_if_assigned()::text, ''), left(pg_walfile_name(pg_current_wal_lsn()), 8)`

// xactStatusSQL reads what became of a transaction, empty when that is forgotten, and the timeline of the server's log.
// Index: none.   Locks: none.
const xactStatusSQL = `
SELECT /* postgres.xact_status */ coalesce(pg_xact_status($1::text::xid8), ''), left(pg_walfile_name(pg_current_wal_lsn()), 8)`

// decided reports an error of COMMIT that says that nothing was committed: one of the server's, which goes on with the connection.
// What ends the connection may come after the commit.
func decided(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.SeverityUnlocalized == "ERROR"
}

// lostCommit is a COMMIT without an answer.
type lostCommit struct {
	xid, timeline string
	err           error
}

func (l *lostCommit) Error() string { return fmt.Sprintf("commit transaction %s: %v", l.xid, l.err) }
func (l *lostCommit) Unwrap() error { return l.err }

// How long and how often settle asks.
const (
	settleTimeout  = 5 * time.Second
	settleInterval = 10 * time.Millisecond
)

// settle returns nil when the transaction was committed, errAborted when it was not, else ErrUnknown. The connection may have ended
// before the transaction did, so it may run for a moment yet. ctx may have ended with the connection; the answer is owed all the same.
//
// A standby that was promoted meanwhile gives ids anew that it had not heard of, so a committed one may be a stranger's there: that is unknown.
func (l *lostCommit) settle(ctx context.Context, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	for {
		var status, timeline string
		err := pool.QueryRow(ctx, xactStatusSQL, l.xid).Scan(&status, &timeline)
		switch {
		case err == nil && status == "committed" && timeline != l.timeline:
			return fmt.Errorf("%w: the server has been replaced (timeline %s): %w", ErrUnknown, timeline, l)
		case err == nil && status == "committed":
			return nil
		case err == nil && status == "aborted":
			return fmt.Errorf("%w: %w", errAborted, l)
		case err == nil && status == "":
			return fmt.Errorf("%w: the server has forgotten it: %w", ErrUnknown, l)
		}
		select {
		case <-time.After(settleInterval):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrUnknown, errors.Join(l, err))
		}
	}
}
