//go:build faults

package consumers_test

import (
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
)

// TestPartitionsMoveAsInstancesComeStopFreezeAndDie publishes events during all changes.
func TestPartitionsMoveAsInstancesComeStopFreezeAndDie(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), partitions)
	var want []line
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				want = append(want, r.flood(10)...)
			}
		}
	}()
	stopFlood := sync.OnceFunc(func() { close(stop); <-stopped })
	t.Cleanup(stopFlood)

	// a has half of its TTL to free its leases when it is stopped, also on a busy machine
	a, b := r.child(t, 10*time.Second, "", 0), r.child(t, ttl, "", 0)
	r.awaitShares("two instances to share the partitions", 2)
	r.child(t, ttl, "", 0)
	r.awaitShares("a third to get its share", 3)
	a.Signal(syscall.SIGTERM)
	a.AwaitEnd()
	if left := r.leasesOf(a); left > 0 {
		t.Errorf("an instance that was stopped left %d leases, for which the others have to wait", left)
	}
	r.awaitShares("the others to take over from one that was stopped", 2)
	b.Signal(syscall.SIGSTOP)
	r.awaitShares("the third to take over from one that is frozen", 1)
	b.Signal(syscall.SIGCONT)
	r.awaitShares("the frozen one to come back", 2)
	b.Signal(syscall.SIGKILL)
	r.awaitShares("the third to take over from one that was killed", 1)
	stopFlood()
	r.awaitLag(0)
	r.wantLines(want)
}
