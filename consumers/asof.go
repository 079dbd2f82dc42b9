package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// asOfSQL finds when a consumer was last known to have applied everything. A partition that nothing is known of makes it the epoch.
// Index: consumer_offsets_pkey, at most one row per partition.   Locks: none.
const asOfSQL = `
SELECT /* consumers.as_of */ CASE WHEN count(*) = @partitions THEN min(as_of) ELSE 'epoch' END
  FROM consumer_offsets WHERE consumer_name = @consumer`

// AsOf returns a time, by the servers' clocks, up to which the consumer has applied what was on the stream, as the transaction
// of tx sees it. It moves with each batch of the partition that is furthest back, and every LagInterval while the consumer has
// nothing to do. It is the Unix epoch until every partition has been looked at once.
func AsOf(ctx context.Context, tx pgx.Tx, consumer string) (time.Time, error) {
	rows, _ := tx.Query(ctx, asOfSQL, pgx.StrictNamedArgs{"consumer": consumer, "partitions": event.Partitions})
	at, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[time.Time])
	if err != nil {
		return time.Time{}, fmt.Errorf("read how far consumer %s is: %w", consumer, err)
	}
	return at.UTC(), nil
}

// confirmSQL notes that partitions had applied everything at a time. A batch since then says more.
// Index: consumer_offsets_pkey.   Locks: the rows; rows in use are passed over, for their batch will say more.
const confirmSQL = `
UPDATE /* consumers.confirm */ consumer_offsets o SET as_of = @at
  FROM (SELECT partition_key FROM consumer_offsets
         WHERE consumer_name = @consumer AND partition_key = ANY(@keys) AND as_of < @at
         ORDER BY partition_key FOR NO KEY UPDATE SKIP LOCKED) idle
 WHERE o.consumer_name = @consumer AND o.partition_key = idle.partition_key`

// confirm notes that the partitions had applied everything that was on the stream at a time.
func confirm(ctx context.Context, pool *pgxpool.Pool, consumer string, partitions []int, at time.Time) error {
	keys := make([]string, len(partitions))
	for i, p := range partitions {
		keys[i] = event.PartitionKey(p)
	}
	if _, err := pool.Exec(ctx, confirmSQL, pgx.StrictNamedArgs{"consumer": consumer, "keys": keys, "at": at}); err != nil {
		return fmt.Errorf("note that consumer %s has applied everything: %w", consumer, err)
	}
	return nil
}
