package archtest_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// maxLines limits the lines of a function, from its name to its closing brace, to what fits on a
// screen.
const maxLines = 80

// longFunctions calls found for each function of a file that is too long.
func longFunctions(t *testing.T, file string, src any, found func(name string, lines int)) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok {
			if n := fset.Position(fn.End()).Line - fset.Position(fn.Pos()).Line + 1; n > maxLines {
				found(fn.Name.Name, n)
			}
		}
	}
}

func TestNoFunctionIsLongerThanAScreen(t *testing.T) {
	files := 0
	err := filepath.WalkDir("../..", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(p, ".go") || strings.HasSuffix(p, "_test.go") {
			return err
		}
		files++
		longFunctions(t, p, source(t, p), func(name string, lines int) {
			t.Errorf("%s: %s has %d lines, and a function may have %d: split it", p, name, lines, maxLines)
		})
		return nil
	})
	if err != nil || files < 100 {
		t.Errorf("%d files, %v", files, err)
	}
}

func TestLongFunctionsAreFound(t *testing.T) {
	for lines, want := range map[int]int{maxLines: 0, maxLines + 1: 1} {
		got := 0
		longFunctions(t, "x.go", "package x\n// A comment does not count.\nfunc f() {"+strings.Repeat("\n", lines-1)+"}\n",
			func(name string, n int) { got++ })
		if got != want {
			t.Errorf("a function of %d lines: found %d, want %d", lines, got, want)
		}
	}
}
