//go:build soak

package relay

import (
	"encoding/json"
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
		seed, fixed := seedFromEnv(t)
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

// overlay builds this test binary with one replacement of old by new in one file, where old must occur exactly once.
// The sources themselves have no hooks for that.
func overlay(t *testing.T, file string, edits ...[2]string) (binary string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	mutated := string(text)
	for _, e := range edits {
		if n := strings.Count(mutated, e[0]); n != 1 {
			t.Fatalf("%s has this %d times, not once: update the mutant:\n%s", file, n, e[0])
		}
		mutated = strings.Replace(mutated, e[0], e[1], 1)
	}
	dir := t.TempDir()
	copied, list, binary := filepath.Join(dir, "mutated.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "relay.test")
	original, err := filepath.Abs(file)
	if err != nil {
		t.Fatal(err)
	}
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{original: copied}})
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{copied: []byte(mutated), list: replace} {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", list, "-o", binary,
		".").CombinedOutput(); err != nil {
		t.Fatalf("build the mutant of %s: %v\n%s", file, err, out)
	}
	return binary
}

func doubled(d damage) bool { return d.Duplicates > 0 }

// guards are the mechanisms behind the promises. found says how the mix detects a relay without one.
var guards = map[string]struct {
	file  string
	edit  [2]string
	found func(d damage) bool
}{
	"a publish does not name the stream's last sequence": {"publish.go",
		[2]string{`	m.Header[headerExpectLastSequence] = []string{strconv.FormatUint(tail, 10)}
`, `	_ = strconv.FormatUint(tail, 10)
`}, doubled},
	"rows that are being published are claimed again": {"../outbox/claim.go",
		[2]string{`AND (id > @in_flight_to::bigint OR`, `AND (id > @in_flight_to::bigint OR true OR`}, doubled},
	"claims do not go back when a transaction has ended": {"../outbox/claim.go",
		[2]string{`WHERE pg_visible_in_snapshot(xid::text::xid8, pg_current_snapshot())`,
			`WHERE xid = 0`}, func(d damage) bool { return d.BelowFloor+d.Inversions+d.Pending > 0 }},
	"a floor rises past transactions above the end of a snapshot": {"../outbox/mark.go", [2]string{`pg_current_xact_id()::text::bigint`,
		`pg_snapshot_xmax(pg_current_snapshot())::text::bigint`}, tooHigh},
	"a floor rises while older transactions run": {"horizon.go",
		[2]string{`h.below(kept[0].XID) == 0`, `h.below(kept[0].XID) >= 0`}, tooHigh},
	"a foreign message is taken for one of ours": {"catchup.go", [2]string{`if !event.Ours(m.Header) {`, `if false {`}, damage.any},
	"a partition does not wait for those before it": {"../outbox/partitions.go",
		[2]string{`!p.Closed && !slices.ContainsFunc(p.After, func(n int) bool { return open[n] })`,
			`!p.Closed && !slices.ContainsFunc(p.After, func(n int) bool { return false && open[n] })`},
		func(d damage) bool { return d.Duplicates+d.Inversions > 0 }},
}

// tooHigh reports the damage of a floor that has risen above a pending row.
func tooHigh(d damage) bool { return d.BelowFloor > 0 && d.Inversions+d.Pending > 0 }

func TestSoakTheMixFindsARelayWithoutItsGuards(t *testing.T) {
	for name, guard := range guards {
		t.Run(name, func(t *testing.T) {
			binary := overlay(t, guard.file, guard.edit)
			for n := range mutantSeeds {
				seed, fixed := seedFromEnv(t)
				var d damage
				t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { d = runMix(t, binary, seed, mixRounds) })
				if guard.found(d) {
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
	d := loseMarks(t, overlay(t, "writer.go", [2]string{`	case c.Tail != w.stored:
`, `	case false:
`}))
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
	f.start(options{crash: crash{Step: "after ack", Signal: syscall.SIGKILL, Nth: 5}}).awaitEnd()
	f.stop()
	f.writers.Wait()
	// The transactions were lost and ran again, with the same ids and contents but other events.
	if _, err := f.pool.Exec(t.Context(),
		`UPDATE outbox_messages SET event_id = gen_random_uuid() WHERE processed_at IS NULL`); err != nil {
		t.Fatal(err)
	}
	f.binary = binary
	p := f.start(options{})
	testkit.Eventually(t, 30*time.Second, "the relay to mark what it must not, or to stop the partition and publish the others",
		func() (bool, error) {
			stats, err := outbox.ReadStats(t.Context(), f.pool)
			return stats.Pending == 0 || strings.Contains(p.log.String(), "partition stopped until its stream is repaired"), err
		})
	p.signal(syscall.SIGTERM)
	p.awaitEnd()
	return inspect(t, t.Context(), f.pool, f.b)
}

func TestSoakIDsThatAreHandedOutAgain(t *testing.T) {
	t.Run("stop the partition", func(t *testing.T) {
		if d := reuse(t, os.Args[0]); d.Unknown == 0 || d.Pending == 0 || d.FalseMarks > 0 || d.Duplicates > 0 || d.Unmarked > 0 {
			t.Errorf("want messages of lost rows, rows that wait for the repair, and no other damage: %+v", d)
		}
	})
	t.Run("are marked published by a relay that does not compare event_id", func(t *testing.T) {
		d := reuse(t, overlay(t, "../outbox/mark.go",
			[2]string{`EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NULL)`,
				`EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.processed_at IS NULL)`},
			[2]string{`WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NULL AND EXISTS (SELECT FROM held)`,
				`WHERE m.id = r.id AND m.processed_at IS NULL AND EXISTS (SELECT FROM held)`}))
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
	return overlay(t, filepath.Join(strings.TrimSpace(string(root)), "src/time/time.go"), [2]string{`	mono -= startNano
`, `	mono -= startNano
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
	b.signal(syscall.SIGKILL)
	f.awaitShares(3*leaseTTL, "the others to take over", a, c)
	a.signal(syscall.SIGTERM)
	a.awaitEnd()
	f.awaitTakeover()
	f.check()
	var off time.Duration // the largest observed error of the clock
	for _, m := range logged.FindAllStringSubmatch(a.log.String(), -1) {
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
