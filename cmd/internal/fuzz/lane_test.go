package fuzz_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"reflect"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// lane is the client of one tenant, with the model of its writes. One goroutine uses it.
type lane struct {
	*rig
	ctx      context.Context
	tenant   int64
	seed     uint64
	dice     *rand.PCG // the source of rng
	rng      *rand.Rand
	m        *model
	all      string     // a token with every role
	reader   string     // a token of the role read
	kinds    *kinds.Set // the kinds of the installation
	steps    int
	writes   int            // counts writes, to number the actors
	tokens   []given        // of writes, newest last
	cursors  []cursor       // of pages, newest last
	seen     int64          // the outbox id of the last event that the lane read
	requests *atomic.Int64  // includes requests of reads that run beside others
	did      map[string]int // number of steps by name
	acting   string         // the actor of the write whose answer the lane compares
	sent     map[authorKey]newChild
	record   *record // answers to compare a second time, or nil
}

// given is a token with the writes that it names.
type given struct {
	row     any
	version int64
	token   string
}

// answer is the answer to a request.
type answer struct {
	request string
	status  int
	header  http.Header
	body    []byte
	json    map[string]any
}

func (a answer) code() string { s, _ := a.json["code"].(string); return s }

// mark is part of every text of a tenant.
func (l *lane) mark() string { return fmt.Sprintf("@t%d@", l.tenant) }

var marks = regexp.MustCompile(`@t\d+@`)

// actor returns a new actor for the next write.
func (l *lane) actor() string {
	l.writes++
	return fmt.Sprintf("%s %d", l.mark(), l.writes)
}

// call makes a request to a random API process. Headers are "Name: value"; a header without a value
// is removed. It checks everything that holds for every answer. After a documented 503, which means
// that the API did nothing, it tries again. A read with tokens gets one if the lane itself keeps
// the projection's rows for too long.
func (l *lane) call(method, path, body string, headers ...string) (answer, error) {
	return l.record.play(func() (answer, error) { return l.try(method, path, body, headers...) })
}

func (l *lane) try(method, path, body string, headers ...string) (answer, error) {
	for try := 0; ; try++ {
		a, err := l.once(method, path, body, headers...)
		reads := method == http.MethodGet || strings.HasSuffix(path, ":check") || strings.HasSuffix(path, ":count")
		again := a.status == http.StatusServiceUnavailable &&
			(a.code() == "thread-returning" || a.code() == "overloaded" || a.code() == "unavailable" && reads)
		if err != nil || !again || try == 20 {
			return a, err
		}
		if a.header.Get("Retry-After") == "" {
			return a, fmt.Errorf("%s: a 503 without Retry-After", a.request)
		}
		l.refused.Add(1)
		if err := l.pause(); err != nil {
			return a, err
		}
	}
}

// pause waits for a moment.
func (l *lane) pause() error {
	select {
	case <-l.ctx.Done():
		return l.ctx.Err()
	case <-time.After(50 * time.Millisecond):
		return nil
	}
}

func (l *lane) once(method, path, body string, headers ...string) (answer, error) {
	n := l.requests.Add(1)
	l.total.Add(1)
	r, err := http.NewRequestWithContext(l.ctx, method, l.urls[int(n)%len(l.urls)]+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	r.Header.Set("Authorization", "Bearer "+l.all)
	id := fmt.Sprintf("lane-%d-%d", l.tenant, n)
	r.Header.Set("X-Request-Id", id)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for _, h := range headers {
		name, value, found := strings.Cut(h, ": ")
		if !found {
			r.Header.Del(name)
			continue
		}
		r.Header[http.CanonicalHeaderKey(name)] = []string{value}
	}
	resp, err := l.client.Do(r)
	if err != nil {
		return answer{}, fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer resp.Body.Close()
	a := answer{request: fmt.Sprintf("%s %s %.300s %q", method, path, body, headers), status: resp.StatusCode, header: resp.Header}
	if a.body, err = io.ReadAll(resp.Body); err != nil {
		return a, fmt.Errorf("%s: %w", a.request, err)
	}
	if got := resp.Header.Get("X-Request-Id"); got != id {
		return a, fmt.Errorf("%s: X-Request-Id is %q, want %q", a.request, got, id)
	}
	return a, l.checkAnswer(&a)
}

// checkAnswer checks everything that holds for every answer.
func (l *lane) checkAnswer(a *answer) error {
	for _, text := range []string{string(a.body), fmt.Sprint(a.header)} {
		for _, found := range marks.FindAllString(text, -1) {
			if found != l.mark() {
				return fmt.Errorf("%s: another tenant's text, %s: %d %s %v", a.request, found, a.status, a.body, a.header)
			}
		}
	}
	kind := a.header.Get("Content-Type")
	if strings.Contains(kind, "json") && !strings.Contains(kind, "ndjson") {
		if err := json.Unmarshal(a.body, &a.json); err != nil {
			return fmt.Errorf("%s: %d %q: %w", a.request, a.status, a.body, err)
		}
	}
	switch {
	case a.status >= 500 && a.status != http.StatusServiceUnavailable:
		return fmt.Errorf("%s: %d %s", a.request, a.status, a.body)
	case a.status >= 400 && (kind != "application/problem+json" || a.json["status"] != float64(a.status) ||
		a.json["request_id"] != a.header.Get("X-Request-Id") || a.code() == ""):
		return fmt.Errorf("%s: %d is no problem: %s %s", a.request, a.status, kind, a.body)
	case (a.status == http.StatusNoContent || a.status == http.StatusNotModified) && len(a.body) > 0:
		return fmt.Errorf("%s: %d with a body: %s", a.request, a.status, a.body)
	case a.header.Get("Cache-Control") != "private, no-cache" || a.header.Get("Vary") != "Authorization":
		return fmt.Errorf("%s: %v", a.request, a.header)
	}
	return nil
}

// differ returns an error with the difference between the expected and the received value.
func differ(a answer, want, got any) error {
	if reflect.DeepEqual(want, got) {
		return nil
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		return fmt.Errorf("%s: %d (-want +got):\n%s", a.request, a.status, diff)
	}
	return nil
}

// expect compares status and code.
func (a answer) expect(status int, code string) error {
	if a.status != status || a.code() != code {
		return fmt.Errorf("%s: %d %s %.2000s, want %d %s", a.request, a.status, a.code(), a.body, status, code)
	}
	return nil
}

// get makes a GET that must succeed with 200.
func (l *lane) get(path string, headers ...string) (answer, error) {
	a, err := l.call(http.MethodGet, path, "", headers...)
	if err == nil {
		err = a.expect(http.StatusOK, "")
	}
	return a, err
}

func pick[T any](l *lane, of ...T) T { return of[l.rng.IntN(len(of))] }

// chance returns true once in n calls on average.
func (l *lane) chance(n int) bool { return l.rng.IntN(n) == 0 }

// There are few ids, the same for every tenant, so that requests meet. They have all forms of ids.
func (l *lane) user() event.ID {
	return pick(l, event.ID("1"), "2", "3", "4", "10", "auth0|5f7c-12", "a.b@example.com", "0197a2b4-5f0e-4d3a-9a51-000000000007")
}
func (l *lane) object() event.ID {
	return pick(l, event.ID("1"), "1", "1", "2", "post:3", "0197a2b4-5f0e-4d3a-9a51-000000000007")
}

func (l *lane) text(what string) string {
	pad := ""
	if l.chance(20) {
		pad = strings.Repeat("x", l.rng.IntN(2000))
	}
	return fmt.Sprintf("%s %s %d 😀 \"<&>\\ %s.", l.mark(), what, l.rng.IntN(1000), pad)
}

func encode(v any) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err)
	}
	return strings.TrimSpace(b.String())
}

// step is one action of a lane.
type step struct {
	name   string
	weight int
	do     func(*lane) error
}

func steps() []step {
	return []step{
		{"put or remove an edge", 16, (*lane).writeEdge}, {"create a child", 14, (*lane).createChild},
		{"change a child", 14, (*lane).changeChild},
		{"put settings", 3, (*lane).putSettings}, {"a batch", 4, (*lane).batch}, {"a batch that is cut", 1, (*lane).cutBatch},
		{"remove edges", 0, (*lane).removeEdges},
		{"read an edge", 4, (*lane).readEdge}, {"read a child", 4, (*lane).readChild}, {"read settings", 2, (*lane).readSettings},
		{"read versions", 5, (*lane).readVersions},
		{"list edges", 8, (*lane).listEdges}, {"list children", 12, (*lane).listChildren}, {"read numbers", 6, (*lane).readNumbers},
		{"go on from a cursor", 8, (*lane).continueCursor},
		{"something hostile", 10, (*lane).hostile}, {"read with tokens", 1, (*lane).readOwn}, {"catch up", 3, (*lane).catchUp},
		{"read a list often", 1, (*lane).readOften},
	}
}

// run takes steps until enough requests were made. Now and then it takes a rare step.
func (l *lane) run(enough func() bool) error {
	all := steps()
	sum := 0
	for _, s := range all {
		sum += s.weight
	}
	for n := 0; !enough(); n++ {
		if l.ctx.Err() != nil {
			return nil
		}
		l.steps++
		l.dice.Seed(l.seed, uint64(l.steps)*(tenants+1)+uint64(l.tenant)) // a step does not depend on the random numbers of earlier steps
		s := all[0]
		at := l.rng.IntN(sum)
		for _, s = range all {
			if at -= s.weight; at < 0 {
				break
			}
		}
		if n%400 == 399 {
			s = step{name: "remove edges", do: (*lane).removeEdges}
		}
		l.did[s.name]++
		if err := s.do(l); err != nil {
			return fmt.Errorf("tenant %d, step %d, %s: %w", l.tenant, l.steps, s.name, err)
		}
	}
	return nil
}
