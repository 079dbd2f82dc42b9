package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// Partition is a JetStream stream that holds a range of slots and has one writer at a time, as this
// database knows it.
type Partition struct {
	Number              int
	FirstSlot, LastSlot int
	After               []int     // the partitions whose slots it takes over: it publishes nothing before they are closed
	Stream              string    // the stream's name; empty until a relay binds one
	Created             time.Time // when the stream was created, to the microsecond
	Tail                uint64    // the last sequence that marks cover
	Floor               int64     // no row of its slots with an id up to this one is pending, unless it is delayed
	Closing             bool      // its relay publishes the rows in progress and then closes the stream
	Closed              bool
	Final               uint64 // the last sequence of a closed partition
}

// SameStream reports whether p is at the same stage as o: not bound, closed or replaced in between.
// Marks make no difference.
func (p Partition) SameStream(o Partition) bool {
	return p.Stream == o.Stream && p.Created.Equal(o.Created) && p.Closing == o.Closing && p.Closed == o.Closed
}

// partitionsSQL reads the layout.
//
// Index: none, a row per partition that ever existed.   Locks: none.
const partitionsSQL = `
SELECT /* outbox.partitions */ partition, first_slot::int, last_slot::int, after::int[], coalesce(stream, ''), coalesce(created, 'epoch'),
       tail_seq, floor_id, closing, final_seq IS NOT NULL, coalesce(final_seq, 0)
  FROM outbox_partitions ORDER BY partition`

// Partitions returns all partitions by number, including closed ones.
func Partitions(ctx context.Context, q Querier) ([]Partition, error) {
	rows, _ := q.Query(ctx, partitionsSQL)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Partition])
	if err != nil {
		return nil, fmt.Errorf("read the partitions: %w", err)
	}
	for i := range all {
		all[i].Created = all[i].Created.UTC()
	}
	return all, nil
}

// Position is the sequence up to which a partition's stream is published for certain. An event that
// was committed and is not on the stream up to Seq comes after it or on a later stream.
type Position struct {
	Partition int
	Stream    string    // empty until a relay binds one
	Created   time.Time // when the stream was created, to the microsecond
	Seq       uint64
}

// positionsSQL reads the tail of each partition.
//
// Index: none, a row per partition that ever existed.   Locks: none.
const positionsSQL = `
SELECT /* outbox.positions */ partition, coalesce(stream, ''), coalesce(created, 'epoch'), tail_seq
  FROM outbox_partitions WHERE final_seq IS NULL ORDER BY partition`

// Positions returns the positions of all partitions that are not closed, by number. A later
// partition has a higher number. A state of the truth from a later snapshot includes every event
// that the streams have up to these positions. The pool may act as postgres.RoleAPI.
func Positions(ctx context.Context, q Querier) ([]Position, error) {
	rows, _ := q.Query(ctx, positionsSQL)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Position])
	if err != nil {
		return nil, fmt.Errorf("read the positions of the partitions: %w", err)
	}
	for i := range all {
		all[i].Created = all[i].Created.UTC()
	}
	return all, nil
}

// ReadPartition returns one partition, or pgx.ErrNoRows.
func ReadPartition(ctx context.Context, q Querier, number int) (Partition, error) {
	all, err := Partitions(ctx, q)
	if err != nil {
		return Partition{}, err
	}
	for _, p := range all {
		if p.Number == number {
			return p, nil
		}
	}
	return Partition{}, fmt.Errorf("read partition %d: %w", number, pgx.ErrNoRows)
}

// Active returns the partitions to which a relay may publish now: those that are not closed and
// share no slot with a lower one that is not closed. Whatever After says, each slot has at most one
// of them.
func Active(all []Partition) (active []Partition) {
	for i := range all {
		if p := &all[i]; !p.Closed && !slices.ContainsFunc(all, func(o Partition) bool {
			return o.Number < p.Number && !o.Closed && o.overlaps(p)
		}) {
			active = append(active, *p)
		}
	}
	return active
}

// overlaps reports whether the partitions share a slot.
func (p *Partition) overlaps(o *Partition) bool {
	return p.FirstSlot <= o.LastSlot && o.FirstSlot <= p.LastSlot
}

// bindSQL records the stream of a partition, once.
//
// Index: outbox_partitions_pkey.   Locks: the partition.
const bindSQL = `
UPDATE /* outbox.bind */ outbox_partitions SET stream = @stream, created = @created WHERE partition = @partition AND stream IS NULL`

// Bind records which stream holds a partition's events. If several relays call it, the first wins,
// so the caller must read the result with Partitions.
func Bind(ctx context.Context, pool *pgxpool.Pool, partition int, stream string, created time.Time) error {
	if _, err := pool.Exec(ctx, bindSQL, pgx.StrictNamedArgs{"partition": partition, "stream": stream, "created": created}); err != nil {
		return fmt.Errorf("bind partition %d to stream %s: %w", partition, stream, err)
	}
	return nil
}

// closeSQL records that a partition is closed.
//
// Index: outbox_partitions_pkey.   Locks: the partition.
const closeSQL = `
UPDATE /* outbox.close */ outbox_partitions SET tail_seq = @final, final_seq = @final
 WHERE partition = @partition AND tail_seq = @tail AND closing AND final_seq IS NULL`

// Close records that a partition's stream ends with the closing message at final, after tail. It
// reports whether this call closed the partition.
func Close(ctx context.Context, pool *pgxpool.Pool, partition int, tail, final uint64) (bool, error) {
	tag, err := pool.Exec(ctx, closeSQL, pgx.StrictNamedArgs{"partition": partition, "tail": int64(tail), "final": int64(final)})
	if err != nil {
		return false, fmt.Errorf("close partition %d at %d: %w", partition, final, err)
	}
	return tag.RowsAffected() == 1, nil
}

// ErrResizing reports a resize while an earlier one has not ended.
var ErrResizing = errors.New("outbox: the partitions are being resized")

const (
	// lockPartitionsSQL excludes a second resize or repair. Locks: outbox_partitions in SHARE ROW
	// EXCLUSIVE mode. Readers continue, but marks wait.
	lockPartitionsSQL = `LOCK TABLE outbox_partitions IN SHARE ROW EXCLUSIVE MODE`
	closingSQL        = `UPDATE /* outbox.closing */ outbox_partitions SET closing = true WHERE partition = ANY(@partitions::int[])`
	addPartitionSQL   = `
INSERT /* outbox.add_partition */ INTO outbox_partitions (partition, first_slot, last_slot, after, floor_id)
VALUES (@partition, @first, @last, @after, (SELECT coalesce(min(floor_id), 0) FROM outbox_partitions WHERE partition = ANY(@after::int[])))`
)

// Resize replaces the open partitions by to new ones, which share the slots evenly. to must be a
// power of two up to event.Slots. Relays close the old streams and then open the new ones, while
// writers continue. Resize returns the new partitions. It does nothing if to partitions are open
// already, and returns ErrResizing while an earlier resize has not ended.
func Resize(ctx context.Context, pool *pgxpool.Pool, to int) (added []Partition, err error) {
	if to < 1 || to > event.Slots || to&(to-1) != 0 {
		return nil, fmt.Errorf("resize to %d partitions: want 1, 2, 4, 8, 16 or %d", to, event.Slots)
	}
	_, added, err = replaceOpen(ctx, pool, to)
	return added, err
}

// replaceOpen replaces the open partitions by to new ones, unless to are open already. 0 means the
// current number.
func replaceOpen(ctx context.Context, pool *pgxpool.Pool, to int) (old, added []Partition, err error) {
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		old, added = nil, nil
		if _, err := tx.Exec(ctx, lockPartitionsSQL); err != nil {
			return err
		}
		all, err := Partitions(ctx, tx)
		if err != nil {
			return err
		}
		if old, err = resizable(all, to); err != nil {
			return err
		}
		if len(old) == to {
			return nil
		}
		added, err = replace(ctx, tx, all, old, cmp.Or(to, 1<<(bits.Len(uint(max(len(old), 1)))-1)))
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("resize to %d partitions: %w", to, err)
	}
	return old, added, nil
}

// replace adds to partitions that share all slots evenly, and makes the old ones close.
func replace(ctx context.Context, tx pgx.Tx, all, old []Partition, to int) (added []Partition, err error) {
	var closing []int
	for _, p := range old {
		closing = append(closing, p.Number)
	}
	added = successors(all, old, to)
	for _, p := range added {
		if err := addPartition(ctx, tx, p); err != nil {
			return nil, err
		}
	}
	_, err = tx.Exec(ctx, closingSQL, pgx.StrictNamedArgs{"partitions": closing})
	return added, err
}

// successors returns to partitions that share all slots evenly and take over those of the old ones.
func successors(all, old []Partition, to int) (added []Partition) {
	next, width := all[len(all)-1].Number+1, event.Slots/to
	for i := range to {
		p := Partition{Number: next + i, FirstSlot: i * width, LastSlot: (i+1)*width - 1}
		for _, o := range old {
			if o.overlaps(&p) {
				p.After = append(p.After, o.Number)
			}
		}
		added = append(added, p)
	}
	return added
}

// Planned returns the partitions that Resize would add to all, or none if to are open already.
func Planned(all []Partition, to int) ([]Partition, error) {
	old, err := resizable(all, to)
	if err != nil || len(old) == to {
		return nil, err
	}
	return successors(all, old, to), nil
}

// resizable returns the open partitions of all, if they may become to ones now. 0 means the current
// number.
func resizable(all []Partition, to int) (old []Partition, err error) {
	if to < 0 || to > event.Slots || to&(to-1) != 0 {
		return nil, fmt.Errorf("want 1, 2, 4, 8, 16 or %d partitions", event.Slots)
	}
	for _, p := range all {
		switch {
		case p.Closed:
		case p.Closing:
			return nil, fmt.Errorf("%w: partition %d has not closed yet", ErrResizing, p.Number)
		default:
			old = append(old, p)
		}
	}
	return old, nil
}

// addPartition adds a partition that succeeds others. Its floor is the lowest of their floors.
func addPartition(ctx context.Context, tx pgx.Tx, p Partition) error {
	_, err := tx.Exec(ctx, addPartitionSQL, pgx.StrictNamedArgs{"partition": p.Number, "first": p.FirstSlot,
		"last": p.LastSlot, "after": p.After})
	return err
}

// belowFloorSQL reads three values in one snapshot. They are the lowest pending row among the last
// ones up to a floor, the id at which the upper half of these begins, and the stored tail.
//
// Index: outbox_messages_pkey, backward from the floor.   Locks: none.
const belowFloorSQL = `
WITH last AS MATERIALIZED (
  SELECT id, processed_at IS NULL AND NOT delayed AND slot BETWEEN @first AND @last AS pending
    FROM outbox_messages WHERE id > @above AND id <= @floor ORDER BY id DESC LIMIT @depth)
SELECT /* outbox.below_floor */ coalesce(min(id) FILTER (WHERE pending), 0),
       coalesce((SELECT id FROM last OFFSET @depth::bigint / 2 LIMIT 1), @above),
       (SELECT tail_seq FROM outbox_partitions WHERE partition = @partition) FROM last`

// BelowFloor checks the proof of the floor. It reads the last depth rows with above < id <= floor.
// id is the lowest of them that is pending in the partition, or 0. A pending row disproves the
// floor if the stored tail is the caller's tail. If the tail differs, marks were lost, and the
// caller must catch up instead.
//
// half is the id above which the upper half of depth rows lies. depth counts rows, because ids have
// gaps of millions where a range ended.
func BelowFloor(ctx context.Context, pool *pgxpool.Pool, p Partition, above, floor int64,
	depth int) (id, half int64, tail uint64, err error) {
	var b pgx.Batch
	b.Queue(walkSQL)
	b.Queue(belowFloorSQL, pgx.StrictNamedArgs{"above": above, "floor": floor, "first": p.FirstSlot, "last": p.LastSlot, "depth": depth,
		"partition": p.Number}).
		QueryRow(func(row pgx.Row) error { return row.Scan(&id, &half, &tail) })
	if err := pool.SendBatch(ctx, &b).Close(); err != nil {
		return 0, 0, 0, fmt.Errorf("check below the floor of partition %d: %w", p.Number, err)
	}
	return id, half, tail, nil
}
