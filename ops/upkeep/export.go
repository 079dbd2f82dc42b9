package upkeep

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
)

// ExportJob is the name of the job that exports ranges of the outbox's archive.
const ExportJob = "outbox-export"

// Names of the counts of a run.
const (
	CountRangesExported = "ranges exported"
	CountRowsExported   = "rows exported"
)

// exportJob exports the ranges that are due. It does nothing while no URL is set.
func exportJob(cfg Config, truth *pgxpool.Pool, metrics *coldstore.Metrics, settings func(context.Context) (Settings, error)) jobs.Job {
	return jobs.Job{
		Name: ExportJob, Every: cfg.OutboxArchive.Every,
		Run: func(ctx context.Context, h *jobs.Hold) error {
			s, err := settings(ctx)
			if err != nil || s.OutboxExportURL == "" {
				return err
			}
			cold := coldstore.New(truth, s.OutboxExportURL, h.Fence, metrics, nil)
			done, err := cold.ExportDue(ctx, h.Continue)
			for _, e := range done {
				h.Count(CountRangesExported, 1)
				h.Count(CountRowsExported, e.Rows)
			}
			return errors.Join(err, cold.Close())
		},
		Plan: func(ctx context.Context) (jobs.Plan, error) {
			s, err := settings(ctx)
			if err != nil || s.OutboxExportURL == "" {
				return jobs.Plan{With: "outbox_archive_export_url="}, err
			}
			cold := coldstore.New(truth, s.OutboxExportURL, nil, nil, nil)
			due, err := cold.Due(ctx)
			return plan(ctx, settings, map[string]int64{CountRangesExported: int64(len(due))}, nil, errors.Join(err, cold.Close()),
				"outbox_archive_export_url")
		},
	}
}

// archiveWithExports returns the archive's run. While exports are on, it drops no range that has no
// verified export.
func archiveWithExports(messages *outbox.Archive, settings func(context.Context) (Settings, error), truth *pgxpool.Pool,
	metrics *coldstore.Metrics) func(ctx context.Context, h *jobs.Hold) error {
	var cold *coldstore.Store // of the current run; runs do not overlap
	messages.BeforeDrop(func(ctx context.Context, r outbox.Range) (bool, string, error) { return cold.Check(ctx, r) })
	return func(ctx context.Context, h *jobs.Hold) error {
		s, err := settings(ctx)
		if err != nil {
			return err
		}
		cold = coldstore.New(truth, s.OutboxExportURL, h.Fence, metrics, nil)
		return errors.Join(messages.Run(ctx, h), cold.Close())
	}
}
