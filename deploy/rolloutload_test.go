//go:build upgrade

package deploy_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
)

// balancer sends requests to the APIs in turn, and counts the answers.
type balancer struct {
	transport http.RoundTripper
	mu        sync.Mutex
	apis      []string
	turn      int
	open      map[string]int // requests without an answer, by the API
	answers   map[string]int // 2xx, by the API
	failures  map[string]int // failures that no rollout may cause, by their text
	refused   int            // answers 503 and 429, which a client retries
}

func newBalancer() *balancer {
	return &balancer{transport: &http.Transport{MaxIdleConnsPerHost: 64}, open: map[string]int{}, answers: map[string]int{},
		failures: map[string]int{}}
}

func (b *balancer) add(api string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.apis = append(b.apis, api)
}

// remove stops new requests to an API, and waits until each request in flight has its answer
// (deregistration delay).
func (b *balancer) remove(t *testing.T, api string) {
	t.Helper()
	b.mu.Lock()
	b.apis = slices.DeleteFunc(b.apis, func(a string) bool { return a == api })
	b.mu.Unlock()
	testkit.Eventually(t, "the removed API to answer its requests", func() (bool, error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.open[api] == 0, nil
	})
}

func (b *balancer) served(api string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.answers[api]
}

// RoundTrip implements http.RoundTripper.
func (b *balancer) RoundTrip(req *http.Request) (*http.Response, error) {
	b.mu.Lock()
	api := b.apis[b.turn%len(b.apis)]
	b.turn++
	b.open[api]++
	b.mu.Unlock()
	to := req.Clone(req.Context())
	to.URL.Host = api
	resp, err := b.transport.RoundTrip(to)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[api]--
	switch {
	case err != nil:
		if req.Context().Err() == nil {
			b.failures[fmt.Sprintf("%s %s: %v", req.Method, req.URL.Path, err)]++
		}
	case resp.StatusCode == http.StatusServiceUnavailable || resp.StatusCode == http.StatusTooManyRequests:
		b.refused++
	case resp.StatusCode >= 500:
		b.failures[fmt.Sprintf("%s %s: %s", req.Method, req.URL.Path, resp.Status)]++
	case resp.StatusCode < 300:
		b.answers[api]++
	}
	return resp, err
}

// load is a group of people who write and read through the balancer until stop.
type load struct {
	t      *testing.T
	stop   func()
	steps  atomic.Int64
	people []*person
}

const peopleAtOnce = 8

func (r *rollout) load(token string) *load {
	ctx, cancel := context.WithCancel(r.t.Context())
	l := &load{t: r.t}
	var all sync.WaitGroup
	l.stop = sync.OnceFunc(func() { cancel(); all.Wait() })
	r.t.Cleanup(l.stop)
	for n := range int64(peopleAtOnce) {
		p := newPerson(r.t, r.balancer, token, n)
		l.people = append(l.people, p)
		all.Go(func() {
			for ctx.Err() == nil {
				if err := p.step(context.WithoutCancel(ctx)); err != nil { // a stop lets a step end
					r.t.Errorf("person %d: %v", n, err)
					return
				}
				l.steps.Add(1)
				select {
				case <-ctx.Done():
				case <-time.After(10 * time.Millisecond):
				}
			}
		})
	}
	return l
}

// continues waits until the people have done ten more steps each on average. It stops the test if
// one has failed.
func (l *load) continues() {
	l.t.Helper()
	begun := l.steps.Load()
	testkit.Eventually(l.t, "the people to continue",
		func() (bool, error) { return l.t.Failed() || l.steps.Load() >= begun+10*peopleAtOnce, nil })
	if l.t.Failed() {
		l.t.FailNow()
	}
}

var (
	edgeKinds  = []string{"follow", "like", "share", "membership"}
	childKinds = []string{"comment", "message", "review"}
)

type edge struct {
	kind     string
	from, to client.ID
}

// person writes as one user, reads those writes back, and remembers the state that they must leave.
type person struct {
	*client.Session
	rng      *rand.Rand
	n        int
	id       client.ID
	objects  int                     // the last object of this person; no other person writes to it
	edges    map[edge]bool           // true if the edge exists
	children map[string]client.Child // by id, as in the last answer
	kinds    map[string]string       // the kind of each child, by id
	ids      []string                // the children that can still change
}

func newPerson(t *testing.T, b *balancer, token string, n int64) *person {
	t.Helper()
	c, err := client.New("http://tidings.test", client.WithToken(token), client.WithHTTPClient(&http.Client{Transport: b}),
		client.WithRetry(client.Retry{Attempts: 30, First: 50 * time.Millisecond, Most: 2 * time.Second}))
	if err != nil {
		t.Fatal(err)
	}
	return &person{Session: c.Session(), rng: rand.New(rand.NewPCG(1, uint64(n))), n: int(n), id: client.IDOf(1 + n),
		objects: 1_000_000 * int(1+n), edges: map[edge]bool{}, children: map[string]client.Child{}, kinds: map[string]string{}}
}

// step does one random action.
func (p *person) step(ctx context.Context) error {
	switch n := p.rng.IntN(10); {
	case n < 4:
		return p.relate(ctx)
	case n < 7 || len(p.ids) == 0:
		return p.write(ctx)
	case n < 9:
		return p.change(ctx)
	default:
		return p.settings(ctx)
	}
}

// relate puts or removes an edge, and checks the list of its object.
func (p *person) relate(ctx context.Context) error {
	e := edge{edgeKinds[p.rng.IntN(len(edgeKinds))], p.id, client.IDOf(1_000_000*(1+p.n) + p.rng.IntN(20))}
	edges := p.Edges(e.kind)
	if p.edges[e] && p.rng.IntN(2) == 0 {
		if err := edges.Remove(ctx, e.from, e.to); err != nil {
			return fmt.Errorf("remove %v: %w", e, err)
		}
		p.edges[e] = false
	} else {
		if _, err := edges.Put(ctx, e.from, e.to); err != nil {
			return fmt.Errorf("put %v: %w", e, err)
		}
		p.edges[e] = true
	}
	page, err := edges.Reverse(e.to).First(ctx)
	if err != nil {
		return fmt.Errorf("read %v: %w", e, err)
	}
	if has := slices.ContainsFunc(page.Items, func(i client.Entry) bool { return i.Object == e.from }); has != p.edges[e] {
		return fmt.Errorf("the list has %v: %t, want %t as after the last write", e, has, p.edges[e])
	}
	return nil
}

// write creates a child and checks the list of its object. Half of the comments are replies.
func (p *person) write(ctx context.Context) error {
	kind := childKinds[p.rng.IntN(len(childKinds))]
	object, child := client.IDOf(p.objects), client.NewChild{AuthorID: p.id, Body: fmt.Sprintf("said by %s", p.id)}
	switch kind {
	case "review":
		p.objects++ // an author has one review per object
		object, child.Attributes = client.IDOf(p.objects), map[string]any{"rating": 1 + p.rng.IntN(5)}
	case "comment":
		for _, id := range p.ids {
			if was := p.children[id]; p.kinds[id] == kind && was.State == "VISIBLE" && p.rng.IntN(2) == 0 {
				object, child.ParentID = was.Object, id
				break
			}
		}
	}
	c, err := p.Children(kind).Create(ctx, object, child)
	if err != nil {
		return fmt.Errorf("write a %s of %s: %w", kind, object, err)
	}
	p.ids, p.children[c.ID], p.kinds[c.ID] = append(p.ids, c.ID), c, kind
	return p.seen(ctx, kind, c)
}

// seen checks the list of an object: a visible child has the body and version of the API's last
// answer. Any other child must not be visible there.
func (p *person) seen(ctx context.Context, kind string, c client.Child) error {
	page, err := p.Children(kind).List(c.Object, client.Order("newest"), client.PageSize(200)).First(ctx)
	if err != nil {
		return fmt.Errorf("list the %ss of %s: %w", kind, c.Object, err)
	}
	i := slices.IndexFunc(page.Items, func(o client.Child) bool { return o.ID == c.ID })
	switch {
	case c.State == "VISIBLE" && i < 0 && len(page.Items) < 200:
		return fmt.Errorf("the list of %s lacks the %s %s", c.Object, kind, c.ID)
	case c.State == "VISIBLE" && i >= 0 && (page.Items[i].Body != c.Body || page.Items[i].Version != c.Version):
		return fmt.Errorf("the list has the %s %s as %q, version %d; the API answered %q, version %d", kind, c.ID, page.Items[i].Body,
			page.Items[i].Version, c.Body, c.Version)
	case c.State != "VISIBLE" && i >= 0 && page.Items[i].State == "VISIBLE":
		return fmt.Errorf("the list has the %s %s as visible, but its state is %s", kind, c.ID, c.State)
	}
	return nil
}

// change edits, deletes or moderates a child.
func (p *person) change(ctx context.Context) error {
	i := p.rng.IntN(len(p.ids))
	id := p.ids[i]
	was, kind := p.children[id], p.kinds[id]
	children := p.Children(kind)
	var err error
	switch n := p.rng.IntN(4); {
	case n == 0:
		if err = children.Delete(ctx, was); err == nil {
			was.State, was.Body = "DELETED", ""
			was.Version++
			p.ids = slices.Delete(p.ids, i, i+1)
		}
	case n == 1 && kind == "comment":
		state := []string{"APPROVED", "HIDDEN", "REMOVED"}[p.rng.IntN(3)]
		if was, err = children.Moderate(ctx, was, client.Moderation{State: state}); state != "APPROVED" {
			p.ids = slices.Delete(p.ids, i, i+1)
		}
	default:
		was, err = children.Edit(ctx, was, client.ChildEdit{Body: fmt.Sprintf("said by %s, version %d", p.id, was.Version+1)})
	}
	if err != nil {
		return fmt.Errorf("change the %s %s: %w", kind, id, err)
	}
	p.children[id] = was
	return p.seen(ctx, kind, was)
}

// settings sets the title of a thread to which no other person writes.
func (p *person) settings(ctx context.Context) error {
	post := 2_000_000_001 + p.n
	comments := p.Children("comment")
	was, err := comments.Settings(ctx, event.IDOf(post))
	if err != nil {
		return fmt.Errorf("read the settings of %d: %w", post, err)
	}
	title := fmt.Sprintf("thread of %s, version %d", p.id, was.Version+1)
	if is, err := comments.PutSettings(ctx, was, client.NewSettings{Title: title}); err != nil || is.Title != title {
		return fmt.Errorf("set the title of %d: %q, %w", post, is.Title, err)
	}
	return nil
}

// equal compares everything that a person wrote with the answers of one API.
func (p *person) equal(ctx context.Context, c *client.Client) error {
	for e, there := range p.edges {
		_, err := c.Edges(e.kind).Get(ctx, e.from, e.to)
		if there && err != nil || !there && !client.IsNotFound(err) {
			return fmt.Errorf("%v should exist: %t, and the API answers %w", e, there, err)
		}
	}
	for id, was := range p.children {
		is, err := c.Children(p.kinds[id]).Get(ctx, id)
		if err != nil && !(client.IsGone(err) && was.State != "VISIBLE") {
			return fmt.Errorf("get the %s %s: %w", p.kinds[id], id, err)
		}
		if err == nil && (is.State != was.State || is.Version != was.Version || was.State == "VISIBLE" && is.Body != was.Body) {
			return fmt.Errorf("the %s %s is %+v, but the API answered %+v", p.kinds[id], id, is, was)
		}
	}
	return nil
}
