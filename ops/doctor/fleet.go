package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/status"
)

// Diagnose runs every check and returns the findings, errors first. st is a state that was just
// read from src. A server that is unavailable in st is a finding, and Diagnose does not check it. A
// part whose table another session locks is a finding too.
func Diagnose(ctx context.Context, src status.Sources, st status.State) ([]Finding, error) {
	ctx = status.WithShortLockTimeout(ctx, st)
	all := Fleet(st)
	truth, projections := src.Truth != nil && !st.IsAway(status.ServerTruth), src.Projections != nil && !st.IsAway(status.ServerProjections)
	type part struct {
		name string
		find func() ([]Finding, error)
	}
	var parts []part
	add := func(name string, find func() ([]Finding, error)) { parts = append(parts, part{name, find}) }
	if truth {
		add("settings of "+status.ServerTruth, func() ([]Finding, error) { return Database(ctx, src.Truth, status.ServerTruth) })
		add("jobs", func() ([]Finding, error) {
			runs, _, err := jobs.LastRuns(ctx, src.Truth)
			return failedJobs(runs), err
		})
		add("archive", func() ([]Finding, error) { return archive(ctx, src.Truth) })
		add("schema of the truth", func() ([]Finding, error) { return schema(ctx, src.Truth, migrations.Truth) })
	}
	if projections {
		add("schema of the projections", func() ([]Finding, error) { return schema(ctx, src.Projections, migrations.Projections) })
	}
	if projections && (!truth || !status.SameDatabase(src.Truth, src.Projections)) {
		add("settings of "+status.ServerProjections, func() ([]Finding, error) {
			return Database(ctx, src.Projections, status.ServerProjections)
		})
	}
	if src.NATS != nil && !st.IsAway(status.ServerNATS) {
		add(status.ServerNATS, func() ([]Finding, error) { return Broker(ctx, src.NATS, src.Broker, openPartitions(st)) })
	}
	for _, p := range parts {
		found, err := p.find()
		if postgres.IsLockTimeout(err) {
			found, err = []Finding{unread(status.Unread{Part: p.name, Error: err.Error()})}, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.SortStableFunc(all, func(a, b Finding) int { return rank(a.Severity) - rank(b.Severity) })
	return all, nil
}

// unread is the finding that a lock made a part unreadable.
func unread(u status.Unread) Finding {
	return Finding{Severity: Error, Check: "unread", Where: u.Part, Mend: "end the lock: docs/runbook/BlockedSessions.md",
		What: "it is unknown, because another session locks a table: " + u.Error}
}

// openPartitions returns the partitions to which relays publish and that have a stream.
func openPartitions(st status.State) (all []broker.Partition) {
	for _, s := range st.Partitions {
		if s.State == status.Open && s.Replicas > 0 {
			all = append(all, broker.Partition{Number: s.Partition, FirstSlot: s.FirstSlot, LastSlot: s.LastSlot, After: s.After})
		}
	}
	return all
}

func rank(s Severity) int {
	if s == Error {
		return 0
	}
	return 1
}

// Bounds of the fleet's findings, in seconds. They are those of the alerts in
// deploy/prometheus/rules.yml.
const (
	lateSeconds     = 60
	undeliveredLong = 300
)

// Fleet returns the findings about the state of the fleet.
func Fleet(st status.State) (all []Finding) {
	add := func(severity Severity, check, where, mend, what string, args ...any) {
		all = append(all, Finding{Severity: severity, Check: check, Where: where, What: fmt.Sprintf(what, args...), Mend: mend})
	}
	for _, a := range st.Unavailable {
		add(Error, "unavailable", a.Server, "start the server, or correct its address in the environment", "%s", a)
	}
	for _, b := range st.Blocked {
		add(Warning, "blocked-session", status.ServerTruth, "docs/runbook/BlockedSessions.md", "%s", b)
	}
	for _, u := range st.Unread {
		all = append(all, unread(u))
	}
	for _, p := range st.Partitions {
		where := fmt.Sprintf("partition %d", p.Partition)
		switch {
		case p.Refused != "":
			add(Error, "refused-stream", where, "tidings repair stream --dry-run (docs/runbook/OutboxPartitionStuck.md)",
				"relays publish nothing to it: %s", p.Refused)
		case p.NoLeader != "":
			add(Error, "no-leader", where, "start the servers that hold its replicas: docs/runbook/StreamWaitsForLeader.md",
				"its stream has no leader, so relays and consumers wait: %s", p.NoLeader)
		case p.Trouble != "":
			add(Error, "publish-fails", where, "mend the cause; the relay then resumes by itself (docs/runbook/OutboxLagHigh.md)",
				"relays cannot publish to it: %s", p.Trouble)
		case p.State == status.Open && p.Replicas == 0 && p.Unknown == "":
			add(Warning, "no-stream", where, "start a relay: it creates the stream", "it has no stream yet")
		case p.Current < p.Replicas:
			add(Warning, "replica-behind", where, "docs/runbook/StreamReplicaBehind.md",
				"%d of %d replicas have every message of the stream", p.Current, p.Replicas)
		}
	}
	for _, u := range st.Unheld {
		if c := slices.IndexFunc(st.Consumers, func(c status.Consumer) bool { return c.Consumer == u.Kind }); c < 0 ||
			st.Consumers[c].Paused == nil {
			add(Error, "unheld-partition", u.Kind, "start one, or read its log", "no running process holds %s", u)
		}
	}
	if o := st.Outbox; o != nil {
		if o.LagSeconds > lateSeconds || o.Undelivered > undeliveredLong {
			add(Error, "outbox-lag", "outbox", "docs/runbook/OutboxLagHigh.md",
				"the oldest due message has waited for %s to be published, and the oldest pending one for %s",
				words.Seconds(o.LagSeconds), words.Seconds(o.Undelivered))
		}
		if o.Retrying > 0 {
			add(Warning, "outbox-retrying", "outbox", "tidings outbox list", "%s failed and will be retried",
				words.Of(int64(o.Retrying), "message"))
		}
		if o.DLQDepth > 0 {
			add(Warning, "outbox-dlq", "outbox", "tidings dlq outbox list", "%s in the DLQ, which relays could not publish",
				words.Of(int64(o.DLQDepth), "message"))
		}
		if o.RangesAhead < 1 || o.Strays > 0 {
			add(Warning, "outbox-ranges", "outbox", "start an archiver: it creates ranges in advance (docs/runbook/OutboxRangesMissing.md)",
				"ranges ahead of the last id: %d (want 1 or more); messages outside of all ranges: %d (want 0)", o.RangesAhead, o.Strays)
		}
	}
	for _, c := range st.Consumers {
		all = append(all, consumer(c, st.Remedy(c))...)
	}
	return all
}

func consumer(c status.Consumer, remedy string) (all []Finding) {
	add := func(severity Severity, check, mend, what string, args ...any) {
		all = append(all, Finding{Severity: severity, Check: check, Where: c.Consumer, What: fmt.Sprintf(what, args...), Mend: mend})
	}
	if len(c.Lost) > 0 {
		add(Error, "lost-events", remedy+" (docs/runbook/ConsumerPartitionStuck.md)", "it cannot continue: events of %s are missing",
			strings.Join(c.Lost, ", "))
	}
	if c.Paused != nil {
		add(Warning, "paused", "tidings resume --consumer "+c.Consumer, "%s paused it at %s: %s", c.Paused.Actor,
			c.Paused.At.Format(time.RFC3339), c.Paused.Reason)
	}
	if c.Seconds > lateSeconds {
		add(Warning, "consumer-lag", "docs/runbook/ConsumerLagHigh.md", "it is %s behind, with %s to apply", words.Seconds(c.Seconds),
			words.Of(c.Messages, "message"))
	}
	if c.DeadLetters > 0 {
		add(Warning, "dead-letters", "tidings dlq consumer list --consumer "+c.Consumer,
			"%s, and later events of the same aggregates wait", words.Of(c.DeadLetters, "dead letter"))
	}
	return all
}

// failedJobs returns the jobs whose last run failed.
func failedJobs(runs []jobs.LastRun) (all []Finding) {
	for _, r := range runs {
		if r.LastError != "" && r.FailedAt.After(r.SucceededAt) {
			all = append(all, Finding{Severity: Warning, Check: "job-failed", Where: r.Job,
				What: fmt.Sprintf("its last run failed at %s: %s", r.FailedAt.Format(time.RFC3339), r.LastError),
				Mend: "tidings archive run --job " + r.Job + " repeats it: docs/runbook/JobFailing.md"})
		}
	}
	return all
}
