//go:build faults

package fleet_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestAProjectionIsItsFolderItsMigrationAndOneLine adds the projection of the documentation by an
// overlay of these three parts. It runs the contract tests of all projections with it.
func TestAProjectionIsItsFolderItsMigrationAndOneLine(t *testing.T) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	migration := pageMigration(t, root)
	if testing.Short() {
		t.Skip("starts servers")
	}
	list, err := os.ReadFile("fleet.go")
	if err != nil {
		t.Fatal(err)
	}
	with := string(list)
	for after, added := range map[string]string{
		`"github.com/tidings/tidings/projections"` + "\n": "\t" + `"github.com/tidings/tidings/projections/activity"` + "\n",
		`return []projections.Projection{`:                "activity.New(now), ",
	} {
		if strings.Count(with, after) != 1 {
			t.Fatalf("fleet.go has %q %d times", after, strings.Count(with, after))
		}
		with = strings.Replace(with, after, after+added, 1)
	}
	dir := t.TempDir()
	registered := filepath.Join(dir, "fleet.go")
	files := map[string]string{filepath.Join(root, "cmd/internal/fleet/fleet.go"): registered}
	for to, from := range map[string]string{
		"projections/activity/activity.go": "activity.go",
		migration:                          "activity.sql",
	} {
		files[filepath.Join(root, to)] = filepath.Join(root, "cmd/internal/fleet/testdata/activity", from)
	}
	overlay, err := json.Marshal(map[string]any{"Replace": files})
	if err != nil {
		t.Fatal(err)
	}
	over := filepath.Join(dir, "overlay.json")
	for name, content := range map[string]string{registered: with, over: string(overlay)} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"test", "-overlay", over, "-tags", "contract", "-vet=off", "-count=1", "-v", "-run",
		"^TestEveryProjectionKeepsTheContract$"}
	if race {
		args = append(args, "-race") // with -race, because the run around this one has built that already
	}
	cmd := exec.CommandContext(t.Context(), "go", append(args, "./cmd/tidings/cli")...)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestEveryProjectionKeepsTheContract/activity") {
		t.Errorf("%v\n%s", err, out)
	}
}
