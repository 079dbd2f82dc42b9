package testkit

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/tidings/tidings/internal/pglocal"
)

// The test binary runs itself again with one of the first two variables set: as the reaper of a
// directory, or as a NATS server. The third tells the reaper its parent.
const (
	reapEnv  = "TIDINGS_TESTKIT_REAP"
	natsEnv  = "TIDINGS_TESTKIT_NATS"
	ownerEnv = "TIDINGS_TESTKIT_OWNER"
)

// shared is the state that the tests of one binary share. It is a variable because TestMain and the
// tests share no other place.
var shared struct {
	mu         sync.Mutex
	running    bool // whether Main runs
	dir        string
	reaper     *exec.Cmd
	tell       io.Writer // writes to the reaper
	containers bool      // the reaper knows that there are containers
	pg         server
	admin      *pgxpool.Pool // of pg's own database
	pgErr      error
	pgOnce     sync.Once
}

// Main is the TestMain of every package that uses servers. It runs the tests, stops the shared
// servers, fails if a goroutine still runs, or if one of the checks fails after all tests of the
// package have passed, and exits.
func Main(m *testing.M, checks ...func() error) {
	_ = os.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true") // our reaper removes the containers, and needs no image and no privileges
	if dir := os.Getenv(reapEnv); dir != "" {
		os.Exit(exitCode(reap(dir, os.Stdin)))
	}
	if spec := os.Getenv(natsEnv); spec != "" {
		os.Exit(exitCode(serveNATS(spec, os.Stdin, os.Stdout)))
	}
	shared.mu.Lock()
	shared.running = true
	shared.mu.Unlock()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // tests create and drop many parts of the system
	}
	if err := useScratch(); err != nil {
		os.Exit(exitCode(err))
	}
	code := m.Run()
	if all := flag.Lookup("test.run").Value.String() == "" && !testing.Short(); all && code == 0 {
		for _, check := range checks {
			code = max(code, exitCode(check()))
		}
	}
	if err := stopShared(); err != nil {
		code = max(code, exitCode(err))
	}
	if code == 0 {
		code = exitCode(findLeak())
	}
	os.Exit(code)
}

// findLeak returns an error if a goroutine does not end. One search of goleak waits for half a
// second, which is too short on a busy machine.
func findLeak() (err error) {
	for deadline := time.Now().Add(leakTimeout); ; {
		if err = goleak.Find(ignoredGoroutines()...); err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// leakTimeout is how long goroutines may need to end after the last test.
const leakTimeout = 20 * time.Second

func exitCode(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "testkit:", err)
	return 1
}

// ignoredGoroutines are goroutines of libraries that cannot be stopped: idle connections to the
// Docker engine.
func ignoredGoroutines() []goleak.Option {
	return []goleak.Option{
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
	}
}

// useScratch moves temporary files, including those of t.TempDir, to the directory of the servers'
// data.
func useScratch() error {
	dir, err := scratch("tmp")
	if err == nil {
		err = os.Chmod(dir, 0o711)
	}
	return errors.Join(err, os.Setenv("TMPDIR", dir))
}

// scratch returns a new directory for a server's data. It is not below t.TempDir: when the tests
// run as root, only root could enter that, and PostgreSQL runs as another user. The reaper removes
// it.
func scratch(name string) (string, error) {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if err := startReaper(); err != nil {
		return "", err
	}
	return os.MkdirTemp(shared.dir, name+"-")
}

// diskName begins the names of directories with a disk.
const diskName = "disk"

// postgresOn returns the directory of the PostgreSQL on a disk.
func postgresOn(disk string) string { return filepath.Join(disk, "postgres") }

// reapContainers makes the reaper remove this process's containers too.
func reapContainers() error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if err := startReaper(); err != nil || shared.containers {
		return err
	}
	_, err := shared.tell.Write([]byte{'c'})
	shared.containers = err == nil
	return err
}

// startReaper starts, once, a child that waits for the end of this process and then removes the
// directory and the servers in it. Without it a killed or timed-out test binary would leave its
// servers running. The caller holds the lock.
func startReaper() error {
	if !shared.running {
		return errors.New("this package's TestMain does not call testkit.Main")
	}
	if shared.reaper != nil {
		return nil
	}
	dir, err := os.MkdirTemp(roomy(), "tidings-test-")
	if err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), reapEnv+"="+dir, ownerEnv+"="+owner())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C must not end the reaper
	cmd.Stderr = os.Stderr
	if shared.tell, err = cmd.StdinPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the reaper of test servers: %w", err)
	}
	shared.dir, shared.reaper = dir, cmd
	return nil
}

// reap waits until its standard input ends, which happens when the parent has ended. A byte in it
// means that the parent has containers.
func reap(dir string, stdin io.Reader) error {
	told, err := io.Copy(io.Discard, stdin)
	if err != nil {
		return err
	}
	disks, err := filepath.Glob(filepath.Join(dir, diskName+"-*"))
	for _, d := range disks {
		err = errors.Join(err, pglocal.Destroy(postgresOn(d)), unmount(d))
	}
	dirs, gerr := filepath.Glob(filepath.Join(dir, "*"))
	err = errors.Join(err, gerr)
	for _, d := range dirs {
		err = errors.Join(err, pglocal.Destroy(d))
	}
	if told > 0 {
		e, eerr := engine()
		if eerr == nil {
			eerr = removeContainers(context.Background(), e.Client, func(owner string) bool { return owner == os.Getenv(ownerEnv) })
		}
		err = errors.Join(err, eerr)
	}
	return errors.Join(err, os.RemoveAll(dir))
}

func stopShared() error {
	var err error
	if shared.admin != nil {
		shared.admin.Close()
	}
	if shared.pg != nil {
		err = shared.pg.stop()
	}
	shared.mu.Lock()
	defer shared.mu.Unlock()
	shared.running = false
	if shared.reaper != nil {
		// It has only the directory left to remove, which happens below.
		if k := shared.reaper.Process.Kill(); k != nil && !errors.Is(k, os.ErrProcessDone) {
			err = errors.Join(err, k)
		}
		_ = shared.reaper.Wait() // its error reports the kill
		err = errors.Join(err, os.RemoveAll(shared.dir))
	}
	return err
}
