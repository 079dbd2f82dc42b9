//go:build faults

package endtoend_test

import (
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

func TestWhatIsServedEqualsAModelOfWhatWasWritten(t *testing.T) {
	seed, _ := testkit.Seed(t)
	property(t, seed, newLine, []string{"kill", "pause", "cut", "resize", "replay", "kinds"})
}

// TestWhatIsServedEqualsAModelWhateverServersDo draws what happens to servers and links, and two
// operators at once.
func TestWhatIsServedEqualsAModelWhateverServersDo(t *testing.T) {
	seed, _ := testkit.Seed(t)
	property(t, seed, newPairedLine, []string{"freeze", "failover", "slow", "full", "operators", "cut", "kill all"})
}
