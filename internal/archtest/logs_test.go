package archtest_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// badLines returns the faulty log lines of a Go file. A line needs a constant message and constant
// keys. A line that names a page of docs/runbook must name an existing one.
func badLines(t *testing.T, file string, src any) (lines int, bad []string) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		fn, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		level, withContext := strings.CutSuffix(fn.Sel.Name, "Context")
		first := 0 // the message
		if withContext {
			first = 1
		}
		switch level {
		case "Debug", "Info", "Warn", "Error":
		case "Log", "LogAttrs":
			first = 2
		default:
			return true
		}
		if by := last(fn.X); !withContext && !strings.HasSuffix(strings.ToLower(by), "log") || len(call.Args) <= first {
			return true // err.Error(), http.Error, another package's Log
		}
		lines++
		wrong := func(format string, args ...any) {
			bad = append(bad, fmt.Sprintf("%s: ", fset.Position(n.Pos()))+fmt.Sprintf(format, args...))
		}
		if text(call.Args[first]) == "" {
			wrong("the message is not constant: what differs is an attribute")
		}
		page := ""
		if level != "LogAttrs" {
			for i, rest := 0, call.Args[first+1:]; i < len(rest); i += 2 {
				if call.Ellipsis.IsValid() && i == len(rest)-1 {
					break
				}
				key := text(rest[i])
				if !regexp.MustCompile(`^[a-z][a-z0-9_]*$`).MatchString(key) {
					wrong("attribute %d has no constant key", i/2)
				} else if i+1 < len(rest) && key == "runbook" {
					page = text(rest[i+1])
				}
			}
		}
		if _, err := os.Stat(filepath.Join("..", "..", "docs", "runbook", page+".md")); level == "Error" && err != nil {
			wrong("an error wants a person: name the page, %q is none", page)
		} else if level == "Log" && text(call.Args[first-1]) == "" && last(call.Args[first-1]) != "LevelInfo" &&
			last(call.Args[first-1]) != "LevelDebug" {
			wrong("the level is not in the name of the method")
		}
		return true
	})
	return lines, bad
}

// last returns the last name of an expression.
func last(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.Ident:
		return e.Name
	}
	return ""
}

func text(e ast.Expr) string {
	if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
		s, _ := strconv.Unquote(lit.Value)
		return s
	}
	return ""
}

func TestLogLinesAreStructuredAndErrorsNameTheirPage(t *testing.T) {
	lines := 0
	err := filepath.WalkDir("../..", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(p, ".go") || strings.HasSuffix(p, "_test.go") ||
			strings.Contains(p, "/testkit/") || strings.Contains(p, "/examples/") {
			return err
		}
		n, bad := badLines(t, p, source(t, p))
		lines += n
		for _, b := range bad {
			t.Error(b)
		}
		return nil
	})
	if err != nil || lines < 80 {
		t.Errorf("%d lines, %v", lines, err)
	}
}

func TestBadLogLinesAreFound(t *testing.T) {
	for line, want := range map[string]int{
		`log.Warn("m", "a", 1)`:                                      0,
		`s.log.ErrorContext(ctx, "m", "err", err)`:                   1,
		`slog.Error("m", "runbook", "NoPage")`:                       1,
		`log.Error("m", "runbook", "RelayAbsent", "err", err)`:       0,
		`log.Info("m" + s)`:                                          1,
		`log.WarnContext(ctx, b.String())`:                           1,
		`log.Info("m", key, 1)`:                                      1,
		`log.Info("m", "Two words", 1)`:                              1,
		`log.Info("m", where...)`:                                    0,
		`log.Error("m", append(about, "runbook", "RelayAbsent")...)`: 1,
		`s.log.Log(ctx, level, "m")`:                                 1,
		`_ = err.Error()`:                                            0,
		`http.Error(w, text, 500)`:                                   0,
		`log.LogAttrs(ctx, level, "request", slog.String("a", "b"))`: 0,
	} {
		if n, bad := badLines(t, "x.go", "package x\nfunc f() { "+line+" }\n"); len(bad) != want ||
			strings.Contains(line, "og.") && n != 1 {
			t.Errorf("%s: %d lines, %v; want %d", line, n, bad, want)
		}
	}
}
