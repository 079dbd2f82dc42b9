package cli

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/internal/verify"
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
		Long: `Verify waits until every event has been published and applied, then compares each projection with the truth, row by row, and
each partition's stream with the outbox, and looks whether the versions of every object follow each other. It names each difference. The exit code is 0 only if everything is equal, nothing lags and no
DLQ has anything. Otherwise it says why: what lags, waits in the outbox or is in a DLQ, how many differences that explains, and how many are left. Messages that no relay wrote, or that repeat an event, are listed and are
no difference. While a stream has no leader it waits for one. While writes go on the comparison is of two moments, and may name what was just on its way.

With --repair it first brings every difference that stays to what the truth says, while everything runs. The consumer waits for each
hundred of them: moments. A large thread is made anew in slices, between which the consumer goes on; readers see it incomplete until its end, and an interruption leaves it so until the next repair. Only
objects of kinds without threads are made in one piece. What belongs to an aggregate in a DLQ is left alone, and histories are only added to. A projection with very many
differences is better built anew (tidings replay); a stream that differs is for tidings repair stream. --repair --dry-run says exactly what --repair would
mend and what it would leave, and changes nothing.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if limit < 0 {
				return &usageError{fmt.Errorf("--limit is %d: want 0 or more", limit)}
			}
			if wait < 0 {
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", wait)}
			}
			if dry && !repair {
				return &usageError{errors.New("--dry-run goes with --repair")}
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
	c.Flags().BoolVar(&repair, "repair", false, "first mend what differs")
	c.Flags().BoolVar(&dry, "dry-run", false, "with --repair: say what the command would do, and change nothing")
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for what lags")
	c.Flags().IntVar(&limit, "limit", 20, "differences at most that are named, of each projection; all are counted")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

func (p Process) printVerification(v verify.Report) error {
	rows := [][]string{{"PROJECTION", "CHECKED", "MENDED", "LEFT", "DIFFERENT"}}
	mends := "Mended"
	if v.DryRun {
		rows[0][2], mends = "TO MEND", "To mend, by the same command without --dry-run"
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
			done = append(done, fmt.Sprintf("%s: and %s more, of those that are left too", r.Projection, count(more)))
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
			fmt.Fprintf(&out, "\n%s:\n  %s\n", title, strings.Join(lines, "\n  "))
		}
	}
	section(mends, done)
	section("Left by --repair", left)
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

// verifying are what verify compares.
func (y *system) verifying() verify.Deps {
	return verify.Deps{Sources: y.Sources, Fleet: fleet.Projections(y.kinds.Now), Kinds: y.kinds.Now}
}
