package subscribe

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
)

// looks is the number of successive looks that see too many turns before an instance passes some. A
// request of an instance that has just died still waits at one of them.
const looks = 3

// countOthers counts the instances that wait for a turn: each has one request at NATS. pulls is
// r.pulls from before the query of the consumer's state. It counts one too few if this instance's
// own request began or ended meanwhile, and never one too many.
func (r *reader) countOthers(i *jetstream.ConsumerInfo, pulls uint64) {
	own := 1
	if pulls%2 == 0 && r.pulls.Load() == pulls {
		own = 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.others = max(0, i.NumWaiting-own)
}

// shareTurns passes turns to other instances if this instance has more than its share of the
// streams, rounded up. NATS gives a turn to the instance whose request is first, and so it gives
// the turns of all partitions to the first instance that starts.
func (s *subscriber) shareTurns(readers []*reader) {
	instances, turns := 1, 0
	var shared []*reader
	for _, r := range readers {
		r.mu.Lock()
		instances = max(instances, 1+r.others)
		if r.pin != "" {
			turns++
			if r.others > 0 {
				shared = append(shared, r)
			}
		}
		r.mu.Unlock()
	}
	excess := turns - (len(readers)+instances-1)/instances
	if s.crowded++; excess <= 0 {
		s.crowded = 0
	}
	if s.crowded < looks {
		return
	}
	s.crowded = 0
	for _, r := range shared[:min(excess, len(shared))] {
		r.yield.Store(true)
	}
}

// passTurn gives the events in hand back, and requests none until NATS has ended the turn, after
// Takeover, and given it to an instance that waits. A subscriber with credentials may not end it.
func (r *reader) passTurn(ctx context.Context) {
	r.Log.InfoContext(ctx, "passing a partition to another instance", "stream", r.stream)
	r.giveBack()
	work.Sleep(ctx, r.Takeover*3/2)
}

// giveBack ends this instance's turn to read in order. Events that are not being handled go to the
// instance with the next turn.
func (r *reader) giveBack() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endTurn()
}

// endTurn is giveBack for a caller that holds r.mu. The next turn may be this instance's own: NATS
// ends the turn of an instance that stalls.
func (r *reader) endTurn() {
	r.endTerm()
	for _, m := range r.held {
		_ = m.Nak()
		delete(r.undone, m.seq)
	}
	r.pin, r.held, r.behind, r.missing, r.repeated = "", nil, false, 0, false
}

// mayRead reports whether it is still this instance's turn. NATS refuses the requests of an ended
// turn only while it has events to deliver or another instance has the turn. Without this, two
// instances could hold events and wait for the other's forever.
func (r *reader) mayRead(i *jetstream.ConsumerInfo) bool {
	return slices.ContainsFunc(i.PriorityGroups, func(g jetstream.PriorityGroupState) bool {
		return g.Group == broker.OrderGroup && g.PinnedClientID == r.pin
	})
}

// settle dispatches the held events, once NATS has delivered the unfinished events of the previous
// turn again, and those of lost deliveries. NATS does that after AckWait. Events in hand from an
// earlier turn of this instance count as unfinished: work gives back those that it has not begun.
func (r *reader) settle(ctx context.Context) error {
	if !r.behind {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.Broker.Timeout)
	defer cancel()
	i, err := r.consumer.Info(ctx)
	if err != nil {
		return fmt.Errorf("read the state of consumer %s of stream %s: %w", r.durable, r.stream, err)
	}
	if !r.mayRead(i) {
		r.giveBack()
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.missing = i.NumAckPending
	for _, m := range r.undone {
		if m.term.Err() == nil {
			r.missing--
		}
	}
	if r.missing > 0 {
		return nil
	}
	slices.SortFunc(r.held, func(a, b *message) int { return cmp.Compare(a.seq, b.seq) })
	for _, m := range r.held {
		r.dispatch(m)
	}
	r.held, r.behind, r.missing, r.repeated = nil, false, 0, false
	return nil
}
