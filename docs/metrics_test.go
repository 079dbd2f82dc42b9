package docs_test

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "generate metrics.md")

// metric is a metric that the source declares.
type metric struct{ folder, name, kind, labels, help string }

var (
	metricName = regexp.MustCompile(`^[a-z]+(_[a-z0-9]+)+$`)
	metricKind = regexp.MustCompile(`(?i)counter|gauge|histogram`)
)

// TestTheMetricsPageIsWhatTheCodeDeclares compares metrics.md with the names, labels and help texts
// in the source. -update writes the page.
func TestTheMetricsPageIsWhatTheCodeDeclares(t *testing.T) {
	var all []metric
	files(t, ".go", func(path, content string) {
		if !strings.HasSuffix(path, "_test.go") && strings.Contains(content, "client_golang/prometheus") {
			all = append(all, declaredMetrics(t, path, content)...)
		}
	})
	slices.SortFunc(all, func(a, b metric) int { return strings.Compare(a.folder+" "+a.name, b.folder+" "+b.name) })
	var b strings.Builder
	b.WriteString("# Metrics\n\nEvery metric of the binaries, by the package that exports it. " +
		"Each process serves its metrics at `/metrics` on its ops address (`OPS_ADDR`), with those of the Go runtime.\n\n" +
		"- **Names** begin with `tidings_` and end in their unit, `_seconds` or `_bytes`. " +
		"`_total` counts since the start of the process.\n" +
		"- **Labels.** In `tidings serve` and `tidings dev`, `part` names the part. " +
		"With several [cells](adr/0018-cells.md), consumers have `cell`. Sizes of PostgreSQL have `database`.\n" +
		"- **Histograms** have the buckets that the alert rules use. They also have native buckets, " +
		"which Prometheus scrapes with `scrape_native_histograms: true`.\n\n" +
		"`go test ./docs -run TestTheMetricsPage -update` generates this page.\n")
	folder := ""
	for _, m := range all {
		if m.folder != folder {
			folder = m.folder
			fmt.Fprintf(&b, "\n## %s\n| metric | type | labels | meaning |\n|---|---|---|---|\n", folder)
		}
		if !strings.HasPrefix(m.name, "tidings_") {
			t.Errorf("%s of %s does not begin with tidings_", m.name, m.folder)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.name, m.kind, m.labels, strings.ReplaceAll(m.help, "|", `\|`))
	}
	if len(all) < 80 {
		t.Errorf("found %d metrics: the rules that find them are wrong", len(all))
	}
	if *update {
		if err := os.WriteFile("metrics.md", []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile("metrics.md"); err != nil || string(have) != b.String() {
		t.Errorf("metrics.md differs from the code (%v): run this test with -update", err)
	}
}

// declaredMetrics finds the metrics of a file. They are options with a Name and a Help, or calls
// with a name and a help text.
func declaredMetrics(t *testing.T, path, content string) (all []metric) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, content, 0)
	if err != nil {
		t.Fatal(err)
	}
	lists := map[string]string{} // variables of labels
	wrapped := ""                // labels that the file's registerer adds
	ast.Inspect(file, func(n ast.Node) bool {
		if a, ok := n.(*ast.AssignStmt); ok && len(a.Lhs) == len(a.Rhs) {
			for i, l := range a.Lhs {
				if id, ok := l.(*ast.Ident); ok && labelsOf(a.Rhs[i], nil) != "" {
					lists[id.Name] = labelsOf(a.Rhs[i], nil)
				}
				if call, ok := a.Rhs[i].(*ast.CallExpr); ok && named(l, "reg") && len(call.Args) == 2 && named(call.Args[1], "reg") {
					wrapped = labelsOf(call.Args[0], nil)
				}
			}
		}
		return true
	})
	folder := filepath.ToSlash(strings.TrimPrefix(filepath.Dir(path), ".."+string(filepath.Separator)))
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		name, help, fixed, rest := "", "", wrapped, call.Args
		for i, arg := range call.Args {
			if lit, ok := arg.(*ast.CompositeLit); ok {
				if name, help = field(lit, "Name"), field(lit, "Help"); name != "" && help != "" {
					fixed, rest = joined(fixed, constLabels(lit)), call.Args[i+1:]
					break
				}
			}
			if i+1 < len(call.Args) && metricName.MatchString(text(arg)) && strings.Contains(text(call.Args[i+1]), " ") {
				name, help, rest = text(arg), text(call.Args[i+1]), call.Args[i+2:]
				break
			}
		}
		if !metricName.MatchString(name) || help == "" {
			return true
		}
		m := metric{folder: folder, name: name, help: help, kind: "gauge", labels: fixed}
		if strings.HasSuffix(name, "_total") {
			m.kind = "counter"
		}
		if _, ok := call.Fun.(*ast.SelectorExpr); ok {
			m.kind = cmp.Or(strings.ToLower(metricKind.FindString(types.ExprString(call.Fun))), m.kind)
		}
		for _, arg := range rest {
			if l := labelsOf(arg, lists); l != "" {
				m.labels = joined(fixed, l)
			}
		}
		all = append(all, m)
		return true
	})
	return all
}

// constLabels returns the labels that the options of a metric fix.
func constLabels(options *ast.CompositeLit) string {
	for _, e := range options.Elts {
		if kv, ok := e.(*ast.KeyValueExpr); ok && named(kv.Key, "ConstLabels") {
			return labelsOf(kv.Value, nil)
		}
	}
	return ""
}

func named(e ast.Expr, name string) bool {
	id, ok := e.(*ast.Ident)
	return ok && id.Name == name
}

func joined(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + ", " + b
}

func field(lit *ast.CompositeLit, key string) string {
	for _, e := range lit.Elts {
		if kv, ok := e.(*ast.KeyValueExpr); ok {
			if id, ok := kv.Key.(*ast.Ident); ok && id.Name == key {
				return text(kv.Value)
			}
		}
	}
	return ""
}

// text returns the string of an expression of literals.
func text(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if s, err := strconv.Unquote(e.Value); e.Kind == token.STRING && err == nil {
			return s
		}
	case *ast.BinaryExpr:
		if l, r := text(e.X), text(e.Y); l != "" && r != "" {
			return l + r
		}
	}
	return ""
}

// labelsOf returns the labels in a slice of strings, in a variable with one, or in
// prometheus.Labels.
func labelsOf(e ast.Expr, lists map[string]string) string {
	switch e := e.(type) {
	case *ast.Ident:
		return lists[e.Name]
	case *ast.CompositeLit:
		if s, ok := e.Type.(*ast.SelectorExpr); ok && s.Sel.Name == "Labels" {
			labels := ""
			for _, one := range e.Elts {
				labels = joined(labels, "`"+text(one.(*ast.KeyValueExpr).Key)+"`")
			}
			return labels
		}
		if a, ok := e.Type.(*ast.ArrayType); !ok || fmt.Sprint(a.Elt) != "string" {
			return ""
		}
		var labels []string
		for _, one := range e.Elts {
			labels = append(labels, "`"+text(one)+"`")
		}
		return strings.Join(labels, ", ")
	}
	return ""
}
