//go:build faults

package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/testkit"
)

func TestBenchTraceComparesTheProcessorTimeWithAndWithoutTracing(t *testing.T) {
	t.Setenv("DATABASE_URL", testkit.Postgres(t).URL) // the command creates its own database there
	t.Setenv(childVariable, "1")
	code, stdout, stderr := run(t, nil, "", "bench", "trace", "--duration", "1s", "--rate", "200", "--pairs", "1", "--ratio", "0.5")
	if code != exitOK {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	var names []string
	for line := range strings.Lines(stdout) {
		var c struct {
			Case     string
			Accepted int
			CPU      float64 `json:"cpu_us_per_write"`
			Exported int     `json:"exported_bytes"`
			Median   float64
		}
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if last := c.Case == "trace"; last && c.Median <= 0 ||
			!last && (c.Accepted == 0 || c.CPU <= 0 || (c.Exported > 0) != (c.Case == "trace-on")) {
			t.Errorf("%s", line)
		}
		names = append(names, c.Case)
	}
	if diff := cmp.Diff([]string{"trace-off", "trace-on", "trace"}, names); diff != "" {
		t.Errorf("cases (-want +got):\n%s", diff)
	}
}
