package cli

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/ops/verify"
)

func (p Process) verifyCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
		repair bool
		dry    bool
		wait   time.Duration
		limit  int
	)
	c := &cobra.Command{
		Use:   "verify",
		Short: "Compare the streams and every projection with the truth",
		Long: `Verify waits until every event is published and applied. Then it compares each projection with the
truth, row by row, and each partition's stream with the outbox. It also checks that the versions of
every object are contiguous. It lists each difference. The exit code is 0 only if nothing differs,
nothing lags and every DLQ is empty. Otherwise verify prints the reasons: lags, waiting outbox
messages and dead letters, how many differences these explain, and how many remain. It lists foreign
and repeated messages without counting them as differences. The rows "thread versions" and "comment
archive" check tables of the truth itself. While a stream has no leader it waits for one. If others
write meanwhile, it may report rows whose events had not arrived yet.

With --repair it first sets every lasting difference to the state of the truth, while everything
runs. The consumer waits briefly for each hundred of them. Verify repairs a large thread in slices,
and the consumer works between them. Readers see such a thread incomplete until the end, and after
an interruption until the next repair. Repair does not change aggregates in a DLQ, and only adds to
histories. For very many differences use tidings replay. For a stream that differs use tidings
repair stream. --repair --dry-run shows what the repair would change, and what would remain.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if limit < 0 {
				return &usageError{fmt.Errorf("--limit is %d: want 0 or more", limit)}
			}
			if wait < 0 {
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", wait)}
			}
			if dry && !repair {
				return &usageError{errors.New("--dry-run needs --repair")}
			}
			y, err := p.system(c.Context(), data, "verify")
			if err != nil {
				return err
			}
			defer y.close()
			v, err := verify.Run(c.Context(), y.verifying(), verify.Options{Wait: wait, Limit: limit, Repair: repair, DryRun: dry})
			if err != nil {
				return err
			}
			if asJSON {
				err = p.writeJSON(v)
			} else {
				err = p.printVerification(v)
			}
			if err == nil && !v.OK {
				return errReported
			}
			return err
		},
	}
	c.Flags().BoolVar(&repair, "repair", false, "first repair the differences")
	c.Flags().BoolVar(&dry, "dry-run", false, "with --repair: show what the command would do, and change nothing")
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for lagging relays and consumers")
	c.Flags().IntVar(&limit, "limit", 20, "list at most this many differences per projection; all are counted")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

func (p Process) printVerification(v verify.Report) error {
	rows := [][]string{{"PROJECTION", "CHECKED", "REPAIRED", "NOT REPAIRED", "DIFFERENT"}}
	mends := "Repaired"
	if v.DryRun {
		rows[0][2], mends = "TO REPAIR", "To repair, with the same command without --dry-run"
	}
	var notes, done, left []string
	for _, r := range v.Projections {
		rows = append(rows, []string{r.Projection, count(r.Checked), count(r.Mended), count(r.Left), count(r.Different)})
		for _, m := range r.Repair {
			if m.Left == "" {
				done = append(done, r.Projection+": "+m.String())
			} else {
				left = append(left, r.Projection+": "+m.String())
			}
		}
		if more := r.Mended + r.Left - int64(len(r.Repair)); more > 0 {
			done = append(done, fmt.Sprintf("%s: and %s more, repaired or not", r.Projection, count(more)))
		}
		for _, d := range r.Differences {
			notes = append(notes, d.String())
		}
		if more := r.Different - int64(len(r.Differences)); more > 0 {
			notes = append(notes, fmt.Sprintf("%s: and %s more", r.Projection, count(more)))
		}
	}
	var out strings.Builder
	out.WriteByte('\n')
	for _, s := range v.Streams {
		fmt.Fprintln(&out, s)
	}
	section := func(title string, lines []string) {
		if len(lines) > 0 {
			fmt.Fprintf(&out, "\n%s:\n", title)
			for _, line := range lines { // a difference has texts of writers
				fmt.Fprintf(&out, "  %s\n", visible(line))
			}
		}
	}
	section(mends, done)
	section("Not repaired", left)
	section("Differences", notes)
	if v.OK {
		out.WriteString("\nEverything is equal.\n")
	}
	section("NOT equal", v.Why)
	if err := p.table(rows...); err != nil {
		return err
	}
	if _, err := fmt.Fprint(p.Stdout, out.String()); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// verifying returns the dependencies of verify.
func (y *system) verifying() verify.Deps {
	return verify.Deps{Sources: y.Sources, Fleet: fleet.Projections(y.kinds.Now), Kinds: y.kinds.Now}
}
