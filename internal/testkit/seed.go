package testkit

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// seedEnv names the variable with the seed of random tests. It repeats their choices, at other
// moments.
const seedEnv = "TIDINGS_TEST_SEED"

// Seed returns the seed of TIDINGS_TEST_SEED, or else a new one. It writes the seed to the test's
// log. fixed says that it comes from the variable.
func Seed(t testing.TB) (seed uint64, fixed bool) {
	t.Helper()
	if text := os.Getenv(seedEnv); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", seedEnv, err)
		}
		fixed = true
	} else {
		seed = rand.Uint64()
	}
	t.Logf("%s=%d", seedEnv, seed)
	return seed, fixed
}
