package mutants

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEveryMutantIsOfTheSystemAsItIs keeps the list in step with the code and its tests. `make
// mutants` runs the mutants.
func TestEveryMutantIsOfTheSystemAsItIs(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	all, err := List()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range all {
		if names[m.Name] {
			t.Errorf("two mutants are named %q", m.Name)
		}
		names[m.Name] = true
		if len(m.Edits) == 0 {
			t.Errorf("%s: no edit", m.Name)
		}
		if _, err := Overlay(root, t.TempDir(), m.Edits); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
		if _, err := regexp.Compile(m.Output); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
		if !hasTest(t, filepath.Join(root, m.Package), m.Test) {
			t.Errorf("%s: %s has no test %s", m.Name, m.Package, m.Test)
		}
	}
}

func hasTest(t *testing.T, dir, test string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if test != "" && strings.Contains(string(text), "\nfunc "+test+"(t *testing.T)") {
			return true
		}
	}
	return false
}

func TestAListThatIsNotUnderstoodIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"a field before the first mutant": "test TestX",
		"an unknown field":                "mutant a\ntests TestX",
		"a field without a value":         "mutant a\ntest",
		"an edit without a file":          "mutant a\n--- before\na\n--- after\nb\n--- end",
		"an edit without an end":          "mutant a\nfile f\n--- before\na\n--- after\nb",
		"an edit that swallows the next":  "mutant a\nfile f\n--- before\n--- after\nmutant b\nfile f\n--- before\n--- after\n--- end",
	} {
		if _, err := parse(text); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
