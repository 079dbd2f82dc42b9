package consumers

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Start is the position at which a consumer begins a stream.
type Start struct {
	Stream  string
	Created time.Time
	Seq     uint64 // the consumer reads the messages after it; math.MaxUint64 if it does not read the stream
}

// begunSQL finds any offset of a consumer. Index: consumer_offsets_pkey. Locks: none.
const begunSQL = `SELECT /* consumers.begun */ EXISTS (SELECT FROM consumer_offsets WHERE consumer_name = @consumer)`

// HasOffset reports whether the consumer has an offset on any stream.
func HasOffset(ctx context.Context, tx pgx.Tx, consumer string) (begun bool, err error) {
	if err := tx.QueryRow(ctx, begunSQL, pgx.StrictNamedArgs{"consumer": consumer}).Scan(&begun); err != nil {
		return false, fmt.Errorf("read whether consumer %s has begun: %w", consumer, err)
	}
	return begun, nil
}

// startSQL creates offsets, and moves existing ones forward, never back. Index:
// consumer_offsets_pkey. Locks: the rows.
const startSQL = `
INSERT /* consumers.start */ INTO consumer_offsets AS o (consumer_name, partition_key, last_processed_id, as_of, stream_created, closed)
SELECT @consumer, key, seq, coalesce(created, 'epoch'), created, closed
  FROM unnest(@keys::text[], @seqs::bigint[], @createds::timestamptz[], @closed::boolean[]) AS s(key, seq, created, closed)
    ON CONFLICT (consumer_name, partition_key) DO UPDATE
   SET last_processed_id = EXCLUDED.last_processed_id, as_of = EXCLUDED.as_of, stream_created = EXCLUDED.stream_created,
       closed = EXCLUDED.closed, stored_id = NULL, stored_at = NULL
 WHERE NOT o.closed AND (EXCLUDED.closed OR o.stream_created IS DISTINCT FROM EXCLUDED.stream_created
       OR o.last_processed_id < EXCLUDED.last_processed_id)`

// StartAt creates the offsets of a consumer, or moves those that it has forward. The keys of at are
// partition numbers. The consumer reads a partition that at does not name from its beginning.
func StartAt(ctx context.Context, tx pgx.Tx, consumer string, at map[int]Start) error {
	prefix := "" // of the names of streams; one that has ended may have no other name here
	for n, s := range at {
		if s.Stream != "" {
			prefix = strings.TrimSuffix(s.Stream, strconv.Itoa(n))
		}
	}
	var keys []string
	var seqs []int64
	var createds []*time.Time
	var closed []bool
	for _, n := range slices.Sorted(maps.Keys(at)) {
		s := at[n]
		keys = append(keys, prefix+strconv.Itoa(n))
		if s.Seq == math.MaxUint64 {
			seqs, createds, closed = append(seqs, 0), append(createds, nil), append(closed, true)
		} else {
			seqs, createds, closed = append(seqs, int64(s.Seq)), append(createds, &s.Created), append(closed, false)
		}
	}
	if _, err := tx.Exec(ctx, startSQL, pgx.StrictNamedArgs{"consumer": consumer, "keys": keys, "seqs": seqs, "createds": createds,
		"closed": closed}); err != nil {
		return fmt.Errorf("begin consumer %s on %d streams: %w", consumer, len(keys), err)
	}
	return nil
}
