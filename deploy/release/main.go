// Command release builds what a release publishes, and writes it to a folder: archives of the
// binaries, a container image, the Helm chart, the npm package, a bill of materials and checksums.
// It is for `make release`. It may change in any release.
//
// It builds the commit that is checked out, not the files beside it, and needs no network but for
// the modules of Go and npm. The same commit, Go and node give the same bytes: every file has the
// time of the commit, and no path of the machine is in it.
//
// It is a module of its own because no binary needs its libraries.
package main

import (
	"cmp"
	"crypto/sha256"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// release is one release while it is built.
type release struct {
	repository string // the folder of the working tree
	source     string // the folder with the files of the commit
	dist       string
	version    string // without v
	revision   string
	when       time.Time // of the commit
	platforms  []string  // linux/amd64
	npm        bool
}

func main() {
	r := &release{}
	flag.StringVar(&r.repository, "repository", ".", "the folder of the repository")
	flag.StringVar(&r.dist, "dist", "dist", "the folder to write, which is emptied first")
	platforms := flag.String("platforms", "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64", "the platforms of the binaries")
	flag.BoolVar(&r.npm, "npm", true, "build the npm package, which needs npm")
	flag.Parse()
	r.platforms = strings.FieldsFunc(*platforms, func(c rune) bool { return c == ',' || c == ' ' })
	if err := r.build(flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

var versions = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`)

func (r *release) build(version string) error {
	if !versions.MatchString(version) {
		return fmt.Errorf("the version is %q, and must be like v0.1.0: make release VERSION=v0.1.0", version)
	}
	r.version = version[1:]
	if err := r.checkout(version); err != nil {
		return err
	}
	defer os.RemoveAll(r.source)
	for _, err := range []error{os.RemoveAll(r.dist), os.MkdirAll(r.dist, 0o755)} {
		if err != nil {
			return err
		}
	}
	bills, licenses := map[string]component{}, map[string][]byte{}
	for _, platform := range r.platforms {
		if err := r.readParts(platform, bills, licenses); err != nil {
			return err
		}
	}
	notices := notices(licenses)
	pages, err := r.pages()
	if err != nil {
		return err
	}
	var images []image
	for _, platform := range r.platforms {
		binary, err := r.compile(platform)
		if err != nil {
			return err
		}
		files, err := r.files(binary, notices)
		if err != nil {
			return err
		}
		name := "tidings-" + r.version + "-" + strings.ReplaceAll(platform, "/", "-")
		if err := r.writeArchive(name+".tar.gz", below(name, slices.Concat(files, pages))); err != nil {
			return err
		}
		if strings.HasPrefix(platform, "linux/") {
			images = append(images, image{platform, files})
		}
	}
	if err := r.writeImage(images); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	if err := r.writeBill(slices.SortedFunc(maps.Values(bills), component.compare)); err != nil {
		return fmt.Errorf("bill of materials: %w", err)
	}
	if err := r.writeChart(); err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	if r.npm {
		if err := r.writePackage(); err != nil {
			return fmt.Errorf("npm package: %w", err)
		}
	}
	return r.writeChecksums()
}

// checkout writes the files of the commit to a new folder. It refuses a working tree with changes,
// and a version whose tag names another commit.
func (r *release) checkout(version string) error {
	git := func(args ...string) (string, error) {
		return output(exec.Command("git", append([]string{"-C", r.repository}, args...)...))
	}
	changes, err := git("status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" {
		return fmt.Errorf("the working tree has changes. Commit them first:\n%s", changes)
	}
	if r.revision, err = git("rev-parse", "HEAD"); err != nil {
		return err
	}
	if tagged, err := git("rev-parse", "--verify", "--quiet", version+"^{commit}"); err == nil && tagged != r.revision {
		return fmt.Errorf("the tag %s is the commit %s, and %s is checked out", version, tagged, r.revision)
	}
	seconds, err := git("log", "-1", "--format=%ct")
	if err != nil {
		return err
	}
	epoch, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return err
	}
	r.when = time.Unix(epoch, 0).UTC()
	if r.source, err = os.MkdirTemp("", "tidings-release-"); err != nil {
		return err
	}
	files := filepath.Join(r.source, ".files.tar")
	if _, err := git("archive", "--output", files, "HEAD"); err != nil {
		return err
	}
	_, err = output(exec.Command("tar", "-xf", files, "-C", r.source))
	return cmp.Or(err, os.Remove(files))
}

// goCommand returns the go command for a platform, without what the environment may change in a
// build.
func (r *release) goCommand(platform string, args ...string) *exec.Cmd {
	system, processor, _ := strings.Cut(platform, "/")
	cmd := exec.Command("go", args...)
	cmd.Dir = r.source
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system, "GOARCH="+processor, "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=",
		"GOEXPERIMENT=", "GOWORK=off")
	return cmd
}

// compile returns the binary, built like that of deploy/Dockerfile.
func (r *release) compile(platform string) ([]byte, error) {
	const daemon = "github.com/tidings/tidings/internal/daemon."
	file := filepath.Join(r.source, ".binary")
	_, err := output(r.goCommand(platform, "build", "-trimpath", "-buildvcs=false", "-tags=grpcnotrace", "-o", file,
		"-ldflags=-s -w -X "+daemon+"version="+r.version+" -X "+daemon+"revision="+r.revision, "./cmd/tidings"))
	if err != nil {
		return nil, fmt.Errorf("build for %s: %w", platform, err)
	}
	return os.ReadFile(file)
}

// services are the links to the binary. The name by which it is called selects the service.
var services = []string{"api", "archiver", "followercounts", "relay", "threadcache"}

// files returns the files of an archive and of the image.
func (r *release) files(binary, notices []byte) ([]file, error) {
	license, err := os.ReadFile(filepath.Join(r.source, "LICENSE"))
	files := []file{{name: "LICENSE", data: license}, {name: "THIRD-PARTY-LICENSES.txt", data: notices},
		{name: "bin/tidings", data: binary, executable: true}}
	for _, name := range services {
		files = append(files, file{name: "bin/" + name, link: "tidings"})
	}
	return files, err
}

// pages returns what an archive has beside the binary: the documents, because the commands name
// their pages, and the rules, dashboards and settings that the pages name.
func (r *release) pages() (pages []file, err error) {
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "docs/images/*", "deploy/nats*.conf", "deploy/prometheus/*.yml",
		"deploy/grafana/*.json"} {
		names, err := filepath.Glob(filepath.Join(r.source, pattern))
		if err != nil {
			return nil, err
		}
		for _, path := range names {
			name, _ := filepath.Rel(r.source, path)
			data, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			pages = append(pages, file{name: filepath.ToSlash(name), data: data})
		}
	}
	return pages, nil
}

// versionLine matches the lines of Chart.yaml that a release sets.
var versionLine = regexp.MustCompile(`(?m)^(version|appVersion): .*$`)

// writeChart packages the chart with the version of the release, which is also the tag of its
// image. It does what `helm package` does: Helm's library would link a client of Kubernetes.
func (r *release) writeChart() error {
	dir := filepath.Join(r.source, "deploy", "helm", "tidings")
	files, err := readFiles(dir, "tidings")
	if err != nil {
		return err
	}
	for i, f := range files {
		if f.name == "tidings/Chart.yaml" {
			files[i].data = versionLine.ReplaceAll(f.data, []byte(`${1}: "`+r.version+`"`))
		}
	}
	return r.writeArchive("tidings-chart-"+r.version+".tgz", files)
}

// writePackage lets npm build and pack client/typescript. npm gives all files the same time.
func (r *release) writePackage() error {
	dist, err := filepath.Abs(r.dist)
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"version", "--silent", "--no-git-tag-version", "--allow-same-version", r.version},
		{"ci", "--silent", "--no-audit", "--no-fund"},
		{"pack", "--silent", "--pack-destination", dist},
	} {
		cmd := exec.Command("npm", args...)
		cmd.Dir = filepath.Join(r.source, "client", "typescript")
		if _, err := output(cmd); err != nil {
			return err
		}
	}
	return nil
}

// writeChecksums writes the SHA-256 of each file as `sha256sum --check` reads it.
func (r *release) writeChecksums() error {
	entries, err := os.ReadDir(r.dist)
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(r.dist, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	fmt.Print(sums.String())
	return os.WriteFile(filepath.Join(r.dist, "checksums.txt"), []byte(sums.String()), 0o644)
}

// output runs a command and returns what it printed. An error has the command's own message.
func output(cmd *exec.Cmd) (string, error) {
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s%s", strings.Join(cmd.Args, " "), err, out, &stderr)
	}
	return strings.TrimSpace(string(out)), nil
}
