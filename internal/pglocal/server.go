package pglocal

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"
)

// ErrInUse reports that another process runs a server in the directory.
var ErrInUse = errors.New("pglocal: another process uses this data directory")

// Config says where and how to run a server.
type Config struct {
	Dir      string            // the directory of the cluster and its files; created if absent
	Unsafe   bool              // no fsync: faster, but a power loss destroys the data. Only for temporary servers
	Settings map[string]string // further configuration parameters, which override those of this package
}

// Server is a running PostgreSQL. Its methods are safe for concurrent use.
type Server struct {
	dir      string
	port     int
	password string
	pid      int
	lock     *os.File
	done     chan struct{} // closed when the postmaster has ended
}

// Start runs a server on cfg.Dir and returns when it accepts connections. It creates the cluster if
// there is none. It first stops a server that a killed process left running. Recovery after a crash
// can take long: ctx limits the wait, and when it ends Start stops the server. The error is
// ErrNoBinaries or ErrInUse, or has the last line of the server's log.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("absolute path of %s: %w", cfg.Dir, err)
	}
	acct, err := runAs()
	if err != nil {
		return nil, err
	}
	if err := makeDir(dir, acct); err != nil {
		return nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, lock: lock}
	defer func() {
		if err != nil {
			err = errors.Join(err, unlockDir(lock))
		}
	}()

	want, err := clusterVersion(s.data())
	if err != nil {
		return nil, err
	}
	bin, err := Find(want)
	if err != nil {
		return nil, err
	}
	if acct != nil {
		if err := acct.reaches(filepath.Join(bin.Dir, "postgres")); err != nil {
			return nil, err
		}
	}
	if want == 0 {
		if err := s.initdb(ctx, cfg, bin, acct); err != nil {
			return nil, err
		}
	}
	if err := s.readPassword(); err != nil {
		return nil, err
	}
	if err := stopLeftover(s.data()); err != nil {
		return nil, err
	}
	// No process works on the data now, so a remaining lock file is stale. Its number may belong to
	// another process of the same user by now, and then the server would refuse to start.
	if hasProc() {
		if err := os.Remove(filepath.Join(s.data(), "postmaster.pid")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return s, s.launchOnFreePort(ctx, cfg, bin, acct)
}

func (s *Server) launchOnFreePort(ctx context.Context, cfg Config, bin Binaries, acct *account) (err error) {
	const attempts = 3 // another process may take the free port before the server binds it
	for attempt := 1; ; attempt++ {
		if s.port, err = choosePort(filepath.Join(s.dir, "port"), attempt > 1); err != nil {
			return err
		}
		err = s.launch(ctx, cfg, bin, acct)
		if err == nil || attempt == attempts || !strings.Contains(err.Error(), "could not create any TCP/IP sockets") {
			return err
		}
	}
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

// URL returns the connection string of the superuser for the named database.
func (s *Server) URL(database string) string {
	u := url.URL{Scheme: "postgres", User: url.UserPassword("postgres", s.password),
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)), Path: "/" + database, RawQuery: "sslmode=disable"}
	return u.String()
}

// PID returns the process id of the postmaster.
func (s *Server) PID() int { return s.pid }

// Done returns a channel that is closed when the server has ended, by Stop or by itself.
func (s *Server) Done() <-chan struct{} { return s.done }

// Stop ends the server, first with a fast shutdown, then with harder ones, and returns when it has
// ended. A second Stop does nothing.
func (s *Server) Stop() error {
	var err error
	for _, step := range []struct {
		sig     syscall.Signal
		timeout time.Duration
	}{{syscall.SIGINT, fastTimeout}, {syscall.SIGQUIT, immediateTimeout}, {syscall.SIGKILL, killTimeout}} {
		if s.signal(step.sig, step.timeout) {
			break
		}
	}
	select {
	case <-s.done:
		err = stopLeftover(s.data()) // after SIGKILL its children may need a moment, or SIGKILL too
	default:
		err = fmt.Errorf("PostgreSQL, process %d, does not end", s.pid)
	}
	return errors.Join(err, unlockDir(s.lock))
}

// Abort ends the server at once, like a crash: the next Start recovers. It returns when the server
// has ended.
func (s *Server) Abort() error {
	s.signal(syscall.SIGQUIT, immediateTimeout)
	return s.Stop()
}

// signal sends sig and reports whether the server ends within the time limit.
func (s *Server) signal(sig syscall.Signal, within time.Duration) bool {
	select {
	case <-s.done:
		return true
	default:
	}
	if err := syscall.Kill(s.pid, sig); err != nil && err != syscall.ESRCH {
		return false
	}
	t := time.NewTimer(within)
	defer t.Stop()
	select {
	case <-s.done:
		return true
	case <-t.C:
		return false
	}
}

func makeDir(dir string, acct *account) error {
	if acct != nil {
		if err := acct.reaches(dir); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return err
	}
	return acct.own(dir)
}

// lockDir locks the directory for this process. The kernel releases the lock when the process ends
// in any way. The server does not inherit it.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrInUse
		}
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// unlockDir releases the lock of the directory. A second call does nothing. It does not rely on
// closing the file. A child that this process is forking has the descriptor, and with it the lock,
// until it runs its program.
func unlockDir(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil && !errors.Is(err, unix.EBADF) {
		return errors.Join(fmt.Errorf("unlock %s: %w", f.Name(), err), f.Close())
	}
	if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// clusterVersion returns the major version of the cluster, or 0 if there is none.
func clusterVersion(data string) (int, error) {
	b, err := os.ReadFile(filepath.Join(data, "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	v, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("%s/PG_VERSION contains %q", data, b)
	}
	return v, nil
}

// initdb creates the cluster under another name and renames it. So after a killed start there is
// either no cluster or a complete one.
func (s *Server) initdb(ctx context.Context, cfg Config, bin Binaries, acct *account) error {
	password := filepath.Join(s.dir, "password")
	if err := writeFile(password, rand.Text()+"\n", acct); err != nil {
		return err
	}
	fresh := s.data() + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return err
	}
	args := []string{"--pgdata=" + fresh, "--username=postgres", "--auth=scram-sha-256", "--pwfile=" + password,
		"--encoding=UTF8", "--locale=C"}
	if cfg.Unsafe {
		args = append(args, "--no-sync")
	}
	cmd := bin.Command(ctx, "initdb", args...)
	cmd.Dir, cmd.SysProcAttr = s.dir, acct.sysProcAttr()
	cmd.WaitDelay = time.Second // after a kill, its children keep the output open for a moment
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil { // Ctrl-C killed it
			return fmt.Errorf("create a PostgreSQL cluster in %s: %w", fresh, ctx.Err())
		}
		return fmt.Errorf("create a PostgreSQL cluster in %s: %w: %s", fresh, err, lastLine(out))
	}
	if err := os.Rename(fresh, s.data()); err != nil {
		return err
	}
	return syncDir(s.dir)
}

func (s *Server) readPassword() error {
	b, err := os.ReadFile(filepath.Join(s.dir, "password"))
	if err != nil {
		return fmt.Errorf("read the password of the cluster in %s: %w", s.dir, err)
	}
	s.password = strings.TrimSpace(string(b))
	return nil
}

// launch starts the server on s.port and waits until it accepts connections.
func (s *Server) launch(ctx context.Context, cfg Config, bin Binaries, acct *account) error {
	logPath := filepath.Join(s.dir, "postgres.log")
	if info, err := os.Stat(logPath); err == nil && info.Size() > 16<<20 {
		if err := os.Rename(logPath, logPath+".1"); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the server has its own descriptor
	info, err := log.Stat()
	if err != nil {
		return err
	}

	cmd := bin.Command(context.WithoutCancel(ctx), "postgres", s.args(cfg)...) // ctx limits only the start
	cmd.Dir, cmd.SysProcAttr = s.dir, acct.sysProcAttr()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	s.pid = cmd.Process.Pid
	done := make(chan struct{})
	s.done = done
	go func() {
		_ = cmd.Wait() // the server's log has the reason
		close(done)
	}()

	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if pid, state := pidFile(s.data()); pid == s.pid && state == "ready" {
			break
		}
		select {
		case <-done:
			return fmt.Errorf("PostgreSQL ended during its start (see %s): %s", logPath, failure(logPath, info.Size()))
		case <-ctx.Done():
			s.signal(syscall.SIGINT, fastTimeout)
			s.signal(syscall.SIGKILL, killTimeout)
			return fmt.Errorf("wait for PostgreSQL to accept connections (see %s): %w", logPath, context.Cause(ctx))
		case <-tick.C:
		}
	}
	if err := s.ping(ctx); err != nil {
		s.signal(syscall.SIGINT, fastTimeout)
		s.signal(syscall.SIGKILL, killTimeout)
		return err
	}
	return nil
}

func (s *Server) args(cfg Config) []string {
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(s.port),
		"unix_socket_directories": "", // a socket's path may have at most 107 bytes, and TCP suffices
		"max_connections":         "300",
		"timezone":                "GMT", // built into the server; any other name needs the system's tzdata
		"log_timezone":            "GMT",
		"fsync":                   "on",
	}
	if cfg.Unsafe {
		// synchronous_commit stays on. Without it a mere kill of the server would lose commits, and
		// tests would fail.
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
	}
	for k, v := range cfg.Settings {
		settings[k] = v
	}
	args := []string{"-D", s.data()}
	for k, v := range settings {
		args = append(args, "--"+k+"="+v)
	}
	sort.Strings(args[2:])
	return args
}

// ping verifies that the stored password is that of the cluster.
func (s *Server) ping(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL in %s: %w", s.dir, err)
	}
	return conn.Close(ctx)
}

// choosePort returns the port in the file if it is still free and another is false. Otherwise it
// chooses a free port and stores it.
func choosePort(file string, another bool) (int, error) {
	if b, err := os.ReadFile(file); err == nil && !another {
		if port, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && isFree(port) {
			return port, nil
		}
	}
	port, err := FreePort()
	if err != nil {
		return 0, err
	}
	return port, writeFile(file, strconv.Itoa(port)+"\n", nil)
}

func writeFile(path, content string, acct *account) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Sync(), f.Close(), acct.own(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// failure returns the line of the log after offset that explains the server's end: its last FATAL
// line, else its last line.
func failure(log string, offset int64) string {
	b, err := os.ReadFile(log)
	if err != nil {
		return err.Error()
	}
	if offset < int64(len(b)) {
		b = b[offset:]
	}
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	for i := len(lines) - 1; i >= 0; i-- {
		if bytes.Contains(lines[i], []byte("FATAL:")) {
			return string(lines[i])
		}
	}
	return string(lines[len(lines)-1])
}

func lastLine(b []byte) string {
	b = bytes.TrimSpace(b)
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}
