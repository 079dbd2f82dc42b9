package clienttest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/client"
)

// Tenant is a tenant on the servers that all tests of this binary share.
type Tenant struct {
	URL  string // of the API
	NATS string // URL of the NATS server, whose streams have the events of all tenants
	ID   int64
}

// New returns a client for a new tenant, with a token that has every role. Settings change the
// client. Use its Session for reads that include earlier writes.
func New(t testing.TB, with ...client.Setting) *client.Client {
	t.Helper()
	tenant := NewTenant(t)
	return tenant.Client(t, tenant.Token(t), with...)
}

// NewTenant makes a tenant.
func NewTenant(t testing.TB) Tenant {
	t.Helper()
	r := ask(t, request{Do: "tenant"})
	return Tenant{URL: r.URL, NATS: r.NATS, ID: r.Tenant}
}

// Database makes an empty database for the tables of a subscriber, and returns its URL. It ends
// with the servers.
func Database(t testing.TB) (url string) {
	t.Helper()
	return ask(t, request{Do: "database"}).URL
}

// Token makes a token of the tenant with these roles. Without roles it has all: read, write,
// moderate, admin and export.
func (n Tenant) Token(t testing.TB, roles ...string) string {
	t.Helper()
	return ask(t, request{Do: "token", Tenant: n.ID, Roles: roles}).Token
}

// Client returns a client with a token. Its connections are closed when the test ends.
func (n Tenant) Client(t testing.TB, token string, with ...client.Setting) *client.Client {
	t.Helper()
	c, err := client.New(n.URL, append([]client.Setting{client.WithToken(token)}, with...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// ApplyKinds puts kinds in force beside the built-in ones, for all tests of this binary, like
// `tidings kinds apply` with this YAML. It removes kinds of an earlier call that yaml does not
// have. It returns when the API has the routes of the kinds.
func ApplyKinds(t testing.TB, yaml string) {
	t.Helper()
	ask(t, request{Do: "kinds", YAML: yaml})
}

// request is a request of the tests to the server: one line of JSON.
type request struct {
	Do     string   `json:"do"` // tenant, token, kinds or database
	Tenant int64    `json:"tenant,omitempty"`
	Roles  []string `json:"roles,omitempty"`
	YAML   string   `json:"yaml,omitempty"`
}

// response is the server's answer: one line of JSON.
type response struct {
	Error  string `json:"error,omitempty"`
	URL    string `json:"url,omitempty"`
	NATS   string `json:"nats,omitempty"`
	Tenant int64  `json:"tenant,omitempty"`
	Token  string `json:"token,omitempty"`
}

// child is the server of this test binary. It is a variable because all tests of the binary share
// it.
var child struct {
	mu  sync.Mutex
	err error // of its start
	in  io.WriteCloser
	out *bufio.Reader
	dir string
}

// ask sends one request to the server. The first call starts the server.
func ask(t testing.TB, r request) response {
	t.Helper()
	child.mu.Lock()
	defer child.mu.Unlock()
	if child.in == nil && child.err == nil {
		child.err = start()
	}
	if child.err != nil {
		t.Fatalf("clienttest: %v", child.err)
	}
	answer, err := exchange(r)
	if err != nil {
		t.Fatalf("clienttest: %s: %v", r.Do, err)
	}
	return answer
}

func exchange(r request) (answer response, err error) {
	if err := json.NewEncoder(child.in).Encode(r); err != nil {
		return answer, fmt.Errorf("the server has ended: %w%s", err, lastWords())
	}
	line, err := child.out.ReadBytes('\n')
	if err != nil {
		return answer, fmt.Errorf("the server has ended: %w%s", err, lastWords())
	}
	if err := json.Unmarshal(line, &answer); err != nil {
		return answer, fmt.Errorf("read %q: %w", line, err)
	}
	if answer.Error != "" {
		return answer, errors.New(answer.Error)
	}
	return answer, nil
}

// start runs this binary again as the server. The server ends when its standard input ends. The
// kernel closes that when this process ends for any reason.
func start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if child.dir, err = os.MkdirTemp("", prefix); err != nil {
		return err
	}
	if err := os.Chmod(child.dir, 0o755); err != nil { // under root, PostgreSQL runs as another user, who must pass this directory
		return err
	}
	log, err := os.OpenFile(logFile(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own descriptor
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), variable+"="+child.dir)
	cmd.Stderr = log                                      // the test's stderr would stay open as long as the child
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C must reach the tests only
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	child.in, child.out = in, bufio.NewReader(out)
	if _, err := exchange(request{Do: "ready"}); err != nil {
		return errors.Join(err, in.Close())
	}
	return nil
}

func logFile() string { return filepath.Join(child.dir, "log") }

// lastWords returns the end of the server's log.
func lastWords() string {
	const most = 2000
	b, err := os.ReadFile(logFile())
	if err != nil || len(b) == 0 {
		return ""
	}
	return "\n" + string(b[max(0, len(b)-most):])
}

// startWithin bounds the start of the servers, on a busy machine.
const startWithin = 2 * time.Minute
