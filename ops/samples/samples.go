package samples

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
)

// Every is the time between two samples, and Kept how long the table has them. The statements and
// the policy of the table have the same values.
const (
	Every = 10 * time.Second
	Kept  = 24 * time.Hour
)

// Installation is the source of the samples of the whole installation.
const Installation = ""

// Sample is the figures of a source at one moment, by name (figures.go).
type Sample struct {
	At      time.Time // a multiple of Every
	Source  string
	Version string // of the process that wrote it
	Figures map[string]float64
}

// nextSQL reads the current moment. The API's role sees no row of the last day, so for it each
// moment is due. Index: samples_pkey. Locks: none.
const nextSQL = `
SELECT /* samples.next */ at, NOT EXISTS (SELECT FROM samples s WHERE s.at = m.at AND s.source = @source)
  FROM date_bin('10 s', clock_timestamp(), 'epoch') AS m(at)`

// Next returns the current moment of the database's clock, and whether it lacks a sample of the
// source. Call it before reading the figures.
func Next(ctx context.Context, pool *pgxpool.Pool, source string) (at time.Time, due bool, err error) {
	err = pool.QueryRow(ctx, nextSQL, pgx.StrictNamedArgs{"source": source}).Scan(&at, &due)
	if err != nil {
		return at, false, fmt.Errorf("read the moment of a sample: %w", err)
	}
	return at, due, nil
}

// recordSQL adds a sample, unless the next moment is over too, and deletes those whose day is over.
// Index: samples_pkey. Locks: the new row, and the deleted ones.
const recordSQL = `
WITH over AS (DELETE FROM samples WHERE at < now() - interval '1 day')
INSERT /* samples.record */ INTO samples (at, source, version, figures)
SELECT @at, @source, @version, @figures WHERE clock_timestamp() < @at::timestamptz + interval '20 s'
    ON CONFLICT DO NOTHING`

// Record writes the sample of a moment that Next returned. It reports false if the moment has a
// sample of the source already, or has expired because this process was slow.
func Record(ctx context.Context, pool *pgxpool.Pool, s Sample) (recorded bool, err error) {
	tag, err := pool.Exec(ctx, recordSQL,
		pgx.StrictNamedArgs{"at": s.At, "source": s.Source, "version": s.Version, "figures": s.Figures})
	if err != nil {
		return false, fmt.Errorf("record a sample of %d figures: %w", len(s.Figures), err)
	}
	return tag.RowsAffected() > 0, nil
}

// readSQL reads samples in order. Samples of the future are of a clock that was wrong. Index:
// samples_pkey. Locks: none.
const readSQL = `
SELECT /* samples.read */ at, source, version, figures FROM samples WHERE at > @after AND at <= now() ORDER BY at, source`

// Read returns the samples after a time, oldest first.
func Read(ctx context.Context, pool *pgxpool.Pool, after time.Time) ([]Sample, error) {
	rows, _ := pool.Query(ctx, readSQL, pgx.StrictNamedArgs{"after": after})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Sample])
	if err != nil {
		return nil, fmt.Errorf("read the samples since %s: %w", after.Format(time.RFC3339), err)
	}
	return all, nil
}

// Sampler samples one source.
type Sampler struct {
	Pool    *pgxpool.Pool // of the truth
	Source  string
	Version string
	Read    func(context.Context) (map[string]float64, error) // an error leaves a gap
	Log     *slog.Logger
}

// Run samples until ctx ends, and returns nil. It logs errors that a retry does not solve.
func (s Sampler) Run(ctx context.Context) error {
	for {
		if err := s.sample(ctx); err != nil && ctx.Err() == nil && !postgres.IsTransient(err) && !errors.Is(err, context.DeadlineExceeded) {
			s.Log.WarnContext(ctx, "no sample for the last day's lines, retrying", "err", err)
		}
		if work.Sleep(ctx, Every) != nil {
			return nil
		}
	}
}

// sample records the sample of the current moment, unless another process has.
func (s Sampler) sample(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Every)
	defer cancel()
	at, due, err := Next(ctx, s.Pool, s.Source)
	if err != nil || !due {
		return err
	}
	figures, err := s.Read(ctx)
	if err != nil {
		return err
	}
	_, err = Record(ctx, s.Pool, Sample{at, s.Source, s.Version, figures})
	return err
}
