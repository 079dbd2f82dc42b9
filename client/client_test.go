package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/tidings/tidings/client"
)

// TestMain runs the tests. Without servers it runs only the tests that need none.
func TestMain(m *testing.M) {
	if os.Getenv(benchVariable) != "" {
		if err := answers(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	if testing.Short() { // the examples run against an API
		if err := flag.Set("test.skip", "^Example"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	goleak.VerifyTestMain(closing{m})
}

// closing closes the connections that examples left open in the default transport.
type closing struct{ *testing.M }

func (c closing) Run() int {
	defer http.DefaultClient.CloseIdleConnections()
	return c.M.Run()
}

// transport answers requests instead of a server.
type transport func(n int, r *http.Request) (*http.Response, error)

// fake returns a client whose requests fn answers, and the requests.
func fake(t *testing.T, fn transport, with ...client.Setting) (*client.Client, *[]*http.Request) {
	t.Helper()
	var mu sync.Mutex
	var requests []*http.Request
	h := &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
		mu.Lock()
		if r.Body != nil { // keep the body for the test
			b, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			r.Body = io.NopCloser(strings.NewReader(string(b)))
		}
		requests = append(requests, r)
		n := len(requests)
		mu.Unlock()
		return fn(n, r)
	})}
	c, err := client.New("http://api.test/", append([]client.Setting{client.WithToken("secret"), client.WithHTTPClient(h)}, with...)...)
	if err != nil {
		t.Fatal(err)
	}
	return c, &requests
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	resp, err := f(r)
	if resp != nil {
		resp.Request = r
	}
	return resp, err
}

// reply returns an answer. Headers are "Name: value".
func reply(status int, body string, headers ...string) (*http.Response, error) {
	h := http.Header{"Content-Type": {"application/json"}}
	if status >= 400 {
		h.Set("Content-Type", "application/problem+json")
	}
	for _, line := range headers {
		name, value, _ := strings.Cut(line, ": ")
		h.Set(name, value)
	}
	return &http.Response{StatusCode: status, Header: h, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body))}, nil
}

// refuse returns a problem.
func refuse(status int, code string, headers ...string) (*http.Response, error) {
	return reply(status, fmt.Sprintf(`{"type":"/docs#%s","title":"No","status":%d,"code":%q,"detail":"because"}`, code, status, code),
		headers...)
}

const (
	aLike = `{"user_id":"7","post_id":"42","status":"ACTIVE","version":3,"created_at":"2026-11-22T10:00:00.000000Z",` +
		`"positioned_at":"2026-11-22T10:00:00.000000Z","updated_at":"2026-11-22T10:00:00.000000Z"}`
	aComment = `{"comment_id":"0196b2d4-7c3e-7b6a-9d2f-1a2b3c4d5e6f","post_id":"5","author_id":"3","slug":"s","depth":1,"body":"Well ` +
		`said.","state":"VISIBLE","version":3,"created_at":"2026-11-22T10:00:00.000000Z","updated_at":"2026-11-22T10:00:00.000000Z"}`
)

// The client retries each temporary refusal after the time that the API asks for, with the same key
// of a create.
func TestWhatMayPassIsRetried(t *testing.T) {
	create := func(ctx context.Context, c *client.Client) error {
		_, err := c.Comments.Create(ctx, "5", client.NewComment{AuthorID: "3", Body: "Well said."})
		return err
	}
	put := func(ctx context.Context, c *client.Client) error { _, err := c.Likes.Put(ctx, "7", "42"); return err }
	discard := func(ctx context.Context, c *client.Client) error { _, err := c.DLQ.Discard(ctx, 7, ""); return err }
	lost := func() (*http.Response, error) { return nil, io.ErrUnexpectedEOF }
	broken := func() (*http.Response, error) {
		r, err := reply(200, `{"user_id":`)
		r.ContentLength = 1000
		return r, err
	}
	used := make(map[string]bool) // keys
	for _, c := range []struct {
		what     string
		call     func(context.Context, *client.Client) error
		first    func() (*http.Response, error)
		again    bool
		at, most time.Duration // of the wait
	}{
		{"a rate limit in seconds", discard, func() (*http.Response, error) { return refuse(429, "rate-limited", "Retry-After: 7") }, true,
			7 * time.Second, 9 * time.Second},
		{"a rate limit with a date", put, func() (*http.Response, error) {
			return refuse(429, "rate-limited", "Retry-After: "+time.Now().Add(5*time.Second).UTC().Format(http.TimeFormat))
		}, true, 4 * time.Second, 7 * time.Second},
		{"a rate limit with rubbish", put, func() (*http.Response, error) { return refuse(429, "rate-limited", "Retry-After: soon") }, true,
			0, time.Second},
		{"a rate limit in the past", put, func() (*http.Response, error) { return refuse(429, "rate-limited", "Retry-After: -3") }, true, 0,
			time.Second},
		{"a rate limit of an hour", put, func() (*http.Response, error) { return refuse(429, "rate-limited", "Retry-After: 3600") }, false,
			0, 0},
		{"overload", discard, func() (*http.Response, error) { return refuse(503, "overloaded", "Retry-After: 1") }, true,
			time.Second, 2 * time.Second},
		{"a thread on its way back", create, func() (*http.Response, error) { return refuse(503, "thread-returning", "Retry-After: 1") },
			true, time.Second, 2 * time.Second},
		{"no database, of a write that may be repeated", put,
			func() (*http.Response, error) { return refuse(503, "unavailable", "Retry-After: 1") }, true, time.Second, 2 * time.Second},
		{"no database, of a create with a key", create, func() (*http.Response, error) { return refuse(503, "unavailable") }, true, 0,
			time.Second},
		{"no database, of what has no key", discard, func() (*http.Response, error) { return refuse(503, "unavailable", "Retry-After: 1") },
			false, 0, 0},
		{"a lost connection", put, lost, true, 0, time.Second},
		{"a lost connection of a create with a key", create, lost, true, 0, time.Second},
		{"a lost connection of what has no key", discard, lost, false, 0, 0},
		{"a port that refuses, of what has no key", discard,
			func() (*http.Response, error) { return nil, &net.OpError{Op: "dial", Err: errors.New("refused")} }, true, 0, time.Second},
		{"an answer that breaks off", put, broken, true, 0, time.Second},
		{"a proxy's 502", put, func() (*http.Response, error) { return reply(502, "<html>", "Content-Type: text/html") }, true, 0,
			time.Second},
		{"a proxy's 502 of what has no key", discard, func() (*http.Response, error) {
			return reply(502, "<html>", "Content-Type: text/html")
		}, false, 0, 0},
		{"a proxy's 429", discard, func() (*http.Response, error) {
			return reply(429, "slow", "Content-Type: text/plain", "Retry-After: 2")
		}, true, 2 * time.Second, 3 * time.Second},
		{"a request that took too long to arrive", discard,
			func() (*http.Response, error) { return refuse(408, "request-timeout") }, true, 0, time.Second},
		{"the server's fault", put, func() (*http.Response, error) { return refuse(500, "internal") }, false, 0, 0},
		{"a missing role", put, func() (*http.Response, error) { return refuse(403, "role-missing") }, false, 0, 0},
		{"what is not there", put, func() (*http.Response, error) { return refuse(404, "not-found") }, false, 0, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			cl, requests := fake(t, func(n int, r *http.Request) (*http.Response, error) {
				switch {
				case n == 1:
					return c.first()
				case r.Method == http.MethodPost && strings.Contains(r.URL.Path, "comments"):
					return reply(201, aComment)
				case r.Method == http.MethodPost:
					return reply(200, `{"action":"discard"}`)
				}
				return reply(200, aLike)
			})
			start := time.Now()
			err := c.call(t.Context(), cl)
			took := time.Since(start)
			if again := len(*requests) == 2 && err == nil; again != c.again || took < c.at || took > c.most {
				t.Errorf("%s: %d requests, %v, %s", c.what, len(*requests), err, took)
			}
			if key := (*requests)[0].Header.Get("Idempotency-Key"); key != "" && used[key] {
				t.Errorf("%s: two creates have the key %s", c.what, key)
			} else {
				used[key] = true
			}
			if keys := []string{(*requests)[0].Header.Get("Idempotency-Key"),
				(*requests)[len(*requests)-1].Header.Get("Idempotency-Key")}; keys[0] != keys[1] ||
				strings.Contains((*requests)[0].URL.Path, "comments") != (keys[0] != "") {
				t.Errorf("%s: the keys are %q", c.what, keys)
			}
		})
	}
}

// Repeated refusals end after the maximum number of attempts, with waits that grow and differ. A
// context that ends during a wait ends it at once.
func TestRetriesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		storm := func(int, *http.Request) (*http.Response, error) { return refuse(429, "rate-limited", "Retry-After: 1") }
		c, requests := fake(t, storm, client.WithRetry(client.Retry{Attempts: 4, First: 100 * time.Millisecond, Most: 10 * time.Second}))
		start := time.Now()
		var meta client.Response
		_, err := c.Likes.Get(t.Context(), "7", "42", client.WithResponse(&meta))
		var p *client.Problem
		if !errors.As(err, &p) || !client.IsRateLimited(err) || p.RetryAfter != time.Second || len(*requests) != 4 ||
			meta.Attempts != 4 || meta.Status != 429 {
			t.Errorf("%v, %d requests, %+v", err, len(*requests), meta)
		}
		if took := time.Since(start); took < 3*time.Second || took > 5*time.Second {
			t.Errorf("it took %s", took)
		}

		c, requests = fake(t, func(int, *http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF },
			client.WithRetry(client.Retry{Attempts: 6, First: time.Second, Most: 4 * time.Second}))
		start = time.Now()
		_, err = c.Likes.Get(t.Context(), "7", "42")
		var lost *client.TransportError
		if took := time.Since(start); !errors.As(err, &lost) || !errors.Is(err, io.ErrUnexpectedEOF) || len(*requests) != 6 ||
			took < 7*time.Second || took > 15*time.Second {
			t.Errorf("%v, %d requests, %s", err, len(*requests), took)
		}

		// Late attempts of very many wait no longer than the maximum.
		c, requests = fake(t, func(int, *http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF },
			client.WithRetry(client.Retry{Attempts: 200, First: time.Second, Most: 2 * time.Second}))
		start = time.Now()
		if _, err = c.Likes.Get(t.Context(), "7", "42"); time.Since(start) < 190*time.Second || len(*requests) != 200 {
			t.Errorf("%d requests within %s: %v", len(*requests), time.Since(start), err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c, requests = fake(t, func(int, *http.Request) (*http.Response, error) { return refuse(503, "overloaded", "Retry-After: 5") })
		start = time.Now()
		if _, err = c.Likes.Get(ctx, "7", "42"); !client.IsUnavailable(err) || time.Since(start) != 0 || len(*requests) != 1 {
			t.Errorf("a wait beyond the deadline: %v after %s, %d requests", err, time.Since(start), len(*requests))
		}

		for value, most := range map[string]int{"2592000": 1, "99999999999999999999": 1, "-99999999999999999999": 5, "soon": 5} {
			c, requests = fake(t, func(int, *http.Request) (*http.Response, error) {
				return refuse(503, "overloaded", "Retry-After: "+value)
			})
			if _, err = c.Likes.Get(t.Context(), "7", "42"); !client.IsUnavailable(err) || len(*requests) != most {
				t.Errorf("Retry-After: %s: %v after %d requests", value, err, len(*requests))
			}
		}

		c, requests = fake(t, func(int, *http.Request) (*http.Response, error) { return refuse(503, "overloaded", "Retry-After: 5") })
		ctx, stop := context.WithCancel(t.Context())
		time.AfterFunc(300*time.Millisecond, stop)
		start = time.Now()
		if _, err = c.Likes.Get(ctx, "7", "42"); !errors.Is(err, context.Canceled) || time.Since(start) != 300*time.Millisecond {
			t.Errorf("cancelled while it waits: %v after %s", err, time.Since(start))
		}
		sent := len(*requests)
		if _, err = c.Likes.Put(ctx, "7", "42"); !errors.Is(err, context.Canceled) || len(*requests) != sent {
			t.Errorf("cancelled before: %v, %d requests", err, len(*requests)-sent)
		}

		// The server does not answer: each attempt ends after its time.
		c, requests = fake(t, func(_ int, r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		},
			client.WithAttemptTimeout(2*time.Second), client.WithRetry(client.Retry{Attempts: 2, First: time.Second, Most: time.Second}))
		start = time.Now()
		if _, err = c.Likes.Get(t.Context(), "7", "42"); !errors.Is(err, context.DeadlineExceeded) || len(*requests) != 2 ||
			time.Since(start) > 5*time.Second {
			t.Errorf("no answer: %v after %s, %d requests", err, time.Since(start), len(*requests))
		}
	})
}

// endless is a body that never ends.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return copy(p, strings.Repeat("x", len(p))), nil }

// Any unexpected answer leads to an error of a documented type, and never to a panic.
func TestAnswersThatAreNone(t *testing.T) {
	for _, c := range []struct {
		what string
		resp func() (*http.Response, error)
		is   func(error) bool
		says string
	}{
		{"a proxy's page", func() (*http.Response, error) {
			return reply(502, "<html>Bad gateway\xff</html>", "Content-Type: text/html")
		}, isAnswerError(502), "<html>Bad gateway"},
		{"a page in the place of a result", func() (*http.Response, error) {
			return reply(200, "<html>login</html>", "Content-Type: text/html")
		}, isAnswerError(200), "login"},
		{"a redirect", func() (*http.Response, error) {
			return reply(302, "", "Location: http://elsewhere.test/", "Content-Type: text/html")
		}, isAnswerError(302), "302"},
		{"a broken problem", func() (*http.Response, error) { return reply(422, `{"code":"validation`) },
			isAnswerError(422), "unexpected end"},
		{"a problem without a code", func() (*http.Response, error) { return reply(404, `{"title":"x"}`) }, isAnswerError(404), "no code"},
		{"a problem of another status", func() (*http.Response, error) { return reply(409, `{"code":"not-found","status":404}`) },
			isAnswerError(409), "another status"},
		{"a problem that is a list", func() (*http.Response, error) { return reply(400, `[]`) }, isAnswerError(400), "cannot unmarshal"},
		{"a huge problem", func() (*http.Response, error) {
			r, err := reply(400, "")
			r.Body, r.ContentLength = io.NopCloser(endless{}), -1
			return r, err
		}, isAnswerError(400), "larger than"},
		{"a huge problem that says how huge", func() (*http.Response, error) {
			r, err := reply(400, "")
			r.Body, r.ContentLength = io.NopCloser(endless{}), 1<<40
			return r, err
		}, isAnswerError(400), "larger than"},
		{"a problem with an entity whose characters are escaped", func() (*http.Response, error) {
			return reply(412, `{"code":"version-stale","status":412,"current":{"body":"`+strings.Repeat(`\u003c`, 16<<10)+`"}}`)
		}, client.IsStale, ""},
		{"no result", func() (*http.Response, error) { return reply(200, "") }, isAnswerError(200), "unexpected end"},
		{"an id that is none", func() (*http.Response, error) { return reply(200, strings.Replace(aLike, `"7"`, `"se/ven"`, 1)) },
			isAnswerError(200), "a value is not an id"},
		{"a number in the place of an object", func() (*http.Response, error) { return reply(200, "7") },
			isAnswerError(200), "cannot unmarshal"},
		{"not modified", func() (*http.Response, error) { return reply(304, "") },
			func(err error) bool { return errors.Is(err, client.ErrNotModified) }, ""},
	} {
		cl, _ := fake(t, func(int, *http.Request) (*http.Response, error) { return c.resp() }, client.WithRetry(client.Retry{}))
		_, err := cl.Likes.Get(t.Context(), "7", "42")
		if err == nil || !c.is(err) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.what, err)
		}
		if err != nil && len(err.Error()) > 1000 {
			t.Errorf("%s: the message has %d bytes", c.what, len(err.Error()))
		}
	}
	for url, token := range map[string]string{"": "t", "api": "t", "ftp://x": "t", "http://": "t", "http://x?a=b": "t", "http://u:p@x": "t",
		"http://x": "", "https://x": "a\nb"} {
		if _, err := client.New(url, client.WithToken(token)); err == nil {
			t.Errorf("New(%q) with the token %q: no error", url, token)
		}
	}
}

func isAnswerError(status int) func(error) bool {
	return func(err error) bool {
		var a *client.AnswerError
		var p *client.Problem
		return errors.As(err, &a) && a.Status == status && a.Path == "/v1/likes/7/42" && !errors.As(err, &p)
	}
}

func TestProblemsAreTyped(t *testing.T) {
	for code, is := range map[string]func(error) bool{
		"404 not-found": client.IsNotFound, "401 unauthenticated": client.IsUnauthenticated, "403 role-missing": client.IsForbidden,
		"422 validation-failed": client.IsInvalid, "422 too-deep": client.IsInvalid,
		"412 version-stale": client.IsStale, "409 comment-gone": client.IsGone, "429 rate-limited": client.IsRateLimited,
		"503 unavailable": client.IsUnavailable,
	} {
		var status int
		var name string
		if _, err := fmt.Sscanf(code, "%d %s", &status, &name); err != nil {
			t.Fatal(err)
		}
		c, _ := fake(t, func(int, *http.Request) (*http.Response, error) { return refuse(status, name, "X-Request-Id: r-1") },
			client.WithRetry(client.Retry{}))
		_, err := c.Likes.Get(t.Context(), "7", "42")
		var p *client.Problem
		if !errors.As(err, &p) || string(p.Code) != name || p.RequestID != "r-1" || !is(fmt.Errorf("wrapped: %w", err)) || is(io.EOF) ||
			!strings.Contains(err.Error(), "request r-1") {
			t.Errorf("%s: %v", code, err)
		}
		for other, isOther := range map[string]func(error) bool{"404": client.IsNotFound, "403": client.IsForbidden,
			"429": client.IsRateLimited} {
			if !strings.HasPrefix(code, other) && isOther(err) {
				t.Errorf("%s is also %s", code, other)
			}
		}
	}
}

// A change names its version. If the first attempt got no answer, the problem of the second one
// says that the first may have succeeded.
func TestChangesAreGuarded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, requests := fake(t, func(n int, _ *http.Request) (*http.Response, error) {
			switch n {
			case 1:
				return reply(200, aComment, `ETag: "3"`, "X-Request-Id: r-1", `RateLimit-Policy: "read";q=100;w=60`,
					`RateLimit: "read";r=99;t=50`)
			case 2:
				return nil, io.ErrUnexpectedEOF
			}
			return reply(412, `{"title":"Stale","status":412,"code":"version-stale","current":`+
				strings.Replace(aComment, `"version":3`, `"version":4`, 1)+`}`)
		})
		var meta client.Response
		comment, err := c.Comments.Get(t.Context(), exampleUUID, client.WithResponse(&meta))
		if err != nil {
			t.Fatal(err)
		}
		if want := (client.RateLimit{Policy: "read", Quota: 100, Window: time.Minute, Remaining: 99,
			Reset: 50 * time.Second}); meta.ETag != `"3"` || meta.RequestID != "r-1" || len(meta.RateLimit) != 1 ||
			meta.RateLimit[0] != want {
			t.Errorf("%+v", meta)
		}
		_, err = c.Comments.Edit(t.Context(), comment, client.CommentEdit{Body: "x"})
		var p *client.Problem
		var current client.Comment
		if !errors.As(err, &p) || !client.IsStale(err) || !p.OutcomeUnknown || p.CurrentAs(&current) != nil || current.Version != 4 {
			t.Errorf("%v, %+v", err, p)
		}
		if got := (*requests)[2].Header.Get("If-Match"); got != `"3"` {
			t.Errorf("If-Match is %s", got)
		}
		sent := len(*requests)
		if err := c.Comments.Delete(t.Context(), client.Comment{CommentID: exampleUUID}); !errors.Is(err, client.ErrNoVersion) ||
			len(*requests) != sent {
			t.Errorf("a change without a version: %v", err)
		}
		_ = c.Comments.Delete(t.Context(), client.Comment{CommentID: exampleUUID}, client.IfMatchAny()) // refused by the fake
		if got := (*requests)[sent].Header.Get("If-Match"); got != "*" {
			t.Errorf("If-Match is %s", got)
		}
		_, err = c.Comments.Edit(t.Context(), comment, client.CommentEdit{Body: "x"})
		if errors.As(err, &p); p.OutcomeUnknown {
			t.Error("a first attempt that is refused has an unknown outcome")
		}
	})
}

// pagesOf answers a list of 5 items in pages of 2.
func pagesOf(t *testing.T, fail map[string]func() (*http.Response, error)) transport {
	return func(_ int, r *http.Request) (*http.Response, error) {
		cursor := r.URL.Query().Get("cursor")
		if f := fail[cursor]; f != nil {
			return f()
		}
		from := map[string]int{"": 1, "c2": 3, "c4": 5}[cursor]
		page := map[string]any{"as_of": "2026-11-22T10:00:00.000000Z"}
		var items []any
		for i := from; i <= min(from+1, 5); i++ {
			items = append(items, map[string]any{"user_id": fmt.Sprint(i), "positioned_at": "2026-11-22T10:00:00.000000Z"})
		}
		page["items"] = items
		if from < 5 {
			page["next"] = fmt.Sprintf("c%d", from+1)
		}
		b, err := json.Marshal(page)
		if err != nil {
			t.Error(err)
		}
		return reply(200, string(b))
	}
}

// The path of a call without an id would be another route's, or none's.
func TestACallWithoutAnIDIsNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, requests := fake(t, func(int, *http.Request) (*http.Response, error) {
			return reply(404, `{"title":"There is no such route","status":404,"code":"route-unknown"}`)
		})
		ctx := t.Context()
		none := client.Comment{ChildState: client.ChildState{Version: 3}}
		calls := map[string]func() error{
			"Get":        func() error { _, err := c.Comments.Get(ctx, ""); return err },
			"Edit":       func() error { _, err := c.Comments.Edit(ctx, none, client.CommentEdit{Body: "x"}); return err },
			"Delete":     func() error { return c.Comments.Delete(ctx, none) },
			"Delete any": func() error { return c.Comments.Delete(ctx, client.Comment{}, client.IfMatchAny()) },
			"Versions":   func() error { _, err := c.Comments.Versions("").First(ctx); return err },
			"a removal":  func() error { _, err := c.EdgeRemoval(ctx, ""); return err },
			"DeleteOp": func() error {
				for _, err := range c.Comments.Batch(ctx, slices.Values([]client.Operation[client.Comment]{c.Comments.DeleteOp(none)})) {
					if err != nil {
						return err
					}
				}
				return nil
			},
		}
		for name, call := range calls {
			if err := call(); !errors.Is(err, client.ErrNoID) || client.IsNotFound(err) {
				t.Errorf("%s: %v, not found: %t", name, err, client.IsNotFound(err))
			}
		}
		if len(*requests) > 0 {
			t.Errorf("%d requests, the first to %s", len(*requests), (*requests)[0].URL)
		}
		if err := c.Call(ctx, "GET", "/v1/nowhere", nil, nil); client.IsNotFound(err) || !client.HasCode(err, client.CodeRouteUnknown) {
			t.Errorf("a route that does not exist: %v", err)
		}
	})
	c, requests := fake(t, func(int, *http.Request) (*http.Response, error) { return reply(200, aLike) })
	for _, id := range []client.ID{":", ":remove-edges", "a:b", "..."} {
		_, err := c.Likes.Get(t.Context(), id, id)
		if last := len(*requests) - 1; err != nil || (*requests)[last].URL.Path != "/v1/likes/"+string(id+"/"+id) {
			t.Errorf("the id %q: %v", id, err)
		}
	}
}

func TestListsAreResumed(t *testing.T) {
	c, requests := fake(t, pagesOf(t, nil))
	for stop := range 7 {
		l := c.Follows.Followers("9", client.PageSize(2))
		var got []client.ID
		for u, err := range l.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if got = append(got, u.UserID); len(got) == stop {
				break
			}
		}
		if l.AsOf().IsZero() {
			t.Error("as_of is not there")
		}
		seen := len(got)
		for u, err := range c.Follows.Followers("9", client.PageSize(2), client.Cursor(l.Cursor())).All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, u.UserID)
		}
		if repeated := seen + 5 - len(slices.Compact(slices.Sorted(slices.Values(got)))); len(
			slices.Compact(slices.Sorted(slices.Values(got)))) != 5 || len(got)-5 > 2 && stop < 5 {
			t.Errorf("stopped behind %d: %v, %d repeated", stop, got, repeated)
		}
	}
	for _, r := range *requests {
		if r.URL.Query().Get("limit") != "2" {
			t.Errorf("a page without its size: %s", r.URL)
		}
	}
	first, err := c.Follows.Followers("9").First(t.Context())
	if err != nil || len(first.Items) != 2 || first.Next != "c2" {
		t.Errorf("%+v, %v", first, err)
	}
	// The position of a list's beginning is for its first page only.
	c, requests = fake(t, pagesOf(t, nil))
	for _, err := range c.Comments.List("9", client.Skip(3), client.Order("newest")).Pages(t.Context()) {
		_ = err // the answer has another shape
	}
	for i, r := range *requests {
		if q := r.URL.Query(); (q.Get("skip") != "") != (i == 0) || (q.Get("cursor") != "") != (i > 0) || q.Get("order") != "newest" {
			t.Errorf("page %d: %s", i, r.URL)
		}
	}

	// A list yields nothing after an error, and can be resumed there.
	fail := map[string]func() (*http.Response, error){"c2": func() (*http.Response, error) { return refuse(403, "role-missing") }}
	c, _ = fake(t, pagesOf(t, fail))
	l := c.Follows.Followers("9")
	var errs, items int
	for _, err := range l.All(t.Context()) {
		if err != nil {
			errs++
			if !client.IsForbidden(err) {
				t.Error(err)
			}
			continue
		}
		items++
	}
	if errs != 1 || items != 2 || l.Cursor() != "c2" {
		t.Errorf("%d errors, %d items, the cursor %q", errs, items, l.Cursor())
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c, _ = fake(t, pagesOf(t, nil))
	errs, items = 0, 0
	for _, err := range c.Follows.Followers("9").All(ctx) {
		if err != nil {
			errs++
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			continue
		}
		items++
		cancel()
	}
	if errs != 1 || items != 2 {
		t.Errorf("cancelled within a page: %d errors, %d items", errs, items)
	}
}

// overlaps is the key of the channel for which an answer waits.
type overlaps struct{}

// A session sends the token of the last write of each entity with reads of projections, and with no
// other request.
func TestASessionShowsItsWrites(t *testing.T) {
	var mu sync.Mutex
	n := 0
	c, _ := fake(t, func(_ int, r *http.Request) (*http.Response, error) {
		mu.Lock()
		defer mu.Unlock()
		n++
		token := fmt.Sprintf("Tidings-Token: t%d", n)
		switch {
		case strings.HasSuffix(r.URL.Path, "/likers"):
			return reply(200, `{"items":[],"as_of":"2026-11-22T10:00:00.000000Z"}`)
		case r.Method == http.MethodPost:
			return reply(201, aComment, token, "Location: /v1/comments/"+exampleUUID)
		case strings.HasPrefix(r.URL.Path, "/v1/comments"):
			return reply(200, aComment, token)
		}
		return reply(200, aLike, token)
	})
	s := c.Session()
	put := func(post client.ID) {
		if _, err := s.Likes.Put(t.Context(), "7", post); err != nil {
			t.Error(err)
		}
	}
	want := func(tokens ...string) {
		t.Helper()
		if got := s.Token(); got != strings.Join(tokens, ",") {
			t.Errorf("the session has %q, want %q", got, tokens)
		}
	}
	want()
	put("1")
	put("2")
	put("1")
	want("t2", "t3")
	comment, err := s.Comments.Create(t.Context(), "5", client.NewComment{AuthorID: "3", Body: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Comments.Edit(t.Context(), comment, client.CommentEdit{Body: "y"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Comments.Moderate(t.Context(), comment, client.Moderation{State: "HIDDEN"}); err != nil {
		t.Fatal(err)
	}
	want("t2", "t3", "t6")
	for _, err := range s.Likes.Likers("1").All(t.Context()) {
		t.Error(err)
	}
	if c.Session(s.Token(), "t2").Token() != "t3,t6,t2" {
		t.Errorf("another session of the same has %q", c.Session(s.Token(), "t2").Token())
	}
	// The answers to two writes of an edge overtake each other: the session keeps both.
	overlapping := make(chan struct{})
	c, _ = fake(t, func(n int, r *http.Request) (*http.Response, error) {
		if n == 1 {
			close(overlapping)
			<-r.Context().Value(overlaps{}).(chan struct{})
		}
		return reply(200, aLike, fmt.Sprintf("Tidings-Token: t%d", n))
	})
	s = c.Session()
	first := make(chan struct{})
	var writers sync.WaitGroup
	writers.Go(func() {
		if _, err := s.Likes.Put(context.WithValue(t.Context(), overlaps{}, first), "7", "1"); err != nil {
			t.Error(err)
		}
	})
	<-overlapping
	put("1")
	close(first)
	writers.Wait()
	want("t2", "t1")
	put("1")
	want("t3")

	for w := range 8 {
		writers.Go(func() {
			for i := range 20 {
				put(client.IDOf(100 + w*20 + i))
				if tokens := strings.Split(s.Token(), ","); len(tokens) > 64 {
					t.Errorf("%d tokens", len(tokens))
				}
			}
		})
	}
	writers.Wait()
	if tokens := strings.Split(s.Token(), ","); len(tokens) != 64 {
		t.Errorf("%d tokens", len(tokens))
	}
	c, _ = fake(t, func(_ int, r *http.Request) (*http.Response, error) {
		if r.Method == http.MethodPut {
			return reply(200, aLike, "Tidings-Token: alone")
		}
		put("1") // while the batch is answered
		return reply(200, `{"line":1,"status":204,"token":"b1"}`+"\n"+`{"line":2,"status":204,"token":"b2"}`+"\n",
			"Content-Type: application/x-ndjson")
	})
	s = c.Session()
	for range s.Likes.Batch(t.Context(), likes(c, -1, -1)) {
		continue
	}
	want("alone", "b2")
}

// The package depends only on the standard library and on package event.
func TestTheClientIsLight(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(out)); !slices.Equal(got,
		[]string{"github.com/tidings/tidings/event", "github.com/tidings/tidings/client"}) {
		t.Errorf("it depends on %q", got)
	}
}

// tracing plays an OpenTelemetry transport.
type tracing struct {
	http.RoundTripper
	seen *[]string
}

func (t tracing) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	resp, err := t.RoundTripper.RoundTrip(r)
	*t.seen = append(*t.seen, r.Method+" "+r.URL.Path)
	return resp, err
}

// A transport of the caller sees every attempt, and may change it.
func TestTracesComeFromTheTransport(t *testing.T) {
	var headers, spans []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		headers = append(headers, r.Header.Get("traceparent"))
		if len(headers) == 1 {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, aLike)
	}))
	defer srv.Close()
	c, err := client.New(srv.URL, client.WithToken("secret"),
		client.WithHTTPClient(&http.Client{Transport: tracing{srv.Client().Transport, &spans}}),
		client.WithRetry(client.Retry{Attempts: 2, First: time.Millisecond, Most: time.Second}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Likes.Put(t.Context(), "7", "42"); err != nil {
		t.Fatal(err)
	}
	if len(headers) != 2 || headers[0] == "" || headers[0] != headers[1] ||
		!slices.Equal(spans, []string{"PUT /v1/likes/7/42", "PUT /v1/likes/7/42"}) {
		t.Errorf("%q, %q", headers, spans)
	}
}
