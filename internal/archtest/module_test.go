package archtest_test

import (
	"encoding/json"
	"os/exec"
	"regexp"
	"testing"
)

// TestStrangersCanInstallTheModule checks what `go install .../cmd/tidings@v0.1.0` and an import
// need: go.mod may neither replace nor exclude a module, and Go's first patch suffices.
func TestStrangersCanInstallTheModule(t *testing.T) {
	out, err := exec.Command("go", "mod", "edit", "-json", "../../go.mod").Output()
	if err != nil {
		t.Fatal(err)
	}
	var mod struct {
		Module        struct{ Path string }
		Go, Toolchain string
		// Go refuses to install a command whose go.mod has one of these.
		Replace, Exclude []any
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	if mod.Module.Path+"/" != module || mod.Replace != nil || mod.Exclude != nil {
		t.Errorf("go install refuses %s with the replacements %v and exclusions %v", mod.Module.Path, mod.Replace, mod.Exclude)
	}
	if mod.Toolchain != "" || !regexp.MustCompile(`^1\.\d+(\.0)?$`).MatchString(mod.Go) {
		t.Errorf("Go %s, toolchain %q: a user of an earlier patch must download another Go", mod.Go, mod.Toolchain)
	}
}
