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
	"github.com/tidings/tidings/erasure"
	"github.com/tidings/tidings/internal/erase"
	"github.com/tidings/tidings/kinds"
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
		Long: `Erase removes the text and the attributes of everything that the author wrote, of every kind of children: from the truth, the outbox with its DLQ and
archive, the dead letters, the histories, the read tables, and the stream, whose files it overwrites. Tombstones remain above replies. Each child gets a
KIND.erased event, by which subscribers know what to do with their copies. Erase also removes all edges from and to the author, each with a KIND.removed
event. After every consumer has applied these, it deletes the edges from the same places.

It waits until the relay has published these events and every consumer has applied them. It ends when a scan of everything finds nothing. Meanwhile nothing
is archived, and no projection is replayed. Exit code 3 means that it waited for --wait in vain, and the output says for what. The same command continues,
also after an interruption. Exit code 3 also means that an archived file is unreadable and may contain something of the author; everything else is erased.
docs/erasure.md lists what no statement reaches, such as backups.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			switch {
			case o.TenantID <= 0 || o.AuthorID <= 0:
				return &usageError{errors.New("--tenant and --author are wanted: ids from 1")}
			case o.Wait < 0:
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", o.Wait)}
			case !store.ValidReason(o.Reason):
				return &usageError{fmt.Errorf("--reason wants at most %d bytes of UTF-8 without control characters", store.MaxReasonBytes)}
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
	c.Flags().Int64Var(&o.AuthorID, "author", 0, "whose children and edges")
	c.Flags().BoolVar(&o.DryRun, "dry-run", false, "show what the command would do, and change nothing")
	c.Flags().DurationVar(&o.Wait, "wait", 10*time.Minute, "how long to wait for the relay and the consumers, in all")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	addActor(c, &o.Actor, &o.Reason)
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}

// showErasure shows what an erasure would find now.
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
	fmt.Fprintf(w, "All of this goes for good, of author %d of tenant %d:\n", o.AuthorID, o.TenantID)
	return tableTo(w, erasureRows("FOUND", report)...)
}

// erasureRows say how much was found, or redacted, where.
func erasureRows(title string, r erasure.Report) [][]string {
	rows := [][]string{{"STORE", title}}
	for _, s := range erasure.Stores(fleet.Projections(kinds.Builtin)) {
		rows = append(rows, []string{s, count(int64(r.Counts[s]))})
	}
	return rows
}

// erase runs the erasure under the lease of the archiver's jobs, with replays kept out.
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
	deps := erase.Deps{Deps: erasure.Deps{Truth: y.Truth, Projections: y.Projections, Kinds: now, Fleet: fleet.Projections(func() *kinds.Set { return now }), JetStream: y.JetStream, Broker: y.Broker},
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
	text := fmt.Sprintf("\nAuthor %d of tenant %d is erased: a scan of everything has found nothing more. Requested at %s by %s.\n",
		r.AuthorID, r.TenantID, r.RequestedAt.Format(time.RFC3339), r.RequestedBy)
	switch {
	case r.DryRun:
		text = "\nNothing was done.\n"
	case len(r.Unread) > 0 && len(r.Waiting) == 0:
		text = fmt.Sprintf("\nNOT finished: everything else is erased, but these files may hold something of the person:\n  %s\n"+
			"Put each back from a copy, or give its export up, and run this again (docs/runbook/erase.md).\n", strings.Join(r.Unread, "\n  "))
	case !r.Done:
		text = fmt.Sprintf("\nNOT finished; run it again. It waited for %s.\n", strings.Join(r.Waiting, "; "))
	}
	if _, err := fmt.Fprint(p.Stdout, text); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
