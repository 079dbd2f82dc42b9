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
	"github.com/tidings/tidings/ops/verify"
)

func (p Process) verifyCommand() *cobra.Command {
	var o verify.Options
	c := p.command(command{
		use:   "verify",
		short: "Compare the streams and every projection with the truth",
		long: `Verify waits until every event is published and applied. Then it compares each projection with the
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
		name: "verify", needs: needAll, json: oneObject,
		check: func(*session, []string) error {
			if o.Limit < 0 {
				return &usageError{fmt.Errorf("--limit is %d: want 0 or more", o.Limit)}
			}
			if o.Wait < 0 {
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", o.Wait)}
			}
			if o.DryRun && !o.Repair {
				return &usageError{errors.New("--dry-run needs --repair")}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			v, err := verify.Run(ctx, s.verifying(), o)
			if err != nil {
				return nil, err
			}
			if !v.OK {
				err = errReported
			}
			return reports(v, func(w io.Writer) error { return printVerification(w, v) }), err
		},
	})
	c.Flags().BoolVar(&o.Repair, "repair", false, "first repair the differences")
	c.Flags().BoolVar(&o.DryRun, "dry-run", false, "with --repair: show what the command would do, and change nothing")
	c.Flags().DurationVar(&o.Wait, "wait", 30*time.Second, "how long to wait for lagging relays and consumers")
	c.Flags().IntVar(&o.Limit, "limit", 20, "list at most this many differences per projection; all are counted")
	return c
}

func printVerification(w io.Writer, v verify.Report) error {
	rows := [][]string{{"PROJECTION", "CHECKED", "REPAIRED", "NOT REPAIRED", "DIFFERENT"}}
	repairedTitle := "Repaired"
	if v.DryRun {
		rows[0][2], repairedTitle = "TO REPAIR", "To repair, with the same command without --dry-run"
	}
	var notes, done, left []string
	for _, r := range v.Projections {
		rows = append(rows, []string{r.Projection, count(r.Checked), count(r.Repaired), count(r.Left), count(r.Different)})
		for _, m := range r.Repair {
			if m.Left == "" {
				done = append(done, r.Projection+": "+m.String())
			} else {
				left = append(left, r.Projection+": "+m.String())
			}
		}
		if more := r.Repaired + r.Left - int64(len(r.Repair)); more > 0 {
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
	section(repairedTitle, done)
	section("Not repaired", left)
	section("Differences", notes)
	if v.OK {
		out.WriteString("\nEverything is equal.\n")
	}
	section("NOT equal", v.Why)
	if err := tableTo(w, rows...); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, out.String())
	return err
}

// verifying returns the dependencies of verify.
func (y *system) verifying() verify.Deps {
	return verify.Deps{Sources: y.Sources, Fleet: fleet.Projections(y.kinds.Now), Kinds: y.kinds.Now}
}
