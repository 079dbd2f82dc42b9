package consumers

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/broker"
)

// rebaseSQL closes the offsets of a stream that lie at what is left of it or beyond, and begins those of another.
// Locks: the offsets of the stream, for which a batch in flight is waited for.
const rebaseSQL = `
WITH ended AS (
  UPDATE consumer_offsets SET closed = true WHERE partition_key = @ended AND last_processed_id >= @left AND NOT closed RETURNING consumer_name, as_of
)
INSERT /* consumers.rebase */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created)
SELECT consumer_name, @key, 0, as_of, @created FROM ended ON CONFLICT DO NOTHING`

// Rebase lets the consumers that have applied what is left of a lost stream, which ends at left, or more than that, continue with the stream that
// a repair put in its place, from its beginning. The others read what is left and continue by themselves; nothing is left of a stream that is
// gone. What they read again they have applied already, and know it by its version. To call it again changes nothing.
func Rebase(ctx context.Context, pool *pgxpool.Pool, ended string, left uint64, successor broker.Stream) error {
	if _, err := pool.Exec(ctx, rebaseSQL, pgx.StrictNamedArgs{"ended": ended, "left": int64(left), "key": successor.Name, "created": successor.Created}); err != nil {
		return fmt.Errorf("move the consumers of stream %s to %s: %w", ended, successor.Name, err)
	}
	return nil
}
