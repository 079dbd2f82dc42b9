package upkeep

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/coldstore"
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/outbox"
)

// ExportJob is the name of the job that exports months of the outbox's archive.
const ExportJob = "outbox-export"

// What a run counts.
const (
	CountMonthsExported = "months exported"
	CountRowsExported   = "rows exported"
)

// settleMargin is how long after the last of a month's messages should have moved to the archive the month is exported. What comes
// later still is found before the month is dropped, and the month exported again.
const settleMargin = 24 * time.Hour

// Settle is how long after its end a month is exported.
func Settle(cfg Config) time.Duration { return cfg.OutboxArchive.After + settleMargin }

// exportJob exports the months that are due.
func exportJob(cfg Config, truth *pgxpool.Pool, metrics *coldstore.Metrics) jobs.Job {
	settle := Settle(cfg)
	return jobs.Job{
		Name: ExportJob, Every: cfg.OutboxArchive.Every,
		Run: func(ctx context.Context, h *jobs.Hold) error {
			cold := coldstore.New(truth, cfg.Cold.URL, h.Fence, metrics, nil)
			done, err := cold.ExportDue(ctx, settle)
			for _, e := range done {
				h.Count(CountMonthsExported, 1)
				h.Count(CountRowsExported, e.Rows)
			}
			return errors.Join(err, cold.Close())
		},
		Plan: func(ctx context.Context) (map[string]int64, error) {
			cold := coldstore.New(truth, cfg.Cold.URL, nil, nil, nil)
			due, err := cold.Due(ctx, settle)
			return map[string]int64{CountMonthsExported: int64(len(due))}, errors.Join(err, cold.Close())
		},
	}
}

// archiveWithExports is the archive's run in which no month is dropped that is to stand outside the database and does not.
func archiveWithExports(messages *outbox.Archive, url string, truth *pgxpool.Pool, metrics *coldstore.Metrics) func(ctx context.Context, h *jobs.Hold) error {
	var cold *coldstore.Store // of the run in hand: one runs at a time
	messages.BeforeDrop(func(ctx context.Context, m outbox.Month) (bool, string, error) { return cold.BeforeDrop(ctx, m) })
	return func(ctx context.Context, h *jobs.Hold) error {
		cold = coldstore.New(truth, url, h.Fence, metrics, nil)
		return errors.Join(messages.Run(ctx, h), cold.Close())
	}
}
