package consumers

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
)

// offset is the position of a consumer on one stream.
type offset struct {
	Consumer string
	Stream   string
	Seq      uint64    // the last applied sequence
	Created  time.Time // when the stream of Seq was created, to the microsecond; the epoch if not recorded
	AsOf     time.Time
	Closed   bool      // the stream has ended and is applied to its end
	Stored   time.Time // when the stream stored the message at Seq, to the microsecond; the epoch if not recorded
}

// offsetsSQL reads the offsets of the given consumers, or of all if none is given.
// Index: consumer_offsets_pkey, a row per consumer and stream that ever existed. Locks: none.
const offsetsSQL = `
SELECT /* consumers.offsets */ consumer_name, partition_key, last_processed_id, coalesce(stream_created, 'epoch'), as_of, closed,
       coalesce(CASE WHEN stored_id = last_processed_id THEN stored_at END, 'epoch')
  FROM consumer_offsets WHERE cardinality(@consumers::text[]) = 0 OR consumer_name = ANY(@consumers)`

// readOffsets returns the offsets of the given consumers by consumer and stream, or of all
// consumers if none is given.
func readOffsets(ctx context.Context, q postgres.Querier, consumers ...string) (map[string]map[string]offset, error) {
	if consumers == nil {
		consumers = []string{}
	}
	rows, _ := q.Query(ctx, offsetsSQL, postgres.Args{"consumers": consumers})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[offset])
	if err != nil {
		return nil, fmt.Errorf("read the offsets of consumers: %w", err)
	}
	of := make(map[string]map[string]offset)
	for _, c := range consumers {
		of[c] = make(map[string]offset)
	}
	for _, o := range all {
		if of[o.Consumer] == nil {
			of[o.Consumer] = make(map[string]offset)
		}
		of[o.Consumer][o.Stream] = o
	}
	return of, nil
}

// beginSQL creates the offset of a stream. Its as_of is the earliest end of the predecessors, or
// the creation of a stream without predecessors. Everything on the streams up to that time is
// applied. Index: consumer_offsets_pkey. Locks: the new row.
const beginSQL = `
INSERT /* consumers.begin */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created)
SELECT @consumer, @key, 0, coalesce(min(as_of), @created), @created
  FROM consumer_offsets WHERE consumer_name = @consumer AND partition_key = ANY(@after::text[])
    ON CONFLICT DO NOTHING`

// begin creates the missing offsets of streams without predecessors, and of streams whose
// predecessors are all closed. It creates them in one transaction, so that no reader sees an as_of
// that covers only some of them.
func (c *Consumer) begin(ctx context.Context, streams []broker.Stream, have map[string]offset) (made bool, err error) {
	var q pgx.Batch
	for _, s := range streams {
		if _, ok := have[s.Name]; ok {
			continue
		}
		after, closed := make([]string, 0, len(s.After)), 0
		for _, n := range s.After {
			after = append(after, c.broker.StreamName(n))
			if have[c.broker.StreamName(n)].Closed {
				closed++
			}
		}
		if closed == len(after) {
			q.Queue(beginSQL, postgres.Args{"consumer": c.name, "key": s.Name, "created": s.Created, "after": after})
		}
	}
	if q.Len() == 0 {
		return false, nil
	}
	if err := c.deps.Pool.SendBatch(ctx, &q).Close(); err != nil {
		return false, fmt.Errorf("begin %d streams of %s: %w", q.Len(), c.name, err)
	}
	return true, nil
}

// moveSQL guarantees exactly once: an offset moves only from the start of this batch, and only on
// the stream that the batch was read from. It is the first statement of the transaction. So another
// instance with a batch of the same stream waits, and then moves nothing. Index:
// consumer_offsets_pkey. Locks: the row.
const moveSQL = `
UPDATE /* consumers.move */ consumer_offsets
   SET last_processed_id = @new, last_processed_at = now(), as_of = GREATEST(as_of, @stored), stream_created = @created, closed = @closed,
       stored_id = @new, stored_at = @stored_at
 WHERE consumer_name = @consumer AND partition_key = @key AND last_processed_id = @old
   AND coalesce(stream_created, @created) = @created AND NOT closed`

// succeedSQL creates the offsets of the successors of an ended stream, in the transaction that
// closes it. The first of several predecessors creates them. Index: consumer_offsets_pkey. Locks:
// the new rows.
const succeedSQL = `
INSERT /* consumers.succeed */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created)
SELECT o.consumer_name, s.key, 0, o.as_of, s.created
  FROM consumer_offsets o, unnest(@keys::text[], @createds::timestamptz[]) AS s(key, created)
 WHERE o.consumer_name = @consumer AND o.partition_key = @ended
    ON CONFLICT DO NOTHING`

func succeedArgs(consumer, ended string, successors []broker.Stream) postgres.Args {
	keys, createds := make([]string, len(successors)), make([]time.Time, len(successors))
	for i, s := range successors {
		keys[i], createds[i] = s.Name, s.Created
	}
	return postgres.Args{"consumer": consumer, "ended": ended, "keys": keys, "createds": createds}
}

// confirmSQL records that a stream was applied to its end at a time, unless a batch has set a later
// as_of. Index: consumer_offsets_pkey. Locks: the row; it skips a locked row, because the batch
// that holds it sets as_of.
const confirmSQL = `
UPDATE /* consumers.confirm */ consumer_offsets SET as_of = @at
 WHERE (consumer_name, partition_key) IN (SELECT consumer_name, partition_key FROM consumer_offsets
        WHERE consumer_name = @consumer AND partition_key = @key AND as_of < @at AND NOT closed FOR NO KEY UPDATE SKIP LOCKED)`

// Progress is the position of a consumer on all its streams.
type Progress struct {
	// AsOf is a time by the NATS servers' clocks. The consumer has applied every event that the
	// streams had at that time. It moves with each batch of the stream that is furthest behind, and
	// every LagInterval while the consumer is idle. Its first value is the creation of the stream.
	// Before the consumer has first run it is the Unix epoch.
	AsOf time.Time
	// Offsets are the last applied sequences by the name of the stream. The value for a stream that
	// has ended is math.MaxUint64.
	Offsets map[string]uint64
}

// ReadProgress returns the progress of each of the consumers, as the transaction of tx sees it.
func ReadProgress(ctx context.Context, tx pgx.Tx, consumers ...string) ([]Progress, error) {
	offsets, err := readOffsets(ctx, tx, consumers...)
	if err != nil {
		return nil, err
	}
	all := make([]Progress, len(consumers))
	for i, consumer := range consumers {
		all[i] = Progress{AsOf: asOf(offsets[consumer]), Offsets: make(map[string]uint64)}
		for stream, o := range offsets[consumer] {
			all[i].Offsets[stream] = o.Seq
			if o.Closed {
				all[i].Offsets[stream] = math.MaxUint64
			}
		}
	}
	return all, nil
}

// asOf returns the earliest as_of of the streams that have not ended, or the Unix epoch if there
// are none.
func asOf(offsets map[string]offset) time.Time {
	var at time.Time
	for _, o := range offsets {
		if !o.Closed && (at.IsZero() || o.AsOf.Before(at)) {
			at = o.AsOf
		}
	}
	if at.IsZero() {
		at = time.Unix(0, 0)
	}
	return at.UTC()
}

// Position is the position of a consumer on one stream.
type Position struct {
	Consumer string
	Seq      uint64    // the last applied sequence
	At       time.Time // when it was applied
	AsOf     time.Time // everything on the stream up to this time is applied
	Closed   bool      // the stream has ended and is applied to its end
}

// positionsSQL reads the positions of all consumers on a stream.
// Index: none, a row per consumer and stream that ever existed. Locks: none.
const positionsSQL = `
SELECT /* consumers.positions */ consumer_name, last_processed_id, last_processed_at, as_of, closed
  FROM consumer_offsets WHERE partition_key = @stream ORDER BY 1`

// Positions returns the position of each consumer on a stream, by name. A consumer that is not
// listed has not begun the stream.
func Positions(ctx context.Context, q postgres.Querier, stream string) ([]Position, error) {
	rows, _ := q.Query(ctx, positionsSQL, pgx.StrictNamedArgs{"stream": stream})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Position])
	if err != nil {
		return nil, fmt.Errorf("read the positions of consumers on %s: %w", stream, err)
	}
	return all, nil
}

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
