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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/client"
)

// Config says where to load, and how hard.
type Config struct {
	URL         string        // of the API, without a path
	Token       string        // with the role write
	Concurrency int           // requests at a time, 1..1024
	RetryFor    time.Duration // how long to go on when no request succeeds at all
}

// Validate reports every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	if !strings.HasPrefix(c.URL, "http://") && !strings.HasPrefix(c.URL, "https://") {
		errs = append(errs, fmt.Errorf("the API's address is %q: want http://HOST:PORT", c.URL))
	}
	if c.Token == "" {
		errs = append(errs, errors.New("there is no token"))
	}
	if c.Concurrency < 1 || c.Concurrency > 1024 {
		errs = append(errs, fmt.Errorf("concurrency is %d: want 1 to 1024", c.Concurrency))
	}
	if c.RetryFor < 0 {
		errs = append(errs, fmt.Errorf("retry-for is %s: want 0 or more", c.RetryFor))
	}
	return errors.Join(errs...)
}

// Stats is what a load has done so far.
type Stats struct {
	Created int64  // edges or children that were new (201)
	Changed int64  // changes of children and threads: edits, deletions, moderation, settings
	Existed int64  // what stood already; also where only the first answer was lost
	Refused int64  // what somebody else's changes do not allow any more (409), and the replies to it
	Retried int64  // requests that were sent again
	Waiting string // why requests are being retried now; empty while they succeed
}

// Done is how much of the load has been answered.
func (s Stats) Done() int64 { return s.Created + s.Changed + s.Existed + s.Refused }

// RefusedError reports a request that the API refuses, or all of them (a wrong token, a missing role). No retry can mend it.
type RefusedError struct {
	Line   int64  // of the input; 0 when it was generated
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
	requestTimeout = 30 * time.Second // then the connection is taken for dead
	stopTimeout    = 5 * time.Second  // for the requests in flight when the load is stopped
	firstBackoff   = 50 * time.Millisecond
	maxBackoff     = 2 * time.Second
	maxRetryAfter  = 30 * time.Second // whatever the server asks for
)

// Loader sends edges or children. Make one with New for each load.
type Loader struct {
	cfg    Config
	client *client.Client
	start  time.Time

	created, changed, existed, refused, retried atomic.Int64

	progress atomic.Int64 // when a request last succeeded, in nanoseconds after start
	mu       sync.Mutex
	waiting  string
}

// New checks cfg. It sends nothing.
func New(cfg Config) (*Loader, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	transport := &http.Transport{MaxIdleConns: cfg.Concurrency, MaxIdleConnsPerHost: cfg.Concurrency, Proxy: http.ProxyFromEnvironment, IdleConnTimeout: time.Minute}
	c, err := client.New(cfg.URL, client.WithToken(cfg.Token), client.WithHTTPClient(&http.Client{Transport: transport}),
		client.WithAttemptTimeout(requestTimeout), client.WithRetry(client.Retry{})) // a load has its own rule of how long to go on
	if err != nil {
		return nil, err
	}
	return &Loader{cfg: cfg, start: time.Now(), client: c}, nil
}

// Stats is safe to call while Run runs.
func (l *Loader) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{Created: l.created.Load(), Changed: l.changed.Load(), Existed: l.existed.Load(), Refused: l.refused.Load(),
		Retried: l.retried.Load(), Waiting: l.waiting}
}

// Run sends every edge of a kind and returns when all are answered. An error of edges ends it once those before are sent, and is
// returned. A *RefusedError, or no success within RetryFor, ends it at once. When ctx ends it takes no more edges, lets the
// requests in flight finish for a moment, and returns ctx's cause.
func (l *Loader) Run(ctx context.Context, k EdgeKind, edges iter.Seq2[Edge, error]) error {
	defer l.client.Close()
	return l.run(ctx, func(yield func(job, error) bool) {
		for e, err := range edges {
			if !yield(job{do: func(ctx context.Context) (time.Duration, error) { return l.put(ctx, k, e) }}, err) {
				return
			}
		}
	})
}

// job is one request.
type job struct {
	after <-chan struct{} // not before this is closed; nil for no such thing
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

// send does one job, again and again until it is answered.
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

// backoff is jittered, so that the workers do not all come back at once.
func backoff(attempt int) time.Duration {
	d := min(firstBackoff<<min(attempt, 10), maxBackoff)
	return d/2 + rand.N(d)
}

func (l *Loader) setWaiting(why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = why
}

// put sends one edge. Its errors are those of request.
func (l *Loader) put(ctx context.Context, k EdgeKind, e Edge) (after time.Duration, err error) {
	path := "/v1/" + k.Plural + "/" + strconv.FormatInt(e.From, 10) + "/" + strconv.FormatInt(e.To, 10)
	var attributes any
	if e.Attributes != "" {
		attributes = json.RawMessage(e.Attributes)
	}
	resp, refused, after, err := l.request(ctx, http.MethodPut, path, attributes, nil)
	switch {
	case err != nil:
		return after, err
	case refused != nil:
		return 0, &RefusedError{Line: e.Line, What: fmt.Sprintf("%d -> %d", e.From, e.To), Status: resp.Status, Reason: reason(refused)}
	case resp.Status == http.StatusCreated:
		l.created.Add(1)
	default:
		l.existed.Add(1)
	}
	return 0, nil
}

// request sends one request and decodes the answer into result. refused is why the API does not do it. Its errors may pass: after how long, the server may have
// said.
func (l *Loader) request(ctx context.Context, method, path string, body, result any, opts ...client.Option) (resp client.Response, refused error, after time.Duration, err error) {
	err = l.client.Call(ctx, method, path, body, result, append(opts, client.WithResponse(&resp))...)
	status := client.StatusOf(err)
	switch {
	case err == nil:
		return resp, nil, 0, nil
	case status == 0 || status >= 500 || status == http.StatusTooManyRequests || status == http.StatusRequestTimeout:
		return resp, nil, min(asked(err), maxRetryAfter), err
	}
	return resp, err, 0, nil
}

// asked is how long the API asks to wait.
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
