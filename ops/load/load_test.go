package load

import (
	"context"
	"encoding/json"
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
	follows  = EdgeKind{Name: "follow", Plural: "follows", From: "user", To: "user", Ends: [2]string{"follower_id", "followee_id"}}
	comments = ChildKind{Name: "comment", Plural: "comments", Parent: "post", Parents: "posts", Threaded: true, Moderated: true}
)

// graph returns the spec of a graph of users who follow each other.
func graph(users, edges int64, seed uint64) Spec {
	return Spec{Origins: users, Targets: users, NoSelf: true, Edges: edges, Seed: seed}
}

// api is the part of the API that a loader uses. It keeps the follows that it receives.
type api struct {
	mu      sync.Mutex
	follows map[[2]string]bool
	most    int            // operations of a request; 0: no limit
	busy    func(int) bool // whether the API refuses the n-th operation for now; nil: none
	n       int
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Operations []struct {
			Op       string
			Follower string `json:"follower_id"`
			Followee string `json:"followee_id"`
		}
	}
	status, problem := 0, ""
	switch {
	case r.Method != http.MethodPost || r.URL.Path != "/v1/follows:batch" || r.Header.Get("Authorization") != "Bearer secret" ||
		json.NewDecoder(r.Body).Decode(&body) != nil:
		status, problem = http.StatusUnauthorized, `{"title":"Unauthorized","detail":"no such token","code":"unauthorized"}`
	case a.most > 0 && len(body.Operations) > a.most:
		status, problem = http.StatusRequestEntityTooLarge, `{"code":"too-many-operations"}`
	}
	if status != 0 {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(status)
		io.WriteString(w, problem)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var items []string
	for _, op := range body.Operations {
		pair := [2]string{op.Follower, op.Followee}
		a.n++
		switch {
		case op.Op != "put" || op.Follower == "" || op.Followee == "":
			items = append(items, `{"status":422,"problem":{"code":"validation","title":"bad"}}`)
		case a.busy != nil && a.busy(a.n):
			items = append(items, `{"status":503,"problem":{"code":"overloaded","title":"busy"}}`)
		case a.follows[pair]:
			items = append(items, `{"status":200}`)
		default:
			a.follows[pair] = true
			items = append(items, `{"status":201}`)
		}
	}
	fmt.Fprintf(w, `{"items":[%s]}`, strings.Join(items, ","))
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
	a := &api{follows: map[[2]string]bool{}}
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
	a := &api{follows: map[[2]string]bool{}}
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
	if err := l.Run(t.Context(), follows, generated(graph(100, 2000, 1))); err != nil {
		t.Fatal(err)
	}
	if got := l.Stats(); got.Done() != 2000 || got.Retried == 0 || got.Existed == 0 || got.Waiting != "" || len(a.follows) != 2000 {
		t.Errorf("%+v, %d follows", got, len(a.follows))
	}
}

// The API refuses a part of a batch for now, and batches that are larger than the token may write.
func TestLoadSendsTheRestOfABatchAgain(t *testing.T) {
	a := &api{follows: map[[2]string]bool{}, most: 30, busy: func(n int) bool { return n%7 == 0 }}
	srv := httptest.NewServer(a)
	defer srv.Close()
	l := loader(t, srv.URL, time.Minute)
	if err := l.Run(t.Context(), follows, generated(graph(50, 250, 1))); err != nil {
		t.Fatal(err)
	}
	if got := l.Stats(); got.Created != 250 || got.Existed != 0 || got.Retried == 0 || got.Waiting != "" || len(a.follows) != 250 {
		t.Errorf("%+v, %d follows", got, len(a.follows))
	}
}

func TestLoadEndsAtAnEdgeThatTheAPIRefuses(t *testing.T) {
	a := &api{follows: map[[2]string]bool{}}
	srv := httptest.NewServer(a)
	defer srv.Close()
	l := loader(t, srv.URL, time.Minute)
	edges := func(yield func(Edge, error) bool) {
		_ = yield(Edge{"1", "2", "", 1}, nil) && yield(Edge{"1", "", "", 2}, nil)
	}
	var refused *RefusedError
	if err := l.Run(t.Context(), follows, edges); !errors.As(err, &refused) || refused.Line != 2 || refused.Status != 422 {
		t.Errorf("error %v, want 422 of line 2", err)
	}
}

func TestLoadSendsWhatComesBeforeABadLine(t *testing.T) {
	a := &api{follows: map[[2]string]bool{}}
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
	srv := httptest.NewServer(&api{follows: map[[2]string]bool{}})
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
	a := &api{follows: map[[2]string]bool{}}
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
