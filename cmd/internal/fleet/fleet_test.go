package fleet_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/tidings/tidings/migrations"
)

// race reports whether this run has the race detector.
var race bool

// pageMigration returns the path of the migration that docs/adding-a-projection.md names. It fails
// the test unless the page has the next free number.
func pageMigration(t *testing.T, root string) string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(root, "docs/adding-a-projection.md"))
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("migrations/projections/%05d_activity.sql", migrations.Latest(migrations.Projections)+1)
	named := regexp.MustCompile(`migrations/projections/\d+\w*\.sql`).FindAllString(string(page), -1)
	if len(named) == 0 || slices.ContainsFunc(named, func(name string) bool { return name != want }) {
		t.Fatalf("docs/adding-a-projection.md names %q: the next free migration is %s", named, want)
	}
	return named[0]
}
