package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// origin is which stream a sequence belongs to.
type origin struct {
	created    time.Time // to the microsecond
	generation int64
}

// position is how far a partition has come.
type position struct {
	offset  uint64 // applied and committed when the session began
	reached uint64 // of the last message taken into a batch, whoever's
	event   uint64 // of the last one that was ours, since the session began: the next one names it
	origin  origin
	stopped bool
}

// openOffsetsSQL makes the rows that are missing: as of its creation, all that was on the stream is applied. A row that nothing
// was applied under belongs to the stream of today.
// Index: consumer_offsets_pkey.   Locks: the rows, in key order.
const openOffsetsSQL = `
INSERT /* consumers.open_offsets */ INTO consumer_offsets AS o (consumer_name, partition_key, last_processed_id, as_of, generation, stream_created)
SELECT @consumer, k, 0, @created, @generation, @created FROM unnest(@keys::text[]) AS k ORDER BY k
    ON CONFLICT (consumer_name, partition_key) DO UPDATE SET generation = excluded.generation, stream_created = excluded.stream_created
 WHERE o.last_processed_id = 0 AND (o.generation, o.stream_created) IS DISTINCT FROM (excluded.generation, excluded.stream_created)`

// readOffsetsSQL reads the offsets of some partitions.
// Index: consumer_offsets_pkey.   Locks: none.
const readOffsetsSQL = `
SELECT /* consumers.read_offsets */ right(partition_key, 2)::int, last_processed_id, generation, coalesce(stream_created, 'epoch')
  FROM consumer_offsets WHERE consumer_name = @consumer AND partition_key = ANY(@keys)`

func openOffsets(ctx context.Context, pool *pgxpool.Pool, consumer string, partitions []int, now origin) (map[int]*position, error) {
	keys := make([]string, len(partitions))
	for i, p := range partitions {
		keys[i] = event.PartitionKey(p)
	}
	if _, err := pool.Exec(ctx, openOffsetsSQL, pgx.StrictNamedArgs{
		"consumer": consumer, "keys": keys, "generation": now.generation, "created": now.created,
	}); err != nil {
		return nil, fmt.Errorf("open the offsets of %d partitions of %s: %w", len(keys), consumer, err)
	}
	rows, _ := pool.Query(ctx, readOffsetsSQL, pgx.StrictNamedArgs{"consumer": consumer, "keys": keys})
	all := make(map[int]*position, len(keys))
	var partition int
	var offset int64
	var o origin
	if _, err := pgx.ForEachRow(rows, []any{&partition, &offset, &o.generation, &o.created}, func() error {
		all[partition] = &position{offset: uint64(offset), reached: uint64(offset), event: uint64(offset), origin: o}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the offsets of %d partitions of %s: %w", len(keys), consumer, err)
	}
	if len(all) != len(keys) {
		return nil, fmt.Errorf("read the offsets of %d partitions of %s: found %d", len(keys), consumer, len(all))
	}
	return all, nil
}

// moveOffsetsSQL is the guard of exactly once: an offset moves only from where this batch begins, and on the stream that it was
// read from. It comes first in the transaction, so that whoever else has a batch for the partition waits, finds the offset
// moved, and leaves the partition out.
// Index: consumer_offsets_pkey.   Locks: the rows, in key order.
const moveOffsetsSQL = `
WITH batch AS (
  SELECT * FROM unnest(@keys::text[], @olds::bigint[], @news::bigint[], @generations::bigint[], @times::timestamptz[])
      AS b(partition_key, old, new, generation, stored)
), held AS MATERIALIZED (
  SELECT partition_key FROM consumer_offsets WHERE consumer_name = @consumer AND partition_key = ANY(@keys) ORDER BY partition_key FOR UPDATE
)
UPDATE /* consumers.move_offsets */ consumer_offsets o SET last_processed_id = b.new, last_processed_at = now(), as_of = GREATEST(o.as_of, b.stored)
  FROM batch b JOIN held USING (partition_key)
 WHERE o.consumer_name = @consumer AND o.partition_key = b.partition_key AND (o.last_processed_id, o.generation) = (b.old, b.generation)
RETURNING right(o.partition_key, 2)::int`
