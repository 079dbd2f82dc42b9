package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/doctor"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/migrations"
)

// errWarnings and errIllness end doctor, whose output has said what they stand for.
var (
	errWarnings = errors.New("warnings")
	errIllness  = errors.New("errors")
)

func (p Process) doctorCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what is wrong, or soon will be, and say how to mend it",
		Long: `Doctor looks at PostgreSQL (settings that lose data, old transactions, replication slots, dead rows, row security, roles, connections, clocks), at
NATS (version, limits, streams that somebody changed) and at the fleet (partitions that nobody holds, refused streams, lags, dead letters, jobs, locks). It changes
nothing. Each finding comes with the command that mends it. The exit code is 0 without findings, 1 with warnings alone and 3 with errors.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := p.diagnose(c.Context(), data)
			if err != nil {
				return err
			}
			return p.printFindings(all, asJSON)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per finding")
	dataFlag(c, &data)
	return c
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
		found, err := doctor.Database(ctx, y.truth, serverTruth)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
		runs, _, err := jobs.LastRuns(ctx, y.truth)
		if err != nil {
			return nil, err
		}
		all = append(all, jobFindings(runs)...)
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
