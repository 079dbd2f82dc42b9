package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestContractsAreWritten compares the contracts of the built-in kinds with the checked-in ones.
// Those of an earlier release are removed.
func TestContractsAreWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	if err := os.MkdirAll(filepath.Join(dir, "schemas"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tidings.gone.created.v1.json", "mine.json"} {
		if err := os.WriteFile(filepath.Join(dir, "schemas", name), []byte("{}"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	code, stdout, stderr := run(t, nil, "", "contracts", "write", "--built-in", dir)
	if code != 0 || stdout == "" {
		t.Fatalf("%d %s %s", code, stdout, stderr)
	}
	want, err := filepath.Glob("../../../event/contracts/builtin/schemas/*.json")
	if err != nil || len(want) < 20 {
		t.Fatalf("%d schemas, %v", len(want), err)
	}
	for _, path := range append(want, "../../../event/contracts/builtin/asyncapi.json") {
		name, _ := filepath.Rel("../../../event/contracts/builtin", path)
		is, err := os.ReadFile(filepath.Join(dir, name))
		was, werr := os.ReadFile(path)
		if err != nil || werr != nil || !bytes.Equal(is, was) {
			t.Errorf("%s: %v %v, or it differs", name, err, werr)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "schemas", "*"))
	if err != nil || len(left) != len(want)+1 { // mine.json
		t.Errorf("%v, %v", left, err)
	}
	if code, _, stderr := run(t, nil, "", "contracts", "write", "--built-in", filepath.Join(dir, "asyncapi.json", "x")); code != 1 ||
		stderr == "" {
		t.Errorf("into a file: %d %s", code, stderr)
	}
}
