//go:build docker

package deploy_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// testImage is the name of the image that these tests build from the working tree.
const testImage = "tidings-deploy-test"

// biggestImage is the maximum size of the image in bytes: 60 MiB.
const biggestImage = 60 << 20

// docker runs the docker command and returns its stdout.
func docker(t *testing.T, args ...string) string {
	t.Helper()
	return output(t, exec.Command("docker", args...))
}

func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", strings.Join(cmd.Args, " "), err, out, &stderr)
	}
	return string(out)
}

// buildImage runs the script of `make image`.
func buildImage(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"docker.sh", "image", "--quiet"}, args...)...)
	cmd.Env = append(os.Environ(), "TIDINGS_IMAGE="+name)
	output(t, cmd)
}

// image is the answer of `docker image inspect`.
type image struct {
	ID      string
	Created time.Time
	Size    int64
	Config  struct {
		User        string
		Env         []string
		Cmd, Labels any
	}
	RootFS struct{ Layers []string }
}

func inspectImage(t *testing.T, name string) image {
	t.Helper()
	var all []image
	if err := json.Unmarshal([]byte(docker(t, "image", "inspect", name)), &all); err != nil || len(all) != 1 {
		t.Fatalf("%d images, %v", len(all), err)
	}
	return all[0]
}

// TestTwoBuildsOfTheImageAreEqual builds the image a second time without the caches of Docker and
// Go, and compares the two.
func TestTwoBuildsOfTheImageAreEqual(t *testing.T) {
	again := testImage + "-again"
	t.Cleanup(func() { docker(t, "image", "rm", "--force", again) })
	buildImage(t, testImage)
	buildImage(t, again, "--no-cache", "--build-arg", "GOFLAGS=-a")
	one, two := inspectImage(t, testImage), inspectImage(t, again)
	// A Docker engine before version 23 ignores SOURCE_DATE_EPOCH and writes the time of the build
	// into the image.
	if !one.Created.Equal(two.Created) {
		t.Logf("this engine writes the time of the build into an image, so the test compares only layers and settings")
		one.ID, one.Created, two.ID, two.Created = "", time.Time{}, "", time.Time{}
	}
	if diff := cmp.Diff(one, two); diff != "" {
		t.Errorf("the second build gives another image: %s", diff)
	}
}

// TestTheImageHasOneSmallBinaryOfEveryName checks that the image is small, runs without root and
// without a writable file system, and has labels that name its version and revision.
func TestTheImageHasOneSmallBinaryOfEveryName(t *testing.T) {
	buildImage(t, testImage)
	got := inspectImage(t, testImage)
	t.Logf("%.1f MiB", float64(got.Size)/(1<<20))
	if got.Size > biggestImage || got.Config.User != "65532:65532" {
		t.Errorf("the image has %d bytes, want at most %d; its user is %q", got.Size, biggestImage, got.Config.User)
	}
	revision := strings.TrimSpace(output(t, exec.Command("git", "rev-parse", "HEAD")))
	labels, _ := got.Config.Labels.(map[string]any)
	for label, want := range map[string]string{"title": "Tidings", "description": ".{20}", "source": "https://github.com/",
		"licenses": "^Apache-2.0$", "version": ".", "revision": "^" + revision + "$"} {
		if value, _ := labels["org.opencontainers.image."+label].(string); !regexp.MustCompile(want).MatchString(value) {
			t.Errorf("label %s is %q, want %s", label, value, want)
		}
	}
	ctr := strings.TrimSpace(docker(t, "create", testImage))
	t.Cleanup(func() { docker(t, "rm", "--force", ctr) })
	archive := filepath.Join(t.TempDir(), "image.tar")
	docker(t, "export", "--output", archive, ctr)
	files := strings.Fields(output(t, exec.Command("tar", "-tf", archive)))
	for _, name := range append([]string{"etc/ssl/certs/ca-certificates.crt", "bin/tidings"}, binaries...) {
		if !slices.Contains(files, name) && !slices.Contains(files, "bin/"+name) {
			t.Errorf("the image lacks %s", name)
		}
	}
	if out := docker(t, "run", "--rm", "--read-only", "--cap-drop=ALL", testImage, "tidings", "version"); !strings.Contains(out,
		" of revision "+revision+",") {
		t.Errorf("tidings version: %s", out)
	}
	for _, name := range binaries {
		out := docker(t, "run", "--rm", "--read-only", "--cap-drop=ALL", testImage, "/bin/"+name, "--version")
		if want := fmt.Sprintf("%s %s\n", name, labels["org.opencontainers.image.version"]); out != want {
			t.Errorf("/bin/%s --version: %q, want %q", name, out, want)
		}
	}
}
