package verify

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/status"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/versioned"
)

// Deps are what is compared. None of the sources may be away.
type Deps struct {
	status.Sources
	Fleet []projections.Projection
	Kinds func() *kinds.Set // in force for the projections
}

// Options say how to compare.
type Options struct {
	Wait   time.Duration // for what lags
	Limit  int           // differences to name for each projection; all are counted
	Repair bool          // first mend what differs
	DryRun bool          // with Repair: mend nothing, and say the same
}

// Report is what `tidings verify --json` prints.
type Report struct {
	OK          bool         `json:"ok"`      // everything is equal, and nothing lags or is in a DLQ
	Why         []string     `json:"why"`     // it is not, a line for each reason
	DryRun      bool         `json:"dry_run"` // --repair mended nothing
	Projections []Projection `json:"projections"`
	Streams     []Stream     `json:"streams"`
	Lagging     []string     `json:"lagging"`      // what had not arrived everywhere when the wait was over
	DeadLetters []string     `json:"dead_letters"` // listed apart: they are known to be missing
}

// Projection is the comparison of one projection with the truth.
type Projection struct {
	Projection  string                   `json:"projection"`
	Checked     int64                    `json:"checked"`             // rows compared
	Mended      int64                    `json:"mended"`              // pairs, accounts, threads and histories that --repair brought to the truth, or with --dry-run would bring
	Left        int64                    `json:"left"`                // those that differ and that it leaves
	Repair      []Mended                 `json:"repair,omitempty"`    // the first of both
	Different   int64                    `json:"different"`           // differences found
	Explained   map[string]int64         `json:"explained,omitempty"` // those of them whose aggregate is in a DLQ or waits in the outbox, by which
	Differences []projections.Difference `json:"differences"`         // the first of them
}

// Run waits for what lags, and compares every projection and every stream with the truth. It changes nothing without o.Repair. While writes go on the
// comparison is of two moments.
func Run(ctx context.Context, d Deps, o Options) (Report, error) {
	v := Report{DryRun: o.DryRun, Why: []string{}, Lagging: []string{}, DeadLetters: []string{}}
	st, err := status.Await(ctx, d.Sources, o.Wait, status.State.Settled)
	if err != nil {
		return v, err
	}
	v.Lagging, v.DeadLetters = append(v.Lagging, st.Lagging()...), append(v.DeadLetters, st.DeadLetters()...)
	for _, c := range d.Fleet {
		r, err := d.verifyProjection(ctx, c, o.Limit, func() ([]Mended, error) {
			if !o.Repair {
				return nil, nil
			}
			return Repair(ctx, d, c, o.Wait, o.DryRun)
		})
		if err != nil {
			return v, err
		}
		v.Projections = append(v.Projections, r)
	}
	for _, check := range []func(context.Context, *pgxpool.Pool, int) (Projection, error){verifyThreads, verifyArchive} {
		r, err := check(ctx, d.Truth, o.Limit)
		if err != nil {
			return v, err
		}
		v.Projections = append(v.Projections, r)
	}
	if v.Streams, err = d.verifyStreams(ctx, max(o.Wait, status.Patience)); err != nil {
		return v, err
	}
	v.Why = append(v.Why, v.reasons()...)
	v.OK = len(v.Why) == 0
	return v, nil
}

// verifyProjection compares a projection with the truth once mend has been, and says which differences a DLQ or the outbox explains.
func (d Deps) verifyProjection(ctx context.Context, p projections.Projection, limit int, mend func() ([]Mended, error)) (Projection, error) {
	r := Projection{Projection: p.Name(), Differences: []projections.Difference{}, Explained: make(map[string]int64)}
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
	ours, err := cells.Read(ctx, d.Projections, d.Broker.Stream)
	if err != nil {
		return r, err
	}
	facts := make(map[string]projections.Parked)
	if facts[whyDead], err = outbox.Dead(ctx, d.Truth); err == nil {
		facts[whyWaiting], err = outbox.Waiting(ctx, d.Truth)
	}
	if err == nil {
		facts[whyParked], err = consumers.AllParked(ctx, d.Projections, p.Name())
	}
	if err != nil {
		return r, err
	}
	r.Checked, err = p.Verify(ctx, d.Truth, d.Projections, func(diff projections.Difference) {
		if !ours.Has(diff.TenantID) {
			return // another truth has it
		}
		if r.Different++; len(r.Differences) < limit {
			r.Differences = append(r.Differences, diff)
		}
		if why := d.explained(diff.Key, facts); why != "" {
			r.Explained[why]++
		}
	})
	if err != nil {
		return r, fmt.Errorf("verify %s: %w", p.Name(), err)
	}
	return r, nil
}

// reasons says why not everything is equal.
func (v Report) reasons() (why []string) {
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
		if !s.OK() {
			why = append(why, fmt.Sprintf("the stream %s and the outbox differ", s.Stream))
		}
	}
	return why
}

func differences(n int64) string { return words.Of(n, "difference") }

// verifyThreads checks what the tables of thread settings cannot hold by themselves. It is no projection: the truth is what it looks at.
func verifyThreads(ctx context.Context, truth *pgxpool.Pool, limit int) (Projection, error) {
	r := Projection{Projection: "thread versions", Differences: []projections.Difference{}}
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
func verifyArchive(ctx context.Context, truth *pgxpool.Pool, limit int) (Projection, error) {
	r := Projection{Projection: "comment archive", Differences: []projections.Difference{}}
	now := kinds.NewCatalog(truth, kinds.Truth, slog.New(slog.DiscardHandler))
	if err := now.Load(ctx); err != nil {
		return r, err
	}
	var err error
	r.Checked, err = store.CheckArchive(ctx, truth, now.Now(), func(f store.ArchiveFlaw) {
		if r.Different++; len(r.Differences) < limit {
			r.Differences = append(r.Differences, projections.Difference{Projection: r.Projection, TenantID: f.TenantID, Entity: fmt.Sprintf("%s of %d", f.Kind, f.ObjectID),
				Field: f.Rule, Want: "no", Got: "yes"})
		}
	})
	return r, err
}
