package outbox

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// fencedCreation is the creation time that Replace stores for a lost stream. No stream has it. So
// no relay publishes to that partition or marks its rows.
var fencedCreation = time.Unix(0, 0).UTC()

// Replaced reports that a repair replaces the partition, or has replaced it. Its stream is lost;
// the rest ends at Tail.
func (p *Partition) Replaced() bool { return p.Stream != "" && p.Created.Equal(fencedCreation) }

// fenceSQL stops all marks of a partition: the fence of a mark that began earlier no longer
// matches. The statement waits for marks in progress.
//
// Index: outbox_partitions_pkey.   Locks: the partition.
const fenceSQL = `
UPDATE /* outbox.fence */ outbox_partitions SET created = 'epoch', tail_seq = @left, closing = true WHERE partition = @partition`

// Replace begins to replace a partition that lost its stream after the sequence left. It fences the
// partition. It adds a partition with the number next for its slots, unless a resize has already
// added successors. It returns the successors. No relay publishes to them before the lost partition
// is closed (Close). Replace may be called again.
func Replace(ctx context.Context, pool *pgxpool.Pool, lost Partition, left uint64, next int) (successors []Partition, err error) {
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockPartitionsSQL); err != nil {
			return err
		}
		all, err := Partitions(ctx, tx)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(p Partition) bool { return p.Number == lost.Number })
		if i < 0 || all[i].Closed || !all[i].Created.Equal(lost.Created) {
			return fmt.Errorf("the partition has changed meanwhile: inspect it again")
		}
		if _, err := tx.Exec(ctx, fenceSQL, pgx.StrictNamedArgs{"partition": lost.Number, "left": int64(left)}); err != nil {
			return err
		}
		if successors = Successors(all, lost.Number); len(successors) > 0 {
			return nil
		}
		p := Partition{Number: max(next, all[len(all)-1].Number+1), FirstSlot: lost.FirstSlot, LastSlot: lost.LastSlot,
			After: []int{lost.Number}}
		successors = []Partition{p}
		return addPartition(ctx, tx, p)
	})
	if err != nil {
		return nil, fmt.Errorf("replace partition %d: %w", lost.Number, err)
	}
	return successors, nil
}

// Successors returns the partitions that took over slots of one, by number. Where the streams of
// its own successors were removed, so that this database does not know them, these are the later
// partitions that are not closed.
func Successors(all []Partition, of int) (successors []Partition) {
	var gaps []Partition
	if i := slices.IndexFunc(all, func(p Partition) bool { return p.Number == of }); i >= 0 {
		gaps = uncovered(all[i], slices.DeleteFunc(slices.Clone(all), func(p Partition) bool { return !slices.Contains(p.After, of) }))
	}
	for i := range all {
		p := &all[i]
		if slices.Contains(p.After, of) || p.Number > of && !p.Closed &&
			slices.ContainsFunc(gaps, func(gap Partition) bool { return p.overlaps(&gap) }) {
			successors = append(successors, *p)
		}
	}
	return successors
}

// adoptSQL adds a partition that this database once knew.
//
// Index: outbox_partitions_pkey.   Locks: the partition.
const adoptSQL = `
INSERT /* outbox.adopt */ INTO outbox_partitions (partition, first_slot, last_slot, after, stream, created)
VALUES (@partition, @first, @last, @after, @stream, @created) ON CONFLICT DO NOTHING`

// Adopt adds partitions that have streams but are unknown to this database, because it went back to
// before their creation. Earlier partitions of the same slots close again. Slots of these without a
// successor get new partitions.
func Adopt(ctx context.Context, pool *pgxpool.Pool, strays []Partition) error {
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockPartitionsSQL); err != nil {
			return err
		}
		for _, p := range strays {
			if _, err := tx.Exec(ctx, adoptSQL, pgx.StrictNamedArgs{"partition": p.Number, "first": p.FirstSlot, "last": p.LastSlot,
				"after": p.After, "stream": p.Stream, "created": p.Created}); err != nil {
				return err
			}
		}
		all, err := Partitions(ctx, tx)
		if err != nil {
			return err
		}
		closing := closingOf(all)
		if _, err := tx.Exec(ctx, closingSQL, pgx.StrictNamedArgs{"partitions": closing}); err != nil {
			return err
		}
		for _, gap := range gaps(all, closing) {
			if err := addPartition(ctx, tx, gap); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("adopt %d partitions: %w", len(strays), err)
	}
	return nil
}

// Adopted returns the result of Partitions after strays are adopted.
func Adopted(all, strays []Partition) []Partition {
	if len(strays) == 0 {
		return all
	}
	all = append(slices.Clone(all), strays...)
	byNumber := func(a, b Partition) int { return a.Number - b.Number }
	slices.SortFunc(all, byNumber)
	return append(all, gaps(all, closingOf(all))...)
}

// closingOf returns the partitions that must close: those that are not closed, and share a slot
// with a later one that is not closed.
func closingOf(all []Partition) (closing []int) {
	for i := range all {
		if p := &all[i]; !p.Closed && slices.ContainsFunc(all, func(o Partition) bool {
			return o.Number > p.Number && !o.Closed && o.overlaps(p)
		}) {
			closing = append(closing, p.Number)
		}
	}
	return closing
}

// gaps returns partitions to add for slots of closing ones that no successor has.
func gaps(all []Partition, closing []int) (added []Partition) {
	next := all[len(all)-1].Number + 1
	for _, p := range all {
		if p.Closed || !slices.Contains(closing, p.Number) {
			continue
		}
		for _, gap := range uncovered(p, Successors(all, p.Number)) {
			gap.Number, gap.After = next, []int{p.Number}
			added = append(added, gap)
			next++
		}
	}
	return added
}

// uncovered returns the ranges of p's slots that no successor has.
func uncovered(p Partition, successors []Partition) (gaps []Partition) {
	for slot := p.FirstSlot; slot <= p.LastSlot; slot++ {
		if slices.ContainsFunc(successors, func(s Partition) bool { return s.FirstSlot <= slot && slot <= s.LastSlot }) {
			continue
		}
		if n := len(gaps); n > 0 && gaps[n-1].LastSlot == slot-1 {
			gaps[n-1].LastSlot = slot
		} else {
			gaps = append(gaps, Partition{FirstSlot: slot, LastSlot: slot})
		}
	}
	return gaps
}

// recloseSQL moves the end of a closed partition whose stream lost its end.
//
// Index: outbox_partitions_pkey.   Locks: the partition.
const recloseSQL = `
UPDATE /* outbox.reclose */ outbox_partitions SET tail_seq = @final, final_seq = @final, created = 'epoch'
 WHERE partition = @partition AND final_seq IS NOT NULL`

// Reclose records that the stream of a closed partition ends at another sequence, because it lost
// its end.
func Reclose(ctx context.Context, pool *pgxpool.Pool, partition int, final uint64) error {
	if _, err := pool.Exec(ctx, recloseSQL, pgx.StrictNamedArgs{"partition": partition, "final": int64(final)}); err != nil {
		return fmt.Errorf("close partition %d at %d: %w", partition, final, err)
	}
	return nil
}

// Lost names the messages that a partition's stream lost: all after the sequence Behind, and Seqs
// before it.
type Lost struct {
	Partition int
	Behind    uint64
	Seqs      []uint64
}

// NoneBehind is Lost.Behind of a stream that still has its end.
const NoneBehind = math.MaxInt64

// lostSQL selects the rows of a slice whose messages are lost. An erased row has no stream_seq, so
// it is not among them.
const lostSQL = `id > @after AND id <= @upto AND partition = @partition AND (stream_seq > @behind OR stream_seq = ANY(@seqs::bigint[]))`

// The statements of a repair run for one slice of ids after the other. A slice covers the outbox
// first and then the archive, because ranges move in that direction.
//
// Index: the ranges' primary keys, a part of one.   Locks: the rows.
const (
	countLostSQL = `SELECT /* outbox.count_lost */ count(*), 0::bigint FROM {table} WHERE ` + lostSQL

	// restoreSQL makes rows pending under their ids, in their old order. Rows that were delayed
	// once are due now.
	restoreSQL = `
WITH back AS (
  UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL, behind = NULL, available_at = inserted_at
   WHERE ` + lostSQL + ` RETURNING id)
SELECT /* outbox.restore */ count(*), coalesce(min(id), 0) FROM back`

	// lostInRangeSQL checks whether a range of the archive has rows whose messages are lost.
	lostInRangeSQL = `SELECT /* outbox.lost_in_range */ EXISTS (SELECT FROM outbox_messages_archive WHERE ` + lostSQL + `)`
	// returnRangeSQL moves a range of the archive back to the outbox.
	// Locks: the outbox and the archive, ACCESS EXCLUSIVE, for some milliseconds.
	returnRangeSQL = `SELECT /* outbox.return_range */ outbox_range_return(@from)`

	// requeueSQL makes rows pending under new ids above every floor, as a retry from the DLQ does.
	// It records the new ids, because the event_id does not contain them.
	requeueSQL = `
WITH gone AS (DELETE FROM {table} WHERE ` + lostSQL + ` RETURNING *),
fresh AS (
  INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id)
  SELECT tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id FROM gone ORDER BY id
  RETURNING event_id, id),
noted AS (INSERT INTO outbox_requeued (event_id, id) SELECT event_id, id FROM fresh ON CONFLICT (event_id) DO UPDATE SET id = excluded.id)
SELECT /* outbox.requeue */ count(*), 0::bigint FROM fresh`
)

// lowerFloorsSQL lowers floors below a row that is pending again.
//
// Index: outbox_partitions_pkey.   Locks: the partitions.
const lowerFloorsSQL = `
UPDATE /* outbox.lower_floors */ outbox_partitions SET floor_id = least(floor_id, @id - 1) WHERE partition = ANY(@partitions::int[])`

func ofTable(sql, table string) string { return strings.ReplaceAll(sql, "{table}", table) }

// CountLost counts the rows whose messages are lost, including archived ones.
func CountLost(ctx context.Context, pool *pgxpool.Pool, l Lost) (int64, error) {
	return l.eachSlice(ctx, pool, []string{ofTable(countLostSQL, TableOutbox), ofTable(countLostSQL, TableArchive)}, nil, nil)
}

// Restore makes the rows of lost messages pending again under their old ids, including archived
// ones. The successors, to which no relay publishes yet, then publish them first and in their old
// order. Ranges of the archive with such rows move back to the outbox before that.
//
// Restore works in slices, each one transaction. After an interruption it may be called again. It
// calls done, unless nil, after each slice.
func Restore(ctx context.Context, pool *pgxpool.Pool, l Lost, successors []Partition, done func()) (int64, error) {
	if err := l.returnRanges(ctx, pool); err != nil {
		return 0, err
	}
	var numbers []int
	for _, p := range successors {
		numbers = append(numbers, p.Number)
	}
	return l.eachSlice(ctx, pool, []string{restoreSQL}, func(tx pgx.Tx, lowest int64) error {
		_, err := tx.Exec(ctx, lowerFloorsSQL, pgx.StrictNamedArgs{"id": lowest, "partitions": numbers})
		return err
	}, done)
}

// returnRanges moves the archive's ranges with rows of lost messages back to the outbox.
func (l Lost) returnRanges(ctx context.Context, pool *pgxpool.Pool) error {
	all, _, err := Ranges(ctx, pool)
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.State != RangeArchived {
			continue
		}
		var lost bool
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, noTimeoutSQL); err != nil {
				return err
			}
			return tx.QueryRow(ctx, lostInRangeSQL, l.args(r.From-1, r.To-1)).Scan(&lost)
		}); err != nil {
			return fmt.Errorf("search for lost messages in the range from %d: %w", r.From, err)
		}
		if !lost {
			continue
		}
		if err := withLocks(ctx, pool, nil, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, returnRangeSQL, pgx.StrictNamedArgs{"from": r.From})
			return err
		}); err != nil {
			return fmt.Errorf("return the range from %d to the outbox: %w", r.From, err)
		}
	}
	return nil
}

// Requeue moves the rows of lost messages to the end of the outbox, including archived ones. They
// keep their event_id and get a new id, because the relay of their slots publishes meanwhile, so
// they come late in any case. Like Restore it works in slices.
func Requeue(ctx context.Context, pool *pgxpool.Pool, l Lost, done func()) (int64, error) {
	return l.eachSlice(ctx, pool, []string{ofTable(requeueSQL, TableOutbox), ofTable(requeueSQL, TableArchive)}, nil, done)
}

// nextIDSQL finds the first row after an id, up to another one: gaps between ids have any size.
//
// Index: the ranges' primary keys, one probe each.   Locks: none.
const nextIDSQL = `
SELECT /* outbox.next_id */ coalesce(least((SELECT min(id) FROM outbox_messages WHERE id > @after AND id <= @upto),
                                           (SELECT min(id) FROM outbox_messages_archive WHERE id > @after AND id <= @upto)), 0)`

// repairSlice is the number of ids per transaction of a repair.
const repairSlice = 10_000

func (l Lost) args(after, upto int64) pgx.StrictNamedArgs {
	seqs := make([]int64, len(l.Seqs))
	for i, seq := range l.Seqs {
		seqs[i] = int64(seq)
	}
	return pgx.StrictNamedArgs{"after": after, "upto": upto, "partition": l.Partition, "behind": int64(l.Behind), "seqs": seqs}
}

// eachSlice runs the statements over all existing ids, and returns the number of rows that they
// found. It calls lower in each slice's transaction, with the lowest of the slice's rows.
func (l Lost) eachSlice(ctx context.Context, pool *pgxpool.Pool, statements []string, lower func(tx pgx.Tx, lowest int64) error,
	done func()) (n int64, err error) {
	var high int64
	if err := pool.QueryRow(ctx, lastIDSQL).Scan(&high); err != nil {
		return 0, fmt.Errorf("read the last outbox id: %w", err)
	}
	for after := int64(0); ; after += repairSlice {
		var next, found int64
		if err := pool.QueryRow(ctx, nextIDSQL, pgx.StrictNamedArgs{"after": after, "upto": high}).Scan(&next); err != nil {
			return n, fmt.Errorf("search for the first row after %d: %w", after, err)
		}
		if next == 0 {
			return n, nil
		}
		after = next - 1
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			found = 0
			for _, sql := range statements {
				var rows, lowest int64
				if err := tx.QueryRow(ctx, sql, l.args(after, min(after+repairSlice, high))).Scan(&rows, &lowest); err != nil {
					return err
				}
				if found += rows; lowest > 0 && lower != nil {
					if err := lower(tx, lowest); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			return n, fmt.Errorf("process the rows of partition %d after %d: %w", l.Partition, after, err)
		}
		if n += found; found > 0 && done != nil {
			done()
		}
	}
}

// OnStream is the state of the row of a message after the stored tail.
type OnStream int

// The row of an Unknown message does not exist. A Pending row will be marked by its relay. A Past
// row was marked before.
const (
	Unknown OnStream = iota
	Pending
	Past
)

// Classify returns the state of the row of each message, by sequence.
func Classify(ctx context.Context, pool *pgxpool.Pool, messages []Published) (map[uint64]OnStream, error) {
	args := (&Mark{Rows: messages}).args(0)
	known := make(map[uint64]OnStream, len(messages))
	var seq uint64
	var pending, past bool
	rows, _ := pool.Query(ctx, caughtUpSQL, pgx.StrictNamedArgs{"ids": args["ids"], "event_ids": args["event_ids"], "seqs": args["seqs"]})
	if _, err := pgx.ForEachRow(rows, []any{&seq, &pending, &past}, func() error {
		switch {
		case pending:
			known[seq] = Pending
		case past:
			known[seq] = Past
		default:
			known[seq] = Unknown
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("look up the rows of %d messages: %w", len(messages), err)
	}
	return known, nil
}
