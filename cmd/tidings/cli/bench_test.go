package cli

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/testkit"
)

func TestBenchWriteFindsEveryAcceptedWrite(t *testing.T) {
	t.Setenv("DATABASE_URL", testkit.Postgres(t).URL) // the command creates its own databases there
	t.Setenv(childVariable, "1")
	code, stdout, stderr := run(t, nil, "", "bench", "write", "--duration", "1s", "--clients", "4", "--tenants", "2",
		"--hot", "comment,review")
	if code != exitOK {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	var names []string
	for line := range strings.Lines(stdout) {
		var c struct {
			Case     string
			Accepted int
			Missing  *int
			Ratio    *float64 `json:"ratio_to_baseline"`
		}
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		baseline := slices.Contains([]string{"pgbench", "pgx"}, c.Case)
		if c.Accepted == 0 || !baseline && (c.Missing == nil || *c.Missing > 0 || c.Ratio == nil) {
			t.Errorf("%s", line)
		}
		if !baseline {
			names = append(names, c.Case)
		}
	}
	if diff := cmp.Diff([]string{"write", "write-comments", "write-tenants", "write-hot-comment", "write-hot-review"}, names); diff != "" {
		t.Errorf("cases (-want +got):\n%s", diff)
	}
	for _, args := range [][]string{{"--clients", "0"}, {"--hot", "follow"}} {
		if code, _, _ := run(t, nil, "", append([]string{"bench", "write"}, args...)...); code == exitOK {
			t.Errorf("the command accepts %v", args)
		}
	}
}
