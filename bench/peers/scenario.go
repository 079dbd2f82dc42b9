package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"
)

// scenario is a fault during a load.
type scenario struct {
	name, what string
	relays     int           // at the start
	entities   int           // of the load
	request    bool          // transactions write to another table first
	drain      bool          // a backlog instead of a load
	pair       bool          // a primary with a synchronous standby
	maxPayload int           // of the broker; 0 for its default
	window     time.Duration // of the broker's deduplication, where the peer uses it; 0 for its default of two minutes
	settle     time.Duration // the longest wait after the load; 0 for --settle
	rounds     bool          // it runs --rounds times, and the table has medians

	fault func(ctx context.Context, r *run) error // runs beside the load; nil for none
}

// poisonMax is the broker's limit where a row is poison, and poisonSize the size of that row.
const (
	poisonMax  = 64 << 10
	poisonSize = 2 * poisonMax
)

var scenarios = []scenario{
	{name: "calm", what: "no fault", relays: 1, entities: 200, rounds: true},
	{
		name: "killed", what: "the relay is killed three times, each time between a publish and its mark, and started again after 0.5 s",
		relays: 1, entities: 200,
		fault: func(ctx context.Context, r *run) error { return killRelay(ctx, r, 500*time.Millisecond) },
	},
	{
		name: "outage", what: "like killed, but started again after 2.5 s, on a broker that deduplicates for 1 s. It models an " +
			"outage that is longer than the usual window of two minutes",
		relays: 1, entities: 200, window: time.Second,
		fault: func(ctx context.Context, r *run) error { return killRelay(ctx, r, 2500*time.Millisecond) },
	},
	{
		name: "frozen", what: "the relay freezes (SIGSTOP) for half of the time while it holds events that it has not published, " +
			"and another one is started meanwhile",
		relays: 1, entities: 200, fault: freezeRelay,
	},
	{
		name: "two", what: "two relays at once; twice both are down for 2 s, so that both then have a backlog",
		relays: 2, entities: 200, rounds: true, fault: gatherForTwo,
	},
	{
		name: "late", what: "one transaction writes its event early and commits late, after half of the time",
		relays: 1, entities: 200, fault: commitLate,
	},
	{
		name: "contended", what: "all transactions write to another table first, and then to one of five entities",
		relays: 1, entities: 5, request: true,
	},
	{
		name: "poison", what: "one event is larger than the broker takes",
		relays: 1, entities: 200, maxPayload: poisonMax, settle: 10 * time.Second, fault: writePoison,
	},
	{name: "broker", what: "the broker is killed, and started again after 2 s", relays: 1, entities: 200, fault: killBroker},
	{
		name: "failover", what: "the database's primary is killed, and its synchronous standby is promoted",
		relays: 1, entities: 200, pair: true, fault: failDatabaseOver,
	},
	{name: "drain", what: "a backlog, from its first message to its last", relays: 1, drain: true, rounds: true},
}

func scenarioNamed(name string) (scenario, error) {
	for _, s := range scenarios {
		if s.name == name {
			return s, nil
		}
	}
	return scenario{}, fmt.Errorf("no scenario %q", name)
}

// after waits until a share of the load's time has passed.
func (r *run) after(ctx context.Context, share float64) {
	sleep(ctx, time.Until(r.began.Add(time.Duration(share*r.load.seconds*float64(time.Second)))))
}

// catch stops the relay (SIGSTOP) at a moment that does the most harm.
func catch(ctx context.Context, r *run, harmful func(context.Context) (bool, error)) error {
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		if err := r.relays[0].signal(syscall.SIGSTOP); err != nil {
			return err
		}
		sleep(ctx, 5*time.Millisecond) // the broker stores what is on its way
		is, err := harmful(ctx)
		if is && err == nil {
			sleep(ctx, 100*time.Millisecond) // a COMMIT may be on its way too
			is, err = harmful(ctx)
		}
		if is || err != nil {
			return err
		}
		if err := r.relays[0].signal(syscall.SIGCONT); err != nil {
			return err
		}
		sleep(ctx, time.Duration(1+rand.IntN(20))*time.Millisecond)
	}
	r.note("the relay was not caught in the middle of its work")
	return r.relays[0].signal(syscall.SIGSTOP)
}

// unmarked reports whether the stream has an event that the outbox has as unpublished. A relay that
// dies now publishes it again.
func (r *run) unmarked(ctx context.Context) (bool, error) {
	left, err := r.p.waiting(ctx, r.pool)
	if err != nil {
		return false, err
	}
	all, err := r.read(ctx)
	return slices.ContainsFunc(all, func(m stored) bool { return left[m.change] }), err
}

// unpublished reports whether the relay holds an event that the stream does not have. A relay that
// freezes now publishes it late. Where nothing shows what a relay holds, unmarked replaces it.
func (r *run) unpublished(ctx context.Context) (bool, error) {
	if r.p.held == "" {
		return r.unmarked(ctx)
	}
	held, err := r.p.changes(ctx, r.pool, r.p.held)
	if err != nil || len(held) == 0 {
		return false, err
	}
	all, err := r.read(ctx)
	for _, m := range all {
		delete(held, m.change)
	}
	return len(held) > 0, err
}

// killRelay kills the relay three times between a publish and its mark.
func killRelay(ctx context.Context, r *run, down time.Duration) error {
	r.after(ctx, 0.15)
	for range 3 {
		if err := catch(ctx, r, r.unmarked); err != nil {
			return err
		}
		r.relays[0].kill()
		sleep(ctx, down)
		if err := r.resume(ctx); err != nil {
			return err
		}
	}
	return nil
}

// resume starts all relays again, and returns when they publish.
func (r *run) resume(ctx context.Context) error {
	before, err := r.messages(ctx)
	if err != nil {
		return err
	}
	for _, p := range r.relays {
		if err := p.start(); err != nil {
			return err
		}
	}
	return await(ctx, time.Minute, "message of the new relay", func() (bool, error) {
		n, err := r.messages(ctx)
		return n > before, err
	})
}

// gatherForTwo stops both relays for a while, so that both then have much to do.
func gatherForTwo(ctx context.Context, r *run) error {
	for _, share := range []float64{0.2, 0.6} {
		r.after(ctx, share)
		for _, p := range r.relays {
			p.kill()
		}
		sleep(ctx, 2*time.Second)
		if err := r.resume(ctx); err != nil {
			return err
		}
	}
	return nil
}

func freezeRelay(ctx context.Context, r *run) error {
	r.after(ctx, 0.2)
	if err := catch(ctx, r, r.unpublished); err != nil {
		return err
	}
	if err := r.addRelay(); err != nil {
		return err
	}
	r.after(ctx, 0.7)
	return r.relays[0].signal(syscall.SIGCONT)
}

func commitLate(ctx context.Context, r *run) error {
	r.after(ctx, 0.25)
	_, err := r.load.write(ctx, "1000001", padding, func() { r.after(ctx, 0.75) })
	return err
}

func writePoison(ctx context.Context, r *run) error {
	r.after(ctx, 0.3)
	c, err := r.load.write(ctx, "7", poisonSize, nil)
	r.poison[c] = true
	return err
}

func killBroker(ctx context.Context, r *run) error {
	r.after(ctx, 0.3)
	r.broker.kill()
	sleep(ctx, 2*time.Second)
	return r.broker.start()
}

func failDatabaseOver(ctx context.Context, r *run) error {
	r.after(ctx, 0.3)
	return failOver(ctx, r.servers[0], r.servers[1])
}
