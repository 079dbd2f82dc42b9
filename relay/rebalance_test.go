package relay

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/testkit"
)

// awaitShares waits until the leases table says that these relays, and no other, hold all partitions in shares that differ by
// at most one.
func (f *fleet) awaitShares(within time.Duration, what string, relays ...*process) {
	f.t.Helper()
	begun := time.Now()
	testkit.Eventually(f.t, within, what, func() (bool, error) {
		holders, err := lease.Holders(f.t.Context(), f.pool, LeaseKind)
		if err != nil {
			return false, err
		}
		shares := map[string]int{}
		for _, h := range holders {
			shares[h.Owner]++
		}
		if err := fairlyShared(shares, len(holders), relays); err != nil {
			return false, err
		}
		return true, nil
	})
	f.t.Logf("%s: after %s", what, time.Since(begun).Round(time.Millisecond))
}

// manyPartitions are those of the tests of shares.
const manyPartitions = 8

func fairlyShared(shares map[string]int, held int, relays []*process) error {
	if held != manyPartitions || len(shares) != len(relays) {
		return fmt.Errorf("%d partitions are held: %v", held, shares)
	}
	for _, p := range relays {
		n := 0
		for owner, share := range shares {
			if strings.Contains(owner, fmt.Sprintf("-%d-", p.cmd.Process.Pid)) {
				n = share
			}
		}
		if n < manyPartitions/len(relays) || n > (manyPartitions+len(relays)-1)/len(relays) {
			return fmt.Errorf("relay %d holds %d of %v", p.cmd.Process.Pid, n, shares)
		}
	}
	return nil
}

func TestPartitionsMoveAsRelaysComeStopAndDie(t *testing.T) {
	t.Parallel()
	const ttl = 5 * time.Second // so that within a lease and after a lease are far apart, on a busy machine too
	f := newFleet(t, testkit.Postgres(t))
	f.resize(manyPartitions)
	o := options{ttl: ttl}
	a, b := f.start(o), f.start(o)
	f.awaitShares(3*ttl, "two relays to share the partitions", a, b)

	c := f.start(o)
	f.awaitShares(3*ttl, "a third to get its share", a, b, c)

	a.signal(syscall.SIGTERM)
	f.awaitShares(ttl*3/5, "the others to take over from one that was stopped, without waiting for its leases", b, c)
	a.awaitEnd()

	d := f.start(o)
	f.awaitShares(3*ttl, "a fourth to get its share", b, c, d)
	b.signal(syscall.SIGKILL)
	f.awaitShares(3*ttl, "the others to take over from one that was killed", c, d)
	f.awaitTakeover()
	f.check()
}
