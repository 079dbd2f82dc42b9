//go:build soak

package relay

import (
	"os"
	"strconv"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/mutants"
)

const (
	seedsEnv    = "TIDINGS_SOAK_SEEDS" // number of seeds; default 20
	mixRounds   = 10                   // of faults per seed
	mutantSeeds = 10                   // seeds in which the mix must find a mutant
)

func TestSoakFaultsMixedFromManySeedsLoseAndDoubleNothing(t *testing.T) {
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
			t.Parallel() // each has its own servers, and mostly waits
			if d := runMix(t, os.Args[0], seed, mixRounds); d.any() {
				t.Errorf("seed %d: the stream differs from the committed rows: %+v", seed, d)
			}
		})
		if fixed {
			return
		}
	}
}

// without builds this test binary as a mutant of the list.
func without(t *testing.T, name string) (binary string) {
	t.Helper()
	m, err := mutants.Named(name)
	if err != nil {
		t.Fatal(err)
	}
	return build(t, m.Edits...)
}

func doubled(d damage) bool { return d.Duplicates > 0 }

// guards are the mutants without a mechanism behind the promises. Each says how the mix detects
// such a relay.
var guards = map[string]func(d damage) bool{
	"a publish does not name the stream's last sequence":          doubled,
	"rows that are being published are claimed again":             doubled,
	"claims do not go back when a transaction has ended":          func(d damage) bool { return d.BelowFloor+d.Inversions+d.Pending > 0 },
	"a floor rises past transactions above the end of a snapshot": tooHigh,
	"a floor rises while older transactions run":                  tooHigh,
	"a foreign message is taken for one of ours":                  damage.any,
	"a partition does not wait for those before it":               func(d damage) bool { return d.Duplicates+d.Inversions > 0 },
}

// tooHigh reports the damage of a floor that has risen above a pending row.
func tooHigh(d damage) bool { return d.BelowFloor > 0 && d.Inversions+d.Pending > 0 }

func TestSoakTheMixFindsARelayWithoutItsGuards(t *testing.T) {
	for name, found := range guards {
		t.Run(name, func(t *testing.T) {
			binary := without(t, name)
			for n := range mutantSeeds {
				seed, fixed := testkit.Seed(t)
				var d damage
				t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { d = runMix(t, binary, seed, mixRounds) })
				if found(d) {
					t.Logf("found with seed %d, number %d: %+v", seed, n+1, d)
					return
				}
				if fixed || t.Failed() {
					break
				}
			}
			t.Error("no seed found it")
		})
	}
}

func TestSoakARelayThatDoesNotCompareTheStoredTailPublishesAgainWhatTheDatabaseForgot(t *testing.T) {
	d := loseMarks(t, without(t, "a relay does not compare the stored tail"))
	if !doubled(d) {
		t.Errorf("no event was duplicated: %+v", d)
	}
	t.Logf("found: %+v", d)
}

func TestSoakIDsThatAreHandedOutAgain(t *testing.T) {
	t.Run("stop the partition", handedOutAgain)
	t.Run("are marked published by a relay that does not compare event_id", func(t *testing.T) {
		d := reuse(t, without(t, "a relay does not compare event_id"))
		if d.FalseMarks == 0 {
			t.Errorf("no relay noticed the lost rows: %+v", d)
		}
		t.Logf("found: %+v", d)
	})
}
