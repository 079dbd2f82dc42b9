//go:build soak

package relay

import (
	"testing"
	"time"
)

// TestSoakOnThreeBrokersFaultsOneAfterAnother runs realistically long faults in a random order.
func TestSoakOnThreeBrokersFaultsOneAfterAnother(t *testing.T) {
	f := newClusterFleet(t)
	faults := []func(){
		func() { f.killLeader() },
		func() { f.freezeLeader(15 * time.Second) },
		func() { f.stepDown(30) },
		func() { f.loseMajority(false, 15*time.Second) },
		func() { f.loseMajority(true, 15*time.Second) },
		func() { f.cutOff(45 * time.Second) },
	}
	for _, i := range seeded(t).Perm(len(faults)) {
		faults[i]()
	}
	f.check()
}
