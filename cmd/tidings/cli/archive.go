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
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

func (p Process) archiveCommand() *cobra.Command {
	c := &cobra.Command{Use: "archive", Short: "Archive, export and drop old events, and hold those that must remain"}
	c.AddCommand(p.archiveRunCommand(), p.archiveSettingsCommand(), p.archiveStatusCommand(),
		p.archiveUndoCommand(), p.archiveHoldCommand(),
		p.coldListCommand(), p.coldExportCommand(), p.coldVerifyCommand(), p.coldRestoreCommand())
	return c
}

// databases are the pools of a command that does not connect to NATS.
type databases struct {
	truth, projections *pgxpool.Pool
	cell               string // the truth's cell, which NATS_STREAM names
}

func (d databases) close() {
	for _, pool := range []*pgxpool.Pool{d.truth, d.projections} {
		if pool != nil {
			pool.Close()
		}
	}
}

// databases connects to both databases and checks their schemas.
func (p Process) databases(ctx context.Context, data, name string) (d databases, err error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return d, err
	}
	d.cell = s.Broker.Stream
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	for _, open := range []struct {
		url string
		set migrations.Set
		to  **pgxpool.Pool
	}{{s.DatabaseURL, migrations.Truth, &d.truth}, {s.ProjectionsDatabaseURL, migrations.Projections, &d.projections}} {
		if *open.to, err = postgres.Open(ctx, open.url, s.Postgres, postgres.RoleSystem, name); err != nil {
			return d, err
		}
		if err := migrations.Check(ctx, *open.to, open.set); err != nil {
			return d, err
		}
	}
	return d, nil
}

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
		data, reason   string
		only           []string
		dryRun, asJSON bool
		sure           *asking
	)
	c := &cobra.Command{
		Use:   "run",
		Short: "Run the archiver's jobs now, outside of their schedule",
		Long: `Run executes the archiver's jobs now, with the same settings as the schedule (tidings archive
settings). One job runs at a time in the whole fleet, so run waits for a running one. Only
outbox-ranges, which creates ranges in advance, runs beside others. Ctrl-C stops run after the
current slice; the next run continues.

With --dry-run it shows the settings, and how many rows each job would move. It also shows the
ranges that a job would delete permanently, with their months, rows and bytes. Without --dry-run, it
shows permanent deletions and asks for confirmation. tidings archive undo brings archived threads
back.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			d, err := p.databases(c.Context(), data, "archive")
			if err != nil {
				return err
			}
			defer d.close()
			list, err := p.jobs(c.Context(), d, upkeep.Current(d.truth), only...)
			if err != nil {
				return err
			}
			if dryRun {
				return p.planJobs(c.Context(), list, asJSON)
			}
			if err := askDrops(c.Context(), list, sure); err != nil {
				return err
			}
			return p.runJobs(c.Context(), d.truth, list, reason, asJSON)
		},
	}
	c.Flags().StringSliceVar(&only, "job", nil, "run only this `job`; repeatable (default: every job)")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "show what the command would do, and change nothing")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per job and line")
	c.Flags().StringVar(&reason, "reason", "", "the reason to record")
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}

// askDrops asks whether to drop the rows that a run of the jobs would drop now.
func askDrops(ctx context.Context, list []jobs.Job, sure *asking) error {
	return sure.ask(func(w io.Writer) error {
		all, err := drops(ctx, list)
		if err != nil {
			return err
		}
		if len(all) == 0 {
			return errNothingGoes
		}
		fmt.Fprintln(w, "The run deletes this permanently:")
		return tableTo(w, dropRows(all)...)
	})
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
		rows = append(rows, []string{d.What, or(d.Since, "-"), count(d.Rows), fmt.Sprintf("%.1f", float64(d.Bytes)/(1<<20))})
		sum.Rows, sum.Bytes = sum.Rows+d.Rows, sum.Bytes+d.Bytes
	}
	if len(all) > 1 {
		rows = append(rows, []string{"total", "", count(sum.Rows), fmt.Sprintf("%.1f", float64(sum.Bytes)/(1<<20))})
	}
	return rows
}

// jobs returns the jobs that only names, or all jobs if it is empty.
func (p Process) jobs(ctx context.Context, d databases, settings func(context.Context) (upkeep.Settings, error),
	only ...string) ([]jobs.Job, error) {
	var cfg upkeep.Config
	if err := envconfig.ProcessWith(ctx, &envconfig.Config{Target: &cfg, Lookuper: p.Env}); err != nil {
		return nil, &usageError{fmt.Errorf("read the environment: %w", err)}
	}
	log := daemon.CommandLogger(p.Stderr, slog.LevelWarn) // a job warns about old rows that it keeps
	now, err := truthKinds(ctx, d.truth)
	if err != nil {
		return nil, err
	}
	deps := upkeep.Deps{Truth: d.truth, Projections: d.projections, Cell: d.cell, Kinds: func() *kinds.Set { return now },
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

func (p Process) planJobs(ctx context.Context, list []jobs.Job, asJSON bool) error {
	for _, j := range list {
		if j.Plan == nil {
			continue
		}
		start := time.Now()
		plan, err := j.Plan(ctx)
		if err != nil {
			return err
		}
		if err := p.printRun(jobRun{Job: j.Name, DryRun: true, With: plan.With, Drops: plan.Drops, Counts: plan.Counts,
			Seconds: time.Since(start).Seconds()}, asJSON); err != nil {
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
func (p Process) runJobs(ctx context.Context, truth *pgxpool.Pool, list []jobs.Job, reason string, asJSON bool) error {
	var errs []error
	for _, j := range list {
		r := jobRun{Job: j.Name, Counts: map[string]int64{}}
		start := time.Now()
		again := true
		var err error
		run := func(ctx context.Context, h *jobs.Hold) error {
			h.Reason = reason
			stop := p.showJob(ctx, j, h)
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
				err = jobs.WithLeaseOf(ctx, truth, j, "archive-run", run)
			} else {
				err = p.withoutJobs(ctx, truth, "archive-run", run)
			}
		}
		if ctx.Err() != nil {
			err = errors.New("stopped before the end: run the same command again to continue")
		}
		r.Seconds = time.Since(start).Seconds()
		if err != nil {
			r.Error = err.Error()
		}
		errs = append(errs, p.printRun(r, asJSON), err)
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
	done, shown := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(shown)
		if terminal(p.Stderr) {
			p.showJobBar(j.Name, total, &counted, done)
		} else {
			p.showJobLines(j.Name, total, &counted, done)
		}
	}()
	return func() {
		close(done)
		<-shown
	}
}

func (p Process) showJobBar(name string, total int64, counted *atomic.Int64, done <-chan struct{}) {
	bar := progressbar.NewOptions64(total, progressbar.OptionSetWriter(p.Stderr), progressbar.OptionShowCount(),
		progressbar.OptionShowIts(),
		progressbar.OptionSetItsString("rows"), progressbar.OptionClearOnFinish(), progressbar.OptionUseANSICodes(true),
		progressbar.OptionSetWidth(30), progressbar.OptionSetDescription(name))
	ticker := time.NewTicker(barInterval)
	defer ticker.Stop()
	for {
		n := counted.Load()
		if total >= 0 {
			n = min(n, total) // more rows became old since the plan
		}
		_ = bar.Set64(n) // a failure to draw the bar must not stop the job
		select {
		case <-ticker.C:
		case <-done:
			_ = bar.Clear()
			return
		}
	}
}

func (p Process) showJobLines(name string, total int64, counted *atomic.Int64, done <-chan struct{}) {
	start, of := time.Now(), ""
	if total >= 0 {
		of = " of " + count(total)
	}
	ticker := time.NewTicker(lineInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			fmt.Fprintf(p.Stderr, "%s  %s: %s%s rows\n", elapsed(start), name, count(counted.Load()), of)
		case <-done:
			return
		}
	}
}

func (p Process) printRun(r jobRun, asJSON bool) error {
	if r.Counts == nil {
		r.Counts = map[string]int64{}
	}
	if asJSON {
		return p.writeJSON(r)
	}
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
	text := fmt.Sprintf("%s%s: %s (%s)\n", r.Job, did, strings.Join(parts, ", "), seconds(r.Seconds))
	if r.With != "" {
		text += "  settings: " + r.With + "\n"
	}
	if _, err := fmt.Fprint(p.Stdout, text); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	if len(r.Drops) == 0 {
		return nil
	}
	return p.table(dropRows(r.Drops)...)
}

// archiveStatus is the output of `tidings archive status --json`.
type archiveStatus struct {
	Ranges  []outbox.Range       `json:"ranges"`
	Holds   []outbox.ArchiveHold `json:"holds"`
	Threads []store.Archived     `json:"threads"` // of comments, by archive id
	Jobs    []jobs.LastRun       `json:"jobs"`
	Leases  []jobs.Lease         `json:"leases,omitempty"` // running jobs, with the processes that wait for them
}

func (p Process) archiveStatusCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the ranges of the outbox and its archive, the holds, the archived threads, and the last runs of the jobs",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			d, err := p.databases(c.Context(), data, "archive")
			if err != nil {
				return err
			}
			defer d.close()
			s := archiveStatus{}
			if s.Ranges, _, err = outbox.Ranges(c.Context(), d.truth); err != nil {
				return err
			}
			if s.Holds, err = outbox.Holds(c.Context(), d.truth, false); err != nil {
				return err
			}
			if s.Threads, err = store.Archives(c.Context(), d.truth, archivesShown); err != nil {
				return err
			}
			if s.Jobs, _, err = jobs.LastRuns(c.Context(), d.truth); err != nil {
				return err
			}
			if s.Leases, err = jobs.Leases(c.Context(), d.truth); err != nil {
				return err
			}
			if asJSON {
				return p.writeJSON(s)
			}
			return p.printArchive(s)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

func (p Process) printArchive(s archiveStatus) error {
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
	err := p.table(ranges...)
	if len(s.Holds) > 0 {
		fmt.Fprintln(p.Stdout)
		err = errors.Join(err, p.table(holdRows(s.Holds)...))
	}
	if len(s.Threads) > 0 {
		fmt.Fprintln(p.Stdout)
		threads := [][]string{{"ARCHIVE", "STARTED", "THREADS", "COMMENTS", "RETURNED"}}
		for _, a := range s.Threads {
			threads = append(threads, []string{fmt.Sprint(a.ArchiveID), when(a.StartedAt), count(a.Threads),
				count(a.Comments), count(a.Returned)})
		}
		err = errors.Join(err, p.table(threads...))
	}
	if len(s.Jobs) > 0 {
		fmt.Fprintln(p.Stdout)
		err = errors.Join(err, p.table(runs...))
	}
	if len(s.Leases) > 0 {
		fmt.Fprintln(p.Stdout)
		err = errors.Join(err, p.table(jobLeaseRows(s.Leases)...))
	}
	return err
}

// jobLeaseRows returns the rows of running jobs, with the processes that wait for them.
func jobLeaseRows(all []jobs.Lease) [][]string {
	rows := [][]string{{"RUNNING JOB", "SINCE", "BY", "WAITING FOR IT"}}
	for _, l := range all {
		job, since := or(l.Job, "a command"), "-"
		if !l.Since.IsZero() {
			since = l.Since.UTC().Format(time.RFC3339)
		}
		rows = append(rows, []string{job, since, l.Holder, or(strings.Join(l.Waiting, ", "), "-")})
	}
	return rows
}

func (p Process) archiveHoldCommand() *cobra.Command {
	c := &cobra.Command{Use: "hold", Short: "Keep part of the outbox's archive beyond its retention"}
	c.AddCommand(p.holdAddCommand(), p.holdListCommand(), p.holdReleaseCommand())
	return c
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
		data, from, to string
		h              outbox.ArchiveHold
	)
	c := &cobra.Command{
		Use:   "add --reason REASON",
		Short: "Keep a tenant's rows, a range of months, or both",
		Long: `Add keeps rows of the archive until you release the hold. With --tenant it keeps that tenant's rows,
and with --from and --to the rows of those months. With all three it keeps that tenant's rows of
those months, and with none the whole archive. It does not restore dropped rows.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			for _, flag := range []struct {
				name, value string
				to          *time.Time
			}{{"--from", from, &h.From}, {"--to", to, &h.To}} {
				if flag.value == "" {
					continue
				}
				t, err := time.Parse("2006-01", flag.value)
				if err != nil {
					return &usageError{fmt.Errorf("%s is %q: want a month such as 2030-01", flag.name, flag.value)}
				}
				*flag.to = t
			}
			if h.Reason == "" || h.TenantID < 0 || !h.From.IsZero() && !h.To.IsZero() && h.To.Before(h.From) {
				return &usageError{errors.New("a hold needs a --reason, a positive --tenant if any, and --to not before --from")}
			}
			if err := setActor(&h.CreatedBy); err != nil {
				return err
			}
			d, err := p.databases(c.Context(), data, "archive")
			if err != nil {
				return err
			}
			defer d.close()
			added, err := outbox.AddHold(c.Context(), d.truth, h)
			if err != nil {
				return err
			}
			return p.table(holdRows([]outbox.ArchiveHold{added})...)
		},
	}
	c.Flags().Int64Var(&h.TenantID, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&from, "from", "", "the first `month`, such as 2030-01")
	c.Flags().StringVar(&to, "to", "", "the last `month`")
	addActor(c, &h.CreatedBy, &h.Reason)
	dataFlag(c, &data)
	return c
}

func (p Process) holdListCommand() *cobra.Command {
	var (
		data        string
		all, asJSON bool
	)
	c := &cobra.Command{
		Use:   "list",
		Short: "List the holds",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			d, err := p.databases(c.Context(), data, "archive")
			if err != nil {
				return err
			}
			defer d.close()
			holds, err := outbox.Holds(c.Context(), d.truth, all)
			if err != nil {
				return err
			}
			if !asJSON {
				return p.table(holdRows(holds)...)
			}
			for _, h := range holds {
				if err := p.writeJSON(h); err != nil {
					return err
				}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&all, "all", false, "show released holds too")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per hold and line")
	dataFlag(c, &data)
	return c
}

func (p Process) holdReleaseCommand() *cobra.Command {
	var data, actor, reason string
	var sure *asking
	c := &cobra.Command{
		Use:   "release HOLD",
		Short: "Release a hold: the next run drops the rows that it kept",
		Args:  exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			var id int64
			if _, err := fmt.Sscan(args[0], &id); err != nil {
				return &usageError{fmt.Errorf("%q is not the number of a hold", args[0])}
			}
			if err := setActor(&actor); err != nil {
				return err
			}
			d, err := p.databases(c.Context(), data, "archive")
			if err != nil {
				return err
			}
			defer d.close()
			holds, err := outbox.Holds(c.Context(), d.truth, false)
			if err != nil {
				return err
			}
			holds = slices.DeleteFunc(holds, func(h outbox.ArchiveHold) bool { return h.ID != id })
			if len(holds) > 0 {
				if err := sure.ask(func(w io.Writer) error {
					fmt.Fprintln(w, "The next run drops old rows that no other hold keeps:")
					return tableTo(w, holdRows(holds)...)
				}); err != nil {
					return err
				}
			}
			if err := outbox.ReleaseHold(c.Context(), d.truth, id, actor, reason); err != nil {
				return err
			}
			_, err = fmt.Fprintf(p.Stdout, "Hold %d is released: the next run drops old rows that no other hold keeps.\n", id)
			return err
		},
	}
	addActor(c, &actor, &reason)
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}
