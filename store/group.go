package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// ErrOverloaded reports that too many single writes of the tenant wait already. Nothing was written; a later try may succeed.
var ErrOverloaded = errors.New("store: too many writes are waiting")

// Group commit (docs/adr/0009-group-commit.md). One statement that writes 30 rows costs a little more than one that writes a single
// row, and one COMMIT syncs them all.
const (
	// maxGroup bounds the writes of one transaction: beyond it, a group costs in latency what it brings in throughput.
	maxGroup = 128
	// maxWaiting bounds the writes of one tenant and kind that wait, and so the memory that they take.
	maxWaiting = 2048
	// groupLockTimeout is how long a group waits for one lock. Then each of its writes runs alone, and only those whose entity
	// is locked go on waiting.
	groupLockTimeout = 50 * time.Millisecond
	// aloneLockTimeout is how long a write that runs alone waits for one lock before others get its connection, and then again.
	aloneLockTimeout = 100 * time.Millisecond
	// apartFor is how long the writes of a tenant that have failed those of others share no transaction with them.
	apartFor = 10 * time.Second
	// groupTimeout bounds a group as a whole, which does not end with the request of any one of its callers.
	groupTimeout = 5 * time.Second
)

// place is where a write goes: a transaction of its own, or its part of one of several tenants.
type place struct {
	lockTimeout time.Duration // for one lock; 0 is no limit
	joint       *postgres.Member
}

// slots bounds how many transactions of single writes run at once: groups, writes that run alone, and among those the ones that have met
// a lock, apart, so that none keeps another, or reads, from the pool. Whoever waits is served in the order of coming: tenants take turns.
type slots struct {
	pool                  *pgxpool.Pool
	groups, alone, locked chan struct{}

	runs, grouped, single, waiting atomic.Int64 // see Stats
}

func newSlots(pool *pgxpool.Pool) *slots {
	conns := int(pool.Config().MaxConns)
	return &slots{pool: pool, groups: make(chan struct{}, max(1, conns/2)), alone: make(chan struct{}, max(1, conns/4)), locked: make(chan struct{}, max(1, conns/8))}
}

// Stats are counts since the start, but for Waiting.
type Stats struct {
	Groups  int64 // transactions of grouped writes
	Grouped int64 // writes that went in one
	Alone   int64 // writes that ran alone because their group failed
	Waiting int64 // writes that wait for a group now
}

// Stats tells how single writes have been grouped.
func (s *Store) Stats() Stats {
	return Stats{Groups: s.slots.runs.Load(), Grouped: s.slots.grouped.Load(), Alone: s.slots.single.Load(), Waiting: s.slots.waiting.Load()}
}

// lanes coalesce concurrent single writes of one kind. While a group of a tenant runs, its next one gathers; a write that finds no group
// running waits for nobody. The callers do the work: the first of those of a tenant that wait leads the next group, in its own goroutine. When
// there are more such groups than slots, the one that gets a slot takes those that wait for one along, into one transaction (postgres.Joint).
//
//	join ──▶ waits ──▶ leads: takes a slot, takes who waits, runs the transaction ──▶ tells each its outcome, and the next one to lead
//	           │           └──▶ or is taken along by one that leads
//	           │                                   │
//	           └──▶ ctx ends: leaves               └──▶ the transaction failed: tells each to run alone
//
// Of one entity at most one write is under way, so a group never has two of it. Whoever waits for a locked entity takes turns on a few
// connections with those who wait for other ones.
type lanes[W, O any] struct {
	slots *slots
	key   func(W) any // names the entity; nil for a new one
	run   func(ctx context.Context, tenant int64, writes []W, at place) ([]O, error)

	mu    sync.Mutex
	open  map[int64]*lane[W, O]
	queue []*lane[W, O]       // whose leaders have no slot yet
	apart map[int64]time.Time // tenants whose writes have failed those of others, and until when they go alone
}

// lane has the writes of one tenant.
type lane[W, O any] struct {
	tenant  int64
	led     bool                  // somebody leads, or has been told to
	ready   []*ticket[W, O]       // whose entity is free, in the order of coming
	last    map[any]*ticket[W, O] // of each entity with a write under way, the last one that waits
	waiting int
}

// ticket is one write and its caller.
type ticket[W, O any] struct {
	write W
	key   any
	next  *ticket[W, O] // waits for the same entity
	state ticketState
	told  chan verdict[O] // one message at most; another one when it leads
}

type ticketState int

const (
	waits ticketState = iota
	taken             // by a group
	told              // a verdict is in the channel
	left              // its caller has gone
)

// verdict is what a caller is told: the outcome, or what to do.
type verdict[O any] struct {
	lead, alone bool
	out         O
	err         error
}

func newLanes[W, O any](s *slots, key func(W) any, run func(ctx context.Context, tenant int64, writes []W, at place) ([]O, error)) *lanes[W, O] {
	return &lanes[W, O]{slots: s, key: key, run: run, open: make(map[int64]*lane[W, O]), apart: make(map[int64]time.Time)}
}

// do runs writes: a single one with others that come at the same time, several as the transaction that they are.
func (l *lanes[W, O]) do(ctx context.Context, tenant int64, writes []W) ([]O, error) {
	if len(writes) != 1 {
		return l.run(ctx, tenant, writes, place{})
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	t := &ticket[W, O]{write: writes[0], key: l.key(writes[0]), told: make(chan verdict[O], 1)}
	ln, err := l.join(tenant, t)
	if err != nil {
		return nil, err
	}
	var v verdict[O]
	select {
	case v = <-t.told:
	case <-ctx.Done():
		if l.leave(ln, t) {
			return nil, fmt.Errorf("wait for a group of writes of tenant %d: %w", tenant, ctx.Err())
		}
		v = <-t.told
	}
	if v.lead {
		v = l.lead(ctx, ln, t)
	}
	if v.alone {
		return l.alone(ctx, ln, t)
	}
	if v.err != nil {
		return nil, v.err
	}
	return []O{v.out}, nil
}

func (l *lanes[W, O]) join(tenant int64, t *ticket[W, O]) (*lane[W, O], error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ln := l.open[tenant]
	if ln == nil {
		ln = &lane[W, O]{tenant: tenant, last: make(map[any]*ticket[W, O])}
		l.open[tenant] = ln
	}
	if ln.waiting >= maxWaiting {
		return nil, fmt.Errorf("%w: %d of tenant %d", ErrOverloaded, ln.waiting, tenant)
	}
	l.wait(ln, 1)
	before := ln.last[t.key]
	if t.key != nil {
		ln.last[t.key] = t
	}
	if before != nil {
		before.next = t
		return ln, nil
	}
	ln.ready = append(ln.ready, t)
	l.next(ln)
	return ln, nil
}

func (l *lanes[W, O]) wait(ln *lane[W, O], n int) {
	ln.waiting += n
	l.slots.waiting.Add(int64(n))
}

// leave ends the wait of a caller, unless it has been told something. What a group is writing for it is written.
func (l *lanes[W, O]) leave(ln *lane[W, O], t *ticket[W, O]) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch t.state {
	case told:
		return false
	case waits:
		l.wait(ln, -1)
	}
	t.state = left
	return true
}

func tell[W, O any](t *ticket[W, O], v verdict[O]) {
	t.state = told
	t.told <- v
}

// next tells the first one that waits to lead, when nobody does, and forgets a lane that has nothing under way.
func (l *lanes[W, O]) next(ln *lane[W, O]) {
	for !ln.led && len(ln.ready) > 0 {
		t := ln.ready[0]
		if t.state == left {
			ln.ready = ln.ready[1:]
			l.free(ln, t)
			continue
		}
		ln.led = true
		l.queue = append(l.queue, ln)
		tell(t, verdict[O]{lead: true})
	}
	if !ln.led && len(ln.ready) == 0 && len(ln.last) == 0 && l.open[ln.tenant] == ln {
		delete(l.open, ln.tenant)
	}
}

// free lets the next write of t's entity in.
func (l *lanes[W, O]) free(ln *lane[W, O], t *ticket[W, O]) {
	if t.next != nil {
		ln.ready = append(ln.ready, t.next)
	} else if t.key != nil {
		delete(ln.last, t.key)
	}
}

// part is what a tenant has in a group.
type part[W, O any] struct {
	*lane[W, O]
	tickets []*ticket[W, O]
	outs    []O
	err     error
}

// lead takes a slot, runs the group that has gathered by then, t among it, and tells the others what became of them.
func (l *lanes[W, O]) lead(ctx context.Context, ln *lane[W, O], t *ticket[W, O]) (mine verdict[O]) {
	select {
	case l.slots.groups <- struct{}{}:
	case mine = <-t.told: // it was taken along
		return mine
	case <-ctx.Done():
		l.mu.Lock()
		if !l.dequeue(ln) {
			l.mu.Unlock()
			return <-t.told
		}
		defer l.mu.Unlock()
		t.state, ln.led = left, false
		l.wait(ln, -1)
		l.next(ln)
		return verdict[O]{err: fmt.Errorf("wait to write for tenant %d: %w", ln.tenant, ctx.Err())}
	}
	group := l.gather(ln)
	if group == nil {
		<-l.slots.groups
		return <-t.told
	}
	panicked := true
	err := errors.New("store: a group of writes did not end")
	defer func() { <-l.slots.groups }()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, p := range group {
			err := err
			if p.err != nil || !panicked {
				err = p.err
			}
			alone := err != nil && !errors.Is(err, postgres.ErrUnknown) && !errors.Is(err, context.DeadlineExceeded)
			for i, other := range p.tickets {
				v := verdict[O]{alone: alone, err: err}
				if err == nil {
					v.out = p.outs[i]
				}
				if !alone || other.state == left || panicked && other == t { // who does not run alone
					l.free(p.lane, other)
				}
				if other == t {
					mine = v
				} else if other.state != left {
					tell(other, v)
				}
			}
			p.led = false
			l.next(p.lane)
		}
	}()
	gctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), groupTimeout)
	defer cancel()
	l.runGroup(gctx, group)
	panicked = false
	return mine
}

// dequeue reports whether the lane's leader still waits for a slot, which it does no longer.
func (l *lanes[W, O]) dequeue(ln *lane[W, O]) bool {
	i := slices.Index(l.queue, ln)
	if i < 0 {
		return false
	}
	l.queue = slices.Delete(l.queue, i, i+1)
	return true
}

// gather makes a group: of the lane, whose leader has a slot, and of those who wait for one, in the order of coming. nil: it was taken along.
func (l *lanes[W, O]) gather(ln *lane[W, O]) (group []*part[W, O]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.dequeue(ln) {
		return nil
	}
	group = append(group, &part[W, O]{lane: ln, tickets: l.take(ln)})
	n := len(group[0].tickets)
	if !l.isApart(ln.tenant) {
		for _, other := range slices.Clone(l.queue) {
			if n >= maxGroup {
				break
			}
			if !l.isApart(other.tenant) {
				l.dequeue(other)
				p := &part[W, O]{lane: other, tickets: l.take(other)}
				p.tickets[0].state = taken // its leader, who leads no longer
				n += len(p.tickets)
				group = append(group, p)
			}
		}
	}
	slices.SortFunc(group, func(a, b *part[W, O]) int { return cmp.Compare(a.tenant, b.tenant) }) // so that all groups lock in the same order
	l.slots.runs.Add(1)
	l.slots.grouped.Add(int64(n))
	return group
}

func (l *lanes[W, O]) isApart(tenant int64) bool {
	until, ok := l.apart[tenant]
	if ok && time.Now().After(until) {
		delete(l.apart, tenant)
		ok = false
	}
	return ok
}

// runGroup runs the group's writes in one transaction.
func (l *lanes[W, O]) runGroup(ctx context.Context, group []*part[W, O]) {
	if len(group) == 1 {
		p := group[0]
		p.outs, p.err = l.run(ctx, p.tenant, p.writes(), place{lockTimeout: groupLockTimeout})
		return
	}
	tenants := make([]int64, len(group))
	for i, p := range group {
		tenants[i] = p.tenant
	}
	joint := postgres.NewJoint(l.slots.pool, groupLockTimeout, tenants)
	var members sync.WaitGroup
	panics := make(chan any, len(group))
	for i, p := range group {
		members.Go(func() {
			defer func() {
				if cause := recover(); cause != nil {
					p.err = fmt.Errorf("store: a write panicked: %v", cause)
					panics <- cause
				}
			}()
			m := joint.Member(i)
			defer m.Leave()
			p.outs, p.err = l.run(ctx, p.tenant, p.writes(), place{groupLockTimeout, m})
		})
	}
	failed, _ := joint.Run(ctx) // the members return it
	members.Wait()
	if failed >= 0 {
		l.mu.Lock()
		l.apart[tenants[failed]] = time.Now().Add(apartFor)
		l.mu.Unlock()
	}
	select {
	case cause := <-panics:
		panic(cause)
	default:
	}
}

func (p *part[W, O]) writes() []W {
	writes := make([]W, len(p.tickets))
	for i, t := range p.tickets {
		writes[i] = t.write
	}
	return writes
}

// take removes a group from those that wait. The leader is the first of them. It is called with the lock.
func (l *lanes[W, O]) take(ln *lane[W, O]) []*ticket[W, O] {
	group := make([]*ticket[W, O], 0, min(len(ln.ready), maxGroup))
	var n int
	for n = 0; n < len(ln.ready) && len(group) < maxGroup; n++ { // ready grows as the writes after those who left come in
		t := ln.ready[n]
		if t.state == left {
			l.free(ln, t)
			continue
		}
		if t.state == waits { // and not the leader, who was told
			t.state = taken
		}
		group = append(group, t)
		l.wait(ln, -1)
	}
	ln.ready = append(ln.ready[:0:0], ln.ready[n:]...)
	return group
}

// alone runs one write for its own caller; its entity is not free before. A lock is waited for as long as the caller does, but none is met
// twice in the place of those who may not meet any.
func (l *lanes[W, O]) alone(ctx context.Context, ln *lane[W, O], t *ticket[W, O]) ([]O, error) {
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.free(ln, t)
		l.next(ln)
	}()
	l.slots.single.Add(1)
	for slot := l.slots.alone; ; slot = l.slots.locked {
		outs, err := l.try(ctx, slot, ln.tenant, t.write)
		if !postgres.IsLockTimeout(err) {
			return outs, err
		}
	}
}

func (l *lanes[W, O]) try(ctx context.Context, slot chan struct{}, tenant int64, write W) ([]O, error) {
	select {
	case slot <- struct{}{}:
		defer func() { <-slot }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait to write for tenant %d: %w", tenant, ctx.Err())
	}
	return l.run(ctx, tenant, []W{write}, place{lockTimeout: aloneLockTimeout})
}
