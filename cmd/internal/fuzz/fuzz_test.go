package fuzz_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

func TestEveryAnswerIsTheOneThatAModelHas(t *testing.T) {
	seed, _ := testkit.Seed(t)
	fuzz(t, seed, 4_000)
}

// rounds is the number of times that a lane runs and then races.
const rounds = 3

// swept is the number of requests of a lane's last comparison.
const swept = 400

// fuzz makes the given number of requests, most of them in lanes and the others in races. With one
// seed a lane takes the same steps until its first race.
func fuzz(t *testing.T, seed uint64, requests int64) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	var beside, lanes sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	run := func(wg *sync.WaitGroup, what func() error) {
		wg.Go(func() {
			if err := what(); err != nil && ctx.Err() == nil { // otherwise another lane has failed first
				t.Error(err)
				cancel()
			}
		})
	}
	run(&beside, func() error { return r.mover.archive(ctx, r.total) })
	for _, remover := range r.mover.removers {
		run(&beside, func() error { return remover.Run(ctx) })
	}
	start := time.Now()
	all := make([]*lane, tenants)
	for i := range all {
		l := r.lane(ctx, int64(i+1), seed)
		all[i] = l
		share := max(requests/tenants-swept, 1000)
		run(&lanes, func() error {
			for round := range int64(rounds) { // the last tenth of the requests are races
				if err := l.run(func() bool { return l.requests.Load() >= share*(10*round+9)/(10*rounds) }); err != nil {
					return err
				}
				if err := l.catchUp(); err != nil {
					return err
				}
				if err := l.race(int(share / (10 * rounds * racers))); err != nil {
					return err
				}
			}
			return l.sweep()
		})
	}
	lanes.Wait()
	r.check(all, time.Since(start))
	if requests >= everyStep {
		r.checkSteps(all)
	}
}

// everyStep is a number of requests among which every step occurs.
const everyStep = 20_000

func (r *rig) checkSteps(all []*lane) {
	r.t.Helper()
	for _, s := range steps() {
		if !slices.ContainsFunc(all, func(l *lane) bool { return l.did[s.name] > 0 }) {
			r.t.Errorf("no lane took the step %q", s.name)
		}
	}
}

// check checks the database for consistency after all lanes have ended.
func (r *rig) check(all []*lane, took time.Duration) {
	r.t.Helper()
	if r.t.Failed() {
		return
	}
	for _, p := range r.fleet {
		if _, err := p.Verify(r.t.Context(), r.system, r.system, func(d projections.Difference) { r.t.Error(d) }); err != nil {
			r.t.Error(err)
		}
	}
	if _, err := store.CheckShelving(r.t.Context(), r.system, r.catalog.Now(), func(f store.ShelvingFlaw) { r.t.Error(f) }); err != nil {
		r.t.Error(err)
	}
	back := r.stores[0].ThreadsReturned() + r.stores[1].ThreadsReturned()
	if r.mover.archived.Load() == 0 || back == 0 {
		r.t.Errorf("%d threads went to the archive and %d came back", r.mover.archived.Load(), back)
	}
	did := map[string]int{}
	for _, l := range all {
		for name, n := range l.did {
			did[name] += n
		}
	}
	r.t.Logf("%d requests in %s, %d refused for a while, %d threads shelved, %d brought back: %v", r.total.Load(),
		took.Round(time.Millisecond), r.refused.Load(), r.mover.archived.Load(), back, did)
}
