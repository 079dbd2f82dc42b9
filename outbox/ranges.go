package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// The states of a range.
const (
	RangeOpen     = "OPEN"     // a part of the outbox
	RangeArchived = "ARCHIVED" // a part of the archive
	RangeGone     = "GONE"     // dropped
)

// Range is a range of ids from From up to but not including To. Its table is first a part of the
// outbox, then of the archive.
type Range struct {
	From       int64     `json:"from"`
	To         int64     `json:"to"`
	State      string    `json:"state"`
	SettledAt  time.Time `json:"settled_at,omitzero"`  // when all its rows were published, except delayed ones
	ArchivedAt time.Time `json:"archived_at,omitzero"` // when it moved, or when late rows last moved
	FirstAt    time.Time `json:"first_at,omitzero"`    // when the first message of an archived range was inserted
	Indexed    bool      `json:"indexed"`
	Rows       int64     `json:"rows"`  // an estimate by PostgreSQL
	Bytes      int64     `json:"bytes"` // on disk, with indexes
	Held       bool      `json:"held"`  // as far as is known, a hold keeps it, or some tenants' rows of it
}

// rangesSQL reads the ranges that have a table. If the time span of a range is not recorded, it
// takes the time from its first message to its move.
//
// Locks: only those of reading.
const rangesSQL = `
SELECT /* outbox.ranges */ r.from_id, r.to_id, r.state, r.settled_at, r.archived_at, r.first_at, r.indexed,
       greatest(c.reltuples, 0)::bigint, coalesce(pg_total_relation_size(c.oid), 0),
       r.state = 'ARCHIVED' AND (h.whole OR h.tenants <> '{}'), now()
  FROM outbox_ranges r JOIN pg_class c ON c.oid = to_regclass('outbox_messages_' || r.from_id)
 CROSS JOIN LATERAL outbox_holds_on(coalesce(r.first_occurred, r.first_at), coalesce(r.last_occurred, r.archived_at)) h
 WHERE r.state <> 'GONE' ORDER BY r.from_id`

// Ranges returns the ranges that have a table, by id, and the time by the database's clock. The
// pool acts as the system role.
func Ranges(ctx context.Context, pool *pgxpool.Pool) (all []Range, now time.Time, err error) {
	rows, _ := pool.Query(ctx, rangesSQL)
	all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (r Range, err error) {
		var settled, archived, first *time.Time
		err = row.Scan(&r.From, &r.To, &r.State, &settled, &archived, &first, &r.Indexed, &r.Rows, &r.Bytes, &r.Held, &now)
		for to, from := range map[*time.Time]*time.Time{&r.SettledAt: settled, &r.ArchivedAt: archived, &r.FirstAt: first} {
			if from != nil {
				*to = from.UTC()
			}
		}
		return r, err
	})
	if err != nil {
		return nil, now, fmt.Errorf("read the ranges of the outbox: %w", err)
	}
	return all, now, nil
}

// RangesJob is the name of the job of Archive.Prepare, and RangesEvery its interval.
const (
	RangesJob   = "outbox-ranges"
	RangesEvery = time.Minute
)

// The counts of Prepare.
const (
	CountMade = "ranges made"
	CountCut  = "ranges ended"
)

// rangesAhead is the number of ranges to keep above the last id.
const rangesAhead = 2

// gapMargin is the number of ids that fall into the default range if no range covers the last id.
// Writers take ids while a range is attached.
const gapMargin = 1_000_000

const (
	// makeRangeSQL creates a range. Locks: the default range, ACCESS EXCLUSIVE, which it reads.
	makeRangeSQL = `SELECT /* outbox.make_range */ outbox_range_make(@from, @to)`
	// cutRangeSQL ends the current range. Locks: the outbox, against writers.
	cutRangeSQL = `SELECT /* outbox.cut_range */ outbox_range_cut(@to)`
	// writtenSinceSQL checks whether a range's first message is older than @age, or has a time in
	// the future. A clock that was ahead wrote such a time, so the message's age is unknown. Index:
	// the range's primary key, its first entry. Locks: none.
	writtenSinceSQL = `
SELECT /* outbox.written_since */ inserted_at NOT BETWEEN now() - @age::interval AND now() + interval '1 minute'
  FROM outbox_messages WHERE id >= @from AND id < @to ORDER BY id LIMIT 1`
	// settleSQL records the ranges that every floor has passed. An open partition covers each slot.
	// It replaces times in the future by now: a clock that was ahead wrote them, and the range
	// would stay for as long as that clock was wrong.
	//
	// Index: none, a row per range and per partition.   Locks: the ranges.
	settleSQL = `
UPDATE /* outbox.settle */ outbox_ranges
   SET settled_at = least(settled_at, now()), archived_at = CASE WHEN archived_at > now() THEN now() ELSE archived_at END
 WHERE state = 'OPEN' AND (settled_at IS NULL OR settled_at > now() + interval '1 minute')
       AND to_id - 1 <= (SELECT min(floor_id) FROM outbox_partitions WHERE final_seq IS NULL)
    OR state = 'ARCHIVED' AND archived_at > now() + interval '1 minute'`
)

// Prepare creates ranges ahead of need, ends the current one once it is old enough, and records
// settled ones. Each step is one transaction. A step that does not get its lock waits for the next
// run. Prepare is safe beside Run and every other job, because it only adds ranges that no row uses
// yet.
func (a *Archive) Prepare(ctx context.Context, h Lease) error {
	last, written, err := a.makeAhead(ctx, h)
	if err != nil {
		return err
	}
	cut, err := a.cut(ctx, h, written, last)
	if err == nil && cut { // the next range is the current one now
		_, _, err = a.makeAhead(ctx, h)
	}
	return errors.Join(err, a.settle(ctx, h))
}

// makeAhead keeps rangesAhead ranges above the last id. It returns that id and its range.
func (a *Archive) makeAhead(ctx context.Context, h Lease) (last int64, written Range, err error) {
	if err := a.pool.QueryRow(ctx, lastIDSQL).Scan(&last); err != nil {
		return 0, written, fmt.Errorf("read the last outbox id: %w", err)
	}
	all, _, err := Ranges(ctx, a.pool)
	if err != nil {
		return 0, written, err
	}
	next, ahead := int64(1), 0
	for _, r := range all {
		next = max(next, r.To)
		if r.State == RangeOpen && r.From > last {
			ahead++
		}
		if r.From <= last && last < r.To {
			written = r
			if last == r.To-1 {
				ahead-- // it is full: writes go to the next one
			}
		}
	}
	if last >= next {
		next = last + gapMargin
	}
	for ; ahead < rangesAhead; ahead++ {
		if err := a.makeRange(ctx, h, next, next+a.cfg.RangeRows); err != nil {
			return 0, written, err
		}
		next += a.cfg.RangeRows
	}
	return last, written, nil
}

func (a *Archive) makeRange(ctx context.Context, h Lease, from, to int64) error {
	if err := a.ddl(ctx, h, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, makeRangeSQL, pgx.StrictNamedArgs{"from": from, "to": to})
		return err
	}); err != nil {
		return fmt.Errorf("create the range from %d: %w", from, err)
	}
	a.at("range made")
	a.log.InfoContext(ctx, "a range of the outbox was created", "from", from, "to", to)
	h.Count(CountMade, 1)
	return nil
}

// cut ends the current range r, which contains last, if it is old enough. It reports whether it
// did.
func (a *Archive) cut(ctx context.Context, h Lease, r Range, last int64) (done bool, err error) {
	if r.State != RangeOpen || last == r.To-1 {
		return false, nil
	}
	rows, _ := a.pool.Query(ctx, writtenSinceSQL, pgx.StrictNamedArgs{"from": r.From, "to": r.To, "age": a.cfg.RangeAge})
	old, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("read the age of the range from %d: %w", r.From, err)
	}
	if len(old) == 0 || !old[0] {
		return false, nil
	}
	if err := a.ddl(ctx, h, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, cutRangeSQL, pgx.StrictNamedArgs{"to": r.To}).Scan(&done)
	}); err != nil {
		return false, fmt.Errorf("end the range from %d: %w", r.From, err)
	}
	if done {
		a.at("range ended")
		h.Count(CountCut, 1)
	}
	return done, nil
}

func (a *Archive) settle(ctx context.Context, h Lease) error {
	if err := a.inTx(ctx, h, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, settleSQL)
		return err
	}); err != nil {
		return fmt.Errorf("record which ranges are settled: %w", err)
	}
	return nil
}
