package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// settledSQL searches for an unpublished message inserted up to @before.
//
// Index: those of pending rows, all of them in the worst case.   Locks: none.
const settledSQL = `
SELECT /* outbox.settled */ NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL AND inserted_at <= @before), now()`

// Settled reports whether every message written up to before is published or in the DLQ. Both times
// are by the database's clock. It also returns the clock's time now. A zero before only reads the
// clock.
func Settled(ctx context.Context, pool *pgxpool.Pool, before time.Time) (settled bool, now time.Time, err error) {
	if err := pool.QueryRow(ctx, settledSQL, pgx.StrictNamedArgs{"before": before}).Scan(&settled, &now); err != nil {
		return false, now, fmt.Errorf("check whether all messages before %s are published: %w", before, err)
	}
	return settled, now, nil
}
