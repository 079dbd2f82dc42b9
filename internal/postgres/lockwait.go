package postgres

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

type lockWaitKey struct{}

// WithLockWait returns a context whose statements wait for one lock at most as long as wait. A
// longer wait is an error: IsLockTimeout. Zero means no limit. It is for readers that must answer
// while somebody locks a table. It applies to connections that a pool of this package hands out for
// the context, and costs a round trip when a connection changes from one limit to another.
func WithLockWait(ctx context.Context, wait time.Duration) context.Context {
	return context.WithValue(ctx, lockWaitKey{}, wait)
}

// limitLockWait gives a connection that leaves its pool the lock_timeout of ctx.
func limitLockWait(ctx context.Context, conn *pgx.Conn) (ok bool, err error) {
	want, _ := ctx.Value(lockWaitKey{}).(time.Duration)
	have, _ := conn.PgConn().CustomData()[customLockWait].(time.Duration)
	if want == have {
		return true, nil
	}
	sql := "RESET lock_timeout"
	if want > 0 {
		sql = fmt.Sprintf("SET lock_timeout = %d", want.Milliseconds())
	}
	if _, err := conn.Exec(ctx, sql); err != nil {
		return false, fmt.Errorf("limit the wait for locks: %w", err)
	}
	conn.PgConn().CustomData()[customLockWait] = want
	return true, nil
}

// customLockWait is the key of a connection's limit in its custom data.
const customLockWait = "tidings.lock_wait"
