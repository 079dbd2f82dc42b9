package relay

import (
	"math/bits"
	"sync"
	"time"
)

// pace estimates the cost of a publish. Each message sent alone waits for its own ack. An atomic
// batch has a fixed cost, which varies tenfold with how the broker syncs and replicates
// (docs/performance.md). So pace measures both. It is safe for concurrent use.
type pace struct {
	from int // if above 0, batches from this many messages on; only in tests

	mu     sync.Mutex
	single float64     // seconds per message sent alone
	many   [11]float64 // seconds per batch, by the bit length of its number of messages
	asked  int
}

const (
	smoothing    = 0.2 // the weight of a new measurement
	exploreEvery = 100 // one decision in this many tries the slower way, unless that costs much
	exploreCost  = 4   // a way that costs this many times the faster one is not tried again
)

// estimates returns the cost in seconds of n messages one by one and as a batch. Without a
// measurement it estimates low, so that the relay tries that way.
func (p *pace) estimates(n int) (singles, batch float64) {
	b := bits.Len(uint(min(n, 1000)))
	for batch = p.many[b]; batch == 0 && b > 0; b-- {
		batch = p.many[b-1]
	}
	return float64(n) * p.single, batch
}

// batch reports whether to send n messages as a batch.
func (p *pace) batch(n int) bool {
	if n < 2 || p.from > 0 {
		return n > 1 && n >= p.from
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	singles, batch := p.estimates(n)
	better := batch < singles
	if singles == 0 { // no measurement yet: the relay has just started
		better = n >= 16
	}
	if p.asked++; p.asked%exploreEvery == 0 && max(singles, batch) < exploreCost*min(singles, batch) {
		return !better
	}
	return better
}

// turn reports whether to send the rest of n messages as a batch. It does so once the single
// messages have taken as long as a batch of all. The link may have become slow since the last
// measurement. So no choice costs much more than twice the other.
func (p *pace) turn(n int, took time.Duration) bool {
	if p.from > 0 {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, batch := p.estimates(n)
	return batch > 0 && took.Seconds() > batch
}

// observe records that n messages took this time. step is 1 for single messages, above 1 for a
// batch.
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
