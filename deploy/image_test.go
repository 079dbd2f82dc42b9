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

// testImage is the name of the image that these tests build of the working tree.
const testImage = "tidings-deploy-test"

// biggestImage is what the image may take, in bytes: 60 MiB.
const biggestImage = 60 << 20

// docker runs the command docker and returns what it writes to stdout.
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

// buildImage is `make image`.
func buildImage(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"docker.sh", "image", "--quiet"}, args...)...)
	cmd.Env = append(os.Environ(), "TIDINGS_IMAGE="+name)
	output(t, cmd)
}

// image is what `docker image inspect` says.
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

// TestTwoBuildsOfTheImageAreEqual: the second one takes nothing from a cache, that of Go neither.
func TestTwoBuildsOfTheImageAreEqual(t *testing.T) {
	again := testImage + "-again"
	t.Cleanup(func() { docker(t, "image", "rm", "--force", again) })
	buildImage(t, testImage)
	buildImage(t, again, "--no-cache", "--build-arg", "GOFLAGS=-a")
	one, two := inspectImage(t, testImage), inspectImage(t, again)
	if !one.Created.Equal(two.Created) { // an engine before 23 does not know SOURCE_DATE_EPOCH, and writes the time of the build into the image
		t.Logf("this engine gives an image the time of its build: the layers and the settings are compared")
		one.ID, one.Created, two.ID, two.Created = "", time.Time{}, "", time.Time{}
	}
	if diff := cmp.Diff(one, two); diff != "" {
		t.Errorf("the second build is another image: %s", diff)
	}
}

// TestTheImageHasOneSmallBinaryOfEveryName: it has nothing else, runs as no root without a file system to write to, and says what it was made of.
func TestTheImageHasOneSmallBinaryOfEveryName(t *testing.T) {
	buildImage(t, testImage)
	got := inspectImage(t, testImage)
	t.Logf("%.1f MiB", float64(got.Size)/(1<<20))
	if got.Size > biggestImage || got.Config.User != "65532:65532" {
		t.Errorf("%d bytes, at most %d; user %q", got.Size, biggestImage, got.Config.User)
	}
	revision := strings.TrimSpace(output(t, exec.Command("git", "rev-parse", "HEAD")))
	labels, _ := got.Config.Labels.(map[string]any)
	for label, want := range map[string]string{"title": "Tidings", "description": ".{20}", "source": "https://github.com/", "licenses": "^Apache-2.0$", "version": ".", "revision": "^" + revision + "$"} {
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
			t.Errorf("the image has no %s", name)
		}
	}
	if out := docker(t, "run", "--rm", "--read-only", "--cap-drop=ALL", testImage, "tidings", "version"); !strings.Contains(out, " of revision "+revision+",") {
		t.Errorf("tidings version: %s", out)
	}
	for _, name := range binaries {
		out := docker(t, "run", "--rm", "--read-only", "--cap-drop=ALL", testImage, "/bin/"+name, "--version")
		if want := fmt.Sprintf("%s %s\n", name, labels["org.opencontainers.image.version"]); out != want {
			t.Errorf("/bin/%s --version: %q, want %q", name, out, want)
		}
	}
}
