// Package upkeep lists the scheduled jobs of a fleet in one place: for the archiver and dev, which run them when they are due, and
// for the commands that run them at once.
package upkeep

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/coldstore"
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// Config is the environment of all jobs.
type Config struct {
	OutboxArchive        outbox.ArchiveConfig
	Cold                 coldstore.Config
	CommentArchive       store.ArchiveConfig
	CommentArchiveWindow jobs.Window `env:"COMMENT_ARCHIVE_WINDOW"` // the time of day in UTC, such as 01:00-05:30, in which threads are archived; empty: any
	Retention            RetentionConfig
}

// Validate reports every value out of bounds.
func (c Config) Validate() error {
	return errors.Join(c.OutboxArchive.Validate(), c.Cold.Validate(), c.CommentArchive.Validate(), c.Retention.Validate())
}

// Outlives reports an archive that is dropped before the stream's messages of the same time, of which maxAge is the age; 0 is for ever.
// tidings repair stream cannot tell such messages from those of writes that were lost.
func (c Config) Outlives(maxAge time.Duration) error {
	keep := c.OutboxArchive.Keep
	if keep == 0 || maxAge > 0 && keep >= maxAge {
		return nil
	}
	return fmt.Errorf("OUTBOX_ARCHIVE_KEEP is %s and NATS_MAX_AGE %s (0s: for ever): archived rows are to outlive the stream's messages", keep, maxAge)
}

// Deps are what jobs work with. The pools act as the system role; that of the projections may be that of the truth.
type Deps struct {
	Truth, Projections *pgxpool.Pool
	Kinds              func() *kinds.Set // in force in the truth, at any time (kinds.Catalog.Now)
	Registry           prometheus.Registerer
	Log                *slog.Logger
}

// Jobs returns every job, in the order in which a command runs them. It starts nothing.
func Jobs(cfg Config, d Deps) ([]jobs.Job, error) {
	messages, err := outbox.NewArchive(cfg.OutboxArchive, d.Truth, d.Log, d.Registry)
	if err != nil {
		return nil, err
	}
	threads, err := store.NewArchiver(cfg.CommentArchive, d.Truth, d.Kinds, d.Log, d.Registry)
	if err != nil {
		return nil, err
	}
	retain, err := retention(cfg.Retention, d)
	if err != nil {
		return nil, err
	}
	var metrics *coldstore.Metrics
	if cfg.Cold.URL != "" {
		if metrics, err = coldstore.NewMetrics(d.Registry); err != nil {
			return nil, err
		}
	}
	list := []jobs.Job{
		{Name: outbox.RangesJob, Every: outbox.RangesEvery, Apart: true, Run: func(ctx context.Context, h *jobs.Hold) error { return messages.Prepare(ctx, h) }},
		{Name: outbox.ArchiveJob, Every: cfg.OutboxArchive.Every, Plan: messages.Plan,
			With: fmt.Sprintf("OUTBOX_ARCHIVE_AFTER=%s OUTBOX_ARCHIVE_KEEP=%s", cfg.OutboxArchive.After, cfg.OutboxArchive.Keep),
			Run:  archiveWithExports(messages, cfg.Cold.URL, d.Truth, metrics)},
		{Name: store.ArchiveJob, Every: cfg.CommentArchive.Every, Window: cfg.CommentArchiveWindow, Plan: threads.Plan,
			With: fmt.Sprintf("COMMENT_ARCHIVE_AFTER=%s", cfg.CommentArchive.After),
			Run:  func(ctx context.Context, h *jobs.Hold) error { return threads.Run(ctx, h) }},
		retain,
	}
	if cfg.Cold.URL == "" {
		return list, nil
	}
	return slices.Insert(list, 2, exportJob(cfg, d.Truth, metrics)), nil
}
