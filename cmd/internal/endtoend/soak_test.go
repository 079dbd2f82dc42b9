//go:build soak

package endtoend_test

import (
	"os"
	"strconv"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

// seedsEnv names the variable with the number of seeds; 20 if unset.
const seedsEnv = "TIDINGS_SOAK_SEEDS"

func TestSoakWhatIsServedEqualsAModelFromManySeeds(t *testing.T) {
	count := 20
	if text := os.Getenv(seedsEnv); text != "" {
		var err error
		if count, err = strconv.Atoi(text); err != nil || count < 1 {
			t.Fatalf("%s is %q: want a number from 1", seedsEnv, text)
		}
	}
	for range count {
		seed, fixed := testkit.Seed(t)
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			property(t, seed, newPairedLine, []string{
				"kill", "kill", "kill all", "kill all", "pause", "pause", "cut", "cut", "cut", "restart", "relay", "resize", "resize",
				"resize", "replay", "replay", "replay", "kinds", "freeze", "freeze", "failover", "slow", "full", "full", "operators",
				"operators",
			})
		})
		if fixed {
			return
		}
	}
}

// TestSoakAnOrderExplainsWhatTheAPIAnswers records long histories under faults in an order of
// chance.
func TestSoakAnOrderExplainsWhatTheAPIAnswers(t *testing.T) {
	for range 10 {
		seed, fixed := testkit.Seed(t)
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			histories(t, seed, newPairedLine, func(l *line, calls func() int) {
				for range 20 {
					l.more(300, calls)
					l.historyFault(historyFaults[l.rng.IntN(len(historyFaults))])
				}
				l.more(300, calls)
			})
		})
		if fixed {
			return
		}
	}
}
