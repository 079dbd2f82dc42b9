package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

// Limits that the alerts of deploy/prometheus/rules.yml have too.
const (
	LateSeconds        = 60  // of a due message until its publication, and of a consumer
	UndeliveredSeconds = 300 // of a pending message
	FullShare          = 0.8 // of a limit of NATS
	ExpiryDays         = 14  // before the end of credentials,
	ExpiryShare        = 4   // and in the last quarter of their life
)

// Rule is one check. Its findings have its name, severity and pages.
type Rule struct {
	Name     string
	Severity Severity
	Runbook  string  // the name of its page in docs/runbook; empty: none
	Console  string  // the console's page, below /console/; empty: none
	Follows  []Cause // what explains a finding of it
	Check    func(st status.State, found func(Finding))
	sql      string // of a rule about a database
}

// Cause names findings that explain others.
type Cause struct{ Check, Where string }

// itself is the Where of a cause at the place of its consequence. An empty Where is any place.
const itself = "itself"

// natsUnavailable and noRelay are the usual causes of everything that waits.
var (
	natsUnavailable = Cause{"unavailable", status.ServerNATS}
	noRelay         = Cause{"unheld-partition", "relay"}
)

// fleetRules need the state alone, so they cost nothing. Their order is that of the findings.
var fleetRules = []Rule{
	{Name: "unavailable", Severity: Error, Check: func(st status.State, found func(Finding)) {
		for _, a := range st.Unavailable {
			repair := "start the server, or correct its address or its login in the environment"
			if strings.Contains(a.Error, "(SQLSTATE 53200)") { // of the lock table; the server refuses logins too
				repair = "a client holds too many locks: end it, or restart the server with a larger max_locks_per_transaction"
			}
			found(Finding{Where: a.Server, What: a.String(), Repair: repair})
		}
	}},
	{Name: "blocked-session", Severity: Warning, Runbook: "BlockedSessions", Check: func(st status.State, found func(Finding)) {
		for _, b := range st.Blocked {
			// Two writes of one row wait for each other all the time. A wait may be one of many in
			// turn, so the age of the other transaction counts too.
			if prepared := b.By.PID == 0; prepared || max(b.Seconds, b.By.Transaction) >= 1 {
				found(Finding{Where: status.ServerTruth, What: b.String(), note: "Blocked: " + b.String()})
			}
		}
	}},
	{Name: "unread", Severity: Error, Runbook: "BlockedSessions", Follows: []Cause{{"blocked-session", ""}},
		Check: func(st status.State, found func(Finding)) {
			for _, u := range st.Unread {
				found(unread(u))
			}
		}},
	{Name: "refused-stream", Severity: Error, Runbook: "OutboxPartitionStuck", Console: "partitions",
		Check: partitions(status.Refused, func(p status.Partition) Finding {
			return Finding{What: fmt.Sprintf("relays publish nothing to partition %d: %s", p.Partition, p.Refused)}
		})},
	{Name: "no-leader", Severity: Error, Runbook: "StreamWaitsForLeader", Console: "partitions",
		Check: partitions(status.NoLeader, func(p status.Partition) Finding {
			return Finding{What: "it waits for a leader of its stream, and relays and consumers wait too: " +
				strings.TrimPrefix(p.NoLeader, broker.ErrNoLeader.Error()+": "),
				Repair: "start the servers that hold its replicas"}
		})},
	{Name: "publish-fails", Severity: Error, Runbook: "OutboxLagHigh", Console: "partitions", Follows: []Cause{{"storage", ""}},
		Check: partitions(status.Failing, func(p status.Partition) Finding {
			return Finding{What: fmt.Sprintf("relays cannot publish to partition %d: %s", p.Partition, p.Trouble),
				Repair: "correct the cause; the relay then resumes by itself"}
		})},
	{Name: "no-stream", Severity: Warning, Console: "partitions", Follows: []Cause{noRelay},
		Check: partitions(status.NoStream, func(p status.Partition) Finding {
			return Finding{What: "it has no stream yet", Repair: "the first relay that holds it creates " + p.Stream}
		})},
	{Name: "replica-behind", Severity: Warning, Runbook: "StreamReplicaBehind", Console: "partitions",
		Check: partitions(status.Behind, func(p status.Partition) Finding {
			return Finding{What: fmt.Sprintf("%d of %d replicas have every message of the stream", p.Current, p.Replicas)}
		})},
	{Name: "lease-refused", Severity: Warning, Check: func(st status.State, found func(Finding)) {
		for _, r := range st.Refusals {
			found(Finding{Where: r.Kind, Repair: "read its log", What: fmt.Sprintf("instance %s could not serve partition %d of %s, and "+
				"does not take it back before %s", r.By, r.Partition, r.Kind, r.Until.Format(time.RFC3339))})
		}
	}},
	{Name: "unheld-partition", Severity: Error, Follows: []Cause{natsUnavailable, {"lease-refused", itself}},
		Check: func(st status.State, found func(Finding)) {
			for _, u := range st.Unheld {
				if !slices.ContainsFunc(st.Consumers, func(c status.Consumer) bool { return c.Consumer == u.Kind && c.Paused != nil }) {
					page := "consumers"
					if u.Kind == noRelay.Where {
						page = "partitions"
					}
					found(Finding{Where: u.Kind, What: fmt.Sprintf("no running process holds %s", u), Repair: "start one, or read its log",
						Console: page, Count: int64(len(u.Partitions)), note: fmt.Sprintf("No running %s holds %s", u.Kind, u),
						FollowsFrom: leaderless(st, u)})
				}
			}
		}},
	{Name: "outbox-lag", Severity: Error, Runbook: "OutboxLagHigh", Console: "partitions",
		Follows: []Cause{natsUnavailable, {"refused-stream", ""}, {"no-leader", ""}, {"publish-fails", ""}, noRelay},
		Check: outboxRule(func(o outbox.Stats) Finding {
			if o.LagSeconds <= LateSeconds && o.Undelivered <= UndeliveredSeconds {
				return Finding{}
			}
			return Finding{What: fmt.Sprintf("the oldest due message has waited for %s to be published, and the oldest pending one for %s",
				words.Seconds(o.LagSeconds), words.Seconds(o.Undelivered)), Count: int64(o.Pending),
				Since: before(max(o.LagSeconds, o.Undelivered))}
		})},
	{Name: "outbox-retrying", Severity: Warning, Runbook: "OutboxEventFails", Console: "retrying",
		Check: outboxRule(func(o outbox.Stats) Finding {
			return counted(int64(o.Retrying), "message", " failed and will be retried", "tidings outbox list")
		})},
	{Name: "outbox-dlq", Severity: Warning, Runbook: "OutboxDLQNotEmpty", Console: "dead-letters?source=outbox",
		Check: outboxRule(func(o outbox.Stats) Finding {
			return counted(int64(o.DLQDepth), "message", " in the DLQ, which relays could not publish", "tidings dlq outbox list")
		})},
	{Name: "outbox-ranges", Severity: Warning, Runbook: "OutboxRangesMissing", Console: "archive",
		Check: outboxRule(func(o outbox.Stats) Finding {
			if o.RangesAhead > 0 && o.Strays == 0 { // the alert wants two ranges, and waits for ten minutes
				return Finding{}
			}
			return Finding{Repair: "start an archiver: it creates ranges in advance", What: fmt.Sprintf("ranges ahead of the last id: %d "+
				"(want 1 or more); messages outside of all ranges: %d (want 0)", o.RangesAhead, o.Strays)}
		})},
	{Name: "lost-events", Severity: Error, Runbook: "ConsumerPartitionStuck", Console: "consumers",
		Check: consumerRule(func(st status.State, c status.Consumer) Finding {
			if len(c.Lost) == 0 {
				return Finding{}
			}
			return Finding{Repair: st.Remedy(c),
				What: fmt.Sprintf("it cannot continue: events of %s are missing", strings.Join(c.Lost, ", "))}
		})},
	{Name: "paused", Severity: Warning, Console: "consumers", Check: consumerRule(func(_ status.State, c status.Consumer) Finding {
		if c.Paused == nil {
			return Finding{}
		}
		return Finding{What: fmt.Sprintf("%s paused it at %s: %s", c.Paused.Actor, c.Paused.At.Format(time.RFC3339), c.Paused.Reason),
			Since: c.Paused.At, Repair: "tidings resume --consumer " + c.Consumer}
	})},
	{Name: "lag-unknown", Severity: Warning, Console: "consumers", Follows: []Cause{{"no-leader", ""}},
		Check: consumerRule(func(st status.State, c status.Consumer) Finding {
			if c.Unknown == "" || len(st.Unavailable) > 0 || st.IsUnread(status.PartConsumers) {
				return Finding{}
			}
			return Finding{What: "its lag is unknown: " + c.Unknown, Repair: "run the command again"}
		})},
	{Name: "consumer-lag", Severity: Warning, Runbook: "ConsumerLagHigh", Console: "consumers",
		Follows: []Cause{natsUnavailable, {"no-leader", ""}, {"lost-events", itself}, {"paused", itself}, {"unheld-partition", itself}},
		Check: consumerRule(func(_ status.State, c status.Consumer) Finding {
			if c.Seconds <= LateSeconds {
				return Finding{}
			}
			return Finding{Count: c.Messages, Since: before(c.Seconds),
				What: fmt.Sprintf("it is %s behind, with %s to apply", words.Seconds(c.Seconds), words.Of(c.Messages, "message"))}
		})},
	{Name: "dead-letters", Severity: Warning, Runbook: "ConsumerDeadLetters", Console: "dead-letters",
		Check: consumerRule(func(_ status.State, c status.Consumer) Finding {
			f := counted(c.DeadLetters, "dead letter", ", and later events of the same aggregates wait",
				"tidings dlq consumer list --consumer "+c.Consumer)
			f.Console = "dead-letters?source=consumers&consumer=" + c.Consumer
			return f
		})},
	{Name: "subscribers-unknown", Severity: Warning, Runbook: "NATSReportsAnError", Follows: []Cause{{"no-leader", ""}},
		Check: func(st status.State, found func(Finding)) {
			if st.NotListed != "" {
				found(Finding{Where: status.ServerNATS, What: "the durable consumers of subscribers are unknown: " + st.NotListed,
					Repair: "run the command again, or install the output of tidings nats users"})
			}
		}},
	{Name: "subscriber-absent", Severity: Warning, Runbook: "SubscriberAbsent", Console: "consumers", Check: durables(broker.Unserved,
		func(d broker.Durable) string {
			return fmt.Sprintf("%s of %s wait for it, and nobody has asked for them for %s",
				words.Of(int64(d.Behind)+int64(d.Unacked), "message"), d.Stream, words.Seconds(d.Idle))
		})},
	{Name: "subscriber-redelivers", Severity: Warning, Runbook: "SubscriberRedelivers", Console: "consumers",
		Check: durables(broker.Redelivers, func(d broker.Durable) string {
			return fmt.Sprintf("it does not acknowledge %s of %s, and NATS delivers them again",
				words.Of(int64(d.Redelivered), "message"), d.Stream)
		})},
}

// leaderless returns the finding that explains unheld partitions if none of them has a leader:
// their processes gave them up.
func leaderless(st status.State, u status.Unheld) (finding string) {
	for _, n := range u.Partitions {
		i := slices.IndexFunc(st.Partitions, func(p status.Partition) bool { return p.Partition == n })
		if i < 0 || st.Partitions[i].Condition() != status.NoLeader {
			return ""
		}
		finding = fmt.Sprint("no-leader partition ", n)
	}
	return finding
}

// durables is the check that finds the durable consumers in a state: one finding for all streams.
func durables(state string, say func(broker.Durable) string) func(status.State, func(Finding)) {
	return func(st status.State, found func(Finding)) {
		says := make(map[string][]string)
		for _, d := range st.External {
			if d.State == state {
				says[d.Name] = append(says[d.Name], say(d))
			}
		}
		for _, name := range slices.Sorted(maps.Keys(says)) {
			what := strings.Join(says[name], "; ")
			found(Finding{Where: name, What: what, Count: int64(len(says[name])),
				note: strings.Replace("Subscriber "+name+": "+what, ": it ", " ", 1)})
		}
	}
}

// probeRules are those that Probe checks beside databaseRules.
var probeRules = []Rule{
	{Name: "schema", Severity: Error},
	{Name: "schema-newer", Severity: Warning, Runbook: "VersionsDiffer"},
	{Name: "target-session-attrs", Severity: Warning, Runbook: "OldPrimary"},
	{Name: "clock-skew", Severity: Warning},
	{Name: "job-failed", Severity: Warning, Runbook: "JobFailing", Console: "archive"},
	{Name: "archive-export", Severity: Warning, Runbook: "OutboxExportFailing", Console: "archive"},
	{Name: "subscriber-undeclared", Severity: Warning, Console: "consumers"},
	{Name: "nats-version", Severity: Error},
	{Name: "nats-credentials", Severity: Warning, Runbook: "CredentialsExpire"},
	{Name: "jetstream", Severity: Error, Follows: []Cause{{"no-leader", ""}}},
	{Name: "storage", Severity: Warning, Runbook: "StreamNearlyFull"},
	{Name: "stream-missing", Severity: Error, Console: "partitions"},
	{Name: "stream-shape", Severity: Error, Console: "partitions"},
	{Name: "stream-limits", Severity: Warning, Console: "partitions"},
	{Name: "stream-placement", Severity: Warning, Console: "partitions"},
	{Name: "stream-purge", Severity: Warning},
}

// Rules returns every rule.
func Rules() []Rule { return slices.Concat(fleetRules, databaseRules, probeRules) }

func rule(name string) Rule {
	all := Rules()
	return all[slices.IndexFunc(all, func(r Rule) bool { return r.Name == name })]
}

// of returns the finding with what its rule says.
func (f Finding) of(r Rule) Finding {
	f.Check, f.Severity = r.Name, r.Severity
	if r.Runbook != "" {
		f.Runbook = "docs/runbook/" + r.Runbook + ".md"
	}
	if page := cmp.Or(f.Console, r.Console); page != "" {
		f.Console = "/console/" + page
	}
	return f
}

// finding returns a finding of a rule that Probe checks.
func finding(name, where, what, repair string) Finding {
	return Finding{Where: where, What: what, Repair: repair}.of(rule(name))
}

// Fleet checks the rules that need nothing but the state, and returns the findings as Rank orders
// them.
func Fleet(st status.State) (all []Finding) {
	for _, r := range fleetRules {
		r.Check(st, func(f Finding) { all = append(all, f.of(r)) })
	}
	return Rank(all)
}

// unread is the finding that a lock made a part unreadable.
func unread(u status.Unread) Finding {
	return Finding{Where: u.Part, Repair: "end the lock", note: u.String(),
		What: "it is unknown, because another session locks a table: " + u.Error}
}

// partitions is the check that finds the partitions in a condition.
func partitions(condition string, find func(status.Partition) Finding) func(status.State, func(Finding)) {
	return func(st status.State, found func(Finding)) {
		for _, p := range st.Partitions {
			if p.Condition() == condition {
				f := find(p)
				f.Where = fmt.Sprint("partition ", p.Partition)
				found(f)
			}
		}
	}
}

// outboxRule is the check of the outbox's figures, if they are known. A finding without What is
// none.
func outboxRule(find func(outbox.Stats) Finding) func(status.State, func(Finding)) {
	return func(st status.State, found func(Finding)) {
		if st.Outbox == nil {
			return
		}
		if f := find(*st.Outbox); f.What != "" {
			f.Where = "outbox"
			found(f)
		}
	}
}

// consumerRule is the check of each consumer. A finding without What is none.
func consumerRule(find func(status.State, status.Consumer) Finding) func(status.State, func(Finding)) {
	return func(st status.State, found func(Finding)) {
		for _, c := range st.Consumers {
			if f := find(st, c); f.What != "" {
				f.Where = c.Consumer
				found(f)
			}
		}
	}
}

// before returns the time that many seconds ago.
func before(seconds float64) time.Time {
	return time.Now().Add(-time.Duration(seconds * float64(time.Second))).Truncate(time.Second)
}

// counted is the finding that n of something exist: none for 0.
func counted(n int64, noun, what, repair string) Finding {
	if n == 0 {
		return Finding{}
	}
	return Finding{What: words.Of(n, noun) + what, Repair: repair, Count: n}
}
