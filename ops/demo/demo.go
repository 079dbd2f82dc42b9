package demo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/ops/load"
)

// Config says where the site is and how busy it is.
type Config struct {
	URL   string  // the API's, without a path
	Token string  // with the roles read, write and moderate
	Rate  float64 // requests per second, 0.1..1000
	Users int     // 10..1,000,000
	Seed  uint64  // an equal seed makes equal choices if the answers arrive in the same order

	StopTimeout time.Duration // for the requests in progress when the site stops; 0: 2 s
}

// Validate returns an error that lists every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	if c.Rate < 0.1 || c.Rate > 1000 {
		errs = append(errs, fmt.Errorf("the rate is %g: want 0.1 to 1000 requests per second", c.Rate))
	}
	if c.Users < 10 || c.Users > 1_000_000 {
		errs = append(errs, fmt.Errorf("the number of users is %d: want 10 to 1,000,000", c.Users))
	}
	return errors.Join(errs...)
}

// Stats is the work of the site so far.
type Stats struct {
	Requests int64            `json:"requests"` // with an answer, also with a refusal
	Reads    int64            `json:"reads"`
	Did      map[string]int64 `json:"did"`               // writes by kind and act: "follow", "comment hidden"
	Refused  int64            `json:"refused"`           // requests that the API refused, because another writer changed the object
	Retried  int64            `json:"retried"`           // requests that were sent a second time
	Waiting  string           `json:"waiting,omitempty"` // why the API cannot be used now; empty if it can
	Last     string           `json:"last,omitempty"`    // the last write, as a sentence
}

// Writes returns the number of writes.
func (s Stats) Writes() (n int64) {
	for did := range maps.Values(s.Did) {
		n += did
	}
	return n
}

const (
	requestTimeout = 10 * time.Second
	stopTimeout    = 2 * time.Second
	perWorker      = 5 // requests per second for which one worker is planned
	maxWorkers     = 64
)

// edgeKind is a kind of edges with the schema of its attributes.
type edgeKind struct {
	client.EdgeKind
	attributes load.Schema
}

// childKind is a kind of children with the schema of its attributes.
type childKind struct {
	client.ChildKind
	attributes load.Schema
}

// Site is one run of the demo. Make one with New.
type Site struct {
	cfg     Config
	client  *client.Client
	traffic *traffic
	choices []choice

	mu sync.Mutex // guards the following
	*world
	stats Stats
}

// New validates cfg and returns a Site. It sends no request.
func New(cfg Config) (*Site, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	t := &traffic{next: &http.Transport{MaxIdleConnsPerHost: maxWorkers, Proxy: http.ProxyFromEnvironment, IdleConnTimeout: time.Minute}}
	c, err := client.New(cfg.URL, client.WithToken(cfg.Token), client.WithHTTPClient(&http.Client{Transport: t}),
		client.WithAttemptTimeout(requestTimeout),
		client.WithRetry(client.Retry{Attempts: 100, First: 100 * time.Millisecond, Most: 2 * time.Second}))
	if err != nil {
		return nil, err
	}
	s := &Site{cfg: cfg, client: c, traffic: t, world: newWorld(cfg)}
	s.stats.Did = make(map[string]int64)
	return s, nil
}

// Stats returns the current numbers. It is safe to call while Run runs.
func (s *Site) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.Did = maps.Clone(st.Did)
	st.Retried, st.Waiting = s.traffic.state()
	return st
}

// Run sends requests until ctx ends, and then returns nil; requests in progress have
// Config.StopTimeout to finish. While the API is unavailable it waits. It returns an error if the
// token is unknown or lacks a role.
func (s *Site) Run(ctx context.Context) error {
	defer s.client.Close()
	if err := s.learn(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	requests, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	g, gctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(gctx, func() { time.AfterFunc(cmp.Or(s.cfg.StopTimeout, stopTimeout), cancel) })()
	tick := time.NewTicker(time.Duration(float64(time.Second) / s.cfg.Rate)) // a tick is dropped if all workers are busy
	defer tick.Stop()
	for range min(1+int(s.cfg.Rate/perWorker), maxWorkers) {
		g.Go(func() error {
			for {
				select {
				case <-gctx.Done():
					return nil
				case <-tick.C:
				}
				if err := s.act(gctx, requests); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// learn reads the kinds from the API.
func (s *Site) learn(ctx context.Context) error {
	all, err := s.client.Kinds(ctx)
	if err != nil {
		return fmt.Errorf("read the kinds of the API: %w", err)
	}
	var edges []edgeKind
	var children []childKind
	for _, k := range all.Edges {
		e := edgeKind{EdgeKind: k}
		if err := schema(k.Attributes, &e.attributes); err != nil {
			return fmt.Errorf("the attributes of %s: %w", k.Name, err)
		}
		edges = append(edges, e)
	}
	for _, k := range all.Children {
		c := childKind{ChildKind: k}
		if err := schema(k.Attributes, &c.attributes); err != nil {
			return fmt.Errorf("the attributes of %s: %w", k.Name, err)
		}
		children = append(children, c)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range all.Objects {
		s.ids[o.Name] = o.ID
	}
	s.settle(edges, children)
	return nil
}

func schema(text json.RawMessage, to *load.Schema) error {
	if len(text) == 0 {
		return nil
	}
	return json.Unmarshal(text, to)
}

// act runs the next act, and counts its outcome.
func (s *Site) act(ctx, requests context.Context) error {
	s.mu.Lock()
	a := s.next()
	s.mu.Unlock()
	err := a.do(requests)
	s.mu.Lock()
	defer s.mu.Unlock()
	status := client.StatusOf(err)
	switch {
	case ctx.Err() != nil && err != nil:
		return nil
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return err
	case err != nil:
		s.stats.Refused++
	case a.did == "":
		s.stats.Reads++
	default:
		s.stats.Did[a.did]++
		s.stats.Last = a.says
	}
	s.stats.Requests++
	return nil
}

// newRand returns the site's source of random numbers.
func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0x6465_6d6f_6465_6d6f)) }

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
