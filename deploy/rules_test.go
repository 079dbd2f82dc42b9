package deploy_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/doctor"
)

// exported returns the name of every metric that the code exports.
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

// declared returns the names of all tests of the repository.
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

// metric matches the name of a metric, or of a recorded rule, in an expression.
var metric = regexp.MustCompile(`\b(?:outbox|relay|consumer|api|projection|stream|jetstream|postgres|job|tidings|node|tls|nats|path|` +
	`heartbeats)_[a-z_]+|\b(?:api|path):\w+:\w+`)

func TestEveryAlertHasAMetricAndAPage(t *testing.T) {
	b, err := os.ReadFile("prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Groups []struct{ Rules []struct{ Expr string } }
	}
	if err := yaml.Unmarshal(b, &rules); err != nil {
		t.Fatal(err)
	}
	names := exported(t)
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			metrics := metric.FindAllString(rule.Expr, -1)
			if len(metrics) == 0 {
				t.Errorf("no metric in %q", rule.Expr)
			}
			for _, m := range metrics {
				// node_exporter exports node_filesystem_*.
				name := strings.TrimSuffix(strings.TrimSuffix(m, "_bucket"), "_count")
				if !names[name] && !strings.HasPrefix(m, "node_filesystem_") && !strings.Contains(string(b), "- record: "+m) {
					t.Errorf("%q needs the metric %s, which no process exports", rule.Expr, m)
				}
			}
		}
	}
	tests := declared(t)
	alerts := regexp.MustCompile(`(?s)- alert: (\w+)\n.*?runbook: (\S+)`).FindAllStringSubmatch(string(b), -1)
	if len(alerts) < 33 {
		t.Fatalf("rules.yml has only %d alerts", len(alerts))
	}
	for _, a := range alerts {
		if want := "docs/runbook/" + a[1] + ".md"; a[2] != want {
			t.Errorf("alert %s names %s: want %s", a[1], a[2], want)
		}
		if page, err := os.ReadFile(filepath.Join("..", a[2])); err != nil || !strings.HasPrefix(string(page), "# "+a[1]+"\n") {
			t.Errorf("alert %s: its page is missing or has another title: %v", a[1], err)
		} else if m := regexp.MustCompile("(?m)^Rehearsed by `(Test\\w+)`\\.$").FindSubmatch(page); m == nil || !tests[string(m[1])] {
			t.Errorf("alert %s: its page names no existing test", a[1])
		}
	}
}

// TestTheAlertsHaveTheLimitsOfTheDoctor compares the numbers that both have.
func TestTheAlertsHaveTheLimitsOfTheDoctor(t *testing.T) {
	b, err := os.ReadFile("prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	for alert, limit := range map[string]string{
		"OutboxLagHigh":        fmt.Sprintf(`> %d\n`, doctor.LateSeconds),
		"OutboxUndelivered":    fmt.Sprintf(`> %d\n`, doctor.UndeliveredSeconds),
		"ConsumerLagHigh":      fmt.Sprintf(`> %d\n`, doctor.LateSeconds),
		"SubscriberAbsent":     fmt.Sprintf(`> %d\n`, broker.IdleSeconds),
		"SubscriberRedelivers": fmt.Sprintf(`> %d\n`, broker.ManyRedelivered),
		"StreamNearlyFull":     fmt.Sprintf(`> %v\n.*> %[1]v\n`, doctor.FullShare),
		"CredentialsExpire":    fmt.Sprintf(`< %d \* 86400\n[^:]*\) / %d\)\n`, doctor.ExpiryDays, doctor.ExpiryShare),
	} {
		if !regexp.MustCompile(`- alert: ` + alert + `\n +expr: [^:]*` + limit).Match(b) {
			t.Errorf("the alert %s lacks the limit %s", alert, limit)
		}
	}
	for _, r := range doctor.Rules() {
		if _, err := os.Stat("../docs/runbook/" + r.Runbook + ".md"); r.Runbook != "" && err != nil {
			t.Errorf("the rule %s: %v", r.Name, err)
		}
	}
}

// TestTheConsoleDoesNotHideThatNoAPIRuns: the service console runs the same binary as the service
// api.
func TestTheConsoleDoesNotHideThatNoAPIRuns(t *testing.T) {
	text, err := os.ReadFile("prometheus/prometheus.yml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Jobs []struct {
			Name    string                                `yaml:"job_name"`
			Names   []struct{ Names []string }            `yaml:"dns_sd_configs"`
			Relabel []struct{ Regex, Replacement string } `yaml:"metric_relabel_configs"`
		} `yaml:"scrape_configs"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	binary := map[string]string{} // by service: the label that ApiAbsent sees
	for _, job := range file.Jobs {
		for _, services := range job.Names {
			for _, service := range services.Names {
				binary[service] = "api"
				for _, r := range job.Relabel {
					if regexp.MustCompile("^(?:" + r.Regex + ")$").MatchString("tidings_build_info;api") {
						binary[service] = r.Replacement
					}
				}
			}
		}
	}
	if binary["api"] != "api" || binary["console"] != "console" {
		t.Errorf("Prometheus knows api as %q and console as %q", binary["api"], binary["console"])
	}
}

// TestNoDashboardOrAlertNamesAKind: installations have kinds and upstreams of their own.
func TestNoDashboardOrAlertNamesAKind(t *testing.T) {
	var names []string
	set := kinds.Builtin()
	for _, k := range set.AllEdges() {
		names = append(names, k.Name)
	}
	for _, k := range set.AllChildren() {
		names = append(names, k.Name)
	}
	named := regexp.MustCompile(`[=~]\s*\\?"[^"]*\b(` + strings.Join(names, "|") + `)\b`)
	if !named.MatchString(`{event_type=~\"post.made|follow.created\"}`) || !named.MatchString(`{kind="comment"}`) {
		t.Fatalf("%s does not find a kind", named)
	}
	files, err := filepath.Glob("grafana/*.json")
	if err != nil || len(files) < 6 {
		t.Fatalf("dashboards: %v, %v", files, err)
	}
	for _, file := range append(files, "prometheus/rules.yml") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range named.FindAllString(string(text), -1) {
			t.Errorf("%s has %s", file, found)
		}
	}
}
