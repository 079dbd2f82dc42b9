package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// progressSQL reads where a consumer stands.
// Index: consumer_offsets_pkey, at most one row per partition.   Locks: none.
const progressSQL = `
SELECT /* consumers.progress */ right(partition_key, 2)::int, last_processed_id, as_of FROM consumer_offsets WHERE consumer_name = @consumer`

// Progress is how far a consumer has come.
type Progress struct {
	// AsOf is a time, by the servers' clocks, up to which the consumer has applied what was on the stream. It moves with each batch of
	// the partition that is furthest back, and every LagInterval while the consumer has nothing to do. It begins with the creation
	// of the stream, and is the Unix epoch before the consumer has first run.
	AsOf time.Time
	// Offsets are the sequences of the last message that was applied, by partition; 0 before the first.
	Offsets [event.Partitions]uint64
}

// ReadProgress returns how far the consumer has come, as the transaction of tx sees it.
func ReadProgress(ctx context.Context, tx pgx.Tx, consumer string) (Progress, error) {
	rows, _ := tx.Query(ctx, progressSQL, pgx.StrictNamedArgs{"consumer": consumer})
	var all Progress
	var partition, known int
	var offset int64
	var asOf time.Time
	if _, err := pgx.ForEachRow(rows, []any{&partition, &offset, &asOf}, func() error {
		if partition < 0 || partition >= event.Partitions {
			return fmt.Errorf("it has a partition %d", partition)
		}
		all.Offsets[partition] = uint64(offset)
		if known++; known == 1 || asOf.Before(all.AsOf) {
			all.AsOf = asOf
		}
		return nil
	}); err != nil {
		return Progress{}, fmt.Errorf("read how far consumer %s is: %w", consumer, err)
	}
	if known < event.Partitions {
		all.AsOf = time.Unix(0, 0)
	}
	all.AsOf = all.AsOf.UTC()
	return all, nil
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
