package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

const version = "0.1.0-test"

var epochOfTests = time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)

// run runs a command in a folder and returns what it printed.
func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := output(cmd)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// snapshot returns a repository whose only commit has the files of this working tree.
func snapshot(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("GIT_DIR", filepath.Join(dir, ".git"))
	t.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
	for _, who := range []string{"AUTHOR", "COMMITTER"} {
		t.Setenv("GIT_"+who+"_NAME", "test")
		t.Setenv("GIT_"+who+"_EMAIL", "test@example.com")
		t.Setenv("GIT_"+who+"_DATE", "2026-01-02T03:04:05Z")
	}
	run(t, "../..", "git", "init", "--quiet")
	run(t, "../..", "git", "--work-tree=.", "add", "--all")
	run(t, "../..", "git", "--work-tree=.", "commit", "--quiet", "--message=test")
	run(t, "../..", "git", "config", "core.bare", "false")
	os.Unsetenv("GIT_DIR")
	run(t, dir, "git", "checkout", "--quiet", "--force")
	return dir
}

func hasNPM() bool {
	_, err := exec.LookPath("npm")
	return err == nil
}

// build builds a release for this platform, and returns its folder.
func build(t *testing.T, repository string) string {
	t.Helper()
	r := &release{repository: repository, dist: filepath.Join(t.TempDir(), "dist"), npm: hasNPM(),
		platforms: []string{runtime.GOOS + "/" + runtime.GOARCH}}
	if err := r.build("v" + version); err != nil {
		t.Fatal(err)
	}
	return r.dist
}

// TestAReleaseIsBuiltTwiceAlikeAndWorks builds this tree twice, each time in a new folder, and uses
// what it built as a stranger does.
func TestAReleaseIsBuiltTwiceAlikeAndWorks(t *testing.T) {
	repository := snapshot(t)
	dist := build(t, repository)
	sums := read(t, dist, "checksums.txt")
	if again := read(t, build(t, repository), "checksums.txt"); again != sums {
		t.Errorf("the second build differs:\n%s\n%s", sums, again)
	}
	run(t, dist, "sha256sum", "--check", "--strict", "--quiet", "checksums.txt")
	platform := runtime.GOOS + "-" + runtime.GOARCH
	archive := fmt.Sprintf("tidings-%s-%s", version, platform)
	here := t.TempDir()
	run(t, here, "tar", "-xf", filepath.Join(dist, archive+".tar.gz"))

	t.Run("pages", func(t *testing.T) { pages(t, filepath.Join(here, archive)) })
	t.Run("binaries", func(t *testing.T) { binaries(t, filepath.Join(here, archive)) })
	t.Run("image", func(t *testing.T) { containers(t, filepath.Join(dist, "tidings-"+version+"-image.tar")) })
	t.Run("chart", func(t *testing.T) {
		t.Setenv("CHART", filepath.Join(dist, "tidings-chart-"+version+".tgz"))
		t.Setenv("CHART_VERSION", version)
		run(t, "../helm/test", "go", "test", "-count=1", "./...")
	})
	t.Run("bill of materials", func(t *testing.T) {
		materials(t, read(t, dist, "tidings-"+version+".cdx.json"), filepath.Join(here, archive))
	})
	t.Run("npm package", func(t *testing.T) {
		if hasNPM() {
			npm(t, filepath.Join(dist, "tidings-client-"+version+".tgz"))
		}
	})
	for name, data := range map[string]string{"checksums": sums, "notices": read(t, here, archive+"/THIRD-PARTY-LICENSES.txt")} {
		if strings.Contains(data, repository) || strings.Contains(data, os.TempDir()) {
			t.Errorf("the %s name a folder of this machine", name)
		}
	}
}

func read(t *testing.T, parts ...string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(parts...))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func binaries(t *testing.T, dir string) {
	for _, name := range append([]string{"tidings"}, services...) {
		if got, want := run(t, dir, filepath.Join(dir, "bin", name), "--version"), name+" "+version; got != want {
			t.Errorf("%s --version: %q, want %q", name, got, want)
		}
	}
	out := run(t, dir, filepath.Join(dir, "bin", "tidings"), "version")
	if !regexp.MustCompile(`of revision [0-9a-f]{40},`).MatchString(out) {
		t.Errorf("tidings version: %s", out)
	}
	if !strings.Contains(read(t, dir, "LICENSE"), "Apache License") {
		t.Error("LICENSE is another license")
	}
	if data := read(t, dir, "bin/tidings"); strings.Contains(data, os.TempDir()+"/tidings-release-") {
		t.Error("the binary names the folder in which it was built")
	}
}

// pages checks that the archive has each page to which one of its pages leads.
func pages(t *testing.T, dir string) {
	links, code := 0, regexp.MustCompile(`(bench|examples)/`) // whoever reads code has the repository
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		for _, link := range regexp.MustCompile(`\]\(([^)#:]+\.(?:md|png))[)#]`).FindAllStringSubmatch(read(t, path), -1) {
			links++
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), link[1])); err != nil && !code.MatchString(link[1]) {
				t.Errorf("%s: %v", path, err)
			}
		}
		return nil
	})
	if err != nil || links < 100 {
		t.Errorf("%d links, %v", links, err)
	}
	read(t, dir, "docs/runbook/OutboxPartitionStuck.md") // tidings doctor names such pages
	read(t, dir, "deploy/prometheus/rules.yml")
}

// containers checks each digest of the image, and compares its settings with those of
// deploy/Dockerfile. On Linux, root also runs it without any other file.
func containers(t *testing.T, archive string) {
	if runtime.GOOS != "linux" {
		return // the release of another system has no image in this test
	}
	dir := t.TempDir()
	run(t, dir, "tar", "-xf", archive)
	outer, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(outer); err != nil {
		t.Error(err)
	}
	names, err := outer.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	index, err := outer.ImageIndex(names.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != 1 || manifest.Manifests[0].Platform.Architecture != runtime.GOARCH {
		t.Fatalf("manifests %+v, %v", manifest, err)
	}
	img, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	dockerfile := read(t, "../Dockerfile")
	_, last, _ := strings.Cut(dockerfile, "FROM scratch")
	for _, want := range []string{"USER " + config.Config.User, "ENV " + strings.Join(config.Config.Env, " "),
		`CMD ["` + strings.Join(config.Config.Cmd, `", "`) + `"]`} {
		if !strings.Contains(last, want+"\n") {
			t.Errorf("deploy/Dockerfile lacks %s", want)
		}
	}
	for label, value := range config.Config.Labels {
		if !strings.Contains(last, label+`="`+value+`"`) && !regexp.MustCompile(`(version|revision)$`).MatchString(label) {
			t.Errorf("deploy/Dockerfile lacks the label %s=%q", label, value)
		}
	}
	if n := strings.Count(last, "org.opencontainers.image."); n != len(config.Config.Labels) {
		t.Errorf("%d labels, and deploy/Dockerfile has %d", len(config.Config.Labels), n)
	}
	for _, name := range services {
		if !regexp.MustCompile(`for name in [a-z ]*\b` + name + `\b[a-z ]*;`).MatchString(dockerfile) {
			t.Errorf("deploy/Dockerfile lacks the link %s", name)
		}
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	extract := exec.Command("tar", "-x", "-C", root)
	extract.Stdin = content
	if _, err := output(extract); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(read(t, root, "etc/ssl/certs/ca-certificates.crt"), "BEGIN CERTIFICATE"); n < 100 {
		t.Errorf("%d certificate authorities", n)
	}
	if os.Geteuid() == 0 { // the image has no other file that the binary could use
		if got := run(t, "/", "chroot", root, "/bin/relay", "--version"); got != "relay "+version {
			t.Errorf("/bin/relay --version in the image: %q", got)
		}
	}
}

// materials compares the bill of materials with what Go says about the binary.
func materials(t *testing.T, bill, dir string) {
	var got struct {
		BOMFormat string
		Metadata  struct {
			Component struct{ Name, Version string }
		}
		Components []struct {
			Name, Version string
			Licenses      []struct{ License struct{ ID string } }
		}
	}
	if err := json.Unmarshal([]byte(bill), &got); err != nil {
		t.Fatal(err)
	}
	if got.BOMFormat != "CycloneDX" || got.Metadata.Component.Name != "tidings" || got.Metadata.Component.Version != version {
		t.Errorf("%s of %+v", got.BOMFormat, got.Metadata)
	}
	listed := map[string]bool{}
	for _, c := range got.Components {
		listed[c.Name+"\t"+c.Version] = true
		if len(c.Licenses) == 0 {
			t.Errorf("%s has no license", c.Name)
		}
	}
	modules := 0
	for line := range strings.Lines(run(t, dir, "go", "version", "-m", "bin/tidings")) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "dep" {
			modules++
			if !listed[f[1]+"\t"+f[2]] {
				t.Errorf("the bill lacks %s %s", f[1], f[2])
			}
		}
	}
	if !listed["std\t"+runtime.Version()] || !listed["htmx\t"] || modules < 30 || len(listed) < modules+2 {
		t.Errorf("%d modules, %d components", modules, len(listed))
	}
}

// npm installs the package in a new project, and imports it as an ES module and in CommonJS.
func npm(t *testing.T, tarball string) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "package.json"), []byte(`{"private": true}`), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, dir, "npm", "install", "--silent", "--no-audit", "--no-fund", tarball)
	for kind, script := range map[string]string{
		"commonjs": `const c = require("@tidings/client"); console.log(typeof c.Tidings, require("@tidings/client/package.json").version)`,
		"module": `import * as c from "@tidings/client"; import p from "@tidings/client/package.json" with {type: "json"};
			console.log(typeof c.Tidings, p.version)`,
	} {
		if got, want := run(t, dir, "node", "--no-warnings", "--input-type="+kind, "--eval", script), "function "+version; got != want {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
	}
}

func TestAReleaseRefusesChangesAndOtherVersions(t *testing.T) {
	repository := snapshot(t)
	refuse := func(version, want string) {
		t.Helper()
		dist := t.TempDir()
		err := (&release{repository: repository, dist: dist}).build(version)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", version, err, want)
		}
	}
	for _, v := range []string{"", "0.1.0", "v1", "v0.1.0 x", "v0.1.0/.."} {
		refuse(v, "must be like v0.1.0")
	}
	if err := os.WriteFile(filepath.Join(repository, "new.go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	refuse("v0.1.0", "new.go")
	run(t, repository, "git", "tag", "v0.1.0")
	run(t, repository, "git", "add", "--all")
	run(t, repository, "git", "commit", "--quiet", "--message=more")
	refuse("v0.1.0", "the tag v0.1.0 is the commit")
}

// TestATarHasNoTraceOfItsMaking writes files in two orders.
func TestATarHasNoTraceOfItsMaking(t *testing.T) {
	files := []file{{name: "b/c/d", data: []byte("d")}, {name: "a", data: []byte("a"), executable: true}, {name: "b/a", link: "c/d"}}
	var one, two bytes.Buffer
	if err := writeTar(&one, epochOfTests, files); err != nil {
		t.Fatal(err)
	}
	files[0], files[2] = files[2], files[0]
	if err := writeTar(&two, epochOfTests, files); err != nil || !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Errorf("the order of files changes the archive (%v)", err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x.tar"), one.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	got := run(t, dir, "tar", "--numeric-owner", "--utc", "-tvf", "x.tar")
	want := `-rwxr-xr-x 0/0               1 2026-01-02 03:04 a
drwxr-xr-x 0/0               0 2026-01-02 03:04 b/
lrwxrwxrwx 0/0               0 2026-01-02 03:04 b/a -> c/d
drwxr-xr-x 0/0               0 2026-01-02 03:04 b/c/
-rw-r--r-- 0/0               1 2026-01-02 03:04 b/c/d`
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}
