//go:build faults

package cli

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/tidings/tidings/internal/load"
	"github.com/tidings/tidings/internal/testkit"
)

func TestLoadSurvivesKills(t *testing.T) {
	t.Parallel()
	d := newDevWithPostgres(t)
	d.start(t)
	spec := followGraph(150, 1_600, rand.Uint64())
	t.Logf("seed %d", spec.Seed)
	quarter := spec.Edges / 4
	g, l := d.startGate(t, quarter+quarter/2, load.Config{Concurrency: 32, RetryFor: startWithin})
	loaded := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { loaded <- l.Run(ctx, followKind, sequence(spec)) }()
	for i := range int64(3) {
		testkit.Eventually(t, "a quarter more is loaded",
			func() (bool, error) { return l.Stats().Done() >= quarter*(i+1), nil })
		d.kill(t)
		g.raise(quarter*(i+2) + quarter/2)
		d.start(t)
	}
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Done() != spec.Edges || s.Retried == 0 {
		t.Errorf("%+v, want %d edges, some retried", s, spec.Edges)
	}
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)
}
