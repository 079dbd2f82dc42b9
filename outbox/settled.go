package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// settledSQL looks for a message of before a time that is not published.
// Index: those of what is pending, all of it in the worst case.   Locks: none.
const settledSQL = `
SELECT /* outbox.settled */ NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL AND inserted_at <= @before), now()`

// Settled reports whether everything that was written up to before, by the database's clock, is published or in the DLQ, and
// what that clock says now. A zero time asks for the clock alone.
func Settled(ctx context.Context, pool *pgxpool.Pool, before time.Time) (settled bool, now time.Time, err error) {
	if err := pool.QueryRow(ctx, settledSQL, pgx.StrictNamedArgs{"before": before}).Scan(&settled, &now); err != nil {
		return false, now, fmt.Errorf("look whether what was written before %s is published: %w", before, err)
	}
	return settled, now, nil
}
