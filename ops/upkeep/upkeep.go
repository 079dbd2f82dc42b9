package upkeep

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
	"github.com/tidings/tidings/store"
)

// Config is the environment of all jobs: when they run. The Settings in the database say what they
// move and drop.
type Config struct {
	OutboxArchive       outbox.ArchiveConfig
	CommentArchiveEvery time.Duration `env:"COMMENT_ARCHIVE_EVERY, default=1h"` // between runs that shelve threads; 0: only by command
	// CommentArchiveWindow is the time of day in UTC in which threads are shelved, for example
	// 01:00-05:30; empty: at any time.
	CommentArchiveWindow jobs.Window `env:"COMMENT_ARCHIVE_WINDOW"`
	Retention            RetentionConfig
}

// Validate returns an error that lists every value out of bounds.
func (c Config) Validate() error {
	var every error
	if c.CommentArchiveEvery < 0 {
		every = fmt.Errorf("COMMENT_ARCHIVE_EVERY is %s: want 0 or more", c.CommentArchiveEvery)
	}
	return errors.Join(c.OutboxArchive.Validate(), every, c.Retention.Validate())
}

// Deps are the dependencies of the jobs. Each pool acts as the system role; both may be one pool.
// Projections is nil if the outbox is alone in its database.
type Deps struct {
	Truth, Projections *pgxpool.Pool
	Cell               string            // the cell of the truth: NATS_STREAM
	Kinds              func() *kinds.Set // returns the kinds that the truth has now (catalog.Catalog.Now)
	Registry           prometheus.Registerer
	Log                *slog.Logger
}

// Jobs returns every job, or those of the outbox if it is alone, in the order in which a command
// runs them. Each run and each plan calls settings first; Current reads them from the database.
// Jobs starts no job.
func Jobs(cfg Config, d Deps, settings func(context.Context) (Settings, error)) ([]jobs.Job, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	messages, err := outbox.NewArchive(cfg.OutboxArchive, func(ctx context.Context) (outbox.Terms, error) {
		s, err := settings(ctx)
		return outbox.Terms{After: time.Duration(s.OutboxArchiveAfter), Keep: time.Duration(s.OutboxArchiveKeep)}, err
	}, d.Truth, d.Log, d.Registry)
	if err != nil {
		return nil, err
	}
	metrics, err := coldstore.NewMetrics(d.Registry)
	if err != nil {
		return nil, err
	}
	list := []jobs.Job{
		{Name: outbox.RangesJob, Every: outbox.RangesEvery, OwnLease: true,
			Run: func(ctx context.Context, h *jobs.Hold) error { return messages.Prepare(ctx, h) }},
		{Name: outbox.ArchiveJob, Every: cfg.OutboxArchive.Every, Run: archiveWithExports(messages, settings, d.Truth, metrics),
			Plan: func(ctx context.Context) (jobs.Plan, error) { return planOutbox(ctx, messages, settings) }},
		exportJob(cfg, d.Truth, metrics, settings),
	}
	if d.Projections == nil {
		return list, nil
	}
	threads, err := store.NewShelver(d.Truth, func(ctx context.Context) (time.Duration, error) {
		s, err := settings(ctx)
		return time.Duration(s.CommentArchiveAfter), err
	}, d.Kinds, d.Log, d.Registry)
	if err != nil {
		return nil, err
	}
	retain, err := retention(cfg.Retention, d, settings)
	if err != nil {
		return nil, err
	}
	return append(list, jobs.Job{Name: store.ShelvingJob, Every: cfg.CommentArchiveEvery, Window: cfg.CommentArchiveWindow,
		Run: func(ctx context.Context, h *jobs.Hold) error { return threads.Run(ctx, h) },
		Plan: func(ctx context.Context) (jobs.Plan, error) {
			counts, err := threads.Plan(ctx)
			return plan(ctx, settings, counts, nil, err, "comment_archive_after")
		}}, retain), nil
}

// plan returns the plan of a job that depends on the settings in names.
func plan(ctx context.Context, settings func(context.Context) (Settings, error), counts map[string]int64, drops []jobs.Drop, failed error,
	names ...string) (jobs.Plan, error) {
	s, err := settings(ctx)
	if err := errors.Join(failed, err); err != nil {
		return jobs.Plan{}, err
	}
	var with []string
	for _, t := range All {
		if slices.Contains(names, t.Name) {
			with = append(with, t.Name+"="+t.Of(s))
		}
	}
	return jobs.Plan{Counts: counts, Drops: drops, With: strings.Join(with, " ")}, nil
}

func planOutbox(ctx context.Context, messages *outbox.Archive, settings func(context.Context) (Settings, error)) (jobs.Plan, error) {
	counts, ranges, err := messages.Plan(ctx)
	var drops []jobs.Drop
	for _, r := range ranges {
		since := r.FirstAt.UTC().Format("2006-01")
		if last := r.ArchivedAt.UTC().Format("2006-01"); last != since { // a range moves after its last row was written
			since += ".." + last
		}
		drops = append(drops, jobs.Drop{What: fmt.Sprintf("range %d to %d of the outbox's archive", r.From, r.To-1), Since: since,
			Rows: r.Rows, Bytes: r.Bytes})
	}
	return plan(ctx, settings, counts, drops, err, "outbox_archive_after", "outbox_archive_keep", "outbox_archive_export_url")
}

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
