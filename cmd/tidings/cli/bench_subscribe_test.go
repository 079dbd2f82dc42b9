package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

func TestBenchSubscribeHandlesEveryEventOnce(t *testing.T) {
	t.Setenv("DATABASE_URL", testkit.Postgres(t).URL) // the command creates its own databases there
	code, stdout, stderr := run(t, nil, "", "bench", "subscribe", "--events", "2000")
	if code != exitOK {
		t.Fatalf("exit code %d\n%s", code, stderr)
	}
	n := 0
	for line := range strings.Lines(stdout) {
		n++
		var c struct {
			Case                   string
			Events                 int
			Rate                   float64 `json:"events_per_second"`
			Duplicates, Inversions int
		}
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if c.Events != 2000 || c.Rate <= 0 || c.Inversions > 0 {
			t.Error(line)
		}
	}
	if n != 2 {
		t.Errorf("%d cases: %s", n, stdout)
	}
}
