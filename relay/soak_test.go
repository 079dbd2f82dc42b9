//go:build soak

package relay

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/mutants"
	"github.com/tidings/tidings/outbox"
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

// build builds this test binary with edits of its files. The sources themselves have no hooks for that.
func build(t *testing.T, edits ...mutants.Edit) (binary string) {
	t.Helper()
	root, err := mutants.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	overlay, err := mutants.Overlay(root, dir, edits)
	if err != nil {
		t.Fatal(err)
	}
	binary = filepath.Join(dir, "relay.test")
	if out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", binary,
		".").CombinedOutput(); err != nil {
		t.Fatalf("build the mutant of %s: %v\n%s", edits[0].File, err, out)
	}
	return binary
}

func doubled(d damage) bool { return d.Duplicates > 0 }

// guards are the mutants without a mechanism behind the promises. Each says how the mix detects such a relay.
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

// reuse makes the database assign again the ids of rows that a relay has published but not marked, as after a crash
// with synchronous_commit off. It returns the damage of a relay that runs binary.
func reuse(t *testing.T, binary string) damage {
	t.Helper()
	f := newFleet(t, testkit.Postgres(t))
	f.start(options{crash: crash{Step: "after ack", Signal: syscall.SIGKILL, Nth: 5}}).AwaitEnd()
	f.stop()
	f.writers.Wait()
	// The transactions were lost and ran again, with the same ids and contents but other events.
	if _, err := f.pool.Exec(t.Context(),
		`UPDATE outbox_messages SET event_id = gen_random_uuid() WHERE processed_at IS NULL`); err != nil {
		t.Fatal(err)
	}
	f.binary = binary
	p := f.start(options{})
	testkit.Eventually(t, "the relay to mark what it must not, or to stop the partition and publish the others",
		func() (bool, error) {
			stats, err := outbox.ReadStats(t.Context(), f.pool)
			return stats.Pending == 0 || strings.Contains(p.Log(), "partition stopped until its stream is repaired"), err
		})
	p.Signal(syscall.SIGTERM)
	p.AwaitEnd()
	return inspect(t, t.Context(), f.pool, f.b)
}

func TestSoakIDsThatAreHandedOutAgain(t *testing.T) {
	t.Run("stop the partition", func(t *testing.T) {
		if d := reuse(t, os.Args[0]); d.Unknown == 0 || d.Pending == 0 || d.FalseMarks > 0 || d.Duplicates > 0 || d.Unmarked > 0 {
			t.Errorf("want messages of lost rows, rows that wait for the repair, and no other damage: %+v", d)
		}
	})
	t.Run("are marked published by a relay that does not compare event_id", func(t *testing.T) {
		d := reuse(t, without(t, "a relay does not compare event_id"))
		if d.FalseMarks == 0 {
			t.Errorf("no relay noticed the lost rows: %+v", d)
		}
		t.Logf("found: %+v", d)
	})
}

// clockOf builds relays whose wall clock jumps between ten minutes ahead and ten minutes behind every second, as if
// somebody set the machine's clock. The monotonic clock continues.
func clockOf(t *testing.T) string {
	t.Helper()
	root, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	return build(t, mutants.Edit{File: filepath.Join(strings.TrimSpace(string(root)), "src/time/time.go"), Before: `	mono -= startNano
`, After: `	mono -= startNano
	if n := mono / 1e9; n > 0 {
		sec += 600 - 1200*(n%2)
	}
`})
}

var logged = regexp.MustCompile(`(?m)^time=(\S+)`)

func TestSoakARelaysClockIsMovedByTenMinutes(t *testing.T) {
	binary := clockOf(t)
	f := newFleet(t, testkit.Postgres(t))
	f.binary = binary
	a, b := f.start(options{}), f.start(options{})
	f.binary = os.Args[0]
	c := f.start(options{})
	f.awaitShares(10*time.Second, "relays to share the partitions, whatever their clocks say", a, b, c)
	f.last(5 * time.Second)
	f.awaitShares(time.Second, "them to have kept their shares", a, b, c)
	b.Signal(syscall.SIGKILL)
	f.awaitShares(3*leaseTTL, "the others to take over", a, c)
	a.Signal(syscall.SIGTERM)
	a.AwaitEnd()
	f.awaitTakeover()
	f.check()
	var off time.Duration // the largest observed error of the clock
	for _, m := range logged.FindAllStringSubmatch(a.Log(), -1) {
		at, err := time.Parse(time.RFC3339, m[1])
		if err != nil {
			t.Fatal(err)
		}
		off = max(off, time.Since(at).Abs())
	}
	if off < 9*time.Minute {
		t.Errorf("the clock was off by %s at most: it was not moved", off)
	}
}
