package outbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

var (
	// ErrNotExclusive reports that another repair or restore holds the lock of Exclusive. The error
	// names it.
	ErrNotExclusive = errors.New("another repair or restore is running")
	// ErrExclusiveLost reports that the connection with the lock of Exclusive is gone. Another
	// repair or restore may run now. A further call of Exclusive continues the work.
	ErrExclusiveLost = errors.New("this command lost its connection to the database, and its lock with it, so it stopped: " +
		"run it again")
)

const (
	// exclusiveSQL takes the lock of repairs and restores for a connection, until the connection
	// ends. The key is "tdrp".
	exclusiveSQL = `SELECT /* outbox.exclusive */ pg_try_advisory_lock(x'74647270'::bigint)`

	// exclusiveHolderSQL finds the holder. Every login sees its names; the start of its session may
	// be hidden. Any login of the database can take the lock.
	exclusiveHolderSQL = `
SELECT /* outbox.exclusive_holder */ l.pid, coalesce(a.application_name, ''), coalesce(a.usename::text, ''), a.backend_start
  FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
 WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND l.classid = 0 AND l.objid = x'74647270'::bigint::oid AND l.objsubid = 1`

	// exclusiveFreeSQL frees the lock at once. The server would notice the end of the connection
	// some time later.
	exclusiveFreeSQL = `SELECT /* outbox.exclusive_free */ pg_advisory_unlock_all()`
)

// exclusiveForever is longer than any repair: the pool must not replace its connection.
const exclusiveForever = 10 * 365 * 24 * time.Hour

// Exclusive returns a pool like pool for a repair or a restore, whose name is what. Its only
// connection holds a lock that excludes every other repair and restore. If it ends, so does each
// transaction on it, and the pool returns ErrExclusiveLost from then on. So a holder that was
// frozen for long, or cut off, writes nothing beside the next one. A caller of Exclusive must not
// hold a connection of the result while it asks for another.
//
// Call free in the end. Exclusive returns ErrNotExclusive while another caller holds the lock.
func Exclusive(ctx context.Context, pool *pgxpool.Pool, what string) (exclusive *pgxpool.Pool, free func(), err error) {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	cfg := pool.Config()
	cfg.MinConns, cfg.MinIdleConns, cfg.MaxConns = 0, 0, 1
	cfg.MaxConnLifetime, cfg.MaxConnIdleTime = exclusiveForever, exclusiveForever
	params := cfg.ConnConfig.RuntimeParams
	params["application_name"] = fmt.Sprintf("tidings %s (process %d on %s)", what, os.Getpid(), host) // up to 63 bytes
	params["idle_session_timeout"] = "0"
	// The server notices a dead machine within a minute. A frozen process keeps its lock, because
	// its machine answers.
	params["tcp_keepalives_idle"], params["tcp_keepalives_interval"], params["tcp_keepalives_count"] = "30", "10", "3"
	params["tcp_user_timeout"] = "0" // with the pool's limit, one lost packet would end the lock
	var taken atomic.Bool
	prove := cfg.AfterConnect
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if taken.Load() {
			return ErrExclusiveLost
		}
		if prove != nil {
			if err := prove(ctx, conn); err != nil {
				return err
			}
		}
		var got bool
		if err := conn.QueryRow(ctx, exclusiveSQL).Scan(&got); err != nil {
			return fmt.Errorf("lock out other repairs and restores: %w", err)
		}
		if !got {
			return notExclusive(ctx, conn)
		}
		taken.Store(true)
		return nil
	}
	if exclusive, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, nil, fmt.Errorf("open pool: %w", err)
	}
	if err := exclusive.Ping(ctx); err != nil {
		exclusive.Close()
		return nil, nil, err
	}
	return exclusive, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), exclusiveFreeTimeout)
		defer cancel()
		_, _ = exclusive.Exec(ctx, exclusiveFreeSQL) // a lost connection no longer has the lock
		exclusive.Close()
	}, nil
}

const exclusiveFreeTimeout = 5 * time.Second

// notExclusive returns ErrNotExclusive with the holder's name, and how to end it.
func notExclusive(ctx context.Context, conn *pgx.Conn) error {
	var pid int
	var application, login string
	var began *time.Time
	err := conn.QueryRow(ctx, exclusiveHolderSQL).Scan(&pid, &application, &login, &began)
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("%w: it has just ended", ErrNotExclusive)
	}
	if err != nil {
		return fmt.Errorf("%w, and reading which one failed: %w", ErrNotExclusive, err)
	}
	since := ""
	if began != nil {
		since = ", since " + began.UTC().Format(time.RFC3339)
	}
	return fmt.Errorf("%w: %q, session %d of PostgreSQL with the login %s%s; wait until it ends. If its process is stuck or gone, "+
		"end the session: SELECT pg_terminate_backend(%[3]d)", ErrNotExclusive, application, pid, login, since)
}
