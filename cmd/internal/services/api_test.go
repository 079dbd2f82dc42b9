package services

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

func TestRunAnswersUntilItIsStopped(t *testing.T) {
	testkit.DefaultLogger(t)
	db := testkit.Postgres(t)
	token, err := tokens.Create(t.Context(), db.Pool(t, postgres.RoleSystem), 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	addr, opsAddr, cert := testkit.FreeAddr(t), testkit.FreeAddr(t), testkit.NewCertificate(t)
	credentials := filepath.Join(t.TempDir(), "api.creds")
	keys, who := broker.Keys{}, broker.Principal{Role: broker.API}
	if _, err := keys.Add([]broker.Principal{who}); err != nil {
		t.Fatal(err)
	}
	creds, err := keys.Credentials(broker.Config{}, who, time.Hour)
	if err == nil {
		err = os.WriteFile(credentials, creds, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- runAPI(ctx, envconfig.MapLookuper(map[string]string{
			"DATABASE_URL": db.URL, "API_ADDR": addr, "OPS_ADDR": opsAddr, "API_CURSOR_KEY": strings.Repeat("ab", 32),
			"API_RATE_WRITE": "1/1h", "API_TLS_CERT": cert.CertFile, "API_TLS_KEY": cert.KeyFile,
			"NATS_CREDENTIALS": credentials,
		}))
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: cert.Pool(t)}}}
	status := func(method, url string) int {
		req, err := http.NewRequestWithContext(ctx, method, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := client.Do(req)
		if err != nil {
			return 0 // not listening yet
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	testkit.Eventually(t, "the API to be ready", func() (bool, error) {
		return status("GET", "http://"+opsAddr+"/readyz") == 200 && status("GET", "https://"+addr+"/v1/openapi.json") == 200, nil
	})
	if got := status("PUT", "https://"+addr+"/v1/follows/1/2"); got != 201 {
		t.Errorf("PUT: %d, want 201", got)
	}
	if got := status("PUT", "https://"+addr+"/v1/follows/1/3"); got != 429 {
		t.Errorf("PUT beyond API_RATE_WRITE: %d, want 429", got)
	}
	if got := status("GET", "https://"+addr+"/v1/users/2/counts"); got != 200 {
		t.Errorf("counts: %d, want 200: PROJECTIONS_DATABASE_URL is DATABASE_URL by default", got)
	}
	metrics, err := client.Get("http://" + opsAddr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(metrics.Body)
	metrics.Body.Close()
	if err != nil || !strings.Contains(string(body), `tidings_tls_certificate_expires_timestamp_seconds{use="api"} `) ||
		strings.Contains(string(body), `use="nats"`) {
		t.Errorf("the metrics lack the expiry of the served certificate, or have one of an absent certificate: %v", err)
	}
	if !strings.Contains(string(body), "\ntidings_nats_credentials_expires_timestamp_seconds ") {
		t.Error("the metrics lack the expiry of the credentials")
	}
	pool := db.Pool(t, postgres.RoleReader)
	testkit.Eventually(t, "a sample of the API's requests", func() (sampled bool, err error) {
		return sampled, pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM samples WHERE source LIKE 'api-%' AND version <> ''
			AND figures ? 'requests')`).Scan(&sampled)
	})
	stop()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("stopped with %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("still running 30 s after the stop")
	}
}

func TestTheAPIWaitsForTheDatabaseAndItsSchemas(t *testing.T) {
	testkit.DefaultLogger(t)
	db := testkit.Postgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	// the state before the first migration
	if _, err := owner.Exec(t.Context(), `ALTER TABLE tidings_projections_migrations RENAME TO held`); err != nil {
		t.Fatal(err)
	}
	url, open := testkit.Gate(t, db.URL)
	addr, opsAddr := testkit.FreeAddr(t), testkit.FreeAddr(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- runAPI(ctx, envconfig.MapLookuper(map[string]string{"DATABASE_URL": url, "API_ADDR": addr, "OPS_ADDR": opsAddr,
			"API_CURSOR_KEY": strings.Repeat("ab", 32)}))
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answers := func(url string, want int, because string) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("%s to answer %d", url, want), func() (bool, error) {
			select {
			case err := <-done:
				t.Fatalf("it ended: %v", err)
			default:
			}
			resp, err := client.Get(url)
			if err != nil {
				return false, err
			}
			body, err := io.ReadAll(resp.Body)
			return resp.StatusCode == want && strings.Contains(string(body), because), errors.Join(err, resp.Body.Close())
		})
	}
	answers("http://"+opsAddr+"/readyz", http.StatusServiceUnavailable, "")
	open()
	answers("http://"+opsAddr+"/readyz", http.StatusServiceUnavailable, "run `tidings migrate`")
	if _, err := owner.Exec(t.Context(), `ALTER TABLE held RENAME TO tidings_projections_migrations`); err != nil {
		t.Fatal(err)
	}
	answers("http://"+opsAddr+"/readyz", http.StatusOK, "")
	answers("http://"+addr+"/v1/openapi.json", http.StatusOK, "")
	stop()
	if err := <-done; err != nil {
		t.Errorf("stopped with %v", err)
	}
}

// TestAnAnswerThatWasLostIsGivenByTheNextProcess cuts the client off after its request. The client
// sends the request again, to another process.
func TestAnAnswerThatWasLostIsGivenByTheNextProcess(t *testing.T) {
	testkit.DefaultLogger(t)
	db := testkit.Postgres(t)
	system := db.Pool(t, postgres.RoleSystem)
	token, err := tokens.Create(t.Context(), system, 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	start := func() (addr string, stop func()) {
		addr, opsAddr := testkit.FreeAddr(t), testkit.FreeAddr(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- runAPI(ctx, envconfig.MapLookuper(map[string]string{"DATABASE_URL": db.URL, "API_ADDR": addr, "OPS_ADDR": opsAddr,
				"API_CURSOR_KEY": strings.Repeat("ab", 32)}))
		}()
		testkit.Eventually(t, "the API to listen", func() (bool, error) {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				return false, nil
			}
			return true, conn.Close()
		})
		return addr, func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("stopped with %v", err)
			}
		}
	}
	post := func(addr string) (conn net.Conn) {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		const body = `{"author_id":"3","body":"once"}`
		if _, err := fmt.Fprintf(conn, "POST /v1/posts/5/comments HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "+
			"%s\r\nContent-Type: application/json\r\nIdempotency-Key: k\r\nContent-Length: %d\r\n\r\n%s",
			token, len(body), body); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	written := func() (comments, events []string) {
		if err := system.QueryRow(t.Context(), `SELECT ARRAY(SELECT comment_id::text FROM comments), ARRAY(SELECT payload->>'comment_id'
			FROM outbox_messages)`).Scan(&comments, &events); err != nil {
			t.Fatal(err)
		}
		return comments, events
	}

	addr, stop := start()
	lost := post(addr)
	testkit.Eventually(t, "the comment to be written", func() (bool, error) {
		comments, _ := written()
		return len(comments) > 0, nil
	})
	if err := lost.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	lost.Close() // without reading the answer
	stop()
	first, _ := written()

	addr, stop = start()
	defer stop()
	for range 2 {
		conn := post(addr)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		conn.Close()
		if err != nil || resp.StatusCode != 201 || resp.Header.Get("Idempotency-Replayed") != "true" || resp.Header.Get("ETag") != `"1"` ||
			resp.Header.Get("Tidings-Token") == "" || !strings.Contains(string(body), first[0]) ||
			!strings.Contains(string(body), `"body":"once"`) {
			t.Errorf("%d %v %s, %v: want the comment %s again", resp.StatusCode, resp.Header, body, err, first[0])
		}
	}
	if comments, events := written(); !slices.Equal(comments, first) || !slices.Equal(events, first) || len(first) != 1 {
		t.Errorf("comments %v, events %v: want one of each, %v", comments, events, first)
	}
}

func TestRunRefusesAConfigurationThatCannotWork(t *testing.T) {
	testkit.DefaultLogger(t)
	for says, env := range map[string]map[string]string{
		"DATABASE_URL":   {"API_CURSOR_KEY": strings.Repeat("ab", 32)},
		"API_CURSOR_KEY": {"DATABASE_URL": "postgres://127.0.0.1:1/x"},
		`rate "fast"`:    {"DATABASE_URL": "postgres://127.0.0.1:1/x", "API_CURSOR_KEY": strings.Repeat("ab", 32), "API_RATE_READ": "fast"},
	} {
		if err := runAPI(t.Context(), envconfig.MapLookuper(env)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want an error with %s", err, says)
		}
	}
}

// TestTheConsoleHasAPortOfItsOwn: a route to the API leads to no page of the console, and a route
// to the console to no route of the API.
func TestTheConsoleHasAPortOfItsOwn(t *testing.T) {
	testkit.DefaultLogger(t)
	db := testkit.Postgres(t)
	api, desk, ops := testkit.FreeAddr(t), testkit.FreeAddr(t), testkit.FreeAddr(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- runAPI(ctx, envconfig.MapLookuper(map[string]string{"DATABASE_URL": db.URL, "NATS_URL": testkit.NATS(t).URL,
			"API_ADDR": api, "CONSOLE_ADDR": desk, "OPS_ADDR": ops, "CONSOLE": "true", "API_CURSOR_KEY": strings.Repeat("ab", 32)}))
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	status := func(url string) int {
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+url, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			return 0 // not listening yet
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	testkit.Eventually(t, "the process to be ready", func() (bool, error) { return status(ops+"/readyz") == 200, nil })
	for url, want := range map[string]int{api + "/v1/openapi.json": 200, api + "/console/": 404, api + "/console/sign-in": 404,
		desk + "/console/": 200, desk + "/console/sign-in": 200, desk + "/v1/openapi.json": 404, desk + "/v1/users/2/counts": 404} {
		if got := status(url); got != want {
			t.Errorf("%s (API at %s, console at %s): status %d, want %d", url, api, desk, got, want)
		}
	}
	stop()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("stopped with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("still running a minute after the stop")
	}
}

// TestOneLoginServesTheConsoleOfOneDatabase shows that an installation with one database needs only
// CONSOLE_DATABASE_URL.
func TestOneLoginServesTheConsoleOfOneDatabase(t *testing.T) {
	for _, c := range []struct {
		cfg                apiConfig
		truth, projections string
	}{
		{apiConfig{DatabaseURL: "api", ProjectionsDatabaseURL: "api"}, "api", "api"},
		{apiConfig{DatabaseURL: "api", ProjectionsDatabaseURL: "api", ConsoleDatabaseURL: "operator"}, "operator", "operator"},
		{apiConfig{DatabaseURL: "api", ProjectionsDatabaseURL: "reads", ConsoleDatabaseURL: "operator"}, "operator", "reads"},
		{apiConfig{DatabaseURL: "api", ProjectionsDatabaseURL: "api", ConsoleDatabaseURL: "operator",
			ConsoleProjectionsDatabaseURL: "other"}, "operator", "other"},
	} {
		if truth, projections := consoleDatabases(c.cfg); truth != c.truth || projections != c.projections {
			t.Errorf("%+v: %s and %s, want %s and %s", c.cfg, truth, projections, c.truth, c.projections)
		}
	}
}
