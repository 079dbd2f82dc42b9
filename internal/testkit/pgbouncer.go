package testkit

import (
	_ "embed" // the script
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

//go:embed pgbouncer.sh
var fetchPgBouncer string

// findPgBouncer returns the program, and the folders of its libraries if it was unpacked. It
// fetches PgBouncer if the machine has none.
func findPgBouncer() (path string, libraries []string, err error) {
	for _, p := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} {
		if path, err := exec.LookPath(p); err == nil {
			return path, nil, nil
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", nil, err
	}
	cache = filepath.Join(cache, "tidings-test", "pgbouncer")
	path = filepath.Join(cache, "root/usr/sbin/pgbouncer")
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		if out, err := exec.Command("sh", "-c", fetchPgBouncer, "sh", cache).CombinedOutput(); err != nil {
			return "", nil, fmt.Errorf("fetch PgBouncer: %w: %s", err, out)
		}
	}
	libraries, err = filepath.Glob(filepath.Join(cache, "root/usr/lib/*-linux-gnu*"))
	return path, libraries, err
}

// ThroughPgBouncer returns the same database as clients reach it through PgBouncer in transaction
// mode, with two connections to the server. PgBouncer ends with the test.
func (db *DB) ThroughPgBouncer(t testing.TB) *DB {
	t.Helper()
	path, libraries, err := findPgBouncer()
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(db.URL)
	check(t, "read the database's URL", err)
	dir, err := os.MkdirTemp("", "pgbouncer")
	check(t, "make a folder for PgBouncer", err)
	check(t, "open that folder", os.Chmod(dir, 0o755))
	t.Cleanup(func() { check(t, "remove PgBouncer's folder", os.RemoveAll(dir)) })
	addr := FreeAddr(t)
	host, port, err := net.SplitHostPort(addr)
	check(t, "read PgBouncer's address", err)
	password, _ := u.User.Password()
	users, config := filepath.Join(dir, "users"), filepath.Join(dir, "pgbouncer.ini")
	check(t, "write PgBouncer's users", os.WriteFile(users, fmt.Appendf(nil, "%q %q\n", u.User.Username(), password), 0o644))
	check(t, "write PgBouncer's configuration", os.WriteFile(config, fmt.Appendf(nil, `[databases]
* = host=%s port=%s
[pgbouncer]
listen_addr = %s
listen_port = %s
unix_socket_dir =
auth_type = trust
auth_file = %s
pool_mode = transaction
default_pool_size = 2
`, u.Hostname(), u.Port(), host, port, users), 0o644))
	args := []string{config}
	if os.Getuid() == 0 { // as which it does not run
		args = []string{"-u", "nobody", config}
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+strings.Join(libraries, ":"))
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatalf("start PgBouncer: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT) // it may have ended
		<-ended
	})
	Eventually(t, "PgBouncer to listen", func() (bool, error) {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("PgBouncer ended: %v\n%s", err, log.String())
		default:
		}
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			return false, err
		}
		return true, conn.Close()
	})
	u.Host = addr
	return &DB{URL: u.String()}
}
