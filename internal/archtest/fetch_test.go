package archtest_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// servers are the rooms whose code runs for callers that are not trusted.
var servers = []string{"api", "ops/console", "store", "consumers", "kinds"}

// outbound has the names of net/http and net with which a program opens a connection.
var outbound = regexp.MustCompile(`^(http\.(Client|DefaultClient|Transport|DefaultTransport|Get|Head|Post|PostForm|NewRequest\w*)|` +
	`net\.(Dial\w*|Dialer))$`)

// TestNoRequestMakesAServerFetchAURL: whoever writes to the API or the console cannot make it open
// a connection to an address of their choice.
func TestNoRequestMakesAServerFetchAURL(t *testing.T) {
	files := 0
	for _, room := range servers {
		err := filepath.WalkDir(filepath.Join("..", "..", room), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			files++
			for _, what := range outboundIn(t, path, source(t, path)) {
				t.Errorf("%s: a server connects only to the addresses of its configuration", what)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if files < 100 {
		t.Errorf("found only %d files", files)
	}
	for code, want := range map[string]int{
		`var _, _ = http.Get(u)`: 1, `var _ = &http.Client{}`: 1, `var _, _ = net.DialTimeout("tcp", u, 0)`: 1,
		`var _ = http.StatusOK`: 0, `var _ = &http.Request{}`: 0, `var _ = net.ParseIP(u)`: 0,
	} {
		if got := outboundIn(t, "x.go", "package x\n"+code); len(got) != want {
			t.Errorf("%s: %v, want %d", code, got, want)
		}
	}
}

// outboundIn returns the places where a Go file could open a connection by net/http or net.
func outboundIn(t *testing.T, file string, src any) (found []string) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && outbound.MatchString(x.Name+"."+sel.Sel.Name) {
			found = append(found, fmt.Sprintf("%s: %s.%s", fset.Position(n.Pos()), x.Name, sel.Sel.Name))
		}
		return true
	})
	return found
}
