package deploy_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestRunSaysThatItBuilds runs `make run` with a small program in the place of tidings: the real
// build may take minutes.
func TestRunSaysThatItBuilds(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	write("Makefile", string(makefile))
	write("go.mod", "module tidings\n")
	const source = "package main\n\nimport \"os\"\n\nfunc main() { _, _ = os.Stdout.WriteString(\"the program runs\\n\") }\n"
	write("cmd/tidings/main.go", source)
	run := func(want ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "make", "run")
		cmd.Dir = dir
		cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { // of a make that runs this test
			return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS")
		})
		cmd.Env = append(cmd.Env, "DATABASE_URL=postgres://elsewhere") // it looks for no PostgreSQL
		output, err := cmd.CombinedOutput()
		if got := strings.Split(strings.TrimSpace(string(output)), "\n"); err != nil || !slices.Equal(got, want) {
			t.Errorf("make run printed %q and ended with %v, want %q", got, err, want)
		}
	}
	run("Building tidings. The first build takes some minutes.", "the program runs")
	run("the program runs")
	write("cmd/tidings/main.go", strings.Replace(source, "the program", "the changed program", 1))
	run("Rebuilding tidings, because its code has changed.", "the changed program runs")
	run("the changed program runs")
}
