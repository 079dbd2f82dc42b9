package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/testkit"
)

// TestBench runs every command of `tidings bench` with the smallest load that shows that its checks
// pass. All of them create their databases on one server, whose new databases have the tables of
// Tidings already.
func TestBench(t *testing.T) {
	t.Parallel()
	b := benches{migratedServer(t)}
	for name, test := range map[string]func(*testing.T, benches){
		"write finds every accepted write": testBenchWrite, "read checks every answer": testBenchRead,
		"subscribe handles every event once":                                 testBenchSubscribe,
		"trace compares the processor time with tracing and without":         testBenchTrace,
		"latency has a network between the processes and the servers":        testBenchRTT,
		"the others end without an error, with a line for each of the cases": testBenchOthers,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, b)
		})
	}
}

// benches has the URL of a server on which `tidings bench` creates databases.
type benches struct{ url string }

// migratedServer starts a PostgreSQL whose template1, of which CREATE DATABASE makes a copy, has
// all tables.
func migratedServer(t *testing.T) (admin string) {
	t.Helper()
	u, err := url.Parse(testkit.PostgresProcess(t).DB(t).URL)
	if err != nil {
		t.Fatal(err)
	}
	migrated := strings.TrimPrefix(u.Path, "/")
	u.Path = "/postgres"
	conn, err := pgx.Connect(t.Context(), u.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	for _, sql := range []string{`ALTER DATABASE template1 IS_TEMPLATE false`, `DROP DATABASE template1`,
		`CREATE DATABASE template1 TEMPLATE ` + pgx.Identifier{migrated}.Sanitize() + ` STRATEGY file_copy`} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	return u.String()
}

// run runs `tidings bench` in a process of its own, because the command passes its environment on
// to the processes that it measures. It returns the lines of the output.
func (b benches) run(t *testing.T, args ...string) (lines []string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], append([]string{"bench"}, args...)...)
	cmd.Env = append(os.Environ(), childVariable+"=1", "DATABASE_URL="+b.url)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.Output()
	if err != nil {
		t.Fatalf("bench %q: %v\n%s%s", args, err, stdout, stderr.String())
	}
	return slices.Collect(strings.Lines(string(stdout)))
}

// decode decodes a line of the output.
func decode(t *testing.T, line string, to any) {
	t.Helper()
	if err := json.Unmarshal([]byte(line), to); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
}

func testBenchWrite(t *testing.T, b benches) {
	var names []string
	for _, line := range b.run(t, "write", "--duration", "100ms", "--clients", "2", "--tenants", "2", "--hot", "comment,review") {
		var c struct {
			Case     string
			Accepted int
			Missing  *int
			Ratio    *float64 `json:"ratio_to_baseline"`
		}
		decode(t, line, &c)
		baseline := slices.Contains([]string{"pgbench", "pgx"}, c.Case)
		if c.Accepted == 0 || !baseline && (c.Missing == nil || *c.Missing > 0 || c.Ratio == nil) {
			t.Errorf("%s", line)
		}
		if !baseline {
			names = append(names, c.Case)
		}
	}
	want := []string{"ceiling", "write", "write-comments", "write-tenants", "write-hot-comment", "write-hot-review"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("cases (-want +got):\n%s", diff)
	}
	for _, args := range [][]string{{"--clients", "0"}, {"--hot", "follow"}} {
		if code, _, _ := run(t, nil, "", append([]string{"bench", "write"}, args...)...); code == exitOK {
			t.Errorf("the command accepts %v", args)
		}
	}
}

func testBenchRead(t *testing.T, b benches) {
	var names, none []string // all cases, and those without a request
	total := 0
	lines := b.run(t, "read", "--comments", "2000", "--requests", "10", "--users", "200", "--edges", "2000", "--clients", "2",
		"--duration", "300ms")
	for _, line := range lines {
		var c struct {
			Case     string
			Requests int
			Errors   *int
			P50      float64 `json:"p50_ms"`
			Than     string  `json:"compared_with"`
			Ratio    float64 `json:"ratio"`
		}
		decode(t, line, &c)
		if c.Errors == nil || *c.Errors > 0 || (c.Requests > 0) != (c.P50 > 0) || (c.Than != "") != (c.Ratio > 0) {
			t.Errorf("%s", line)
		}
		names = append(names, c.Case)
		if total = c.Requests; c.Requests == 0 {
			none = append(none, c.Case)
		}
	}
	// A random choice makes each request of tao: 3% are a time range, the other parts have 12% or
	// more. The last case is their total.
	none = slices.DeleteFunc(none, func(name string) bool {
		return total > 0 && (name == "tao-time-range" || total < 150 && strings.HasPrefix(name, "tao-"))
	})
	t.Logf("%d requests of tao", total)
	if len(none) > 0 {
		t.Errorf("no requests of %q, of %d of tao:\n%s", none, total, lines)
	}
	want := []string{"first-page", "deep-page", "deep-cursor", "around", "summary", "replies", "newest", "top", "top-cursor",
		"tao-range", "tao-object", "tao-point", "tao-count", "tao-time-range", "tao-total"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("cases (-want +got):\n%s", diff)
	}
	if code, _, _ := run(t, nil, "", "bench", "read", "--cases", "nothing"); code == exitOK {
		t.Error("the command accepts --cases nothing")
	}
}

func testBenchSubscribe(t *testing.T, b benches) {
	lines := b.run(t, "subscribe", "--events", "500")
	for _, line := range lines {
		var c struct {
			Case                   string
			Events                 int
			Rate                   float64 `json:"events_per_second"`
			Duplicates, Inversions int
		}
		decode(t, line, &c)
		if c.Events != 500 || c.Rate <= 0 || c.Inversions > 0 {
			t.Error(line)
		}
	}
	if len(lines) != 2 {
		t.Errorf("%d cases: %s", len(lines), lines)
	}
}

func testBenchTrace(t *testing.T, b benches) {
	var names []string
	for _, line := range b.run(t, "trace", "--duration", "300ms", "--rate", "200", "--pairs", "1", "--ratio", "0.5") {
		var c struct {
			Case     string
			Accepted int
			CPU      float64 `json:"cpu_us_per_write"`
			Exported int     `json:"exported_bytes"`
			Median   float64
		}
		decode(t, line, &c)
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

// testBenchRTT expects of each write at least the round trip of its claim.
func testBenchRTT(t *testing.T, b benches) {
	for _, line := range b.run(t, "latency", "--duration", "300ms", "--rate", "20", "--case", "subscriber", "--rtt", "20ms") {
		var c struct {
			RTT float64 `json:"rtt_ms"`
			P50 float64 `json:"p50_ms"`
		}
		if decode(t, line, &c); c.RTT < 20 || c.P50 < 20 {
			t.Error(line)
		}
	}
	for _, args := range [][]string{{"latency", "--rtt", "2s"}, {"relay", "--rtt", "1us"}, {"relay", "--rtt", "1ms", "--ranges", "2"}} {
		if code, _, _ := run(t, nil, "", append([]string{"bench"}, args...)...); code == exitOK {
			t.Errorf("the command accepts %v", args)
		}
	}
}

// testBenchOthers runs the commands that compare their result with the expected one themselves, and
// fail if it differs.
func testBenchOthers(t *testing.T, b benches) {
	for args, want := range map[string][]string{
		"archive --rows 100": {"archive"},
		"latency --duration 300ms --rate 50 --broker-sync default --case projection": {"projection"},
		"neighbors --duration 300ms --clients 1 --cases quiet":                       {"quiet"},
		"overload --duration 300ms --clients 2 --connections 4 --factor 1.5":         {"sustained", "overload"},
		"project --events 100 --users 50 --cases celebrity":                          {"celebrity"},
		"relay --messages 200 --relays 1 --broker-sync default":                      {"relay"},
		"relay --messages 200 --rtt 2ms --pairs 1 --broker-sync default": {"without-network", "with-network", "without-network",
			"network"},
		"serve --idle 100ms --duration 300ms --rate 20": {"fleet", "serve"},
		"sizes --rows 1000": {"edges", "edge_lists", "edge_counts", "follow_history", "children", "child_keys", "child_lists",
			"comment_history", "outbox, follows, written", "outbox, follows, published", "outbox, follows, archived"},
	} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			var names []string
			for _, line := range b.run(t, strings.Fields(args)...) {
				var c struct{ Case string }
				decode(t, line, &c)
				names = append(names, c.Case)
			}
			if diff := cmp.Diff(want, names); diff != "" {
				t.Errorf("cases (-want +got):\n%s", diff)
			}
		})
	}
}
