package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// rebaseSQL moves the offsets of another life of the stream to this one: at most to the partition's last message, and to the
// beginning of a stream that was made anew, whose sequences mean other events.
// Locks: the offset rows, for which a batch in flight is waited for.
const rebaseSQL = `
UPDATE /* consumers.rebase */ consumer_offsets o
   SET last_processed_id = CASE WHEN o.stream_created = @created THEN LEAST(o.last_processed_id, t.tail) ELSE 0 END, generation = @generation, stream_created = @created
  FROM unnest(@keys::text[], @tails::bigint[]) AS t(key, tail)
 WHERE o.partition_key = t.key AND (o.generation, o.stream_created) IS DISTINCT FROM (@generation, @created::timestamptz)`

// Rebase lets all consumers go on with a stream that was repaired (relay.Repair): no offset lies beyond the last message of its
// partition, which tails has, and none means a sequence of another stream. What the consumers read again they have applied
// already, and know it by its version. Offsets that are of this stream and generation stay.
func Rebase(ctx context.Context, pool *pgxpool.Pool, created time.Time, generation int64, tails map[int]uint64) error {
	keys, seqs := make([]string, event.Partitions), make([]int64, event.Partitions)
	for p := range event.Partitions {
		keys[p], seqs[p] = event.PartitionKey(p), int64(tails[p])
	}
	if _, err := pool.Exec(ctx, rebaseSQL, pgx.StrictNamedArgs{"keys": keys, "tails": seqs, "generation": generation, "created": created}); err != nil {
		return fmt.Errorf("move the consumers' offsets to generation %d: %w", generation, err)
	}
	return nil
}
