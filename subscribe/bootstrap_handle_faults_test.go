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
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
)

// handlerEnv makes this binary an instance of a handler.
const handlerEnv = "TIDINGS_TEST_HANDLER"

// handlerChild is an instance in its own process, which sends itself a signal at a crash point.
type handlerChild struct {
	API, NATS, Step string
	Signal          syscall.Signal
}

func init() {
	if os.Getenv(handlerEnv) == "" {
		return
	}
	testkit.EndWithTest(nil)
	var in handlerChild
	err := json.Unmarshal([]byte(os.Getenv(handlerEnv)), &in)
	c, failed := client.New(in.API, client.WithToken("t"))
	nc, refused := nats.Connect(in.NATS)
	if err = errors.Join(err, failed, refused); err == nil {
		err = handleFollows(context.Background(), nc, c, "child", nil, subscribe.Concurrency(1),
			subscribe.Log(slog.New(slog.NewTextHandler(os.Stderr, nil))), subscribe.CrashPoints(func(at string) {
				if at == in.Step {
					in.Step = "" // once
					testkit.SignalSelf(in.Signal)
				}
			}))
	}
	fmt.Fprintln(os.Stderr, "the handler ended:", err)
	os.Exit(1)
}

func (x *exporting) child(step string, sig syscall.Signal) *testkit.Process {
	x.t.Helper()
	in, err := json.Marshal(handlerChild{x.api.URL, x.b.URL, step, sig})
	if err != nil {
		x.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), handlerEnv+"="+string(in))
	return testkit.Spawn(x.t, "handler", cmd)
}

// exportSteps are the crash points of Bootstrap.
var exportSteps = []string{"claimed", "handled", "positions", "consumer", "joined"}

// created returns when the durable consumers were created, and their configured positions.
func (x *exporting) created() (all []string) {
	x.t.Helper()
	for _, s := range x.open {
		c, err := x.js.Consumer(x.t.Context(), s.Name, "cache-follow")
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			continue
		}
		if err != nil {
			x.t.Fatal(err)
		}
		all = append(all, fmt.Sprint(s.Name, c.CachedInfo().Created, c.CachedInfo().Config.OptStartSeq))
	}
	return all
}

// statesOf returns how many states an instance has handled.
func (x *exporting) statesOf(by string) (n int) {
	for _, s := range x.calls(subscribe.Snapshot) {
		if s.By == by {
			n++
		}
	}
	return n
}

// TestAHandlerKilledAtAnyStepOfItsExportsLosesNothing has states whose events expired, events that
// only the streams have, and a resize between the death and the next instance.
func TestAHandlerKilledAtAnyStepOfItsExportsLosesNothing(t *testing.T) {
	for _, step := range exportSteps {
		t.Run(step, func(t *testing.T) {
			x := newExporting(t, 2)
			for n := range 40 {
				x.write(1+n, 1+n)
			}
			x.expire(0, 3)
			x.child(step, syscall.SIGKILL).AwaitKilled()
			x.write(1, 2, 3)
			x.resize(2)
			x.write(1, 2, 3)
			w := x.handle("next", nil)
			x.settle()
			x.exported()
			x.write(1, 2, 3)
			x.has(event.Created, "1", 5)
			x.has(event.Created, "3", 5)
			stopped(t, w)
			if step == "claimed" { // the export began after the resize, and covers the ended streams
				return
			}
			c, err := x.js.Consumer(t.Context(), x.cfg.StreamName(0), "cache-follow")
			if err != nil || c.CachedInfo().Config.OptStartSeq < 2 {
				t.Errorf("the durable consumer begins before the end of the export: %v", err)
			}
			x.has(event.Created, "1", 3) // of the streams that the resize ended, after the export
		})
	}
}

// TestAFrozenExporterThawsWithoutHarm freezes the process until another one has read the exports.
func TestAFrozenExporterThawsWithoutHarm(t *testing.T) {
	for _, step := range exportSteps {
		t.Run(step, func(t *testing.T) {
			x := newExporting(t, 2)
			for n := range 40 {
				x.write(1+n, 1+n)
			}
			frozen := x.child(step, syscall.SIGSTOP)
			frozen.AwaitStopped()
			x.write(1, 2, 3)
			w := x.handle("next", nil)
			x.settle()
			x.exported()
			x.write(1)
			x.has(event.Created, "1", 4)
			before, states := x.created(), x.statesOf("child")
			frozen.Signal(syscall.SIGCONT)
			// When it has read the record it handles events like any instance.
			x.await("events for both", func() (bool, error) {
				x.write(1, 2, 3, 4)
				for _, s := range x.calls(event.Created) {
					if s.By == "child" {
						return true, nil
					}
				}
				return false, nil
			})
			x.settle()
			if after := x.created(); fmt.Sprint(after) != fmt.Sprint(before) || len(after) != 2 {
				t.Errorf("durable consumers: %v, and before the thaw %v", after, before)
			}
			if n := x.statesOf("child"); n != states {
				t.Errorf("the thawed process handled %d more states: it has lost its claim", n-states)
			}
			stopped(t, w)
			x.nothingPending("cache-follow")
		})
	}
}

// TestTheClaimIsKeptWhileAStateTakesLong: a call that takes longer than Takeover is no death.
func TestTheClaimIsKeptWhileAStateTakesLong(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1)
	begun, over := make(chan struct{}), make(chan struct{})
	first := x.handle("first", func(subscribe.Event[event.Edge]) error {
		close(begun)
		<-over
		return nil
	}, subscribe.Takeover(4*time.Second))
	<-begun
	second := x.handle("second", nil, subscribe.Takeover(4*time.Second))
	<-time.After(9 * time.Second) // more than twice Takeover
	close(over)
	x.exported()
	stopped(t, first, second)
	if got := x.calls(""); len(got) != 1 || got[0].By != "first" {
		t.Errorf("calls: %v, want one of the first instance", got)
	}
}
