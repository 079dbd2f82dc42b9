package cli

import (
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
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

// host is a place where parts run: one process of serve, or a process per part.
type host struct {
	start     func() []*testkit.Process
	processes []*testkit.Process
	api       string
	ops       []string
}

// serversOf returns the environment of processes on a private database and broker.
func serversOf(db *testkit.DB, nats *testkit.Broker) []string {
	cfg := nats.Config()
	env := []string{"DATABASE_URL=" + db.URL, "PROJECTIONS_DATABASE_URL=" + db.URL, "NATS_URL=" + nats.URL, "NATS_STREAM=" + cfg.Stream,
		"NATS_SUBJECT_PREFIX=" + cfg.Prefix, "NATS_LIVE_PREFIX=" + cfg.LivePrefix, "API_CURSOR_KEY=" + strings.Repeat("ab", 32),
		"LEASE_TTL=3s", "HEARTBEAT_INTERVAL=0", "API_RATE_WRITE=off", "API_RATE_AUTHOR=off"}
	return append(os.Environ(), env...)
}

// newServe returns the host of a serve with the parts.
func newServe(t *testing.T, env []string, parts ...string) *host {
	t.Helper()
	h := &host{api: testkit.FreeAddr(t), ops: []string{testkit.FreeAddr(t)}}
	h.start = func() []*testkit.Process {
		cmd := exec.Command(os.Args[0], append([]string{"serve"}, parts...)...)
		cmd.Env = append(env, childVariable+"=spawned", "API_ADDR="+h.api, "OPS_ADDR="+h.ops[0])
		return []*testkit.Process{testkit.Spawn(t, "serve", cmd)}
	}
	h.processes = h.start()
	return h
}

// get returns the status and the body of an answer; the status is 0 without an answer.
func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: startWithin}
	resp, err := client.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(b)
}

// ready waits until each process of the host is ready.
func (h *host) ready(t *testing.T) {
	t.Helper()
	for _, ops := range h.ops {
		last := ""
		testkit.Eventually(t, "the parts on "+ops+" to be ready", func() (bool, error) {
			status, body := get(t, "http://"+ops+"/readyz")
			last = body
			if status != http.StatusOK {
				return false, fmt.Errorf("%s", last)
			}
			return true, nil
		})
	}
}

// ask sends a request of the token to the host's API.
func (h *host) ask(t *testing.T, method, path, token string, answer any) (status int, err error) {
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+h.api+path, nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if answer != nil {
		err = json.NewDecoder(resp.Body).Decode(answer)
	}
	return resp.StatusCode, err
}

// TestServeRunsAllPartsWithoutOwningTheDatabase starts serve before the tables exist, with a login
// that may act as the roles of the parts and owns nothing.
func TestServeRunsAllPartsWithoutOwningTheDatabase(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts servers")
	}
	db, nats := testkit.EmptyPostgres(t), testkit.NATS(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	login := pgx.Identifier{fmt.Sprintf("serve_%d", os.Getpid())}.Sanitize()
	if _, err := conn.Exec(t.Context(), `CREATE ROLE `+login+` LOGIN PASSWORD 'serve'
		IN ROLE tidings_api, tidings_relay, tidings_consumer, tidings_reader, tidings_system`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, err := conn.Exec(ctx, `DROP ROLE `+login)
		if err := errors.Join(err, conn.Close(ctx)); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(strings.Trim(login, `"`), "serve")
	h := newServe(t, serversOf(&testkit.DB{URL: u.String()}, nats))

	testkit.Eventually(t, "each part to say that it waits for the schema", func() (bool, error) {
		_, body := get(t, "http://"+h.ops[0]+"/readyz")
		for _, want := range []string{`"api: truth schema"`, `"relay: schema"`, `"followercounts: schema"`, `"threadcache: schema"`,
			`"archiver: schema"`, `"jobs: truth schema"`, "run `tidings migrate`"} {
			if !strings.Contains(body, want) {
				return false, fmt.Errorf("%s lacks %s", body, want)
			}
		}
		return true, nil
	})
	if code, _, stderr := run(t, map[string]string{"DATABASE_URL": db.URL}, "", "migrate"); code != exitOK {
		t.Fatalf("migrate: exit code %d\n%s", code, stderr)
	}
	token, err := tokens.Create(t.Context(), db.Pool(t, postgres.RoleSystem), 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	h.ready(t)
	if status, err := h.ask(t, "PUT", "/v1/follows/1/2", token, nil); err != nil || status != http.StatusCreated {
		t.Fatalf("follow: %d, %v", status, err)
	}
	testkit.Eventually(t, "the count", func() (bool, error) {
		var got struct{ Followers json.Number }
		status, err := h.ask(t, "GET", "/v1/users/2/counts", token, &got)
		return status == http.StatusOK && got.Followers == "1", err
	})
	file := filepath.Join(t.TempDir(), "order.yaml")
	if err := os.WriteFile(file, []byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n"+
		"events: {paid: {versions: {1: {type: object}}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	vars := map[string]string{"DATABASE_URL": db.URL}
	if code, _, stderr := run(t, vars, "", "upstream", "add", "order", "--file", file); code != exitOK {
		t.Fatal(stderr)
	}
	for path, want := range map[string]string{"/v1/schemas/com.example.order.paid.v1": `"urn:tidings:order:paid:v1"`,
		"/v1/asyncapi.json": `"events.{partition}.t{tenant}.order.paid"`} {
		testkit.Eventually(t, path+" to know the upstream", func() (bool, error) {
			status, body := get(t, "http://"+h.api+path)
			if status != http.StatusOK || !strings.Contains(body, want) {
				return false, fmt.Errorf("%d, %.200s", status, body)
			}
			return true, nil
		})
	}
	_, metrics := get(t, "http://"+h.ops[0]+"/metrics")
	for _, want := range []string{`tidings_build_info\{binary="serve"`, `tidings_relay_\w+\{[^}]*part="relay"`,
		`tidings_consumer_\w+\{[^}]*part="threadcache"`, `part="jobs"`, `part="api"`} {
		if !regexp.MustCompile(want).MatchString(metrics) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	h.processes[0].Signal(syscall.SIGTERM)
	if code := h.processes[0].AwaitEnd(); code != exitOK {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	for _, line := range []string{"starting", `"component":"lease"`, `"part":"archiver"`, "stopping; a second signal kills"} {
		if !strings.Contains(h.processes[0].Log(), line) {
			t.Errorf("the log lacks %s", line)
		}
	}
}

// TestServeOfSomePartsNeedsOnlyTheirs expects each missing variable once, and none of parts that do
// not run.
func TestServeOfSomePartsNeedsOnlyTheirs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"all":             {nil, []string{"API_CURSOR_KEY", "DATABASE_URL is not set"}},
		"the relay":       {[]string{"relay"}, []string{"DATABASE_URL is not set"}},
		"an unknown part": {[]string{"relay", "webhooks"}, []string{`"webhooks" is no part`, "DATABASE_URL is not set"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := run(t, nil, "", append([]string{"serve"}, c.args...)...)
			for _, want := range c.want {
				if code != exitInput || strings.Count(stderr, want) != 1 {
					t.Errorf("exit code %d\n%s\nwant %s once", code, stderr, want)
				}
			}
			if name == "the relay" && strings.Contains(stderr, "API_CURSOR_KEY") {
				t.Errorf("the relay wants the API's key:\n%s", stderr)
			}
		})
	}
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	h := newServe(t, append(serversOf(db, nats), "PROJECTIONS_DATABASE_URL=postgres://nobody@127.0.0.1:1/none"), "relay")
	h.ready(t)
	h.processes[0].Signal(syscall.SIGTERM)
	if code := h.processes[0].AwaitEnd(); code != exitOK {
		t.Errorf("exit code %d after SIGTERM", code)
	}
}

// TestServeAnswersRequestsWithoutNATS starts serve while NATS is away. The process is not ready,
// and says so for the relay, but its API is, and accepts writes.
func TestServeAnswersRequestsWithoutNATS(t *testing.T) {
	t.Parallel()
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	token, err := tokens.Create(t.Context(), db.Pool(t, postgres.RoleSystem), 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	gated, open := testkit.Gate(t, nats.URL)
	h := newServe(t, append(serversOf(db, nats), "NATS_URL="+gated))
	ready := func(query string, want int, because string) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("/readyz%s to answer %d", query, want), func() (bool, error) {
			status, body := get(t, "http://"+h.ops[0]+"/readyz"+query)
			if status != want || !strings.Contains(body, because) {
				return false, errors.New(body)
			}
			return true, nil
		})
	}
	ready("?part=api", http.StatusOK, "")
	ready("", http.StatusServiceUnavailable, `"relay: relay"`)
	ready("?part=relay", http.StatusServiceUnavailable, `"relay: relay"`)
	if status, err := h.ask(t, "PUT", "/v1/follows/1/2", token, nil); err != nil || status != http.StatusCreated {
		t.Errorf("follow: %d, %v", status, err)
	}
	open()
	ready("", http.StatusOK, "")
	ready("?part=relay", http.StatusOK, "")
}

// heldSQL reports whether the process with the id $1 has a lease, and whether others relay.
const heldSQL = `
SELECT coalesce(bool_or(owner LIKE '%-' || $1 || '-%'), false),
       coalesce(bool_or(kind = 'relay' AND owner NOT LIKE '%-' || $1 || '-%'), false)
  FROM leases WHERE expires_at > clock_timestamp()`

// TestServeEndsIfAPartCannotStart gives the API of a second process the port of the first. The
// second one says so, ends, and keeps no lease, and the first one works.
func TestServeEndsIfAPartCannotStart(t *testing.T) {
	t.Parallel()
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	system, env := db.Pool(t, postgres.RoleSystem), serversOf(db, nats)
	h := newServe(t, env)
	h.ready(t)
	cmd := exec.Command(os.Args[0], "serve")
	cmd.Env = append(env, childVariable+"=spawned", "API_ADDR="+h.api, "OPS_ADDR="+testkit.FreeAddr(t),
		"LEASE_TTL=1m") // half of it is the time to free the leases
	second := testkit.Spawn(t, "second serve", cmd)
	if code := second.AwaitEnd(); code != exitError {
		t.Errorf("exit code %d", code)
	}
	for _, want := range []string{`"err":"api: `, "address already in use", `"runbook":"ProcessEnded"`} {
		if !strings.Contains(second.Log(), want) {
			t.Errorf("the log lacks %s:\n%s", want, second.Log())
		}
	}
	testkit.Eventually(t, "the first process to relay", func() (bool, error) {
		var mine, others bool
		err := system.QueryRow(t.Context(), heldSQL, fmt.Sprint(second.PID())).Scan(&mine, &others)
		if mine {
			t.Fatal("the process that has ended has a lease")
		}
		return others, err
	})
	h.ready(t)
}
