package cli

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/services"
	"github.com/tidings/tidings/internal/testkit"
)

// childVariable is the environment variable that makes this test binary run the tidings command.
const childVariable = "TIDINGS_TEST_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(childVariable) {
	case "":
	case "curl":
		if err := miniCurl(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case "service": // of a fleet: the name of its binary is the first argument, as for command tidings
		testkit.EndWithTest(nil)
		services.Named(os.Args[0])()
	case "spawned":
		testkit.EndWithTest(nil)
		os.Exit(mainWith(os.Args[1:], noteRan))
	default:
		os.Exit(mainWith(os.Args[1:], noteRan))
	}
	testkit.Main(m, everyCommandRan)
}

// ranFile has the commands that have succeeded, in this process and in its children, a line each.
func ranFile() string { return filepath.Join(os.TempDir(), "ran") }

func noteRan(command string) {
	f, err := os.OpenFile(ranFile(), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	defer func() { _ = f.Close() }() // each line is written at once
	if _, err := fmt.Fprintln(f, command); err != nil {
		panic(err)
	}
}

// everyCommandRan fails if no test has run one of the commands with success.
func everyCommandRan() error {
	text, err := os.ReadFile(ranFile())
	if err != nil {
		return err
	}
	var missing []string
	var search func(c *cobra.Command)
	search = func(c *cobra.Command) {
		if name := c.CommandPath(); !c.HasSubCommands() && !slices.Contains(strings.Split(string(text), "\n"), name) {
			missing = append(missing, name)
		}
		for _, sub := range c.Commands() {
			search(sub)
		}
	}
	search(Process{}.commands())
	if missing != nil {
		return fmt.Errorf("no test runs %s with success", strings.Join(missing, ", "))
	}
	return nil
}

// run runs a command in this process. It treats stdin as a terminal with a person's answers.
func run(t *testing.T, env map[string]string, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Execute(t.Context(), args, Process{Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errs, Env: envconfig.MapLookuper(env),
		answers: slices.Contains([]string{"yes\n", "n\n"}, stdin), ran: noteRan})
	return code, out.String(), errs.String()
}

// dev is a `tidings dev` in a child process, with a data directory and ports of its own.
type dev struct {
	dir  string
	args []string // more arguments
	env  []string
	cmd  *exec.Cmd

	done   chan struct{} // the process has ended
	err    error         // its error; valid once done is closed
	mu     sync.Mutex
	stdout bytes.Buffer
	stderr bytes.Buffer
}

// newDev prepares a dev, which start can start several times. Unless env has another DATABASE_URL,
// its database is on the server of testkit.Postgres: a server of its own would take longer to start
// than everything else in a dev.
func newDev(t *testing.T, env ...string) *dev {
	t.Helper()
	if !slices.ContainsFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "DATABASE_URL=") }) {
		env = append(env, "DATABASE_URL="+testkit.Postgres(t).URL)
	}
	return prepareDev(t, env...)
}

// newDevWithPostgres is newDev, but dev starts a PostgreSQL of its own. That has the migrated
// database, unless the test empties dir.
func newDevWithPostgres(t *testing.T, env ...string) *dev {
	t.Helper()
	d := prepareDev(t, env...)
	testkit.CopyCluster(t, filepath.Join(d.dir, "postgres"))
	return d
}

func prepareDev(t *testing.T, env ...string) *dev {
	t.Helper()
	if testing.Short() {
		t.Skip("starts servers")
	}
	d := &dev{dir: openDir(t)}
	for _, kv := range os.Environ() { // the test must not use the machine's own servers
		name, _, _ := strings.Cut(kv, "=")
		switch name {
		case "DATABASE_URL", "PROJECTIONS_DATABASE_URL", "NATS_URL", "DEV_TOKEN", "API_ADDR", "OPS_ADDR", "LOG_LEVEL", "LOG_FORMAT":
		default:
			d.env = append(d.env, kv)
		}
	}
	d.env = append(d.env, childVariable+"=1", "API_ADDR="+testkit.FreeAddr(t), "OPS_ADDR="+testkit.FreeAddr(t), "LEASE_TTL=5s",
		"HEARTBEAT_INTERVAL=0") // no lease ends when the machine stalls for a moment
	d.env = append(d.env, env...)
	t.Cleanup(func() {
		if d.cmd != nil {
			d.stop(t)
		}
		if t.Failed() {
			t.Logf("dev's stderr:\n%s", d.errors())
		}
	})
	return d
}

// openDir returns a directory that PostgreSQL's user can enter. If root runs the test, t.TempDir is
// not such a directory.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tidings-dev-*")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "data")
}

// startWithin only ends a broken test, so it is long: on a busy machine a start may take half a
// minute.
const startWithin = 2 * time.Minute

// launch starts the process and does not wait until it is ready.
func (d *dev) launch(t *testing.T) (ready <-chan struct{}) {
	t.Helper()
	d.cmd = exec.Command(os.Args[0], append([]string{"dev", "--data", d.dir}, d.args...)...)
	d.cmd.Env = d.env
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGINT} // dev ends if the test binary is killed
	d.cmd.Stderr = writerFunc(func(b []byte) (int, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.stderr.Write(b)
	})
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	greeted := make(chan struct{})
	d.done = make(chan struct{})
	go func() {
		defer close(d.done)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			d.mu.Lock()
			fmt.Fprintln(&d.stdout, lines.Text())
			d.mu.Unlock()
			if strings.HasPrefix(lines.Text(), "Ctrl-C stops") {
				close(greeted)
			}
		}
		d.err = d.cmd.Wait()
	}()
	return greeted
}

// start starts dev and waits until it prints its greeting.
func (d *dev) start(t *testing.T) {
	t.Helper()
	ready := d.launch(t)
	select {
	case <-ready:
	case <-d.done:
		t.Fatalf("dev ended: %v\n%s", d.err, d.errors())
	case <-time.After(startWithin):
		t.Fatalf("dev is not ready after %s\n%s", startWithin, d.errors())
	}
}

func (d *dev) errors() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stderr.String()
}

func (d *dev) output() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stdout.String()
}

// signal sends sig and waits until dev has ended.
func (d *dev) signal(t *testing.T, sig os.Signal) error {
	t.Helper()
	if err := d.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
	select {
	case <-d.done:
	case <-time.After(startWithin):
		_ = d.cmd.Process.Kill()
		t.Fatalf("dev has not ended %s after %s\n%s", startWithin, sig, d.errors())
	}
	d.cmd = nil
	return d.err
}

// stop sends SIGINT, as Ctrl-C does. Dev must end cleanly.
func (d *dev) stop(t *testing.T) {
	t.Helper()
	if err := d.signal(t, os.Interrupt); err != nil {
		t.Errorf("dev after Ctrl-C: %v\n%s", err, d.errors())
	}
}

// kill sends SIGKILL.
func (d *dev) kill(t *testing.T) {
	t.Helper()
	_ = d.signal(t, syscall.SIGKILL) // the error is that of the signal
}

func (d *dev) instance(t *testing.T) instance {
	t.Helper()
	in, err := readInstance(d.dir)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// request sends a request with dev's token and decodes the JSON of the answer.
func (d *dev) request(t *testing.T, method, path, body string, header http.Header, answer any) (status int, got http.Header) {
	t.Helper()
	in := d.instance(t)
	req, err := http.NewRequestWithContext(t.Context(), method, in.API+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Header.Set("Authorization", "Bearer "+in.Token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, ExpectContinueTimeout: startWithin}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if answer != nil {
		if err := json.Unmarshal(b, answer); err != nil {
			t.Fatalf("%s %s: %s: %v\n%s", method, path, resp.Status, err, b)
		}
	}
	return resp.StatusCode, resp.Header
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
