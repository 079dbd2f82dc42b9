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
// All have API_MAX_REQUESTS places. A tenant has three times as many at most as are free (dynamic thresholds: Choudhury and Hahne, 1998): one alone has three quarters
// of them, two that want all have three sevenths each, and however many want more, the next one finds a place.
//
// Besides, a tenant has a limit of its own. When more than one in gateSlow of its requests takes longer than API_MAX_WAIT it comes down, by a
// tenth every gateInterval, to gateFloor at least: so slowness counts against the tenant that causes it, whose hot row or thread makes its requests wait
// for each other. A few that wait for a lock or an archived thread do not take the room of the others. The limit goes up again while requests are refused though
// those that are let in are quick. When most of several tenants are slow it is the database: then the limit of all comes down likewise.
//
// A request leaves when its answer is there: how fast the client takes it says nothing about the database, and must keep nobody out.
type gate struct {
	most    int
	maxWait time.Duration
	refused func(reason string) // counts

	mu        sync.Mutex
	all       limit
	inside    int
	of        map[int64]*holding // by tenant
	bodies    int64              // bytes reserved for large bodies, and large answers on their way
	present   int                // requests that have come and not gone, let in or not
	looked    time.Time          // when it was last looked at whether limits have to move
	firstFull time.Time          // of an unbroken series of refusals
	lastFull  time.Time
}

// holding is what a tenant has of the gate.
type holding struct {
	limit
	inside  int
	waiting bool      // the last of its requests that ended were slow
	seen    time.Time // when a request of the tenant last ended, or was refused
}

// limit is how many may be inside, and what decides whether it moves: what was seen since it was last looked at.
type limit struct {
	at      float64
	wanted  bool // somebody did not fit
	ended   int  // requests that were timed
	slow    int  // of these, longer than maxWait
	longest time.Duration
}

// move moves a limit of which so many are inside.
func (l *limit) move(g *gate, inside int, slow bool) {
	switch {
	case slow && inside > gateFloor: // fewer do not wait for each other
		l.at = max(gateFloor, min(l.at, float64(inside))*gateLower)
	case l.wanted && l.longest < g.maxWait/2:
		l.at = min(float64(g.most), l.at*gateRaise)
	}
	*l = limit{at: l.at}
}

const (
	gateFloor    = 16 // requests: what the connections of a small pool can work on
	gateInterval = 100 * time.Millisecond
	gateLower    = 0.9
	gateRaise    = 1.1
	gateSlow     = 10
	gateForget   = time.Minute // after which a tenant begins anew

	// maxPresent is as many requests as come by HTTP/1.1 over all connections of a port. A client of HTTP/2 has hundreds on each.
	maxPresent = 4096

	// smallBody is what a body may take without being counted: the connections of a port times that is what a process can bear. The
	// others share largeBodies.
	smallBody   = 64 << 10 // bytes
	largeBodies = 64 << 20

	// guessTakes is how long it takes to refuse a token of an address that has brought too many that nobody knows.
	guessTakes = time.Second

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
	shedTokens   = "tokens"   // too many tokens are being looked up
	shedTenant   = "tenant"   // its tenant has its share
	shedBodies   = "bodies"   // large bodies take the memory that there is for them
	shedWrites   = "writes"   // too many single writes of its tenant wait for a group
)

func newGate(cfg Config, refused func(reason string)) *gate {
	return &gate{most: cfg.MaxRequests, maxWait: cfg.MaxWait, refused: refused, all: limit{at: float64(cfg.MaxRequests)}, of: make(map[int64]*holding)}
}

// arrive counts a request of which nothing is known yet, and says whether to refuse it, and whether there is room to hold that back. It calls
// gone in any case, once.
func (g *gate) arrive() (refuse, room bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.present++
	room = g.present <= maxPresent
	if room && g.inside < int(g.all.at) {
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
	g.all.wanted = true
	if now.Sub(g.lastFull) > shedPause {
		g.firstFull = now
	}
	g.lastFull = now
	g.refused(shedRequests)
}

// hold holds a refusal back, unless many are present already.
func (g *gate) hold(ctx context.Context, d time.Duration) {
	g.mu.Lock()
	many := g.present > maxPresent/2
	g.mu.Unlock()
	if many {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// visit is the stay of one request behind the gate. It is one goroutine's.
type visit struct {
	gate        *gate
	held        *holding
	since       time.Time
	timed, left bool
}

// enter lets a request of a tenant in, or not. Who is in calls leave.
func (g *gate) enter(tenant int64, timed bool) (*visit, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	sh := g.of[tenant]
	if sh == nil {
		sh = &holding{limit: limit{at: float64(g.most)}}
		g.of[tenant] = sh
	}
	sh.seen = now
	free := int(g.all.at) - g.inside
	switch {
	case free <= 0:
		g.turnAway(now)
		return nil, false
	case sh.inside >= min(int(sh.at), 3*free):
		sh.wanted, g.all.wanted = true, true
		g.refused(shedTenant)
		return nil, false
	}
	g.inside++
	sh.inside++
	return &visit{gate: g, held: sh, since: now, timed: timed}, true
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
	v.gate.inside--
	v.held.inside--
}

// clock counts the time that the visit has taken, once, and moves the limits.
func (v *visit) clock(now time.Time) {
	g, sh, took := v.gate, v.held, now.Sub(v.since)
	if !v.timed {
		return
	}
	v.timed = false
	sh.seen = now
	sh.ended++
	sh.longest = max(sh.longest, took)
	if took > g.maxWait {
		sh.slow++
	}
	if now.Sub(g.looked) >= gateInterval {
		g.look(now)
	}
}

// look moves the limits. It costs a look at each tenant of the last minute.
func (g *gate) look(now time.Time) {
	tenants, waiting := 0, 0
	for tenant, sh := range g.of {
		if sh.ended > 0 {
			sh.waiting = sh.slow*gateSlow > sh.ended
			g.all.ended += sh.ended
			g.all.longest = max(g.all.longest, sh.longest)
		}
		if sh.ended > 0 || sh.inside > 0 {
			tenants++
			if sh.waiting {
				waiting++
			}
		}
		sh.move(g, sh.inside, sh.ended > 0 && sh.waiting)
		if sh.inside == 0 && (sh.at == float64(g.most) || now.Sub(sh.seen) > gateForget) {
			delete(g.of, tenant)
		}
	}
	g.all.move(g, g.inside, g.all.ended > 0 && tenants > 1 && 2*waiting > tenants)
	g.looked = now
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
	return g.inside, math.Floor(g.all.at)
}

// slowTenants is how many tenants have fewer places than they might, for their own requests are slow.
func (g *gate) slowTenants() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, sh := range g.of {
		if sh.at < float64(g.most) {
			n++
		}
	}
	return n
}
