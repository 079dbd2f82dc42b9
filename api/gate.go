package api

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"
)

// gate bounds the requests that are worked on at once, and so how long each of them waits for connections and groups behind it: whoever
// does not fit is refused, which costs next to nothing, instead of waiting in a queue that only grows.
//
// The bound is API_MAX_REQUESTS as long as requests end within API_MAX_WAIT. When they take longer it comes down, by a tenth every
// gateInterval, to gateFloor at least: a slow database gets few requests, and answers those in time. It goes up again while requests are refused
// though those that are let in are quick. One tenant has three quarters of it at most, so that another one finds room.
type gate struct {
	most    int
	maxWait time.Duration
	refused func(reason string) // counts

	mu        sync.Mutex
	limit     float64
	inside    int
	of        map[int64]int // by tenant
	bodies    int64         // bytes reserved for large bodies
	moved     time.Time     // when limit last changed
	wanted    bool          // somebody did not fit since then
	firstFull time.Time     // of an unbroken series of refusals
	lastFull  time.Time
}

const (
	gateFloor    = 16 // requests: what the connections of a small pool can work on
	gateInterval = 100 * time.Millisecond
	gateLower    = 0.9
	gateRaise    = 1.1

	// smallBody is what a body may take without being counted: the connections of a port times that is what a process can bear. The
	// others share largeBodies.
	smallBody   = 64 << 10 // bytes
	largeBodies = 64 << 20

	// refusalTakes is how long a refusal is held back. A client that asks again at once would take the processors, by mere refusals, from those who
	// are let in: 2,000 such connections ask 10,000 times a second at most.
	refusalTakes = 200 * time.Millisecond

	// shedTooLong is how long requests are refused before the process calls itself not ready, and shedPause how long without a refusal
	// ends that.
	shedTooLong = 10 * time.Second
	shedPause   = time.Second
)

// Why requests are refused: label values of api_shed_total.
const (
	shedRequests = "requests" // as many as the gate lets in are worked on
	shedTenant   = "tenant"   // its tenant has its share
	shedBodies   = "bodies"   // large bodies take the memory that there is for them
	shedWrites   = "writes"   // too many single writes of its tenant wait for a group
)

func newGate(cfg Config, refused func(reason string)) *gate {
	return &gate{most: cfg.MaxRequests, maxWait: cfg.MaxWait, refused: refused, limit: float64(cfg.MaxRequests), of: make(map[int64]int)}
}

// full refuses a request of which nothing is known yet.
func (g *gate) full() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside < int(g.limit) {
		return false
	}
	g.turnAway(time.Now())
	return true
}

func (g *gate) turnAway(now time.Time) {
	g.wanted = true
	if now.Sub(g.lastFull) > shedPause {
		g.firstFull = now
	}
	g.lastFull = now
	g.refused(shedRequests)
}

// hold holds a refusal back.
func (g *gate) hold(ctx context.Context) {
	t := time.NewTimer(refusalTakes)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// enter lets a request of a tenant in, or not; 0 stands for those whose tenant is not known. Who is in calls leave, once.
// The time that it takes, where timed, moves the limit.
func (g *gate) enter(tenant int64, timed bool) (leave func(), ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	switch {
	case g.inside >= int(g.limit):
		g.turnAway(now)
		return nil, false
	case g.of[tenant] >= int(math.Ceil(g.limit*3/4)):
		g.wanted = true
		g.refused(shedTenant)
		return nil, false
	}
	g.inside++
	g.of[tenant]++
	return func() { g.leave(tenant, now, timed) }, true
}

func (g *gate) leave(tenant int64, since time.Time, timed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if timed && now.Sub(g.moved) >= gateInterval {
		switch took := now.Sub(since); {
		case took > g.maxWait:
			g.limit = max(gateFloor, min(g.limit, float64(g.inside))*gateLower)
			g.moved, g.wanted = now, false
		case took < g.maxWait/2 && g.wanted:
			g.limit = min(float64(g.most), g.limit*gateRaise)
			g.moved, g.wanted = now, false
		}
	}
	g.inside--
	if g.of[tenant]--; g.of[tenant] == 0 {
		delete(g.of, tenant)
	}
}

// reserve sets memory aside for a body of so many bytes, -1 when that is not known, and most at most. Who got it calls release, once.
func (g *gate) reserve(length, most int64) (release func(), ok bool) {
	if length < 0 || length > most {
		length = most
	}
	if length <= smallBody {
		return func() {}, true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.bodies+length > largeBodies {
		g.refused(shedBodies)
		return nil, false
	}
	g.bodies += length
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.bodies -= length
	}, true
}

// ready is an error while requests have been refused for longer than a burst lasts.
func (g *gate) ready(context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	since := g.lastFull.Sub(g.firstFull)
	if time.Since(g.lastFull) > shedPause || since < shedTooLong {
		return nil
	}
	return fmt.Errorf("requests have been refused for %s", since.Round(time.Second))
}

func (g *gate) state() (inside int, limit float64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.inside, math.Floor(g.limit)
}
