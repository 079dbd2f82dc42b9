package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// files calls fn for every file below the repository's root whose name ends in suffix.
func files(t *testing.T, suffix string, fn func(path, content string)) {
	t.Helper()
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bin") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, suffix) {
			return nil
		}
		b, err := os.ReadFile(path)
		fn(path, string(b))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestEveryTestThatADocumentNamesExists(t *testing.T) {
	tests := map[string]bool{}
	files(t, "_test.go", func(_, content string) {
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(content, -1) {
			tests[m[1]] = true
		}
	})
	files(t, ".md", func(path, content string) {
		for _, m := range regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(content, -1) {
			if !tests[m[1]] {
				t.Errorf("%s names %s, which does not exist", path, m[1])
			}
		}
	})
}

func TestEveryLinkOfADocumentLeadsSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	files(t, ".md", func(path, content string) {
		for _, m := range link.FindAllStringSubmatch(content, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
	})
}

func TestEveryDocumentThatTheCodeNamesExists(t *testing.T) {
	name := regexp.MustCompile(`docs/[\w./-]+\.md`)
	files(t, ".go", func(path, content string) {
		for _, m := range name.FindAllString(content, -1) {
			if _, err := os.Stat(filepath.Join("..", m)); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
	})
}
