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

// fenced is the time of creation of a partition's stream that is being replaced, or was. No stream has it, so no relay publishes to that
// partition or marks anything of it.
var fenced = time.Unix(0, 0).UTC()

// Replaced reports that a repair replaces the partition, or has replaced it: its stream is lost, and what is left of it ends at Tail.
func (p *Partition) Replaced() bool { return p.Stream != "" && p.Created.Equal(fenced) }

// fenceSQL ends all marks of a partition: none that was read before finds what it names. It waits for those in flight.
// Index: outbox_partitions_pkey.   Locks: the partition.
const fenceSQL = `
UPDATE /* outbox.fence */ outbox_partitions SET created = 'epoch', tail_seq = @left, closing = true WHERE partition = @partition`

// Replace begins to replace a partition whose stream is lost behind the sequence left: it fences the partition, and adds one with the
// number next that takes over its slots, unless a resize has added such partitions already. Nobody publishes to these before the lost
// one is closed (Close). It returns them. It may be called again.
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
			return fmt.Errorf("it has changed meanwhile: look again")
		}
		if _, err := tx.Exec(ctx, fenceSQL, pgx.StrictNamedArgs{"partition": lost.Number, "left": int64(left)}); err != nil {
			return err
		}
		if successors = Successors(all, lost.Number); len(successors) > 0 {
			return nil
		}
		p := Partition{Number: max(next, all[len(all)-1].Number+1), FirstSlot: lost.FirstSlot, LastSlot: lost.LastSlot, After: []int{lost.Number}}
		successors = []Partition{p}
		return addPartition(ctx, tx, p)
	})
	if err != nil {
		return nil, fmt.Errorf("replace partition %d: %w", lost.Number, err)
	}
	return successors, nil
}

// Successors returns the partitions that took over slots of one.
func Successors(all []Partition, of int) (successors []Partition) {
	for _, p := range all {
		if slices.Contains(p.After, of) {
			successors = append(successors, p)
		}
	}
	return successors
}

// adoptSQL adds a partition that this database knew once.
// Index: outbox_partitions_pkey.   Locks: the partition.
const adoptSQL = `
INSERT /* outbox.adopt */ INTO outbox_partitions (partition, first_slot, last_slot, after, stream, created)
VALUES (@partition, @first, @last, @after, @stream, @created) ON CONFLICT DO NOTHING`

// Adopt adds partitions that have streams and that this database does not know: it went back to before it made them. The partitions that
// these came after are to close again, and slots of theirs that nobody would take over then get partitions too.
func Adopt(ctx context.Context, pool *pgxpool.Pool, strays []Partition) error {
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockPartitionsSQL); err != nil {
			return err
		}
		closing := closingFor(strays)
		for _, p := range strays {
			if _, err := tx.Exec(ctx, adoptSQL, pgx.StrictNamedArgs{"partition": p.Number, "first": p.FirstSlot, "last": p.LastSlot,
				"after": p.After, "stream": p.Stream, "created": p.Created}); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, closingSQL, pgx.StrictNamedArgs{"partitions": closing}); err != nil {
			return err
		}
		all, err := Partitions(ctx, tx)
		if err != nil {
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

// Adopted returns what Partitions returns once strays are adopted.
func Adopted(all, strays []Partition) []Partition {
	if len(strays) == 0 {
		return all
	}
	all = append(slices.Clone(all), strays...)
	byNumber := func(a, b Partition) int { return a.Number - b.Number }
	slices.SortFunc(all, byNumber)
	return append(all, gaps(all, closingFor(strays))...)
}

// closingFor are the partitions that strays came after.
func closingFor(strays []Partition) (closing []int) {
	for _, p := range strays {
		closing = append(closing, p.After...)
	}
	return closing
}

// gaps are partitions to add, for slots of closing ones that nobody would take over.
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

// recloseSQL moves the end of a closed partition whose stream has lost it.
// Index: outbox_partitions_pkey.   Locks: the partition.
const recloseSQL = `
UPDATE /* outbox.reclose */ outbox_partitions SET tail_seq = @final, final_seq = @final, created = 'epoch'
 WHERE partition = @partition AND final_seq IS NOT NULL`

// Reclose records that the stream of a closed partition ends at another sequence, because it has lost its end.
func Reclose(ctx context.Context, pool *pgxpool.Pool, partition int, final uint64) error {
	if _, err := pool.Exec(ctx, recloseSQL, pgx.StrictNamedArgs{"partition": partition, "final": int64(final)}); err != nil {
		return fmt.Errorf("close partition %d at %d: %w", partition, final, err)
	}
	return nil
}

// Lost says which messages of a partition's stream are gone: those behind a sequence, and some before it.
type Lost struct {
	Partition int
	Behind    uint64
	Seqs      []uint64
}

// NoneBehind is for Lost.Behind where the stream has its end.
const NoneBehind = math.MaxInt64

// lostSQL selects the rows of a slice whose messages are gone. One that was erased says of no message: it is not among them.
const lostSQL = `id > @after AND id <= @upto AND partition = @partition AND (stream_seq > @behind OR stream_seq = ANY(@seqs::bigint[]))`

// The statements of a repair are run for one slice of ids after the other, first for the outbox and then for the archive: ranges move
// that way. Index: the ranges' primary keys: a part of one.   Locks: the rows.
const (
	countLostSQL = `SELECT /* outbox.count_lost */ count(*), 0::bigint FROM {table} WHERE ` + lostSQL

	// restoreSQL makes rows pending under their ids, in their old order. Those that had to wait once have waited.
	restoreSQL = `
WITH back AS (
  UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL, behind = NULL, available_at = inserted_at
   WHERE ` + lostSQL + ` RETURNING id)
SELECT /* outbox.restore */ count(*), coalesce(min(id), 0) FROM back`

	// lostInRangeSQL looks for rows whose messages are gone in a range of the archive.
	lostInRangeSQL = `SELECT /* outbox.lost_in_range */ EXISTS (SELECT FROM outbox_messages_archive WHERE ` + lostSQL + `)`
	// returnRangeSQL gives a range of the archive back to the outbox.
	// Locks: the outbox and the archive, ACCESS EXCLUSIVE, for some milliseconds.
	returnRangeSQL = `SELECT /* outbox.return_range */ outbox_range_return(@from)`

	// requeueSQL makes rows pending under new ids, which no floor has passed, as a retry from the DLQ does. It notes the ids, which the events
	// do not tell.
	requeueSQL = `
WITH gone AS (DELETE FROM {table} WHERE ` + lostSQL + ` RETURNING *),
fresh AS (
  INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id)
  SELECT tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id FROM gone ORDER BY id
  RETURNING event_id, id),
noted AS (INSERT INTO outbox_requeued (event_id, id) SELECT event_id, id FROM fresh ON CONFLICT (event_id) DO UPDATE SET id = excluded.id)
SELECT /* outbox.requeue */ count(*), 0::bigint FROM fresh`
)

// lowerFloorsSQL takes floors down to below a row that is pending again.
// Index: outbox_partitions_pkey.   Locks: the partitions.
const lowerFloorsSQL = `
UPDATE /* outbox.lower_floors */ outbox_partitions SET floor_id = least(floor_id, @id - 1) WHERE partition = ANY(@partitions::int[])`

func ofTable(sql, table string) string { return strings.ReplaceAll(sql, "{table}", table) }

// CountLost counts the rows, archived ones too, whose messages are gone.
func CountLost(ctx context.Context, pool *pgxpool.Pool, l Lost) (int64, error) {
	return l.eachSlice(ctx, pool, []string{ofTable(countLostSQL, TableOutbox), ofTable(countLostSQL, TableArchive)}, nil, nil)
}

// Restore makes the rows pending again whose messages are gone, archived ones too, under their old ids: successors, which nobody publishes
// to yet, publish them in their old order, before everything later. Ranges of the archive that have such rows are the outbox's again first. It
// works in slices, each one transaction, and may be called again after it was interrupted. done is called after each slice; it may be nil.
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

// returnRanges gives the ranges of the archive that have rows whose messages are gone back to the outbox.
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
			return fmt.Errorf("look for lost messages in the range from %d: %w", r.From, err)
		}
		if !lost {
			continue
		}
		if err := withLocks(ctx, pool, nil, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, returnRangeSQL, pgx.StrictNamedArgs{"from": r.From})
			return err
		}); err != nil {
			return fmt.Errorf("give the range from %d back to the outbox: %w", r.From, err)
		}
	}
	return nil
}

// Requeue puts the rows whose messages are gone, archived ones too, to the end of the outbox, with their event_id and a new id: they come late
// anyway, and the relay that publishes their slots goes on meanwhile. Like Restore it works in slices.
func Requeue(ctx context.Context, pool *pgxpool.Pool, l Lost, done func()) (int64, error) {
	return l.eachSlice(ctx, pool, []string{ofTable(requeueSQL, TableOutbox), ofTable(requeueSQL, TableArchive)}, nil, done)
}

// nextIDSQL finds the first row after an id, up to another: ids have gaps of any size.
// Index: the ranges' primary keys, one probe each.   Locks: none.
const nextIDSQL = `
SELECT /* outbox.next_id */ coalesce(least((SELECT min(id) FROM outbox_messages WHERE id > @after AND id <= @upto),
                                           (SELECT min(id) FROM outbox_messages_archive WHERE id > @after AND id <= @upto)), 0)`

// repairSlice is how many ids one transaction of a repair covers.
const repairSlice = 10_000

func (l Lost) args(after, upto int64) pgx.StrictNamedArgs {
	seqs := make([]int64, len(l.Seqs))
	for i, seq := range l.Seqs {
		seqs[i] = int64(seq)
	}
	return pgx.StrictNamedArgs{"after": after, "upto": upto, "partition": l.Partition, "behind": int64(l.Behind), "seqs": seqs}
}

// eachSlice runs the statements over all ids that there are, and returns how many rows they found. lower is called in the transaction
// with the lowest of a slice's rows.
func (l Lost) eachSlice(ctx context.Context, pool *pgxpool.Pool, statements []string, lower func(tx pgx.Tx, lowest int64) error, done func()) (n int64, err error) {
	var high int64
	if err := pool.QueryRow(ctx, lastIDSQL).Scan(&high); err != nil {
		return 0, fmt.Errorf("read the last outbox id: %w", err)
	}
	for after := int64(0); ; after += repairSlice {
		var next, found int64
		if err := pool.QueryRow(ctx, nextIDSQL, pgx.StrictNamedArgs{"after": after, "upto": high}).Scan(&next); err != nil {
			return n, fmt.Errorf("look for the first row after %d: %w", after, err)
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
			return n, fmt.Errorf("go through the rows of partition %d after %d: %w", l.Partition, after, err)
		}
		if n += found; found > 0 && done != nil {
			done()
		}
	}
}

// OnStream is what this database knows of a message that stands behind the stored tail.
type OnStream int

// Unknown is a message without a row; one that is Pending is to be marked by its relay; of a Past one the row was marked before.
const (
	Unknown OnStream = iota
	Pending
	Past
)

// Classify says of messages what this database knows of them, by sequence.
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
