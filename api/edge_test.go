package api_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// raw sends these bytes and reads one answer.
func raw(t *testing.T, addr, request string) *http.Response {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if _, err := conn.Write([]byte(request)); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%q: %v", request, err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func TestRequestsThatBreakOffAreTheClientsFault(t *testing.T) {
	t.Parallel()
	f := open(t)
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	before := f.rows(t)
	head := "POST /v1/posts/1/comments HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + f.token + "\r\nContent-Type: application/json\r\n"
	for name, rest := range map[string]string{
		"less than Content-Length": "Content-Length: 100\r\n\r\n{\"author_id\":",
		"a chunk that is none":     "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
		"chunks that end early":    "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"aut",
	} {
		resp := raw(t, srv.Listener.Addr().String(), head+rest)
		if resp.StatusCode != 400 || resp.Header.Get("Content-Type") != "application/problem+json" {
			t.Errorf("%s: %s %v", name, resp.Status, resp.Header)
		}
	}
	for name, header := range map[string]string{
		"two keys": "Idempotency-Key: a\r\nIdempotency-Key: b\r\n", "two actors": "Tidings-Actor: a\r\nTidings-Actor: b\r\n",
	} {
		resp := raw(t, srv.Listener.Addr().String(), head+header+"Content-Length: 30\r\n\r\n"+`{"author_id":"1","body":"abcd"}`[:30])
		if resp.StatusCode != 400 {
			t.Errorf("%s: %s", name, resp.Status)
		}
	}
	if after := f.rows(t); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("something was written: %v, before %v", after, before)
	}
}

func TestACauseIsLoggedAndNotSent(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}
	pool := db.Pool(t, postgres.RoleAPI)
	var log bytes.Buffer
	var err error
	f.Handler, err = api.New(config(), api.Deps{
		Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool, Fleet: fleet, Reg: f.reg,
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	f.want(t, 201, "POST", "/v1/posts/1/comments", `{"author_id":"1","body":"confidential"}`)
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `ALTER TABLE edges_follow RENAME TO lost`); err != nil {
		t.Fatal(err)
	}
	a := f.want(t, 500, "PUT", "/v1/follows/1/2", "", "X-Request-Id: r-500")
	if a.text("code") != "internal" || strings.Contains(a.body, "follows") || strings.Contains(a.body, "SQLSTATE") {
		t.Errorf("the answer: %s", a.body)
	}
	if got := log.String(); strings.Count(got, "level=ERROR") != 1 || !strings.Contains(got, "42P01") || !strings.Contains(got, "r-500") {
		t.Errorf("the log: %s", got)
	}
	if got := log.String(); strings.Contains(got, f.token) || strings.Contains(got, "confidential") {
		t.Errorf("a token or a body is in the log: %s", got)
	}
}

func TestTheAccessLogTellsWhoAskedWhatAndNoSecret(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleAPI)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}
	cfg := config()
	cfg.AccessLog = true
	var log bytes.Buffer
	var err error
	f.Handler, err = api.New(cfg, api.Deps{
		Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool, Fleet: fleet, Reg: f.reg,
		Log: slog.New(slog.NewJSONHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	made := f.want(t, 201, "POST", "/v1/posts/1/comments", `{"author_id":"1","body":"confidential"}`, "X-Request-Id: r-1",
		"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	f.want(t, 400, "GET", "/v1/posts/1/comments?cursor=secret", "")
	f.do(t, "GET", "/v1/nowhere/"+strings.Repeat("x", 5000), "")
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines: %s", len(lines), &log)
	}
	var got map[string]any
	if err := json.Unmarshal([]byte(lines[0]), &got); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]any{
		"level": "INFO", "msg": "request", "method": "POST", "route": "/v1/posts/{post_id}/comments",
		"path": "/v1/posts/1/comments", "status": 201.0,
		"bytes": float64(len(made.body)), "request_id": "r-1", "trace_id": "0af7651916cd43dd8448eb211c80319c",
		"tenant": float64(tenant), "token": "tester",
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	if len(lines[2]) > 1000 {
		t.Errorf("a line has %d bytes", len(lines[2]))
	}
	for _, secret := range []string{f.token, "confidential", "secret"} {
		if strings.Contains(log.String(), secret) {
			t.Errorf("%q is in the log: %s", secret, &log)
		}
	}
}

func TestConcurrentRequests(t *testing.T) {
	t.Parallel()
	f := open(t)
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	client := srv.Client()
	codes := make(chan int, 200)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for _, c := range []struct{ method, path, body string }{
				{"PUT", "/v1/follows/1/2", ""}, {"POST", "/v1/posts/1/comments", `{"author_id":"1","body":"same"}`},
				{"GET", "/v1/users/2/counts", ""},
			} {
				req, err := http.NewRequestWithContext(t.Context(), c.method, srv.URL+c.path, strings.NewReader(c.body))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Authorization", "Bearer "+f.token)
				req.Header.Set("Idempotency-Key", "one")
				req.Header.Set("Content-Type", "application/json")
				resp, err := client.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				codes <- resp.StatusCode
			}
		})
	}
	wg.Wait()
	close(codes)
	count := map[int]int{}
	for c := range codes {
		count[c]++
	}
	// One PUT changes the edge, and every POST gets the same comment.
	if count[201] != 21 || count[200] != 39 {
		t.Errorf("answers by status: %v, want 21 of 201 and 39 of 200", count)
	}
	var events int
	if err := f.system.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&events); err != nil || events != 2 {
		t.Errorf("%d events, %v: want 2", events, err)
	}
}
