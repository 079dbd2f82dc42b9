package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/versioned"
)

// verification is what `tidings verify --json` prints.
type verification struct {
	OK          bool             `json:"ok"`      // everything is equal, and nothing lags or is in a DLQ
	Why         []string         `json:"why"`     // it is not, a line for each reason
	DryRun      bool             `json:"dry_run"` // --repair mended nothing
	Projections []verified       `json:"projections"`
	Streams     []verifiedStream `json:"streams"`
	Lagging     []string         `json:"lagging"`      // what had not arrived everywhere when the wait was over
	DeadLetters []string         `json:"dead_letters"` // listed apart: they are known to be missing
}

// verified is the comparison of one projection with the truth.
type verified struct {
	Projection  string                   `json:"projection"`
	Checked     int64                    `json:"checked"`             // rows compared
	Mended      int64                    `json:"mended"`              // pairs, accounts, threads and histories that --repair brought to the truth, or with --dry-run would bring
	Left        int64                    `json:"left"`                // those that differ and that it leaves
	Repair      []mended                 `json:"repair,omitempty"`    // the first of both
	Different   int64                    `json:"different"`           // differences found
	Explained   map[string]int64         `json:"explained,omitempty"` // those of them whose aggregate is in a DLQ or waits in the outbox, by which
	Differences []projections.Difference `json:"differences"`         // the first of them
}

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
			v, err := y.verify(c.Context(), wait, limit, repair, dry)
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

func (y *system) verify(ctx context.Context, wait time.Duration, limit int, repair, dry bool) (verification, error) {
	v := verification{DryRun: dry, Why: []string{}, Lagging: []string{}, DeadLetters: []string{}}
	st, err := y.await(ctx, wait, systemState.settled)
	if err != nil {
		return v, err
	}
	v.Lagging, v.DeadLetters = append(v.Lagging, st.lagging()...), append(v.DeadLetters, st.deadLetters()...)
	for _, c := range fleet.Projections(y.kinds.Now) {
		r, err := y.verifyProjection(ctx, c, limit, func() ([]mended, error) {
			if !repair {
				return nil, nil
			}
			return y.mend(ctx, c, wait, dry)
		})
		if err != nil {
			return v, err
		}
		v.Projections = append(v.Projections, r)
	}
	for _, check := range []func(context.Context, *pgxpool.Pool, int) (verified, error){verifyThreads, verifyArchive} {
		r, err := check(ctx, y.truth, limit)
		if err != nil {
			return v, err
		}
		v.Projections = append(v.Projections, r)
	}
	if v.Streams, err = y.verifyStreams(ctx, max(wait, patience)); err != nil {
		return v, err
	}
	v.Why = append(v.Why, v.reasons()...)
	v.OK = len(v.Why) == 0
	return v, nil
}

// verifyProjection compares a projection with the truth once mend has been, and says which differences a DLQ or the outbox explains.
func (y *system) verifyProjection(ctx context.Context, p projections.Projection, limit int, mend func() ([]mended, error)) (verified, error) {
	r := verified{Projection: p.Name(), Differences: []projections.Difference{}, Explained: make(map[string]int64)}
	entities, err := mend()
	if err != nil {
		return r, err
	}
	for _, m := range entities {
		if m.Left != "" {
			r.Left++
		} else {
			r.Mended++
		}
	}
	r.Repair = entities[:min(len(entities), limit)]
	facts := make(map[string]projections.Parked)
	if facts[whyDead], err = outbox.Dead(ctx, y.truth); err == nil {
		facts[whyWaiting], err = outbox.Waiting(ctx, y.truth)
	}
	if err == nil {
		facts[whyParked], err = consumers.AllParked(ctx, y.projections, p.Name())
	}
	if err != nil {
		return r, err
	}
	r.Checked, err = p.Verify(ctx, y.truth, y.projections, func(d projections.Difference) {
		if r.Different++; len(r.Differences) < limit {
			r.Differences = append(r.Differences, d)
		}
		if why := y.explained(d.Key, facts); why != "" {
			r.Explained[why]++
		}
	})
	if err != nil {
		return r, fmt.Errorf("verify %s: %w", p.Name(), err)
	}
	return r, nil
}

// reasons says why not everything is equal.
func (v verification) reasons() (why []string) {
	for _, line := range v.Lagging {
		why = append(why, "on its way: "+line)
	}
	for _, line := range v.DeadLetters {
		why = append(why, "given up: "+line)
	}
	for _, r := range v.Projections {
		left := r.Different
		for _, cause := range slices.Sorted(maps.Keys(r.Explained)) {
			n := r.Explained[cause]
			why, left = append(why, fmt.Sprintf("%s: %s: %s", r.Projection, differences(n), cause)), left-n
		}
		switch {
		case left > 0 && len(v.Lagging) > 0:
			why = append(why, fmt.Sprintf("%s: %s, unless what is on its way explains them", r.Projection, differences(left)))
		case left > 0:
			why = append(why, fmt.Sprintf("%s: %s that nothing explains", r.Projection, differences(left)))
		}
	}
	for _, s := range v.Streams {
		if !s.ok() {
			why = append(why, fmt.Sprintf("the stream %s and the outbox differ", s.Stream))
		}
	}
	return why
}

func differences(n int64) string {
	if n == 1 {
		return "1 difference"
	}
	return count(n) + " differences"
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
