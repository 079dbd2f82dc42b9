//go:build soak

package endtoend_test

import (
	"os"
	"strconv"
	"testing"
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
		seed, fixed := seedFromEnv(t)
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			property(t, seed, []string{
				"kill", "kill", "kill all", "kill all", "pause", "pause", "cut", "cut", "cut", "restart", "relay", "resize", "resize",
				"resize", "replay", "replay", "replay", "kinds",
			})
		})
		if fixed {
			return
		}
	}
}
