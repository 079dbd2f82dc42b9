package jobs

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
)

// Kind is the kind of the jobs' lease, for lease.Holders. A job that runs apart has its own kind
// (Job.kind).
const Kind = "jobs"

// leaseTTL is how long the jobs of a dead process wait. No job is urgent, and a slice takes a
// fraction of this time.
const leaseTTL = 10 * time.Second

// MaxRun is how long a run begins new slices, unless Job.MaxRun sets another time. Other jobs wait
// meanwhile.
const MaxRun = 10 * time.Minute

// ErrTimeUp reports that a run reached its time limit. Committed slices remain. The job is still
// due, and continues after the other jobs that are due.
var ErrTimeUp = errors.New("jobs: the run reached its time limit")

// ErrLost reports that the jobs' lease expired, or that another process took it. Committed slices
// remain; the next holder does the rest.
var ErrLost = errors.New("jobs: the lease is lost: it expired, or another process took it")

// Hold is a lease of jobs that this process holds, during one call of WithLease. Its methods are
// safe for concurrent use.
type Hold struct {
	Reason string // why a command runs the jobs; recorded with each run

	pool  *pgxpool.Pool
	kind  string
	owner string
	epoch int64

	mu      sync.Mutex
	job     string    // the job that runs
	end     time.Time // of its run; zero when no job runs
	parts   []string  // parts that this run and the interrupted ones before it did
	counts  map[string]int64
	counted func(what string, n int64)
}

// WithLease waits for the jobs' lease and calls fn while it holds it. Meanwhile no other job runs
// in the fleet, except those apart. The context of fn ends with the cause ErrLost if the lease
// cannot be renewed or another process takes it. WithLease releases the lease before it returns.
// The pool is one of the truth and acts as the system role. Leases shows name, with host and
// process, as the holder.
func WithLease(ctx context.Context, pool *pgxpool.Pool, name string, fn func(ctx context.Context, h *Hold) error) error {
	return withLease(ctx, pool, Kind, name, leaseTTL, slog.New(slog.DiscardHandler), fn)
}

// WithLeaseOf is WithLease with the lease of the job j.
func WithLeaseOf(ctx context.Context, pool *pgxpool.Pool, j Job, name string, fn func(ctx context.Context, h *Hold) error) error {
	return withLease(ctx, pool, j.kind(), name, leaseTTL, slog.New(slog.DiscardHandler), fn)
}

func withLease(ctx context.Context, pool *pgxpool.Pool, kind, name string, ttl time.Duration, log *slog.Logger,
	fn func(ctx context.Context, h *Hold) error) (err error) {
	g, err := lease.New(lease.Config{TTL: ttl}, pool, kind, lease.Owner(name), log)
	if err != nil {
		return err
	}
	g.Share([]int{0})
	h := &Hold{pool: pool, kind: kind, owner: g.Owner()}
	g.While(context.WithoutCancel(ctx), func() { // the last slice of fn needs the lease, too
		if err = await(ctx, pool, g, kind, log); err == nil {
			err = h.readEpoch(ctx)
		}
		if err != nil {
			return
		}
		working, lost := context.WithCancelCause(ctx)
		var watching sync.WaitGroup
		watching.Go(func() { watch(working, g, ttl/20, func() { lost(ErrLost) }) })
		err = fn(working, h)
		lost(nil)
		watching.Wait()
		if errors.Is(context.Cause(working), ErrLost) && !errors.Is(err, ErrLost) {
			err = errors.Join(err, ErrLost)
		}
	})
	return err
}

// The first and every further time after which a waiting process logs that it waits.
const (
	waitFirst = 2 * time.Second
	waitAgain = time.Minute
)

// await waits for the lease, and logs the holder for which it waits.
func await(ctx context.Context, pool *pgxpool.Pool, g *lease.Group, kind string, log *slog.Logger) error {
	began, say := time.Now(), time.NewTimer(waitFirst)
	defer say.Stop()
	for len(g.Held()) == 0 {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the lease of jobs: %w", context.Cause(ctx))
		case <-g.Changed():
		case <-say.C:
			say.Reset(waitAgain)
			all, err := Leases(ctx, pool)
			if err != nil {
				log.WarnContext(ctx, "waiting for the lease of jobs, whose holder is unknown", "waiter", g.Owner(), "err", err)
			}
			for _, l := range all {
				if l.Kind == kind && l.Holder != g.Owner() {
					log.InfoContext(ctx, "waiting for the lease of jobs", "waiter", g.Owner(), "holder", l.Holder, "job", l.Job, "waited",
						time.Since(began).Round(time.Second).String())
				}
			}
		}
	}
	return nil
}

// watch calls lost when the group no longer holds the lease. It returns when ctx ends.
func watch(ctx context.Context, g *lease.Group, every time.Duration, lost func()) {
	for work.Sleep(ctx, every) == nil {
		if len(g.Held()) == 0 {
			lost()
			return
		}
	}
}

// epochSQL reads the epoch of the lease if this process still holds it. Index: leases_pkey. Locks:
// none.
const epochSQL = `SELECT epoch FROM leases WHERE kind = @kind AND partition = 0 AND owner = @owner`

func (h *Hold) readEpoch(ctx context.Context) error {
	err := h.pool.QueryRow(ctx, epochSQL, pgx.StrictNamedArgs{"kind": h.kind, "owner": h.owner}).Scan(&h.epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrLost
	}
	if err != nil {
		return fmt.Errorf("read the epoch of the lease of jobs: %w", err)
	}
	return nil
}

// fenceSQL finds the lease as this process took it, and keeps others from taking it until the
// transaction ends. Taking a lease locks the row FOR UPDATE, which waits for this lock or skips the
// row. Renewing changes no key, so it works beside this lock. It would not work beside FOR SHARE: a
// slice that takes as long as the lease would then lose it. Index: leases_pkey. Locks: the row of
// the lease, FOR KEY SHARE.
const fenceSQL = `
SELECT FROM leases WHERE kind = @kind AND partition = 0 AND owner = @owner AND epoch = @epoch FOR KEY SHARE`

// Fence is the first statement of every transaction of a job in the truth's database. It returns
// ErrLost if another process has taken the lease. Otherwise no process can take it before the
// transaction ends.
func (h *Hold) Fence(ctx context.Context, tx pgx.Tx) error {
	tag, err := tx.Exec(ctx, fenceSQL, pgx.StrictNamedArgs{"kind": h.kind, "owner": h.owner, "epoch": h.epoch})
	if err != nil {
		return fmt.Errorf("fence by epoch %d of the lease of jobs: %w", h.epoch, err)
	}
	if tag.RowsAffected() == 0 {
		return ErrLost
	}
	return nil
}

// fenceElsewhereSQL writes the epoch to a database that does not have the lease, unless a later
// epoch is there. Index: leases_pkey. Locks: the row of the kind.
const fenceElsewhereSQL = `
INSERT INTO leases (kind, partition, epoch) VALUES (@kind || '-elsewhere', 0, @epoch)
    ON CONFLICT (kind, partition) DO UPDATE SET epoch = excluded.epoch WHERE leases.epoch <= excluded.epoch`

// FenceElsewhere is Fence for a transaction in the projections' database, which may be another one.
// It returns ErrLost if a later holder of the lease has fenced a transaction there. So this
// transaction commits before every transaction of later holders.
func (h *Hold) FenceElsewhere(ctx context.Context, tx pgx.Tx) error {
	tag, err := tx.Exec(ctx, fenceElsewhereSQL, pgx.StrictNamedArgs{"kind": h.kind, "epoch": h.epoch})
	if err != nil {
		return fmt.Errorf("fence by epoch %d of the lease of jobs, in the other database: %w", h.epoch, err)
	}
	if tag.RowsAffected() == 0 {
		return ErrLost
	}
	return nil
}

// Continue returns ErrTimeUp if the run has reached its time limit. A job calls it before each
// slice but the first, and returns the error; its next run resumes there. Outside of Run there is
// no limit.
func (h *Hold) Continue() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.end.IsZero() && !time.Now().Before(h.end) {
		return ErrTimeUp
	}
	return nil
}

// partSQL records that a part of a job is done. Index: job_runs_pkey. Locks: its row.
const partSQL = `UPDATE job_runs SET parts = array_append(parts, @part) WHERE job = @job`

// Part calls fn, unless an interrupted run has already done this part since the last complete run.
// So a job that is interrupted repeatedly still completes. Each part of a job has another name.
func (h *Hold) Part(ctx context.Context, name string, fn func() error) error {
	h.mu.Lock()
	done := slices.Contains(h.parts, name)
	h.mu.Unlock()
	if done {
		return nil
	}
	if err := fn(); err != nil {
		return err
	}
	if err := h.note(ctx, partSQL, pgx.StrictNamedArgs{"job": h.job, "part": name}); err != nil {
		return fmt.Errorf("record that %s of job %s is done: %w", name, h.job, err)
	}
	return nil
}

// Count adds n to the work of the run under a name, for example "rows archived". job_runs keeps the
// sums, and commands show them. Call it after the slice has committed.
func (h *Hold) Count(what string, n int64) {
	h.mu.Lock()
	if h.counts == nil {
		h.counts = make(map[string]int64)
	}
	h.counts[what] += n
	counted := h.counted
	h.mu.Unlock()
	if counted != nil {
		counted(what, n)
	}
}

// OnCount makes every later Count call fn too.
func (h *Hold) OnCount(fn func(what string, n int64)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counted = fn
}

// startSQL records the start of a job. Index: job_runs_pkey. Locks: its row.
const startSQL = `
INSERT INTO job_runs (job, owner, started_at, reason) VALUES (@job, @owner, clock_timestamp(), @reason)
    ON CONFLICT (job) DO UPDATE SET owner = excluded.owner, started_at = excluded.started_at, reason = excluded.reason, counts = '{}'
RETURNING parts`

// endSQL records the end of a job. Its times are clock_timestamp(), so that a retry is later than
// the failure before it. Index: job_runs_pkey. Locks: its row.
const endSQL = `
UPDATE job_runs SET succeeded_at = CASE WHEN @error::text = '' THEN clock_timestamp() ELSE succeeded_at END,
                    failed_at    = CASE WHEN @error::text = '' THEN failed_at ELSE clock_timestamp() END,
                    last_error = @error, counts = @counts, parts = '{}'
 WHERE job = @job`

// endTimeout limits the statement that records the end of a job.
const endTimeout = 5 * time.Second

// Run runs the job now, regardless of its schedule, and records its start and its end in job_runs.
// It returns the counts and the error of the job. If the end of ctx, the loss of the lease or the
// time limit (ErrTimeUp) interrupts the run, it records neither success nor failure: the job is
// still due.
func (h *Hold) Run(ctx context.Context, j Job) (counts map[string]int64, err error) {
	var parts []string
	if err := postgres.InTx(ctx, h.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := h.Fence(ctx, tx); err != nil {
			return err
		}
		return tx.QueryRow(ctx, startSQL, pgx.StrictNamedArgs{"job": j.Name, "owner": h.owner, "reason": h.Reason}).Scan(&parts)
	}); err != nil {
		return nil, fmt.Errorf("record the start of job %s: %w", j.Name, cmp.Or(context.Cause(ctx), err))
	}
	h.mu.Lock()
	h.counts, h.parts, h.job, h.end = nil, parts, j.Name, time.Now().Add(cmp.Or(j.MaxRun, MaxRun))
	h.mu.Unlock()
	err = j.Run(ctx, h)
	h.mu.Lock()
	counts = maps.Clone(h.counts)
	h.end = time.Time{}
	h.mu.Unlock()
	if ctx.Err() != nil {
		return counts, context.Cause(ctx)
	}
	if errors.Is(err, ErrLost) {
		return counts, err
	}
	if onlyTimeUp(err) {
		return counts, ErrTimeUp
	}
	failed := ""
	if err != nil {
		err = fmt.Errorf("job %s: %w", j.Name, err)
		failed = err.Error()
	}
	if counts == nil {
		counts = map[string]int64{}
	}
	done, cerr := json.Marshal(counts)
	if cerr != nil {
		return counts, errors.Join(err, cerr)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if nerr := h.note(ctx, endSQL, pgx.StrictNamedArgs{"job": j.Name, "error": failed, "counts": done}); nerr != nil {
		err = errors.Join(err, fmt.Errorf("record the end of job %s: %w", j.Name, nerr))
	}
	return counts, err
}

// onlyTimeUp reports whether err is ErrTimeUp. Of several joined errors, each must be ErrTimeUp.
func onlyTimeUp(err error) bool {
	switch e := err.(type) { //nolint:errorlint // it unwraps
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(e.Unwrap(), func(err error) bool { return !onlyTimeUp(err) })
	case interface{ Unwrap() error }:
		return onlyTimeUp(e.Unwrap())
	}
	return err == ErrTimeUp //nolint:errorlint // likewise
}

func (h *Hold) note(ctx context.Context, sql string, args pgx.StrictNamedArgs) error {
	return postgres.InTx(ctx, h.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := h.Fence(ctx, tx); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql, args)
		return err
	})
}

// Lease is a held lease of jobs, with the processes that wait for it.
type Lease struct {
	Kind    string    `json:"lease"`
	Holder  string    `json:"holder"`
	Job     string    `json:"job,omitempty"`     // the job that runs; none while a command has the lease
	Since   time.Time `json:"since,omitzero"`    // when that job started
	Waiting []string  `json:"waiting,omitempty"` // jobs and commands that wait, with host and process
}

// leasesSQL reads the held leases of jobs. Every participant is a member, so the members without
// the lease wait for it. Index: leases_pkey, lease_members_pkey, job_runs_pkey. Locks: none.
const leasesSQL = `
SELECT /* jobs.leases */ l.kind, l.owner, coalesce(r.job, ''), coalesce(r.started_at, 'epoch'),
       ARRAY(SELECT m.owner FROM lease_members m WHERE m.kind = l.kind AND m.owner <> l.owner AND m.expires_at >= now() ORDER BY 1)
  FROM leases l
  LEFT JOIN LATERAL (SELECT job, started_at FROM job_runs WHERE owner = l.owner ORDER BY started_at DESC LIMIT 1) r ON true
 WHERE (l.kind = @kind OR l.kind LIKE @kind || '-%') AND l.owner <> '' AND l.expires_at >= now()
 ORDER BY l.kind`

// Leases returns the held leases of jobs, each with the processes that wait for it.
func Leases(ctx context.Context, pool *pgxpool.Pool) ([]Lease, error) {
	rows, _ := pool.Query(ctx, leasesSQL, pgx.StrictNamedArgs{"kind": Kind})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Lease])
	if err != nil {
		return nil, fmt.Errorf("read the leases of jobs: %w", err)
	}
	for i := range all {
		if all[i].Job == "" {
			all[i].Since = time.Time{}
		}
	}
	return all, nil
}
