package cli

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/testkit"
)

func TestBenchReadChecksEveryAnswer(t *testing.T) {
	t.Setenv("DATABASE_URL", testkit.Postgres(t).URL) // the command creates its own databases there
	t.Setenv(childVariable, "1")
	code, stdout, stderr := run(t, nil, "", "bench", "read", "--comments", "2000", "--requests", "10", "--users", "200", "--edges", "2000",
		"--clients", "4", "--duration", "1s")
	if code != exitOK {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	var names, none []string // all cases, and those without a request
	total := 0
	for line := range strings.Lines(stdout) {
		var c struct {
			Case     string
			Requests int
			Errors   *int
			P50      float64 `json:"p50_ms"`
			Ratio    float64 `json:"ratio_to_first_page"`
		}
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if c.Errors == nil || *c.Errors > 0 || (c.Requests > 0) != (c.P50 > 0) || (c.Case == "deep-page") != (c.Ratio > 0) {
			t.Errorf("%s", line)
		}
		names = append(names, c.Case)
		if total = c.Requests; c.Requests == 0 {
			none = append(none, c.Case)
		}
	}
	// A random choice makes each request of tao: 3% are a time range, the other parts have 12% or more. The last case is their total.
	none = slices.DeleteFunc(none, func(name string) bool {
		return total > 0 && (name == "tao-time-range" || total < 150 && strings.HasPrefix(name, "tao-"))
	})
	t.Logf("%d requests of tao", total)
	if len(none) > 0 {
		t.Errorf("no requests of %q, of %d of tao:\n%s", none, total, stdout)
	}
	want := []string{"first-page", "deep-page", "deep-cursor", "around", "summary", "replies",
		"tao-range", "tao-object", "tao-point", "tao-count", "tao-time-range", "tao-total"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("cases (-want +got):\n%s", diff)
	}
	if code, _, _ := run(t, nil, "", "bench", "read", "--cases", "nothing"); code == exitOK {
		t.Error("the command accepts --cases nothing")
	}
}
