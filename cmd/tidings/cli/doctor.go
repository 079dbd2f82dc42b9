package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/doctor"
	"github.com/tidings/tidings/cmd/internal/upkeep"
	"github.com/tidings/tidings/coldstore"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
)

// errWarnings and errIllness end doctor, whose output has said what they stand for.
var (
	errWarnings = errors.New("warnings")
	errIllness  = errors.New("errors")
)

func (p Process) doctorCommand() *cobra.Command {
	var (
		data   string
		wait   time.Duration
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what is wrong, or soon will be, and say how to mend it",
		Long: `Doctor looks at PostgreSQL (settings that lose data, old transactions, replication slots, dead rows, row security, roles, connections, clocks), at
NATS (version, limits, streams that somebody changed) and at the fleet (partitions that nobody holds, refused streams, lags, dead letters, jobs, locks, months of the archive without an export). It changes
nothing. Each finding comes with the command that mends it. The exit code is 0 without findings, 1 with warnings alone and 3 with errors.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := awaitHealth(c.Context(), wait, func(ctx context.Context) ([]doctor.Finding, error) { return p.diagnose(ctx, data) })
			if err != nil {
				return err
			}
			return p.printFindings(all, asJSON)
		},
	}
	c.Flags().DurationVar(&wait, "wait", 0, "how long to wait for a fleet that starts, until nothing is an error any more")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per finding and line")
	dataFlag(c, &data)
	return c
}

// awaitHealth returns the first findings without an error, or those at the end of wait.
func awaitHealth(ctx context.Context, wait time.Duration, diagnose func(context.Context) ([]doctor.Finding, error)) ([]doctor.Finding, error) {
	for until := time.Now().Add(wait); ; {
		all, err := diagnose(ctx)
		ill := err != nil || slices.ContainsFunc(all, func(f doctor.Finding) bool { return f.Severity == doctor.Error })
		var usage *usageError
		if !ill || !time.Now().Before(until) || errors.As(err, &usage) {
			return all, err
		}
		select {
		case <-ctx.Done():
			return all, err
		case <-time.After(time.Second):
		}
	}
}

// diagnose returns the findings, errors first.
func (p Process) diagnose(ctx context.Context, data string) ([]doctor.Finding, error) {
	y, err := p.someSystem(ctx, data, "doctor")
	if errors.Is(err, migrations.ErrOutdated) {
		return []doctor.Finding{{Severity: doctor.Error, Check: "schema", Where: serverTruth, What: err.Error(), Mend: "tidings migrate"}}, nil
	}
	if err != nil {
		return nil, err
	}
	defer y.close()
	st, err := y.await(ctx, patience, systemState.seen)
	if err != nil {
		return nil, err
	}
	all := fleetFindings(st)
	if y.truth != nil {
		found, err := truthFindings(ctx, y.truth)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	if y.projections != nil {
		found, err := schemaFindings(ctx, y.projections, migrations.Projections)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	if y.projections != nil && (y.truth == nil || !sameDatabase(y.truth, y.projections)) {
		found, err := doctor.Database(ctx, y.projections, serverProjections)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	if y.js != nil {
		var partitions []broker.Partition
		for _, s := range st.Partitions {
			if s.State == stateOpen && s.Replicas > 0 {
				partitions = append(partitions, broker.Partition{Number: s.Partition, FirstSlot: s.FirstSlot, LastSlot: s.LastSlot, After: s.After})
			}
		}
		found, err := doctor.Broker(ctx, y.nc, y.broker, partitions)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.SortStableFunc(all, func(a, b doctor.Finding) int { return rank(a.Severity) - rank(b.Severity) })
	return all, nil
}

// truthFindings looks at the truth's server, and at what is in the truth alone.
func truthFindings(ctx context.Context, truth *pgxpool.Pool) ([]doctor.Finding, error) {
	all, err := doctor.Database(ctx, truth, serverTruth)
	if err != nil {
		return nil, err
	}
	runs, _, err := jobs.LastRuns(ctx, truth)
	if err != nil {
		return nil, err
	}
	settings, _, err := upkeep.Read(ctx, truth)
	if err != nil {
		return nil, err
	}
	cold := coldstore.New(truth, "", nil, nil, nil)
	exported, err := cold.List(ctx)
	if err != nil {
		return nil, err
	}
	due, err := cold.Due(ctx)
	if err != nil {
		return nil, err
	}
	schema, err := schemaFindings(ctx, truth, migrations.Truth)
	if err != nil {
		return nil, err
	}
	return slices.Concat(all, schema, jobFindings(runs), exportFindings(settings.OutboxExportURL, len(exported) > 0, due, time.Now())), nil
}

// schemaFindings says whether the schema is of a newer release than this program. Of an older one no command works (migrations.ErrOutdated).
func schemaFindings(ctx context.Context, pool *pgxpool.Pool, set migrations.Set) ([]doctor.Finding, error) {
	have, err := migrations.Version(ctx, pool, set)
	want := migrations.Latest(set)
	if err != nil || have <= want {
		return nil, err
	}
	return []doctor.Finding{{Severity: doctor.Warning, Check: "schema-newer", Where: "schema of the " + string(set), Mend: "upgrade this program, and what else is of its release: docs/runbook/VersionsDiffer.md",
		What: fmt.Sprintf("it is at version %d, and this program knows %d: a newer release migrated it", have, want)}}, nil
}

func rank(s doctor.Severity) int {
	if s == doctor.Error {
		return 0
	}
	return 1
}

// Bounds of the fleet's findings, those of the alerts in deploy/prometheus/rules.yml.
const (
	lateSeconds     = 60
	undeliveredLong = 300
)

// fleetFindings says what is wrong with the state of the fleet.
func fleetFindings(st systemState) (all []doctor.Finding) {
	add := func(severity doctor.Severity, check, where, mend, what string, args ...any) {
		all = append(all, doctor.Finding{Severity: severity, Check: check, Where: where, What: fmt.Sprintf(what, args...), Mend: mend})
	}
	for _, a := range st.Away {
		add(doctor.Error, "unavailable", a.Server, "start it, or correct the address", "%s", a)
	}
	for _, b := range st.Blocked {
		add(doctor.Warning, "blocked-session", serverTruth, "docs/runbook/BlockedSessions.md", "%s", b)
	}
	for _, p := range st.Partitions {
		where := fmt.Sprintf("partition %d", p.Partition)
		switch {
		case p.Refused != "":
			add(doctor.Error, "refused-stream", where, "tidings repair stream", "nothing is published: %s", p.Refused)
		case p.NoLeader != "":
			add(doctor.Error, "no-leader", where, "start the servers of its replicas: docs/runbook/StreamWaitsForLeader.md", "its stream has no leader: %s", p.NoLeader)
		case p.State == stateOpen && p.Replicas == 0 && p.Unknown == "":
			add(doctor.Warning, "no-stream", where, "start a relay: it makes the stream", "it has no stream yet")
		case p.Current < p.Replicas:
			add(doctor.Warning, "replica-behind", where, "docs/runbook/StreamReplicaBehind.md", "%d of %d replicas have the whole stream", p.Current, p.Replicas)
		}
	}
	for _, u := range st.Unheld {
		if c := slices.IndexFunc(st.Consumers, func(c consumerState) bool { return c.Consumer == u.Kind }); c < 0 || st.Consumers[c].Paused == nil {
			add(doctor.Error, "unheld-partition", u.Kind, "start one, or look into its log", "no running process holds partitions %s", ranges(u.Partitions))
		}
	}
	if o := st.Outbox; o != nil {
		if o.LagSeconds > lateSeconds || o.Undelivered > undeliveredLong {
			add(doctor.Error, "outbox-lag", "outbox", "docs/runbook/OutboxLagHigh.md", "the oldest message that is due waits for %.0f s, the oldest of all for %.0f s", o.LagSeconds, o.Undelivered)
		}
		if o.Retrying > 0 {
			add(doctor.Warning, "outbox-retrying", "outbox", "tidings outbox list", "%s failed and will be retried", messages(int64(o.Retrying)))
		}
		if o.DLQDepth > 0 {
			add(doctor.Warning, "outbox-dlq", "outbox", "tidings dlq outbox list", "%s in the DLQ", messages(int64(o.DLQDepth)))
		}
		if o.RangesAhead < 1 || o.Strays > 0 {
			add(doctor.Warning, "outbox-ranges", "outbox", "start an archiver: it makes ranges ahead of need", "%d ranges stand ahead of the last id, and %d messages are in none", o.RangesAhead, o.Strays)
		}
	}
	for _, c := range st.Consumers {
		all = append(all, consumerFindings(c)...)
	}
	return all
}

func consumerFindings(c consumerState) (all []doctor.Finding) {
	add := func(severity doctor.Severity, check, mend, what string, args ...any) {
		all = append(all, doctor.Finding{Severity: severity, Check: check, Where: c.Consumer, What: fmt.Sprintf(what, args...), Mend: mend})
	}
	if len(c.Lost) > 0 {
		add(doctor.Error, "lost-events", "tidings replay --consumer "+c.Consumer, "it has lost events of %v", c.Lost)
	}
	if c.Paused != nil {
		add(doctor.Warning, "paused", "tidings resume --consumer "+c.Consumer, "%s paused it at %s: %s", c.Paused.Actor, c.Paused.At.Format(time.RFC3339), c.Paused.Reason)
	}
	if c.Seconds > lateSeconds {
		add(doctor.Warning, "consumer-lag", "docs/runbook/ConsumerLagHigh.md", "it is %.0f s and %s behind", c.Seconds, messages(c.Messages))
	}
	if c.DeadLetters > 0 {
		add(doctor.Warning, "dead-letters", "tidings dlq consumer list --consumer "+c.Consumer, "%s parked", messages(c.DeadLetters))
	}
	return all
}

// jobFindings says which jobs did not succeed when they last ran.
func jobFindings(runs []jobs.LastRun) (all []doctor.Finding) {
	for _, r := range runs {
		if r.LastError != "" && r.FailedAt.After(r.SucceededAt) {
			all = append(all, doctor.Finding{Severity: doctor.Warning, Check: "job-failed", Where: r.Job, What: fmt.Sprintf("it failed at %s: %s", r.FailedAt.Format(time.RFC3339), r.LastError),
				Mend: "docs/runbook/JobFailing.md"})
		}
	}
	return all
}

// exportLate is how long after its move to the archive a range has an export: a day is many runs of the job.
const exportLate = 24 * time.Hour

// exportFindings says which months of the archive have ranges without an export. Nothing is wrong where the archive was never exported, and none is wanted.
func exportFindings(url string, exported bool, due []outbox.Range, now time.Time) (all []doctor.Finding) {
	if url == "" && !exported {
		return nil
	}
	ranges := map[string]int64{}
	for _, r := range due {
		if now.Sub(r.ArchivedAt) > exportLate {
			ranges[r.FirstAt.UTC().Format("2006-01")]++
		}
	}
	for _, month := range slices.Sorted(maps.Keys(ranges)) {
		f := doctor.Finding{Severity: doctor.Warning, Check: "archive-export", Where: "archive of " + month,
			What: fmt.Sprintf("%s without an export: the database keeps what it would have dropped", rangesText(ranges[month])), Mend: "tidings archive export --month " + month}
		if url == "" {
			f.What = fmt.Sprintf("%s without an export, and exports are off: they are dropped without one", rangesText(ranges[month]))
			f.Mend = "tidings archive settings outbox_archive_export_url=URL --reason WHY"
		}
		all = append(all, f)
	}
	return all
}

func rangesText(n int64) string {
	if n == 1 {
		return "1 range"
	}
	return count(n) + " ranges"
}

func (p Process) printFindings(all []doctor.Finding, asJSON bool) error {
	result := error(nil)
	rows := [][]string{{"SEVERITY", "CHECK", "WHERE", "FINDING", "MEND"}}
	for _, f := range all {
		if f.Severity == doctor.Error {
			result = errIllness
		} else if result == nil {
			result = errWarnings
		}
		if asJSON {
			if err := p.writeJSON(f); err != nil {
				return err
			}
		}
		rows = append(rows, []string{string(f.Severity), f.Check, f.Where, cell(f.What), f.Mend})
	}
	switch {
	case asJSON:
		return result
	case len(all) == 0:
		if _, err := fmt.Fprintln(p.Stdout, "No findings."); err != nil {
			return err
		}
		return nil
	}
	return errors.Join(p.table(rows...), result)
}
