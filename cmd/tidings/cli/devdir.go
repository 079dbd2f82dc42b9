package cli

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/tokens"
)

// deathWithin is how long a dev that was killed may take to let go of its lock, ports and servers' directories: the kernel
// closes them one by one, on a busy machine for a while.
const deathWithin = 2 * time.Second

// lockData makes the data directory and takes it for this process. The kernel lets go of it when the process ends, however it
// ends.
func lockData(ctx context.Context, dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil { // open: as root, PostgreSQL runs as another user and has to pass; secrets are 0600
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory: %w", err)
	}
	if err := takeLock(ctx, f, dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// takeLock waits for an earlier dev that is just dying, and writes this process's number into the lock.
func takeLock(ctx context.Context, f *os.File, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, deathWithin)
	defer cancel()
	b := make([]byte, 20)
	n, err := f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return fmt.Errorf("read the lock of %s: %w", dir, err)
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b[:n]))) // 0 when no dev was killed
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != nil && err != unix.EWOULDBLOCK {
			return fmt.Errorf("lock %s: %w", dir, err)
		}
		if err == nil && (pid == 0 || syscall.Kill(pid, 0) == syscall.ESRCH) {
			break
		}
		select {
		case <-time.After(10 * time.Millisecond):
			continue
		case <-ctx.Done():
		}
		if err == nil {
			break // another program has that number by now
		}
		return fmt.Errorf("another `tidings dev` (process %d) runs with %s: stop it, or give this one another --data", pid, dir)
	}
	return errors.Join(f.Truncate(0), func() error { _, err := fmt.Fprintln(f, os.Getpid()); return err }())
}

// unlock lets go of the data directory after a clean stop.
func unlock(f *os.File) error { return errors.Join(f.Truncate(0), f.Close()) }

// devState is what dev keeps from start to start.
type devState struct {
	Token        string `json:"token"`
	ConsoleToken string `json:"console_token"` // a system token
	CursorKey    string `json:"cursor_key"`    // signs cursors: those given out must stay good
	NATSPort     int    `json:"nats_port"`     // of the server in process; taken again while it is free
}

const stateFile = "state.json"

// readState returns what the last start kept, with what is missing made. A token that is given wins.
func readState(dir, token string) (devState, error) {
	var s devState
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err == nil {
		err = json.Unmarshal(b, &s)
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return s, fmt.Errorf("read %s: %w", filepath.Join(dir, stateFile), err)
	}
	if token != "" {
		s.Token = token
	}
	if s.Token == "" {
		s.Token = tokens.New()
	}
	if s.ConsoleToken == "" {
		s.ConsoleToken = tokens.New()
	}
	if s.CursorKey == "" {
		key := make([]byte, 32)
		rand.Read(key) // never fails
		s.CursorKey = hex.EncodeToString(key)
	}
	return s, nil
}

func (s devState) write(dir string) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("encode dev's state: %w", err)
	}
	return writeFile(filepath.Join(dir, stateFile), b)
}

// listen takes the address that the variable names.
func listen(variable, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, portError(variable, addr, err)
	}
	return l, nil
}

func portError(variable, addr string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s is in use by another program: stop that, or set %s to another address (port 0 is any free one)", addr, variable)
	}
	return fmt.Errorf("listen on %s (%s): %w", addr, variable, err)
}

// httpURL is how to reach a listener from this machine.
func httpURL(addr net.Addr) string {
	host, port, err := net.SplitHostPort(addr.String())
	if err != nil {
		return "http://" + addr.String()
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, port)
}

// startPostgres starts dev's own PostgreSQL; the first start says why it takes a while.
func startPostgres(ctx context.Context, dir string, stderr io.Writer) (*pglocal.Server, error) {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(stderr, "Making a PostgreSQL in %s ...\n", dir)
	}
	pg, err := pglocal.Start(ctx, pglocal.Config{Dir: dir})
	if err != nil {
		return nil, err
	}
	return pg, nil
}

// abortAtSecondSignal makes a second SIGINT or SIGTERM end the process at once, and not without its PostgreSQL, which would
// otherwise stay behind in its process group. The first one is Main's to act on. The function that it returns takes that back.
func abortAtSecondSignal(pg *pglocal.Server) func() {
	signals := make(chan os.Signal, 2)
	over := make(chan struct{})
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		for range 2 {
			select {
			case <-signals:
			case <-over:
				return
			}
		}
		_ = pg.Abort() // there is nobody to tell; the next start stops what is left
		os.Exit(exitError)
	}()
	return func() {
		signal.Stop(signals)
		close(over)
	}
}

// databaseName is the database in dev's own PostgreSQL.
const databaseName = "tidings"

// ownDatabase makes the database unless it is there, and returns its connection string.
func ownDatabase(ctx context.Context, pg *pglocal.Server) (string, error) {
	conn, err := pgx.Connect(ctx, pg.URL("postgres"))
	if err != nil {
		return "", fmt.Errorf("make database %s: %w", databaseName, err)
	}
	var there bool
	err = conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, databaseName).Scan(&there)
	if err == nil && !there {
		_, err = conn.Exec(ctx, `CREATE DATABASE `+databaseName)
	}
	if err := errors.Join(err, conn.Close(ctx)); err != nil {
		return "", fmt.Errorf("make database %s: %w", databaseName, err)
	}
	return pg.URL(databaseName), nil
}

// startNATS starts dev's own server on the port that it had, or on another if that one is taken now.
func startNATS(dir string, port int, log *slog.Logger) (*broker.Server, error) {
	if port != 0 {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			port = 0
		} else if err := l.Close(); err != nil {
			return nil, fmt.Errorf("look whether port %d is free: %w", port, err)
		}
	}
	return broker.StartServer(broker.ServerConfig{Dir: dir, Port: port, Log: log.With("component", "nats")})
}

// portOf returns the port of a URL, 0 if it names none.
func portOf(address string) int {
	u, err := url.Parse(address)
	if err != nil {
		return 0
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		return 0
	}
	return port
}

// greeting is what dev prints when it is ready. Its curl lines work when pasted, one by one or all at once.
const greeting = `Tidings runs.

  API    {api}    documentation: {api}/docs
{console}  ops    {ops}    /metrics /healthz /readyz
  NATS   {nats}
  data   {data}
  token  {token}

Try it:

  curl -X PUT -H 'Authorization: Bearer {token}' {api}/v1/follows/7/42

  curl -H 'Authorization: Bearer {token}' {api}/v1/users/42/counts

  curl -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' -H 'Idempotency-Key: first' -d '{"author_id":"7","body":"Hello"}' {api}/v1/posts/100/comments

Ctrl-C stops everything.
`

func greet(w io.Writer, in instance, dir string) error {
	see := ""
	if in.Console != "" {
		see = "  look   " + in.Console + "    the console; sign in with " + in.ConsoleToken + "\n"
	}
	r := strings.NewReplacer("{console}", see, "{api}", in.API, "{ops}", in.Ops, "{nats}", in.NATSURL, "{data}", dir, "{token}", in.Token)
	if _, err := r.WriteString(w, greeting); err != nil {
		return fmt.Errorf("print where dev listens: %w", err)
	}
	return nil
}
