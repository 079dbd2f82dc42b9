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
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// race is true if the tests run with the race detector. The binaries then have it too: their
// packages are already compiled that way.
var race bool

// fleet runs every service as a process, each with its own PostgreSQL login and NATS user.
type fleet struct {
	t      *testing.T
	dir    string
	db     *testkit.DB
	b      *testkit.Broker
	users  string // the users in the configuration of the NATS server
	logins map[string]string
	procs  map[string]*process
	api    string
	client *http.Client
}

// process is a running binary.
type process struct {
	*testkit.Process
	ops string // the address of /healthz, /readyz and /metrics
	api string // the address of the API, if it is one
}

const secret = "secret-of-" // a password is this and the name

var binaries = []string{"relay", "api", "followercounts", "threadcache", "archiver"}

// natsUser has the NATS user of each binary.
var natsUser = map[string]string{"relay": "relay", "api": "api", "followercounts": "consumer", "threadcache": "consumer",
	"archiver": "consumer", "operator": "operator"}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := emptyFleet(t, testkit.Postgres(t))
	f.dir = t.TempDir()
	build(t, "..", f.dir, "./cmd/tidings")
	for _, name := range binaries { // links, as in the image
		if err := os.Symlink("tidings", filepath.Join(f.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	f.makeLogins()
	f.users = f.tidings("nats", "users", "--subscriber", "name=plain,tenant=7", "--subscriber",
		"name=mailer,tenant=7,durable,filter=follow.created", "--subscriber", "name=svc,durable,filter=follow.*")
	committed, err := os.ReadFile("nats-users.conf")
	if err != nil {
		t.Fatal(err)
	}
	if f.tidings("nats", "users") != string(committed) {
		t.Error("nats-users.conf differs from the output of `tidings nats users`: write that output to the file")
	}
	f.setPasswords("")
	f.b = testkit.NATSWith(t, f.users)
	return f
}

func emptyFleet(t *testing.T, db *testkit.DB) *fleet {
	return &fleet{t: t, db: db, logins: map[string]string{}, procs: map[string]*process{},
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
}

// build builds packages of the module at root into dir. packages may begin with flags of go build.
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

// makeLogins lets `tidings migrate` create a login for each binary. All databases of a server share
// its logins, so their names have a suffix of this test.
func (f *fleet) makeLogins() {
	f.t.Helper()
	var file strings.Builder
	suffix := fmt.Sprint(time.Now().UnixNano())
	for who, role := range map[string]string{"relay": "relay", "api": "api", "followercounts": "consumer", "threadcache": "consumer",
		"archiver": "system", "operator": "system", "verify": "reader", "writer": "writer"} {
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
	for range 2 { // the second run changes nothing
		f.run([]string{"DATABASE_URL=" + f.db.URL}, "migrate", "--logins", path)
	}
}

// setPasswords gives the NATS server the users' passwords. A prefix makes them differ from those
// that the clients have.
func (f *fleet) setPasswords(prefix string) {
	for _, name := range []string{"relay", "api", "consumer", "operator", "serve", "t7_plain", "t7_mailer", "svc"} {
		f.t.Setenv("NATS_PASSWORD_"+strings.ToUpper(name), prefix+secret+name)
	}
}

func (f *fleet) natsURL(user string) string {
	return strings.Replace(f.b.URL, "nats://", "nats://"+user+":"+secret+user+"@", 1)
}

// connect connects to NATS as a subscriber's program does. Permission violations go to denied,
// unless it is nil.
func (f *fleet) connect(user string, denied chan<- error) *nats.Conn {
	f.t.Helper()
	nc, err := nats.Connect(f.natsURL(user), nats.CustomInboxPrefix("_INBOX_"+user), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.ReconnectWait(50*time.Millisecond), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
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

// env returns the environment of a binary, with its own login and NATS user.
func (f *fleet) env(who string) []string {
	user := natsUser[who]
	env := []string{"DATABASE_URL=" + f.logins[who], "NATS_URL=" + f.natsURL(user), "NATS_INBOX_PREFIX=_INBOX_" + user, "LEASE_TTL=2s",
		"VERIFY_INTERVAL=1s", "LAG_INTERVAL=200ms"}
	if user == "consumer" && who != "archiver" {
		env = append(env, "PROJECTIONS_DATABASE_URL="+f.logins[who], "DATABASE_URL="+f.logins["verify"])
	}
	return env
}

// start runs a binary and waits until it is ready.
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
	cmd, p := exec.Command(filepath.Join(f.dir, who)), &process{ops: testkit.FreeAddr(f.t)}
	cmd.Env = append(os.Environ(), append(f.env(who), "OPS_ADDR="+p.ops)...)
	if who == "api" {
		p.api = testkit.FreeAddr(f.t)
		cmd.Env = append(cmd.Env, "API_ADDR="+p.api, "API_CURSOR_KEY="+strings.Repeat("ab", 32))
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.Process = testkit.Spawn(f.t, who, cmd)
	return p
}

// ready waits until /readyz of a process answers 200.
func (f *fleet) ready(who string, p *process) {
	f.t.Helper()
	testkit.Eventually(f.t, who+" to be ready", func() (bool, error) { return f.isReady(p) })
}

// isReady reports whether /readyz of a process answers 200. The error has the text of any other
// answer.
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

// tidings runs a command as the operator and returns its output.
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

// try runs a command that may fail, but not for lack of rights.
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

// permitted fails the test if a log reports that a server refused something for lack of rights.
func (f *fleet) permitted(who, log string) {
	f.t.Helper()
	for line := range strings.Lines(log) {
		if lower := strings.ToLower(line); strings.Contains(lower, "permission") || strings.Contains(lower, "42501") {
			f.t.Errorf("%s: %s", who, line)
		}
	}
}

// request calls the API with a tenant's token and returns the status.
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

// refusedBy runs a statement with a login, and fails the test unless PostgreSQL refuses it for lack
// of rights.
func (f *fleet) refusedBy(login, sql string) {
	f.t.Helper()
	conn, err := pgx.Connect(f.t.Context(), f.logins[login])
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(f.t.Context())) }() // it has no transaction to lose
	const insufficientPrivilege = "42501"
	_, err = conn.Exec(f.t.Context(), sql)
	if pg, ok := errors.AsType[*pgconn.PgError](err); !ok || pg.Code != insufficientPrivilege {
		f.t.Errorf("PostgreSQL does not refuse this to the login of %s: %s (%v)", login, sql, err)
	}
}
