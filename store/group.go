package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	bounds "github.com/tidings/tidings/internal/shares" // shares is the name of a kind
)

// ErrOverloaded reports that too many single writes of the tenant are waiting. The write did
// nothing; a retry may succeed.
var ErrOverloaded = errors.New("store: too many writes are waiting")

// Group commit (docs/adr/0009-group-commit.md). One statement that writes 30 rows costs a little
// more than one that writes a single row, and one COMMIT syncs them all.
const (
	// maxRunning is how many groups of a tenant run at once if busy writes wait, and no other
	// tenant: while one commits, the next one works.
	maxRunning, busy = 2, 12
	// patience is how long a group waits for those under way to end, when there is one for each
	// second processor, or, if busy writes wait, one for each. Groups are larger for it, and
	// PostgreSQL works less per write. After that time the others are slow, and it runs beside
	// them.
	patience = 10 * time.Millisecond
	// maxGroup bounds the writes of one transaction. A larger group would cost more latency than it
	// gains throughput.
	maxGroup = 128
	// groupLockTimeout is how long a group waits for one lock. After that, each of its writes runs
	// alone, and only writes to a locked entity continue to wait.
	groupLockTimeout = 50 * time.Millisecond
	// aloneLockTimeout is how long a write that runs alone waits for one lock. It then gives its
	// connection to others and tries again.
	aloneLockTimeout = 100 * time.Millisecond
	// separateFor is how long a tenant shares no transaction with others after one of its writes
	// failed alone too, so it may have made theirs fail.
	separateFor = 10 * time.Second
	// groupTimeout bounds a whole group, which does not end with the request of any of its callers.
	groupTimeout = 5 * time.Second
)

// place is the transaction of writes.
type place struct {
	tenants     []int64       // whose rows it may see and write
	lockTimeout time.Duration // for one lock; 0: unlimited
}

// of is a transaction of one tenant.
func of(tenant int64) place { return place{tenants: []int64{tenant}} }

// slots bounds the concurrent transactions of single writes. Groups, writes that run alone, and
// writes that met a lock have separate bounds, so that none of them takes all connections of the
// pool from the others or from reads. Each bound serves in the order of arrival, so tenants take
// turns.
type slots struct {
	turns, more           chan struct{} // of groups that need not wait for others: more only if busy writes wait
	groups, alone, locked chan struct{}

	runs, grouped, single, waiting atomic.Int64 // see Stats
}

func newSlots(pool *pgxpool.Pool) *slots {
	conns := int(pool.Config().MaxConns)
	all := max(2, runtime.GOMAXPROCS(0))
	return &slots{turns: make(chan struct{}, all/2), more: make(chan struct{}, all-all/2), groups: make(chan struct{}, max(1, conns/2)),
		alone: make(chan struct{}, max(1, conns/4)), locked: make(chan struct{}, max(1, conns/8))}
}

// Stats are counts since the start, except Waiting, which is a gauge.
type Stats struct {
	Groups  int64 // transactions of grouped writes
	Grouped int64 // writes that ran in a group
	Alone   int64 // writes that ran alone because their group failed
	Waiting int64 // writes that now wait for a group
}

// Stats returns how single writes were grouped.
func (s *Store) Stats() Stats {
	return Stats{Groups: s.slots.runs.Load(), Grouped: s.slots.grouped.Load(), Alone: s.slots.single.Load(),
		Waiting: s.slots.waiting.Load()}
}

// lanes coalesce concurrent single writes of one kind. While a group of a tenant runs, or two if
// many writes wait, the tenant's next group gathers. A write that finds no group of its tenant
// waits only for its turn. The callers do the work: the first waiting caller of a tenant leads the
// next group, in its own goroutine. A leader with a slot also takes along the groups of the tenants
// whose leaders wait for one: one statement writes for all of them
// (docs/adr/0028-tenants-in-one-statement.md). Each step of a write holds the mutex:
//
//	join ──▶ waits ──next──▶ leads ──take──▶ taken ──settle──▶ told
//	           │ └────────────│──────take──────▲ │
//	           └────leave─────┴────▶ left ◀──────┘
//
//	waits: for a leader, or for an earlier write to its entity
//	leads: its caller waits for a slot, and then runs the group that has gathered by then
//	taken: the group runs. It does not end with the ctx of a caller, but within groupTimeout
//	told:  its caller has the outcome, or runs it alone, because the group failed or panicked
//	left:  the ctx of its caller has ended. A write that was taken still commits; another one never runs
//
// Only a group whose outcome is known to be nothing runs again, one by one: a transaction looks up
// the answer that its COMMIT lost (postgres.WriteInTenants). A group that panicked runs again too,
// and each write finds what it has already changed.
//
// Each entity has at most one write under way, so a group never has two writes to an entity. Writes
// that wait for locked entities share a few connections in turns.
type lanes[W, O any] struct {
	slots  *slots
	key    func(W) any // returns the entity; nil for a new one
	run    writeFunc[W, O]
	shared bool // run writes for several tenants

	mu       sync.Mutex
	open     map[int64]*lane[W, O] // by tenant
	queue    []*lane[W, O]         // lanes whose leaders wait for a slot
	separate map[int64]time.Time   // tenants that share no transaction for now, and until when
}

// lane has the writes of one tenant. The mutex of its lanes guards it and its tickets.
type lane[W, O any] struct {
	tenant  int64
	queued  bool                  // a caller was told to lead, and its group has not begun
	running int                   // groups under way
	ready   []*ticket[W, O]       // tickets whose entity is free, in the order of arrival
	last    map[any]*ticket[W, O] // for each entity with a write under way, its last ticket
	waiting int
}

// ticket is one write and its caller.
type ticket[W, O any] struct {
	write W
	key   any
	next  *ticket[W, O] // waits for the same entity
	state ticketState
	told  chan verdict[O] // the one to lead, and the outcome: who tells it never waits for the caller
}

func newTicket[W, O any](write W, key any) *ticket[W, O] {
	return &ticket[W, O]{write: write, key: key, told: make(chan verdict[O], 2)}
}

type ticketState int

const (
	waits ticketState = iota
	leads
	taken
	told
	left
)

// verdict is the outcome that a caller gets, or the instruction to lead or to run alone.
type verdict[O any] struct {
	lead, alone bool
	outs        []O // of its one write, in the array of the group: outcomes are large, and not copied
	err         error
}

// writeFunc writes in one transaction. Each write knows its tenant, or all are of the only one.
type writeFunc[W, O any] func(ctx context.Context, writes []W, at place) ([]O, error)

func newLanes[W, O any](s *slots, key func(W) any, run writeFunc[W, O]) *lanes[W, O] {
	return &lanes[W, O]{slots: s, key: key, run: run, open: make(map[int64]*lane[W, O]), separate: make(map[int64]time.Time)}
}

// do runs writes. It groups a single write with concurrent ones; several writes are one transaction
// of their own.
func (l *lanes[W, O]) do(ctx context.Context, tenant int64, writes []W) ([]O, error) {
	if len(writes) != 1 {
		return l.run(ctx, writes, of(tenant))
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	t := newTicket[W, O](writes[0], l.key(writes[0]))
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
		if err := l.lead(ctx, ln, t); err != nil {
			return nil, err
		}
		v = <-t.told
	}
	switch {
	case v.alone:
		return l.alone(ctx, ln, t)
	case v.err != nil:
		return nil, v.err
	}
	return v.outs, nil
}

// maxWaiting bounds the waiting writes of one tenant and kind, and so their memory.
var maxWaiting = int(bounds.Writes.Tenant.N)

// join adds a ticket to the tenant's lane.
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

// leave ends a caller's wait, unless the caller already has a verdict. A write that a group has
// taken still commits.
func (l *lanes[W, O]) leave(ln *lane[W, O], t *ticket[W, O]) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch t.state {
	case leads, told:
		return false
	case waits:
		l.wait(ln, -1)
	}
	t.state = left
	return true
}

func (t *ticket[W, O]) tell(state ticketState, v verdict[O]) {
	t.state = state
	t.told <- v
}

// next tells the first waiting caller to lead if no group is under way, or one is and many writes
// wait. It removes a lane that has nothing under way. The caller holds the mutex, as for free, take
// and settle.
func (l *lanes[W, O]) next(ln *lane[W, O]) {
	s := l.slots
	idle := len(l.queue) == 0 && len(s.turns)+len(s.more) < cap(s.turns)+cap(s.more) // no other tenant waits
	for !ln.queued && len(ln.ready) > 0 && (ln.running == 0 || idle && ln.running < maxRunning && len(ln.ready) >= busy) {
		if t := ln.ready[0]; t.state != left {
			ln.queued, l.queue = true, append(l.queue, ln)
			t.tell(leads, verdict[O]{lead: true})
			return
		}
		l.free(ln, ln.ready[0])
		ln.ready = ln.ready[1:]
	}
	if !ln.queued && ln.running == 0 && len(ln.last) == 0 && l.open[ln.tenant] == ln {
		delete(l.open, ln.tenant)
	}
}

// free makes the next write of t's entity ready.
func (l *lanes[W, O]) free(ln *lane[W, O], t *ticket[W, O]) {
	if t.next != nil {
		ln.ready = append(ln.ready, t.next)
	} else if t.key != nil {
		delete(ln.last, t.key)
	}
}

// part is a tenant's part of a group.
type part[W, O any] struct {
	*lane[W, O]
	tickets []*ticket[W, O]
	outs    []O
	err     error
}

// lead waits for its turn and a slot, runs the group that has gathered by then, and tells each of
// its callers, also the leader, the outcome. If another leader has taken the lane along, it does
// nothing. It returns an error if ctx ends before either.
func (l *lanes[W, O]) lead(ctx context.Context, ln *lane[W, O], leader *ticket[W, O]) error {
	turn := time.NewTimer(patience)
	defer turn.Stop()
	turns, more := l.slots.turns, l.slots.more
	if l.slots.waiting.Load() < busy {
		more = nil // whoever comes later may have one, and takes this group along
	}
	var slots chan struct{} // once it is the group's turn
	for {
		select {
		case turns <- struct{}{}:
			defer func() { <-l.slots.turns }()
			turns, more, slots = nil, nil, l.slots.groups
			continue
		case more <- struct{}{}:
			defer func() { <-l.slots.more }()
			turns, more, slots = nil, nil, l.slots.groups
			continue
		case <-turn.C:
			turns, more, slots = nil, nil, l.slots.groups
			continue
		case slots <- struct{}{}:
			defer func() { <-slots }()
		case v := <-leader.told: // another leader has run its group
			leader.told <- v
			return nil
		case <-ctx.Done():
			return l.abdicate(ctx, ln, leader)
		}
		break
	}
	group := l.gather(ln, leader)
	if group == nil {
		return nil
	}
	panicked := true
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, p := range group {
			if panicked && p.outs == nil {
				p.err = cmp.Or(p.err, errors.New("store: a group of writes panicked"))
			}
			if panicked {
				leader.state = left // its goroutine panics
			}
			l.settle(p)
		}
	}()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), groupTimeout)
	defer cancel()
	l.runGroup(ctx, group)
	panicked = false
	return nil
}

// abdicate ends the wait of a leader whose ctx has ended, unless another leader runs its group.
func (l *lanes[W, O]) abdicate(ctx context.Context, ln *lane[W, O], leader *ticket[W, O]) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if leader.state != leads {
		return nil
	}
	leader.state, ln.queued = left, false
	l.dequeue(ln)
	l.wait(ln, -1)
	l.next(ln)
	return fmt.Errorf("wait to write for tenant %d: %w", ln.tenant, ctx.Err())
}

func (l *lanes[W, O]) dequeue(ln *lane[W, O]) {
	l.queue = slices.DeleteFunc(l.queue, func(other *lane[W, O]) bool { return other == ln })
}

// gather makes a group of the lane, whose leader has a slot, and of the lanes that wait for one, in
// the order of arrival. nil: another leader has taken the lane along.
func (l *lanes[W, O]) gather(ln *lane[W, O], leader *ticket[W, O]) (group []*part[W, O]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if leader.state != leads {
		return nil
	}
	n := 0
	add := func(ln *lane[W, O]) {
		l.dequeue(ln)
		p := l.take(ln)
		group, n = append(group, p), n+len(p.tickets)
	}
	add(ln)
	for _, other := range slices.Clone(l.queue) {
		if l.shared && n < maxGroup && !l.isSeparate(ln.tenant) && !l.isSeparate(other.tenant) {
			add(other)
		}
	}
	l.slots.runs.Add(1)
	l.slots.grouped.Add(int64(n))
	return group
}

func (l *lanes[W, O]) isSeparate(tenant int64) bool {
	until, ok := l.separate[tenant]
	if ok && time.Now().After(until) {
		delete(l.separate, tenant)
		ok = false
	}
	return ok
}

// take removes a part from the lane's ready tickets, the leader first.
func (l *lanes[W, O]) take(ln *lane[W, O]) *part[W, O] {
	p := &part[W, O]{lane: ln}
	ln.queued = false
	ln.running++
	n := 0
	for ; n < len(ln.ready) && len(p.tickets) < maxGroup; n++ { // ready grows when the ticket of a caller that left frees its entity
		t := ln.ready[n]
		if t.state == left {
			l.free(ln, t)
			continue
		}
		t.state = taken
		p.tickets = append(p.tickets, t)
	}
	ln.ready = append(ln.ready[:0:0], ln.ready[n:]...)
	l.wait(ln, -len(p.tickets))
	return p
}

// runGroup runs the group's writes in one transaction.
func (l *lanes[W, O]) runGroup(ctx context.Context, group []*part[W, O]) {
	at := place{lockTimeout: groupLockTimeout}
	n := 0
	for _, p := range group {
		n += len(p.tickets)
	}
	writes := make([]W, 0, n)
	for _, p := range group {
		at.tenants = append(at.tenants, p.tenant)
		for _, t := range p.tickets {
			writes = append(writes, t.write)
		}
	}
	outs, err := l.run(ctx, writes, at)
	for _, p := range group {
		if p.err = err; err == nil {
			p.outs, outs = outs[:len(p.tickets):len(p.tickets)], outs[len(p.tickets):]
		}
	}
}

// settle tells the callers of a part their outcomes, or each to run its write alone, and the next
// one to lead.
func (l *lanes[W, O]) settle(p *part[W, O]) {
	alone := p.err != nil && !errors.Is(p.err, postgres.ErrUnknown) && !errors.Is(p.err, postgres.ErrUnanswered) &&
		!errors.Is(p.err, context.DeadlineExceeded) && !errors.Is(p.err, errNotOfGroup)
	for i, t := range p.tickets {
		if !alone || t.state == left { // this write does not run alone, which would free its entity
			l.free(p.lane, t)
		}
		if t.state == left {
			continue
		}
		v := verdict[O]{alone: alone, err: p.err}
		if p.err == nil {
			v.outs = p.outs[i : i+1 : i+1]
		}
		t.tell(told, v)
	}
	p.running--
	l.next(p.lane)
}

// alone runs one write for its own caller, and then frees its entity. It retries a locked entity
// for as long as the caller waits. After the first lock timeout it uses the slots for locked writes
// only.
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
		if postgres.IsLockTimeout(err) || err != nil && !postgres.IsTransient(err) {
			l.mu.Lock()
			l.separate[ln.tenant] = time.Now().Add(separateFor)
			l.mu.Unlock()
		}
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
	return l.run(ctx, []W{write}, place{tenants: []int64{tenant}, lockTimeout: aloneLockTimeout})
}
