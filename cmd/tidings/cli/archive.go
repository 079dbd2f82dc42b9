package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/schollz/progressbar/v3"
	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// jobRun is the line of a job in the output of `tidings archive run --json`.
type jobRun struct {
	Job     string           `json:"job"`
	DryRun  bool             `json:"dry_run"`
	With    string           `json:"with,omitempty"`  // in a dry run: the settings by which the job selects rows
	Drops   []jobs.Drop      `json:"drops,omitempty"` // in a dry run: the rows that the job would delete permanently
	Counts  map[string]int64 `json:"counts"`
	Seconds float64          `json:"seconds"`
	Error   string           `json:"error,omitempty"`
}

func (p Process) archiveRunCommand() *cobra.Command {
	var (
		reason string
		only   []string
		dryRun bool
	)
	c := p.command(command{
		use:   "run",
		short: "Run the archiver's jobs now, outside of their schedule",
		long: `Run executes the archiver's jobs now, with the same settings as the schedule (tidings archive
settings). One job runs at a time in the whole fleet, so run waits for a running one. Only
outbox-ranges, which creates ranges in advance, runs beside others. Ctrl-C stops run after the
current slice; the next run continues.

With --dry-run it shows the settings, and how many rows each job would move. It also shows the
ranges that a job would delete permanently, with their months, rows and bytes. Without --dry-run, it
shows permanent deletions and asks for confirmation. tidings archive undo brings shelved threads
back.`,
		name: "archive", needs: needDatabases | orOutbox, json: onePer("job"), reason: &reason, dryRun: &dryRun, destructive: true,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			list, err := s.jobs(ctx, s.system, upkeep.Current(s.Truth), only...)
			if err != nil {
				return nil, err
			}
			if dryRun {
				return nil, s.planJobs(ctx, list)
			}
			if err := s.ask(func(w io.Writer) error { return showDrops(ctx, w, list) }); err != nil {
				return nil, err
			}
			return nil, s.runJobs(ctx, list, reason)
		},
	})
	c.Flags().StringSliceVar(&only, "job", nil, "run only this `job`; repeatable (default: every job)")
	return c
}

// showDrops shows the rows that a run of the jobs would drop now.
func showDrops(ctx context.Context, w io.Writer, list []jobs.Job) error {
	all, err := drops(ctx, list)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errNothingToDelete
	}
	fmt.Fprintln(w, "The run deletes this permanently:")
	return tableTo(w, dropRows(all)...)
}

// drops returns the rows that the jobs would drop if they ran now.
func drops(ctx context.Context, list []jobs.Job) (all []jobs.Drop, err error) {
	for _, j := range list {
		if j.Plan == nil {
			continue
		}
		plan, err := j.Plan(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, plan.Drops...)
	}
	return all, nil
}

// dropRows returns the rows of a table of drops.
func dropRows(all []jobs.Drop) [][]string {
	rows := [][]string{{"WHAT", "MONTHS", "ROWS (ESTIMATE)", "MIB (ESTIMATE)"}}
	var sum jobs.Drop
	for _, d := range all {
		rows = append(rows, []string{d.What, orDefault(d.Since, "-"), count(d.Rows), fmt.Sprintf("%.1f", float64(d.Bytes)/(1<<20))})
		sum.Rows, sum.Bytes = sum.Rows+d.Rows, sum.Bytes+d.Bytes
	}
	if len(all) > 1 {
		rows = append(rows, []string{"total", "", count(sum.Rows), fmt.Sprintf("%.1f", float64(sum.Bytes)/(1<<20))})
	}
	return rows
}

// jobs returns the jobs that only names, or all jobs if it is empty.
func (p Process) jobs(ctx context.Context, d *system, settings func(context.Context) (upkeep.Settings, error),
	only ...string) ([]jobs.Job, error) {
	var cfg upkeep.Config
	if err := envconfig.ProcessWith(ctx, &envconfig.Config{Target: &cfg, Lookuper: p.Env}); err != nil {
		return nil, &usageError{fmt.Errorf("read the environment: %w", err)}
	}
	log := daemon.CommandLogger(p.Stderr, slog.LevelWarn) // a job warns about old rows that it keeps
	now := kinds.Builtin()
	if !d.OutboxAlone {
		var err error
		if now, err = truthKinds(ctx, d.Truth); err != nil {
			return nil, err
		}
	}
	deps := upkeep.Deps{Truth: d.Truth, Projections: d.Projections, Cell: d.Broker.Stream, Kinds: func() *kinds.Set { return now },
		Registry: prometheus.NewRegistry(), Log: log}
	list, err := upkeep.Jobs(cfg, deps, settings)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, j := range list {
		names = append(names, j.Name)
	}
	for _, name := range only {
		if !slices.Contains(names, name) {
			return nil, &usageError{fmt.Errorf("there is no job %q: want one of %s", name, strings.Join(names, ", "))}
		}
	}
	return slices.DeleteFunc(list, func(j jobs.Job) bool { return len(only) > 0 && !slices.Contains(only, j.Name) }), nil
}

func (s *session) planJobs(ctx context.Context, list []jobs.Job) error {
	for _, j := range list {
		if j.Plan == nil {
			continue
		}
		start := time.Now()
		plan, err := j.Plan(ctx)
		if err != nil {
			return err
		}
		if err := s.print(jobRun{Job: j.Name, DryRun: true, With: plan.With, Drops: plan.Drops, Counts: plan.Counts,
			Seconds: time.Since(start).Seconds()}.report()); err != nil {
			return err
		}
	}
	return nil
}

// withoutJobs calls fn while no job runs anywhere. It waits for a running job, and prints its
// holder to stderr.
func (p Process) withoutJobs(ctx context.Context, truth *pgxpool.Pool, name string,
	fn func(ctx context.Context, h *jobs.Hold) error) error {
	if err := p.sayWhoHasJobs(ctx, truth); err != nil {
		return err
	}
	return jobs.WithLease(ctx, truth, name, fn)
}

// sayWhoHasJobs prints to stderr which process the caller waits for.
func (p Process) sayWhoHasJobs(ctx context.Context, truth *pgxpool.Pool) error {
	holders, err := lease.Holders(ctx, truth, jobs.Kind)
	if err != nil {
		return err
	}
	for _, h := range holders {
		fmt.Fprintf(p.Stderr, "Waiting for %s, which has the lease of the archiver's jobs. A job releases the lease after ten "+
			"minutes; the export of a large range takes longer.\n", h.Owner)
	}
	return nil
}

// runJobs runs jobs one after the other. Each job takes the lease itself, and takes it again when
// its time is up, so that other processes get their turn.
func (s *session) runJobs(ctx context.Context, list []jobs.Job, reason string) error {
	var errs []error
	for _, j := range list {
		r := jobRun{Job: j.Name, Counts: map[string]int64{}}
		start := time.Now()
		again := true
		var err error
		run := func(ctx context.Context, h *jobs.Hold) error {
			h.Reason = reason
			stop := s.showJob(ctx, j, h)
			counts, err := h.Run(ctx, j)
			stop()
			for what, n := range counts {
				r.Counts[what] += n
			}
			if again = errors.Is(err, jobs.ErrTimeUp); again {
				return nil
			}
			return err
		}
		for again && err == nil {
			if j.OwnLease {
				err = jobs.WithLeaseOf(ctx, s.Truth, j, "archive-run", run)
			} else {
				err = s.withoutJobs(ctx, s.Truth, "archive-run", run)
			}
		}
		if ctx.Err() != nil {
			err = errors.New("stopped before the end: run the same command again to continue")
		}
		r.Seconds = time.Since(start).Seconds()
		if err != nil {
			r.Error = err.Error()
		}
		errs = append(errs, s.print(r.report()), err)
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// showJob shows the progress of the job on stderr until stop is called.
func (p Process) showJob(ctx context.Context, j jobs.Job, h *jobs.Hold) (stop func()) {
	total := int64(-1)
	if j.Plan != nil {
		if plan, err := j.Plan(ctx); err == nil { // without a plan, the bar has no total
			total = 0
			for _, n := range plan.Counts {
				total += n
			}
		}
	}
	var counted atomic.Int64
	h.OnCount(func(_ string, n int64) { counted.Add(n) })
	start, of := time.Now(), ""
	if total >= 0 {
		of = " of " + count(total)
	}
	return p.showing(total, "rows", func(bar *progressbar.ProgressBar) {
		n := counted.Load()
		if total >= 0 {
			n = min(n, total) // more rows became old since the plan
		}
		bar.Describe(j.Name)
		_ = bar.Set64(n) // a failure to draw the bar must not stop the job
	}, func() string {
		return fmt.Sprintf("%s  %s: %s%s rows", elapsed(start), j.Name, count(counted.Load()), of)
	})
}

func (r jobRun) report() *report {
	if r.Counts == nil {
		r.Counts = map[string]int64{}
	}
	return reports(r, r.text)
}

func (r jobRun) text(w io.Writer) error {
	did := ""
	if r.DryRun {
		did = " (--dry-run)"
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(r.Counts)) {
		if n := r.Counts[what]; n > 0 {
			parts = append(parts, what+" "+count(n))
		}
	}
	if len(parts) == 0 {
		parts = []string{"nothing"}
	}
	fmt.Fprintf(w, "%s%s: %s (%s)\n", r.Job, did, strings.Join(parts, ", "), seconds(r.Seconds))
	if r.With != "" {
		fmt.Fprintf(w, "  settings: %s\n", r.With)
	}
	if len(r.Drops) == 0 {
		return nil
	}
	return tableTo(w, dropRows(r.Drops)...)
}

// archiveStatus is the output of `tidings archive status --json`.
type archiveStatus struct {
	Ranges  []outbox.Range       `json:"ranges"`
	Holds   []outbox.ArchiveHold `json:"holds"`
	Threads []store.Shelving     `json:"threads"` // of comments, by run
	Jobs    []jobs.LastRun       `json:"jobs"`
	Leases  []jobs.Lease         `json:"leases,omitempty"` // running jobs, with the processes that wait for them
}

func (p Process) archiveStatusCommand() *cobra.Command {
	return p.command(command{
		use:   "status",
		short: "Show the ranges of the outbox and its archive, the holds, the shelved threads, and the last runs of the jobs",
		name:  "archive", needs: needDatabases | orOutbox, json: oneObject,
		run: func(ctx context.Context, s *session, _ []string) (_ *report, err error) {
			var a archiveStatus
			if a.Ranges, _, err = outbox.Ranges(ctx, s.Truth); err != nil {
				return nil, err
			}
			if a.Holds, err = outbox.Holds(ctx, s.Truth, false); err != nil {
				return nil, err
			}
			if !s.OutboxAlone {
				if a.Threads, err = store.Shelvings(ctx, s.Truth, shelvingsShown); err != nil {
					return nil, err
				}
			}
			if a.Jobs, _, err = jobs.LastRuns(ctx, s.Truth); err != nil {
				return nil, err
			}
			if a.Leases, err = jobs.Leases(ctx, s.Truth); err != nil {
				return nil, err
			}
			return reports(a, a.text), nil
		},
	})
}

func (s archiveStatus) text(w io.Writer) error {
	when := func(t time.Time) string {
		if t.IsZero() {
			return "never"
		}
		return t.UTC().Format(time.RFC3339)
	}
	ranges := [][]string{{"RANGE FROM", "TO", "WHERE", "SETTLED", "ARCHIVED", "ROWS (ESTIMATE)", "MIB", "HELD"}}
	for _, r := range s.Ranges {
		where, held := "outbox", ""
		if r.State == outbox.RangeArchived {
			where = "archive"
		}
		if r.Held {
			held = "yes"
		}
		ranges = append(ranges, []string{count(r.From), count(r.To), where, when(r.SettledAt), when(r.ArchivedAt), count(r.Rows),
			fmt.Sprintf("%.1f", float64(r.Bytes)/(1<<20)), held})
	}
	runs := [][]string{{"JOB", "STARTED", "SUCCEEDED", "FAILED", "COUNTS", "ERROR"}}
	for _, r := range s.Jobs {
		var did []string
		for _, what := range slices.Sorted(maps.Keys(r.Counts)) {
			did = append(did, what+" "+count(r.Counts[what]))
		}
		runs = append(runs, []string{r.Job, when(r.StartedAt), when(r.SucceededAt), when(r.FailedAt),
			strings.Join(did, ", "), cell(r.LastError)})
	}
	tables := [][][]string{ranges}
	if len(s.Holds) > 0 {
		tables = append(tables, holdRows(s.Holds))
	}
	if len(s.Threads) > 0 {
		threads := [][]string{{"ARCHIVE", "STARTED", "THREADS", "COMMENTS", "RETURNED"}}
		for _, a := range s.Threads {
			threads = append(threads, []string{fmt.Sprint(a.ArchiveID), when(a.StartedAt), count(a.Threads),
				count(a.Comments), count(a.Returned)})
		}
		tables = append(tables, threads)
	}
	if len(s.Jobs) > 0 {
		tables = append(tables, runs)
	}
	if len(s.Leases) > 0 {
		tables = append(tables, jobLeaseRows(s.Leases))
	}
	return tablesTo(w, tables...)
}

// jobLeaseRows returns the rows of running jobs, with the processes that wait for them.
func jobLeaseRows(all []jobs.Lease) [][]string {
	rows := [][]string{{"RUNNING JOB", "SINCE", "BY", "WAITING FOR IT"}}
	for _, l := range all {
		job, since := orDefault(l.Job, "a command"), "-"
		if !l.Since.IsZero() {
			since = l.Since.UTC().Format(time.RFC3339)
		}
		rows = append(rows, []string{job, since, l.Holder, orDefault(strings.Join(l.Waiting, ", "), "-")})
	}
	return rows
}

func holdRows(holds []outbox.ArchiveHold) [][]string {
	rows := [][]string{{"HOLD", "TENANT", "FROM", "TO", "BY", "SINCE", "RELEASED", "REASON"}}
	month := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return t.Format("2006-01")
	}
	for _, h := range holds {
		tenant, released := "all", ""
		if h.TenantID != 0 {
			tenant = fmt.Sprint(h.TenantID)
		}
		if !h.ReleasedAt.IsZero() {
			released = h.ReleasedAt.UTC().Format(time.RFC3339) + " by " + cell(h.ReleasedBy)
		}
		rows = append(rows, []string{fmt.Sprint(h.ID), tenant, month(h.From), month(h.To), cell(h.CreatedBy),
			h.CreatedAt.UTC().Format(time.RFC3339), released, cell(h.Reason)})
	}
	return rows
}

func (p Process) holdAddCommand() *cobra.Command {
	var (
		from, to string
		h        outbox.ArchiveHold
	)
	c := p.command(command{
		use:   "add --reason REASON",
		short: "Keep a tenant's rows, a range of months, or both",
		long: `Add keeps rows of the archive until you release the hold. With --tenant it keeps that tenant's rows,
and with --from and --to the rows of those months. With all three it keeps that tenant's rows of
those months, and with none the whole archive. It does not restore dropped rows.`,
		name: "archive", needs: needDatabases | orOutbox, actor: &h.CreatedBy, reason: &h.Reason,
		check: func(*session, []string) (err error) {
			if h.From, err = parseMonth("--from", from, "2030-01"); err != nil {
				return err
			}
			if h.To, err = parseMonth("--to", to, "2030-01"); err != nil {
				return err
			}
			if h.Reason == "" || h.TenantID < 0 || !h.From.IsZero() && !h.To.IsZero() && h.To.Before(h.From) {
				return &usageError{errors.New("a hold needs a --reason, a positive --tenant if any, and --to not before --from")}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			added, err := outbox.AddHold(ctx, s.Truth, h)
			if err != nil {
				return nil, err
			}
			return reports(nil, rowsOf(holdRows([]outbox.ArchiveHold{added})...)), nil
		},
	})
	c.Flags().Int64Var(&h.TenantID, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&from, "from", "", "the first `month`, such as 2030-01")
	c.Flags().StringVar(&to, "to", "", "the last `month`")
	return c
}

// parseMonth reads the flag's month, or returns the zero time if it has none.
func parseMonth(flag, value, example string) (t time.Time, err error) {
	if value == "" {
		return t, nil
	}
	if t, err = time.Parse("2006-01", value); err != nil {
		return t, &usageError{fmt.Errorf("%s is %q: want a month such as %s", flag, value, example)}
	}
	return t, nil
}

func (p Process) holdListCommand() *cobra.Command {
	var all bool
	c := p.command(command{
		use: "list", short: "List the holds", name: "archive", needs: needDatabases | orOutbox, json: onePer("hold"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			holds, err := outbox.Holds(ctx, s.Truth, all)
			if err != nil {
				return nil, err
			}
			return lists(holds, rowsOf(holdRows(holds)...)), nil
		},
	})
	c.Flags().BoolVar(&all, "all", false, "show released holds too")
	return c
}

func (p Process) holdReleaseCommand() *cobra.Command {
	var (
		actor, reason string
		id            int64
	)
	return p.command(command{
		use: "release HOLD", short: "Release a hold: the next run drops the rows that it kept", args: exactArgs(1),
		name: "archive", needs: needDatabases | orOutbox, actor: &actor, reason: &reason, destructive: true,
		check: func(_ *session, args []string) error {
			if _, err := fmt.Sscan(args[0], &id); err != nil {
				return &usageError{fmt.Errorf("%q is not the number of a hold", args[0])}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			holds, err := outbox.Holds(ctx, s.Truth, false)
			if err != nil {
				return nil, err
			}
			holds = slices.DeleteFunc(holds, func(h outbox.ArchiveHold) bool { return h.ID != id })
			if len(holds) > 0 {
				if err := s.ask(func(w io.Writer) error {
					fmt.Fprintln(w, "The next run drops old rows that no other hold keeps:")
					return tableTo(w, holdRows(holds)...)
				}); err != nil {
					return nil, err
				}
			}
			if err := outbox.ReleaseHold(ctx, s.Truth, id, actor, reason); err != nil {
				return nil, err
			}
			return reports(nil, sentence("Hold %d is released: the next run drops old rows that no other hold keeps.\n", id)), nil
		},
	})
}
