package pglocal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"
)

// MinVersion is the oldest major version of PostgreSQL that the schemas and statements support.
const MinVersion = 15

// ErrNoBinaries reports that this machine has no PostgreSQL server to run. Its text names the
// remedies.
var ErrNoBinaries = errors.New("no PostgreSQL server binaries (version 15 or newer) found: install the package postgresql, or run " +
	"`make postgres` in a checkout, or set POSTGRES_BIN to their directory, or set DATABASE_URL to a running server")

// Binaries are the programs of one PostgreSQL installation.
type Binaries struct {
	Dir         string // holds postgres and initdb
	LibraryPath string // for LD_LIBRARY_PATH; empty if the programs find their libraries without it
	Version     int    // major
}

// Find returns the server binaries to use: those of major version want, or of MinVersion or newer
// if want is 0. If POSTGRES_BIN is set, it searches only there. Otherwise it searches PATH, the
// directories of packages (newest first) and the directories of install.sh. It returns
// ErrNoBinaries, or an error that explains why the binaries it found are unsuitable.
func Find(want int) (Binaries, error) {
	if dir := os.Getenv("POSTGRES_BIN"); dir != "" {
		b, err := inspect(Binaries{Dir: dir})
		switch {
		case err != nil:
			return b, fmt.Errorf("POSTGRES_BIN=%s has no usable PostgreSQL server: %w", dir, err)
		case b.Version < MinVersion:
			return b, fmt.Errorf("POSTGRES_BIN=%s is PostgreSQL %d: want %d or newer", dir, b.Version, MinVersion)
		case want != 0 && b.Version != want:
			return b, fmt.Errorf("POSTGRES_BIN=%s is PostgreSQL %d, and the data needs version %d", dir, b.Version, want)
		}
		return b, nil
	}
	var others []string
	for _, c := range candidates() {
		b, err := inspect(c)
		if err != nil || b.Version < MinVersion {
			continue // an incomplete server, or too old
		}
		if want == 0 || b.Version == want {
			return b, nil
		}
		others = append(others, strconv.Itoa(b.Version))
	}
	if len(others) > 0 {
		return Binaries{}, fmt.Errorf("the data needs PostgreSQL %d, and this machine has only version %s: install version %[1]d "+
			"or use another data directory", want, strings.Join(others, ", "))
	}
	return Binaries{}, ErrNoBinaries
}

func candidates() []Binaries {
	var all []Binaries
	if p, err := exec.LookPath("postgres"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err == nil { // initdb and the shared files are beside the real program
			all = append(all, Binaries{Dir: filepath.Dir(p)})
		}
	}
	for _, dir := range newestFirst(packaged...) {
		all = append(all, Binaries{Dir: dir})
	}
	for _, root := range installRoots() {
		lib, err := os.ReadFile(filepath.Join(root, "library-path"))
		if err != nil {
			continue
		}
		var paths []string
		for _, l := range strings.Fields(string(lib)) {
			paths = append(paths, filepath.Join(root, l))
		}
		for _, dir := range newestFirst(filepath.Join(root, "usr/lib/postgresql/*/bin")) {
			all = append(all, Binaries{Dir: dir, LibraryPath: strings.Join(paths, ":")})
		}
	}
	return all
}

// installRoots returns the directories into which install.sh unpacks. The unprivileged user that
// runs root's server can read root's.
func installRoots() []string {
	roots := []string{"/var/cache/tidings/postgresql/root"}
	if os.Getuid() != 0 {
		if cache, err := os.UserCacheDir(); err == nil {
			roots = append([]string{filepath.Join(cache, "tidings/postgresql/root")}, roots...)
		}
	}
	return roots
}

// packaged matches the directories of packages. install.sh has the same list, and says whose they
// are.
var packaged = []string{"/usr/lib/postgresql/*/bin", "/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin",
	"/usr/pgsql-*/bin", "/usr/libexec/postgresql[0-9]*"}

func newestFirst(patterns ...string) (dirs []string) {
	for _, pattern := range patterns {
		found, err := filepath.Glob(pattern)
		if err != nil {
			panic(err) // only a programming error: the patterns are constants
		}
		dirs = append(dirs, found...)
	}
	version := func(dir string) int {
		dir = strings.TrimSuffix(dir, "/bin")
		n, err := strconv.Atoi(dir[1+strings.LastIndexFunc(dir, func(r rune) bool { return r < '0' || r > '9' }):])
		if err != nil {
			return -1
		}
		return n
	}
	sort.Slice(dirs, func(i, j int) bool { return version(dirs[i]) > version(dirs[j]) })
	return dirs
}

// inspect reads the version from the program, which also proves that the program runs and finds its
// libraries.
func inspect(b Binaries) (Binaries, error) {
	if _, err := os.Stat(filepath.Join(b.Dir, "initdb")); err != nil {
		return b, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	cmd := b.Command(ctx, "postgres", "--version")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return b, fmt.Errorf("run %s --version: %w: %s", cmd.Path, err, strings.TrimSpace(string(out)))
	}
	f := strings.Fields(string(out)) // postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)
	if len(f) < 3 {
		return b, fmt.Errorf("%s --version prints %q", cmd.Path, out)
	}
	digits := f[2]
	if i := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		digits = digits[:i]
	}
	if b.Version, err = strconv.Atoi(digits); err != nil {
		return b, fmt.Errorf("%s --version prints %q", cmd.Path, out)
	}
	return b, nil
}

// Command returns a command that runs one of the programs, with the libraries that it needs and
// without the caller's PG* variables, which must not change what it does. The end of ctx kills the
// program.
func (b Binaries) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(b.Dir, program), args...)
	cmd.Env = []string{"PATH=" + b.Dir + ":/usr/bin:/bin", "LC_ALL=C"}
	if b.LibraryPath != "" {
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+b.LibraryPath)
	}
	return cmd
}
