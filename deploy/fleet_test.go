package deploy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var race bool // the tests run with the race detector, and so do the binaries: their packages are compiled already

// fleet is every service as a process, each with a PostgreSQL login and a NATS user of its own.
type fleet struct {
	t      *testing.T
	dir    string
	db     *testkit.DB
	b      *testkit.Broker
	users  string // the server's configuration
	logins map[string]string
	procs  map[string]*process
	api    string
	client *http.Client
}

// process is one binary that runs.
type process struct {
	cmd *exec.Cmd
	ops string
	api string // where it serves, if it is an API
	log lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

const secret = "secret-of-" // the passwords, with the name behind it

var binaries = []string{"relay", "api", "followercounts", "threadcache", "archiver"}

// natsUser is the user of a binary.
var natsUser = map[string]string{"relay": "relay", "api": "api", "followercounts": "consumer", "threadcache": "consumer", "archiver": "consumer", "operator": "operator"}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := emptyFleet(t, testkit.Postgres(t))
	f.dir = t.TempDir()
	build(t, "..", f.dir, "./cmd/tidings")
	for _, name := range binaries { // as in the image
		if err := os.Symlink("tidings", filepath.Join(f.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	f.makeLogins()
	f.users = f.tidings("nats", "users", "--subscriber", "name=plain,tenant=7", "--subscriber", "name=mailer,tenant=7,durable=mailer,filter=follow.created",
		"--subscriber", "name=service,durable=svc-follow,filter=follow.*")
	committed, err := os.ReadFile("nats-users.conf")
	if err != nil {
		t.Fatal(err)
	}
	if f.tidings("nats", "users") != string(committed) {
		t.Error("nats-users.conf is not what `tidings nats users` prints; write it anew")
	}
	f.setPasswords("")
	f.b = testkit.NATSWith(t, f.users)
	return f
}

func emptyFleet(t *testing.T, db *testkit.DB) *fleet {
	return &fleet{t: t, db: db, logins: map[string]string{}, procs: map[string]*process{}, client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
}

// build builds packages of the module at root into dir; flags come before them.
func build(t *testing.T, root, dir string, packages ...string) {
	t.Helper()
	args := []string{"build", "-buildvcs=false", "-ldflags=-s -w", "-o", dir}
	if race {
		args = append(args, "-race")
	}
	args = append(args, packages...)
	cmd := exec.Command("go", args...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
}

// makeLogins has migrate make a login for each binary. Logins are the server's, so their names are this test's.
func (f *fleet) makeLogins() {
	f.t.Helper()
	var file strings.Builder
	suffix := fmt.Sprint(time.Now().UnixNano())
	for who, role := range map[string]string{"relay": "relay", "api": "api", "followercounts": "consumer", "threadcache": "consumer", "archiver": "system", "operator": "system",
		"verify": "reader", "writer": "writer"} {
		u, err := url.Parse(f.db.URL)
		if err != nil {
			f.t.Fatal(err)
		}
		name := who + "_" + suffix
		fmt.Fprintf(&file, "%s %s %s%s\n", name, role, secret, who)
		u.User = url.UserPassword(name, secret+who)
		f.logins[who] = u.String()
		f.t.Cleanup(func() {
			if _, err := f.db.Pool(f.t, postgres.RoleOwner).Exec(context.Background(), `DROP ROLE `+name); err != nil {
				f.t.Error(err)
			}
		})
	}
	path := filepath.Join(f.dir, "logins")
	if err := os.WriteFile(path, []byte(file.String()), 0o600); err != nil {
		f.t.Fatal(err)
	}
	for range 2 { // a second time it changes nothing
		f.run([]string{"DATABASE_URL=" + f.db.URL}, "migrate", "--logins", path)
	}
}

// setPasswords gives the NATS server the users' passwords, wrong ones with a prefix.
func (f *fleet) setPasswords(wrong string) {
	for _, name := range []string{"relay", "api", "consumer", "operator", "plain", "mailer", "service"} {
		f.t.Setenv("NATS_PASSWORD_"+strings.ToUpper(name), wrong+secret+name)
	}
}

func (f *fleet) natsURL(user string) string {
	return strings.Replace(f.b.URL, "nats://", "nats://"+user+":"+secret+user+"@", 1)
}

// connect is a connection as a program of somebody else makes it. Violations go to denied, where there is one.
func (f *fleet) connect(user string, denied chan<- error) *nats.Conn {
	f.t.Helper()
	nc, err := nats.Connect(f.natsURL(user), nats.CustomInboxPrefix("_INBOX_"+user), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(), nats.ReconnectWait(50*time.Millisecond),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if denied != nil && errors.Is(err, nats.ErrPermissionViolation) {
				denied <- err
			}
		}))
	if err != nil {
		f.t.Fatalf("connect as %s: %v", user, err)
	}
	f.t.Cleanup(nc.Close)
	return nc
}

// env is a binary's environment: its own login, its own user.
func (f *fleet) env(who string) []string {
	user := natsUser[who]
	env := []string{"DATABASE_URL=" + f.logins[who], "NATS_URL=" + f.natsURL(user), "NATS_INBOX_PREFIX=_INBOX_" + user, "LEASE_TTL=2s", "VERIFY_INTERVAL=1s", "LAG_INTERVAL=200ms"}
	if user == "consumer" && who != "archiver" {
		env = append(env, "PROJECTIONS_DATABASE_URL="+f.logins[who], "DATABASE_URL="+f.logins["verify"])
	}
	return env
}

func (f *fleet) port() string {
	port, err := pglocal.FreePort()
	if err != nil {
		f.t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// start runs a binary, and returns once it is ready.
func (f *fleet) start(who string) {
	f.t.Helper()
	p := f.launch(who)
	f.procs[who] = p
	if who == "api" {
		f.api = p.api
	}
	f.ready(who, p)
}

// launch runs a binary until the test ends.
func (f *fleet) launch(who string) *process {
	f.t.Helper()
	p := &process{cmd: exec.Command(filepath.Join(f.dir, who)), ops: f.port()}
	p.cmd.Env = append(os.Environ(), append(f.env(who), "OPS_ADDR="+p.ops)...)
	if who == "api" {
		p.api = f.port()
		p.cmd.Env = append(p.cmd.Env, "API_ADDR="+p.api, "API_CURSOR_KEY="+strings.Repeat("ab", 32))
	}
	p.cmd.Stderr = &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended
		_ = p.cmd.Wait()
		if f.t.Failed() {
			f.t.Logf("%s: %s", who, p.log.String())
		}
	})
	return p
}

// ready waits until a process says that it is ready.
func (f *fleet) ready(who string, p *process) {
	f.t.Helper()
	testkit.Eventually(f.t, 60*time.Second, who+" to be ready", func() (bool, error) { return f.isReady(p) })
}

// isReady is what /readyz of a process says: an error has its text.
func (f *fleet) isReady(p *process) (bool, error) {
	resp, err := f.client.Get("http://" + p.ops + "/readyz")
	if err != nil {
		return false, err
	}
	body, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s", body)
	}
	return err == nil, err
}

// tidings runs a command as the operator, and returns what it prints.
func (f *fleet) tidings(args ...string) string {
	f.t.Helper()
	if f.b == nil {
		return f.run(nil, args...)
	}
	return f.run(f.env("operator"), args...)
}

func (f *fleet) run(env []string, args ...string) string {
	f.t.Helper()
	out, code := f.try(env, args...)
	if code != 0 {
		f.t.Fatalf("tidings %s: exit code %d\n%s", strings.Join(args, " "), code, out)
	}
	return out
}

// try runs a command that may fail for other reasons than its rights.
func (f *fleet) try(env []string, args ...string) (out string, code int) {
	f.t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(filepath.Join(f.dir, "tidings"), args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), &stdout, &stderr
	err := cmd.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		f.t.Fatal(err)
	}
	f.permitted("tidings "+strings.Join(args, " "), stderr.String())
	if err != nil {
		stdout.Write(stderr.Bytes())
	}
	return stdout.String(), cmd.ProcessState.ExitCode()
}

// permitted fails the test when a log says that something was refused.
func (f *fleet) permitted(who, log string) {
	f.t.Helper()
	for line := range strings.Lines(log) {
		if lower := strings.ToLower(line); strings.Contains(lower, "permission") || strings.Contains(lower, "42501") {
			f.t.Errorf("%s: %s", who, line)
		}
	}
}

// request calls the API as a tenant, and returns the status.
func (f *fleet) request(token, method, path, body string, into any) int {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, "http://"+f.api+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Idempotency-Key", "first")
	}
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	if into != nil {
		if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
			f.t.Fatal(err)
		}
	}
	return resp.StatusCode
}

// refusedBy runs a statement as a login, and wants it refused.
func (f *fleet) refusedBy(login, sql string) {
	f.t.Helper()
	conn, err := pgx.Connect(f.t.Context(), f.logins[login])
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(f.t.Context())) }() // only read from
	const insufficientPrivilege = "42501"
	_, err = conn.Exec(f.t.Context(), sql)
	if pg, ok := errors.AsType[*pgconn.PgError](err); !ok || pg.Code != insufficientPrivilege {
		f.t.Errorf("the login of %s may: %s (%v)", login, sql, err)
	}
}
