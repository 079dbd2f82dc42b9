package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNoPageUsesAWordThatContributingReplaces reads the words in the table of CONTRIBUTING.md, and
// every page except its code.
func TestNoPageUsesAWordThatContributingReplaces(t *testing.T) {
	guide, err := os.ReadFile("../CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(guide), "| write | not |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var words []string
	for _, row := range regexp.MustCompile(`(?m)^\| [^|-][^|]* \| ([^|]*) \|$`).FindAllStringSubmatch(table, -1) {
		words = append(words, strings.Split(row[1], ", ")...)
	}
	if len(words) < 20 {
		t.Fatalf("CONTRIBUTING.md replaces %q", words)
	}
	for i, w := range words {
		words[i] = strings.ReplaceAll(regexp.QuoteMeta(w), " ", `\s+`)
	}
	bad := regexp.MustCompile(`(?i)\b(?:` + strings.Join(words, "|") + `)\b`)
	code := regexp.MustCompile("(?s)```.*?```|`[^`\n]*`|<[^>]*>")
	files(t, ".md", func(path, content string) {
		if filepath.Base(path) == "CONTRIBUTING.md" || filepath.Base(path) == "commands.md" {
			return
		}
		text := code.ReplaceAllStringFunc(content, func(s string) string { return strings.Repeat("\n", strings.Count(s, "\n")) })
		for _, at := range bad.FindAllStringIndex(text, -1) {
			t.Errorf("%s:%d: %q: CONTRIBUTING.md has another word for it", path, 1+strings.Count(text[:at[0]], "\n"), text[at[0]:at[1]])
		}
	})
}

// TestEveryPageIsOnAShelf checks that docs/README.md, and the README.md of the runbook and of the
// decisions, link every page beside them.
func TestEveryPageIsOnAShelf(t *testing.T) {
	for _, dir := range []string{".", "runbook", "adr"} {
		shelf, err := os.ReadFile(filepath.Join(dir, "README.md"))
		if err != nil {
			t.Fatal(err)
		}
		pages, err := filepath.Glob(filepath.Join(dir, "*.md"))
		if err != nil {
			t.Fatal(err)
		}
		for _, page := range slices.DeleteFunc(pages, func(p string) bool { return filepath.Base(p) == "README.md" }) {
			if !strings.Contains(string(shelf), "("+filepath.Base(page)) {
				t.Errorf("%s/README.md does not list %s", dir, filepath.Base(page))
			}
		}
	}
}

// TestEveryThreatNamesItsTests checks that each threat of the threat model has something that stops
// it, and a test that shows so.
func TestEveryThreatNamesItsTests(t *testing.T) {
	page, err := os.ReadFile("threat-model.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| threat | what stops it | shown by | what remains |\n|---|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	rows := strings.Split(table, "\n")
	if len(rows) < 20 {
		t.Fatalf("the table has only %d threats", len(rows))
	}
	for _, row := range rows {
		cells := strings.Split(strings.Trim(row, "|"), "|")
		if len(cells) != 4 || strings.TrimSpace(cells[1]) == "" || !strings.Contains(cells[2], "`Test") {
			t.Errorf("a threat without its defense or its tests: %s", row)
		}
	}
}

// TestTheRunbookListsTheSeveritiesOfTheRules compares the runbook's tables with the rules.
func TestTheRunbookListsTheSeveritiesOfTheRules(t *testing.T) {
	rules, err := os.ReadFile("../deploy/prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{}
	for _, m := range regexp.MustCompile(`(?s)- alert: (\w+).*?severity: (\w+)`).FindAllStringSubmatch(string(rules), -1) {
		if !slices.Contains(want[m[1]], m[2]) {
			want[m[1]] = append(want[m[1]], m[2])
		}
		slices.Sort(want[m[1]])
	}
	index, err := os.ReadFile("runbook/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range regexp.MustCompile(`(?m)^\| \[(\w+)\]\(\w+\.md\) \| ([a-z, ]+) \|`).FindAllStringSubmatch(string(index), -1) {
		have := row[2]
		if severities := strings.Join(want[row[1]], ", "); severities != "" && have != severities || severities == "" && have != "log" {
			t.Errorf("%s is %q in the runbook and %q in the rules", row[1], have, severities)
		}
		delete(want, row[1])
	}
	for alert := range want {
		t.Errorf("the runbook's tables lack %s", alert)
	}
}

// TestADecisionIsAtMostAPage checks that each record of a decision has at most 600 words, as wc -w
// counts them.
func TestADecisionIsAtMostAPage(t *testing.T) {
	const most = 600
	pages, err := filepath.Glob("adr/[0-9]*.md")
	if err != nil || len(pages) < 18 {
		t.Fatalf("%d decisions, %v", len(pages), err)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(strings.Fields(string(text))); n > most {
			t.Errorf("%s has %d words, and a page has at most %d", page, n, most)
		}
	}
}
