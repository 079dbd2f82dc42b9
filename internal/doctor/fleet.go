package doctor

import (
	"context"
	"fmt"
	"github.com/tidings/tidings/migrations"
	"slices"
	"time"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/internal/status"
	"github.com/tidings/tidings/internal/words"
)

// Diagnose looks at everything, and returns the findings with the errors first. st is a state that was just read of src: what was away then is
// not looked at, and is a finding.
func Diagnose(ctx context.Context, src status.Sources, st status.State) ([]Finding, error) {
	all := Fleet(st)
	truth, projections := src.Truth != nil && !st.IsAway(status.ServerTruth), src.Projections != nil && !st.IsAway(status.ServerProjections)
	if truth {
		found, err := Database(ctx, src.Truth, status.ServerTruth)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
		runs, _, err := jobs.LastRuns(ctx, src.Truth)
		if err != nil {
			return nil, err
		}
		all = append(all, failedJobs(runs)...)
		if found, err = archive(ctx, src.Truth); err != nil {
			return nil, err
		}
		all = append(all, found...)
		if found, err = schema(ctx, src.Truth, migrations.Truth); err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	if projections {
		found, err := schema(ctx, src.Projections, migrations.Projections)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	if projections && (!truth || !status.SameDatabase(src.Truth, src.Projections)) {
		found, err := Database(ctx, src.Projections, status.ServerProjections)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	if src.NATS != nil && !st.IsAway(status.ServerNATS) {
		var partitions []broker.Partition
		for _, s := range st.Partitions {
			if s.State == status.Open && s.Replicas > 0 {
				partitions = append(partitions, broker.Partition{Number: s.Partition, FirstSlot: s.FirstSlot, LastSlot: s.LastSlot, After: s.After})
			}
		}
		found, err := Broker(ctx, src.NATS, src.Broker, partitions)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.SortStableFunc(all, func(a, b Finding) int { return rank(a.Severity) - rank(b.Severity) })
	return all, nil
}

func rank(s Severity) int {
	if s == Error {
		return 0
	}
	return 1
}

// Bounds of the fleet's findings, those of the alerts in deploy/prometheus/rules.yml.
const (
	lateSeconds     = 60
	undeliveredLong = 300
)

// Fleet says what is wrong with the state of the fleet.
func Fleet(st status.State) (all []Finding) {
	add := func(severity Severity, check, where, mend, what string, args ...any) {
		all = append(all, Finding{Severity: severity, Check: check, Where: where, What: fmt.Sprintf(what, args...), Mend: mend})
	}
	for _, a := range st.Away {
		add(Error, "unavailable", a.Server, "start it, or correct the address", "%s", a)
	}
	for _, b := range st.Blocked {
		add(Warning, "blocked-session", status.ServerTruth, "docs/runbook/BlockedSessions.md", "%s", b)
	}
	for _, p := range st.Partitions {
		where := fmt.Sprintf("partition %d", p.Partition)
		switch {
		case p.Refused != "":
			add(Error, "refused-stream", where, "tidings repair stream", "nothing is published: %s", p.Refused)
		case p.NoLeader != "":
			add(Error, "no-leader", where, "start the servers of its replicas: docs/runbook/StreamWaitsForLeader.md", "its stream has no leader: %s", p.NoLeader)
		case p.State == status.Open && p.Replicas == 0 && p.Unknown == "":
			add(Warning, "no-stream", where, "start a relay: it makes the stream", "it has no stream yet")
		case p.Current < p.Replicas:
			add(Warning, "replica-behind", where, "docs/runbook/StreamReplicaBehind.md", "%d of %d replicas have the whole stream", p.Current, p.Replicas)
		}
	}
	for _, u := range st.Unheld {
		if c := slices.IndexFunc(st.Consumers, func(c status.Consumer) bool { return c.Consumer == u.Kind }); c < 0 || st.Consumers[c].Paused == nil {
			add(Error, "unheld-partition", u.Kind, "start one, or look into its log", "no running process holds partitions %s", words.Ranges(u.Partitions))
		}
	}
	if o := st.Outbox; o != nil {
		if o.LagSeconds > lateSeconds || o.Undelivered > undeliveredLong {
			add(Error, "outbox-lag", "outbox", "docs/runbook/OutboxLagHigh.md", "the oldest message that is due waits for %.0f s, the oldest of all for %.0f s", o.LagSeconds, o.Undelivered)
		}
		if o.Retrying > 0 {
			add(Warning, "outbox-retrying", "outbox", "tidings outbox list", "%s failed and will be retried", words.Of(int64(o.Retrying), "message"))
		}
		if o.DLQDepth > 0 {
			add(Warning, "outbox-dlq", "outbox", "tidings dlq outbox list", "%s in the DLQ", words.Of(int64(o.DLQDepth), "message"))
		}
		if o.RangesAhead < 1 || o.Strays > 0 {
			add(Warning, "outbox-ranges", "outbox", "start an archiver: it makes ranges ahead of need", "%d ranges stand ahead of the last id, and %d messages are in none", o.RangesAhead, o.Strays)
		}
	}
	for _, c := range st.Consumers {
		all = append(all, consumer(c)...)
	}
	return all
}

func consumer(c status.Consumer) (all []Finding) {
	add := func(severity Severity, check, mend, what string, args ...any) {
		all = append(all, Finding{Severity: severity, Check: check, Where: c.Consumer, What: fmt.Sprintf(what, args...), Mend: mend})
	}
	if len(c.Lost) > 0 {
		add(Error, "lost-events", "tidings replay --consumer "+c.Consumer, "it has lost events of %v", c.Lost)
	}
	if c.Paused != nil {
		add(Warning, "paused", "tidings resume --consumer "+c.Consumer, "%s paused it at %s: %s", c.Paused.Actor, c.Paused.At.Format(time.RFC3339), c.Paused.Reason)
	}
	if c.Seconds > lateSeconds {
		add(Warning, "consumer-lag", "docs/runbook/ConsumerLagHigh.md", "it is %.0f s and %s behind", c.Seconds, words.Of(c.Messages, "message"))
	}
	if c.DeadLetters > 0 {
		add(Warning, "dead-letters", "tidings dlq consumer list --consumer "+c.Consumer, "%s parked", words.Of(c.DeadLetters, "message"))
	}
	return all
}

// failedJobs says which jobs did not succeed when they last ran.
func failedJobs(runs []jobs.LastRun) (all []Finding) {
	for _, r := range runs {
		if r.LastError != "" && r.FailedAt.After(r.SucceededAt) {
			all = append(all, Finding{Severity: Warning, Check: "job-failed", Where: r.Job, What: fmt.Sprintf("it failed at %s: %s", r.FailedAt.Format(time.RFC3339), r.LastError),
				Mend: "docs/runbook/JobFailing.md"})
		}
	}
	return all
}
