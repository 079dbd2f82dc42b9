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
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
)

// Broker is a NATS server with JetStream for one test.
type Broker struct {
	URL string

	cfg   broker.Config
	serve natsserver.Config
	s     natsServer // nil for TEST_NATS_URL
}

// natsServer is a NATS server in this process, in a child of it, or in a container.
type natsServer interface {
	process
	reload() error // reads its configuration file again
}

// Config returns the configuration with which the code under test connects to this server. On a
// shared server (TEST_NATS_URL) the stream and its subjects have names of this test only, so always
// use these names.
func (b *Broker) Config() broker.Config { return b.cfg }

// Dir returns the directory of the server's files. It is empty for TEST_NATS_URL.
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

// closeConn closes nc and waits until its goroutines have ended. Otherwise the leak check would
// find them.
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

// NATS returns a private server for the test. It does not sync each write, and its store is in the
// test's directory.
func NATS(t testing.TB) *Broker {
	t.Helper()
	skipIfShort(t)
	if u := os.Getenv("TEST_NATS_URL"); u != "" {
		return externalNATS(t, u)
	}
	return newBroker(t, startHere, "")
}

// NATSWith returns a private server with a configuration of users and their permissions. Its URL
// contains no user. It ignores TEST_NATS_URL.
func NATSWith(t testing.TB, conf string) *Broker {
	t.Helper()
	skipIfShort(t)
	return newBroker(t, startHere, conf)
}

// NATSProcess returns a private server that the test may kill, freeze and restart. It does not sync
// each write. Because the machine does not fail, a kill loses no acknowledged message. It ignores
// TEST_NATS_URL.
func NATSProcess(t testing.TB) *Broker {
	t.Helper()
	skipIfShort(t)
	return newBroker(t, startChild, "")
}

// starter starts a server and returns its URL.
type starter func(cfg natsserver.Config) (natsServer, string, error)

func newBroker(t testing.TB, start starter, conf string) *Broker {
	t.Helper()
	return newBrokerIn(t, t.TempDir(), start, conf)
}

func newBrokerIn(t testing.TB, dir string, start starter, conf string) *Broker {
	t.Helper()
	b := &Broker{serve: natsserver.Config{Dir: filepath.Join(dir, "store"), LazySync: true, Log: Logger(t)}}
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

// start runs the server with start, or in a container with TEST_SERVERS=docker.
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
	b.cfg = broker.Config{URL: url, Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1,
		MaxAge: 720 * time.Hour, MaxBytes: -1, Timeout: 5 * time.Second, Ping: time.Second}
}

// Through returns the same server as clients reach it over p.
func (b *Broker) Through(t testing.TB, p *Proxy) *Broker {
	t.Helper()
	over := *b
	over.URL = withHost(t, b.URL, p)
	over.cfg.URL = over.URL
	return &over
}

// Kill ends the server with SIGKILL and returns when it has ended. Only for NATSProcess.
func (b *Broker) Kill(t testing.TB) {
	t.Helper()
	check(t, "kill NATS", b.server(t).kill())
}

// Freeze stops all processes of the server: connections stay open, and it answers nothing. The end
// of the test thaws it. Only for NATSProcess.
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

// Restart ends the server with SIGKILL if it runs or is frozen, and starts it with the same store
// and port. Only for NATSProcess.
func (b *Broker) Restart(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := b.server(t).restart(ctx); err != nil {
		t.Fatalf("restart NATS: %v", err)
	}
}

// Reload gives the server another configuration and returns when the server uses it. Only for
// NATSWith.
func (b *Broker) Reload(t testing.TB, conf string) {
	t.Helper()
	check(t, "configure NATS", os.WriteFile(b.serve.File, []byte(conf), 0o600))
	check(t, "configure NATS", b.server(t).reload())
}

// Expire removes a stream's messages before a sequence at once, as their age does later; 0 removes
// all. Streams refuse purges.
func Expire(t testing.TB, s jetstream.Stream, before uint64) {
	t.Helper()
	info, err := s.Info(t.Context())
	check(t, "expire messages", err)
	if before == 0 {
		before = info.State.LastSeq + 1
	}
	for seq := info.State.FirstSeq; seq < before; seq++ {
		if err := s.DeleteMsg(t.Context(), seq); !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) { // it was deleted before
			check(t, "expire messages", err)
		}
	}
	if info, err = s.Info(t.Context()); err != nil || info.State.FirstSeq != before {
		t.Fatalf("expire messages: the stream begins at %d, want %d: %v", info.State.FirstSeq, before, err)
	}
}

func (b *Broker) server(t testing.TB) natsServer {
	t.Helper()
	if b.s == nil {
		t.Fatal("the test shares this NATS (TEST_NATS_URL) and cannot disturb it")
	}
	return b.s
}

// here is a server in this process. A signal to it would disturb the tests too.
type here struct{ *natsserver.Server }

func startHere(cfg natsserver.Config) (natsServer, string, error) {
	s, err := natsserver.Start(cfg)
	if err != nil {
		return nil, "", err
	}
	return here{s}, s.URL(), nil
}

var errHere = errors.New("this NATS runs inside the test process: use testkit.NATSProcess")

func (h here) stop() error                 { h.Shutdown(); return nil }
func (h here) reload() error               { return h.Reload() }
func (here) kill() error                   { return errHere }
func (here) freeze() error                 { return errHere }
func (here) thaw() error                   { return errHere }
func (here) restart(context.Context) error { return errHere }

// child is a child process that runs this test binary as a NATS server.
type child struct {
	cfg  natsserver.Config
	cmd  *exec.Cmd
	done chan struct{}
}

// startChild starts a child and returns when it serves.
func startChild(cfg natsserver.Config) (_ natsServer, _ string, err error) {
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

// fixedPort chooses a port before the server starts. The kernel does not give it to a client while
// the server is stopped.
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
	if _, err := cmd.StdinPipe(); err != nil { // the pipe's end tells the child that this process has ended
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
		_ = cmd.Wait() // it ends by a kill
		close(done)
	}()
	if readErr != nil {
		<-done
		return "", fmt.Errorf("the NATS child ended during its start: %s", cmd.ProcessState)
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
	return sendSignal(c.cmd.Process.Pid, sig)
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
		return errors.New("the NATS child has ended")
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
	Cluster  *natsserver.Cluster
}

// serveNATS runs in the child. It prints its URL and serves until its standard input ends.
func serveNATS(spec string, stdin io.Reader, stdout io.Writer) error {
	var s natsSpec
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		return err
	}
	srv, err := natsserver.Start(natsserver.Config{Dir: s.Dir, Port: s.Port, MaxStore: s.MaxStore, LazySync: true, Cluster: s.Cluster})
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

// externalNATS uses names of this test only on a shared server, and removes its streams afterwards.
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

// Copy returns a directory with a copy of the server's current files, like a snapshot of its disk.
// Only for NATSProcess.
func (b *Broker) Copy(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	check(t, "freeze NATS", b.server(t).freeze())
	check(t, "copy NATS's files", os.CopyFS(dir, os.DirFS(b.serve.Dir)))
	b.Thaw(t)
	return dir
}

// NATSProcessOf is NATSProcess with the files of a directory from Copy.
func NATSProcessOf(t testing.TB, dir string) *Broker {
	t.Helper()
	b := NATSProcess(t)
	b.Kill(t)
	check(t, "remove NATS's files", os.RemoveAll(b.serve.Dir))
	check(t, "copy NATS's files", os.CopyFS(b.serve.Dir, os.DirFS(dir)))
	b.Restart(t)
	return b
}
