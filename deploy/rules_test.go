// Package deploy_test checks the files that operators take from here against the code.
package deploy_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// exported returns every metric name that the code gives to Prometheus.
func exported(t *testing.T) map[string]bool {
	t.Helper()
	name := regexp.MustCompile(`(?:Name:\s*|NewDesc\()"([a-z_]+)"`)
	names := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range name.FindAllSubmatch(b, -1) {
			names[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// declared returns the name of every test.
func declared(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(b, -1) {
			names[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func TestEveryAlertHasAMetricAndAPage(t *testing.T) {
	b, err := os.ReadFile("prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	names := exported(t)
	for _, expr := range regexp.MustCompile(`(?m)expr: (.*)$`).FindAllStringSubmatch(string(b), -1) {
		metrics := regexp.MustCompile(`\b(?:outbox|relay|consumer|api|projection|stream|jetstream|postgres|job|tidings|node|tls|path|heartbeats)_[a-z_]+|\b(?:api|path):\w+:\w+`).FindAllString(expr[1], -1)
		if len(metrics) == 0 {
			t.Errorf("no metric in %q", expr[1])
		}
		for _, m := range metrics {
			known := names[strings.TrimSuffix(strings.TrimSuffix(m, "_bucket"), "_count")] || strings.HasPrefix(m, "node_filesystem_") || // node_exporter's
				strings.Contains(string(b), "- record: "+m)
			if !known {
				t.Errorf("%q needs the metric %s, which nothing exports", expr[1], m)
			}
		}
	}
	tests := declared(t)
	alerts := regexp.MustCompile(`(?s)- alert: (\w+)\n.*?runbook: (\S+)`).FindAllStringSubmatch(string(b), -1)
	if len(alerts) < 33 {
		t.Fatalf("only %d alerts", len(alerts))
	}
	for _, a := range alerts {
		if want := "docs/runbook/" + a[1] + ".md"; a[2] != want {
			t.Errorf("alert %s names %s: want %s", a[1], a[2], want)
		}
		if page, err := os.ReadFile(filepath.Join("..", a[2])); err != nil || !strings.HasPrefix(string(page), "# "+a[1]+"\n") {
			t.Errorf("alert %s: its page: %v", a[1], err)
		} else if m := regexp.MustCompile("(?m)^Rehearsed by `(Test\\w+)`\\.$").FindSubmatch(page); m == nil || !tests[string(m[1])] {
			t.Errorf("alert %s: its page names no test that there is", a[1])
		}
	}
}
