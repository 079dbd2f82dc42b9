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
)

// Kind is the kind of the jobs' lease, for lease.Holders. A job that runs apart has a kind of its own (Job.kind).
const Kind = "jobs"

// leaseTTL is how long the jobs of a process that died wait. No job is in a hurry, and a slice is a fraction of it.
const leaseTTL = 10 * time.Second

// MaxRun is how long a run begins new slices, unless its job says otherwise (Job.MaxRun): other jobs wait meanwhile.
const MaxRun = 10 * time.Minute

// ErrTimeUp reports that a run has had its time. What was committed stays. The job is still due, and goes on after the others that are.
var ErrTimeUp = errors.New("jobs: the run has had its time")

// ErrLost reports that somebody else has taken the jobs' lease. What was committed stays; the rest is theirs to do.
var ErrLost = errors.New("jobs: the lease was lost")

// Hold is the jobs' lease in hand, or that of a job apart, during one call of WithLease. Its methods may be called from any goroutine.
type Hold struct {
	Reason string // why a command runs the jobs, kept with each run

	pool  *pgxpool.Pool
	kind  string
	owner string
	epoch int64

	mu      sync.Mutex
	job     string    // in hand
	end     time.Time // of its run; zero when no job runs
	parts   []string  // that it has done, in this run and in those before that were cut short
	counts  map[string]int64
	counted func(what string, n int64)
}

// WithLease waits for the jobs' lease and calls fn while it holds it: no job runs anywhere meanwhile but those apart. fn's context ends, with the
// cause ErrLost, when the lease cannot be renewed or was taken. The lease is free when WithLease returns.
// The pool is one of the truth and acts as the system role. name is what Holders shows, with host and process.
func WithLease(ctx context.Context, pool *pgxpool.Pool, name string, fn func(ctx context.Context, h *Hold) error) error {
	return withLease(ctx, pool, Kind, name, leaseTTL, slog.New(slog.DiscardHandler), fn)
}

// WithLeaseOf is WithLease with the lease that j runs under.
func WithLeaseOf(ctx context.Context, pool *pgxpool.Pool, j Job, name string, fn func(ctx context.Context, h *Hold) error) error {
	return withLease(ctx, pool, j.kind(), name, leaseTTL, slog.New(slog.DiscardHandler), fn)
}

func withLease(ctx context.Context, pool *pgxpool.Pool, kind, name string, ttl time.Duration, log *slog.Logger, fn func(ctx context.Context, h *Hold) error) (err error) {
	g, err := lease.New(lease.Config{TTL: ttl}, pool, kind, lease.Owner(name), log)
	if err != nil {
		return err
	}
	g.Share([]int{0})
	beating, leave := context.WithCancel(context.WithoutCancel(ctx)) // until fn has returned: its last slice needs the lease
	left := make(chan error, 1)
	go func() { left <- g.Run(beating) }()
	defer func() {
		leave()
		err = errors.Join(err, <-left)
	}()

	if err := await(ctx, pool, g, kind, log); err != nil {
		return err
	}
	h := &Hold{pool: pool, kind: kind, owner: g.Owner()}
	if err := h.readEpoch(ctx); err != nil {
		return err
	}
	working, lost := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		watch(working, g, ttl/20, func() { lost(ErrLost) })
	}()
	err = fn(working, h)
	lost(nil)
	<-watched
	if errors.Is(context.Cause(working), ErrLost) && !errors.Is(err, ErrLost) {
		err = errors.Join(err, ErrLost)
	}
	return err
}

// How long a waiter says nothing, and then between two lines.
const (
	waitFirst = 2 * time.Second
	waitAgain = time.Minute
)

// await waits for the lease. It logs for whom.
func await(ctx context.Context, pool *pgxpool.Pool, g *lease.Group, kind string, log *slog.Logger) error {
	began, say := time.Now(), time.NewTimer(waitFirst)
	defer say.Stop()
	for len(g.Held()) == 0 {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the jobs' lease: %w", context.Cause(ctx))
		case <-g.Changed():
		case <-say.C:
			say.Reset(waitAgain)
			all, err := Leases(ctx, pool)
			if err != nil {
				log.WarnContext(ctx, "waiting for the lease of jobs, and nobody knows for whom", "waiter", g.Owner(), "err", err)
			}
			for _, l := range all {
				if l.Kind == kind && l.Holder != g.Owner() {
					log.InfoContext(ctx, "waiting for the lease of jobs", "waiter", g.Owner(), "holder", l.Holder, "job", l.Job, "waited", time.Since(began).Round(time.Second).String())
				}
			}
		}
	}
	return nil
}

// watch calls lost when the group holds nothing any more, unless ctx ends before.
func watch(ctx context.Context, g *lease.Group, every time.Duration, lost func()) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if len(g.Held()) == 0 {
				lost()
				return
			}
		}
	}
}

// epochSQL reads the epoch of the lease if it is still ours.
// Index: leases_pkey.   Locks: none.
const epochSQL = `SELECT epoch FROM leases WHERE kind = @kind AND partition = 0 AND owner = @owner`

func (h *Hold) readEpoch(ctx context.Context) error {
	err := h.pool.QueryRow(ctx, epochSQL, pgx.StrictNamedArgs{"kind": h.kind, "owner": h.owner}).Scan(&h.epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrLost
	}
	if err != nil {
		return fmt.Errorf("read the epoch of the jobs' lease: %w", err)
	}
	return nil
}

// fenceSQL finds the lease as it was when it was taken, and keeps it from being taken until the transaction ends: taking locks
// the row FOR UPDATE, which waits for this lock or passes the row over. Renewing changes no key and so goes on beside it, which it
// would not do beside FOR SHARE: a slice that takes as long as the lease would lose it.
// Index: leases_pkey.   Locks: the row of the lease, FOR KEY SHARE.
const fenceSQL = `
SELECT FROM leases WHERE kind = @kind AND partition = 0 AND owner = @owner AND epoch = @epoch FOR KEY SHARE`

// Fence is the first statement of every transaction of a job in the truth's database. It returns ErrLost if somebody else has
// taken the lease since, and otherwise nobody takes it before the transaction has ended.
func (h *Hold) Fence(ctx context.Context, tx pgx.Tx) error {
	tag, err := tx.Exec(ctx, fenceSQL, pgx.StrictNamedArgs{"kind": h.kind, "owner": h.owner, "epoch": h.epoch})
	if err != nil {
		return fmt.Errorf("fence by epoch %d of the jobs' lease: %w", h.epoch, err)
	}
	if tag.RowsAffected() == 0 {
		return ErrLost
	}
	return nil
}

// fenceElsewhereSQL leaves the epoch in a database that does not have the lease, unless there is a later one.
// Index: leases_pkey.   Locks: the row of the kind.
const fenceElsewhereSQL = `
INSERT INTO leases (kind, partition, epoch) VALUES (@kind || '-elsewhere', 0, @epoch)
    ON CONFLICT (kind, partition) DO UPDATE SET epoch = excluded.epoch WHERE leases.epoch <= excluded.epoch`

// FenceElsewhere is Fence for a transaction in the projections' database, which need not be the truth's. It returns ErrLost if a
// later holder of the lease has fenced a transaction there; what this one commits is before all that those do.
func (h *Hold) FenceElsewhere(ctx context.Context, tx pgx.Tx) error {
	tag, err := tx.Exec(ctx, fenceElsewhereSQL, pgx.StrictNamedArgs{"kind": h.kind, "epoch": h.epoch})
	if err != nil {
		return fmt.Errorf("fence by epoch %d of the jobs' lease, in the other database: %w", h.epoch, err)
	}
	if tag.RowsAffected() == 0 {
		return ErrLost
	}
	return nil
}

// Continue is asked before each slice but the first. ErrTimeUp: the run has had its time; the job returns that, and its next run goes on from there. Outside of
// Run there is no such time.
func (h *Hold) Continue() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.end.IsZero() && !time.Now().Before(h.end) {
		return ErrTimeUp
	}
	return nil
}

// partSQL notes a part of a job.
// Index: job_runs_pkey.   Locks: its row.
const partSQL = `UPDATE job_runs SET parts = array_append(parts, @part) WHERE job = @job`

// Part calls fn, unless a run that was cut short has done this part of the job since the last one that ended. So what is cut short again and again comes
// to its end. Names of parts are unique in a job.
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
		return fmt.Errorf("note that %s of job %s is done: %w", name, h.job, err)
	}
	return nil
}

// Count adds n to what the run has done, under a name such as "rows archived". It is kept in job_runs and shown by the commands.
// Call it after the slice was committed.
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

// OnCount has every later Count call fn too.
func (h *Hold) OnCount(fn func(what string, n int64)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counted = fn
}

// startSQL notes that a job starts.
// Index: job_runs_pkey.   Locks: its row.
const startSQL = `
INSERT INTO job_runs (job, owner, started_at, reason) VALUES (@job, @owner, clock_timestamp(), @reason)
    ON CONFLICT (job) DO UPDATE SET owner = excluded.owner, started_at = excluded.started_at, reason = excluded.reason, counts = '{}'
RETURNING parts`

// endSQL notes how it ended. Times are the clock's, so that a retry after a failure is later than what it retries.
// Index: job_runs_pkey.   Locks: its row.
const endSQL = `
UPDATE job_runs SET succeeded_at = CASE WHEN @error::text = '' THEN clock_timestamp() ELSE succeeded_at END,
                    failed_at    = CASE WHEN @error::text = '' THEN failed_at ELSE clock_timestamp() END,
                    last_error = @error, counts = @counts, parts = '{}'
 WHERE job = @job`

// endTimeout bounds the note of how a job ended.
const endTimeout = 5 * time.Second

// Run runs the job now, whatever its schedule says, and notes in job_runs when it started and what came of it. It returns what the
// job did and how it ended. A run that ctx, the loss of the lease or its time (ErrTimeUp) cut short is noted as neither success nor failure: it is still due.
func (h *Hold) Run(ctx context.Context, j Job) (counts map[string]int64, err error) {
	var parts []string
	if err := postgres.InTx(ctx, h.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := h.Fence(ctx, tx); err != nil {
			return err
		}
		return tx.QueryRow(ctx, startSQL, pgx.StrictNamedArgs{"job": j.Name, "owner": h.owner, "reason": h.Reason}).Scan(&parts)
	}); err != nil {
		return nil, fmt.Errorf("note the start of job %s: %w", j.Name, err)
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
		err = errors.Join(err, fmt.Errorf("note the end of job %s: %w", j.Name, nerr))
	}
	return counts, err
}

// onlyTimeUp reports whether err says that the time was up and, where several errors are joined, nothing else.
func onlyTimeUp(err error) bool {
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(e.Unwrap(), func(err error) bool { return !onlyTimeUp(err) })
	case interface{ Unwrap() error }:
		return onlyTimeUp(e.Unwrap())
	}
	return err == ErrTimeUp
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

// Lease is a lease of jobs that somebody holds, and who waits for it.
type Lease struct {
	Kind    string    `json:"lease"`
	Holder  string    `json:"holder"`
	Job     string    `json:"job,omitempty"`     // that it runs; none while a command has the lease
	Since   time.Time `json:"since,omitzero"`    // when that job started
	Waiting []string  `json:"waiting,omitempty"` // names of jobs and commands, with host and process
}

// leasesSQL reads the leases of jobs that somebody holds. All who take part are members, so that those who hold nothing wait.
// Index: leases_pkey, lease_members_pkey, job_runs_pkey.   Locks: none.
const leasesSQL = `
SELECT /* jobs.leases */ l.kind, l.owner, coalesce(r.job, ''), coalesce(r.started_at, 'epoch'),
       ARRAY(SELECT m.owner FROM lease_members m WHERE m.kind = l.kind AND m.owner <> l.owner AND m.expires_at >= now() ORDER BY 1)
  FROM leases l
  LEFT JOIN LATERAL (SELECT job, started_at FROM job_runs WHERE owner = l.owner ORDER BY started_at DESC LIMIT 1) r ON true
 WHERE (l.kind = @kind OR l.kind LIKE @kind || '-%') AND l.owner <> '' AND l.expires_at >= now()
 ORDER BY l.kind`

// Leases returns the leases of jobs that are held now, and who waits for whom.
func Leases(ctx context.Context, pool *pgxpool.Pool) ([]Lease, error) {
	rows, _ := pool.Query(ctx, leasesSQL, pgx.StrictNamedArgs{"kind": Kind})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Lease])
	if err != nil {
		return nil, fmt.Errorf("read who has the leases of jobs: %w", err)
	}
	for i := range all {
		if all[i].Job == "" {
			all[i].Since = time.Time{}
		}
	}
	return all, nil
}
