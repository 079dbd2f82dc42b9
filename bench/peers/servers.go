package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
)

// postgresSettings are those of the server of a run. It syncs each commit to disk.
func postgresSettings() map[string]string {
	return map[string]string{"shared_buffers": "256MB", "max_wal_size": "4GB"}
}

// newDatabase creates a database on the server, and returns its URL.
func newDatabase(ctx context.Context, s *pglocal.Server, name string) (string, error) {
	return s.URL(name), execute(ctx, s, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
}

func dropDatabase(ctx context.Context, s *pglocal.Server, name string) error {
	return execute(ctx, s, "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
}

// execute runs a statement on a connection of its own.
func execute(ctx context.Context, s *pglocal.Server, sql string) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// startPair starts a primary and a synchronous standby in dir.
func startPair(ctx context.Context, dir string) (primary, standby *pglocal.Server, err error) {
	settings := postgresSettings()
	settings["wal_keep_size"], settings["wal_retrieve_retry_interval"] = "512MB", "100ms"
	first := pglocal.Config{Dir: filepath.Join(dir, "primary"), Settings: settings}
	if primary, err = pglocal.Start(ctx, first); err != nil {
		return nil, nil, err
	}
	if err := primary.Stop(); err != nil {
		return nil, nil, err
	}
	second := pglocal.Config{Dir: filepath.Join(dir, "standby"), Settings: postgresSettings()}
	if out, err := exec.CommandContext(ctx, "cp", "-a", first.Dir, second.Dir).CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("copy the primary: %w: %s", err, out)
	}
	if err := errors.Join(os.Remove(filepath.Join(second.Dir, "port")),
		os.WriteFile(filepath.Join(second.Dir, "data", "standby.signal"), nil, 0o644)); err != nil {
		return nil, nil, err
	}
	if primary, err = pglocal.Start(ctx, first); err != nil {
		return nil, nil, err
	}
	base, err := url.Parse(primary.URL("postgres"))
	if err != nil {
		return primary, nil, err
	}
	password, _ := base.User.Password()
	second.Settings["wal_retrieve_retry_interval"] = "100ms"
	second.Settings["primary_conninfo"] = fmt.Sprintf("host=%s port=%s user=postgres password=%s sslmode=disable",
		base.Hostname(), base.Port(), password)
	if standby, err = pglocal.Start(ctx, second); err != nil {
		return primary, nil, err
	}
	return primary, standby, synchronous(ctx, primary)
}

// synchronous makes commits wait for the standby, and returns when it has caught up.
func synchronous(ctx context.Context, primary *pglocal.Server) error {
	conn, err := pgx.Connect(ctx, primary.URL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, sql := range []string{`ALTER SYSTEM SET synchronous_standby_names = '*'`, `SELECT pg_reload_conf()`} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return await(ctx, 30*time.Second, "a synchronous standby", func() (is bool, err error) {
		err = conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_replication
			WHERE sync_state IN ('sync', 'quorum') AND state = 'streaming')`).Scan(&is)
		return is, err
	})
}

// failOver kills the primary and promotes the standby.
func failOver(ctx context.Context, primary, standby *pglocal.Server) error {
	if err := killTree(primary.PID()); err != nil {
		return err
	}
	if err := primary.Stop(); err != nil { // waits for its end
		return err
	}
	return execute(ctx, standby, `SELECT pg_promote(true, 60)`)
}

// anyHost returns the URL of a database on whichever of the servers accepts writes.
func anyHost(name string, servers ...*pglocal.Server) (string, error) {
	var hosts []string
	var u *url.URL
	for _, s := range servers {
		var err error
		if u, err = url.Parse(s.URL(name)); err != nil {
			return "", err
		}
		hosts = append(hosts, u.Host)
	}
	if len(hosts) == 1 {
		return u.String(), nil
	}
	u.Host, u.RawQuery = strings.Join(hosts, ","), u.RawQuery+"&target_session_attrs=read-write&connect_timeout=2"
	return u.String(), nil
}

// broker is a NATS server in a child process.
type broker struct {
	url  string
	args []string
	cmd  *exec.Cmd
}

// startBroker starts a server whose largest message has maxPayload bytes; 0 for NATS's default.
func startBroker(dir string, syncAlways bool, maxPayload int) (*broker, error) {
	port, err := pglocal.FreePort()
	if err != nil {
		return nil, err
	}
	conf := filepath.Join(dir, "nats.conf")
	text := ""
	if maxPayload > 0 {
		text = fmt.Sprintf("max_payload: %d\n", maxPayload)
	}
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return nil, err
	}
	b := &broker{args: []string{"nats", filepath.Join(dir, "nats"), fmt.Sprint(port), fmt.Sprint(syncAlways), conf}}
	return b, b.start()
}

func (b *broker) start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, b.args...)
	cmd.Stderr, cmd.SysProcAttr = os.Stderr, withParent()
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return errors.Join(fmt.Errorf("the broker did not start: %w", err), cmd.Process.Kill(), cmd.Wait())
	}
	b.url, b.cmd = strings.TrimSpace(line), cmd
	return nil
}

// kill ends the server with SIGKILL. start starts it again with its files and its port.
func (b *broker) kill() {
	_ = b.cmd.Process.Kill() // it may have ended
	_ = b.cmd.Wait()         // the error is that of the kill
}

// serveNATS is the child: it prints its URL and serves until it is killed.
func serveNATS(ctx context.Context, args []string, out io.Writer) error {
	if len(args) != 4 {
		return errors.New("nats: want DIR PORT SYNC FILE")
	}
	var port int
	if _, err := fmt.Sscan(args[1], &port); err != nil {
		return err
	}
	s, err := natsserver.Start(natsserver.Config{Dir: args[0], Port: port, LazySync: args[2] != "true", File: args[3]})
	if err != nil {
		return err
	}
	defer s.Shutdown()
	if _, err := fmt.Fprintln(out, s.URL()); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// natsOptions make a client connect again for as long as it lives.
func natsOptions() []nats.Option {
	return []nats.Option{nats.MaxReconnects(-1), nats.ReconnectWait(200 * time.Millisecond), nats.RetryOnFailedConnect(true)}
}

// await calls done every 20 ms until it returns true. Its errors count only at the end, because the
// servers of a run come and go.
func await(ctx context.Context, within time.Duration, what string, done func() (bool, error)) error {
	deadline := time.Now().Add(within)
	for {
		ok, err := done()
		if ok && err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("no %s within %s", what, within), err)
		}
		sleep(ctx, 20*time.Millisecond)
	}
}

// withParent ends a child process when this one ends.
func withParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// killTree ends a process and its descendants like a crash of their machine. It stops all of them
// first, so that none reacts to the end of another.
func killTree(pid int) error {
	var all []int
	for {
		now, err := tree(pid)
		if err != nil {
			return err
		}
		for _, p := range now {
			_ = syscall.Kill(p, syscall.SIGSTOP) // it may have ended
		}
		if slices.Equal(now, all) {
			break
		}
		all = now
	}
	for _, p := range all {
		_ = syscall.Kill(p, syscall.SIGKILL)
	}
	return nil
}
