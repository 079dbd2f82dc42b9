//go:build faults

package api_test

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

// Whatever one caller does, the API answers the requests of another tenant. `tidings bench
// neighbors` runs the same attacks at full size, with times.
func TestWhatOneCallerDoesRefusesNoOther(t *testing.T) {
	cfg := config()
	cfg.MaxWait = 250 * time.Millisecond // so that slow requests count within the seconds of a test
	cfg.RateUnknown = tokens.Rate{N: 100, Window: time.Second}
	f := openWith(t, cfg, testkit.Logger(t))
	f.want(t, 201, "PUT", "/v1/follows/1/42", "")
	// which no consumer applies: none runs
	session := "Tidings-Token: " + f.want(t, 201, "PUT", "/v1/follows/7/42", "").Header.Get("Tidings-Token")
	comment := f.want(t, 201, "POST", "/v1/posts/1/comments", `{"author_id":"1","body":"x"}`).text("comment_id")
	other := f
	other.token = f.newToken(t, tenant+1, "other", tokens.Roles()...)

	for name, c := range map[string]struct {
		clients int
		request func(client, n int) answer
		passed  int64 // the minimum number of its requests that are not refused
	}{
		"clients with random tokens": {450, func(int, int) answer {
			guess := f
			guess.token = tokens.New()
			return guess.do(t, "GET", "/v1/follows/1/42", "")
		}, 0},
		"readers with a token, of a consumer that is paused": {100, func(client, n int) answer {
			path := "/v1/users/42/followers" // half of them the same, and half each its own
			if client%2 == 0 {
				path += fmt.Sprint("?limit=", 1+client)
			}
			return f.do(t, "GET", path, "", session)
		}, 20},
		"writers of one comment": {200, func(client, n int) answer {
			return f.do(t, "PATCH", "/v1/comments/"+comment, fmt.Sprintf(`{"body":"%d %d"}`, client, n), "If-Match: *")
		}, 20},
	} {
		t.Run(name, func(t *testing.T) {
			if a := other.do(t, "PUT", "/v1/follows/1/42", ""); a.StatusCode/100 != 2 { // its token is known
				t.Fatalf("before: %d %s", a.StatusCode, a.body)
			}
			began := time.Now()
			var clients sync.WaitGroup
			var passed, good, refused atomic.Int64
			during := func() bool { // for two seconds, and longer on a machine that answers little in them, or stands still for a while
				few := good.Load() < max(40, 20*refused.Load()) || passed.Load() < c.passed
				took := time.Since(began)
				return took < 2*time.Second || few && took < 30*time.Second
			}
			for client := range c.clients {
				clients.Go(func() {
					for n := 0; during(); n++ {
						switch a := c.request(client, n); a.StatusCode {
						case http.StatusOK:
							passed.Add(1)
						case http.StatusUnauthorized, http.StatusTooManyRequests, http.StatusServiceUnavailable:
						default:
							t.Errorf("%d %s", a.StatusCode, a.body)
						}
					}
				})
			}
			for n := 0; during(); n++ {
				method, path := "PUT", fmt.Sprintf("/v1/follows/%d/42", 1000+n)
				if n%2 == 0 {
					method, path = "GET", "/v1/users/42/counts"
				}
				if a := other.do(t, method, path, ""); a.StatusCode/100 == 2 {
					good.Add(1)
				} else {
					refused.Add(1)
					t.Logf("%d %s", a.StatusCode, a.body)
				}
			}
			clients.Wait()
			if g, r := good.Load(), refused.Load(); 20*r > g || g < 20 { // a busy machine may refuse a few
				t.Errorf("of the other tenant's requests %d were answered and %d refused", g, r)
			}
			if n := passed.Load(); n < c.passed {
				t.Errorf("of the caller's own %d were answered, want %d at least", n, c.passed)
			}
		})
	}
}
