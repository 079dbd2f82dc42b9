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
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
)

// deathWithin is how long a killed dev may keep its lock, its ports and its servers' directories.
// The kernel closes them one by one, which takes some time on a busy machine.
const deathWithin = 2 * time.Second

// lockData creates the data directory and locks it for this process. The kernel releases the lock
// when the process ends in any way.
func lockData(ctx context.Context, dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil { // if root runs dev, PostgreSQL runs as another user and needs access; secrets are 0600
		return nil, fmt.Errorf("create the data directory: %w; name another one with --data", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory: %w; name another one with --data", err)
	}
	if err := takeLock(ctx, f, dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// takeLock waits while an earlier dev is still ending, and writes this process's id into the lock.
func takeLock(ctx context.Context, f *os.File, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, deathWithin)
	defer cancel()
	b := make([]byte, 20)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the lock of %s: %w", dir, err)
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b[:n]))) // 0 after a clean stop
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
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
			break // another program has that process id now
		}
		return fmt.Errorf("another `tidings dev` (process %d) uses %s: stop it, or give this one another --data", pid, dir)
	}
	return errors.Join(f.Truncate(0), func() error { _, err := fmt.Fprintln(f, os.Getpid()); return err }())
}

// unlock releases the data directory after a clean stop.
func unlock(f *os.File) error { return errors.Join(f.Truncate(0), f.Close()) }

// devState is the state that dev keeps between starts.
type devState struct {
	Token        string `json:"token"`
	ConsoleToken string `json:"console_token"` // a system token
	CursorKey    string `json:"cursor_key"`    // signs cursors, so that they remain valid after a restart
	NATSPort     int    `json:"nats_port"`     // of the server in this process; reused if it is free
	NATSPassword string `json:"nats_password"` // of the only user of that server
}

const stateFile = "state.json"

// readState returns the state of the last start, and creates missing values. A non-empty token
// replaces the stored one.
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
	if s.NATSPassword == "" {
		s.NATSPassword = rand.Text()
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

// listen listens on addr, the value of the environment variable.
func listen(variable, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, portError(variable, addr, err)
	}
	return l, nil
}

func portError(variable, addr string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("another program uses %s: stop it, or set %s to another address (port 0 means any free port)", addr, variable)
	}
	return fmt.Errorf("listen on %s (%s): %w", addr, variable, err)
}

// httpURL returns the URL of a listener for clients on this machine.
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

// startPostgres starts dev's own PostgreSQL. The first start prints a line, because it takes some
// seconds.
func startPostgres(ctx context.Context, dir string, stderr io.Writer) (*pglocal.Server, error) {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(stderr, "Creating a PostgreSQL data directory in %s ...\n", dir)
	}
	pg, err := pglocal.Start(ctx, pglocal.Config{Dir: dir})
	if err != nil {
		return nil, err
	}
	return pg, nil
}

// abortAtSecondSignal makes a second SIGINT or SIGTERM end the process at once, together with its
// PostgreSQL, which would otherwise keep running in its own process group. Main acts on the first
// signal. The returned function undoes this.
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
		_ = pg.Abort() // nobody could read the error; the next start stops the rest
		os.Exit(exitError)
	}()
	return func() {
		signal.Stop(signals)
		close(over)
	}
}

// databaseName is the database in dev's own PostgreSQL.
const databaseName = "tidings"

// ownDatabase creates the database unless it exists, and returns its connection string.
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

// startNATS starts dev's own server on its earlier port, or on another one if a program uses that
// port now. It has one user, because dev plays every role in one process, and the person who runs
// dev may see everything.
func startNATS(dir string, port int, password string, log *slog.Logger) (*natsserver.Server, error) {
	if port != 0 {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			port = 0
		} else if err := l.Close(); err != nil {
			return nil, fmt.Errorf("check whether port %d is free: %w", port, err)
		}
	}
	if port == 0 { // the kernel gives such a port to no other program while dev is stopped
		var err error
		if port, err = pglocal.FreePort(); err != nil {
			return nil, err
		}
	}
	return natsserver.Start(natsserver.Config{Dir: dir, Port: port, User: url.UserPassword("tidings", password),
		Log: log.With("component", "nats")})
}

// portOf returns the port of a URL, or 0 if it has none.
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

// greeting is the text that dev prints when it is ready. Its curl lines work when pasted, one by
// one or all at once.
const greeting = `{state}

  API      {api}    documentation: {api}/docs
{console}  ops      {ops}    /metrics /healthz /readyz
  NATS     {nats}
  data     {data}    for other commands: --data {data}
  token    {token}

Try it:

  curl -X PUT -H 'Authorization: Bearer {token}' {api}/v1/follows/7/42

  curl -H 'Authorization: Bearer {token}' {api}/v1/users/42/counts

  curl -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' ` +
	`-H 'Idempotency-Key: first' -d '{"author_id":"7","body":"Hello"}' {api}/v1/posts/100/comments

Ctrl-C stops everything.
`

// greet prints the greeting. outside reports that NATS_URL names the NATS server, and connected
// that it answers.
func greet(w io.Writer, in instance, dir string, outside, connected bool) error {
	state, see, server := "Tidings is running.", "", in.NATSURL
	if outside {
		server += "    from NATS_URL"
	}
	if !connected {
		state = "Tidings is running, but waits for NATS: the server below does not answer.\n" +
			"The API accepts writes. Relays publish their events once NATS answers."
	}
	if in.Console != "" {
		see = "  console  " + in.Console + "    token for sign-in: " + in.ConsoleToken + "\n"
	}
	r := strings.NewReplacer("{state}", state, "{console}", see, "{api}", in.API, "{ops}", in.Ops, "{nats}", server, "{data}", dir,
		"{token}", in.Token)
	if _, err := r.WriteString(w, greeting); err != nil {
		return fmt.Errorf("print the addresses of dev: %w", err)
	}
	return nil
}

// prepareServers creates dev's tokens and, on servers of its own, the first stream. It reports
// whether NATS answers.
func prepareServers(ctx context.Context, cfg devConfig, in instance, log *slog.Logger) (connected bool, err error) {
	truth, err := postgres.Open(ctx, in.DatabaseURL, cfg.Postgres, postgres.RoleSystem, "dev")
	if err != nil {
		return false, err
	}
	defer truth.Close()
	nc, js, err := broker.Open(cfg.Broker, "dev", log)
	if err != nil {
		return false, err
	}
	defer nc.Close()
	if err := tokens.Ensure(ctx, truth, devTenant, devName, in.Token, tokens.Roles()); err != nil {
		return false, err
	}
	if cfg.Console.On {
		roles := []string{tokens.RoleRead, tokens.RoleModerate, tokens.RoleAdmin}
		if err := tokens.Ensure(ctx, truth, tokens.SystemTenant, devName, in.ConsoleToken, roles); err != nil {
			return false, err
		}
	}
	if cfg.DatabaseURL != "" {
		return nc.IsConnected(), nil
	}
	first, err := outbox.ReadPartition(ctx, truth, 0)
	if err != nil || first.Stream != "" || cfg.NATSURL != "" {
		return nc.IsConnected(), err // the relay checks that a stream is still the one that the database knows
	}
	// Consumers start together with the relay, and need the stream.
	_, err = broker.Declare(ctx, js, cfg.Broker, broker.Partition{FirstSlot: first.FirstSlot, LastSlot: first.LastSlot}, log)
	return nc.IsConnected(), err
}
