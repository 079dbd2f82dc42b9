package consumers

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/broker"
)

// rebaseSQL closes the offsets of a stream that are at its remaining end or beyond, and creates the
// offsets of another. Locks: the offsets of the stream; it waits for batches in flight.
const rebaseSQL = `
WITH ended AS (
  UPDATE consumer_offsets SET closed = true WHERE partition_key = @ended AND last_processed_id >= @left AND NOT closed
  RETURNING consumer_name, as_of
)
INSERT /* consumers.rebase */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created)
SELECT consumer_name, @key, 0, as_of, @created FROM ended ON CONFLICT DO NOTHING`

// Rebase moves consumers from a lost stream to the stream with which a repair replaced it. It moves
// those whose offset is at left, the end of the remaining stream, or beyond. They begin the new
// stream at its beginning. The other consumers read the remaining messages and then continue
// without Rebase. If the stream is gone, left is 0. Events that a consumer reads again change
// nothing, because it knows their versions. A second call changes nothing.
func Rebase(ctx context.Context, pool *pgxpool.Pool, ended string, left uint64, successor broker.Stream) error {
	if _, err := pool.Exec(ctx, rebaseSQL, pgx.StrictNamedArgs{"ended": ended, "left": int64(left), "key": successor.Name,
		"created": successor.Created}); err != nil {
		return fmt.Errorf("move the consumers of stream %s to %s: %w", ended, successor.Name, err)
	}
	return nil
}
