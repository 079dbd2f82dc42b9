package projections

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Comparison is the progress of the continuous comparison of a projection with the truth. A round
// compares all entities once.
type Comparison struct {
	Consumer, Cell string    // Cell is the name of the streams of that truth (NATS_STREAM)
	BeganAt        time.Time // the start of the current round
	LookedAt       time.Time // the time of its last window, by the database's clock
	Checked        int64     // entities compared so far in the round
	Different      int64     // lasting differences found so far in the round
	Last           *Round    // the last complete round; nil before the first
}

// Round is a complete comparison of all entities of a projection.
type Round struct {
	EndedAt            time.Time // by the database's clock
	Checked, Different int64
}

// saveComparisonSQL records a window, and with the last window of a round also the round.
// Index: comparisons_pkey. Locks: the row.
const saveComparisonSQL = `
INSERT /* projections.save_comparison */ INTO comparisons AS c
       (consumer_name, cell, began_at, checked, different, ended_at, last_checked, last_different)
VALUES (@consumer, @cell, @began, @checked, @different, CASE WHEN @ended THEN now() END,
        CASE WHEN @ended THEN @checked::bigint END, CASE WHEN @ended THEN @different::bigint END)
    ON CONFLICT (consumer_name, cell) DO UPDATE
   SET began_at = excluded.began_at, looked_at = now(), checked = excluded.checked, different = excluded.different,
       ended_at = coalesce(excluded.ended_at, c.ended_at), last_checked = coalesce(excluded.last_checked, c.last_checked),
       last_different = coalesce(excluded.last_different, c.last_different)`

// SaveComparison records the progress of a comparison; ended means that its round is complete. If
// several instances compare, the last one to write wins.
func SaveComparison(ctx context.Context, projections *pgxpool.Pool, c Comparison, ended bool) error {
	if _, err := projections.Exec(ctx, saveComparisonSQL, pgx.StrictNamedArgs{"consumer": c.Consumer, "cell": c.Cell, "began": c.BeganAt,
		"checked": c.Checked, "different": c.Different, "ended": ended}); err != nil {
		return fmt.Errorf("record the comparison of %s: %w", c.Consumer, err)
	}
	return nil
}

// comparisonsSQL reads all comparisons: a row per consumer and cell. Locks: none.
const comparisonsSQL = `
SELECT /* projections.comparisons */ consumer_name, cell, began_at, looked_at, checked, different, ended_at, last_checked, last_different
  FROM comparisons ORDER BY consumer_name, cell`

// Comparisons returns the progress of all comparisons, by consumer and cell.
func Comparisons(ctx context.Context, projections *pgxpool.Pool) (all []Comparison, err error) {
	rows, _ := projections.Query(ctx, comparisonsSQL)
	var c Comparison
	var ended *time.Time
	var checked, different *int64
	if _, err := pgx.ForEachRow(rows, []any{&c.Consumer, &c.Cell, &c.BeganAt, &c.LookedAt, &c.Checked, &c.Different, &ended, &checked,
		&different}, func() error {
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
