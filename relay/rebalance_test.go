package relay

import (
	"fmt"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/testkit"
)

// awaitShares waits until exactly these relays hold all partitions, by the leases table, in shares
// that differ by at most one.
func (f *fleet) awaitShares(within time.Duration, what string, relays ...*process) {
	f.t.Helper()
	begun := time.Now()
	testkit.Eventually(f.t, what, func() (bool, error) {
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

// manyPartitions are the partitions of the tests of shares.
const manyPartitions = 8

func fairlyShared(shares map[string]int, held int, relays []*process) error {
	if held != manyPartitions || len(shares) != len(relays) {
		return fmt.Errorf("%d partitions are held: %v", held, shares)
	}
	for _, p := range relays {
		n := 0
		for owner, share := range shares {
			if p.owns(owner) {
				n = share
			}
		}
		if n < manyPartitions/len(relays) || n > (manyPartitions+len(relays)-1)/len(relays) {
			return fmt.Errorf("relay %d holds %d of %v", p.PID(), n, shares)
		}
	}
	return nil
}

// owns reports whether the process is this owner of leases.
func (p *process) owns(owner string) bool {
	return strings.Contains(owner, fmt.Sprintf("-%d-", p.PID()))
}
