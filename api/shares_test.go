package api_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/tokens"
)

// A tenant's requests whose bodies arrive, and an address's documents that are sent, take three of
// four places. The next ones are refused, and another tenant's and another address's are not.
func TestATenantAndAnAddressTakeTheirShareOfPlaces(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.Handler.(*api.Handler).Shrink(4)
	other := f
	other.token = f.newToken(t, 2, "other", tokens.Roles()...)
	serve := func(w http.ResponseWriter, method, path, token, from string, body io.Reader) {
		r := httptest.NewRequestWithContext(t.Context(), method, path, body)
		r.Header.Set("Authorization", "Bearer "+token)
		r.RemoteAddr = from
		f.ServeHTTP(w, r)
	}
	const greedy, modest = "10.0.0.1:1", "10.0.0.2:1"
	var held sync.WaitGroup
	defer held.Wait()
	for range 3 {
		body, in := io.Pipe()
		defer in.Close()
		held.Go(func() { serve(httptest.NewRecorder(), "POST", "/v1/posts/1/comments", f.token, greedy, body) })
		if _, err := io.WriteString(in, "{"); err != nil { // the API reads it
			t.Fatal(err)
		}
	}
	if a := f.want(t, 503, "GET", "/v1/follows/1/2", ""); a.text("code") != "overloaded" || a.Header.Get("Retry-After") == "" {
		t.Errorf("%s %v", a.body, a.Header)
	}
	other.want(t, 404, "GET", "/v1/follows/1/2", "")

	writing, read := make(chan struct{}), make(chan struct{})
	for range 3 {
		held.Go(func() { serve(slowReader{httptest.NewRecorder(), writing, read}, "GET", "/docs", "", greedy, nil) })
		<-writing
	}
	defer close(read)
	for from, want := range map[string]int{greedy: 503, modest: 200} {
		w := httptest.NewRecorder()
		serve(w, "GET", "/v1/asyncapi.json", "", from, nil)
		if w.Code != want || want == 503 && !strings.Contains(w.Body.String(), `"overloaded"`) {
			t.Errorf("a document for %s: %d %.100s, want %d", from, w.Code, w.Body, want)
		}
	}
	for reason, want := range map[string]float64{"arrived": 1, "documents": 1} {
		if got := f.shed(t, reason); got != want {
			t.Errorf("tidings_api_shed_requests_total of %s is %v, want %v", reason, got, want)
		}
	}
}
