package pglocal_test

import (
	"context"
	"errors"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/pglocal"
)

// dataDir returns a directory that is accessible to the unprivileged user of the server when the
// tests run as root. t.TempDir is not.
func dataDir(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a server")
	}
	dir, err := os.MkdirTemp("", "tidings-pglocal-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pglocal.Destroy(filepath.Join(dir, "postgres")); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "postgres")
}

func start(t *testing.T, cfg pglocal.Config) *pglocal.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := pglocal.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func stop(t *testing.T, s *pglocal.Server) {
	t.Helper()
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
}

func query(t *testing.T, s *pglocal.Server, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := conn.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	var v string
	if err := conn.QueryRow(t.Context(), sql).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func TestServerIsDurablePrivateAndKeepsItsPort(t *testing.T) {
	dir := dataDir(t)
	s := start(t, pglocal.Config{Dir: dir})
	for sql, want := range map[string]string{
		"SHOW fsync":                   "on",
		"SHOW full_page_writes":        "on",
		"SHOW synchronous_commit":      "on",
		"SHOW listen_addresses":        "127.0.0.1",
		"SHOW unix_socket_directories": "",
		"SHOW server_encoding":         "UTF8",
		"SHOW lc_collate":              "C",
		"SHOW password_encryption":     "scram-sha-256",
		"SELECT setting FROM pg_settings WHERE name = 'TimeZone'": "GMT",
	} {
		if got := query(t, s, sql); got != want {
			t.Errorf("%s is %q, want %q", sql, got, want)
		}
	}
	for _, private := range []string{dir, filepath.Join(dir, "data"), filepath.Join(dir, "password")} {
		info, err := os.Stat(private)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s is %s: other users can read it", private, info.Mode())
		}
	}
	before := s.URL("postgres")
	stop(t, s)
	stop(t, s) // a second stop does nothing

	s = start(t, pglocal.Config{Dir: dir})
	defer stop(t, s)
	if s.URL("postgres") != before {
		t.Errorf("the address was %s and is %s", before, s.URL("postgres"))
	}
}

func TestWrongPasswordIsRefused(t *testing.T) {
	s := start(t, pglocal.Config{Dir: dataDir(t), Unsafe: true})
	defer stop(t, s)
	u, err := url.Parse(s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("postgres", "guess")
	if conn, err := pgx.Connect(t.Context(), u.String()); err == nil {
		t.Error("the server accepts a wrong password")
		_ = conn.Close(t.Context())
	}
	if got := query(t, s, "SHOW fsync"); got != "off" {
		t.Errorf("fsync is %s on an unsafe server", got)
	}
}

func TestTakenPortIsReplaced(t *testing.T) {
	dir := dataDir(t)
	s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
	u, err := url.Parse(s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	stop(t, s)
	l, err := net.Listen("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s = start(t, pglocal.Config{Dir: dir, Unsafe: true})
	defer stop(t, s)
	if strings.Contains(s.URL("postgres"), u.Host) {
		t.Errorf("the server uses a port that is in use")
	}
}

func TestSecondServerOnADirectoryIsRefused(t *testing.T) {
	dir := dataDir(t)
	s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
	defer stop(t, s)
	if _, err := pglocal.Start(t.Context(), pglocal.Config{Dir: dir, Unsafe: true}); !errors.Is(err, pglocal.ErrInUse) {
		t.Errorf("a second start: %v, want ErrInUse", err)
	}
	query(t, s, "SELECT 'alive'")
}

func kill(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
}

func TestPidFileOfAnotherProcessIsNotBelieved(t *testing.T) {
	dir := dataDir(t)
	s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
	stop(t, s)
	bystander := exec.Command("sleep", "60")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = bystander.Process.Kill()
		_ = bystander.Wait()
	}()
	content := strconv.Itoa(bystander.Process.Pid) + "\n" + filepath.Join(dir, "data") + "\n1\n5432\n\n127.0.0.1\n0 0\nready\n"
	if err := os.WriteFile(filepath.Join(dir, "data", "postmaster.pid"), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	s = start(t, pglocal.Config{Dir: dir, Unsafe: true})
	stop(t, s)
	if err := bystander.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("a process that is not PostgreSQL was ended: %v", err)
	}
}

func TestHalfMadeClusterIsMadeAgain(t *testing.T) {
	dir := dataDir(t)
	if err := os.MkdirAll(filepath.Join(dir, "data.new", "base"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "data.new", "PG_VERSION"), []byte("15\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
	defer stop(t, s)
	query(t, s, "SELECT 'alive'")
}

func TestServerIsInAProcessGroupOfItsOwn(t *testing.T) {
	s := start(t, pglocal.Config{Dir: dataDir(t), Unsafe: true})
	defer stop(t, s)
	group, err := syscall.Getpgid(s.PID())
	if err != nil {
		t.Fatal(err)
	}
	if group != s.PID() {
		t.Errorf("the server is in process group %d: Ctrl-C for the parent would reach it", group)
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	dir := dataDir(t)
	s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
	stop(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := pglocal.Start(ctx, pglocal.Config{Dir: dir, Unsafe: true}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	stop(t, start(t, pglocal.Config{Dir: dir, Unsafe: true})) // no server remains, and the directory is not locked
}

func TestStartEndsWithItsContextWhileItCreatesTheCluster(t *testing.T) {
	dir := dataDir(t)
	bin := filepath.Join(filepath.Dir(dir), "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	started := filepath.Join(bin, "started")
	if err := errors.Join(syscall.Mkfifo(started, 0o600), os.Chmod(started, 0o666)); err != nil {
		t.Fatal(err)
	}
	for name, script := range map[string]string{"postgres": "echo 'postgres (PostgreSQL) 15.0'",
		"initdb": "echo >" + started + "; exec sleep 600"} { // for a test that is slower than initdb
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("POSTGRES_BIN", bin)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		if _, err := os.ReadFile(started); err != nil { // waits for initdb
			t.Error(err)
		}
	}()
	_, err := pglocal.Start(ctx, pglocal.Config{Dir: dir})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
}

func TestWrongSettingIsReportedInTheServersWords(t *testing.T) {
	_, err := pglocal.Start(t.Context(), pglocal.Config{Dir: dataDir(t), Unsafe: true,
		Settings: map[string]string{"shared_buffers": "a lot"}})
	if err == nil || !strings.Contains(err.Error(), "shared_buffers") {
		t.Errorf("error %v, want one that names shared_buffers", err)
	}
}

func TestDirectoryThatTheServerCannotEnterIsOneSentence(t *testing.T) {
	if os.Geteuid() != 0 {
		if err := pglocal.Reachable(filepath.Join(t.TempDir(), "x")); err != nil {
			t.Errorf("an ordinary user's own directory: %v", err)
		}
		return
	}
	closed, err := os.MkdirTemp("", "tidings-closed-") // 0700, root's
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(closed)
	dir := filepath.Join(closed, "data")
	for _, err := range []error{pglocal.Reachable(dir), startError(t, dir)} {
		if err == nil || !strings.Contains(err.Error(), closed) || strings.Contains(err.Error(), "\n") {
			t.Errorf("error %v, want one line that names %s", err, closed)
		}
	}
}

func TestAFileInThePlaceOfTheDirectoryStaysAsItIs(t *testing.T) {
	file := filepath.Join(filepath.Dir(dataDir(t)), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := startError(t, file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("error %v, want one that names %s", err, file)
	}
	after, err := os.Stat(file)
	if err != nil || after.Mode() != before.Mode() || owner(after) != owner(before) {
		t.Errorf("the file became %v, %v", after, err)
	}
}

func owner(file os.FileInfo) uint32 { return file.Sys().(*syscall.Stat_t).Uid }

func startError(t *testing.T, dir string) error {
	_, err := pglocal.Start(t.Context(), pglocal.Config{Dir: dir})
	return err
}

func TestMissingBinariesNameTheWaysOut(t *testing.T) {
	rest := pglocal.ErrNoBinaries.Error()
	// In this order: someone who installed a release has no Makefile.
	for _, way := range []string{"install the package postgresql", "make postgres", "POSTGRES_BIN", "DATABASE_URL"} {
		_, after, found := strings.Cut(rest, way)
		if !found {
			t.Errorf("%q does not name %s, or names it too early", pglocal.ErrNoBinaries, way)
		}
		rest = after
	}
	empty := t.TempDir()
	t.Setenv("POSTGRES_BIN", empty)
	if _, err := pglocal.Find(0); err == nil || !strings.Contains(err.Error(), "POSTGRES_BIN="+empty) {
		t.Errorf("error %v, want one that names POSTGRES_BIN", err)
	}
}

func TestDataOfAnotherVersionIsRefused(t *testing.T) {
	dir := dataDir(t)
	s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
	stop(t, s)
	if err := os.WriteFile(filepath.Join(dir, "data", "PG_VERSION"), []byte("9999\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := startError(t, dir); err == nil || !strings.Contains(err.Error(), "9999") {
		t.Errorf("error %v, want one that names the version", err)
	}
}

func TestFreePortIsBelowThoseOfOutgoingConnectionsAndReserved(t *testing.T) {
	reserved := map[int]bool{}
	for range 500 { // without reservations, two of 500 are the same in 999 of 1,000 runs
		port, err := pglocal.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		if port < 15000 || port >= 32768 || reserved[port] {
			t.Errorf("port %d, returned before: %t", port, reserved[port])
		}
		reserved[port] = true
	}
}
