package test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/util/teststorage"
)

const root = "../../.."

type dashboard struct {
	UID, Title, Description string
	Templating              struct{ List []struct{ Name, Type string } }
	Panels                  []panel
}

type panel struct {
	Title, Description string
	Datasource         struct{ Type, UID string }
	FieldConfig        struct{ Defaults struct{ Unit string } }
	Targets            []struct{ Expr, LegendFormat string }
}

func dashboards(t *testing.T) map[string]dashboard {
	t.Helper()
	files, err := filepath.Glob("../../grafana/*.json")
	if err != nil || len(files) < 6 {
		t.Fatalf("dashboards: %v, %v", files, err)
	}
	all := make(map[string]dashboard)
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var d dashboard
		if err := json.Unmarshal(b, &d); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		all[filepath.Base(file)] = d
	}
	return all
}

// interpolated replaces Grafana's variable as Grafana does: by at least four scrape intervals.
func interpolated(expr string) string { return strings.ReplaceAll(expr, "$__rate_interval", "1m") }

// metrics returns the name of every metric that the code exports.
func metrics(t *testing.T) map[string]bool {
	t.Helper()
	name := regexp.MustCompile(`(?:Name:\s*|NewDesc\(\s*)"([a-z_]+)"|(?:gauge|counter)\("([a-z_]+)"`)
	names := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range name.FindAllSubmatch(b, -1) {
			names[string(m[1])+string(m[2])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func TestEveryPanelSaysWhatItShows(t *testing.T) {
	known := metrics(t)
	p := parser.NewParser(parser.Options{})
	for file, d := range dashboards(t) {
		if d.UID != "tidings-"+strings.TrimSuffix(file, ".json") || d.Title == "" || d.Description == "" {
			t.Errorf("%s: uid %q, title %q, description %q", file, d.UID, d.Title, d.Description)
		}
		if len(d.Templating.List) == 0 || d.Templating.List[0].Type != "datasource" || d.Templating.List[0].Name != "datasource" {
			t.Errorf("%s: its data source is not a variable", file)
		}
		titles := map[string]bool{}
		for _, panel := range d.Panels {
			what := file + ": " + panel.Title
			if titles[panel.Title] || panel.Description == "" || panel.FieldConfig.Defaults.Unit == "" || len(panel.Targets) == 0 {
				t.Errorf("%s: another panel has this title, or it lacks a description, unit or query: %+v", what, panel)
			}
			titles[panel.Title] = true
			if panel.Datasource.Type != "prometheus" || panel.Datasource.UID != "${datasource}" {
				t.Errorf("%s: data source %+v", what, panel.Datasource)
			}
			for _, target := range panel.Targets {
				expr, err := p.ParseExpr(interpolated(target.Expr))
				if err != nil {
					t.Errorf("%s: %v", what, err)
					continue
				}
				if target.LegendFormat == "" {
					t.Errorf("%s: %s has no legend", what, target.Expr)
				}
				checkSelectors(t, what, target.Expr, expr, known)
			}
		}
	}
}

// checkSelectors checks that the code exports every metric of a query, and that every range is
// Grafana's $__rate_interval.
func checkSelectors(t *testing.T, what, source string, expr parser.Expr, known map[string]bool) {
	t.Helper()
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.VectorSelector:
			name := n.Name
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				name = strings.TrimSuffix(name, suffix)
			}
			if !known[name] {
				t.Errorf("%s: the code does not export %s", what, n.Name)
			}
		case *parser.MatrixSelector:
			if !strings.Contains(source, "[$__rate_interval]") {
				t.Errorf("%s: the range of %s is not $__rate_interval", what, source)
			}
		}
		return nil
	})
}

// dev is a running `tidings dev`.
type dev struct {
	binary, dir     string
	API, Ops, Token string
	NATSURL         string `json:"nats_url"`
}

func startDev(t *testing.T) *dev {
	t.Helper()
	// Not t.TempDir, which only its owner can enter: PostgreSQL does not run as root, so another
	// user runs it.
	dir, err := os.MkdirTemp("", "tidings-panels")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	d := &dev{binary: filepath.Join(dir, "tidings"), dir: filepath.Join(dir, "data")}
	build := exec.Command("go", "build", "-buildvcs=false", "-o", d.binary, "./cmd/tidings")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command(d.binary, "dev", "--data", d.dir)
	cmd.Env = append(os.Environ(), "API_ADDR=127.0.0.1:0", "OPS_ADDR=127.0.0.1:0")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
			t.Errorf("dev: %v", err)
		}
	})
	if !bufio.NewScanner(out).Scan() { // dev prints its first line after it has written dev.json
		t.Fatal("dev ended without output")
	}
	go io.Copy(io.Discard, out)
	b, err := os.ReadFile(filepath.Join(d.dir, "dev.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, d); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *dev) run(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(d.binary, append(args, "--data", d.dir)...).CombinedOutput(); err != nil {
		t.Fatalf("tidings %v: %v: %s", args, err, out)
	}
}

// scrape stores the metrics of dev as if Prometheus had scraped them at that time.
func (d *dev) scrape(t *testing.T, db *teststorage.TestStorage, at time.Time) {
	t.Helper()
	resp, err := http.Get(d.Ops + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	p, err := textparse.New(body, resp.Header.Get("Content-Type"), labels.NewSymbolTable(),
		textparse.ParserOptions{FallbackContentType: "text/plain"})
	if err != nil {
		t.Fatal(err)
	}
	app := db.Appender(t.Context())
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if entry != textparse.EntrySeries {
			continue
		}
		var l labels.Labels
		p.Labels(&l)
		_, _, value := p.Series()
		b := labels.NewBuilder(l)
		b.Set("instance", "dev")
		b.Set("job", "tidings")
		if _, err := app.Append(0, b.Labels(), at.UnixMilli(), value); err != nil {
			t.Fatal(err)
		}
	}
	if err := app.Commit(); err != nil {
		t.Fatal(err)
	}
}

// awaitDurable waits until dev exports the durable consumer of the subscriber.
func (d *dev) awaitDurable(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for range 60 {
		resp, err := http.Get(d.Ops + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(body), `tidings_durable_pending_messages{consumer="mailer"`) {
			return
		}
		<-tick.C
	}
	t.Fatal("dev does not export the durable consumer")
}

// TestNoPanelIsEmptyOnAFleetThatWorks scrapes a dev under load and evaluates the queries of each
// panel as Grafana does.
func TestNoPanelIsEmptyOnAFleetThatWorks(t *testing.T) {
	d := startDev(t)
	db := teststorage.New(t)
	start := time.Unix(1_700_000_000, 0)
	d.scrape(t, db, start)
	nats := exec.Command(d.binary, "nats", "durable", "--name", "mailer")
	nats.Env = append(os.Environ(), "NATS_URL="+d.NATSURL)
	if out, err := nats.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	d.run(t, "load", "--generate", "users=50,edges=300,seed=1")
	d.run(t, "load", "--kind", "comment", "--generate", "posts=5,comments=100,seed=1")
	d.awaitDurable(t)
	d.scrape(t, db, start.Add(15*time.Second))
	d.run(t, "verify")
	d.scrape(t, db, start.Add(30*time.Second))
	d.scrape(t, db, start.Add(45*time.Second))

	engine := promqltest.NewTestEngine(t, false, 5*time.Minute, 1_000_000)
	for file, board := range dashboards(t) {
		for _, panel := range board.Panels {
			for _, target := range panel.Targets {
				q, err := engine.NewInstantQuery(context.Background(), db, nil, interpolated(target.Expr), start.Add(45*time.Second))
				if err != nil {
					t.Fatalf("%s: %s: %v", file, target.Expr, err)
				}
				result := q.Exec(t.Context())
				if result.Err != nil {
					t.Fatalf("%s: %s: %v", file, target.Expr, result.Err)
				}
				if v, err := result.Vector(); err != nil || len(v) == 0 {
					t.Errorf("%s: %s: %s has no data (%v)", file, panel.Title, target.Expr, err)
				}
				q.Close()
			}
		}
	}
}
