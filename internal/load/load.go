package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
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
	Created int64  // follows that were new (201)
	Existed int64  // follows that stood already (200); also those whose first answer was lost
	Retried int64  // requests that were sent again
	Waiting string // why requests are being retried now; empty while they succeed
}

// Edges is how many edges have been answered.
func (s Stats) Edges() int64 { return s.Created + s.Existed }

// RefusedError reports an edge that the API refuses, or all of them (a wrong token, a missing role). No retry can mend it.
type RefusedError struct {
	Edge   Edge
	Status int
	Reason string // of the problem details
}

func (e *RefusedError) Error() string {
	where := ""
	if e.Edge.Line > 0 {
		where = fmt.Sprintf("line %d: ", e.Edge.Line)
	}
	return fmt.Sprintf("%sthe API refuses %d -> %d with %d: %s", where, e.Edge.From, e.Edge.To, e.Status, e.Reason)
}

const (
	requestTimeout = 30 * time.Second // then the connection is taken for dead
	stopTimeout    = 5 * time.Second  // for the requests in flight when the load is stopped
	firstBackoff   = 50 * time.Millisecond
	maxBackoff     = 2 * time.Second
	maxRetryAfter  = 30 * time.Second // whatever the server asks for
)

// Loader sends edges. Make one with New for each load.
type Loader struct {
	cfg    Config
	client *http.Client
	start  time.Time

	created, existed, retried atomic.Int64
	progress                  atomic.Int64 // when a request last succeeded, in nanoseconds after start
	mu                        sync.Mutex
	waiting                   string
}

// New checks cfg. It sends nothing.
func New(cfg Config) (*Loader, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.URL = strings.TrimRight(cfg.URL, "/")
	return &Loader{cfg: cfg, start: time.Now(), client: &http.Client{
		Transport: &http.Transport{MaxIdleConns: cfg.Concurrency, MaxIdleConnsPerHost: cfg.Concurrency, Proxy: http.ProxyFromEnvironment,
			IdleConnTimeout: time.Minute},
		Timeout:       requestTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // a PUT is not to become a GET
	}}, nil
}

// Stats is safe to call while Run runs.
func (l *Loader) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{Created: l.created.Load(), Existed: l.existed.Load(), Retried: l.retried.Load(), Waiting: l.waiting}
}

// Run sends every edge and returns when all are answered. An error of edges ends it once those before are sent, and is
// returned. A *RefusedError, or no success within RetryFor, ends it at once. When ctx ends it takes no more edges, lets the
// requests in flight finish for a moment, and returns ctx's cause.
func (l *Loader) Run(ctx context.Context, edges iter.Seq2[Edge, error]) error {
	defer l.client.CloseIdleConnections()
	l.progress.Store(int64(time.Since(l.start)))
	requests, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	g, gctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(gctx, func() { time.AfterFunc(stopTimeout, cancel) })()
	work := make(chan Edge, l.cfg.Concurrency)
	var readErr error
	g.Go(func() error {
		defer close(work)
		for e, err := range edges {
			if err != nil {
				readErr = err
				return nil
			}
			select {
			case work <- e:
			case <-gctx.Done():
				return context.Cause(gctx)
			}
		}
		return nil
	})
	for range l.cfg.Concurrency {
		g.Go(func() error {
			for e := range work {
				if err := l.send(gctx, requests, e); err != nil {
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

// send puts one edge, again and again until it is answered.
func (l *Loader) send(ctx, requests context.Context, e Edge) error {
	for attempt := 0; ; attempt++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		after, err := l.put(requests, e)
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

// put sends one request. It returns a *RefusedError where no retry helps; any other error may pass, and the server may have
// said after how long.
func (l *Loader) put(ctx context.Context, e Edge) (after time.Duration, err error) {
	url := l.cfg.URL + "/v1/follows/" + strconv.FormatInt(e.From, 10) + "/" + strconv.FormatInt(e.To, 10)
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, url, nil)
	if err != nil {
		return 0, fmt.Errorf("make a request: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+l.cfg.Token)
	resp, err := l.client.Do(req)
	if err != nil {
		return 0, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // read to its end, so that the connection is used again
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return 0, fmt.Errorf("read the answer: %w", err)
	}
	switch {
	case resp.StatusCode == http.StatusCreated:
		l.created.Add(1)
		return 0, nil
	case resp.StatusCode == http.StatusOK:
		l.existed.Add(1)
		return 0, nil
	case resp.StatusCode >= 500, resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode == http.StatusRequestTimeout:
		return retryAfter(resp.Header.Get("Retry-After")), fmt.Errorf("the API answers %s", resp.Status)
	}
	return 0, &RefusedError{Edge: e, Status: resp.StatusCode, Reason: reason(resp, body)}
}

// retryAfter reads the header of that name (RFC 9110, section 10.2.3): seconds, or a date.
func retryAfter(value string) time.Duration {
	if s, err := strconv.Atoi(value); err == nil {
		return min(time.Duration(max(s, 0))*time.Second, maxRetryAfter)
	}
	if t, err := http.ParseTime(value); err == nil {
		return min(time.Until(t), maxRetryAfter)
	}
	return 0
}

func reason(resp *http.Response, body []byte) string {
	var p struct{ Title, Detail, Code string }
	if err := json.Unmarshal(body, &p); err != nil || p.Title+p.Detail+p.Code == "" {
		return fmt.Sprintf("%s %.200q", http.StatusText(resp.StatusCode), body)
	}
	if p.Detail == "" {
		p.Detail = p.Title
	}
	if p.Code == "" {
		return p.Detail
	}
	return p.Detail + " (" + p.Code + ")"
}
