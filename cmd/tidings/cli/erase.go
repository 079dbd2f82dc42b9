package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/erase"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/store"
)

func (p Process) eraseCommand() *cobra.Command {
	var o erasure.Options
	c := p.command(command{
		use:   "erase --tenant T --author A",
		short: "Erase a person's content and edges from every table, stream and file",
		long: `Erase removes the text and the attributes of all children of the author, of every kind. It removes
them from the truth, the outbox with its DLQ and archive, the dead letters, the histories and the
read tables. It also removes them from the stream, whose files it overwrites. Tombstones remain
above replies. Each child gets a KIND.erased event, which tells subscribers to erase their copies.
Erase also removes all edges from and to the author, each with a KIND.removed event. After every
consumer has applied these, it deletes the edges from the same places.

Erase waits until the relay has published these events and every consumer has applied them. It ends
when a scan of all these places finds no more data of the author. Meanwhile no job archives, and no
projection can be replayed. With exit code 3 a step did not finish within --wait, and the output
names it. Run the same command again: it continues, also after an interruption. Exit code 3 also
means that an archived file is unreadable and may contain data of the author; everything else is
erased. docs/erasure.md lists the copies that erase cannot reach, such as backups.`,
		name: "erase", needs: needAll, json: oneObject, actor: &o.Actor, reason: &o.Reason, dryRun: &o.DryRun, destructive: true,
		check: func(*session, []string) error {
			switch {
			case o.TenantID <= 0 || o.AuthorID == "":
				return &usageError{errors.New("--tenant and --author are required, and the tenant is a positive number")}
			case o.Wait < 0:
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", o.Wait)}
			case !store.ValidReason(o.Reason):
				return &usageError{errReason}
			}
			return checkID("--author", o.AuthorID)
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			if !s.asJSON {
				o.Progress = func(what string) { fmt.Fprintln(s.Stderr, what) }
			}
			if err := s.ask(func(w io.Writer) error { return s.showErasure(ctx, w, s.system, o) }); err != nil {
				return nil, err
			}
			r, err := s.erase(ctx, s.system, o)
			if err != nil && !errors.Is(err, erasure.ErrUnfinished) {
				if ctx.Err() != nil {
					err = errors.New("stopped before the end: run the same command again to continue")
				}
				return nil, err
			}
			return reports(r, func(w io.Writer) error { return printErasure(w, r) }), err
		},
	})
	c.Flags().Int64Var(&o.TenantID, "tenant", 0, "the tenant")
	c.Flags().StringVar((*string)(&o.AuthorID), "author", "", "the author whose children and edges to erase")
	c.Flags().DurationVar(&o.Wait, "wait", 10*time.Minute, "how long to wait for the relay and the consumers, in total")
	return c
}

// showErasure shows how much an erasure would erase now.
func (p Process) showErasure(ctx context.Context, w io.Writer, y *system, o erasure.Options) error {
	o.DryRun = true
	report, err := p.erase(ctx, y, o)
	if err != nil {
		return err
	}
	total := 0
	for _, n := range report.Counts {
		total += n
	}
	if total == 0 {
		return errNothingToDelete
	}
	fmt.Fprintf(w, "The command permanently erases this data of author %s of tenant %d:\n", o.AuthorID, o.TenantID)
	return tableTo(w, erasureRows("FOUND", report)...)
}

// erasureRows returns the rows of how much was found or redacted in each store.
func erasureRows(title string, r erasure.Report) [][]string {
	rows := [][]string{{"STORE", title}}
	for _, s := range erasure.Stores(fleet.Projections(kinds.Builtin)) {
		rows = append(rows, []string{s, count(int64(r.Counts[s]))})
	}
	return rows
}

// erase runs the erasure while it holds the lease of the archiver's jobs and keeps replays out.
func (p Process) erase(ctx context.Context, y *system, o erasure.Options) (report erasure.Report, err error) {
	now, err := truthKinds(ctx, y.Truth)
	if err != nil {
		return report, err
	}
	deps := erase.Deps{Deps: erasure.Deps{Truth: y.Truth, Projections: y.Projections, Kinds: now,
		Fleet: fleet.Projections(func() *kinds.Set { return now }), JetStream: y.JetStream, Broker: y.Broker},
		ProjectionsURL: y.env.ProjectionsDatabaseURL, Postgres: y.env.Postgres}
	if !o.DryRun {
		if err := p.sayWhoHasJobs(ctx, y.Truth); err != nil {
			return report, err
		}
	}
	return erase.Run(ctx, deps, o)
}

func printErasure(w io.Writer, r erasure.Report) error {
	title := "REDACTED"
	if r.DryRun {
		title = "FOUND"
	}
	if err := tableTo(w, erasureRows(title, r)...); err != nil {
		return err
	}
	text := fmt.Sprintf("\nAuthor %s of tenant %d is erased: a final scan found no more data. Requested at %s by %s.\n",
		r.AuthorID, r.TenantID, r.RequestedAt.Format(time.RFC3339), r.RequestedBy)
	switch {
	case r.DryRun:
		text = "\nNothing was changed (--dry-run).\n"
	case len(r.Unread) > 0 && len(r.Waiting) == 0:
		text = fmt.Sprintf("\nNOT finished: everything else is erased, but these unreadable files may contain data of the author:\n  %s\n"+
			"Restore each file from a copy, or give up its export, and run this command again (docs/runbook/erase.md).\n",
			strings.Join(r.Unread, "\n  "))
	case !r.Done:
		text = fmt.Sprintf("\nNOT finished; run it again. It waited for %s.\n", strings.Join(r.Waiting, "; "))
	}
	_, err := fmt.Fprint(w, text)
	return err
}
