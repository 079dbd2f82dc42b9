package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// countPublishedSQL counts the rows that say that they are on a partition's stream, archived ones too, and the sequences that they name.
// Index: none, it reads everything.   Locks: none.
const countPublishedSQL = `
SELECT /* outbox.count_published */ count(stream_seq), count(DISTINCT stream_seq)
  FROM (SELECT stream_seq FROM outbox_messages WHERE partition = @partition AND stream_seq >= @first
        UNION ALL
        SELECT stream_seq FROM outbox_messages_archive WHERE partition = @partition AND stream_seq >= @first) published`

// CountPublished counts the rows of a partition whose stream sequence is first or above, and the different sequences among these. Both are the
// number of messages that the stream holds from first on, unless some were erased there. For verification: it reads every row.
func CountPublished(ctx context.Context, pool *pgxpool.Pool, partition int, first uint64) (rows, distinct int64, err error) {
	if err := pool.QueryRow(ctx, countPublishedSQL, pgx.StrictNamedArgs{"partition": partition, "first": int64(first)}).Scan(&rows, &distinct); err != nil {
		return 0, 0, fmt.Errorf("count the published outbox messages of partition %d: %w", partition, err)
	}
	return rows, distinct, nil
}
