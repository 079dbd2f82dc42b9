//go:build faults

package subscribe_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
)

// sharerEnv makes this binary an instance that reads in order. Its value is the URL of NATS.
const sharerEnv = "TIDINGS_TEST_SHARER"

// handled is what an instance publishes about an event before it acknowledges that.
type handled struct {
	By      int // the process
	To      event.ID
	Version int64
}

const handledSubject = "handled"

func init() {
	url := os.Getenv(sharerEnv)
	if url == "" {
		return
	}
	testkit.EndWithTest(nil)
	nc, err := nats.Connect(url)
	if err == nil {
		tell := func(_ context.Context, e subscribe.Event[event.Edge]) error {
			told, err := json.Marshal(handled{os.Getpid(), e.Data.To, e.Data.Version})
			<-time.After(time.Millisecond) // so that signals come amid calls
			return errors.Join(err, nc.Publish(handledSubject, told))
		}
		err = subscribe.Handle(context.Background(), nc, "mailer", "follow.created", tell,
			subscribe.InOrder(), subscribe.Takeover(time.Second), subscribe.Concurrency(4), subscribe.Attempts(100),
			subscribe.Log(slog.New(slog.NewTextHandler(os.Stderr, nil))))
	}
	fmt.Fprintln(os.Stderr, "the instance ended:", err)
	os.Exit(1)
}

func (r *rig) sharer() *testkit.Process {
	r.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), sharerEnv+"="+r.b.URL)
	return testkit.Spawn(r.t, "instance", cmd)
}

// TestProcessesInOrderKeepTheOrderOfAnAggregateBetweenThem kills processes, freezes them for longer
// than Takeover and thaws them while events come and the partitions are resized. The order is that
// of the server: what a process publishes about an event is there before the acknowledgment.
func TestProcessesInOrderKeepTheOrderOfAnAggregateBetweenThem(t *testing.T) {
	r, d := newRig(t, 2), newDiary()
	by := map[int]int{} // events by process
	sub, err := r.nc.Subscribe(handledSubject, func(m *nats.Msg) {
		var h handled
		if err := json.Unmarshal(m.Data, &h); err != nil {
			t.Error(err)
		}
		var e subscribe.Event[event.Edge]
		e.Data.To, e.Data.Version = h.To, h.Version
		d.note(e)
		d.mu.Lock()
		defer d.mu.Unlock()
		by[h.By]++
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	version := int64(0)
	write := func(rounds int) {
		for range rounds {
			version++
			for to := int64(1); to <= followees; to++ {
				r.publish(follow("9", event.IDOf(to), version))
			}
		}
	}
	busy := func(p *testkit.Process) {
		t.Helper()
		d.mu.Lock()
		before := by[p.PID()]
		d.mu.Unlock()
		r.await("the process to have a partition", func() (bool, error) {
			write(1)
			d.mu.Lock()
			defer d.mu.Unlock()
			return by[p.PID()] > before, nil
		})
	}
	settled := func() {
		t.Helper()
		r.await("all events", func() (bool, error) { return d.has(followees, version) })
	}
	first, second := r.sharer(), r.sharer()
	busy(first) // each gets a share
	busy(second)
	write(5)
	first.Kill()
	write(5)
	third := r.sharer()
	settled()
	busy(third)
	write(5)
	second.Signal(syscall.SIGSTOP)
	second.AwaitStopped()
	write(5)
	settled() // without the frozen process
	write(5)
	second.Signal(syscall.SIGCONT)
	write(5)
	r.resize(4)
	write(5)
	settled()
	busy(second)
	busy(third)
	second.Kill()
	write(5)
	settled()
	d.firstsInOrder(t)
	r.nothingPending("mailer-follow-created")
}
