package api_test

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/tokens"
)

// Whatever one caller does, the requests of another tenant are answered. `tidings bench neighbours` has the same attacks at full size, with times.
func TestWhatOneCallerDoesRefusesNoOther(t *testing.T) {
	cfg := config()
	cfg.MaxWait = 250 * time.Millisecond // so that what is slow shows within the seconds of a test
	cfg.RateUnknown = tokens.Rate{N: 100, Window: time.Second}
	f := openWith(t, cfg, testkit.Logger(t))
	f.want(t, 201, "PUT", "/v1/follows/1/42", "")
	fresh := "Tidings-Token: " + f.want(t, 201, "PUT", "/v1/follows/7/42", "").Header.Get("Tidings-Token") // which no consumer applies: none runs
	comment := f.want(t, 201, "POST", "/v1/posts/1/comments", `{"author_id":"1","body":"x"}`).text("comment_id")
	other := f
	other.token = f.newToken(t, tenant+1, "other", tokens.Roles()...)

	for name, c := range map[string]struct {
		clients int
		request func(client, n int) answer
		passed  int // how many of them, of those that are not refused, at least
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
			return f.do(t, "GET", path, "", fresh)
		}, 20},
		"writers of one comment": {200, func(client, n int) answer {
			return f.do(t, "PATCH", "/v1/comments/"+comment, fmt.Sprintf(`{"body":"%d %d"}`, client, n), "If-Match: *")
		}, 20},
	} {
		t.Run(name, func(t *testing.T) {
			if a := other.do(t, "PUT", "/v1/follows/1/42", ""); a.StatusCode/100 != 2 { // its token is known
				t.Fatalf("before: %d %s", a.StatusCode, a.body)
			}
			end := time.Now().Add(2 * time.Second)
			var clients sync.WaitGroup
			var passed atomic.Int64
			for client := range c.clients {
				clients.Go(func() {
					for n := 0; time.Now().Before(end); n++ {
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
			good, refused := 0, 0
			for n := 0; time.Now().Before(end); n++ {
				method, path := "PUT", fmt.Sprintf("/v1/follows/%d/42", 1000+n)
				if n%2 == 0 {
					method, path = "GET", "/v1/users/42/counts"
				}
				if a := other.do(t, method, path, ""); a.StatusCode/100 == 2 {
					good++
				} else {
					refused++
					t.Logf("%d %s", a.StatusCode, a.body)
				}
			}
			clients.Wait()
			if refused > 0 || good < 20 {
				t.Errorf("of the other tenant's requests %d were answered and %d refused", good, refused)
			}
			if n := int(passed.Load()); n < c.passed {
				t.Errorf("of the caller's own %d were answered, want %d at least", n, c.passed)
			}
		})
	}
}
