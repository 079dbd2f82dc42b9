package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// countPublishedSQL counts the rows that say that they are on the stream, archived ones too, and the sequences that they name.
// Index: none, it reads everything.   Locks: none.
const countPublishedSQL = `
SELECT /* outbox.count_published */ count(stream_seq), count(DISTINCT stream_seq)
  FROM (SELECT stream_seq FROM outbox_messages WHERE stream_seq >= @first
        UNION ALL
        SELECT stream_seq FROM outbox_messages_archive WHERE stream_seq >= @first) published`

// CountPublished counts the rows whose stream sequence is first or above, and the different sequences among these. Both are the
// number of messages that the stream holds from first on, unless some were erased there. For verification: it reads every row.
func CountPublished(ctx context.Context, pool *pgxpool.Pool, first uint64) (rows, distinct int64, err error) {
	if err := pool.QueryRow(ctx, countPublishedSQL, pgx.StrictNamedArgs{"first": int64(first)}).Scan(&rows, &distinct); err != nil {
		return 0, 0, fmt.Errorf("count the published outbox messages: %w", err)
	}
	return rows, distinct, nil
}
