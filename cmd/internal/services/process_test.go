package services

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

// An API under fault is a child process: the test binary again, with childEnv and the API's
// environment.
const childEnv = "TIDINGS_TEST_API"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
		return
	}
	testkit.Main(m)
}

func child() {
	testkit.EndWithTest(nil)
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runAPI(ctx, envconfig.OsLookuper()); err != nil {
		panic(err)
	}
}

// process is an API in a process of its own.
type process struct {
	*testkit.Process
	addr string
}

// startProcess starts an API on addr, and returns when it is ready.
func startProcess(t *testing.T, addr, databaseURL string) *process {
	t.Helper()
	cmd, ops := exec.Command(os.Args[0]), testkit.FreeAddr(t)
	cmd.Env = append(os.Environ(), childEnv+"=1", "DATABASE_URL="+databaseURL, "API_ADDR="+addr, "OPS_ADDR="+ops,
		"API_CURSOR_KEY="+strings.Repeat("ab", 32), "API_RATE_WRITE=100000/1s")
	p := &process{testkit.Spawn(t, "API", cmd), addr}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	testkit.Eventually(t, "the API to be ready", func() (bool, error) {
		resp, err := client.Get("http://" + ops + "/readyz")
		if err != nil {
			return false, err
		}
		return resp.StatusCode == http.StatusOK, resp.Body.Close()
	})
	return p
}

// answer is what a caller gets. Its status is 0 if the connection ended without an answer.
type answer struct {
	status        int
	replayed, tag string
	retryAfter    string
	body          map[string]any
}

func (a answer) text(member string) string { return fmt.Sprint(a.body[member]) }

// caller sends requests on connections of their own.
type caller struct {
	token  string
	client http.Client
}

func newCaller(t *testing.T, system *pgxpool.Pool) *caller {
	t.Helper()
	token, err := tokens.Create(t.Context(), system, 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return &caller{token, http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
}

// do sends a request with headers ("name: value").
func (c *caller) do(ctx context.Context, method, url, body string, headers ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	a := answer{status: resp.StatusCode, replayed: resp.Header.Get("Idempotency-Replayed"), tag: resp.Header.Get("ETag"),
		retryAfter: resp.Header.Get("Retry-After")}
	if len(b) > 0 {
		err = json.Unmarshal(b, &a.body)
	}
	return a, err
}

// commitGate is a proxy to PostgreSQL that can hold a COMMIT back.
type commitGate struct {
	server  string
	armed   atomic.Bool
	held    chan struct{} // gets a value for the COMMIT that is held
	forward chan bool     // decides about it: the server gets it, or the connection ends without it
	passing sync.WaitGroup
}

// newCommitGate returns a proxy to the server of a database, and the URL of the database through
// it. It ends with the test.
func newCommitGate(t *testing.T, databaseURL string) (g *commitGate, through string) {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g = &commitGate{server: u.Host, held: make(chan struct{}, 1), forward: make(chan bool, 1)}
	g.passing.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			g.passing.Go(func() { g.open(client) })
		}
	})
	t.Cleanup(func() { // the processes that have connections end before, because they start later
		_ = l.Close()
		close(g.forward)
		g.passing.Wait()
	})
	u.Host = l.Addr().String()
	return g, u.String()
}

func (g *commitGate) open(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", g.server)
	if err != nil {
		return
	}
	defer server.Close()
	g.passing.Go(func() {
		_, _ = io.Copy(client, server) // it ends with a connection
		_ = client.Close()
	})
	buf := make([]byte, 64<<10)
	appends := false // not a connection that reads tokens or kinds, in transactions of their own
	for {
		n, err := client.Read(buf)
		appends = appends || bytes.Contains(buf[:n], []byte("outbox.append"))
		if appends && bytes.Contains(buf[:n], []byte("commit\x00")) && g.armed.CompareAndSwap(true, false) {
			g.held <- struct{}{}
			if !<-g.forward {
				return
			}
		}
		if _, werr := server.Write(buf[:n]); err != nil || werr != nil {
			return
		}
	}
}

// awaitHeld waits until a COMMIT is held, and checks that its transaction has put an event into the
// outbox.
func (g *commitGate) awaitHeld(t *testing.T, system *pgxpool.Pool) {
	t.Helper()
	testkit.Eventually(t, "a COMMIT", func() (bool, error) { return len(g.held) == 1, nil })
	<-g.held
	if n := writing(t, system); n != 1 {
		t.Errorf("%d transactions have put events into the outbox, want 1", n)
	}
}

// writing returns the number of transactions that have put events into the outbox and not ended.
func writing(t *testing.T, system *pgxpool.Pool) (n int) {
	t.Helper()
	if err := system.QueryRow(t.Context(), `SELECT count(DISTINCT pid) FROM pg_locks WHERE locktype = 'relation'
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND relation::regclass::text ~ '^outbox_messages' AND mode = 'RowExclusiveLock'`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestAnAPIKilledAtItsCommit kills the process between the INSERT and the COMMIT. Nothing was
// written, and a retry with the same key writes the comment. If the COMMIT was under way, the
// comment was written, and the retry finds it.
func TestAnAPIKilledAtItsCommit(t *testing.T) {
	for name, arrives := range map[string]bool{"COMMIT was not sent": false, "COMMIT arrives": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.Postgres(t)
			system := db.Pool(t, postgres.RoleSystem)
			c := newCaller(t, system)
			gate, through := newCommitGate(t, db.URL)
			first := startProcess(t, testkit.FreeAddr(t), through)
			written := func() (comments, events int) {
				if err := system.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM comments), (SELECT count(*)
					FROM outbox_messages)`).Scan(&comments, &events); err != nil {
					t.Fatal(err)
				}
				return comments, events
			}
			post := func(addr string) (answer, error) {
				return c.do(t.Context(), "POST", addr+"/v1/posts/5/comments", `{"author_id":"3","body":"once"}`, "Idempotency-Key: k")
			}
			gate.armed.Store(true)
			lost := make(chan answer, 1)
			go func() {
				a, _ := post(first.addr) // its connection ends
				lost <- a
			}()
			gate.awaitHeld(t, system)
			first.Kill()
			if a := <-lost; a.status != 0 {
				t.Errorf("answered before the COMMIT: %+v", a)
			}
			gate.forward <- arrives
			testkit.Eventually(t, "the transaction to end", func() (bool, error) { return writing(t, system) == 0, nil })
			want := map[bool]int{true: 1}[arrives]
			if comments, events := written(); comments != want || events != want {
				t.Errorf("%d comments, %d events, want %d of each", comments, events, want)
			}
			second := startProcess(t, testkit.FreeAddr(t), db.URL)
			for _, replayed := range []string{map[bool]string{true: "true"}[arrives], "true"} {
				if a, err := post(second.addr); err != nil || a.status != http.StatusCreated || a.replayed != replayed ||
					a.text("body") != "once" {
					t.Errorf("a retry: %+v, %v; want it replayed: %q", a, err, replayed)
				}
			}
			if comments, events := written(); comments != 1 || events != 1 {
				t.Errorf("%d comments, %d events after the retries", comments, events)
			}
		})
	}
}
