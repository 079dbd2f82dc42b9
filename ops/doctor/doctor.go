package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/status"
)

// Severity is how urgent a finding is.
type Severity string

// Severities.
const (
	Warning Severity = "warning" // it works now, and may fail later
	Error   Severity = "error"   // something does not work, or loses data when a server crashes
)

// Finding is one problem. Its rule sets Severity, Check, Runbook and Console.
type Finding struct {
	Severity    Severity  `json:"severity"`
	Check       string    `json:"check"`
	Where       string    `json:"where"`             // the server, partition, consumer or job
	What        string    `json:"what"`              // what happened
	Repair      string    `json:"repair"`            // a command, a statement or an advice; empty: the page has it
	Runbook     string    `json:"runbook,omitempty"` // the path of its page in the repository
	Console     string    `json:"console,omitempty"` // the console's page that shows more
	Since       time.Time `json:"since,omitzero"`
	Count       int64     `json:"count,omitempty"`        // how many messages, dead letters or partitions
	FollowsFrom string    `json:"follows_from,omitempty"` // the finding that causes this one: "paused archiver"
	note        string    // What in a whole sentence; empty: String makes one
}

// Action returns the remedy and the page of the runbook.
func (f Finding) Action() string {
	if f.Repair == "" || f.Runbook == "" {
		return f.Repair + f.Runbook
	}
	return f.Repair + " (" + f.Runbook + ")"
}

// Sentence returns what happened, and where: "Partition 0 has no stream yet".
func (f Finding) Sentence() string {
	if f.note != "" {
		return f.note
	}
	said := f.Where + ": " + f.What
	if rest, is := strings.CutPrefix(f.What, "it "); is {
		said = f.Where + " " + rest
	} else if strings.Contains(f.What, f.Where) {
		said = f.What
	}
	return strings.ToUpper(said[:1]) + said[1:]
}

// String returns the sentence with the remedy: "Partition 0 has no stream yet: start a relay". That
// of a consequence names its cause instead: its own remedy would change nothing.
func (f Finding) String() string {
	said := f.Sentence()
	switch {
	case f.FollowsFrom != "":
		return said + " (follows from " + f.FollowsFrom + ")"
	case f.Repair == "" && f.Runbook != "": // the sentence may end in a command
		return said + " (" + f.Runbook + ")"
	case f.Action() == "":
		return said
	case strings.HasPrefix(f.Repair, "tidings "):
		f.Repair = "`" + f.Repair + "`"
	}
	return said + ": " + f.Action()
}

// Diagnose checks every rule, and returns the findings as Rank orders them. st is a state that was
// just read from src, with the external consumers.
func Diagnose(ctx context.Context, src status.Sources, st status.State) ([]Finding, error) {
	probed, err := Probe(ctx, src, st)
	return Rank(append(Fleet(st), probed...)), err
}

// Probe checks the rules that ask the servers for more than the state. It leaves out a server that
// is unavailable in st. A part whose table another session locks is a finding.
func Probe(ctx context.Context, src status.Sources, st status.State) (all []Finding, err error) {
	ctx = status.WithShortLockTimeout(ctx, st)
	truth := src.Truth != nil && !st.IsUnavailable(status.ServerTruth)
	projections := src.Projections != nil && !st.IsUnavailable(status.ServerProjections)
	for _, part := range []struct {
		name string
		is   bool
		find func() ([]Finding, error)
	}{
		{"settings of " + status.ServerTruth, truth, func() ([]Finding, error) { return Database(ctx, src.Truth, status.ServerTruth) }},
		{"jobs", truth, func() ([]Finding, error) {
			runs, _, err := jobs.LastRuns(ctx, src.Truth)
			return failedJobs(runs), err
		}},
		{"archive", truth, func() ([]Finding, error) { return archive(ctx, src.Truth) }},
		{"declarations", truth, func() ([]Finding, error) { return undeclared(ctx, src.Truth, src.Broker.Prefix, st.External) }},
		{"schema of the outbox", truth, func() ([]Finding, error) { return schema(ctx, src.Truth, migrations.Outbox) }},
		{"schema of the truth", truth && !src.OutboxAlone,
			func() ([]Finding, error) { return schema(ctx, src.Truth, migrations.Truth) }},
		{"schema of the projections", projections,
			func() ([]Finding, error) { return schema(ctx, src.Projections, migrations.Projections) }},
		{"settings of " + status.ServerProjections, projections && (!truth || !status.SameDatabase(src.Truth, src.Projections)),
			func() ([]Finding, error) { return Database(ctx, src.Projections, status.ServerProjections) }},
		{status.ServerNATS, src.NATS != nil && !st.IsUnavailable(status.ServerNATS),
			func() ([]Finding, error) { return Broker(ctx, src.NATS, src.Broker, openPartitions(st)) }},
	} {
		if !part.is {
			continue
		}
		found, err := part.find()
		if postgres.IsLockTimeout(err) {
			found, err = []Finding{unread(status.Unread{Part: part.name, Error: err.Error()}).of(rule("unread"))}, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
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

// failedJobs returns the jobs whose last run failed.
func failedJobs(runs []jobs.LastRun) (all []Finding) {
	for _, r := range runs {
		if r.LastError != "" && r.FailedAt.After(r.SucceededAt) {
			f := finding("job-failed", r.Job, fmt.Sprintf("its last run failed at %s: %s", r.FailedAt.Format(time.RFC3339), r.LastError),
				"tidings archive run --job "+r.Job)
			f.Since = r.FailedAt
			all = append(all, f)
		}
	}
	return all
}

// Tree is a finding with its consequences.
type Tree struct {
	Finding
	Consequences []Tree
}

// Nest returns the root causes among findings that Rank ordered, each with its consequences.
func Nest(all []Finding) []Tree { return consequences(all, "") }

func consequences(all []Finding, of string) (trees []Tree) {
	for _, f := range all {
		if f.FollowsFrom == of {
			trees = append(trees, Tree{f, consequences(all, f.Check+" "+f.Where)})
		}
	}
	return trees
}

// Rank sets FollowsFrom of each finding that another one explains. It puts root causes before such
// consequences, and errors before warnings.
func Rank(all []Finding) []Finding {
	for i := range all {
		for _, c := range rule(all[i].Check).Follows {
			where := c.Where
			if where == itself {
				where = all[i].Where
			}
			if j := slices.IndexFunc(all, func(f Finding) bool {
				return f.Check == c.Check && (where == "" || f.Where == where)
			}); j >= 0 && all[i].FollowsFrom == "" {
				all[i].FollowsFrom = all[j].Check + " " + all[j].Where
			}
		}
	}
	rank := func(f Finding) int {
		n := 0
		if f.FollowsFrom != "" {
			n = 2
		}
		if f.Severity != Error {
			n++
		}
		return n
	}
	slices.SortStableFunc(all, func(a, b Finding) int { return rank(a) - rank(b) })
	return all
}
