package upkeep

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/versioned"
)

// RetentionConfig is the environment of the retention of versioned objects and of idempotency keys. What has no time is kept for ever.
type RetentionConfig struct {
	Every          time.Duration `env:"RETENTION_EVERY, default=24h"`               // from the end of a run to the next
	Window         jobs.Window   `env:"RETENTION_WINDOW, default=02:00-05:00"`      // when it may run, UTC; empty for always
	CommentHistory time.Duration `env:"RETENTION_COMMENT_HISTORY_AFTER, default=0"` // of comments that are deleted or erased
	FollowHistory  time.Duration `env:"RETENTION_FOLLOW_HISTORY_AFTER, default=0"`  // of pairs that are not followed any more
	Threads        time.Duration `env:"RETENTION_THREADS_AFTER, default=0"`         // of settings that are the defaults again
	CommentKeys    time.Duration `env:"COMMENT_KEYS_KEEP, default=0"`               // of the idempotency keys of creates, of every kind
}

// Validate reports every value out of bounds.
func (c RetentionConfig) Validate() error {
	var errs []error
	if c.Every < time.Minute {
		errs = append(errs, fmt.Errorf("RETENTION_EVERY is %s: want 1m or more", c.Every))
	}
	for _, v := range []struct {
		name  string
		after time.Duration
	}{{"RETENTION_COMMENT_HISTORY_AFTER", c.CommentHistory}, {"RETENTION_FOLLOW_HISTORY_AFTER", c.FollowHistory}, {"RETENTION_THREADS_AFTER", c.Threads}, {"COMMENT_KEYS_KEEP", c.CommentKeys}} {
		if v.after != 0 && v.after < time.Hour {
			errs = append(errs, fmt.Errorf("%s is %s: want 1h or more, or 0 for ever", v.name, v.after))
		}
	}
	return errors.Join(errs...)
}

// retention returns the job that ends the life of versioned objects, one table after the other, and of idempotency keys.
func retention(cfg RetentionConfig, d Deps) (jobs.Job, error) {
	expired := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "retention_expired_total", Help: "Objects that retention deleted logically, by table."}, []string{"table"})
	purged := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "retention_purged_total", Help: "Objects that retention purged with all their versions, and idempotency keys, by table."}, []string{"table"})
	for _, c := range []prometheus.Collector{expired, purged} {
		if err := d.Registry.Register(c); err != nil {
			return jobs.Job{}, fmt.Errorf("register the metrics of retention: %w", err)
		}
	}
	tables := []struct {
		name   string
		after  time.Duration
		fence  func(h *jobs.Hold) func(context.Context, pgx.Tx) error
		retain func(ctx context.Context, terms versioned.Terms) error
	}{
		{"threads", cfg.Threads, here, func(ctx context.Context, terms versioned.Terms) error {
			return store.RetainThreads(ctx, d.Truth, terms)
		}},
		{"comment_history", cfg.CommentHistory, elsewhere, func(ctx context.Context, terms versioned.Terms) error {
			return everyKind(d.Kinds().AllChildren(), func(k kinds.Child) error { return history.RetainChildren(ctx, d.Truth, d.Projections, k, terms) })
		}},
		{"follow_history", cfg.FollowHistory, elsewhere, func(ctx context.Context, terms versioned.Terms) error {
			return everyKind(d.Kinds().AllEdges(), func(k kinds.Edge) error { return history.RetainEdges(ctx, d.Truth, d.Projections, k, terms) })
		}},
		{"child_keys", cfg.CommentKeys, here, func(ctx context.Context, terms versioned.Terms) error {
			return store.PurgeKeys(ctx, d.Truth, terms)
		}},
	}
	for _, t := range tables {
		expired.WithLabelValues(t.name)
		purged.WithLabelValues(t.name)
	}
	run := func(ctx context.Context, h *jobs.Hold) error {
		var errs []error // of one table: the others go on
		for _, t := range tables {
			err := t.retain(ctx, versioned.Terms{After: t.after, Fence: t.fence(h), Done: func(e, p, v int64) {
				expired.WithLabelValues(t.name).Add(float64(e))
				purged.WithLabelValues(t.name).Add(float64(p))
				h.Count(t.name+" expired", e)
				h.Count(t.name+" purged", p)
				h.Count(t.name+" versions purged", v)
			}})
			if ctx.Err() != nil || errors.Is(err, jobs.ErrLost) {
				return err
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	plan := func(ctx context.Context) (map[string]int64, error) {
		counts := make(map[string]int64)
		for _, t := range tables {
			err := t.retain(ctx, versioned.Terms{After: t.after, DryRun: true, Done: func(e, p, _ int64) {
				counts[t.name+" expired"] += e
				counts[t.name+" purged"] += p
			}})
			if err != nil {
				return nil, err
			}
		}
		return counts, nil
	}
	with := fmt.Sprintf("RETENTION_THREADS_AFTER=%s RETENTION_COMMENT_HISTORY_AFTER=%s RETENTION_FOLLOW_HISTORY_AFTER=%s COMMENT_KEYS_KEEP=%s", cfg.Threads, cfg.CommentHistory, cfg.FollowHistory, cfg.CommentKeys)
	return jobs.Job{Name: "retention", Every: cfg.Every, Window: cfg.Window, Run: run, Plan: plan, With: with}, nil
}

// The histories may be on another server than the lease.
func here(h *jobs.Hold) func(context.Context, pgx.Tx) error      { return h.Fence }
func elsewhere(h *jobs.Hold) func(context.Context, pgx.Tx) error { return h.FenceElsewhere }

func everyKind[K any](all []K, retain func(K) error) error {
	var errs []error // of one kind: the others go on
	for _, k := range all {
		errs = append(errs, retain(k))
	}
	return errors.Join(errs...)
}
