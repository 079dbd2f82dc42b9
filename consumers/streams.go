package consumers

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/work"
)

const (
	patience      = 3                      // consecutive failed reads of the streams before the instance leaves its partitions to others
	sampleTimeout = 2 * time.Second        // of one read
	sampleRetry   = 200 * time.Millisecond // between failed reads
	// settled is subtracted from the time of a stream's description: the server counts the messages
	// before it takes the time.
	settled = 100 * time.Millisecond
)

// watch reads the state of the streams until ctx ends: every LagInterval, and soon after a reader
// fails. While it can read them, the instance takes its share of the partitions. An instance that
// is cut off frees its partitions for other instances and tries another broker.
func (c *Consumer) watch(ctx context.Context) {
	var joined work.Crew[string, *lease.Group] // of the group, as long as this instance can read the streams
	defer joined.Close()
	failures := 0
	for ctx.Err() == nil {
		wait := c.cfg.LagInterval
		err := c.sample(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			failures = 0
			c.setCutOff(nil)
			joined.Start(ctx, c.name, c.group, func(ctx context.Context) { _ = c.group.Run(ctx) }) // it logs its failures
		default:
			c.lag.fail()
			wait = sampleRetry
			if failures++; failures == 1 || failures == patience {
				c.log.WarnContext(ctx, "reading the streams failed, retrying", "failures", failures, "err", err)
			}
			if failures < patience {
				break
			}
			if failures%patience == 0 {
				c.leaveBroker(ctx)
			}
			c.setCutOff(fmt.Errorf("cut off from the streams; other instances take the partitions: %w", err))
			joined.Close()
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-c.sampleNow:
			work.Sleep(ctx, min(sampleRetry, wait))
		case <-t.C:
		}
		t.Stop()
	}
}

// leaveBroker makes the connection try another broker if it knows one. The current broker may
// answer and yet be cut off from the others.
func (c *Consumer) leaveBroker(ctx context.Context) {
	nc := c.deps.JetStream.Conn()
	if !nc.IsConnected() || len(nc.Servers()) < 2 {
		return
	}
	c.log.WarnContext(ctx, "trying another broker", broker.Where(nc)...)
	if err := nc.ForceReconnect(); err != nil {
		c.log.WarnContext(ctx, "reconnecting to another broker failed", "err", err)
	}
}

func (c *Consumer) setCutOff(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cutOff = err
	c.count()
}

// sample reads the offsets and then the leaders' descriptions of the streams. It tells the group
// which partitions exist, and measures those that this instance holds. An error means that it could
// read none of the streams that it needs.
func (c *Consumer) sample(ctx context.Context) error {
	qctx, cancel := context.WithTimeout(ctx, c.broker.Timeout)
	defer cancel()
	all, dbErr := readOffsets(qctx, c.deps.Pool, c.name)
	bctx, cancel := context.WithTimeout(ctx, min(sampleTimeout, c.broker.Timeout))
	defer cancel()
	streams, err := broker.Streams(bctx, c.deps.JetStream, c.broker)
	held := c.group.Held()
	needed := func(s broker.Stream) bool { return len(held) == 0 || slices.Contains(held, s.Number) }
	if err != nil && !slices.ContainsFunc(streams, needed) {
		return err
	}
	c.remember(streams, err == nil)
	offsets := all[c.name]
	if dbErr == nil && err == nil {
		var begun bool
		if begun, dbErr = c.begin(qctx, streams, offsets); begun && dbErr == nil {
			if all, dbErr = readOffsets(qctx, c.deps.Pool, c.name); dbErr == nil {
				offsets = all[c.name]
			}
		}
	}
	if dbErr == nil {
		c.group.Share(c.open(offsets))
		dbErr = c.measure(qctx, bctx, held, offsets, streams, err == nil)
	}
	if dbErr != nil && ctx.Err() == nil {
		c.log.WarnContext(ctx, "measuring the lag failed, trying again", "err", dbErr)
	}
	return nil
}

// remember stores the descriptions of the streams. Streams that are missing from a complete list
// are gone.
func (c *Consumer) remember(streams []broker.Stream, complete bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if complete {
		clear(c.streams)
	}
	for _, s := range streams {
		c.streams[s.Name] = s
	}
}

// open returns the partitions to read: those with a stream, or with an offset whose stream is gone,
// except the closed ones.
func (c *Consumer) open(offsets map[string]offset) (partitions []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, s := range c.streams {
		if !offsets[name].Closed {
			partitions = append(partitions, s.Number)
		}
	}
	for name, o := range offsets {
		if _, ok := c.streams[name]; ok || o.Closed {
			continue
		}
		if n, ok := c.broker.Number(name); ok {
			partitions = append(partitions, n)
		}
	}
	return partitions
}

// measure records how far the partitions that this instance holds are behind, and moves as_of of
// those that are applied to their ends. It restarts a reader whose next messages are missing, or
// whose stream was replaced.
func (c *Consumer) measure(qctx, bctx context.Context, held []int, offsets map[string]offset,
	streams []broker.Stream, complete bool) error {
	now := time.Now()
	var messages int64
	var oldest time.Duration
	blind := false
	for _, n := range held {
		name := c.broker.StreamName(n)
		i := slices.IndexFunc(streams, func(s broker.Stream) bool { return s.Number == n })
		o := offsets[name]
		if o.Closed {
			continue
		}
		missing := i < 0
		if !missing {
			reason, err := lost(bctx, c.deps.JetStream, o, streams[i])
			if err != nil {
				blind = true
				continue
			}
			missing = reason != nil
		}
		if missing {
			blind = true
			messages++ // at least
			if complete {
				c.restartSession(n)
			}
			continue
		}
		count, age, found, err := behind(bctx, c.deps.JetStream, streams[i], o.Seq)
		if err != nil {
			blind = true
			continue
		}
		messages += count
		oldest = max(oldest, age)
		switch {
		case count > 0 && !found:
			c.restartSession(n)
		case count == 0 && o.Stream != "":
			at := streams[i].At.Add(-settled)
			if _, err := c.deps.Pool.Exec(qctx, confirmSQL, pgx.StrictNamedArgs{"consumer": c.name, "key": name, "at": at}); err != nil {
				return fmt.Errorf("record that stream %s is applied to its end: %w", name, err)
			}
		}
	}
	c.metrics.lagMessages.Set(float64(messages))
	c.lag.set(now, oldest, blind)
	letters, err := countDeadLetters(qctx, c.deps.Pool, c.name)
	if err == nil {
		c.metrics.deadLetters.Set(float64(letters))
	}
	return err
}

// restartSession ends the session of a reader, so that it reads the offset and the stream again.
func (c *Consumer) restartSession(partition int) {
	r, ok := c.readers.Of(partition)
	c.mu.Lock()
	defer c.mu.Unlock()
	if ok && r.again != nil {
		r.again()
	}
}
