//go:build faults

package outbox

import (
	"context"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// A dump, or any long reader, locks the outbox. No other session waits long, and the range is archived after the reader
// ends.
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
	work := func() time.Duration {
		start := time.Now()
		appendRows(t, pool, newEvent(1, `{}`))
		if _, err := Exchange(t.Context(), pool, Round{LastSlot: 31, Limit: 10, MaxBytes: 1 << 20, MaxMessage: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		return time.Since(start)
	}
	var alone time.Duration
	for range 20 {
		alone = max(alone, work())
	}
	a := newArchive(t, pool)
	refused := make(chan struct{}, lockTries)
	a.at = func(step string) {
		if step == "lock refused" {
			refused <- struct{}{}
		}
	}
	did := free{}
	var g errgroup.Group
	g.Go(func() error { return a.Run(t.Context(), did) })
	slowest := make([]time.Duration, 8) // during each try of the archiver
	for tries := 0; tries < len(slowest); {
		slowest[tries] = max(slowest[tries], work())
		select {
		case <-refused:
			tries++
		default:
		}
	}
	// A writer and a claim may each meet the archiver's wait, which the promise bounds by 100 ms (docs/faults.md).
	bound := 2*100*time.Millisecond + alone
	if slices.Min(slowest) > bound { // a busy machine delays some of the tries, a long wait all of them
		t.Errorf("a writer and a claim waited for %s, and without the archiver for %s: want %s at most", slowest, alone, bound)
	}
	if err := dump.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err != nil || did[CountArchived] != 1 {
		t.Errorf("the run did %v, %v", did, err)
	}
}
