package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Horizon is a sample of how far ids have been handed out. Every transaction that wrote a row with an id up to LastID has ended
// once a later Horizon's Xmin is at least this one's Xmax: its transaction id was given out before its row's id, because the
// state row is written first. A transaction that writes an outbox row and nothing before it may take its row's id a moment
// before its transaction id; that is why a floor is a shortcut and never a proof (docs/adr/0004-floor.md).
type Horizon struct {
	LastID     int64
	Xmax, Xmin uint64
}

// The sequence is read by a statement of its own, before the snapshot is taken: an id that is handed out between the two is
// above LastID. One that nobody has used yet shows the id that it will hand out first.
const (
	lastIDSQL   = `SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM outbox_messages_id_seq`
	snapshotSQL = `SELECT pg_snapshot_xmax(s)::text::bigint, pg_snapshot_xmin(s)::text::bigint FROM pg_current_snapshot() s`
)

// ReadHorizon samples the horizon: first the last id handed out, then the snapshot.
func ReadHorizon(ctx context.Context, pool *pgxpool.Pool) (h Horizon, err error) {
	if err := pool.QueryRow(ctx, lastIDSQL).Scan(&h.LastID); err != nil {
		return Horizon{}, fmt.Errorf("read the last outbox id: %w", err)
	}
	var xmax, xmin int64
	if err := pool.QueryRow(ctx, snapshotSQL).Scan(&xmax, &xmin); err != nil {
		return Horizon{}, fmt.Errorf("read the snapshot: %w", err)
	}
	h.Xmax, h.Xmin = uint64(xmax), uint64(xmin)
	return h, nil
}

// oldestSQL reads each partition's first claimable row in a range of ids, which are compared as in claimSQL.
// Index: outbox_messages_pending_idx, one probe per partition past its floor.
const oldestSQL = `
SELECT /* outbox.oldest */ ask.partition::int, m.id
  FROM unnest(@partitions::smallint[], @above::bigint[], @upto::bigint[]) AS ask(partition, above, upto)
 CROSS JOIN LATERAL (
       SELECT id FROM outbox_messages
        WHERE (partition, id) > (ask.partition, ask.above) AND (partition, id) <= (ask.partition, ask.upto) AND processed_at IS NULL AND NOT delayed
        ORDER BY partition, id LIMIT 1) m`

// Range asks for the oldest claimable row of a partition with an id above Above and up to UpTo.
type Range struct {
	Partition   int
	Above, UpTo int64
}

// Oldest returns the id of the first claimable row of each partition in its range; a partition without one is left out.
func Oldest(ctx context.Context, pool *pgxpool.Pool, ranges []Range) (map[int]int64, error) {
	n := len(ranges)
	partitions, above, upTo := make([]int16, n), make([]int64, n), make([]int64, n)
	for i, r := range ranges {
		partitions[i], above[i], upTo[i] = int16(r.Partition), r.Above, r.UpTo
	}
	found := make(map[int]int64, n)
	var partition int
	var id int64
	rows, _ := pool.Query(ctx, oldestSQL, pgx.StrictNamedArgs{"partitions": partitions, "above": above, "upto": upTo})
	if _, err := pgx.ForEachRow(rows, []any{&partition, &id}, func() error { found[partition] = id; return nil }); err != nil {
		return nil, fmt.Errorf("read the oldest rows of %d partitions: %w", n, err)
	}
	return found, nil
}
