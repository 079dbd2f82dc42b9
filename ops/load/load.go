package load

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/client"
)

// Config says where to load and with how many workers.
type Config struct {
	URL         string        // the API's, without a path
	Token       string        // with the role write
	Concurrency int           // concurrent requests, 1..1024
	RetryFor    time.Duration // how long to retry while no request succeeds
}

// Validate returns an error that lists every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	if !strings.HasPrefix(c.URL, "http://") && !strings.HasPrefix(c.URL, "https://") {
		errs = append(errs, fmt.Errorf("the API's address is %q: want http://HOST:PORT", c.URL))
	}
	if c.Token == "" {
		errs = append(errs, errors.New("the token is empty"))
	}
	if c.Concurrency < 1 || c.Concurrency > 1024 {
		errs = append(errs, fmt.Errorf("concurrency is %d: want 1 to 1024", c.Concurrency))
	}
	if c.RetryFor < 0 {
		errs = append(errs, fmt.Errorf("retry-for is %s: want 0 or more", c.RetryFor))
	}
	return errors.Join(errs...)
}

// Stats is the work of a load so far.
type Stats struct {
	Created int64  // edges or children that were new (201)
	Changed int64  // changes of children and threads: edits, deletions, moderation, settings
	Existed int64  // edges or children that existed already, perhaps from a request whose answer was lost
	Refused int64  // requests that the state does not allow (409), and replies to refused children
	Retried int64  // requests that were sent a second time, for all their edges or for some
	Waiting string // why requests fail now; empty while they succeed
}

// Done returns the number of edges, or of requests about children, with a final answer.
func (s Stats) Done() int64 { return s.Created + s.Changed + s.Existed + s.Refused }

// RefusedError reports that the API refuses a request, or every request (a wrong token, a missing
// role). A retry does not help.
type RefusedError struct {
	Line   int64  // of the input; 0 if generated
	What   string // an edge, or a method and a path
	Status int
	Reason string // of the problem details
}

func (e *RefusedError) Error() string {
	where := ""
	if e.Line > 0 {
		where = fmt.Sprintf("line %d: ", e.Line)
	}
	return fmt.Sprintf("%sthe API refuses %s with %d: %s", where, e.What, e.Status, e.Reason)
}

const (
	requestTimeout = 30 * time.Second // after it the connection counts as dead
	stopTimeout    = 5 * time.Second  // for the requests in progress when the load stops
	firstBackoff   = 50 * time.Millisecond
	maxBackoff     = 2 * time.Second
	maxRetryAfter  = 30 * time.Second // the server may ask for more

	// maxEdges and maxBytes of attributes bound a request. The API writes a hundred operations of a
	// batch in one transaction, and takes 4 MiB by default.
	maxEdges = 100
	maxBytes = 1 << 20
)

// Loader sends edges or children. Make one with New for each load.
type Loader struct {
	cfg    Config
	client *client.Client
	start  time.Time

	created, changed, existed, refused, retried atomic.Int64

	progress atomic.Int64 // time of the last success, in nanoseconds after start
	mu       sync.Mutex
	waiting  string
}

// New validates cfg and returns a Loader. It sends no request.
func New(cfg Config) (*Loader, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	transport := &http.Transport{MaxIdleConns: cfg.Concurrency, MaxIdleConnsPerHost: cfg.Concurrency, Proxy: http.ProxyFromEnvironment,
		IdleConnTimeout: time.Minute}
	c, err := client.New(cfg.URL, client.WithToken(cfg.Token), client.WithHTTPClient(&http.Client{Transport: transport}),
		client.WithAttemptTimeout(requestTimeout), client.WithRetry(client.Retry{})) // the Loader retries by its own rule (RetryFor)
	if err != nil {
		return nil, err
	}
	return &Loader{cfg: cfg, start: time.Now(), client: c}, nil
}

// Stats returns the current numbers. It is safe to call while Run runs.
func (l *Loader) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{Created: l.created.Load(), Changed: l.changed.Load(), Existed: l.existed.Load(), Refused: l.refused.Load(),
		Retried: l.retried.Load(), Waiting: l.waiting}
}

// Run sends every edge of a kind, in batches, and returns when each has an answer. If edges yields
// an error, Run sends the edges before it and returns the error. A *RefusedError, or no success
// within RetryFor, ends Run at once. When ctx ends, Run takes no more edges, lets the requests in
// progress finish for up to 5 s, and returns the cause of ctx.
func (l *Loader) Run(ctx context.Context, k EdgeKind, edges iter.Seq2[Edge, error]) error {
	defer l.client.Close()
	return l.run(ctx, func(yield func(job, error) bool) {
		b := batch{kind: k}
		flush := func() bool {
			full := b
			b = batch{kind: k}
			put := func(ctx context.Context) (time.Duration, error) { return l.put(ctx, &full) }
			return len(full.edges) == 0 || yield(job{do: put}, nil)
		}
		for e, err := range edges {
			switch {
			case err != nil:
				if flush() {
					yield(job{}, err)
				}
				return
			case (len(b.edges) == maxEdges || b.bytes+len(e.Attributes) > maxBytes) && !flush():
				return
			}
			b.edges, b.bytes = append(b.edges, e), b.bytes+len(e.Attributes)
		}
		flush()
	})
}

// job is one request, or several that follow each other.
type job struct {
	after <-chan struct{} // the job waits until this is closed; nil: it does not wait
	do    func(ctx context.Context) (retryAfter time.Duration, err error)
}

func (l *Loader) run(ctx context.Context, jobs iter.Seq2[job, error]) error {
	l.progress.Store(int64(time.Since(l.start)))
	requests, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	g, gctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(gctx, func() { time.AfterFunc(stopTimeout, cancel) })()
	work := make(chan job, l.cfg.Concurrency)
	var readErr error
	g.Go(func() error {
		defer close(work)
		for j, err := range jobs {
			if err != nil {
				readErr = err
				return nil
			}
			select {
			case work <- j:
			case <-gctx.Done():
				return context.Cause(gctx)
			}
		}
		return nil
	})
	for range l.cfg.Concurrency {
		g.Go(func() error {
			for j := range work {
				if j.after != nil {
					select {
					case <-j.after:
					case <-gctx.Done():
						return context.Cause(gctx)
					}
				}
				if err := l.send(gctx, requests, j); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return readErr
}

// send does one job, and retries until it has an answer.
func (l *Loader) send(ctx, requests context.Context, j job) error {
	for attempt := 0; ; attempt++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		after, err := j.do(requests)
		var refused *RefusedError
		switch {
		case err == nil:
			l.progress.Store(int64(time.Since(l.start)))
			if attempt > 0 {
				l.setWaiting("")
			}
			return nil
		case errors.As(err, &refused):
			return err
		}
		l.setWaiting(err.Error())
		left := l.cfg.RetryFor - (time.Since(l.start) - time.Duration(l.progress.Load()))
		if left <= 0 {
			return fmt.Errorf("no request succeeded for %s: %w", l.cfg.RetryFor, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(min(max(after, backoff(attempt)), left)):
			l.retried.Add(1)
		}
	}
}

// backoff returns the time before the next attempt. It is random, so that workers do not all return
// at once.
func backoff(attempt int) time.Duration {
	d := min(firstBackoff<<min(attempt, 10), maxBackoff)
	return d/2 + rand.N(d)
}

func (l *Loader) setWaiting(why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = why
}

// batch has edges that the API has not answered yet.
type batch struct {
	kind  EdgeKind
	edges []Edge
	bytes int // of attributes
	limit int // edges per request, after the API refused more; 0: all
}

// outcome is the API's answer to one edge of a batch.
type outcome struct {
	Status  int
	Problem *client.Problem
}

// put sends the edges of a batch, and removes those that have an answer. Its errors are those of
// request.
func (l *Loader) put(ctx context.Context, b *batch) (after time.Duration, err error) {
	for len(b.edges) > 0 {
		n := min(len(b.edges), cmp.Or(b.limit, maxEdges))
		operations := make([]map[string]any, n)
		for i, e := range b.edges[:n] {
			operations[i] = map[string]any{"op": "put", b.kind.Ends[0]: e.From, b.kind.Ends[1]: e.To}
			if e.Attributes != "" {
				operations[i]["attributes"] = json.RawMessage(e.Attributes)
			}
		}
		var answer struct{ Items []outcome }
		resp, refused, after, err := l.request(ctx, http.MethodPost, "/v1/"+b.kind.Plural+":batch",
			map[string]any{"operations": operations}, &answer)
		switch {
		case err != nil:
			return after, err
		case resp.Status == http.StatusRequestEntityTooLarge && n > 1: // more than the token may write per window, or too long
			b.limit = n / 2
			continue
		case refused != nil:
			return 0, b.edges[0].refused(resp.Status, refused)
		case len(answer.Items) != n:
			return 0, fmt.Errorf("the API has %d answers to %d edges", len(answer.Items), n)
		}
		if err := l.settle(b, answer.Items); err != nil {
			return asked(err), err
		}
	}
	return 0, nil
}

// settle counts and removes the first edges of a batch, which have these outcomes. It keeps those
// to send again, and returns why.
func (l *Loader) settle(b *batch, outcomes []outcome) (err error) {
	var again []Edge
	for i, o := range outcomes {
		switch e := b.edges[i]; {
		case o.Status == http.StatusCreated:
			l.created.Add(1)
		case o.Problem == nil:
			l.existed.Add(1)
		case transient(o.Status):
			again, err = append(again, e), o.Problem
		default:
			return e.refused(o.Status, o.Problem)
		}
	}
	if len(again) < len(outcomes) {
		l.progress.Store(int64(time.Since(l.start)))
	}
	b.edges = append(again, b.edges[len(outcomes):]...)
	return err
}

func (e Edge) refused(status int, why error) error {
	return &RefusedError{Line: e.Line, What: fmt.Sprintf("%s -> %s", e.From, e.To), Status: status, Reason: reason(why)}
}

// request sends one request and decodes the answer into result. refused is the reason if the API
// refuses the request. err is a transient error; after is the time that the server wants the client
// to wait before a retry.
func (l *Loader) request(ctx context.Context, method, path string, body, result any, opts ...client.Option) (resp client.Response,
	refused error, after time.Duration, err error) {
	err = l.client.Call(ctx, method, path, body, result, append(opts, client.WithResponse(&resp))...)
	status := client.StatusOf(err)
	switch {
	case err == nil:
		return resp, nil, 0, nil
	case transient(status):
		return resp, nil, min(asked(err), maxRetryAfter), err
	}
	return resp, err, 0, nil
}

// transient reports whether a request with this status may succeed later. 0: there was no answer.
func transient(status int) bool {
	return status == 0 || status >= 500 || status == http.StatusTooManyRequests || status == http.StatusRequestTimeout
}

// asked returns how long the API asks the client to wait.
func asked(err error) time.Duration {
	var p *client.Problem
	var a *client.AnswerError
	switch {
	case errors.As(err, &p):
		return p.RetryAfter
	case errors.As(err, &a):
		return a.RetryAfter
	}
	return 0
}

func reason(refused error) string {
	var p *client.Problem
	if !errors.As(refused, &p) {
		return refused.Error()
	}
	return cmp.Or(p.Detail, p.Title) + " (" + string(p.Code) + ")"
}
