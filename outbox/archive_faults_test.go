//go:build faults

package outbox

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// A dump, or any long reader, locks the outbox. No other session waits long, whether it writes,
// claims or reads, and the range is archived after the dump ends.
func TestNobodyWaitsLongBesideAnArchiverThatWaitsForADump(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 100, 10*archiveDay)
	leave(t, pool, 8*archiveDay)
	dump, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dump.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := dump.Exec(t.Context(), `LOCK TABLE outbox_messages, outbox_messages_archive IN ACCESS SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	write := func() error { // and claim
		appendRows(t, pool, newEvent("1", `{}`))
		_, err := Exchange(t.Context(), pool, Round{LastSlot: 31, Limit: 10, MaxBytes: 1 << 20, MaxMessage: 1 << 20})
		return err
	}
	read := func() error {
		_, err := pool.Exec(t.Context(), `SELECT FROM outbox_messages ORDER BY id LIMIT 1`)
		return err
	}
	alone := func(work func() error) (slowest time.Duration) {
		for range 20 {
			start := time.Now()
			if err := work(); err != nil {
				t.Fatal(err)
			}
			slowest = max(slowest, time.Since(start))
		}
		return slowest
	}
	writesAlone, readsAlone := alone(write), alone(read)
	a := newArchive(t, pool)
	beside, besideReads := make(chan struct{}, lockTries), make(chan struct{}, lockTries)
	a.at = func(step string) {
		if step == "lock refused" {
			beside <- struct{}{}
			besideReads <- struct{}{}
		}
	}
	did := free{}
	var g, readers errgroup.Group
	g.Go(func() error { return a.Run(t.Context(), did) })
	// during returns the slowest work during each of the archiver's first tries.
	during := func(refused chan struct{}, work func() error) ([]time.Duration, error) {
		slowest := make([]time.Duration, 8)
		for tries := 0; tries < len(slowest); {
			start := time.Now()
			if err := work(); err != nil {
				return nil, err
			}
			slowest[tries] = max(slowest[tries], time.Since(start))
			select {
			case <-refused:
				tries++
			default:
			}
		}
		return slowest, nil
	}
	var reads []time.Duration
	readers.Go(func() (err error) { reads, err = during(besideReads, read); return err })
	writes, err := during(beside, write)
	if err := errors.Join(err, readers.Wait()); err != nil {
		t.Fatal(err)
	}
	for who, took := range map[string]struct {
		slowest []time.Duration
		alone   time.Duration
	}{"a writer and a claim": {writes, writesAlone}, "a reader": {reads, readsAlone}} {
		// The promise bounds each wait for the archiver by 100 ms (docs/faults.md). A writer and a
		// claim may both wait.
		bound := 2*100*time.Millisecond + took.alone
		if slices.Min(took.slowest) > bound { // a busy machine delays some of the tries, a long wait all of them
			t.Errorf("%s waited for %s, and without the archiver for %s: want %s at most", who, took.slowest, took.alone, bound)
		}
	}
	if err := dump.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err != nil || did[CountArchived] != 1 {
		t.Errorf("the run did %v, %v", did, err)
	}
}
