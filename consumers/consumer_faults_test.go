//go:build faults

package consumers_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAnInstanceCutOffInABatchIsReplaced cuts one of two instances off in the middle of a
// transaction, without freeing its leases. Later it reconnects the instance with its old batch.
func TestAnInstanceCutOffInABatchIsReplaced(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 4)
	var victim cutter
	inBatch, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release)
	once := sync.OnceFunc(func() {
		close(inBatch)
		<-goOn
	})
	cfg := config()
	cfg.Lease.TTL = 4 * time.Second // the other instance waits for so long
	a := r.runWith(cfg, r.js, victim.pool(t, r.url), logbook{hook: func(context.Context, pgx.Tx, []event.Event) error {
		once()
		return nil
	}})
	b := r.runWith(cfg, r.js, r.system, logbook{})
	testkit.Eventually(t, "a fair share for both", func() (bool, error) {
		return a.metric(t, "tidings_consumer_partitions_held") == 2 && b.metric(t, "tidings_consumer_partitions_held") == 2, nil
	})
	want := r.flood(400)
	select {
	case <-inBatch:
	case <-time.After(30 * time.Second):
		t.Fatal("the first instance has no batch after 30 s")
	}
	victim.set(true)
	r.awaitLag(0) // by the other, once the leases have expired
	want = append(want, r.flood(100)...)
	r.awaitLag(0)
	victim.set(false)
	release()
	want = append(want, r.flood(100)...)
	testkit.Eventually(t, "a fair share for both again", func() (bool, error) {
		return a.metric(t, "tidings_consumer_partitions_held") == 2 && b.metric(t, "tidings_consumer_partitions_held") == 2, nil
	})
	want = append(want, r.flood(100)...)
	r.awaitLag(0)
	r.wantLines(want)
}

func TestAnotherStreamIsNotReadOn(t *testing.T) {
	for what, c := range map[string]struct {
		replace func(r *rig)
		why     string
	}{
		"gone":                  {func(r *rig) { r.remake(-1) }, "stream EVENTS-0 is gone"},
		"recreated and empty":   {func(r *rig) { r.remake(0) }, "was recreated"},
		"recreated and shorter": {func(r *rig) { r.remake(1) }, "was recreated"},
		"recreated and longer":  {func(r *rig) { r.remake(50) }, "was recreated"},
		"cut at its end": {func(r *rig) {
			r.exec(`UPDATE consumer_offsets SET last_processed_id = 1000 WHERE partition_key = 'EVENTS-0'`)
		}, "it has lost events"},
	} {
		for _, running := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, consumer running: %v", what, running), func(t *testing.T) {
				r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 2)
				in := r.run(r.system, logbook{})
				for v := range int64(20) {
					r.publish(follow("1", "3", v+1))
				}
				r.awaitLag(0)
				if !running {
					in.stop()
				}
				c.replace(r)
				if !running {
					in = r.run(r.system, logbook{})
				}
				r.awaitStuck(in, 1, c.why)
				r.wantFollowee("3", 20)
				l := r.lag()
				if l.Messages == 0 || l.Seconds <= 0 || !slices.Equal(l.Lost, []string{"EVENTS-0"}) {
					t.Errorf("lag %+v", l)
				}
				testkit.Eventually(t, "the gauges of the lag", func() (bool, error) {
					return in.metric(t, "tidings_consumer_lag_seconds") > 0 && in.metric(t, "tidings_consumer_lag_messages") > 0, nil
				})
				r.publish(follow("1", "20", 1)) // the other partition continues
				testkit.Eventually(t, "the other partition", func() (bool, error) { return len(r.lines()) == 21, nil })
			})
		}
	}
}

// TestABatchThatACrashTakesBackIsAppliedAgain kills PostgreSQL while it holds commits in memory.
// Commits of batches do not wait for the disk.
func TestABatchThatACrashTakesBackIsAppliedAgain(t *testing.T) {
	// a process that writes a page to disk first writes the commits of its rows
	pg := testkit.PostgresProcess(t, "bgwriter_lru_maxpages=0", "autovacuum=off")
	db := pg.DB(t)
	r := newRig(t, db, testkit.NATS(t))
	// The consumer records every 100 ms that it has reached the end. If that waited for the disk,
	// so would the batches.
	r.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$`)
	r.worker.Reset()
	pg.HoldWAL(t, db)
	cfg := config()
	cfg.Lease.TTL = 10 * time.Minute // a renewal would write the batches to disk
	in := r.runWith(cfg, r.js, r.system, logbook{})
	want := r.flood(10)
	r.awaitLag(0) // the writes of the consumer's start are on disk
	r.publish(follow("101", "102", 1))
	want = append(want, line{"101", "102", 1})
	r.awaitLag(0)
	pg.Kill(t)
	in.stop()
	pg.Restart(t)
	r.owner.Reset()
	if n := len(r.lines()); n == len(want) {
		t.Fatalf("the crash took none of %d events back", n)
	}
	r.exec(`TRUNCATE leases, lease_members`)
	r.run(r.system, logbook{})
	r.awaitLag(0)
	r.wantLines(want)
}

func TestServersThatDieLoseAndRepeatNothing(t *testing.T) {
	pg, nats := testkit.PostgresProcess(t), testkit.NATSProcess(t)
	r := newRig(t, pg.DB(t), nats)
	r.run(r.system, logbook{})
	r.run(r.system, logbook{})
	want := r.flood(100)
	pg.Kill(t)
	more := r.flood(100)
	pg.Restart(t)
	r.owner.Reset() // only the test's own connections
	want = append(want, more...)
	r.awaitLag(0)
	want = append(want, r.flood(50)...)
	nats.Kill(t)
	nats.Restart(t)
	testkit.Eventually(t, "the broker", func() (bool, error) {
		_, err := broker.ReadStream(context.Background(), r.js, r.cfg, 0)
		return err == nil, err
	})
	want = append(want, r.flood(50)...)
	r.awaitLag(0)
	r.wantLines(want)
}
