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
// The bound is API_MAX_REQUESTS as long as requests end within API_MAX_WAIT. When more than one in gateSlow takes longer it comes down, by a
// tenth every gateInterval, to gateFloor at least: a slow database gets few requests, and answers those in time. A few that wait for a lock or
// an archived thread do not take the room of all others. It goes up again while requests are refused though those that are let in are quick.
// One tenant has three quarters of it at most, so that another one finds room.
//
// A request leaves when its answer is there: how fast the client takes it says nothing about the database, and must keep nobody out.
type gate struct {
	most    int
	maxWait time.Duration
	refused func(reason string) // counts

	mu        sync.Mutex
	limit     float64
	inside    int
	of        map[int64]int // by tenant
	bodies    int64         // bytes reserved for large bodies, and large answers on their way
	present   int           // requests that have come and not gone, let in or not
	looked    time.Time     // when it was last looked at whether limit has to move; what follows is since then
	wanted    bool          // somebody did not fit
	ended     int           // requests that were timed
	slow      int           // of these, longer than maxWait
	longest   time.Duration // of these
	firstFull time.Time     // of an unbroken series of refusals
	lastFull  time.Time
}

const (
	gateFloor    = 16 // requests: what the connections of a small pool can work on
	gateInterval = 100 * time.Millisecond
	gateLower    = 0.9
	gateRaise    = 1.1
	gateSlow     = 10

	// maxPresent is as many requests as come by HTTP/1.1 over all connections of a port. A client of HTTP/2 has hundreds on each.
	maxPresent = 4096

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

// arrive counts a request of which nothing is known yet, and says whether to refuse it, and whether there is room to hold that back. It calls
// gone in any case, once.
func (g *gate) arrive() (refuse, room bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.present++
	room = g.present <= maxPresent
	if room && g.inside < int(g.limit) {
		return false, true
	}
	g.turnAway(time.Now())
	return true, room
}

func (g *gate) gone() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.present--
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

// visit is the stay of one request behind the gate. It is one goroutine's.
type visit struct {
	gate        *gate
	tenant      int64
	since       time.Time
	timed, left bool
}

// enter lets a request of a tenant in, or not; 0 stands for those whose tenant is not known, of whose time only one that is too long counts: the look at
// a token is no work. Who is in calls leave.
func (g *gate) enter(tenant int64, timed bool) (*visit, bool) {
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
	return &visit{gate: g, tenant: tenant, since: now, timed: timed}, true
}

// leave ends the visit, if it has not ended.
func (v *visit) leave() {
	v.gate.mu.Lock()
	defer v.gate.mu.Unlock()
	v.end(time.Now())
}

// end is called with the gate's lock.
func (v *visit) end(now time.Time) {
	if v.left {
		return
	}
	v.left = true
	v.clock(now)
	g := v.gate
	g.inside--
	if g.of[v.tenant]--; g.of[v.tenant] == 0 {
		delete(g.of, v.tenant)
	}
}

// clock counts the time that the visit has taken, once, and moves the limit.
func (v *visit) clock(now time.Time) {
	g, took := v.gate, now.Sub(v.since)
	if !v.timed || v.tenant == 0 && took <= g.maxWait {
		return
	}
	v.timed = false
	g.ended++
	g.longest = max(g.longest, took)
	if took > g.maxWait {
		g.slow++
	}
	if now.Sub(g.looked) < gateInterval {
		return
	}
	switch {
	case g.slow*gateSlow > g.ended && g.inside > gateFloor: // fewer do not wait for each other
		g.limit = max(gateFloor, min(g.limit, float64(g.inside))*gateLower)
	case g.wanted && g.longest < g.maxWait/2:
		g.limit = min(float64(g.most), g.limit*gateRaise)
	}
	g.looked, g.wanted, g.ended, g.slow, g.longest = now, false, 0, 0, 0
}

// answered ends the visit before so many bytes of an answer are sent, unless they are many and there is no memory left for such: then it goes on until leave,
// but is no longer timed. Call sent after it.
func (v *visit) answered(bytes int) (sent func()) {
	g := v.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	v.clock(now)
	if bytes <= smallBody {
		v.end(now)
		return func() {}
	}
	if g.bodies+int64(bytes) > largeBodies {
		return func() {}
	}
	v.end(now)
	return g.take(int64(bytes))
}

// take sets memory aside until release. It is called with the gate's lock.
func (g *gate) take(bytes int64) (release func()) {
	g.bodies += bytes
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.bodies -= bytes
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
	return g.take(length), true
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
