package store

import (
	"context"
	"errors"
	"fmt"
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
	// groupTimeout bounds a group as a whole, which does not end with the request of any one of its callers.
	groupTimeout = 5 * time.Second
)

// slots bounds how many transactions of single writes run at once: groups, writes that run alone, and among those the ones that have met
// a lock, apart, so that none keeps another, or reads, from the pool. Whoever waits is served in the order of coming: tenants take turns.
type slots struct {
	groups, alone, locked chan struct{}

	runs, grouped, single, waiting atomic.Int64 // see Stats
}

func newSlots(pool *pgxpool.Pool) *slots {
	conns := int(pool.Config().MaxConns)
	return &slots{groups: make(chan struct{}, max(1, conns/2)), alone: make(chan struct{}, max(1, conns/4)), locked: make(chan struct{}, max(1, conns/8))}
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

// lanes coalesce concurrent single writes of one kind, tenant by tenant. While a group of a tenant runs, its next one gathers; a write
// that finds no group running waits for nobody. The callers do the work: the first of those that wait leads the next group, in its
// own goroutine.
//
//	join ──▶ waits ──▶ leads: takes a slot, takes who waits, runs the transaction ──▶ tells each its outcome, and the next one to lead
//	           │                                   │
//	           └──▶ ctx ends: leaves               └──▶ the transaction failed: tells each to run alone
//
// Of one entity at most one write is under way, so a group never has two of it. Whoever waits for a locked entity takes turns on a few
// connections with those who wait for other ones.
type lanes[W, O any] struct {
	slots *slots
	key   func(W) any // names the entity; nil for a new one
	run   func(ctx context.Context, tenant int64, writes []W, lockTimeout time.Duration) ([]O, error)

	mu   sync.Mutex
	open map[int64]*lane[W, O]
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
	told  chan verdict[O] // one message at most
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

func newLanes[W, O any](s *slots, key func(W) any, run func(ctx context.Context, tenant int64, writes []W, lockTimeout time.Duration) ([]O, error)) *lanes[W, O] {
	return &lanes[W, O]{slots: s, key: key, run: run, open: make(map[int64]*lane[W, O])}
}

// do runs writes: a single one with others that come at the same time, several as the transaction that they are.
func (l *lanes[W, O]) do(ctx context.Context, tenant int64, writes []W) ([]O, error) {
	if len(writes) != 1 {
		return l.run(ctx, tenant, writes, 0)
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

// lead takes a slot, runs the group that has gathered by then, t among it, and tells the others what became of them.
func (l *lanes[W, O]) lead(ctx context.Context, ln *lane[W, O], t *ticket[W, O]) (mine verdict[O]) {
	select {
	case l.slots.groups <- struct{}{}:
	case <-ctx.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		t.state, ln.led = left, false
		l.wait(ln, -1)
		l.next(ln)
		return verdict[O]{err: fmt.Errorf("wait to write for tenant %d: %w", ln.tenant, ctx.Err())}
	}
	group := l.take(ln)
	writes := make([]W, len(group))
	for i, t := range group {
		writes[i] = t.write
	}
	outs, err, panicked := []O(nil), errors.New("store: a group of writes did not end"), true
	defer func() {
		<-l.slots.groups
		alone := err != nil && !errors.Is(err, postgres.ErrUnknown) && !errors.Is(err, context.DeadlineExceeded)
		l.mu.Lock()
		defer l.mu.Unlock()
		for i, other := range group {
			v := verdict[O]{alone: alone, err: err}
			if err == nil {
				v.out = outs[i]
			}
			if !alone || other.state == left || panicked && other == t { // who does not run alone
				l.free(ln, other)
			}
			if other == t {
				mine = v
			} else if other.state != left {
				tell(other, v)
			}
		}
		ln.led = false
		l.next(ln)
	}()
	l.slots.runs.Add(1)
	l.slots.grouped.Add(int64(len(group)))
	gctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), groupTimeout)
	defer cancel()
	outs, err = l.run(gctx, ln.tenant, writes, groupLockTimeout)
	panicked = false
	return mine
}

// take removes a group from those that wait. The leader is the first of them.
func (l *lanes[W, O]) take(ln *lane[W, O]) []*ticket[W, O] {
	l.mu.Lock()
	defer l.mu.Unlock()
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
	return l.run(ctx, tenant, []W{write}, aloneLockTimeout)
}
