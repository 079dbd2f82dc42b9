package upkeep

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
)

// RetentionConfig says when the retention of versioned objects and of idempotency keys runs.
type RetentionConfig struct {
	Every  time.Duration `env:"RETENTION_EVERY, default=24h"`          // from the end of a run to the next
	Window jobs.Window   `env:"RETENTION_WINDOW, default=02:00-05:00"` // when it may run, UTC; empty: at any time
}

// Validate returns an error that lists every value out of bounds.
func (c RetentionConfig) Validate() error {
	if c.Every < time.Minute {
		return fmt.Errorf("RETENTION_EVERY is %s: want 1m or more", c.Every)
	}
	return nil
}

// retained is a table to which retention applies.
type retained struct {
	name   string // in metrics and counts
	table  string
	pool   *pgxpool.Pool
	after  Span
	fence  func(context.Context, pgx.Tx) error
	retain func(ctx context.Context, terms versioned.Terms) error
}

// tables returns the tables to which retention applies under the settings. h may be nil for a plan.
func (d Deps) tables(s Settings, h *jobs.Hold) []retained {
	all := []retained{{"threads", "threads", d.Truth, s.ThreadsAfter, fenceOfLease(h),
		func(ctx context.Context, terms versioned.Terms) error {
			return store.RetainThreads(ctx, d.Truth, terms)
		}}}
	for _, k := range d.Kinds().AllChildren() {
		all = append(all, retained{"comment_history", k.Name + "_history", d.Projections, s.CommentHistoryAfter, fenceOfHistories(h),
			func(ctx context.Context, terms versioned.Terms) error {
				if err := d.checkSoleCell(ctx, terms); err != nil {
					return err
				}
				return history.RetainChildren(ctx, d.Truth, d.Projections, k, terms)
			}})
	}
	for _, k := range d.Kinds().AllEdges() {
		all = append(all, retained{"follow_history", k.Name + "_history", d.Projections, s.FollowHistoryAfter, fenceOfHistories(h),
			func(ctx context.Context, terms versioned.Terms) error {
				if err := d.checkSoleCell(ctx, terms); err != nil {
					return err
				}
				return history.RetainEdges(ctx, d.Truth, d.Projections, k, terms)
			}})
	}
	return append(all, retained{"child_keys", "child_keys", d.Truth, s.CommentKeysKeep, fenceOfLease(h),
		func(ctx context.Context, terms versioned.Terms) error {
			return store.PurgeKeys(ctx, d.Truth, terms)
		}})
}

// checkSoleCell returns an error if retention is on and another truth writes to the same histories.
// The tenants of the other truth would look deleted to this one.
func (d Deps) checkSoleCell(ctx context.Context, terms versioned.Terms) error {
	if terms.After <= 0 {
		return nil
	}
	ours, err := cells.Read(ctx, d.Projections, d.Cell)
	if err != nil {
		return err
	}
	return ours.RequireSole()
}

// retention returns the job that purges versioned objects, one table after the other, and
// idempotency keys.
func retention(cfg RetentionConfig, d Deps, settings func(context.Context) (Settings, error)) (jobs.Job, error) {
	expired := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tidings_retention_expired_total",
		Help: "Objects that retention deleted logically, by table."}, []string{"table"})
	purged := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tidings_retention_purged_total",
		Help: "What retention purged, by table: objects with all their versions, or idempotency keys."}, []string{"table"})
	for _, c := range []prometheus.Collector{expired, purged} {
		if err := d.Registry.Register(c); err != nil {
			return jobs.Job{}, fmt.Errorf("register the metrics of retention: %w", err)
		}
	}
	for _, name := range []string{"threads", "comment_history", "follow_history", "child_keys"} {
		expired.WithLabelValues(name)
		purged.WithLabelValues(name)
	}
	run := func(ctx context.Context, h *jobs.Hold) error {
		s, err := settings(ctx)
		if err != nil {
			return err
		}
		var errs []error // an error of one table does not stop the others
		for _, t := range d.tables(s, h) {
			err := h.Part(ctx, t.table, func() error {
				return t.retain(ctx, versioned.Terms{After: time.Duration(t.after), Fence: t.fence, Done: func(e, p, v int64) {
					expired.WithLabelValues(t.name).Add(float64(e))
					purged.WithLabelValues(t.name).Add(float64(p))
					h.Count(t.name+" expired", e)
					h.Count(t.name+" purged", p)
					h.Count(t.name+" versions purged", v)
				}})
			})
			if ctx.Err() != nil || errors.Is(err, jobs.ErrLost) {
				return err
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	return jobs.Job{Name: "retention", Every: cfg.Every, Window: cfg.Window, Run: run,
		Plan: func(ctx context.Context) (jobs.Plan, error) { return d.planRetention(ctx, settings) }}, nil
}

// rowSizeSQL estimates the bytes that a row of a table takes on disk with its indexes, from
// PostgreSQL's estimate of the number of rows. It is 0 while that estimate is missing. Locks: none.
const rowSizeSQL = `SELECT CASE WHEN reltuples > 0 THEN pg_total_relation_size(oid) / reltuples ELSE 0 END FROM pg_class
	WHERE oid = to_regclass(@table)`

func (d Deps) planRetention(ctx context.Context, settings func(context.Context) (Settings, error)) (jobs.Plan, error) {
	s, err := settings(ctx)
	if err != nil {
		return jobs.Plan{}, err
	}
	counts := make(map[string]int64)
	var drops []jobs.Drop
	for _, t := range d.tables(s, nil) {
		drop := jobs.Drop{What: t.table}
		if err := t.retain(ctx, versioned.Terms{After: time.Duration(t.after), DryRun: true, Done: func(e, p, _ int64) {
			counts[t.name+" expired"] += e
			counts[t.name+" purged"] += p
			drop.Rows += p
		}}); err != nil {
			return jobs.Plan{}, err
		}
		if drop.Rows == 0 {
			continue
		}
		var size float64
		if err := t.pool.QueryRow(ctx, rowSizeSQL, pgx.StrictNamedArgs{"table": t.table}).Scan(&size); err != nil {
			return jobs.Plan{}, fmt.Errorf("estimate the rows of %s: %w", t.table, err)
		}
		drop.Bytes = int64(size * float64(drop.Rows))
		drops = append(drops, drop)
	}
	return plan(ctx, settings, counts, drops, nil, "comment_history_after", "follow_history_after", "threads_after", "comment_keys_keep")
}

// fenceOfLease returns the fence of a slice in the database of the lease. It stops the job when the
// time of the run is over.
func fenceOfLease(h *jobs.Hold) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		if err := h.Continue(); err != nil {
			return err
		}
		return h.Fence(ctx, tx)
	}
}

// fenceOfHistories is fenceOfLease for the histories, which may be on another server than the
// lease.
func fenceOfHistories(h *jobs.Hold) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		if err := h.Continue(); err != nil {
			return err
		}
		return h.FenceElsewhere(ctx, tx)
	}
}
