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
	var (
		data   string
		asJSON bool
		o      erasure.Options
		sure   *asking
	)
	c := &cobra.Command{
		Use:   "erase --tenant T --author A",
		Short: "Erase a person's content and edges from every table, stream and file",
		Long: `Erase removes the text and the attributes of all children of the author, of every kind. It removes
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
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			switch {
			case o.TenantID <= 0 || o.AuthorID <= 0:
				return &usageError{errors.New("--tenant and --author are required, both positive numbers")}
			case o.Wait < 0:
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", o.Wait)}
			case !store.ValidReason(o.Reason):
				return &usageError{errReason}
			}
			if err := setActor(&o.Actor); err != nil {
				return err
			}
			if !asJSON {
				o.Progress = func(what string) { fmt.Fprintln(p.Stderr, what) }
			}
			if !o.DryRun {
				if err := sure.ask(func(w io.Writer) error { return p.showErasure(c.Context(), w, data, o) }); err != nil {
					return err
				}
			}
			report, err := p.erase(c.Context(), data, o)
			if err != nil && !errors.Is(err, erasure.ErrUnfinished) {
				if c.Context().Err() != nil {
					err = errors.New("stopped before the end: run the same command again to continue")
				}
				return err
			}
			if asJSON {
				return errors.Join(p.writeJSON(report), err)
			}
			return errors.Join(p.printErasure(report), err)
		},
	}
	c.Flags().Int64Var(&o.TenantID, "tenant", 0, "the tenant")
	c.Flags().Int64Var(&o.AuthorID, "author", 0, "the author whose children and edges to erase")
	c.Flags().BoolVar(&o.DryRun, "dry-run", false, "show what the command would do, and change nothing")
	c.Flags().DurationVar(&o.Wait, "wait", 10*time.Minute, "how long to wait for the relay and the consumers, in total")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	addActor(c, &o.Actor, &o.Reason)
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}

// showErasure shows how much an erasure would erase now.
func (p Process) showErasure(ctx context.Context, w io.Writer, data string, o erasure.Options) error {
	o.DryRun = true
	report, err := p.erase(ctx, data, o)
	if err != nil {
		return err
	}
	total := 0
	for _, n := range report.Counts {
		total += int(n)
	}
	if total == 0 {
		return errNothingGoes
	}
	fmt.Fprintf(w, "The command permanently erases this data of author %d of tenant %d:\n", o.AuthorID, o.TenantID)
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
func (p Process) erase(ctx context.Context, data string, o erasure.Options) (report erasure.Report, err error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return report, err
	}
	y, err := p.system(ctx, data, "erase")
	if err != nil {
		return report, err
	}
	defer y.close()
	now, err := truthKinds(ctx, y.Truth)
	if err != nil {
		return report, err
	}
	deps := erase.Deps{Deps: erasure.Deps{Truth: y.Truth, Projections: y.Projections, Kinds: now,
		Fleet: fleet.Projections(func() *kinds.Set { return now }), JetStream: y.JetStream, Broker: y.Broker},
		ProjectionsURL: s.ProjectionsDatabaseURL, Postgres: s.Postgres}
	if o.DryRun {
		return erase.Run(ctx, deps, o)
	}
	if err := p.sayWhoHasJobs(ctx, y.Truth); err != nil {
		return report, err
	}
	return erase.Run(ctx, deps, o)
}

func (p Process) printErasure(r erasure.Report) error {
	title := "REDACTED"
	if r.DryRun {
		title = "FOUND"
	}
	if err := p.table(erasureRows(title, r)...); err != nil {
		return err
	}
	text := fmt.Sprintf("\nAuthor %d of tenant %d is erased: a final scan found no more data. Requested at %s by %s.\n",
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
	if _, err := fmt.Fprint(p.Stdout, text); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
