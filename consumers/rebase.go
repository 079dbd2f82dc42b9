package consumers

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/broker"
)

// rebaseSQL closes the offsets of a stream and begins those of another.
// Locks: the offsets of the stream, for which a batch in flight is waited for.
const rebaseSQL = `
WITH ended AS (
  UPDATE consumer_offsets SET closed = true WHERE partition_key = @ended AND NOT closed RETURNING consumer_name, as_of
)
INSERT /* consumers.rebase */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created)
SELECT consumer_name, @key, 0, as_of, @created FROM ended ON CONFLICT DO NOTHING`

// Rebase lets all consumers continue with the stream that a repair put in the place of a lost one, from its beginning. They read no more of
// the lost one. What they read again they have applied already, and know it by its version. To call it again changes nothing.
func Rebase(ctx context.Context, pool *pgxpool.Pool, ended string, successor broker.Stream) error {
	if _, err := pool.Exec(ctx, rebaseSQL, pgx.StrictNamedArgs{"ended": ended, "key": successor.Name, "created": successor.Created}); err != nil {
		return fmt.Errorf("move the consumers of stream %s to %s: %w", ended, successor.Name, err)
	}
	return nil
}
