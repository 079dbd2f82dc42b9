package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// several are variables whose default differs between binaries. The table describes these defaults
// in words.
var several = map[string]bool{"OPS_ADDR": true, "LOG_LEVEL": true, "LOG_FORMAT": true, "DATABASE_URL": true, "NATS_URL": true,
	"PROJECTIONS_DATABASE_URL": true}

func TestTheConfigurationTableIsWhatTheCodeReads(t *testing.T) {
	page, err := os.ReadFile("configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\|([^|]*)\\|").FindAllStringSubmatch(string(page), -1) {
		documented[row[1]] = strings.Trim(strings.TrimSpace(row[2]), "`")
	}
	read := map[string]bool{}
	tag := regexp.MustCompile("`env:\"([A-Z_]+)(?:, default=([^\"]*))?(?:, required)?\"")
	err = filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range tag.FindAllStringSubmatch(string(source), -1) {
			name, value := m[1], m[2]
			read[name] = true
			have, ok := documented[name]
			if !ok {
				t.Errorf("%s reads %s, which is not in the table", path, name)
			} else if !several[name] && have != value {
				t.Errorf("%s: the default is %q in %s and %q in the table", name, value, path, have)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for name := range documented {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if !read[name] {
			t.Errorf("the table has %s, which no package reads", name)
		}
	}
}

// TestContributingHasTheVariablesThatTestsRead checks that each variable and target of the page
// exists, and that the page has each variable of the tests.
func TestContributingHasTheVariablesThatTestsRead(t *testing.T) {
	page, err := os.ReadFile("../CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	documented, code := map[string]bool{}, ""
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\|").FindAllStringSubmatch(string(page), -1) {
		documented[row[1]] = true
	}
	read := regexp.MustCompile(`(?:Getenv\(|[sS]eeds?Env = )"(TEST_[A-Z_]+|TIDINGS_(?:TEST|SOAK)_[A-Z]+)"`)
	files(t, ".go", func(path, content string) {
		code += content
		for _, m := range read.FindAllStringSubmatch(content, -1) {
			if !documented[m[1]] {
				t.Errorf("%s reads %s, which is not in CONTRIBUTING.md", path, m[1])
			}
		}
	})
	for name := range documented {
		if !strings.Contains(code, `"`+name+`"`) {
			t.Errorf("CONTRIBUTING.md has %s, which no test reads", name)
		}
	}
	targets := regexp.MustCompile("`(?:TEST_SERVERS=docker )?make ([a-z-]+)").FindAllStringSubmatch(string(page), -1)
	for _, m := range targets {
		if !strings.Contains(string(makefile), "\n"+m[1]+":") {
			t.Errorf("CONTRIBUTING.md names make %s, which is not in the Makefile", m[1])
		}
	}
	if len(documented) < 9 || len(targets) < 9 {
		t.Errorf("the page has %d variables and %d targets", len(documented), len(targets))
	}
}
