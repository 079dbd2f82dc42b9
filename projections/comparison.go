package projections

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Comparison is how far the continuous comparison of a projection with the truth is. A round goes through all entities once.
type Comparison struct {
	Consumer, Cell string    // Cell is the name of the streams of that truth (NATS_STREAM)
	BeganAt        time.Time // the round that runs
	LookedAt       time.Time // the last window of it; by the database's clock
	Checked        int64     // entities of the round so far
	Different      int64     // lasting differences of the round so far
	Last           *Round    // the last round that ended; nil before
}

// Round is a comparison of all entities of a projection.
type Round struct {
	EndedAt            time.Time // by the database's clock
	Checked, Different int64
}

// saveComparisonSQL notes a window, and the round with it where the window is its last one.
// Index: comparisons_pkey.   Locks: the row.
const saveComparisonSQL = `
INSERT /* projections.save_comparison */ INTO comparisons AS c (consumer_name, cell, began_at, checked, different, ended_at, last_checked, last_different)
VALUES (@consumer, @cell, @began, @checked, @different, CASE WHEN @ended THEN now() END, CASE WHEN @ended THEN @checked::bigint END, CASE WHEN @ended THEN @different::bigint END)
ON CONFLICT (consumer_name, cell) DO UPDATE SET began_at = excluded.began_at, looked_at = now(), checked = excluded.checked, different = excluded.different,
  ended_at = coalesce(excluded.ended_at, c.ended_at), last_checked = coalesce(excluded.last_checked, c.last_checked), last_different = coalesce(excluded.last_different, c.last_different)`

// SaveComparison notes how far a comparison is; ended says that its round is complete. Of several instances that compare, the last one to write shows.
func SaveComparison(ctx context.Context, projections *pgxpool.Pool, c Comparison, ended bool) error {
	if _, err := projections.Exec(ctx, saveComparisonSQL, pgx.StrictNamedArgs{"consumer": c.Consumer, "cell": c.Cell, "began": c.BeganAt,
		"checked": c.Checked, "different": c.Different, "ended": ended}); err != nil {
		return fmt.Errorf("note the comparison of %s: %w", c.Consumer, err)
	}
	return nil
}

// comparisonsSQL reads all comparisons: a row per consumer and cell.
// Locks: none.
const comparisonsSQL = `
SELECT /* projections.comparisons */ consumer_name, cell, began_at, looked_at, checked, different, ended_at, last_checked, last_different FROM comparisons ORDER BY consumer_name, cell`

// Comparisons returns how far the comparisons are, by consumer and cell.
func Comparisons(ctx context.Context, projections *pgxpool.Pool) (all []Comparison, err error) {
	rows, _ := projections.Query(ctx, comparisonsSQL)
	var c Comparison
	var ended *time.Time
	var checked, different *int64
	if _, err := pgx.ForEachRow(rows, []any{&c.Consumer, &c.Cell, &c.BeganAt, &c.LookedAt, &c.Checked, &c.Different, &ended, &checked, &different}, func() error {
		one := c
		if ended != nil {
			one.Last = &Round{*ended, *checked, *different}
		}
		all = append(all, one)
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the comparisons: %w", err)
	}
	return all, nil
}
