package protocol

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestThePageNamesCodeThatExists keeps docs/protocol.md in step: each name in its table of steps is
// declared in a package of the page.
func TestThePageNamesCodeThatExists(t *testing.T) {
	page, err := os.ReadFile("../../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "## Which step is which code")
	table, _, _ = strings.Cut(table, "\n## ")
	var code strings.Builder
	for _, dir := range []string{"relay", "outbox", "consumers"} {
		files, err := filepath.Glob("../../" + dir + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatal(dir, err)
		}
		for _, file := range files {
			if b, err := os.ReadFile(file); err != nil {
				t.Fatal(err)
			} else if !strings.HasSuffix(file, "_test.go") {
				code.Write(b)
			}
		}
	}
	names := regexp.MustCompile("`(?:([a-zA-Z]+)\\.)?([a-zA-Z]+)`").FindAllStringSubmatch(table, -1)
	if len(names) < 20 {
		t.Fatalf("the table has %d names", len(names))
	}
	for _, name := range names {
		declared := `(?m)^(func ` + name[2] + `\(|const ` + name[2] + ` )`
		switch name[1] {
		case "", "outbox", "consumers":
		default:
			declared = `(?m)^func \([a-z]+ \*?` + name[1] + `\) ` + name[2] + `\(`
		}
		if !regexp.MustCompile(declared).MatchString(code.String()) {
			t.Errorf("%s: the code declares no such function", name[0])
		}
	}
	for _, file := range regexp.MustCompile("`([a-z]+/[a-z]+\\.go)`").FindAllStringSubmatch(table, -1) {
		if _, err := os.Stat("../../" + file[1]); err != nil {
			t.Error(err)
		}
	}
}
