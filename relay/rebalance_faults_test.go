//go:build faults

package relay

import (
	"context"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/internal/broker"

	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestPartitionsMoveAsRelaysComeStopAndDie(t *testing.T) {
	t.Parallel()
	const ttl = 5 * time.Second // so that the leases of one that was stopped have not expired at its end, even on a busy machine
	f := newFleet(t, testkit.Postgres(t))
	f.resize(manyPartitions)
	o := options{ttl: ttl}
	a, b := f.start(o), f.start(o)
	f.awaitShares(time.Minute, "two relays to share the partitions", a, b)

	c := f.start(o)
	f.awaitShares(time.Minute, "a third to get its share", a, b, c)

	a.Signal(syscall.SIGTERM)
	a.AwaitEnd()
	holders, err := lease.Holders(t.Context(), f.pool, LeaseKind)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range holders {
		if a.owns(h.Owner) {
			t.Errorf("the relay that was stopped leaves the lease of partition %d to expire", h.Partition)
		}
	}
	f.awaitShares(time.Minute, "the others to take over from one that was stopped", b, c)

	d := f.start(o)
	f.awaitShares(time.Minute, "a fourth to get its share", b, c, d)
	b.Signal(syscall.SIGKILL)
	f.awaitShares(time.Minute, "the others to take over from one that was killed", c, d)
	f.awaitTakeover()
	f.check()
}

// TestARelayThatCannotReachAStreamsLeaderLeavesItToAnother: one relay fails to reach the leader of
// one of its streams, while the other leaders answer.
func TestARelayThatCannotReachAStreamsLeaderLeavesItToAnother(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	if _, err := outbox.Resize(t.Context(), pool, 4); err != nil {
		t.Fatal(err)
	}
	cut, other := newRelay(t, pool, b), newRelay(t, pool, b)
	for _, r := range []*Relay{cut, other} {
		r.cfg.Lease.TTL = 5 * time.Second // a refusal needs another live member, even on a busy machine
	}
	start(t, other)
	holders := func() map[int]string {
		held, err := lease.Holders(t.Context(), pool, LeaseKind)
		if err != nil {
			t.Fatal(err)
		}
		of := map[int]string{}
		for _, h := range held {
			of[h.Partition] = h.Owner
		}
		return of
	}
	testkit.Eventually(t, "the new partitions to open", func() (bool, error) { return len(holders()) == 4, nil })

	w := connected(t, cut)
	var err error
	if w.group, err = lease.New(cut.cfg.Lease, pool, LeaseKind, cut.owner, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	w.group.Share([]int{1, 2, 3, 4})
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { _ = w.group.Run(ctx) }) // returns nil
	defer group.Wait()
	defer stop()
	var mine []int
	testkit.Eventually(t, "the partitions to be shared", func() (bool, error) {
		mine = w.group.Held()
		return len(mine) == 2, nil
	})
	lost := mine[0]
	w.p.Number = lost
	answers := newWriter(w.session, outbox.Partition{Number: mine[1]})
	w.writers.Start(ctx, answers.p.Number, answers, func(ctx context.Context) { <-ctx.Done() })
	for range refuseAfter {
		answers.heard.Store(new(time.Now()))
		if err := w.fail(ctx, &brokerError{stageCatchUp, broker.ErrNoLeader}); err != nil {
			t.Fatalf("the relay gave up the others too: %v", err)
		}
	}
	testkit.Eventually(t, "the other relay to take it, and to leave another one", func() (bool, error) {
		mine = w.group.Held()
		return holders()[lost] == other.owner && len(mine) == 2 && !slices.Contains(mine, lost), nil
	})
}

// TestARelayPublishesAgainAfterItsLeaseRowsAreGone: an owner of the tables deletes them. If they
// cannot be inserted again, the relay is not ready and says why.
func TestARelayPublishesAgainAfterItsLeaseRowsAreGone(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	r := newRelay(t, pool, testkit.NATS(t))
	r.cfg.Lease.TTL = 3 * time.Second
	start(t, r)
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)

	if _, err := owner.Exec(t.Context(), `DELETE FROM leases`); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the row to be there again", func() (bool, error) {
		held, err := lease.Holders(t.Context(), pool, LeaseKind)
		return len(held) == 1 && held[0].Owner == r.owner, err
	})
	insertRow(t, pool, 1, "updated")
	awaitDrained(t, t.Context(), pool, time.Minute)
	testkit.Eventually(t, "the relay to be ready", func() (bool, error) { return r.Ready(t.Context()) == nil, nil })

	if _, err := owner.Exec(t.Context(), `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no leases today'; END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON leases FOR EACH STATEMENT EXECUTE FUNCTION refuse();
		DELETE FROM leases`); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the relay to say why it publishes nothing", func() (bool, error) {
		err := r.Ready(t.Context())
		return err != nil && strings.Contains(err.Error(), "no leases today") &&
			testutil.ToFloat64(r.metrics.errors.WithLabelValues(stageLease)) > 0, nil
	})
	if _, err := owner.Exec(t.Context(), `DROP TRIGGER refuse ON leases`); err != nil {
		t.Fatal(err)
	}
	insertRow(t, pool, 1, "updated")
	awaitDrained(t, t.Context(), pool, time.Minute)
	testkit.Eventually(t, "the relay to be ready again", func() (bool, error) { return r.Ready(t.Context()) == nil, nil })
}
