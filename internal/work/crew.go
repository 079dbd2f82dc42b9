package work

import (
	"context"
	"slices"
	"sync"
)

// Crew is the workers of one instance, at most one per key. The zero value has none. Its methods
// may be called from any goroutine.
type Crew[K comparable, W any] struct {
	// Ended is given after workers have returned, if it is set.
	Ended Signal

	mu      sync.Mutex
	workers map[K]member[W]
	running sync.WaitGroup
}

type member[W any] struct {
	worker W
	stop   context.CancelFunc
}

// Start starts a worker, unless the key has one. The context of run ends with ctx, or when the
// worker is stopped. The key is free again when run has returned.
func (c *Crew[K, W]) Start(ctx context.Context, key K, worker W, run func(context.Context)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, busy := c.workers[key]; busy {
		return
	}
	if c.workers == nil {
		c.workers = make(map[K]member[W])
	}
	ctx, stop := context.WithCancel(ctx)
	c.workers[key] = member[W]{worker, stop}
	c.running.Go(func() {
		defer stop()
		run(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.workers, key)
		c.Ended.Notify()
	})
}

// Assign stops the workers of other keys, and starts one for each of the keys that has none. hire
// returns a worker and its run function (see Start).
func (c *Crew[K, W]) Assign(ctx context.Context, keys []K, hire func(K) (W, func(context.Context))) {
	c.Keep(keys)
	for _, key := range keys {
		if _, busy := c.Of(key); !busy {
			worker, run := hire(key)
			c.Start(ctx, key, worker, run)
		}
	}
}

// Keep stops the workers of other keys.
func (c *Crew[K, W]) Keep(keys []K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, m := range c.workers {
		if !slices.Contains(keys, key) {
			m.stop()
		}
	}
}

// Stop stops the worker of a key, if it has one.
func (c *Crew[K, W]) Stop(key K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m, busy := c.workers[key]; busy {
		m.stop()
	}
}

// Of returns the worker of a key, also while it stops.
func (c *Crew[K, W]) Of(key K) (worker W, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, ok := c.workers[key]
	return m.worker, ok
}

// All yields the workers, in no order. The loop must not use the crew.
func (c *Crew[K, W]) All(yield func(W) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.workers {
		if !yield(m.worker) {
			return
		}
	}
}

// Close stops all workers and waits until they have returned. Nobody may start one meanwhile.
func (c *Crew[K, W]) Close() {
	c.Keep(nil)
	c.running.Wait()
}
