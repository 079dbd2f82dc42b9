//go:build faults

package services

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

// TestAStopFinishesTheWritesThatItHasTaken stops the API while writes wait for a lock. The API
// first tells load balancers, then closes its port, and then answers these writes.
func TestAStopFinishesTheWritesThatItHasTaken(t *testing.T) {
	testkit.DefaultLogger(t)
	db := testkit.Postgres(t)
	system := db.Pool(t, postgres.RoleSystem)
	token, err := tokens.Create(t.Context(), system, 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	addr, opsAddr := testkit.FreeAddr(t), testkit.FreeAddr(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- runAPI(ctx, envconfig.MapLookuper(map[string]string{
			"DATABASE_URL": db.URL, "API_ADDR": addr, "OPS_ADDR": opsAddr,
			"API_CURSOR_KEY": strings.Repeat("ab", 32), "API_STOP_DELAY": "5s", "API_REQUEST_TIMEOUT": "25s",
		}))
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ask := func(method, url string) (status int, body string) {
		req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
		if err != nil {
			t.Error(err)
			return 0, ""
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := client.Do(req)
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
	readiness := func(want int, says string) {
		t.Helper()
		testkit.Eventually(t, "readiness "+says, func() (bool, error) {
			status, body := ask("GET", "http://"+opsAddr+"/readyz")
			return status == want && strings.Contains(body, says), nil
		})
	}
	readiness(200, "ok")

	const writes = 20
	lock, err := system.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback(t.Context()) // a no-op after the rollback below
	if _, err := lock.Exec(t.Context(), `INSERT INTO follows (tenant_id, follower_id, followee_id) SELECT 1, n, 1000
		FROM generate_series(1, $1) n`, writes); err != nil {
		t.Fatal(err)
	}
	var clients sync.WaitGroup
	for n := range writes {
		clients.Go(func() {
			if status, body := ask("PUT", fmt.Sprintf("http://%s/v1/follows/%d/1000", addr, 1+n)); status != 201 {
				t.Errorf("write %d: %d %s", n, status, body)
			}
		})
	}
	testkit.Eventually(t, "the writes to be under way", func() (bool, error) {
		_, body := ask("GET", "http://"+opsAddr+"/metrics")
		return strings.Contains(body, fmt.Sprintf("\ntidings_api_requests_in_progress %d\n", writes)), nil
	})
	stop()
	readiness(503, "stopping")
	if status, body := ask("PUT", "http://"+addr+"/v1/follows/1/2"); status != 201 {
		t.Errorf("a write within API_STOP_DELAY: %d %s", status, body)
	}
	testkit.Eventually(t, "the port to close", func() (bool, error) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return true, nil
		}
		return false, c.Close()
	})
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	clients.Wait()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("stopped with %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("still running")
	}
	var rows, events int
	if err := system.QueryRow(t.Context(),
		`SELECT (SELECT count(*) FROM follows), (SELECT count(*) FROM outbox_messages)`).Scan(&rows, &events); err != nil {
		t.Fatal(err)
	}
	if rows != writes+1 || events != writes+1 {
		t.Errorf("%d rows and %d events of %d writes", rows, events, writes+1)
	}
}
