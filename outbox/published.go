package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// countPublishedSQL counts a partition's published rows and the distinct sequences that they name,
// including archived rows.
//
// Index: none, it reads everything.   Locks: none.
const countPublishedSQL = `
SELECT /* outbox.count_published */ count(stream_seq), count(DISTINCT stream_seq)
  FROM (SELECT stream_seq FROM outbox_messages WHERE partition = @partition AND stream_seq >= @first
        UNION ALL
        SELECT stream_seq FROM outbox_messages_archive WHERE partition = @partition AND stream_seq >= @first) published`

// CountPublished counts the rows of a partition whose stream sequence is at least first, and their
// distinct sequences. Both numbers equal the stream's messages from first on, unless an erasure
// deleted some of those. It reads every row, so use it only for verification.
func CountPublished(ctx context.Context, pool *pgxpool.Pool, partition int, first uint64) (rows, distinct int64, err error) {
	args := pgx.StrictNamedArgs{"partition": partition, "first": int64(first)}
	if err := pool.QueryRow(ctx, countPublishedSQL, args).Scan(&rows, &distinct); err != nil {
		return 0, 0, fmt.Errorf("count the published outbox messages of partition %d: %w", partition, err)
	}
	return rows, distinct, nil
}

// inPlaceSQL finds the messages whose rows name their sequence.
//
// Index: outbox_messages_pkey, the primary keys of the archive's ranges.   Locks: none.
const inPlaceSQL = `
SELECT /* outbox.in_place */ r.seq FROM unnest(@ids::bigint[], @event_ids::uuid[], @seqs::bigint[]) AS r(id, event_id, seq)
 WHERE EXISTS (SELECT FROM outbox_messages m
                WHERE m.id = r.id AND m.event_id = r.event_id AND m.partition = @partition AND m.stream_seq = r.seq)
    OR EXISTS (SELECT FROM outbox_messages_archive a
                WHERE a.id = r.id AND a.event_id = r.event_id AND a.partition = @partition AND a.stream_seq = r.seq)`

// InPlace returns the sequences of a partition's messages whose rows name that sequence. Any other
// message has no row, or its event is on a stream more than once. Classify distinguishes the two.
func InPlace(ctx context.Context, pool *pgxpool.Pool, partition int, messages []Published) (map[uint64]bool, error) {
	args := (&Mark{Rows: messages}).args(partition)
	in := make(map[uint64]bool, len(messages))
	var seq uint64
	rows, _ := pool.Query(ctx, inPlaceSQL, pgx.StrictNamedArgs{"partition": partition, "ids": args["ids"],
		"event_ids": args["event_ids"], "seqs": args["seqs"]})
	if _, err := pgx.ForEachRow(rows, []any{&seq}, func() error { in[seq] = true; return nil }); err != nil {
		return nil, fmt.Errorf("look up the rows of %d messages of partition %d: %w", len(messages), partition, err)
	}
	return in, nil
}
