//go:build faults

package cli

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

func TestEdgesAndChildrenOfAnyKindAreLoadedAndShown(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	file := filepath.Join(t.TempDir(), "kinds.yaml")
	if err := os.WriteFile(file, []byte(ownKinds), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, nil, "", "kinds", "apply", file, "--data", d.dir); code != exitOK {
		t.Fatalf("exit code %d, %s%s", code, stdout, stderr)
	}
	testkit.Eventually(t, "the new kind to have routes", func() (bool, error) {
		status, _ := d.request(t, http.MethodPut, "/v1/plays/1/2", `{"mood":"loud"}`, nil, nil)
		return status == http.StatusCreated, nil
	})
	d.loadsAnyKind(t)
}
