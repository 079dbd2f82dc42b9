package jobs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/work"
)

// Job is work that repeats.
type Job struct {
	Name  string        // in metrics and in job_runs
	Every time.Duration // from the end of a successful run to the next run; 0: only by command
	// OwnLease gives the job its own lease, so it never waits for another job. Only a job that is
	// safe beside all others may set it.
	OwnLease bool
	MaxRun   time.Duration                            // how long a run begins new slices (Hold.Continue); 0: MaxRun
	Window   Window                                   // when it may run; a run that the window's end interrupts resumes in the next window
	Run      func(ctx context.Context, h *Hold) error // returns nil when no work remains; stops between slices when ctx ends
	Plan     func(ctx context.Context) (Plan, error)  // returns what Run would do now, and changes nothing
}

// Plan is the work that a run would do now.
type Plan struct {
	Counts map[string]int64 `json:"counts"`          // with the names of Hold.Count
	Drops  []Drop           `json:"drops,omitempty"` // data that the run would delete
	With   string           `json:"with,omitempty"`  // the settings that the run follows
}

// Drop is data that a run would delete.
type Drop struct {
	What  string `json:"what"`
	Since string `json:"since,omitempty"` // months, for example 2026-01..2026-02; empty if unknown
	Rows  int64  `json:"rows"`            // for ranges: PostgreSQL's estimate
	Bytes int64  `json:"bytes"`           // approximate size on disk; 0 if unknown
}

// kind returns the kind of the job's lease.
func (j Job) kind() string {
	if j.OwnLease {
		return Kind + "-" + j.Name
	}
	return Kind
}

// LastRun is the row of a job in job_runs. A time is zero if the event has not happened.
type LastRun struct {
	Job         string           `json:"job"`
	Owner       string           `json:"owner"`
	StartedAt   time.Time        `json:"started_at"`
	SucceededAt time.Time        `json:"succeeded_at,omitzero"`
	FailedAt    time.Time        `json:"failed_at,omitzero"`
	LastError   string           `json:"last_error,omitempty"`
	Counts      map[string]int64 `json:"counts"` // of the last run that ended
}

// lastRunsSQL reads the rows of all jobs, and the database's clock in each. Without jobs it returns
// one row. Locks: none.
const lastRunsSQL = `
SELECT now(), coalesce(r.job, ''), coalesce(r.owner, ''), coalesce(r.started_at, 'epoch'), r.succeeded_at, r.failed_at,
	coalesce(r.last_error, ''), r.counts
  FROM (VALUES (1)) AS one LEFT JOIN job_runs r ON true
 ORDER BY r.job`

// LastRuns returns the last run of each job, by name, and the time of the database's clock.
func LastRuns(ctx context.Context, pool *pgxpool.Pool) (all []LastRun, now time.Time, err error) {
	rows, _ := pool.Query(ctx, lastRunsSQL)
	var r LastRun
	var succeeded, failed *time.Time
	_, err = pgx.ForEachRow(rows, []any{&now, &r.Job, &r.Owner, &r.StartedAt, &succeeded, &failed, &r.LastError, &r.Counts}, func() error {
		if r.Job == "" {
			return nil
		}
		r.SucceededAt, r.FailedAt = orZero(succeeded), orZero(failed)
		all = append(all, r)
		r.Counts = nil // the next row needs another map
		return nil
	})
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("read when jobs last ran: %w", err)
	}
	return all, now, nil
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

const (
	// pollInterval is the time between two checks whether a job is due, less a random quarter.
	pollInterval = 15 * time.Second
	// clockMargin is how far in the future a recorded time may be. A later one was recorded by a
	// wrong clock, and is ignored.
	clockMargin = time.Minute
	// retryAfter is the time from a failure to the next attempt, unless the job is due sooner.
	retryAfter = time.Minute
)

// due reports whether the job should run at now.
func (j Job) due(last LastRun, now time.Time) bool {
	if j.Every == 0 || j.Window.left(now) == 0 {
		return false
	}
	for _, t := range []*time.Time{&last.FailedAt, &last.SucceededAt} {
		if t.After(now.Add(clockMargin)) {
			*t = time.Time{}
		}
	}
	if last.FailedAt.After(last.SucceededAt) {
		return !now.Before(last.FailedAt.Add(min(j.Every, retryAfter)))
	}
	return !now.Before(last.SucceededAt.Add(j.Every))
}

// Runner runs jobs when they are due.
type Runner struct {
	pool    *pgxpool.Pool
	lanes   [][]Job // the jobs by their lease
	log     *slog.Logger
	base    *slog.Logger // without a component: leases set their own
	metrics *metrics
}

// New returns a Runner of jobs. The pool is one of the truth and acts as the system role. New
// starts no job.
func New(pool *pgxpool.Pool, jobs []Job, log *slog.Logger, reg prometheus.Registerer) (*Runner, error) {
	names, lanes := make(map[string]bool), make(map[string][]Job)
	for _, j := range jobs {
		if j.Name == "" || j.Run == nil || j.Every < 0 || names[j.Name] {
			return nil, fmt.Errorf("job %q: want a unique name, a Run function, and an interval of 0 or more, not %s", j.Name, j.Every)
		}
		names[j.Name] = true
		lanes[j.kind()] = append(lanes[j.kind()], j)
	}
	m, err := newMetrics(reg, jobs)
	if err != nil {
		return nil, err
	}
	return &Runner{pool: pool, lanes: slices.Collect(maps.Values(lanes)), log: log.With("component", "jobs"), base: log, metrics: m}, nil
}

// Run runs each job when it is due, until ctx ends, and returns nil. It logs failures and retries
// them.
func (r *Runner) Run(ctx context.Context) error {
	var g errgroup.Group
	for _, lane := range r.lanes {
		g.Go(func() error { return r.runLane(ctx, lane) })
	}
	return g.Wait()
}

func (r *Runner) runLane(ctx context.Context, lane []Job) error {
	for {
		if err := r.runOnce(ctx, lane); err != nil && ctx.Err() == nil {
			r.log.WarnContext(ctx, "a scheduled job failed, retrying", "err", err)
		}
		if work.Sleep(ctx, pollInterval-rand.N(pollInterval/4)) != nil {
			return nil
		}
	}
}

// runOnce runs every due job of a lane, one after the other. It takes the lease again for each, so
// that waiting commands get their turn.
func (r *Runner) runOnce(ctx context.Context, lane []Job) error {
	var errs []error
	for _, j := range lane {
		if _, ok, err := r.isDue(ctx, j); err != nil {
			return err
		} else if !ok {
			continue
		}
		err := withLease(ctx, r.pool, j.kind(), "job-"+j.Name, leaseTTL, r.base, func(ctx context.Context, h *Hold) error {
			left, ok, err := r.isDue(ctx, j) // another process may have run it while this one waited
			if err != nil || !ok {
				return err
			}
			return r.run(ctx, h, j, left)
		})
		if ctx.Err() != nil {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// isDue reports whether the job should run now, and how long its window remains open.
func (r *Runner) isDue(ctx context.Context, j Job) (left time.Duration, due bool, err error) {
	runs, now, err := LastRuns(ctx, r.pool)
	if err != nil {
		return 0, false, err
	}
	var last LastRun
	for _, run := range runs {
		r.metrics.succeeded(run)
		if run.Job == j.Name {
			last = run
		}
	}
	return j.Window.left(now), j.due(last, now), nil
}

// errWindowOver ends a job at the end of its window.
var errWindowOver = errors.New("jobs: the window is over")

func (r *Runner) run(ctx context.Context, h *Hold, j Job, left time.Duration) error {
	start := time.Now()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	closing := time.AfterFunc(left, func() { cancel(errWindowOver) })
	defer closing.Stop()

	counts, err := h.Run(ctx, j)
	outcome := outcomeOK
	switch {
	case errors.Is(err, errWindowOver):
		outcome, err = outcomeWindow, nil
	case errors.Is(err, ErrTimeUp):
		outcome, err = outcomeTime, nil
	case errors.Is(err, ErrLost):
		outcome = outcomeLost
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		outcome = outcomeStopped
	case err != nil:
		outcome = outcomeFailed
	}
	r.metrics.ran(j.Name, outcome, time.Since(start))
	log := r.log.InfoContext
	if len(counts) == 0 && outcome == outcomeOK {
		log = r.log.DebugContext // most runs have no work
	}
	log(ctx, "job ran", "job", j.Name, "outcome", outcome, "seconds", time.Since(start).Seconds(), "counts", counts)
	return err
}
