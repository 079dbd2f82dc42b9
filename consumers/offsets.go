package consumers

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
)

// offset is how far a consumer has come on one stream.
type offset struct {
	Consumer string
	Stream   string
	Seq      uint64    // the last that was applied
	Created  time.Time // of the stream that Seq is of, to the microsecond; the epoch when that was not noted
	AsOf     time.Time
	Closed   bool // the stream has ended, and all of it is applied
}

// offsetsSQL reads the offsets of some consumers, or of all.
// Index: consumer_offsets_pkey, a row per consumer and stream that ever was.   Locks: none.
const offsetsSQL = `
SELECT /* consumers.offsets */ consumer_name, partition_key, last_processed_id, coalesce(stream_created, 'epoch'), as_of, closed
  FROM consumer_offsets WHERE cardinality(@consumers::text[]) = 0 OR consumer_name = ANY(@consumers)`

// readOffsets returns the offsets of the consumers, or of all, by consumer and stream.
func readOffsets(ctx context.Context, q querier, consumers ...string) (map[string]map[string]offset, error) {
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

// beginSQL makes the offset of a stream: as of its creation, or as of where its predecessors ended, all that was on the streams is applied.
// Index: consumer_offsets_pkey.   Locks: the new row.
const beginSQL = `
INSERT /* consumers.begin */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created)
SELECT @consumer, @key, 0, coalesce(min(as_of), @created), @created FROM consumer_offsets WHERE consumer_name = @consumer AND partition_key = ANY(@after::text[])
    ON CONFLICT DO NOTHING`

// begin makes the offsets that are missing: of streams without predecessors, and of those whose predecessors are all closed. It makes
// them together, so that nobody reads an as_of that knows of some alone.
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

// moveSQL is the guard of exactly once: an offset moves only from where this batch begins, and on the stream that it was read from. It
// comes first in the transaction, so that whoever else has a batch of the stream waits and then moves nothing.
// Index: consumer_offsets_pkey.   Locks: the row.
const moveSQL = `
UPDATE /* consumers.move */ consumer_offsets
   SET last_processed_id = @new, last_processed_at = now(), as_of = GREATEST(as_of, @stored), stream_created = @created, closed = @closed
 WHERE consumer_name = @consumer AND partition_key = @key AND last_processed_id = @old AND coalesce(stream_created, @created) = @created AND NOT closed`

// succeedSQL makes the offsets of the streams that take over from one that has ended, in the transaction that closes it. The first of several
// predecessors makes them.
// Index: consumer_offsets_pkey.   Locks: the new rows.
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

// confirmSQL notes that a stream had been applied to its end at a time. A batch since then says more.
// Index: consumer_offsets_pkey.   Locks: the row; one in use is passed over, for its batch will say more.
const confirmSQL = `
UPDATE /* consumers.confirm */ consumer_offsets SET as_of = @at
 WHERE (consumer_name, partition_key) IN (SELECT consumer_name, partition_key FROM consumer_offsets
        WHERE consumer_name = @consumer AND partition_key = @key AND as_of < @at AND NOT closed FOR NO KEY UPDATE SKIP LOCKED)`

// Progress is how far a consumer has come.
type Progress struct {
	// AsOf is a time, by the NATS servers' clocks, up to which the consumer has applied what was on the streams. It moves with each batch of
	// the stream that is furthest back, and every LagInterval while the consumer has nothing to do. It begins with the creation
	// of the stream, and is the Unix epoch before the consumer has first run.
	AsOf time.Time
	// Offsets are the sequences of the last message that was applied, by the name of the stream; the largest there can be for one that has ended.
	Offsets map[string]uint64
}

// ReadProgress returns how far the consumer has come, as the transaction of tx sees it.
func ReadProgress(ctx context.Context, tx pgx.Tx, consumer string) (Progress, error) {
	offsets, err := readOffsets(ctx, tx, consumer)
	if err != nil {
		return Progress{}, err
	}
	p := Progress{AsOf: asOf(offsets[consumer]), Offsets: make(map[string]uint64)}
	for stream, o := range offsets[consumer] {
		p.Offsets[stream] = o.Seq
		if o.Closed {
			p.Offsets[stream] = math.MaxUint64
		}
	}
	return p, nil
}

// asOf is the earliest of the streams that have not ended.
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

// Position is how far a consumer has come on one stream.
type Position struct {
	Consumer string
	Seq      uint64    // the last that was applied
	At       time.Time // when that was
	AsOf     time.Time // up to when all that was on the stream is applied
	Closed   bool      // the stream has ended, and all of it is applied
}

// positionsSQL reads how far consumers have come on a stream.
// Index: none, a row per consumer and stream that ever was.   Locks: none.
const positionsSQL = `
SELECT /* consumers.positions */ consumer_name, last_processed_id, last_processed_at, as_of, closed FROM consumer_offsets WHERE partition_key = @stream ORDER BY 1`

// Positions returns how far each consumer has come on a stream, by name. A consumer that has none has not begun it.
func Positions(ctx context.Context, q querier, stream string) ([]Position, error) {
	rows, _ := q.Query(ctx, positionsSQL, pgx.StrictNamedArgs{"stream": stream})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Position])
	if err != nil {
		return nil, fmt.Errorf("read how far consumers have come on %s: %w", stream, err)
	}
	return all, nil
}
