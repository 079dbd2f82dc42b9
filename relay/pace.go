package relay

import (
	"math/bits"
	"sync"
	"time"
)

// pace knows what a publish costs: each message sent alone waits for its own ack, and an atomic batch has a fixed cost, which differs by
// ten with how the broker syncs and replicates (docs/performance.md). It is measured, and safe for concurrent use.
type pace struct {
	from int // batches from so many messages, whatever they cost; 0 but in tests

	mu     sync.Mutex
	single float64     // seconds per message sent alone
	many   [11]float64 // seconds per batch, by the bits of its length
	asked  int
}

const (
	smoothing    = 0.2 // the weight of a new measurement
	exploreEvery = 100 // decisions, of which one goes the other way where that is not known to cost much
	exploreCost  = 4   // times the cost of the better way: more than that is not tried again
)

// estimates returns what n messages cost one by one, and as a batch. What was never measured is guessed low, so that it is tried.
func (p *pace) estimates(n int) (singles, batch float64) {
	b := bits.Len(uint(min(n, 1000)))
	for batch = p.many[b]; batch == 0 && b > 0; b-- {
		batch = p.many[b-1]
	}
	return float64(n) * p.single, batch
}

// batch reports whether n messages are to be sent as a batch.
func (p *pace) batch(n int) bool {
	if n < 2 || p.from > 0 {
		return n > 1 && n >= p.from
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	singles, batch := p.estimates(n)
	better := batch < singles
	if singles == 0 { // nothing is known of a relay that has just begun
		better = n >= 16
	}
	if p.asked++; p.asked%exploreEvery == 0 && max(singles, batch) < exploreCost*min(singles, batch) {
		return !better
	}
	return better
}

// turn reports whether what is left of n messages is better sent as a batch: those that were sent one by one have taken as long as a batch of all
// would. A link may have become slow since a message was measured. So no choice costs much more than twice the other one.
func (p *pace) turn(n int, took time.Duration) bool {
	if p.from > 0 {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, batch := p.estimates(n)
	return batch > 0 && took.Seconds() > batch
}

// observe takes in that n messages, step at a time, took so long.
func (p *pace) observe(n, step int, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	known, cost := &p.single, took.Seconds()/float64(n)
	if step > 1 {
		known, cost = &p.many[bits.Len(uint(min(n, 1000)))], took.Seconds()
	}
	if *known == 0 {
		*known = cost
	}
	*known += smoothing * (cost - *known)
}
