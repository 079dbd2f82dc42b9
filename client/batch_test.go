package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidings/tidings/client"
)

// ledger plays the API's batches as far as a client sees them. It writes operations in order, and
// each create of a key once.
type ledger struct {
	t       *testing.T
	done    []string       // the written pairs and bodies, in order
	keys    map[string]int // how often each key made a child
	version int
	request int
	// fault decides the fate of the n-th request: how many lines are answered, and whether the
	// operations after them are written too. -1 means all.
	fault func(request int) (answered, done int)
	// refuse returns the problem of an operation of a request, or nil.
	refuse func(request int, op map[string]any) map[string]any
}

func (l *ledger) answer(_ int, r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil || r.Header.Get("Content-Type") != ndjson {
		l.t.Errorf("%v, %s", err, r.Header.Get("Content-Type"))
	}
	l.request++
	answered, done := -1, -1
	if l.fault != nil {
		answered, done = l.fault(l.request)
	}
	if l.keys == nil {
		l.keys = make(map[string]int)
	}
	var out bytes.Buffer
	n := 0
	for line := range bytes.Lines(body) {
		n++
		var op map[string]any
		if err := json.Unmarshal(line, &op); err != nil {
			l.t.Errorf("%s: %v", line, err)
		}
		outcome := map[string]any{"line": n, "status": 204, "token": fmt.Sprintf("t%d-%d", l.request, n)}
		var problem map[string]any
		if l.refuse != nil {
			problem = l.refuse(l.request, op)
		}
		switch {
		case done >= 0 && n > done:
		case problem != nil:
			outcome = map[string]any{"line": n, "status": problem["status"], "problem": problem}
		case op["op"] == "create":
			key := op["idempotency_key"].(string)
			l.keys[key]++
			outcome["status"], outcome["replayed"] = 201, l.keys[key] > 1
			outcome["comment"] = json.RawMessage(aComment)
			if l.keys[key] == 1 {
				l.done = append(l.done, op["body"].(string))
			}
		case op["op"] == "edit":
			if v, ok := op["if_match"].(float64); ok && int(v) != l.version {
				outcome = map[string]any{"line": n, "status": 412,
					"problem": map[string]any{"status": 412, "code": "version-stale", "title": "Stale"}}
			} else {
				l.version++
				outcome["status"], outcome["comment"] = 200, json.RawMessage(aComment)
			}
		default:
			l.done = append(l.done, fmt.Sprint(op["op"], op["post_id"]))
			if op["op"] == "put" {
				outcome["status"], outcome["like"] = 201, json.RawMessage(aLike)
			}
		}
		if answered < 0 || n <= answered {
			if err := json.NewEncoder(&out).Encode(outcome); err != nil {
				l.t.Error(err)
			}
		}
	}
	resp, err := reply(200, out.String(), "Content-Type: "+ndjson)
	if answered >= 0 {
		resp.Body = io.NopCloser(io.MultiReader(&out, lost{}))
	}
	resp.ContentLength = -1
	return resp, err
}

// lost is a broken connection.
type lost struct{}

func (lost) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// bounded is a body that breaks off when the request's context ends, and after a number of bytes is
// silent until then.
type bounded struct {
	ctx context.Context
	io.Reader
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left == 0 {
		<-b.ctx.Done()
	}
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.Reader.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// likes returns operations on posts: a put, or for a negative number a removal.
func likes(c *client.Client, posts ...int) iter.Seq[client.Operation[client.Like]] {
	return func(yield func(client.Operation[client.Like]) bool) {
		for _, p := range posts {
			op := c.Likes.PutOp("7", client.IDOf(max(p, -p)))
			if p < 0 {
				op = c.Likes.RemoveOp("7", client.IDOf(-p))
			}
			if !yield(op) {
				return
			}
		}
	}
}

// drain reads a batch, and returns the status of each outcome and the error that ended it.
func drain[T any](t *testing.T, batch iter.Seq2[client.Outcome[T], error]) (statuses []int, outcomes []client.Outcome[T], err error) {
	t.Helper()
	for o, e := range batch {
		if err != nil {
			t.Error("something behind an error")
		}
		if err = e; e != nil {
			continue
		}
		if o.Index != len(statuses) {
			t.Errorf("outcome %d has the index %d", len(statuses), o.Index)
		}
		statuses, outcomes = append(statuses, o.Status), append(outcomes, o)
	}
	return statuses, outcomes, err
}

func TestBatchesAreOfAnyLength(t *testing.T) {
	l := &ledger{t: t}
	c, requests := fake(t, l.answer)
	posts := make([]int, 2500)
	for i := range posts {
		posts[i] = i + 1
	}
	statuses, outcomes, err := drain(t, c.Likes.Batch(t.Context(), likes(c, posts...), client.Actor("alice")))
	if err != nil || len(statuses) != 2500 || len(*requests) != 3 || len(l.done) != 2500 || outcomes[0].Entity == nil ||
		outcomes[0].Entity.PostID != "42" || outcomes[0].Token == "" {
		t.Errorf("%v, %d outcomes, %d requests, %d done", err, len(statuses), len(*requests), len(l.done))
	}
	if (*requests)[2].Header.Get("Tidings-Actor") != "alice" {
		t.Error("an option was lost")
	}
	statuses, _, err = drain(t, c.Likes.Batch(t.Context(), likes(c)))
	if err != nil || len(statuses) != 0 || len(*requests) != 3 {
		t.Errorf("no operation: %v, %v", statuses, err)
	}
	n := 0
	for range c.Likes.Batch(t.Context(), likes(c, posts...)) { // the caller stops early
		if n++; n == 10 {
			break
		}
	}
	if len(*requests) != 4 {
		t.Errorf("%d requests", len(*requests))
	}
	// A session has the tokens of a batch: the last one of each entity.
	s := c.Session()
	if _, _, err := drain(t, s.Likes.Batch(t.Context(), likes(c, 1, 2, -1))); err != nil || s.Token() != "t5-2,t5-3" {
		t.Errorf("%v, the session has %q", err, s.Token())
	}
}

// Wherever an answer breaks off, the client sends the operations without an outcome again. Each
// operation is written at least once, each create exactly once, in order.
func TestBrokenBatchesAreResumed(t *testing.T) {
	for answered := range 6 {
		for done := answered; done <= 5; done++ {
			synctest.Test(t, func(t *testing.T) {
				l := &ledger{t: t, version: 3, fault: func(request int) (int, int) {
					if request == 1 {
						return answered, done
					}
					return -1, -1
				}}
				c, _ := fake(t, l.answer)
				comment := client.Comment{CommentID: exampleUUID, ChildState: client.ChildState{Version: 3}}
				comments := func(yield func(client.Operation[client.Comment]) bool) {
					for i := range 4 {
						if !yield(c.Comments.CreateOp("5", client.NewComment{AuthorID: "3", Body: fmt.Sprint("b", i)})) {
							return
						}
					}
					yield(c.Comments.EditOp(comment, client.CommentEdit{Body: "x"}))
				}
				statuses, outcomes, err := drain(t, c.Comments.Batch(t.Context(), comments))
				if err != nil || len(statuses) != 5 || !slices.Equal(l.done, []string{"b0", "b1", "b2", "b3"}) {
					t.Errorf("%d answered, %d done: %v, %v, %v", answered, done, statuses, err, l.done)
				}
				edited := outcomes[4]
				if again := done == 5 && answered < 5; again != (edited.Status == 412) || again && !edited.Problem.OutcomeUnknown ||
					edited.Problem != nil && edited.Err() == nil {
					t.Errorf("%d answered, %d done: the edit is %+v", answered, done, edited)
				}
			})
		}
	}
}

// A slow caller gets every outcome that has arrived: a second request would find its edits stale.
// Only a silent API ends an attempt.
func TestOnlyASilentAPIEndsABatch(t *testing.T) {
	const edits = 100
	for _, c := range []struct {
		what     string
		answered int           // bytes of the first answer
		pause    time.Duration // of the caller, for each outcome
		least    time.Duration
		requests int
	}{
		{"a slow caller", 1 << 20, time.Second, edits * time.Second, 1},
		{"an API that becomes silent", 5000, 0, 30 * time.Second, 2},
		{"an API that never answers", 0, 0, 30 * time.Second, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := &ledger{t: t, version: 3}
			cl, requests := fake(t, func(n int, r *http.Request) (*http.Response, error) {
				resp, err := l.answer(n, r)
				if n == 1 {
					resp.Body = io.NopCloser(&bounded{r.Context(), resp.Body, c.answered})
				}
				return resp, err
			})
			ops := func(yield func(client.Operation[client.Comment]) bool) {
				for i := range edits {
					comment := client.Comment{CommentID: exampleUUID, ChildState: client.ChildState{Version: int64(3 + i)}}
					if !yield(cl.Comments.EditOp(comment, client.CommentEdit{Body: "x"})) {
						return
					}
				}
			}
			began, outcomes := time.Now(), 0
			for o, err := range cl.Comments.Batch(t.Context(), ops) {
				if outcomes++; err != nil || c.requests == 1 && o.Err() != nil {
					t.Fatalf("%s: outcome %d: %v, %v", c.what, outcomes, err, o.Err())
				}
				<-time.After(c.pause)
			}
			took := time.Since(began)
			if outcomes != edits || len(*requests) != c.requests || took < c.least || took > c.least+time.Second {
				t.Errorf("%s: %d outcomes, %d requests, %s", c.what, outcomes, len(*requests), took)
			}
		})
	}
}

// The client sends operations again that the API refused temporarily, but not after a later
// operation on the same pair.
func TestRefusedOperationsAreSentAgain(t *testing.T) {
	overloaded := map[string]any{"status": 503, "code": "overloaded", "title": "Busy"}
	away := map[string]any{"status": 503, "code": "unavailable", "title": "Away"}
	for _, c := range []struct {
		what     string
		posts    []int
		refuse   func(request int, op map[string]any) map[string]any
		statuses []int
		done     []string
	}{
		{"one that had no room", []int{1, 2, 3}, func(request int, op map[string]any) map[string]any {
			if request == 1 && op["post_id"] == "2" {
				return overloaded
			}
			return nil
		}, []int{201, 201, 201}, []string{"put1", "put3", "put2"}},
		{"the database went away", []int{1, 2, -2, 3}, func(request int, op map[string]any) map[string]any {
			if request == 1 && op["post_id"] != "1" {
				return away
			}
			return nil
		}, []int{201, 201, 204, 201}, []string{"put1", "put2", "remove2", "put3"}},
		{"a later one on the same pair was done", []int{1, 2, -2, 3}, func(request int, op map[string]any) map[string]any {
			if request == 1 && (op["op"] == "put" && op["post_id"] == "2" || op["post_id"] == "3") {
				return overloaded
			}
			return nil
		}, []int{201, 503, 204, 201}, []string{"put1", "remove2", "put3"}},
		{"it never passes", []int{1, 2, 3}, func(_ int, op map[string]any) map[string]any {
			if op["post_id"] == "2" {
				return overloaded
			}
			return nil
		}, []int{201, 503, 201}, []string{"put1", "put3"}},
		{"what may not pass", []int{1, 2, 3}, func(_ int, op map[string]any) map[string]any {
			if op["post_id"] == "2" {
				return map[string]any{"status": 422, "code": "validation-failed", "title": "No"}
			}
			return nil
		}, []int{201, 422, 201}, []string{"put1", "put3"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := &ledger{t: t, refuse: c.refuse}
			cl, _ := fake(t, l.answer)
			statuses, _, err := drain(t, cl.Likes.Batch(t.Context(), likes(cl, c.posts...)))
			if err != nil || !slices.Equal(statuses, c.statuses) || !slices.Equal(l.done, c.done) {
				t.Errorf("%s: %v, %v, done %v", c.what, statuses, err, l.done)
			}
		})
	}
}

func TestBatchesEndWithATypedError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The server dies after two outcomes, each time.
		c, requests := fake(t, func(n int, r *http.Request) (*http.Response, error) {
			if n > 1 {
				return nil, io.ErrUnexpectedEOF
			}
			return (&ledger{t: t, fault: func(int) (int, int) { return 2, 5 }}).answer(n, r)
		}, client.WithRetry(client.Retry{Attempts: 3, First: time.Second, Most: time.Minute}))
		statuses, _, err := drain(t, c.Likes.Batch(t.Context(), likes(c, 1, 2, 3, 4, 5)))
		var dead *client.TransportError
		if !errors.As(err, &dead) || len(statuses) != 2 || len(*requests) != 3 {
			t.Errorf("%v, %v, %d requests", statuses, err, len(*requests))
		}
	})
	for _, c := range []struct {
		what string
		resp func() (*http.Response, error)
		is   func(error) bool
	}{
		{"no role", func() (*http.Response, error) { return refuse(403, "role-missing") }, client.IsForbidden},
		{"too many", func() (*http.Response, error) { return refuse(413, "too-many-operations") },
			func(err error) bool { return client.HasCode(err, client.CodeTooManyOperations) }},
		{"a page", func() (*http.Response, error) { return reply(200, "<html>", "Content-Type: text/html") },
			func(err error) bool { var a *client.AnswerError; return errors.As(err, &a) }},
		{"lines that are no JSON", func() (*http.Response, error) { return reply(200, "x\ny\n", "Content-Type: "+ndjson) },
			func(err error) bool { var a *client.AnswerError; return errors.As(err, &a) }},
		{"outcomes without a status", func() (*http.Response, error) { return reply(200, "{}\n{}\n", "Content-Type: "+ndjson) },
			func(err error) bool { var a *client.AnswerError; return errors.As(err, &a) }},
		{"a line without an end", func() (*http.Response, error) {
			r, err := reply(200, "", "Content-Type: "+ndjson)
			r.Body, r.ContentLength = io.NopCloser(endless{}), -1
			return r, err
		}, func(err error) bool { return strings.Contains(err.Error(), "longer than") }},
	} {
		cl, _ := fake(t, func(int, *http.Request) (*http.Response, error) { return c.resp() }, client.WithRetry(client.Retry{}))
		if statuses, _, err := drain(t, cl.Likes.Batch(t.Context(), likes(cl, 1, 2))); err == nil || !c.is(err) || len(statuses) != 0 {
			t.Errorf("%s: %v, %v", c.what, statuses, err)
		}
	}
	l := &ledger{t: t}
	c, _ := fake(t, l.answer)
	ops := slices.Values([]client.Operation[client.Comment]{c.Comments.CreateOp("5", client.NewComment{AuthorID: "3", Body: "b"}),
		c.Comments.DeleteOp(client.Comment{CommentID: exampleUUID})})
	if statuses, _, err := drain(t, c.Comments.Batch(t.Context(), ops)); !errors.Is(err, client.ErrNoVersion) || len(statuses) != 1 {
		t.Errorf("an operation without a version: %v, %v", statuses, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	var last error
	posts := make([]int, 1500)
	for i := range posts {
		posts[i] = i + 1
	}
	for _, err := range c.Likes.Batch(ctx, likes(c, posts...)) {
		n++
		cancel()
		last = err
	}
	if !errors.Is(last, context.Canceled) || n != 1001 {
		t.Errorf("cancelled in the middle: %d outcomes, %v", n, last)
	}
	cancel()
}
