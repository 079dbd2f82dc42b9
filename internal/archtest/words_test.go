package archtest_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// refused are words that neither a comment nor a page has: British spellings, and words that tell
// the history of the code. A comment says what the code does; git tells what it did.
var refused = regexp.MustCompile(`(?i)\b((?:un)?(?:` + strings.Join([]string{
	"catalogues?d?", "neighbour(?:s|ing|hood)?", "colour(?:s|ed|ing)?", "behaviours?", "favour(?:s|ed|ite|ites)?", "honour(?:s|ed)?",
	"labell(?:ed|ing)", "cancell(?:ed|ing)", "travell(?:ed|ing|er)", "modell(?:ed|ing)", "signall(?:ed|ing)", "levell(?:ed|ing)",
	"licence[sd]?", "centre[sd]?", "grey", "whilst", "amongst", "towards", "learnt", "artefacts?", "programmes?", "fulfils?", "judgement",
	"(?:author|initial|normal|optim|organ|real|recogn|serial|summar|synchron|minim|maxim|general)is(?:e|es|ed|er|ing|ations?)",
	"analys(?:ed|es|ing)", "formerly", "nowadays", "any ?more", "for ever", "goes on", "went on",
}, "|") + `))\b`)

// pages are the endings of files that are read in full. Of a Go file the comments count. Migrations
// are exempt, because a migration never changes.
var pages = []string{".md", ".yaml", ".yml", ".sh", ".html", ".css"}

// refusedIn returns the places of refused words in a file.
func refusedIn(t *testing.T, file string, src []byte) (found []string) {
	t.Helper()
	if path.Ext(file) != ".go" {
		for i, line := range strings.Split(string(src), "\n") {
			if w := refused.FindString(line); w != "" {
				found = append(found, fmt.Sprintf("%s:%d: %q", file, i+1, w))
			}
		}
		return found
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range commentsOf(f) {
		if w := refused.FindString(c.Text); w != "" {
			found = append(found, fmt.Sprintf("%s: %q", fset.Position(c.Pos()), w))
		}
	}
	return found
}

func commentsOf(f *ast.File) (all []*ast.Comment) {
	for _, g := range f.Comments {
		all = append(all, g.List...)
	}
	return all
}

func TestCommentsAndPagesAreAmericanAndInThePresent(t *testing.T) {
	checked := 0
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, p)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "node_modules" || d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") && p != root):
			return filepath.SkipDir
		case name == "CONTRIBUTING.md", name == "CHANGELOG.md": // one lists the words, the other tells the history
			return nil
		case d.IsDir(), path.Ext(p) != ".go" && !isPage(p):
			return nil
		}
		checked++
		for _, where := range refusedIn(t, p, source(t, p)) {
			t.Errorf("%s: write American English, and what the code does at present", where)
		}
		return nil
	})
	if err != nil || checked < 800 {
		t.Errorf("%d files, %v", checked, err)
	}
}

func isPage(file string) bool {
	for _, ext := range pages {
		if path.Ext(file) == ext {
			return true
		}
	}
	return false
}

func TestRefusedWordsAreFound(t *testing.T) {
	for text, want := range map[string]int{
		"// The colour of a neighbour.":          1, // of a line
		"// It is cancelled.\n// A Licence.":     2,
		"// It serialises.":                      1,
		"// It does not wait any more.":          1,
		"// It rises, a promise, a license.":     0,
		"var colour = 1 // a color":              0,
		"// It can be set to gray, and goes to.": 0,
	} {
		if got := refusedIn(t, "x.go", []byte("package x\n\n"+text+"\n")); len(got) != want {
			t.Errorf("%q: %v, want %d", text, got, want)
		}
	}
	if got := refusedIn(t, "x.md", []byte("a\nthe behaviour\n")); len(got) != 1 || !strings.Contains(got[0], "x.md:2") {
		t.Errorf("a page: %v", got)
	}
}
