//go:build faults

package cli

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
)

func TestDevTracesTheWayOfAnEvent(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.args = []string{"--trace"}
	d.start(t)
	if status, _ := d.request(t, http.MethodPut, "/v1/follows/7/42", "", nil, nil); status != http.StatusCreated {
		t.Fatalf("follow: status %d", status)
	}
	find := func(args ...string) (int, string, string) {
		return run(t, nil, "", append([]string{"events", "find", "--data", d.dir, "--id", "1", "--trace"}, args...)...)
	}
	var found foundEvent
	testkit.Eventually(t, "the whole path", func() (bool, error) {
		code, stdout, stderr := find("--json")
		if code != exitOK {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		found = foundEvent{}
		err := json.Unmarshal([]byte(stdout), &found)
		return len(found.Path) == 5, err
	})
	var steps []string
	for _, s := range found.Path {
		steps = append(steps, s.Step+" by "+s.By)
		if s.Seconds <= 0 || s.StartedAt.Before(found.Path[0].StartedAt.Time) || s.TraceID == "" || s.SpanID == "" {
			t.Errorf("%+v", s)
		}
	}
	slices.Sort(steps[3:])
	want := []string{"PUT /v1/follows/{follower_id}/{followee_id} by tidings-dev", "create follow.created by tidings-dev",
		"send EVENTS-0 by tidings-dev", "process EVENTS-0 by " + history.Name, "process EVENTS-0 by " + followercounts.Name}
	if slices.Sort(want[3:]); !slices.Equal(steps, want) {
		t.Errorf("%q, want %q", steps, want)
	}
	code, stdout, stderr := find()
	for _, s := range append(want, "AFTER", "TOOK") {
		if step, _, _ := strings.Cut(s, " by "); code != exitOK || !strings.Contains(stdout, step) {
			t.Errorf("exit code %d, %s lacks %s: %s", code, stdout, step, stderr)
		}
	}
	if info, err := os.Stat(filepath.Join(d.dir, "traces.jsonl")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file of spans: %v, %v", info, err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("{\"Name\":\"cut sh"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := run(t, nil, "", "events", "find", "--data", d.dir, "--id", "1", "--trace="+empty); code != exitOK ||
		!strings.Contains(stderr, "no span of event "+found.EventID) {
		t.Errorf("a file without the event: exit code %d, %s", code, stderr)
	}
	if code, _, stderr := run(t, nil, "", "events", "find", "--data", d.dir, "--since", "1h", "--trace"); code != exitInput {
		t.Errorf("--trace without --id: exit code %d, %s", code, stderr)
	}
	in := d.instance(t)
	in.Trace = ""
	if err := in.write(d.dir); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := find(); code != exitError || !strings.Contains(stderr, "runs without --trace") {
		t.Errorf("a dev without --trace: exit code %d, %s", code, stderr)
	}
}
