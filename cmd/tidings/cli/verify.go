package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/versioned"
)

// verification is what `tidings verify --json` prints.
type verification struct {
	OK          bool             `json:"ok"`
	Projections []verified       `json:"projections"`
	Streams     []verifiedStream `json:"streams"`
	Lagging     []string         `json:"lagging"`      // what had not arrived everywhere when the wait was over
	DeadLetters []string         `json:"dead_letters"` // listed apart: they are known to be missing
}

// verified is the comparison of one projection with the truth.
type verified struct {
	Projection  string                   `json:"projection"`
	Checked     int64                    `json:"checked"`     // rows compared
	Mended      int64                    `json:"mended"`      // pairs, accounts, threads and histories that --repair brought to the truth
	Different   int64                    `json:"different"`   // differences found
	Differences []projections.Difference `json:"differences"` // the first of them
}

func (p Process) verifyCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
		repair bool
		wait   time.Duration
		limit  int
	)
	c := &cobra.Command{
		Use:   "verify",
		Short: "Compare the streams and every projection with the truth",
		Long: `Verify waits until every event has been published and applied, then compares each projection with the truth, row by row, and
each partition's stream with the outbox, and looks whether the versions of every object follow each other. It names each difference. The exit code is 0 only if everything is equal and nothing lags. What sits in a
DLQ is listed apart, and so are messages that no relay wrote, or that repeat an event. While a stream has no leader it waits for one. While writes go on the comparison is of two moments, and may name what was just on its way.

With --repair it first brings every difference that stays to what the truth says, while everything runs. The consumer waits for each
hundred of them: moments, but as long as the threads concerned take to write where these are large. What belongs to an aggregate in a DLQ is left alone, and histories are only added to. A projection with very many
differences is better built anew (tidings replay); a stream that differs is for tidings repair stream.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if limit < 0 {
				return &usageError{fmt.Errorf("--limit is %d: want 0 or more", limit)}
			}
			if wait < 0 {
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", wait)}
			}
			y, err := p.system(c.Context(), data, "verify")
			if err != nil {
				return err
			}
			defer y.close()
			v, err := y.verify(c.Context(), wait, limit, repair)
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
	c.Flags().DurationVar(&wait, "wait", 30*time.Second, "how long to wait for what lags")
	c.Flags().IntVar(&limit, "limit", 20, "differences to name for each projection; all are counted")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

func (y *system) verify(ctx context.Context, wait time.Duration, limit int, repair bool) (verification, error) {
	v := verification{OK: true, Lagging: []string{}, DeadLetters: []string{}}
	st, err := y.await(ctx, wait, systemState.settled)
	if err != nil {
		return v, err
	}
	v.Lagging, v.DeadLetters = append(v.Lagging, st.lagging()...), append(v.DeadLetters, st.deadLetters()...)
	v.OK = len(v.Lagging) == 0
	for _, c := range fleet.Projections(y.kinds.Now) {
		r := verified{Projection: c.Name(), Differences: []projections.Difference{}}
		if repair {
			if r.Mended, err = y.mend(ctx, c, wait); err != nil {
				return v, err
			}
		}
		r.Checked, err = c.Verify(ctx, y.truth, y.projections, func(d projections.Difference) {
			r.Different++
			if len(r.Differences) < limit {
				r.Differences = append(r.Differences, d)
			}
		})
		if err != nil {
			return v, fmt.Errorf("verify %s: %w", c.Name(), err)
		}
		v.OK = v.OK && r.Different == 0
		v.Projections = append(v.Projections, r)
	}
	for _, check := range []func(context.Context, *pgxpool.Pool, int) (verified, error){verifyThreads, verifyArchive} {
		r, err := check(ctx, y.truth, limit)
		if err != nil {
			return v, err
		}
		v.OK = v.OK && r.Different == 0
		v.Projections = append(v.Projections, r)
	}
	if v.Streams, err = y.verifyStreams(ctx, max(wait, patience)); err != nil {
		return v, err
	}
	for _, s := range v.Streams {
		v.OK = v.OK && s.ok()
	}
	return v, nil
}

// verifyThreads checks what the tables of thread settings cannot hold by themselves. It is no projection: the truth is what it looks at.
func verifyThreads(ctx context.Context, truth *pgxpool.Pool, limit int) (verified, error) {
	r := verified{Projection: "thread versions", Differences: []projections.Difference{}}
	var err error
	r.Checked, err = store.CheckThreads(ctx, truth, func(f versioned.Flaw[event.Thread]) {
		if r.Different++; len(r.Differences) < limit {
			r.Differences = append(r.Differences, projections.Difference{Projection: r.Projection, TenantID: f.TenantID, Entity: fmt.Sprintf("thread %d", f.Object.PostID),
				Field: fmt.Sprintf("version %d, %s", f.Object.Version, f.Rule), Want: f.Want, Got: f.Got})
		}
	})
	return r, err
}

// verifyArchive checks that each comment is in one place, and that writers are told of all that is archived. Neither is this a projection.
func verifyArchive(ctx context.Context, truth *pgxpool.Pool, limit int) (verified, error) {
	r := verified{Projection: "comment archive", Differences: []projections.Difference{}}
	now, err := truthKinds(ctx, truth)
	if err != nil {
		return r, err
	}
	r.Checked, err = store.CheckArchive(ctx, truth, now, func(f store.ArchiveFlaw) {
		if r.Different++; len(r.Differences) < limit {
			r.Differences = append(r.Differences, projections.Difference{Projection: r.Projection, TenantID: f.TenantID, Entity: fmt.Sprintf("%s of %d", f.Kind, f.ObjectID),
				Field: f.Rule, Want: "no", Got: "yes"})
		}
	})
	return r, err
}

func (p Process) printVerification(v verification) error {
	rows := [][]string{{"PROJECTION", "CHECKED", "MENDED", "DIFFERENT"}}
	var notes []string
	for _, r := range v.Projections {
		rows = append(rows, []string{r.Projection, count(r.Checked), count(r.Mended), count(r.Different)})
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
	section("Differences", notes)
	section("Not arrived everywhere", v.Lagging)
	section("Dead letters", v.DeadLetters)
	if v.OK {
		out.WriteString("\nEverything is equal.\n")
	} else {
		out.WriteString("\nNOT equal.\n")
	}
	if err := p.table(rows...); err != nil {
		return err
	}
	if _, err := fmt.Fprint(p.Stdout, out.String()); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
