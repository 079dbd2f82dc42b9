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

// files calls fn for every file below the repository's root whose name ends in suffix.
func files(t *testing.T, suffix string, fn func(path, content string)) {
	t.Helper()
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bin" || d.Name() == "node_modules") {
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
	files(t, "Makefile", func(path, content string) { // make test-docker
		list := regexp.MustCompile(`DOCKER_TESTS := ((?:Test\w+(?: \\\n\t)?)+)`).FindStringSubmatch(content)
		if list == nil {
			t.Fatalf("%s has no DOCKER_TESTS", path)
		}
		for _, name := range regexp.MustCompile(`\w+`).FindAllString(list[1], -1) {
			if !tests[name] {
				t.Errorf("%s names %s, which does not exist", path, name)
			}
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

// TestEveryLinkOfADocumentLeadsSomewhere checks that the file of each link exists, and that a page
// has the heading or the anchor that a link to it names.
func TestEveryLinkOfADocumentLeadsSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]*)(?:#([^):]*))?\)`)
	code := regexp.MustCompile("(?s)```.*?```") // Go's f[T](x) is no link
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	named := regexp.MustCompile(`<a name="([^"]+)">`)
	other := regexp.MustCompile("<[^>]*>|[^a-z0-9 _-]")
	pages, places := map[string]string{}, map[string]bool{}
	files(t, ".md", func(path, content string) {
		content = code.ReplaceAllString(content, "")
		pages[path] = content
		for _, m := range heading.FindAllStringSubmatch(content, -1) {
			slug := strings.ReplaceAll(strings.TrimSpace(other.ReplaceAllString(strings.ToLower(m[1]), "")), " ", "-")
			places[path+"#"+slug] = true
		}
		for _, m := range named.FindAllStringSubmatch(content, -1) {
			places[path+"#"+m[1]] = true
		}
	})
	for path, content := range pages {
		for _, m := range link.FindAllStringSubmatch(content, -1) {
			to := filepath.Join(filepath.Dir(path), m[1])
			if m[1] == "" {
				to = path
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s: %v", path, err)
			}
			if m[2] != "" && strings.HasSuffix(to, ".md") && !places[to+"#"+m[2]] {
				t.Errorf("%s links to #%s, which %s lacks", path, m[2], to)
			}
		}
	}
}

func TestEveryFileThatADocumentNamesExists(t *testing.T) {
	n := 0
	named := regexp.MustCompile("`([a-z]+(?:/[a-z]+)*/(?:[a-z_]+\\.(?:go|yaml|yml|sql|txt|sh))?)`")
	files(t, ".md", func(path, content string) {
		if !strings.HasPrefix(path, "../docs/") && path != "../README.md" {
			return // the changelog names files of its time
		}
		for _, m := range named.FindAllStringSubmatch(content, -1) {
			if strings.HasSuffix(m[1], "/") && filepath.Base(path) != "architecture.md" {
				continue // of the reader's own project
			}
			n++
			if _, err := os.Stat(filepath.Join("..", m[1])); err != nil {
				t.Errorf("%s names %s, which does not exist", path, m[1])
			}
		}
	})
	if n < 60 {
		t.Errorf("the test found only %d names of files", n)
	}
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

// TestTheProjectionPageShowsTheProjectionThatIsTested compares the page's code with the example
// that a test runs.
func TestTheProjectionPageShowsTheProjectionThatIsTested(t *testing.T) {
	read := func(path string) string {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	page := read("adding-a-projection.md")
	list := read("../cmd/internal/fleet/fleet.go")
	code := read("../cmd/internal/fleet/testdata/activity/activity.go") + read("../cmd/internal/fleet/testdata/activity/activity.sql") +
		strings.Replace(list, "Projection{followercounts", "Projection{activity.New(now), followercounts", 1)
	all := append(blocks(page, "go"), blocks(page, "sql")...)
	if len(all) != 4 {
		t.Fatalf("the page has %d blocks", len(all))
	}
	for _, b := range all {
		if !strings.Contains(code, strings.TrimSuffix(b, "\n")) {
			t.Errorf("the example lacks\n%s", b)
		}
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `([A-Z]\\w+)` \\|").FindAllStringSubmatch(page, -1) {
		if !strings.Contains(read("../projections/projection.go"), "\t"+m[1]+"(") {
			t.Errorf("the contract has no method %s", m[1])
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^\t([A-Z]\w+)\(`).FindAllStringSubmatch(read("../projections/projection.go"), -1) {
		if !strings.Contains(page, "| `"+m[1]+"` |") {
			t.Errorf("the page does not mention %s", m[1])
		}
	}
}

// TestTheSubscriberPageMakesANewFollow checks that the page writes no follow of the README. A
// reader of both would get no event.
func TestTheSubscriberPageMakesANewFollow(t *testing.T) {
	follows := func(path string) []string {
		t.Helper()
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all := regexp.MustCompile(`localhost:8080/v1/follows/\d+/\d+`).FindAllString(string(page), -1)
		if len(all) == 0 {
			t.Fatalf("%s writes no follow", path)
		}
		return all
	}
	before := follows("../README.md")
	for _, f := range follows("subscribe.md") {
		if slices.Contains(before, f) {
			t.Errorf("the page repeats %s of the README", f)
		}
	}
}

// TestTheSubscriberPageShowsTheTestThatRuns compares the test on the page with the one of package
// clienttest.
func TestTheSubscriberPageShowsTheTestThatRuns(t *testing.T) {
	page, err := os.ReadFile("subscribe.md")
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile("../client/clienttest/clienttest_test.go")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, b := range blocks(string(page), "go") {
		if !strings.HasPrefix(b, "func Test") {
			continue
		}
		if n++; !strings.Contains(string(tests), b) {
			t.Errorf("package clienttest lacks\n%s", b)
		}
	}
	if n != 1 {
		t.Errorf("the page has %d tests, want 1", n)
	}
}

// TestThePageOfHowItWorksQuotesTheComparison compares the page's figures, and those of the README,
// with the table of results in comparison.md.
func TestThePageOfHowItWorksQuotesTheComparison(t *testing.T) {
	cells := func(row string) (all []string) {
		for c := range strings.SplitSeq(strings.Trim(row, "|"), "|") {
			all = append(all, strings.TrimSpace(c))
		}
		return all
	}
	read := func(path, head string) (rows [][]string) {
		t.Helper()
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, table, _ := strings.Cut(string(page), "\n"+head)
		for row := range strings.Lines(head + table) {
			if !strings.HasPrefix(row, "|") {
				break
			}
			rows = append(rows, cells(strings.TrimSpace(row)))
		}
		if len(rows) < 5 {
			t.Fatalf("%s has %d rows below %s", path, len(rows), head)
		}
		return rows
	}
	results, quotes := read("comparison.md", "| scenario | peer | events |"), read("how-it-works.md", "| failure | scenario | naive |")
	measured := map[string]string{}
	for _, row := range results[2:] {
		for i, column := range results[0] {
			measured["`"+row[0]+"`, "+column+" "+row[1]] = row[i]
		}
	}
	for _, row := range quotes[2:] {
		for i, peer := range quotes[0][2:] {
			if want := measured[row[1]+" "+peer]; want == "" || row[2+i] != want {
				t.Errorf("%s of %s is %q on the page, and %q in the comparison", row[1], peer, row[2+i], want)
			}
		}
	}
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	got := regexp.MustCompile(`published ([0-9,]+) events twice in a long outage, (\d+) in the wrong order when two loops ran, ` +
		`and (\d+) when one froze`).FindStringSubmatch(string(readme))
	if got == nil {
		t.Fatal("the README says nothing about the 150 lines")
	}
	for i, column := range []string{"`outage`, doubled", "`two`, inverted", "`frozen`, inverted"} {
		if want := measured[column+" naive"]; strings.ReplaceAll(got[1+i], ",", "") != want {
			t.Errorf("%s of naive is %s in the README, and %s in the comparison", column, got[1+i], want)
		}
	}
}

// TestTheReadmeShowsAnExampleThatCompiles compares the README's Go with the example of package
// subscribe.
func TestTheReadmeShowsAnExampleThatCompiles(t *testing.T) {
	const most = 120 // lines
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("../subscribe/example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	inGo := blocks(string(readme), "go")
	if len(inGo) != 1 || !strings.Contains(string(example), "\t"+strings.ReplaceAll(strings.TrimSpace(inGo[0]), "\n", "\n\t")+"\n") {
		t.Errorf("subscribe/example_test.go lacks %q", inGo)
	}
	if n := strings.Count(string(readme), "\n"); n > most {
		t.Errorf("the README has %d lines, and at most %d are read", n, most)
	}
}

// TestEveryErrorOfTheFAQIsInTheCode searches each heading of faq.md in the sources. Three dots
// stand for any text.
func TestEveryErrorOfTheFAQIsInTheCode(t *testing.T) {
	page, err := os.ReadFile("faq.md")
	if err != nil {
		t.Fatal(err)
	}
	var sources strings.Builder
	broken := regexp.MustCompile(`" \+\s*"`) // a text that is broken into lines
	for _, suffix := range []string{".go", ".sql"} {
		files(t, suffix, func(path, content string) {
			if !strings.HasSuffix(path, "_test.go") {
				sources.WriteString(broken.ReplaceAllString(content, "") + "\n")
			}
		})
	}
	n := 0
	for _, heading := range regexp.MustCompile("(?m)^### `(.*)`$").FindAllStringSubmatch(string(page), -1) {
		n++
		for part := range strings.SplitSeq(heading[1], "...") {
			if part = strings.TrimSpace(part); !strings.Contains(sources.String(), part) {
				t.Errorf("no source has %q of the heading %q", part, heading[1])
			}
		}
	}
	if n < 40 {
		t.Errorf("the test found only %d headings", n)
	}
}
