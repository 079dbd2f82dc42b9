package api

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestTheTableOfProblemsIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(doc), "|---|---|---|\n")
	var want strings.Builder
	seen := make(map[string]bool)
	for _, k := range problemKinds() {
		fmt.Fprintf(&want, "| `%s` | %d | %s |\n", k.Code, k.Status, k.Title)
		if seen[k.Code] {
			t.Errorf("%s is in the table twice", k.Code)
		}
		seen[k.Code] = true
	}
	if table != want.String() {
		t.Errorf("docs/api.md has\n%s\nwant\n%s", table, want.String())
	}
}
