package mutants

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestASeedDrawsTheSameMutants also reads each drawn file: Overlay needs texts that occur once.
func TestASeedDrawsTheSameMutants(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	draw := func(seed uint64) (lines []string, all []Drawn) {
		all, err := Draw(root, seed)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all {
			lines = append(lines, d.Kind+" "+d.String())
		}
		return lines, all
	}
	first, all := draw(1)
	if again, _ := draw(1); !slices.Equal(first, again) {
		t.Error("seed 1 draws two lists")
	}
	if other, _ := draw(2); slices.Equal(first, other) || len(other) != len(first) {
		t.Error("seed 2 draws other mutants, or no other order")
	}
	kinds, folders := map[string]int{}, map[string]int{}
	for _, d := range all[:60] {
		kinds[d.Kind]++
		folders[d.Folder()]++
	}
	if len(kinds) != 4 || len(folders) < 15 {
		t.Errorf("60 mutants have the kinds %v in %v: want 4 kinds, spread over the folders", kinds, folders)
	}
	for _, d := range all[:200] {
		occursAndParses(t, root, d)
	}
}

// occursAndParses: a Go file with the edit is Go. Whether it compiles, the command finds out.
func occursAndParses(t *testing.T, root string, d Drawn) {
	t.Helper()
	e, err := d.Edit(root)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := Overlay(root, dir, []Edit{e}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "0_"+filepath.Base(d.File)))
	if err != nil {
		t.Fatal(err)
	}
	if strings.HasSuffix(d.File, ".go") {
		if _, err := parser.ParseFile(token.NewFileSet(), d.File, text, 0); err != nil {
			t.Errorf("%s: %v", d, err)
		}
	}
}

func TestEditsOfGo(t *testing.T) {
	edits, err := goEdits("package p\n" + `
func f(a, b int) error {
	if err := g(); err != nil {
		return err
	}
	if a < b && a != 0 {
		return nil
	}
	if err != nil {
		return err
	}
	log.Warn("late", a+b)
	return h(a - b)
}`)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range edits {
		got = append(got, strings.ReplaceAll(e.Before, "\n\t", "")+" -> "+e.After)
	}
	slices.Sort(got)
	want := []string{
		"a != 0 -> a == 0",
		"a - b -> a + b",
		"a < b && a != 0 -> !(a < b && a != 0)",
		"a < b && a != 0 -> a < b || a != 0",
		"a < b && a != 0 -> false && (a < b && a != 0)",
		"a < b -> a <= b",
		"if err := g(); err != nil {\treturn err} -> ",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestEditsOfSQL(t *testing.T) {
	for text, want := range map[string][]string{
		"SELECT 1 FROM t WHERE a = @a":                              {"a = @a"},
		"WHERE a BETWEEN 1 AND 2 AND b ORDER BY c":                  {"a BETWEEN 1 AND 2", "b"},
		"WHERE (a OR b AND c) AND d LIMIT 1":                        {"(a OR b AND c)", "c", "d"},
		"CASE WHEN a AND b THEN 1 END":                              {"b"},
		"WHERE x = CASE WHEN a THEN 1 ELSE 2 END AND y = 'a AND b'": {"x = CASE WHEN a THEN 1 ELSE 2 END", "y = 'a AND b'"},
		"SELECT 1 -- it's theirs AND ours\n FROM t FOR UPDATE OF t": {"FOR UPDATE OF t"},
		"WHERE a AND (SELECT b FROM c WHERE d AND e) = 1 FOR SHARE": {"a", "(SELECT b FROM c WHERE d AND e) = 1", "d", "e", "FOR SHARE"},
		"WHERE id > ":                           nil,
		"IF NOT found AND a THEN RAISE; END IF": {"a"},
	} {
		var got []string
		for _, e := range sqlEdits(text, 0) {
			if e.After != "" && e.After != "("+e.Before+" OR true)" {
				t.Errorf("%s: the edit is %q", text, e.After)
			}
			got = append(got, e.Before)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s:\n%s", text, diff)
		}
	}
}
