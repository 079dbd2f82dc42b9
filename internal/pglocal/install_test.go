package pglocal_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestRunSaysAtOnceWhatThisMachineLacks runs `make run` as on a machine without apt: PATH has only
// the tools that the script needs, and a uname and package managers of the test. Its sed finds no
// version in any output, so the servers of this machine do not count. The page for such machines
// names the same packages.
func TestRunSaysAtOnceWhatThisMachineLacks(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/docker.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, system, tool, install string }{
		{"a Mac", "Darwin", "brew", "brew install postgresql@17"},
		{"a Mac without Homebrew", "Darwin", "", "brew install postgresql@17"},
		{"a Mac with apt", "Darwin", "apt-get", "brew install postgresql@17"},
		{"Fedora", "Linux", "dnf", "sudo dnf install postgresql-server"},
		{"Alpine", "Linux", "apk", "sudo apk add postgresql17"},
		{"Arch", "Linux", "pacman", "sudo pacman -S postgresql"},
		{"openSUSE", "Linux", "zypper", "sudo zypper install postgresql-server"},
		{"another system", "FreeBSD", "", "https://www.postgresql.org/download/"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.tool != "" && !strings.Contains(string(page), "`"+c.install+"`") {
				t.Errorf("docs/docker.md lacks %s", c.install)
			}
			path := t.TempDir()
			scripts := map[string]string{"uname": "echo " + c.system, "sed": ":", "go": "echo the build began"}
			if c.tool != "" {
				scripts[c.tool] = ":"
			}
			for name, script := range scripts {
				if err := os.WriteFile(filepath.Join(path, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, name := range []string{"make", "sh", "dirname", "readlink", "id", "paste"} {
				real, err := exec.LookPath(name)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(real, filepath.Join(path, name)); err != nil {
					t.Fatal(err)
				}
			}
			run := exec.CommandContext(t.Context(), "make", "-C", "../..", "run")
			run.Env = []string{"PATH=" + path, "HOME=" + t.TempDir()}
			output, err := run.CombinedOutput()
			if err == nil {
				t.Fatalf("make run ended without an error: %s", output)
			}
			for _, want := range []string{"postgres and initdb, version 15 or newer", c.install, "make up\n", "DATABASE_URL=postgres://"} {
				if !strings.Contains(string(output), want) {
					t.Errorf("the output lacks %q:\n%s", want, output)
				}
			}
			if strings.Contains(string(output), "the build began") {
				t.Errorf("make run builds before it says what is missing:\n%s", output)
			}
		})
	}
}

// TestTheScriptSearchesWherePackagesPutServers compares the places of install.sh with those of this
// package.
func TestTheScriptSearchesWherePackagesPutServers(t *testing.T) {
	t.Parallel()
	script, err := os.ReadFile("install.sh")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("binaries.go")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(source), "var packaged = []string{")
	list, _, _ = strings.Cut(list, "}")
	_, loop, _ := strings.Cut(string(script), "\nfor dir in ")
	loop, _, _ = strings.Cut(loop, "; do")
	got, want := strings.Fields(strings.ReplaceAll(loop, "\\\n", "")), strings.Fields(strings.NewReplacer(`"`, "", ",", " ").Replace(list))
	if len(want) != 5 || !slices.Equal(got, want) {
		t.Errorf("install.sh searches %q, and the package %q", got, want)
	}
}
