package api

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidings/tidings/internal/shares"
)

// gateTest is a gate with a server behind it, which works on some requests at once, each for a
// time.
type gateTest struct {
	*gate
	workers chan struct{}
	takes   time.Duration
	shed    map[string]int

	mu       sync.Mutex
	served   int
	longest  time.Duration
	requests sync.WaitGroup
}

func newGateTest(workers int) *gateTest {
	g := &gateTest{workers: make(chan struct{}, workers), takes: 10 * time.Millisecond, shed: map[string]int{}}
	g.gate = newGate(Config{MaxRequests: 512, MaxWait: time.Second}, func(reason string) { g.shed[reason]++ }) // the gate's lock is held
	return g
}

// offer sends requests at an even rate for some time, and waits until all have ended.
func (g *gateTest) offer(tenant int64, perSecond int, d time.Duration) {
	for range int(d.Seconds() * float64(perSecond)) {
		g.requests.Go(func() {
			work, ok := g.enter(tenant, true)
			if !ok {
				return
			}
			defer work.leave()
			start := time.Now()
			g.workers <- struct{}{}
			time.Sleep(g.takes)
			<-g.workers
			g.mu.Lock()
			defer g.mu.Unlock()
			g.served++
			g.longest = max(g.longest, time.Since(start))
		})
		time.Sleep(time.Second / time.Duration(perSecond))
	}
}

func (g *gateTest) since() (served int, longest time.Duration) {
	g.requests.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	served, longest = g.served, g.longest
	g.served, g.longest = 0, 0
	return served, longest
}

func TestTheGateKeepsWaitsShortWhenMoreComesThanCanBeServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateTest(4) // 400 requests/s
		g.offer(1, 300, 5*time.Second)
		if served, longest := g.since(); served != 1500 || longest > 50*time.Millisecond || len(g.shed) > 0 {
			t.Errorf("below capacity: %d served, %s at most, shed %v", served, longest, g.shed)
		}
		g.offer(1, 4000, 5*time.Second)
		if served, longest := g.since(); served < 1900 || longest > 1100*time.Millisecond || g.shed[shedTenant] == 0 {
			t.Errorf("ten times the capacity: %d served, %s at most, shed %v", served, longest, g.shed)
		}
		g.takes = 100 * time.Millisecond // 40 requests/s
		g.offer(1, 4000, 10*time.Second)
		g.since()
		g.offer(1, 4000, 10*time.Second) // the limit has come down
		if served, longest := g.since(); served < 350 || longest > 1500*time.Millisecond {
			t.Errorf("behind a slow database: %d served, %s at most", served, longest)
		}
		g.takes = 10 * time.Millisecond
		g.offer(1, 4000, 5*time.Second)
		g.since()
		g.offer(1, 390, 5*time.Second)
		g.shed = map[string]int{}
		if served, longest := g.since(); served != 5*390 || longest > 50*time.Millisecond {
			t.Errorf("afterwards: %d served, %s at most", served, longest)
		}
	})
}

func TestOneTenantLeavesRoomForAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateTest(4)
		var flood sync.WaitGroup
		flood.Go(func() { g.offer(1, 4000, 5*time.Second) })
		time.Sleep(time.Second)
		for range 20 {
			v, ok := g.enter(2, true)
			if !ok {
				t.Fatal("the other tenant is refused")
			}
			time.Sleep(100 * time.Millisecond)
			v.leave()
		}
		flood.Wait()
		g.since()
	})
}

// A tenant's bodies take memory as they arrive, up to three quarters of it, and a token's up to a
// half. Another tenant's body finds room.
func TestLargeBodiesShareABoundedMemory(t *testing.T) {
	g := newGateTest(1)
	const length = 4 << 20
	body := strings.Repeat("x", length)
	arrive := func(tenant int64, token string, sent int) (*shares.Hold, error) {
		memory := g.bodies.Hold(tenant, token)
		_, err := readAll(strings.NewReader(body[:sent]), length, memory)
		return memory, err
	}
	for range 100 {
		if _, err := arrive(1, "slow", smallBody); err != nil || g.bodies.Held() != 0 {
			t.Fatalf("a body of which little has arrived: %v, %d bytes held", err, g.bodies.Held())
		}
	}
	var all []*shares.Hold
	for _, c := range []struct {
		tenant int64
		token  string
		want   int // bodies
	}{{1, "greedy", 8}, {1, "other", 4}, {2, "modest", 2}} {
		n := 0
		for ; n < 100; n++ {
			memory, err := arrive(c.tenant, c.token, length)
			if all = append(all, memory); err != nil {
				memory.Release()
				break
			}
		}
		if n != c.want {
			t.Errorf("%d bodies of tenant %d and token %s, want %d", n, c.tenant, c.token, c.want)
		}
	}
	for _, memory := range all {
		memory.Release()
	}
	if g.bodies.Held() != 0 {
		t.Errorf("%d bytes held afterwards", g.bodies.Held())
	}
}

func TestReadinessEndsWhenRequestsAreRefusedForLongAndComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateTest(1)
		for tenant := range int64(512) {
			if _, ok := g.enter(tenant, true); !ok {
				t.Fatal(tenant)
			}
		}
		refuse := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				if refuse, _ := g.arrive(); !refuse {
					t.Fatal("not full")
				}
				g.gone()
			}
		}
		refuse(9 * time.Second)
		if err := g.ready(t.Context()); err != nil {
			t.Errorf("after 9 seconds: %v", err)
		}
		refuse(2 * time.Second)
		if err := g.ready(t.Context()); err == nil {
			t.Error("ready after 11 seconds of refusals")
		}
		time.Sleep(2 * time.Second)
		if err := g.ready(t.Context()); err != nil {
			t.Errorf("two seconds later: %v", err)
		}
		refuse(time.Second)
		if err := g.ready(t.Context()); err != nil {
			t.Errorf("after a new burst: %v", err)
		}
	})
}

// A hundred clients write one row, one after the other, so each waits for all others: two seconds
// each. The database is not slow, and the other tenant's requests are quick.
func TestSlownessCountsAgainstTheTenantThatCausesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateTest(4)
		row := make(chan struct{}, 1)
		var hot sync.WaitGroup
		end := time.Now().Add(30 * time.Second)
		for range 100 {
			hot.Go(func() {
				for time.Now().Before(end) {
					v, ok := g.enter(1, true)
					if !ok {
						time.Sleep(refusalTakes)
						continue
					}
					row <- struct{}{}
					time.Sleep(20 * time.Millisecond)
					<-row
					v.leave()
				}
			})
		}
		g.offer(2, 300, 30*time.Second)
		served, longest := g.since()
		if _, limit := g.state(); served != 9000 || longest > 50*time.Millisecond || limit != 512 {
			t.Errorf("of the other tenant %d of 9000 were served, in %s at most; the limit of all is %.0f", served, longest, limit)
		}
		g.gate.mu.Lock()
		if own := g.of[1].at; own > 100 || own < gateFloor {
			t.Errorf("the tenant's own limit is %.0f", own)
		}
		g.gate.mu.Unlock()
		hot.Wait()
		for _, l := range []time.Duration{time.Second, gateForget} { // then the gate forgets the tenant
			time.Sleep(l)
			g.offer(2, 10, time.Second)
		}
		if len(g.of) > 1 {
			t.Errorf("%d tenants are remembered", len(g.of))
		}
		g.since()
	})
}

func TestHoweverManyTenantsWantAllTheNextOneFindsAPlace(t *testing.T) {
	for _, c := range []struct{ tenants, each int }{{1, 384}, {2, 219}, {3, 153}, {20, 25}, {100, 5}} {
		g := newGateTest(1)
		for more := true; more; { // in turns
			more = false
			for tenant := range int64(c.tenants) {
				if _, ok := g.enter(tenant, true); ok {
					more = true
				}
			}
		}
		least, most := 512, 0
		for _, sh := range g.of {
			least, most = min(least, sh.inside), max(most, sh.inside)
		}
		if least < c.each-3 || most > c.each+3 {
			t.Errorf("%d tenants: %d to %d places each, want %d", c.tenants, least, most, c.each)
		}
		if _, ok := g.enter(1000, true); !ok {
			t.Errorf("%d tenants: the next one is refused", c.tenants)
		}
	}
}

// If many tenants are slow, the cause is the database, and all tenants get less.
func TestASlowDatabaseGetsFewerRequestsOfAllTenants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateTest(1)
		g.takes = 100 * time.Millisecond
		var flood sync.WaitGroup
		for tenant := range int64(50) {
			flood.Go(func() { g.offer(tenant, 10, 20*time.Second) })
		}
		flood.Wait()
		g.since()
		if _, limit := g.state(); limit > 50 {
			t.Errorf("the limit is %.0f", limit)
		}
	})
}

// A few requests wait for a lock, one at any time. They say nothing about the database.
func TestAFewSlowRequestsDoNotLowerTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateTest(4)
		var waiters sync.WaitGroup
		for range 200 {
			waiters.Go(func() {
				v, ok := g.enter(1, true)
				if !ok {
					t.Error("refused")
					return
				}
				time.Sleep(10 * time.Second)
				v.leave()
			})
			g.offer(1, 300, 100*time.Millisecond)
		}
		if _, limit := g.state(); limit != 512 {
			t.Errorf("the limit is %.0f", limit)
		}
		waiters.Wait()
		g.since()
	})
}

func TestALoneSlowRequestDoesNotLowerTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateTest(1)
		g.takes = 5 * time.Second
		g.offer(1, 1, 3*time.Second)
		g.since()
		if _, limit := g.state(); limit != 512 {
			t.Errorf("the limit is %.0f", limit)
		}
	})
}

// A request leaves before its answer is sent. It stays if the answer is large and large answers
// already take all memory.
func TestAnAnswerOnItsWayTakesNoPlace(t *testing.T) {
	g := newGateTest(1)
	enter := func() *visit {
		v, ok := g.enter(1, true)
		if !ok {
			t.Fatal("refused")
		}
		return v
	}
	wantInside := func(want int) {
		t.Helper()
		if inside, _ := g.state(); inside != want {
			t.Errorf("%d inside, want %d", inside, want)
		}
	}
	small, large, largest := enter(), enter(), enter()
	small.answered(100)()
	sent := large.answered(48 << 20) // the tenant's share
	wantInside(1)
	largest.answered(smallBody + 1)()
	wantInside(1)
	sent()
	for _, v := range []*visit{small, large, largest} {
		v.leave()
	}
	wantInside(0)
	if g.bodies.Held() != 0 || g.of[1].inside != 0 {
		t.Errorf("%d bytes, %d requests of the tenant", g.bodies.Held(), g.of[1].inside)
	}
}

// Hundreds of requests, each with a body, arrive over one connection of HTTP/2. They are neither
// admitted nor gone.
func TestRequestsBeyondWhatMemoryBearsAreNotHeld(t *testing.T) {
	g := newGateTest(1)
	for range maxPresent {
		if refuse, room := g.arrive(); refuse || !room {
			t.Fatal("refused")
		}
	}
	if refuse, room := g.arrive(); !refuse || room {
		t.Errorf("one more: refused %t, room %t", refuse, room)
	}
	g.gone()
	g.gone()
	if refuse, _ := g.arrive(); refuse {
		t.Error("refused although another one has gone")
	}
}
