package docs_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "generate metrics.md")

// metric is one that the source declares.
type metric struct{ folder, name, kind, labels, help string }

var (
	metricName = regexp.MustCompile(`^[a-z]+(_[a-z0-9]+)+$`)
	metricKind = regexp.MustCompile(`Counter|Gauge|Histogram`)
)

// TestTheMetricsPageIsWhatTheCodeDeclares compares metrics.md with the names, labels and help texts in the source. -update writes it.
func TestTheMetricsPageIsWhatTheCodeDeclares(t *testing.T) {
	var all []metric
	files(t, ".go", func(path, content string) {
		if !strings.HasSuffix(path, "_test.go") && strings.Contains(content, "client_golang/prometheus") {
			all = append(all, declaredMetrics(t, path, content)...)
		}
	})
	slices.SortFunc(all, func(a, b metric) int { return strings.Compare(a.folder+" "+a.name, b.folder+" "+b.name) })
	var b strings.Builder
	b.WriteString("# Metrics\n\nEvery metric of the binaries, by the package that exports it. Each process serves its own at `/metrics` on its ops address (`OPS_ADDR`). Names end in their unit: `_seconds`, `_bytes`; `_total` counts since the\n" +
		"start of the process. The Go runtime's and the process's own metrics come on top. `go test ./docs -run TestTheMetricsPage -update` generates this page.\n")
	folder := ""
	for _, m := range all {
		if m.folder != folder {
			folder = m.folder
			fmt.Fprintf(&b, "\n## %s\n| metric | type | labels | meaning |\n|---|---|---|---|\n", folder)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.name, m.kind, m.labels, strings.ReplaceAll(m.help, "|", `\|`))
	}
	if len(all) < 80 {
		t.Errorf("%d metrics were found: the rules that find them are wrong", len(all))
	}
	if *update {
		if err := os.WriteFile("metrics.md", []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile("metrics.md"); err != nil || string(have) != b.String() {
		t.Errorf("metrics.md is not what the code declares (%v): run this test with -update", err)
	}
}

// declaredMetrics finds them in a file: options with a Name and a Help, and calls with a name and a help text side by side.
func declaredMetrics(t *testing.T, path, content string) (all []metric) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, content, 0)
	if err != nil {
		t.Fatal(err)
	}
	lists := map[string]string{} // variables of labels
	ast.Inspect(file, func(n ast.Node) bool {
		if a, ok := n.(*ast.AssignStmt); ok && len(a.Lhs) == len(a.Rhs) {
			for i, l := range a.Lhs {
				if id, ok := l.(*ast.Ident); ok && labelsOf(a.Rhs[i], nil) != "" {
					lists[id.Name] = labelsOf(a.Rhs[i], nil)
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
		name, help, rest := "", "", call.Args
		for i, arg := range call.Args {
			if lit, ok := arg.(*ast.CompositeLit); ok {
				if name, help = field(lit, "Name"), field(lit, "Help"); name != "" && help != "" {
					rest = call.Args[i+1:]
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
		m := metric{folder: folder, name: name, help: help, kind: "gauge"}
		if strings.HasSuffix(name, "_total") {
			m.kind = "counter"
		}
		if s, ok := call.Fun.(*ast.SelectorExpr); ok && metricKind.MatchString(s.Sel.Name) {
			m.kind = strings.ToLower(metricKind.FindString(s.Sel.Name))
		}
		for _, arg := range rest {
			if l := labelsOf(arg, lists); l != "" {
				m.labels = l
			}
		}
		all = append(all, m)
		return true
	})
	return all
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

// text is the string that an expression of literals makes.
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

// labelsOf are the labels of a slice of strings, or of a variable that has one.
func labelsOf(e ast.Expr, lists map[string]string) string {
	switch e := e.(type) {
	case *ast.Ident:
		return lists[e.Name]
	case *ast.CompositeLit:
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
