package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// asOfSQL finds when a consumer last applied something.
// Index: consumer_offsets_pkey, at most one row per partition.   Locks: none.
const asOfSQL = `
SELECT /* consumers.as_of */ coalesce(max(last_processed_at), 'epoch') FROM consumer_offsets WHERE consumer_name = @consumer AND last_processed_id > 0`

// AsOf returns when the consumer's newest batch was applied, by the database's clock, as the transaction of tx sees it: what
// its projection shows was current then. It is the Unix epoch when nothing has been applied yet.
func AsOf(ctx context.Context, tx pgx.Tx, consumer string) (time.Time, error) {
	rows, _ := tx.Query(ctx, asOfSQL, pgx.StrictNamedArgs{"consumer": consumer})
	at, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[time.Time])
	if err != nil {
		return time.Time{}, fmt.Errorf("read when consumer %s applied last: %w", consumer, err)
	}
	return at.UTC(), nil
}
