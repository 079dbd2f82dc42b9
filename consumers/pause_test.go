package consumers_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/testkit"
)

func TestAPausedConsumerTakesNothingUntilItIsResumed(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 2)
	inBatch, goOn := make(chan struct{}), make(chan struct{})
	begun := sync.OnceFunc(func() { close(inBatch) })
	a := r.run(r.system, logbook{hook: func(ctx context.Context, tx pgx.Tx, _ []event.Event) error {
		begun()
		for {
			select {
			case <-goOn:
				return ctx.Err()
			default: // PostgreSQL would end an idle transaction
				if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.05)`); err != nil {
					return err
				}
			}
		}
	}})
	r.publish(follow("1", "3", 1))
	<-inBatch
	pause := func(want bool) {
		t.Helper()
		changed, err := consumers.Pause(t.Context(), r.system, name, consumers.Paused{Actor: "ann", Reason: "to look"})
		if err != nil || changed != want {
			t.Errorf("pause: %v, %v", changed, err)
		}
	}
	pause(true)
	pause(false)
	paused := func(in *instance, want float64) {
		t.Helper()
		testkit.Eventually(t, "the pause to be noticed",
			func() (bool, error) { return in.metric(t, "tidings_consumer_paused") == want, nil })
	}
	paused(a, 1)
	r.publish(follow("1", "3", 2))
	close(goOn) // the batch in hand is finished
	r.awaitLag(1)
	r.wantLines([]line{{"1", "3", 1}})

	// The pause also holds for another instance and after a restart, and both are ready.
	b := r.run(r.system, logbook{})
	paused(b, 1)
	testkit.Eventually(t, "both to have leases", func() (bool, error) {
		holders, err := lease.Holders(t.Context(), r.system, name)
		owners := map[string]bool{}
		for _, h := range holders {
			owners[h.Owner] = true
		}
		return len(owners) == 2, err
	})
	for _, in := range []*instance{a, b} {
		if err := in.Ready(t.Context()); err != nil {
			t.Errorf("ready: %v", err)
		}
	}
	a.stop()
	if l := r.lag(); l.Messages != 1 {
		t.Errorf("lag %+v", l)
	}
	all, err := consumers.Pauses(t.Context(), r.system)
	if err != nil || len(all) != 1 || all[name].Actor != "ann" || all[name].Reason != "to look" || time.Since(all[name].At) > time.Minute {
		t.Errorf("pauses: %+v, %v", all, err)
	}
	for _, want := range []bool{true, false} {
		if was, err := consumers.Resume(t.Context(), r.system, name); err != nil || was != want {
			t.Errorf("resume: %v, %v", was, err)
		}
	}
	paused(b, 0)
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}})
}
