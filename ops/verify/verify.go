package verify

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Deps are the dependencies of a comparison. All sources must be available.
type Deps struct {
	status.Sources
	Fleet []projections.Projection
	Kinds func() *kinds.Set // the current kinds of the projections
}

// Options control a comparison.
type Options struct {
	Wait   time.Duration // the longest wait for lagging parts
	Limit  int           // the largest number of differences listed for each projection; all are counted
	Repair bool          // first repair differences
	DryRun bool          // with Repair: report the same, and change nothing
}

// Report is the output of `tidings verify --json`.
type Report struct {
	OK          bool         `json:"ok"`      // everything is equal, no part lags, and no DLQ has a message
	Why         []string     `json:"why"`     // one line for each reason why it is not OK
	DryRun      bool         `json:"dry_run"` // --repair changed nothing
	Projections []Projection `json:"projections"`
	Streams     []Stream     `json:"streams"`
	Stopped     []string     `json:"stopped"`      // partitions whose streams the relays refuse, and consumers with lost events
	Lagging     []string     `json:"lagging"`      // parts that still lagged after the wait
	DeadLetters []string     `json:"dead_letters"` // listed separately, because their effects are known to be missing
}

// Projection is the comparison of one projection with the truth.
type Projection struct {
	Projection string `json:"projection"`
	Checked    int64  `json:"checked"` // rows compared
	// Repaired is the number of pairs, accounts, threads and histories that --repair set to the
	// truth, or would set with --dry-run.
	Repaired  int64      `json:"repaired"`
	Left      int64      `json:"left"`             // the number of differing entities that --repair leaves
	Repair    []Repaired `json:"repair,omitempty"` // the first repaired and left entities
	Different int64      `json:"different"`        // the number of differences
	// Explained has the numbers of differences whose aggregate is in a DLQ or waits in the outbox,
	// by the reason.
	Explained   map[string]int64         `json:"explained,omitempty"`
	Differences []projections.Difference `json:"differences"` // the first differences
}

// Run waits for lagging parts, and compares every projection and every stream with the truth. It
// changes nothing without o.Repair. If writes continue meanwhile, it compares states of different
// moments.
func Run(ctx context.Context, d Deps, o Options) (Report, error) {
	v := Report{DryRun: o.DryRun, Why: []string{}, Stopped: []string{}, Lagging: []string{}, DeadLetters: []string{}}
	st, err := status.Await(ctx, d.Sources, o.Wait, status.State.Settled)
	if err != nil {
		return v, err
	}
	v.Stopped = append(v.Stopped, st.Stopped()...)
	v.Lagging, v.DeadLetters = append(v.Lagging, st.Lagging()...), append(v.DeadLetters, st.DeadLetters()...)
	for _, c := range d.Fleet {
		r, err := d.verifyProjection(ctx, c, o.Limit, func() ([]Repaired, error) {
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
	for _, check := range []func(context.Context, *pgxpool.Pool, int) (Projection, error){verifyThreads, verifyShelved} {
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

// verifyProjection calls repairFirst, and then compares a projection with the truth. It counts the
// differences that a DLQ or the outbox explains.
func (d Deps) verifyProjection(ctx context.Context, p projections.Projection, limit int,
	repairFirst func() ([]Repaired, error)) (Projection, error) {
	r := Projection{Projection: p.Name(), Differences: []projections.Difference{}, Explained: make(map[string]int64)}
	entities, err := repairFirst()
	if err != nil {
		return r, err
	}
	for _, m := range entities {
		if m.Left != "" {
			r.Left++
		} else {
			r.Repaired++
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
			return // the tenant belongs to another truth
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

// reasons returns the reasons why the installation is not OK.
func (v Report) reasons() (why []string) {
	for _, line := range v.Stopped {
		why = append(why, "stopped: "+line)
	}
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
			why = append(why, fmt.Sprintf("%s: %s, which the events on their way may explain", r.Projection, differences(left)))
		case left > 0:
			why = append(why, fmt.Sprintf("%s: %s without an explanation (run it again if others write)", r.Projection, differences(left)))
		}
	}
	for _, s := range v.Streams {
		said := func(line string) bool { return s.Trouble != "" && strings.HasSuffix(line, s.Trouble) }
		if !s.OK() && !slices.ContainsFunc(v.Stopped, said) {
			why = append(why, fmt.Sprintf("the stream %s and the outbox differ", s.Stream))
		}
	}
	return why
}

func differences(n int64) string { return words.Of(n, "difference") }

// verifyThreads checks the rules of thread settings that their tables cannot enforce. It checks the
// truth, not a projection.
func verifyThreads(ctx context.Context, truth *pgxpool.Pool, limit int) (Projection, error) {
	r := Projection{Projection: "thread versions", Differences: []projections.Difference{}}
	var err error
	r.Checked, err = store.CheckThreads(ctx, truth, func(f versioned.Flaw[event.Thread]) {
		if r.Different++; len(r.Differences) < limit {
			r.Differences = append(r.Differences, projections.Difference{Projection: r.Projection, TenantID: f.TenantID,
				Entity: fmt.Sprintf("thread %s", f.Object.PostID),
				Field:  fmt.Sprintf("version %d, %s", f.Object.Version, f.Rule), Want: f.Want, Got: f.Got})
		}
	})
	return r, err
}

// verifyShelved checks shelved threads: each comment is in one place, each shelved one has a stub,
// and of a shelved thread all comments are shelved (store.CheckShelving). It checks the truth, not
// a projection.
func verifyShelved(ctx context.Context, truth *pgxpool.Pool, limit int) (Projection, error) {
	r := Projection{Projection: "comment archive", Differences: []projections.Difference{}}
	now := catalog.New(truth, catalog.Truth, slog.New(slog.DiscardHandler))
	if err := now.Load(ctx); err != nil {
		return r, err
	}
	var err error
	r.Checked, err = store.CheckShelving(ctx, truth, now.Now(), func(f store.ShelvingFlaw) {
		if r.Different++; len(r.Differences) < limit {
			r.Differences = append(r.Differences, projections.Difference{Projection: r.Projection, TenantID: f.TenantID,
				Entity: fmt.Sprintf("%s of %s", f.Kind, f.ObjectID), Field: f.Rule, Want: "no", Got: "yes"})
		}
	})
	return r, err
}
