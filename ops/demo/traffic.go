package demo

import (
	"cmp"
	"net/http"
	"sync"
)

// traffic counts the requests that failed, and remembers the last failure until a request succeeds.
// The client retries failed requests.
type traffic struct {
	next http.RoundTripper

	mu     sync.Mutex
	failed int64  // requests that need a retry
	why    string // the last failure; "" after a success
}

// RoundTrip implements http.RoundTripper.
func (t *traffic) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(r)
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case r.Context().Err() != nil:
	case err != nil:
		t.failed++
		t.why = err.Error()
	case resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests:
		t.failed++
		t.why = cmp.Or(resp.Status, http.StatusText(resp.StatusCode))
	default:
		t.why = ""
	}
	return resp, err
}

func (t *traffic) state() (retried int64, waiting string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed, t.why
}
