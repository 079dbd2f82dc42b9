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
)

// Job is work that is done again and again.
type Job struct {
	Name   string                                   // of its metrics and of its row in job_runs
	Every  time.Duration                            // from the end of a run that succeeded to the next one; 0: by command alone
	Apart  bool                                     // it has a lease of its own, so it never waits for another job: for what is urgent and safe beside all others
	MaxRun time.Duration                            // how long a run begins new slices (Hold.Continue); 0: MaxRun
	Window Window                                   // when it may run; one that the end of its window cuts short goes on in the next
	Run    func(ctx context.Context, h *Hold) error // returns nil when there is nothing left to do; ends between slices when ctx ends
	Plan   func(ctx context.Context) (Plan, error)  // what Run would do now; it changes nothing
}

// Plan is what a run would do now.
type Plan struct {
	Counts map[string]int64 `json:"counts"`          // as Hold.Count would
	Drops  []Drop           `json:"drops,omitempty"` // what would be gone for good
	With   string           `json:"with,omitempty"`  // the settings by which the run takes something
}

// Drop is something that a run would drop.
type Drop struct {
	What  string `json:"what"`
	Since string `json:"since,omitempty"` // months, such as 2026-01..2026-02, where it is known of which time it is
	Rows  int64  `json:"rows"`            // of ranges an estimate of PostgreSQL's
	Bytes int64  `json:"bytes"`           // on disk, about; 0 where that is not known
}

// kind is the kind of the lease that the job runs under.
func (j Job) kind() string {
	if j.Apart {
		return Kind + "-" + j.Name
	}
	return Kind
}

// LastRun is a job's row of job_runs. Times that have not been are zero.
type LastRun struct {
	Job         string           `json:"job"`
	Owner       string           `json:"owner"`
	StartedAt   time.Time        `json:"started_at"`
	SucceededAt time.Time        `json:"succeeded_at,omitzero"`
	FailedAt    time.Time        `json:"failed_at,omitzero"`
	LastError   string           `json:"last_error,omitempty"`
	Counts      map[string]int64 `json:"counts"` // what the last run that ended did
}

// lastRunsSQL reads all runs and the database's clock, in one row at least.
// Locks: none.
const lastRunsSQL = `
SELECT now(), coalesce(r.job, ''), coalesce(r.owner, ''), coalesce(r.started_at, 'epoch'), r.succeeded_at, r.failed_at, coalesce(r.last_error, ''), r.counts
  FROM (VALUES (1)) AS one LEFT JOIN job_runs r ON true
 ORDER BY r.job`

// LastRuns returns when each job last ran, by name, and what the database's clock says.
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
		r.Counts = nil // the next row's is another map
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
	// pollInterval is between two looks whether a job is due, less a random quarter.
	pollInterval = 15 * time.Second
	// clockMargin is how far in the future what a job noted may lie: more, and the clock was ahead then and says nothing now.
	clockMargin = time.Minute
	// retryAfter is how long after a failure a job is tried again, if it would not be due sooner.
	retryAfter = time.Minute
)

// due reports whether the job is to run at now.
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
	base    *slog.Logger // without a component: a lease has its own
	metrics *metrics
}

// New returns a Runner of jobs. The pool is one of the truth and acts as the system role. It starts nothing.
func New(pool *pgxpool.Pool, jobs []Job, log *slog.Logger, reg prometheus.Registerer) (*Runner, error) {
	names, lanes := make(map[string]bool), make(map[string][]Job)
	for _, j := range jobs {
		if j.Name == "" || j.Run == nil || j.Every < 0 || names[j.Name] {
			return nil, fmt.Errorf("job %q: want a name of its own, work, and an interval of 0 or more, not %s", j.Name, j.Every)
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

// Run runs what is due until ctx ends, and returns nil. Failures are logged and tried again.
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
			r.log.WarnContext(ctx, "scheduled jobs, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pollInterval - rand.N(pollInterval/4)):
		}
	}
}

// runOnce runs every job of a lane that is due, one after the other. Each takes the lease anew, so that a command that waits gets its turn.
func (r *Runner) runOnce(ctx context.Context, lane []Job) error {
	var errs []error
	for _, j := range lane {
		if _, ok, err := r.isDue(ctx, j); err != nil {
			return err
		} else if !ok {
			continue
		}
		err := withLease(ctx, r.pool, j.kind(), "job-"+j.Name, leaseTTL, r.base, func(ctx context.Context, h *Hold) error {
			left, ok, err := r.isDue(ctx, j) // somebody else may have run it while this one waited
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

// isDue also returns for how long the job's window is open.
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

// errWindowOver ends a job whose window is over.
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
		log = r.log.DebugContext // nothing to do, as most hours
	}
	log(ctx, "job ran", "job", j.Name, "outcome", outcome, "seconds", time.Since(start).Seconds(), "counts", counts)
	return err
}
