package archtest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/tidings/tidings/"

const (
	pgx  = "github.com/jackc/pgx/v5"
	nats = "github.com/nats-io/nats.go"
	srv  = "github.com/nats-io/nats-server/v2"
	huma = "github.com/danielgtaylor/huma/v2"
	blob = "github.com/minio/minio-go"

	goose  = "github.com/pressly/goose"
	prom   = "github.com/prometheus/client_golang/prometheus"
	proto  = "google.golang.org/protobuf"
	otel   = "go.opentelemetry.io/otel/"
	yaml   = "go.yaml.in/yaml"
	schema = "github.com/santhosh-tekuri/jsonschema"
)

// rule says which packages of this module, and which of the watched libraries, the matching
// packages may import.
type rule struct {
	pkg  string   // path.Match below the module
	may  []string // path.Match below the module
	libs []string
}

// rules: the first one that matches a package applies. A package without a matching rule fails the
// test.
var rules = []rule{
	{pkg: "cmd/*", may: []string{"*", "*/*", "*/*/*"}, libs: []string{pgx, nats}}, // commands wire all packages
	{pkg: "cmd/*/*", may: []string{"*", "*/*", "*/*/*"}, libs: []string{pgx, nats}},

	{pkg: "api", libs: []string{huma, pgx}, // it passes a pgx.Tx on: the reads of a projection are one transaction of the caller
		may: []string{"store", "kinds", "kinds/upstreams", "event/contracts", "outbox", "projections", "projections/*", "event",
			"internal/tokens", "internal/versioned", "internal/postgres", "internal/shares", "internal/histogram", "internal/tracing",
			"internal/work", "consumers"}},
	{pkg: "store", libs: []string{pgx},
		may: []string{"kinds", "outbox", "internal/versioned", "event", "internal/postgres", "internal/shares", "internal/tracing",
			"internal/work"}},
	{pkg: "internal/tokens", may: []string{"store", "internal/postgres"}, libs: []string{pgx}}, // store: the rules of names
	{pkg: "internal/versioned", may: []string{"internal/postgres"}, libs: []string{pgx}},
	// Part of subscribers' programs, so without SQL.
	{pkg: "kinds", may: []string{"event"}},
	{pkg: "kinds/upstreams", may: []string{"kinds", "event"}},
	{pkg: "kinds/catalog", may: []string{"kinds", "internal/versioned", "internal/postgres", "internal/work"}, libs: []string{pgx}},
	{pkg: "kinds/declared", libs: []string{pgx},
		may: []string{"kinds", "kinds/catalog", "kinds/upstreams", "internal/versioned", "event", "internal/postgres"}},
	{pkg: "kinds/kindfile", may: []string{"kinds", "kinds/upstreams"}},
	{pkg: "event/contracts", may: []string{"kinds", "kinds/upstreams", "event"}},
	{pkg: "event"},                          // the wire contract depends on no other package
	{pkg: "client", may: []string{"event"}}, // part of users' programs
	// It runs `tidings dev` for the tests of users.
	{pkg: "client/clienttest", libs: []string{pgx},
		may: []string{"client", "cmd/tidings/cli", "kinds", "kinds/catalog", "internal/tokens", "internal/pglocal", "internal/postgres"}},
	{pkg: "outbox", may: []string{"event", "internal/deadletter", "internal/postgres", "internal/work"}, libs: []string{pgx}},
	{pkg: "outbox/coldstore", may: []string{"outbox", "event", "internal/postgres", "internal/redact", "internal/words"},
		libs: []string{pgx, blob}},
	// pgx: it passes the pool on to outbox.
	{pkg: "relay", libs: []string{nats, pgx},
		may: []string{"outbox", "kinds/declared", "event", "internal/lease", "internal/broker", "internal/heartbeat",
			"internal/histogram", "internal/tracing", "internal/work"}},
	{pkg: "consumers", may: []string{"kinds/catalog", "event", "internal/lease", "internal/broker", "internal/heartbeat",
		"internal/histogram", "internal/postgres", "internal/tracing", "internal/deadletter", "internal/work"}, libs: []string{pgx, nats}},
	// Part of users' programs, which need no PostgreSQL for it.
	{pkg: "subscribe", libs: []string{nats},
		may: []string{"subscribe/internal/settings", "client", "kinds", "kinds/upstreams", "event", "internal/broker", "internal/tracing",
			"internal/work"}},
	{pkg: "subscribe/internal/settings", libs: []string{nats},
		may: []string{"client", "kinds", "kinds/upstreams", "event", "internal/broker", "internal/work"}},
	// Apart from subscribe, so that a program without metrics does not link Prometheus' library.
	{pkg: "subscribe/prom", may: []string{"subscribe", "subscribe/internal/settings"}},
	// It is the public interface of consumers.
	{pkg: "subscribe/projector", libs: []string{pgx, nats},
		may: []string{"subscribe", "subscribe/internal/settings", "client", "consumers", "migrations", "event", "internal/lease",
			"internal/broker", "internal/postgres", "internal/tracing", "internal/work"}},
	{pkg: "projections", may: []string{"kinds", "event", "internal/postgres"}, libs: []string{pgx}},
	// Never each other, never NATS. store: they read the truth.
	{pkg: "projections/*", libs: []string{pgx},
		may: []string{"projections", "store", "kinds", "event", "internal/versioned", "internal/postgres"}},
	// Only public packages.
	{pkg: "examples/*", libs: []string{pgx, nats},
		may: []string{"client", "event", "kinds", "kinds/kindfile", "subscribe", "subscribe/projector", "subscribe/prom"}},
	{pkg: "deploy"}, // tests of the files in the directory
	{pkg: "docs"},   // likewise
	{pkg: "migrations", may: []string{"kinds", "kinds/catalog", "internal/postgres", "internal/work"}, libs: []string{pgx}},
	// What an operator sees and does. The CLI and the console show the same packages, which read
	// all rooms of the path, and never the API. The console has no SQL (TestTheConsoleHasNoSQL).
	{pkg: "ops/load", may: []string{"client"}}, // a client of the API
	{pkg: "ops/demo", libs: []string{pgx}, // likewise; outbox and postgres are for its failures (demo.Trouble)
		may: []string{"client", "outbox", "event", "ops/load", "internal/postgres"}},
	{pkg: "ops/console", libs: []string{pgx, nats},
		may: []string{"ops/*", "store", "outbox", "outbox/*", "consumers", "projections", "projections/*", "migrations", "kinds",
			"kinds/*", "event", "internal/*"}},
	{pkg: "ops/*", libs: []string{pgx, nats},
		may: []string{"ops/*", "store", "outbox", "outbox/*", "relay", "consumers", "projections", "projections/history", "migrations",
			"kinds", "kinds/catalog", "kinds/declared", "kinds/upstreams", "event", "internal/*"}},

	{pkg: "internal/broker", may: []string{"event", "internal/socket", "internal/work"}, libs: []string{nats}}, // event: the subjects
	{pkg: "internal/brokermetrics", may: []string{"internal/broker"}, libs: []string{nats}},
	{pkg: "internal/histogram"},
	{pkg: "internal/natsserver", libs: []string{nats, srv}}, // the only one that may import the server
	{pkg: "internal/redact", may: []string{"event"}},
	{pkg: "internal/heartbeat", may: []string{"event", "internal/histogram"}},
	{pkg: "internal/deadletter", may: []string{"event", "internal/postgres"}, libs: []string{pgx}},
	// It explores the protocol with the outbox's own decisions about the layout.
	{pkg: "internal/protocol", may: []string{"outbox", "event"}},
	{pkg: "internal/clientgen", may: []string{"kinds", "event"}}, // it writes client/builtin.go
	// Part of users' programs: it may import OpenTelemetry's API, never its SDK.
	{pkg: "internal/tracing", may: []string{"event"}},
	// It migrates its databases.
	{pkg: "internal/testkit", may: []string{"internal/*", "migrations", "kinds", "kinds/kindfile"}, libs: []string{pgx, nats}},
	// It runs the parts of the system in tests.
	{pkg: "internal/testkit/system", may: []string{"relay", "consumers", "event", "internal/*"}, libs: []string{pgx, nats}},
	{pkg: "internal/*", may: []string{"internal/*"}, libs: []string{pgx}},
	{pkg: "internal/*/*", may: []string{"internal/*", "internal/*/*"}, libs: []string{pgx}},
}

type pkg struct {
	ImportPath, Dir                    string
	Imports, TestImports, XTestImports []string
	TestGoFiles, XTestGoFiles          []string
}

func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Imports,TestImports,XTestImports,TestGoFiles,XTestGoFiles", module+"...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, &stderr)
	}
	var all []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func TestPackagesImportOnlyWhatTheyMay(t *testing.T) {
	all := list(t)
	if len(all) < 5 {
		t.Fatalf("go list knows %d packages", len(all))
	}
	for _, p := range all {
		name := strings.TrimPrefix(p.ImportPath, module)
		r, ok := find(name)
		if !ok {
			t.Errorf("%s: no rule says what it may import", name)
			continue
		}
		for _, imp := range p.Imports {
			if !allowed(r, imp) {
				t.Errorf("%s may not import %s", name, imp)
			}
		}
	}
}

// links lists parts that a program must not link, directly or not, and how many packages it may
// link at most: a subscriber's program is its owner's, and the relay is the process of which a
// fleet has most. A change that needs more packages raises the number and says why.
var links = map[string]struct {
	never []string
	most  int
}{
	"subscribe":           {append([]string{pgx, prom, proto, module + "consumers", module + "migrations"}, notOurs...), 245},
	"subscribe/projector": {notOurs, 350},
	"client":              {[]string{srv, goose, blob, huma, otel, pgx, nats, prom, module + "internal"}, 195},
	"cmd/relay": {[]string{srv, goose, blob, huma, yaml, schema, module + "api", module + "ops", module + "store",
		module + "projections"}, 485},
}

// notOurs are the parts that no program of a subscriber links.
var notOurs = []string{srv, goose, blob, huma, yaml, schema, prom + "/promhttp", otel + "sdk", otel + "exporters", module + "api",
	module + "ops", module + "internal/daemon", module + "internal/natsserver"}

func TestProgramsLinkOnlyWhatTheyUse(t *testing.T) {
	for root, l := range links {
		out, err := exec.Command("go", "list", "-deps", module+root).CombinedOutput()
		if err != nil {
			t.Fatalf("go list: %v: %s", err, out)
		}
		deps := strings.Fields(string(out))
		if len(deps) > l.most {
			t.Errorf("%s links %d packages, want %d at most", root, len(deps), l.most)
		}
		for _, dep := range deps {
			for _, part := range l.never {
				if strings.HasPrefix(dep, part) {
					t.Errorf("%s links %s", root, dep)
				}
			}
		}
	}
}

// TestASubscribersProgramIsSmall holds the size in docs/subscribe-reference.md. The linker drops
// what a program does not call: the HTTP client without the option Bootstrap (0.7 MB), and
// Prometheus' library without package prom (2.1 MB).
func TestASubscribersProgramIsSmall(t *testing.T) {
	program := filepath.Join(t.TempDir(), "mailer")
	out, err := exec.Command("go", "build", "-ldflags=-s -w", "-o", program, module+"examples/mailer").CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	info, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	if size := info.Size(); size >= 8_000_000 {
		t.Errorf("examples/mailer has %d bytes, want fewer than 8,000,000", size)
	}
}

func TestOnlyTestsUseTheTestServers(t *testing.T) {
	for _, p := range list(t) {
		for _, imp := range p.Imports {
			ofTests := imp == module+"internal/testkit" || strings.HasPrefix(imp, "github.com/testcontainers/")
			if ofTests && !strings.HasPrefix(p.ImportPath, module+"internal/testkit") {
				t.Errorf("%s imports %s outside its tests", strings.TrimPrefix(p.ImportPath, module), imp)
			}
		}
	}
}

func TestPackagesThatUseServersStopThem(t *testing.T) {
	for _, p := range list(t) {
		uses := false
		for _, imp := range append(p.TestImports, p.XTestImports...) {
			uses = uses || imp == module+"internal/testkit"
		}
		if !uses {
			continue
		}
		if !slices.ContainsFunc(append(p.TestGoFiles, p.XTestGoFiles...), func(file string) bool {
			return bytes.Contains(source(t, filepath.Join(p.Dir, file)), []byte("testkit.Main("))
		}) {
			t.Errorf("%s: its TestMain does not call testkit.Main", strings.TrimPrefix(p.ImportPath, module))
		}
	}
}

func find(name string) (rule, bool) {
	for _, r := range rules {
		if match(r.pkg, name) {
			return r, true
		}
	}
	return rule{}, false
}

func allowed(r rule, imp string) bool {
	if name, ours := strings.CutPrefix(imp, module); ours {
		for _, may := range r.may {
			if match(may, name) {
				return true
			}
		}
		return false
	}
	for _, lib := range []string{pgx, nats, srv, huma, blob} {
		if imp != lib && !strings.HasPrefix(imp, lib+"/") {
			continue
		}
		for _, l := range r.libs {
			if l == lib {
				return true
			}
		}
		return false
	}
	return true
}

func match(pattern, name string) bool {
	ok, err := path.Match(pattern, name)
	return ok && err == nil
}

// Code that the console and the commands share is in packages below both.
func TestTheConsoleHasNoSQL(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "ops", "console", "*.go"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if !strings.HasSuffix(file, "_test.go") {
			for _, what := range sqlIn(t, file, source(t, file)) {
				t.Errorf("%s: the console reads and acts through the packages that own the tables", what)
			}
		}
	}
	for code, want := range map[string]int{
		`var _ = "SELECT 1 FROM edges"`: 1, `var _, _ = p.Query(ctx, s)`: 1, `var _ = p.SendBatch(ctx, b)`: 1, `var _ = u.Query()`: 0,
		"var _ = `select the rows`": 0, "const q = `\nWITH a AS (SELECT 1)\nUPDATE b SET c = 1`": 1,
	} {
		if got := sqlIn(t, "x.go", "package x\n"+code); len(got) != want {
			t.Errorf("%s: %v, want %d", code, got, want)
		}
	}
}

var statement = regexp.MustCompile(`(?s)^\s*(SELECT|INSERT|UPDATE|DELETE|WITH|BEGIN|CALL|LOCK|TRUNCATE)\s`)

// sqlIn returns the places where a Go file contains or runs a statement.
func sqlIn(t *testing.T, file string, src any) (found []string) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && len(n.Args) > 0 &&
				slices.Contains([]string{"Query", "QueryRow", "Exec", "SendBatch", "CopyFrom", "BeginTx"}, sel.Sel.Name) {
				found = append(found, fmt.Sprintf("%s: calls %s", fset.Position(n.Pos()), sel.Sel.Name))
			}
		case *ast.BasicLit:
			if s, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING && statement.MatchString(s) {
				found = append(found, fmt.Sprintf("%s: has a statement", fset.Position(n.Pos())))
			}
		}
		return true
	})
	return found
}

func TestRulesRefuse(t *testing.T) {
	for _, c := range []struct{ from, to string }{
		{"projections/threadcache", module + "projections/followercounts"},
		{"projections/threadcache", nats},
		{"event", pgx},
		{"relay", module + "internal/postgres"},
		{"relay", srv + "/server"},
		{"consumers", module + "projections/threadcache"},
		{"internal/lease", module + "outbox"},
		{"ops/doctor", module + "cmd/internal/fleet"},
		{"ops/status", module + "api"},
		{"ops/verify", module + "projections/threadcache"},
		{"ops/console", module + "api"},
		{"ops/console", module + "cmd/internal/fleet"},
		{"store", module + "api"},
		{"api", nats},
		{"outbox", blob + "/v7"},
		{"client", module + "kinds"},
		{"client", nats},
	} {
		r, ok := find(c.from)
		if !ok || allowed(r, c.to) {
			t.Errorf("%s may import %s", c.from, c.to)
		}
	}
}
