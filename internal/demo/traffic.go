package demo

import (
	"cmp"
	"net/http"
	"sync"
)

// traffic counts the requests that are sent, and remembers why the last one failed until one succeeds. The client sends those that fail again.
type traffic struct {
	next http.RoundTripper

	mu     sync.Mutex
	failed int64  // requests that have to be sent again
	why    string // the last one failed; "" when it did not
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
