package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tidings/tidings/internal/pglocal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Kinds that the tests load.
var (
	follows  = EdgeKind{Name: "follow", Plural: "follows", From: "user", To: "user"}
	comments = ChildKind{Name: "comment", Plural: "comments", Parent: "post", Parents: "posts", Threaded: true, Moderated: true}
)

// graph returns the spec of a graph of users who follow each other.
func graph(users, edges int64, seed uint64) Spec {
	return Spec{Origins: users, Targets: users, NoSelf: true, Edges: edges, Seed: seed}
}

// api is the part of the API that a loader uses. It keeps the follows that it receives.
type api struct {
	mu      sync.Mutex
	follows map[string]bool
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	pair, ok := strings.CutPrefix(r.URL.Path, "/v1/follows/")
	if !ok || r.Method != http.MethodPut || r.Header.Get("Authorization") != "Bearer secret" {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusUnauthorized)
		io.WriteString(w, `{"title":"Unauthorized","detail":"no such token","code":"unauthorized"}`) //nolint:errcheck // a test's answer
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.follows[pair] {
		w.WriteHeader(http.StatusOK)
		return
	}
	a.follows[pair] = true
	w.WriteHeader(http.StatusCreated)
}

func loader(t *testing.T, url string, retryFor time.Duration) *Loader {
	t.Helper()
	l, err := New(Config{URL: url, Token: "secret", Concurrency: 8, RetryFor: retryFor})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func generated(spec Spec) iter.Seq2[Edge, error] {
	return func(yield func(Edge, error) bool) {
		for e := range Generate(spec) {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func TestLoadTwice(t *testing.T) {
	a := &api{follows: map[string]bool{}}
	srv := httptest.NewServer(a)
	defer srv.Close()
	for _, want := range []Stats{{Created: 500}, {Existed: 500}} {
		l := loader(t, srv.URL+"/", time.Minute)
		if err := l.Run(t.Context(), follows, generated(graph(50, 500, 1))); err != nil {
			t.Fatal(err)
		}
		if got := l.Stats(); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	if len(a.follows) != 500 {
		t.Errorf("%d follows", len(a.follows))
	}
}

func TestLoadRetriesUntilTheServerIsBack(t *testing.T) {
	a := &api{follows: map[string]bool{}}
	var n atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch i := n.Add(1); {
		case i%10 == 3:
			w.WriteHeader(http.StatusServiceUnavailable)
		case i%10 == 5:
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusTooManyRequests)
		case i%10 == 7: // the connection breaks after the write
			a.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		default:
			a.ServeHTTP(w, r)
		}
	}))
	defer srv.Close()
	l := loader(t, srv.URL, time.Minute)
	if err := l.Run(t.Context(), follows, generated(graph(50, 200, 1))); err != nil {
		t.Fatal(err)
	}
	if got := l.Stats(); got.Done() != 200 || got.Retried == 0 || got.Existed == 0 || got.Waiting != "" || len(a.follows) != 200 {
		t.Errorf("%+v, %d follows", got, len(a.follows))
	}
}

func TestLoadSendsWhatComesBeforeABadLine(t *testing.T) {
	a := &api{follows: map[string]bool{}}
	srv := httptest.NewServer(a)
	defer srv.Close()
	l := loader(t, srv.URL, time.Minute)
	err := l.Run(t.Context(), follows, Read(strings.NewReader("1 2\n1 3\nx\n1 4\n"), true))
	var line *LineError
	if !errors.As(err, &line) || line.Line != 3 {
		t.Errorf("error %v, want one of line 3", err)
	}
	if got := l.Stats(); got.Created != 2 || len(a.follows) != 2 {
		t.Errorf("%+v, %d follows", got, len(a.follows))
	}
}

func TestLoadEndsAtOnceWhenRefused(t *testing.T) {
	srv := httptest.NewServer(&api{follows: map[string]bool{}})
	defer srv.Close()
	l, err := New(Config{URL: srv.URL, Token: "wrong", Concurrency: 2, RetryFor: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	err = l.Run(t.Context(), follows, Read(strings.NewReader("# c\n1 2\n"), true))
	if want := "line 2: the API refuses 1 -> 2 with 401: no such token (unauthorized)"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestLoadGivesUpWithoutProgress(t *testing.T) {
	port, err := pglocal.FreePort() // it refuses connections: no other test gets it
	if err != nil {
		t.Fatal(err)
	}
	l := loader(t, fmt.Sprintf("http://127.0.0.1:%d", port), 200*time.Millisecond)
	err = l.Run(t.Context(), follows, generated(graph(50, 200, 1)))
	if err == nil || !strings.Contains(err.Error(), "no request succeeded for 200ms") {
		t.Errorf("error %v", err)
	}
}

func TestLoadStopsWithContext(t *testing.T) {
	a := &api{follows: map[string]bool{}}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var n atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 20 {
			cancel()
		}
		a.ServeHTTP(w, r)
	}))
	defer srv.Close()
	l := loader(t, srv.URL, time.Minute)
	if err := l.Run(ctx, follows, generated(graph(100, 5000, 1))); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	// Every request that was sent is counted.
	if got := l.Stats(); got.Created != int64(len(a.follows)) || got.Created >= 5000 {
		t.Errorf("%+v, %d follows", got, len(a.follows))
	}
}

func TestConfig(t *testing.T) {
	for _, bad := range []Config{{}, {URL: "127.0.0.1:1", Token: "x", Concurrency: 1}, {URL: "http://x", Concurrency: 1},
		{URL: "http://x", Token: "x"}, {URL: "http://x", Token: "x", Concurrency: 1, RetryFor: -1}} {
		if _, err := New(bad); err == nil {
			t.Errorf("%+v: no error", bad)
		}
	}
}
