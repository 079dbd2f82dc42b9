package api

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	bounds "github.com/tidings/tidings/internal/shares" // shares is the name of a kind
)

// gate bounds the requests in work, and so how long each of them waits for connections and groups
// behind it. It refuses the other requests. A refusal costs next to nothing, and a queue would only
// grow.
//
// All tenants share API_MAX_REQUESTS places. A tenant takes at most three times as many places as
// are free (dynamic thresholds: Choudhury and Hahne, 1998). One busy tenant has three quarters of
// all places, two have three sevenths each. However many tenants are busy, the next one finds a
// place.
//
// Each tenant also has a limit of its own. It falls while more than one in gateSlow of the tenant's
// requests takes longer than API_MAX_WAIT: by a tenth every gateInterval, to gateFloor at least. So
// slowness counts against the tenant that causes it, whose hot row or thread makes its requests
// wait for each other. A few requests that wait for a lock or an archived thread do not take the
// room of other tenants. The limit rises again while requests are refused although the admitted
// ones are quick. If most of several tenants are slow, the cause is the database: then the limit of
// all tenants falls in the same way.
//
// A request leaves when its answer is complete. The speed of the client tells nothing about the
// database, and must not keep other requests out.
type gate struct {
	most      int
	maxWait   time.Duration
	refused   func(reason string) // counts a refusal
	arrived   *bounds.Pool        // requests with a token, admitted or not
	bodies    *bounds.Pool        // bytes of large bodies and large answers
	documents *bounds.Pool        // answers without a token on their way

	mu        sync.Mutex
	all       limit
	inside    int
	of        map[int64]*holding // by tenant
	present   int                // requests that arrived and have not ended, admitted or not
	looked    time.Time          // when the limits were last adjusted
	firstFull time.Time          // the first of an unbroken series of refusals
	lastFull  time.Time
}

// holding is the state of one tenant at the gate.
type holding struct {
	limit
	inside  int
	waiting bool      // too many of the requests that ended last were slow
	seen    time.Time // when a request of the tenant last ended, or was refused
}

// limit is how many requests may be inside, with the measurements since its last adjustment.
type limit struct {
	at      float64
	wanted  bool // a request was refused
	ended   int  // requests that were timed
	slow    int  // of these, longer than maxWait
	longest time.Duration
}

// move adjusts the limit. inside is the number of requests that count against it.
func (l *limit) move(g *gate, inside int, slow bool) {
	switch {
	case slow && inside > gateFloor: // fewer requests do not wait for each other
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
	gateForget   = time.Minute // without requests, after which a tenant's limit is forgotten

	// smallBody is the size up to which a body or an answer is not counted: a process can hold that
	// much for every connection of a port. Larger ones share bounds.Bodies.
	smallBody = 64 << 10 // bytes

	// guessTakes is the delay before the refusal of a token whose address has sent too many unknown
	// tokens.
	guessTakes = time.Second

	// refusalTakes is the delay of a refusal. Without it, clients that retry at once would take the
	// processors from the admitted requests. With it, 2,000 such connections send at most 10,000
	// requests a second.
	refusalTakes = 200 * time.Millisecond

	// shedTooLong is how long requests are refused before the process reports that it is not ready.
	// A time of shedPause without a refusal ends that state.
	shedTooLong = 10 * time.Second
	shedPause   = time.Second
)

// maxPresent is the number of requests that arrive over all connections of a port with HTTP/1.1. A
// client of HTTP/2 sends hundreds over one connection.
var maxPresent = int(bounds.Arrived.All.N)

// Reasons of refusals: label values of tidings_api_shed_requests_total.
const (
	shedRequests  = "requests"  // the gate is full
	shedTokens    = "tokens"    // too many look-ups of tokens wait
	shedTenant    = "tenant"    // the tenant has its share of the gate
	shedBodies    = "bodies"    // large bodies take all memory for them, or the caller's share of it
	shedArrived   = "arrived"   // too many requests of the tenant arrive or are answered
	shedDocuments = "documents" // too many answers without a token are on their way
	shedWrites    = "writes"    // too many single writes of the tenant wait for a group
)

func newGate(cfg Config, refused func(reason string)) *gate {
	return &gate{most: cfg.MaxRequests, maxWait: cfg.MaxWait, refused: refused, all: limit{at: float64(cfg.MaxRequests)},
		of: make(map[int64]*holding), arrived: bounds.NewPool(bounds.Arrived, bounds.Arrived.All.N),
		documents: bounds.NewPool(bounds.Documents, bounds.Documents.All.N),
		// A single batch must fit into a tenant's share.
		bodies: bounds.NewPool(bounds.Bodies, max(bounds.Bodies.All.N, 2*cfg.MaxBatchBytes))}
}

// arrive counts a request before anything about it is known. It reports whether to refuse the
// request, and whether there is room to delay the refusal. The caller calls gone once in any case.
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

// hold delays a refusal, unless many requests are present.
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

// visit is the time of one request behind the gate. One goroutine uses it.
type visit struct {
	gate        *gate
	held        *holding
	tenant      int64
	token       string // the one whose limits it shares; empty: only the tenant has a share of the memory for answers
	since       time.Time
	timed, left bool
}

// enter admits or refuses a request of a tenant. The caller calls leave for an admitted request.
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
	case sh.inside >= min(int(sh.at), int(bounds.Requests.Tenant.Free)*free):
		sh.wanted, g.all.wanted = true, true
		g.refused(shedTenant)
		return nil, false
	}
	g.inside++
	sh.inside++
	return &visit{gate: g, held: sh, tenant: tenant, since: now, timed: timed}, true
}

// leave ends the visit, unless it has already ended.
func (v *visit) leave() {
	v.gate.mu.Lock()
	defer v.gate.mu.Unlock()
	v.end(time.Now())
}

// end ends the visit. The caller holds the gate's lock.
func (v *visit) end(now time.Time) {
	if v.left {
		return
	}
	v.left = true
	v.clock(now)
	v.gate.inside--
	v.held.inside--
}

// clock records the duration of the visit, once, and adjusts the limits.
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
		g.adjust(now)
	}
}

// adjust sets the limits. Its cost grows with the tenants of the last minute.
func (g *gate) adjust(now time.Time) {
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

// answered ends the visit before an answer of so many bytes is sent. If the answer is large and no
// memory for large answers is left, the visit lasts until leave, but is no longer timed. The caller
// calls sent after it has sent the answer.
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
	memory := g.bodies.Hold(v.tenant, v.token)
	if !memory.Take(int64(bytes)) {
		return func() {}
	}
	v.end(now)
	return memory.Release
}

// ready returns an error while requests have been refused for longer than a burst lasts.
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

// slowTenants returns how many tenants have a lower limit because their own requests are slow.
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
