package cli

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
)

// errWarnings and errUnhealthy set the exit code of a command whose output already has the
// findings.
var (
	errWarnings  = errors.New("warnings")
	errUnhealthy = errors.New("errors")
)

func (p Process) doctorCommand() *cobra.Command {
	var wait time.Duration
	c := p.command(command{
		use:   "doctor",
		short: "Find problems that exist or will exist soon, and name the command that solves each",
		long: `Doctor checks PostgreSQL, NATS and the fleet. PostgreSQL: settings that lose data, old transactions,
replication slots, dead rows, row security, roles, connections, clocks. NATS: version, limits,
changed streams. Fleet: partitions without a holder, refused streams, lags, subscribers that nobody
runs, dead letters, jobs, locks, months without an export. It changes nothing. Each finding names the command or the page that
solves it. The exit code is 0 without findings, 1 with warnings and 3 with errors.`,
		needs: needServers, json: onePer("finding"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			all, err := awaitHealth(ctx, wait, func(ctx context.Context) ([]doctor.Finding, error) { return s.diagnose(ctx, s.data) })
			if err != nil {
				return nil, err
			}
			return findings(all)
		},
	})
	c.Flags().DurationVar(&wait, "wait", 0, "how long to wait for a starting fleet, until there is no error")
	return c
}

// awaitHealth returns the first findings without an error, or those at the end of wait.
func awaitHealth(ctx context.Context, wait time.Duration,
	diagnose func(context.Context) ([]doctor.Finding, error)) ([]doctor.Finding, error) {
	for until := time.Now().Add(wait); ; {
		all, err := diagnose(ctx)
		ill := err != nil || slices.ContainsFunc(all, func(f doctor.Finding) bool { return f.Severity == doctor.Error })
		var usage *usageError
		if !ill || !time.Now().Before(until) || errors.As(err, &usage) {
			return all, err
		}
		if work.Sleep(ctx, time.Second) != nil {
			return all, err
		}
	}
}

// diagnose returns the findings, root causes first.
func (p Process) diagnose(ctx context.Context, data string) ([]doctor.Finding, error) {
	y, err := p.open(ctx, data, "doctor", needAll|tolerant|orOutbox)
	if errors.Is(err, migrations.ErrElsewhere) {
		return []doctor.Finding{{Severity: doctor.Error, Check: "schema", Where: status.ServerTruth, What: err.Error(),
			Repair: "add the search_path to DATABASE_URL"}}, nil
	}
	if errors.Is(err, migrations.ErrOutdated) {
		return []doctor.Finding{{Severity: doctor.Error, Check: "schema", Where: status.ServerTruth, What: err.Error(),
			Repair: "tidings migrate"}}, nil
	}
	if err != nil {
		return nil, err
	}
	defer y.close()
	st, err := status.Await(ctx, y.Sources, status.Patience, status.State.Seen)
	if err == nil {
		err = status.ReadExternal(ctx, y.Sources, &st)
	}
	if err != nil {
		return nil, err
	}
	return doctor.Diagnose(ctx, y.Sources, st)
}

// findings returns the report of the findings, and the error of the worst one.
func findings(all []doctor.Finding) (_ *report, worst error) {
	rows := [][]string{{"SEVERITY", "CHECK", "WHERE", "FINDING", "ACTION"}}
	for _, f := range all {
		if f.Severity == doctor.Error {
			worst = errUnhealthy
		} else if worst == nil {
			worst = errWarnings
		}
		what := f.What
		if f.FollowsFrom != "" {
			what += " (follows from " + f.FollowsFrom + ")"
		}
		rows = append(rows, []string{string(f.Severity), f.Check, f.Where, cell(what), f.Action()})
	}
	if len(all) == 0 {
		return lists(all, sentence("No findings.\n")), nil
	}
	return lists(all, rowsOf(rows...)), worst
}
