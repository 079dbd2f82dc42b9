package docs_test

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/shares"
)

func TestThePageOfSharedResourcesIsTheirTable(t *testing.T) {
	page, err := os.ReadFile("security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Shared resources\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var got []string
	for line := range strings.Lines(section) {
		if strings.HasPrefix(line, "|") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	want := []string{"| resource | in all | per tenant | per token or address | beyond that | a slow caller |", "|---|---|---|---|---|---|"}
	for _, r := range shares.Table() {
		line := "|"
		for _, cell := range []string{r.Name, r.All.String(), r.Tenant.String(), r.Each.String(), r.Beyond, r.Slow} {
			line += strings.TrimRight(" "+cell, " ") + " |"
		}
		want = append(want, line)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the table of security.md (-want +got):\n%s\nthe whole table:\n%s", diff, strings.Join(want, "\n"))
	}
}
