package testkit

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/pglocal"
)

// Broker is a NATS server with JetStream for one test.
type Broker struct {
	URL string

	cfg   broker.Config
	serve broker.ServerConfig
	s     natsServer // nil when it is not ours
}

// natsServer is a NATS server in this process, in a child of it, or in a container.
type natsServer interface {
	process
	reload() error // its configuration file
}

// Config is how the code under test reaches this server, and under which names. On a server that is not the test's alone
// (TEST_NATS_URL) the stream and its subjects have names of the test's own, so take them from here.
func (b *Broker) Config() broker.Config { return b.cfg }

// Dir is where the server keeps its files; empty when it is not one of this machine's.
func (b *Broker) Dir() string { return b.serve.Dir }

// Connect returns a connection that is closed when the test ends.
func (b *Broker) Connect(t testing.TB) *nats.Conn {
	t.Helper()
	nc, err := broker.Connect(b.cfg, "test", Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeConn(nc) })
	return nc
}

// closeConn closes nc and waits until its goroutines have ended, which would otherwise look leaked.
func closeConn(nc *nats.Conn) {
	closed := nc.StatusChanged(nats.CLOSED)
	if nc.IsClosed() {
		return
	}
	nc.Close()
	select {
	case <-closed:
	case <-time.After(time.Second):
	}
}

// NATS returns a server of the test's own. It syncs lazily, and keeps its store in the test's directory.
func NATS(t testing.TB) *Broker {
	t.Helper()
	skipIfShort(t)
	if u := os.Getenv("TEST_NATS_URL"); u != "" {
		return externalNATS(t, u)
	}
	return newBroker(t, startHere, "")
}

// NATSWith returns a server of the test's own with a configuration of users and their permissions. Its URL has no user in it. TEST_NATS_URL is not used.
func NATSWith(t testing.TB, conf string) *Broker {
	t.Helper()
	skipIfShort(t)
	return newBroker(t, startHere, conf)
}

// NATSProcess returns a server of the test's own that the test may kill, freeze and restart. It syncs lazily; as the machine does not fail, a kill loses
// nothing that was acknowledged. TEST_NATS_URL is not used.
func NATSProcess(t testing.TB) *Broker {
	t.Helper()
	skipIfShort(t)
	return newBroker(t, startChild, "")
}

// starter starts a server and returns its URL.
type starter func(cfg broker.ServerConfig) (natsServer, string, error)

func newBroker(t testing.TB, start starter, conf string) *Broker {
	t.Helper()
	dir := t.TempDir()
	b := &Broker{serve: broker.ServerConfig{Dir: filepath.Join(dir, "store"), LazySync: true, Log: Logger(t)}}
	if conf != "" {
		b.serve.File = filepath.Join(dir, "nats.conf")
		check(t, "configure NATS", os.WriteFile(b.serve.File, []byte(conf), 0o600))
	}
	if err := b.start(start); err != nil {
		t.Fatalf("NATS for the test: %v", err)
	}
	t.Cleanup(func() { check(t, "stop NATS", b.s.stop()) })
	return b
}

// start runs the server by start, or in a container when all servers are to be there.
func (b *Broker) start(start starter) (err error) {
	if err := os.MkdirAll(b.serve.Dir, 0o700); err != nil {
		return err
	}
	if forceDocker() {
		start = startDockerNATS
	}
	var url string
	if b.s, url, err = start(b.serve); err != nil {
		return err
	}
	b.setURL(url)
	return nil
}

func (b *Broker) setURL(url string) {
	b.URL = url
	b.cfg = broker.Config{URL: url, Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxAge: 720 * time.Hour, MaxBytes: -1,
		Timeout: 5 * time.Second, Ping: time.Second}
}

// Kill ends the server with SIGKILL and returns when it is gone. Only for NATSProcess.
func (b *Broker) Kill(t testing.TB) {
	t.Helper()
	check(t, "kill NATS", b.server(t).kill())
}

// Freeze stops the server with all that it does: connections stay open and nobody answers. It is thawed at the latest when the test ends. Only for
// NATSProcess.
func (b *Broker) Freeze(t testing.TB) {
	t.Helper()
	s := b.server(t)
	t.Cleanup(func() { check(t, "thaw NATS", s.thaw()) })
	check(t, "freeze NATS", s.freeze())
}

// Thaw undoes Freeze. Only for NATSProcess.
func (b *Broker) Thaw(t testing.TB) {
	t.Helper()
	check(t, "thaw NATS", b.server(t).thaw())
}

// Restart ends the server if it runs, frozen or not, with SIGKILL and starts it on the same store and port. Only for NATSProcess.
func (b *Broker) Restart(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := b.server(t).restart(ctx); err != nil {
		t.Fatalf("restart NATS: %v", err)
	}
}

// Reload gives the server another configuration and returns once it has it. Only for NATSWith.
func (b *Broker) Reload(t testing.TB, conf string) {
	t.Helper()
	check(t, "configure NATS", os.WriteFile(b.serve.File, []byte(conf), 0o600))
	check(t, "configure NATS", b.server(t).reload())
}

func (b *Broker) server(t testing.TB) natsServer {
	t.Helper()
	if b.s == nil {
		t.Fatal("this NATS is not the test's own")
	}
	return b.s
}

// here is a server in this process, which no signal can disturb alone.
type here struct{ *broker.Server }

func startHere(cfg broker.ServerConfig) (natsServer, string, error) {
	s, err := broker.StartServer(cfg)
	if err != nil {
		return nil, "", err
	}
	return here{s}, s.URL(), nil
}

var errHere = errors.New("this NATS is no process of its own: use testkit.NATSProcess")

func (h here) stop() error                 { h.Shutdown(); return nil }
func (h here) reload() error               { return h.Reload() }
func (here) kill() error                   { return errHere }
func (here) freeze() error                 { return errHere }
func (here) thaw() error                   { return errHere }
func (here) restart(context.Context) error { return errHere }

// child is a test binary that runs as a NATS server.
type child struct {
	cfg  broker.ServerConfig
	cmd  *exec.Cmd
	done chan struct{}
}

// startChild returns once the child says that it serves.
func startChild(cfg broker.ServerConfig) (_ natsServer, _ string, err error) {
	if cfg.Port, err = fixedPort(cfg.Port); err != nil {
		return nil, "", err
	}
	c := &child{cfg: cfg}
	url, err := c.start()
	if err != nil {
		return nil, "", err
	}
	return c, url, nil
}

// fixedPort is known before the server starts, and not one that a client of the stopped server could be given.
func fixedPort(port int) (int, error) {
	if port != 0 {
		return port, nil
	}
	return pglocal.FreePort()
}

func (c *child) start() (url string, err error) {
	shared.mu.Lock()
	running := shared.running
	shared.mu.Unlock()
	if !running { // the child would run the tests
		return "", errors.New("this package's TestMain does not call testkit.Main")
	}
	spec, err := json.Marshal(natsSpec{Dir: c.cfg.Dir, Port: c.cfg.Port, MaxStore: c.cfg.MaxStore, Cluster: c.cfg.Cluster})
	if err != nil {
		return "", err
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), natsEnv+"="+string(spec))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = time.Second
	if _, err := cmd.StdinPipe(); err != nil { // its end tells the child that we have ended
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	line, readErr := bufio.NewReader(out).ReadString('\n')
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // it is killed in the end
		close(done)
	}()
	if readErr != nil {
		<-done
		return "", fmt.Errorf("the NATS child ended at its start: %s", cmd.ProcessState)
	}
	c.cmd, c.done = cmd, done
	return strings.TrimSpace(line), nil
}

func (c *child) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *child) signal(sig syscall.Signal) error {
	if c.ended() {
		return nil
	}
	return signal(c.cmd.Process.Pid, sig)
}

func (c *child) stop() error { return c.kill() }

func (c *child) kill() error {
	if err := c.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-c.done
	return nil
}

func (c *child) freeze() error {
	if c.ended() {
		return errors.New("it has ended")
	}
	_, err := freezeTree(c.cmd.Process.Pid)
	return err
}

func (c *child) thaw() error { return c.signal(syscall.SIGCONT) }

func (c *child) restart(context.Context) error {
	if err := c.kill(); err != nil {
		return err
	}
	_, err := c.start()
	return err
}

func (c *child) reload() error {
	return errors.New("this NATS has no configuration file: use testkit.NATSWith")
}

type natsSpec struct {
	Dir      string
	Port     int
	MaxStore int64
	Cluster  *broker.Cluster
}

// serveNATS is the child: it prints its URL and serves until its standard input ends.
func serveNATS(spec string, stdin io.Reader, stdout io.Writer) error {
	var s natsSpec
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		return err
	}
	srv, err := broker.StartServer(broker.ServerConfig{Dir: s.Dir, Port: s.Port, MaxStore: s.MaxStore, LazySync: true, Cluster: s.Cluster})
	if err != nil {
		return err
	}
	defer srv.Shutdown()
	if _, err := fmt.Fprintln(stdout, srv.URL()); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, stdin)
	return err
}

// externalNATS gives the test names of its own on a server that somebody else runs, and removes its streams afterwards.
func externalNATS(t testing.TB, url string) *Broker {
	t.Helper()
	b := &Broker{}
	b.setURL(url)
	own := rand.Text()[:10]
	b.cfg.Stream, b.cfg.Prefix, b.cfg.LivePrefix = "TEST_"+own, "events-"+own, "live-"+own
	t.Cleanup(func() {
		nc, err := broker.Connect(b.cfg, "test", Logger(t), nats.RetryOnFailedConnect(false))
		if err != nil {
			t.Errorf("remove the test's streams: %v", err)
			return
		}
		defer closeConn(nc)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Error(err)
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		names := js.StreamNames(ctx)
		for name := range names.Name() {
			if strings.HasPrefix(strings.TrimPrefix(name, "KV_"), b.cfg.Stream+"-") {
				if err := js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
					t.Errorf("remove the test's stream: %v", err)
				}
			}
		}
		if err := names.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
			t.Errorf("remove the test's streams: %v", err)
		}
	})
	return b
}

// Copy returns a directory with the server's files as they are at this moment, as a snapshot of its disk has them. Only for NATSProcess.
func (b *Broker) Copy(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	check(t, "freeze NATS", b.server(t).freeze())
	check(t, "copy NATS's files", os.CopyFS(dir, os.DirFS(b.serve.Dir)))
	b.Thaw(t)
	return dir
}

// NATSProcessOf is NATSProcess on a copy of files that Copy made.
func NATSProcessOf(t testing.TB, dir string) *Broker {
	t.Helper()
	b := NATSProcess(t)
	b.Kill(t)
	check(t, "remove NATS's files", os.RemoveAll(b.serve.Dir))
	check(t, "copy NATS's files", os.CopyFS(b.serve.Dir, os.DirFS(dir)))
	b.Restart(t)
	return b
}
