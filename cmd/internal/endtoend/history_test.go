package endtoend_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/projections/threadcache"
)

// A history is what several callers of the API asked and what they were answered, each with its
// time. A checker that is not part of this project (github.com/anishathalye/porcupine) searches for
// an order of the calls that explains it: each call takes effect at one moment between its question
// and its answer. A write without a clear answer may take effect at any later moment, or never.

// deed is what a call does to its entity, or reads of it.
type deed string

const (
	put     deed = "put"     // an edge
	drop    deed = "drop"    // removes an edge
	edit    deed = "edit"    // of a child at a version
	add     deed = "add"     // one more to a count
	stored  deed = "stored"  // a read of the tables that the API writes
	list    deed = "list"    // a read of a list or count
	past    deed = "past"    // a read of the recorded versions
	current deed = "current" // the time up to which an answer is complete
)

// views are the reads of projections. Each follows the truth at its own pace.
const views = 2

func (d deed) view() int {
	if d == past {
		return 1
	}
	return 0
}

// asked is the question of a call about one entity.
type asked struct {
	deed  deed
	match int64  // of an If-Match; of a removal, the version that the caller knew
	body  string // the new one
	fresh bool   // with tokens
	floor int64  // the answer must include this version
}

// told is the answer.
type told struct {
	unknown bool // it may have happened or not
	status  int
	version int64 // 0: the answer says only whether there is one
	present bool
	body    string
}

// register is the state of an entity: its versions, and how many of them each view has shown.
type register struct {
	version int64
	bodies  string // of the versions from 1 on, one per line; edges have none
	shown   [views]int64
}

func (r register) active() bool { return r.version%2 == 1 } // of an edge, which is put and removed in turns

func (r register) write(body string) register {
	r.version++
	r.bodies += body + "\n"
	return r
}

func (r register) body(version int64) string {
	all := strings.Split(r.bodies, "\n")
	if version < 1 || version > int64(len(all)) {
		return ""
	}
	return all[version-1]
}

// read reports whether a view may give the answer, and the state after it. A read with tokens may
// be ahead of the view.
func (r register) read(in asked, out told) (bool, register) {
	version, view := out.version, in.deed.view()
	if version == 0 { // the oldest version that explains the answer: it allows the most later answers
		version = max(in.floor, r.shown[view])
		if (version%2 == 1) != out.present {
			version++
		}
	}
	if version < in.floor || version < r.shown[view] || version > r.version || out.body != "" && out.body != r.body(version) {
		return false, r
	}
	if !in.fresh {
		r.shown[view] = version
	}
	return true, r
}

// step is one call of an entity: whether the state allows the answer, and the state after it.
func step(state, input, output any) (bool, any) {
	r, in, out := state.(register), input.(asked), output.(told)
	switch in.deed {
	case put:
		if !r.active() {
			r = r.write("")
			return out.unknown || out.status == http.StatusCreated && out.version == r.version, r
		}
		return out.unknown || out.status == http.StatusOK && out.version == r.version, r
	case drop:
		if r.active() { // follows have no attributes, and no If-Match
			r = r.write("")
		}
		return out.unknown || out.status == http.StatusNoContent, r
	case edit:
		if r.version == in.match {
			r = r.write(in.body)
			return out.unknown || out.status == http.StatusOK && out.version == r.version && out.body == in.body, r
		}
		return out.unknown || out.status == http.StatusPreconditionFailed && out.version == r.version, r
	case add:
		return out.unknown || out.status == http.StatusCreated, r.write("")
	case stored:
		if out.version == 0 {
			return !r.active(), r
		}
		return out.version == r.version && (out.body == "" || out.body == r.body(r.version)), r
	case current: // its state is the last time
		ok := out.version >= r.version
		r.version = out.version
		return ok, r
	}
	ok, r := r.read(in, out)
	return ok, r
}

// recorder collects the calls of all callers.
type recorder struct {
	began time.Time
	posts []string // the comments

	mu     sync.Mutex
	calls  map[string][]porcupine.Operation // by entity
	open   map[string]int                   // writes without a clear answer, by entity
	times  map[string][]when                // of what was certainly committed, by entity
	tokens int                              // reads with tokens
}

// when is the moment at which a version was certainly committed.
type when struct {
	at      time.Time
	version int64
}

// never is the end of a call without a clear answer.
const never = math.MaxInt64

// keep records a call. asOf is the time up to which the answer is complete; zero if it says none.
func (r *recorder) keep(entity string, caller int, from time.Time, in asked, out told, asOf time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	end := now.Sub(r.began).Nanoseconds()
	if out.unknown {
		end = never
		r.open[entity]++
	}
	for _, w := range r.times[entity] {
		if !asOf.IsZero() && !w.at.After(asOf) {
			in.floor = max(in.floor, w.version)
		}
	}
	switch { // a count has the number of answered writes
	case in.deed == add && !out.unknown:
		r.times[entity] = append(r.times[entity], when{now, int64(len(r.times[entity]) + 1)})
	case out.version > 0 && out.status < 300 && (in.deed == put || in.deed == edit || in.deed == stored):
		r.times[entity] = append(r.times[entity], when{now, out.version})
	}
	if in.fresh {
		r.tokens++
	}
	r.calls[entity] = append(r.calls[entity], porcupine.Operation{ClientId: caller, Input: in, Output: out,
		Call: from.Sub(r.began).Nanoseconds(), Return: end})
}

// unclear is the number of writes of an entity whose outcome nobody knows. Each doubles the work of
// the checker.
func (r *recorder) unclear(entity string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.open[entity]
}

// check lets the checker judge the history of each entity.
func (r *recorder) check(t *testing.T) {
	t.Helper()
	reads, writes := 0, 0
	for entity, calls := range r.calls {
		first := register{}
		if slices.Contains(r.posts, entity) {
			first = first.write("0")
		}
		m := porcupine.Model{Init: func() any { return first }, Step: step}
		if got := porcupine.CheckOperationsTimeout(m, calls, time.Minute); got != porcupine.Ok {
			t.Errorf("%s: %s: no order explains these calls:\n%s", entity, got, describe(calls))
		}
		for _, c := range calls {
			switch c.Input.(asked).deed {
			case put, drop, edit, add:
				writes++
			default:
				reads++
			}
		}
	}
	t.Logf("%d entities, %d writes, %d reads, %d of them with tokens, %d writes of unknown outcome", len(r.calls), writes, reads, r.tokens,
		sum(r.open))
	if r.tokens == 0 {
		t.Error("no read had a token")
	}
}

func sum(all map[string]int) (n int) {
	for _, one := range all {
		n += one
	}
	return n
}

// describe lists calls in the order of their beginnings.
func describe(calls []porcupine.Operation) string {
	calls = slices.Clone(calls)
	slices.SortFunc(calls, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var b strings.Builder
	for _, c := range calls {
		began, ended := float64(c.Call)/1e6, float64(min(c.Return, 1e12))/1e6
		fmt.Fprintf(&b, "%9.3f-%9.3f ms, caller %d: %+v -> %+v\n", began, ended, c.ClientId, c.Input,
			c.Output)
	}
	return b.String()
}

// Ids of the entities of a history.
const (
	liked    = 1 // users follow this one, and leave it again
	counted  = 2 // users follow this one, and stay
	pairs    = 4 // of edges at once
	written  = 6 // comments
	mostOpen = 4 // writes of unknown outcome of one entity, before the callers take another one
)

// caller calls the API and records it.
type caller struct {
	client
	r    *recorder
	n    int
	rng  *rand.Rand
	seen map[string]told   // the newest state that it knows, by entity
	own  map[string]string // tokens of its writes, by entity
	fans int
}

// name returns the entity that the callers use in place of the i-th one.
func (c *caller) pair(i int) (follower int, path string) {
	for follower = 10 + i; ; follower += pairs {
		if path = fmt.Sprintf("/v1/follows/%d/%d", follower, liked); c.r.unclear(path) < mostOpen {
			return follower, path
		}
	}
}

// send calls, and turns the answer into what the checker needs.
func (c *caller) send(entity, method, path, body string, in asked, headers ...string) (told, bool) {
	from := time.Now()
	a := c.call(method, path, body, headers...)
	out := told{status: a.status, unknown: a.status >= 500}
	if out.unknown && method == http.MethodGet {
		return out, false
	}
	if a.status == http.StatusTooManyRequests {
		return out, false // refused before anything happened
	}
	var state struct {
		Version int64
		Body    string
		Current struct {
			Version int64
		}
	}
	if a.status != http.StatusNoContent && !out.unknown {
		if err := json.Unmarshal(a.body, &state); err != nil {
			return out, false
		}
	}
	out.version, out.body, out.present = max(state.Version, state.Current.Version), state.Body, a.status < 300
	c.r.keep(entity, c.n, from, in, out, time.Time{})
	if token := a.header.Get("Tidings-Token"); token != "" && a.status < 300 {
		c.own[entity] = token
		c.seen[entity] = told{version: out.version}
		if in.deed == drop { // or a later one
			c.seen[entity] = told{version: in.match + 1}
		}
	}
	return out, true
}

// step makes one call.
func (c *caller) step() error {
	follower, path := c.pair(c.rng.IntN(pairs))
	comment := c.r.posts[c.rng.IntN(len(c.r.posts))]
	switch n := c.rng.IntN(16); {
	case n < 2:
		c.send(path, http.MethodPut, path, "", asked{deed: put})
	case n < 4:
		if at, ok := c.send(path, http.MethodGet, path, "", asked{deed: stored}); ok && at.version > 0 && c.r.unclear(path) < mostOpen {
			c.send(path, http.MethodDelete, path, "", asked{deed: drop, match: at.version})
		}
	case n < 7:
		at, ok := c.send(comment, http.MethodGet, "/v1/comments/"+comment, "", asked{deed: stored})
		if ok && c.r.unclear(comment) < mostOpen {
			in := asked{deed: edit, match: at.version, body: fmt.Sprintf("%d of caller %d", time.Since(c.r.began).Nanoseconds(), c.n)}
			c.send(comment, http.MethodPatch, "/v1/comments/"+comment, fmt.Sprintf(`{"body":%q}`, in.body), in,
				fmt.Sprintf(`If-Match: "%d"`, at.version))
		}
	case n < 8:
		if c.fans < 50 && c.r.unclear("count") < 2*mostOpen {
			c.fans++
			c.fan(fmt.Sprintf("/v1/follows/%d/%d", 1000*(c.n+1)+c.fans, counted))
		}
	case n < 10:
		return c.past(comment)
	case n < 12:
		return c.count()
	case n < 14:
		return c.comments()
	default:
		return c.followers(follower, path)
	}
	return nil
}

// fan is one more follower of the user whose followers are counted.
func (c *caller) fan(path string) {
	from := time.Now()
	a := c.call(http.MethodPut, path, "")
	c.r.keep("count", c.n, from, asked{deed: add}, told{status: a.status, unknown: a.status >= 500}, time.Time{})
	if token := a.header.Get("Tidings-Token"); token != "" && a.status < 300 {
		c.own["fan "+path] = token
	}
}

// tokens returns the header with the tokens of the caller's writes whose names begin with prefix,
// for every second read.
func (c *caller) tokens(prefix string) (header []string, of []string) {
	if c.rng.IntN(2) == 0 {
		return nil, nil
	}
	var all []string
	for name, token := range c.own {
		if strings.HasPrefix(name, prefix) {
			all, of = append(all, token), append(of, name)
		}
	}
	if len(all) == 0 || len(all) > 60 {
		return nil, nil
	}
	return []string{"Tidings-Token: " + strings.Join(all, ",")}, of
}

// get reads from a projection, and records that as_of never decreases.
func (c *caller) get(path string, headers []string, into any) (from, asOf time.Time, ok bool, err error) {
	from = time.Now()
	a := c.call(http.MethodGet, path, "", headers...)
	if a.status >= 500 || a.status == http.StatusTooManyRequests {
		return from, asOf, false, nil
	}
	if a.status != http.StatusOK {
		return from, asOf, false, fmt.Errorf("GET %s: %d %s", path, a.status, a.body)
	}
	var body struct {
		AsOf time.Time `json:"as_of"`
	}
	if err := json.Unmarshal(a.body, &body); err != nil {
		return from, asOf, false, err
	}
	if err := json.Unmarshal(a.body, into); err != nil {
		return from, asOf, false, err
	}
	if len(headers) == 0 {
		c.r.keep("as_of "+path, c.n, from, asked{deed: current}, told{status: a.status, version: body.AsOf.UnixNano()}, time.Time{})
	}
	return from, body.AsOf, true, nil
}

func (c *caller) count() error {
	headers, of := c.tokens("fan ")
	var body struct{ Followers int64 }
	from, asOf, ok, err := c.get(fmt.Sprintf("/v1/users/%d/counts", counted), headers, &body)
	if ok {
		c.r.keep("count", c.n, from, asked{deed: list, fresh: of != nil, floor: int64(len(of))}, told{status: http.StatusOK,
			version: body.Followers, present: body.Followers%2 == 1}, asOf)
	}
	return err
}

func (c *caller) followers(follower int, path string) error {
	headers, of := c.tokens("/v1/follows/")
	var body page[edge]
	from, asOf, ok, err := c.get(fmt.Sprintf("/v1/users/%d/followers?limit=200", liked), headers, &body)
	if !ok {
		return err
	}
	in := asked{deed: list, fresh: of != nil}
	if slices.Contains(of, path) {
		in.floor = c.seen[path].version
	}
	there := slices.ContainsFunc(body.Items, func(e edge) bool { return e.User == fmt.Sprint(follower) })
	c.r.keep(path, c.n, from, in, told{status: http.StatusOK, present: there}, asOf)
	return nil
}

func (c *caller) comments() error {
	headers, of := c.tokens(c.r.posts[0][:8]) // the ids have the same beginning
	var body page[comment]
	from, asOf, ok, err := c.get("/v1/posts/1/comments?limit=200", headers, &body)
	if !ok {
		return err
	}
	if len(body.Items) != len(c.r.posts) {
		return fmt.Errorf("a list of %d comments, want %d", len(body.Items), len(c.r.posts))
	}
	for _, one := range body.Items {
		in := asked{deed: list, fresh: of != nil}
		if slices.Contains(of, one.ID) {
			in.floor = c.seen[one.ID].version
		}
		c.r.keep(one.ID, c.n, from, in, told{status: http.StatusOK, version: one.Version, body: one.Body}, asOf)
	}
	return nil
}

// past reads the recorded versions of a comment. They begin with the newest and have no gap.
func (c *caller) past(id string) error {
	var body page[struct {
		Version int64
		Comment struct{ Body string }
	}]
	from, asOf, ok, err := c.get("/v1/comments/"+id+"/versions?limit=200", nil, &body)
	if !ok || len(body.Items) == 0 {
		return err
	}
	for i, v := range body.Items {
		if v.Version != body.Items[0].Version-int64(i) {
			return fmt.Errorf("the versions of %s: %d follows %d", id, v.Version, body.Items[i-1].Version)
		}
	}
	c.r.keep(id, c.n, from, asked{deed: past}, told{status: http.StatusOK, version: body.Items[0].Version,
		body: body.Items[0].Comment.Body}, asOf)
	return nil
}

// histories records what several callers are answered while disturb runs, and checks it.
func histories(t *testing.T, seed uint64, start func(*testing.T, *rand.Rand) *line, disturb func(l *line, calls func() int)) {
	const callers = 6
	l := start(t, rand.New(rand.NewPCG(seed, 0)))
	token, err := tokens.Create(t.Context(), l.system, 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	c := client{ctx: t.Context(), handler: l.handler, token: token}
	l.clients = []client{{}, c}
	r := &recorder{began: time.Now(), calls: map[string][]porcupine.Operation{}, open: map[string]int{}, times: map[string][]when{}}
	for range written {
		a := c.call(http.MethodPost, "/v1/posts/1/comments", `{"author_id":"1","body":"0"}`)
		var made comment
		if err := json.Unmarshal(a.body, &made); err != nil || a.status != http.StatusCreated {
			t.Fatalf("%d %s, %v", a.status, a.body, err)
		}
		r.posts = append(r.posts, made.ID)
	}
	l.settle()

	made, stop := make([]int, callers), make(chan struct{})
	var mu sync.Mutex
	var wg sync.WaitGroup
	for n := range callers {
		rng := rand.New(rand.NewPCG(seed, uint64(n+1)))
		one := &caller{client: c, r: r, n: n, rng: rng, seen: map[string]told{}, own: map[string]string{}}
		wg.Go(func() {
			tick := time.NewTicker(4 * time.Millisecond)
			defer tick.Stop()
			for {
				if err := one.step(); err != nil {
					l.failed.Store(true)
					t.Errorf("caller %d: %v", n, err)
					return
				}
				mu.Lock()
				made[n]++
				mu.Unlock()
				select {
				case <-stop:
					return
				case <-tick.C:
				}
			}
		})
	}
	disturb(l, func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, one := range made {
			n += one
		}
		return n
	})
	close(stop)
	wg.Wait()
	l.settle()
	final := &caller{client: c, r: r, n: callers, rng: rand.New(rand.NewPCG(seed, 0)), seen: map[string]told{}, own: map[string]string{}}
	for _, read := range []func() error{final.count, final.comments} {
		if err := read(); err != nil {
			t.Error(err)
		}
	}
	r.check(t)
}

// more waits for so many calls.
func (l *line) more(n int, calls func() int) {
	l.t.Helper()
	at := calls()
	testkit.Eventually(l.t, "calls of the API", func() (bool, error) { return l.failed.Load() || calls() >= at+n, nil })
}

func TestAnOrderExplainsWhatTheAPIAnswers(t *testing.T) {
	t.Parallel()
	seed, _ := testkit.Seed(t)
	histories(t, seed, newLine, func(l *line, calls func() int) {
		l.more(300, calls)
		by := consumers.Paused{Actor: "test", Reason: "a history"}
		if _, err := consumers.Pause(t.Context(), l.system, threadcache.Name, by); err != nil {
			t.Fatal(err)
		}
		l.more(300, calls)
		if _, err := consumers.Resume(t.Context(), l.system, threadcache.Name); err != nil {
			t.Fatal(err)
		}
		l.more(300, calls)
	})
}
