package archtest_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// supported are the packages that other modules may import and rely on.
var supported = []string{"client", "client/clienttest", "event", "kinds", "kinds/kindfile", "kinds/upstreams", "outbox", "subscribe",
	"subscribe/projector", "subscribe/prom"}

// The sentences by which the first paragraph of a package comment names the package's readers, and
// says what they may rely on.
var reader = regexp.MustCompile(`(^|[.:;] )It is for [^.]+\.`)

const (
	isSupported = "It is supported: CHANGELOG.md names every change that a program of yours would notice."
	mayChange   = "It may change in any release."
)

// introduction returns what the package comment lacks in its first paragraph, or "".
func introduction(name, comment string) string {
	first, _, _ := strings.Cut(comment, "\n\n")
	first = strings.Join(strings.Fields(first), " ")
	internal := slices.Contains(strings.Split(name, "/"), "internal") || name == "deploy" || name == "docs" // these have only tests
	switch {
	case !reader.MatchString(first):
		return `a sentence "It is for ..."`
	case slices.Contains(supported, name) != strings.Contains(first, isSupported):
		return "the sentence that it is supported, if and only if other modules may rely on it"
	case (!internal && !slices.Contains(supported, name)) != strings.Contains(first, mayChange):
		return `the sentence "` + mayChange + `", if and only if other modules can import it and may not rely on it`
	}
	return ""
}

// A stranger who opens a folder first reads whether it is for them.
func TestEveryPackageSaysWhoReadsIt(t *testing.T) {
	checked := 0
	for _, p := range list(t) {
		name := strings.TrimPrefix(p.ImportPath, module)
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, "doc.go"), nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			if !isMain(t, p.Dir) {
				t.Errorf("%s has no doc.go: %v", name, err)
			}
			continue
		}
		checked++
		if lacks := introduction(name, f.Doc.Text()); lacks != "" {
			t.Errorf("the first paragraph of %s/doc.go lacks %s", name, lacks)
		}
		packageComments(t, p.Dir, func(file string) { t.Errorf("%s/%s has a package comment beside that of doc.go", name, file) })
	}
	readme := string(source(t, "../../README.md"))
	for _, name := range supported {
		if !strings.Contains(readme, "`"+name+"`") {
			t.Errorf("README.md does not say that %s is supported", name)
		}
	}
	if checked < 40 {
		t.Errorf("%d packages", checked)
	}
}

// isMain reports whether the folder has a program.
func isMain(t *testing.T, dir string) bool {
	t.Helper()
	is := false
	files(t, dir, func(_ string, f *ast.File) { is = is || f.Name.Name == "main" })
	return is
}

// packageComments calls found for each file but doc.go that has a package comment.
func packageComments(t *testing.T, dir string, found func(file string)) {
	t.Helper()
	files(t, dir, func(file string, f *ast.File) {
		if file != "doc.go" && strings.HasPrefix(f.Doc.Text(), "Package ") {
			found(file)
		}
	})
}

func files(t *testing.T, dir string, visit func(name string, f *ast.File)) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Fatal(err)
		}
		visit(filepath.Base(p), f)
	}
}

func TestWhatAnIntroductionLacksIsFound(t *testing.T) {
	for _, c := range []struct {
		name, comment string
		lacks         bool
	}{
		{"relay", "Package relay relays. It is for the path of an event. It may change in any release.", false},
		{"relay", "Package relay relays. It may change in any release.", true},
		{"relay", "Package relay relays.\n\nIt is for the path of an event. It may change in any release.", true},
		{"relay", "Package relay relays. It is for the path of an event.", true},
		{"relay", "Package relay relays. It is for the path of an event. " + isSupported, true},
		{"client", "Package client calls. It is for callers of\nthe API. " + isSupported, false},
		{"client", "Package client calls. It is for callers of the API.", true},
		{"client", "Package client calls. It is for callers of the API. " + isSupported + " " + mayChange, true},
		{"internal/work", "Package work works. It is for the parts.", false},
		{"internal/work", "Package work works. It is for the parts. It may change in any release.", true},
	} {
		if got := introduction(c.name, c.comment); (got != "") != c.lacks {
			t.Errorf("%s: %q lacks %q", c.name, c.comment, got)
		}
	}
}
