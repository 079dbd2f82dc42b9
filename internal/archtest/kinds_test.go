package archtest_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tidings/tidings/kinds"
)

// old are the kinds that are older than the mechanism of kinds, and have their own routes, views
// and payloads.
var old = []string{"follow", "comment"}

// ambiguous are names of kinds that also have another meaning: a message of the outbox, a share of
// leases. They count only in rooms.
var (
	ambiguous = []string{"message", "messages", "share", "shares"}
	rooms     = []string{"api", "event", "kinds", "migrations", "projections", "store"}
)

// kindWords returns the names of the built-in kinds without the old ones, in all forms of
// builtin.json.
func kindWords() map[string]bool {
	words := map[string]bool{}
	add := func(name string, others ...string) {
		if slices.Contains(old, name) {
			return
		}
		words[name] = true
		for _, w := range others {
			if strings.HasPrefix(w, name) { // members and groups have other meanings too
				words[w] = true
			}
		}
	}
	for _, e := range kinds.Builtin().AllEdges() {
		add(e.Name, e.Plural, e.Forward, e.Reverse)
	}
	for _, c := range kinds.Builtin().AllChildren() {
		add(c.Name, c.Plural)
	}
	return words
}

var (
	camel  = regexp.MustCompile(`[A-Z]?[a-z]+|[A-Z]+`)
	quoted = regexp.MustCompile(`'([a-z_]+)'|"([a-z_]+)"`)
)

// namesOf returns the places where a Go file names a kind. An identifier counts if it is such a
// name, or contains a word of no other meaning. A string counts if it is such a name, or has one in
// quotes.
func namesOf(t *testing.T, file string, src any, words map[string]bool) []string {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	room, _, _ := strings.Cut(filepath.ToSlash(file), "/")
	if strings.HasPrefix(filepath.ToSlash(file), "event/contracts/") { // AsyncAPI has messages
		room = "event/contracts"
	}
	is := func(w string) bool {
		w = strings.ToLower(w)
		return words[w] && (!slices.Contains(ambiguous, w) || slices.Contains(rooms, room))
	}
	var found []string
	names := map[string]bool{}       // identifiers of the file -> whether they name a kind
	foreign := map[*ast.Ident]bool{} // members of types of other modules
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			foreign[n.Sel] = slices.Contains(ambiguous, strings.ToLower(n.Sel.Name))
		case *ast.KeyValueExpr:
			if k, ok := n.Key.(*ast.Ident); ok {
				foreign[k] = slices.Contains(ambiguous, strings.ToLower(k.Name))
			}
		case *ast.Ident:
			said, known := names[n.Name]
			if !known {
				said = is(n.Name)
				for _, w := range camel.FindAllString(n.Name, -1) {
					w = strings.ToLower(w)
					said = said || is(w) && !slices.Contains(ambiguous, w) && w != "like" // looksLike
				}
				names[n.Name] = said
			}
			if said && !foreign[n] {
				found = append(found, fmt.Sprintf("%s: the identifier %s", fset.Position(n.Pos()), n.Name))
			}
		case *ast.BasicLit:
			s, err := strconv.Unquote(n.Value)
			if n.Kind != token.STRING || err != nil {
				return true
			}
			said := is(s)
			for _, m := range quoted.FindAllStringSubmatch(s, -1) {
				said = said || is(m[1]) || is(m[2])
			}
			if said {
				found = append(found, fmt.Sprintf("%s: the string %s", fset.Position(n.Pos()), n.Value))
			}
		}
		return true
	})
	return found
}

// Kinds are data. A file that names one would have to change for a new kind.
func TestNoFileNamesAKind(t *testing.T) {
	words := kindWords()
	files := 0
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		// The client has a typed method for each operation of each built-in kind. A test compares
		// it with the OpenAPI document.
		if d.IsDir() && (slices.Contains([]string{"client", "examples", "testdata"}, d.Name()) ||
			strings.HasPrefix(d.Name(), ".") && p != root) {
			return filepath.SkipDir
		}
		if d.IsDir() || path.Ext(p) != ".go" || strings.HasSuffix(p, "_test.go") {
			return nil
		}
		files++
		name, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		for _, where := range namesOf(t, name, source(t, p), words) {
			t.Errorf("%s names a kind: read it from the Set", where)
		}
		return nil
	})
	if err != nil || files < 100 {
		t.Errorf("%d files, %v", files, err)
	}
}

func TestNamesOfKindsAreFound(t *testing.T) {
	words := kindWords()
	for _, w := range []string{"like", "likes", "likers", "share", "shares", "sharers", "membership", "memberships", "message",
		"messages", "review", "reviews"} {
		if !words[w] {
			t.Errorf("%q is not a known word", w)
		}
	}
	for _, c := range []struct {
		file, code string
		found      int
	}{
		{"store/x.go", `const like = 1`, 1},
		{"relay/x.go", `type Review struct{ Message string }`, 1},
		{"relay/x.go", `var a = "reviews"`, 1},
		{"relay/x.go", `var messages, share = 1, "message"`, 0},
		{"store/x.go", `var messages, share = 1, "message"`, 3},
		{"store/x.go", `func newReview() {}; var looksLike = 1`, 1},
		{"store/x.go", `type t struct{ Message string }`, 1},
		{"api/x.go", `var a = b.Message`, 0},
		{"outbox/x.go", "const sql = `SELECT 1 WHERE a = 'membership'`", 1},
		{"outbox/x.go", "const sql = `INSERT INTO outbox_messages VALUES (1) -- a like`", 0},
		{"api/x.go", `var a = "no such review"; var b = "follow"`, 0},
	} {
		if got := namesOf(t, c.file, "package x\n"+c.code, words); len(got) != c.found {
			t.Errorf("%s: %s: %v, want %d", c.file, c.code, got, c.found)
		}
	}
}

func source(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
