package bench

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// request is a request of a load.
type request struct {
	method, path, headers string
	body                  []byte
	key                   string // identifies the created row; if it is "", the answer's Location does
	token                 string // instead of the connection's, if it is not ""
}

// callers are connections to the API, each with one request in flight.
type callers struct {
	tenants []string                    // of each connection
	next    func(client, n int) request // safe for concurrent use
	wires   []wire
	fromDue bool // the latency counts from when a request was due, not from when it was sent

	recorder          // of the requests that were accepted: 200 for reads and changes, 201 for others
	created  []string // the tenant and the key of each created row, separated by a space
	refused  int      // 503 with Retry-After: overloaded, or a database that did not answer in time
}

// newCallers returns n connections, which belong to the tenants of the API in turn.
func newCallers(a *apiUnderTest, n int, next func(client, n int) request) *callers {
	c := &callers{next: next}
	for i := range n {
		t := i % len(a.tokens)
		c.wires = append(c.wires, wire{addr: a.addr, token: a.tokens[t], timeout: time.Minute})
		c.tenants = append(c.tenants, strconv.Itoa(t+tenant))
	}
	return c
}

// run sends the requests of a load, with all connections as its workers, and then closes these.
func (c *callers) run(ctx context.Context, w workload) (sent int, err error) {
	defer func() {
		for i := range c.wires {
			c.wires[i].close()
		}
	}()
	w.workers = len(c.wires)
	return w.run(ctx, func(client, n int, due time.Time) error {
		if !c.fromDue {
			due = time.Now()
		}
		c.call(client, n, due)
		return nil
	})
}

// call sends one request, whose latency counts from start. It reports whether the API accepted it.
func (c *callers) call(client, n int, start time.Time) (accepted bool) {
	r, w := c.next(client, n), &c.wires[client]
	if r.token != "" {
		w.token = r.token
	}
	a, err := w.send(r.method, r.path, r.headers, r.body)
	took, want := time.Since(start), 201
	if r.method == "GET" || r.method == "PATCH" {
		want = 200
	}
	if err == nil && a.status == 503 && a.retryAfter {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.refused++
		c.lastErr = fmt.Errorf("%s %s: 503 %s", r.method, r.path, a.problem)
		return false
	}
	if err == nil && a.status != want {
		err = fmt.Errorf("%s %s: %d %s", r.method, r.path, a.status, a.problem)
	}
	c.note(took, err)
	if err != nil {
		return false
	}
	key := r.key
	switch {
	case want != 201:
		return true
	case key == "":
		key = string(a.location[strings.LastIndexByte(string(a.location), '/')+1:])
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.created = append(c.created, c.tenants[client]+" "+key)
	return true
}
