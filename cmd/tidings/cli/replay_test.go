package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/tidings/tidings/replay"
)

func TestReplayBuildsTheProjectionsOfARunningDevAnew(t *testing.T) {
	d := newDev(t)
	d.start(t)
	spec := followGraph(100, 1000, 5)
	if code, stdout, stderr := run(t, nil, "", "load", "--generate", "users=100,edges=1000,seed=5", "--data", d.dir); code != exitOK {
		t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t) // everything is on the stream, and applied
	if code, stdout, _ := run(t, nil, "", "replay", "--consumer", "followercounts", "--dry-run", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "a dry run") {
		t.Errorf("a dry run: exit code %d\n%s", code, stdout)
	}
	for _, from := range []replay.Source{replay.Stream, replay.Truth} {
		code, stdout, stderr := run(t, nil, "", "replay", "--consumer", "followercounts", "--from", string(from), "--yes", "--json", "--data", d.dir)
		var report replay.Report
		if err := json.Unmarshal([]byte(stdout), &report); code != exitOK || err != nil {
			t.Fatalf("replay: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
		}
		if !report.Switched || report.From != from || report.Events < spec.Edges || !strings.Contains(stderr, "switching") {
			t.Errorf("replay: %s\n%s", stdout, stderr)
		}
		d.verify(t)
		d.checkCounts(t, spec)
	}
	for _, args := range [][]string{{"--consumer", "nobody"}, {"--consumer", "archiver", "--from", "memory"}} {
		if code, _, stderr := run(t, nil, "", append([]string{"replay"}, args...)...); code != exitInput {
			t.Errorf("%v: exit code %d, %s", args, code, stderr)
		}
	}
}
