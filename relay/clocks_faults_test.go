//go:build faults

package relay

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/mutants"
	"github.com/tidings/tidings/outbox"
)

// build builds this test binary with edits of its files. The sources themselves have no hooks for
// that.
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

// reuse makes the database assign again the ids of rows that a relay has published but not marked,
// as after a crash with synchronous_commit off. It returns the damage of a relay that runs binary.
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

func TestIDsThatAreHandedOutAgainStopThePartition(t *testing.T) { handedOutAgain(t) }

func handedOutAgain(t *testing.T) {
	if d := reuse(t, os.Args[0]); d.Unknown == 0 || d.Pending == 0 || d.FalseMarks > 0 || d.Duplicates > 0 || d.Unmarked > 0 {
		t.Errorf("want messages of lost rows, rows that wait for the repair, and no other damage: %+v", d)
	}
}

// clockOf builds relays whose wall clock jumps between ten minutes ahead and ten minutes behind
// every second, as if somebody set the machine's clock. The monotonic clock continues.
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

// TestARelaysClockIsMovedByTenMinutes builds a relay of its own, with another time package.
func TestARelaysClockIsMovedByTenMinutes(t *testing.T) {
	binary := clockOf(t)
	f := newFleet(t, testkit.Postgres(t))
	f.resize(manyPartitions)
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
