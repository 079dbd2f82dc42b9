//go:build faults

package replay

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/followercounts"
)

func TestAReplayKilledAtAnyStepChangesNothing(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	r.fill(200)
	r.settle(p.Name())
	for _, step := range []string{"made", "page", "filled", "caught up", "held", "moved"} {
		want, err := r.read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		cfg, err := json.Marshal(childConfig{URL: r.url, Step: step, Broker: r.broker})
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+string(cfg))
		log, err := cmd.CombinedOutput()
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
			t.Fatalf("%s: the replay was not killed: %v\n%s", step, err, log)
		}
		got, err := r.read(t.Context())
		if err != nil || got != want {
			t.Errorf("%s: readers see %+v, %v; want %+v", step, got, err, want)
		}
		if left := r.leftovers(); len(left) != 1 {
			t.Errorf("%s: left behind: %v, so the next step cannot drop it", step, left)
		}
		r.fill(5)
	}
	r.replay(p, Options{From: Auto})
	if left := r.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	r.settle(p.Name())
	r.verify(p.Name())
}

// TestReplaysBehindAndDuringAResizeEndInTheTruth replays while some streams are closed. The
// partitions change again during the replay.
func TestReplaysBehindAndDuringAResizeEndInTheTruth(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	r.fill(100)
	r.resize(4)
	r.fill(100)
	r.settle(p.Name())
	if _, err := r.js.Publish(t.Context(), r.broker.Prefix+".0.foreign", nil); err != nil { // behind the closing message
		t.Fatal(err)
	}
	stopWriters := r.writers(2)
	for from, to := range map[Source]int{Stream: 2, Truth: 8} {
		report := r.replay(p, Options{From: from, at: func(_ context.Context, step string) {
			if step == "filled" {
				r.resize(to)
			}
		}})
		if !report.Switched || report.Events == 0 {
			t.Errorf("%+v", report)
		}
		testkit.Eventually(t, "the resize to end", func() (bool, error) {
			all, err := outbox.Partitions(t.Context(), r.system)
			return len(outbox.Active(all)) == to, err
		})
	}
	stopWriters()
	r.settle(p.Name())
	r.verify(p.Name())
}
