package relay

import (
	"context"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// mixFloors is the interval of a relay's samples of the horizon in a mix.
const mixFloors = 20 * time.Millisecond

// mix is a fleet of three relays, each behind its own proxies. Its tests cause any fault of the
// servers.
type mix struct {
	*fleet
	rng    *rand.Rand
	server *testkit.PG
	relays [3]*process
	links  [3]links
	stray  *nats.Conn // publishes to the streams without permission
}

// newMix starts the fleet. Its relays run binary.
func newMix(t *testing.T, binary string, seed uint64) *mix {
	t.Helper()
	rng := newRand(seed)
	server := testkit.PostgresProcess(t)
	m := &mix{fleet: seededFleet(t, server.DB(t), rng), rng: rng, server: server}
	m.binary, m.stray = binary, m.b.Connect(t)
	m.writeLong(newRand(rng.Uint64()))
	for i := range m.relays {
		m.links[i] = m.fleet.links()
		m.replace(i)
	}
	m.progress()
	return m
}

// replace makes relay i a new process, and kills the old one if it still runs.
func (m *mix) replace(i int) {
	if m.relays[i] != nil {
		m.relays[i].Kill()
	}
	o := options{via: m.links[i], floorEvery: mixFloors}
	if m.rng.IntN(2) == 0 {
		o.atomicFrom = batches
	}
	m.relays[i] = m.start(o)
}

// progress waits for the next publish. A long wait is no failure here.
func (m *mix) progress() {
	ctx, cancel := context.WithTimeout(m.t.Context(), 10*time.Second)
	defer cancel()
	var before, now int64
	for begun := false; ctx.Err() == nil; {
		err := m.pool.QueryRow(ctx, `SELECT coalesce(sum(tail_seq), 0) FROM outbox_partitions`).Scan(&now)
		switch {
		case err == nil && !begun:
			begun, before = true, now
		case err == nil && now > before:
			return
		}
		m.within(ctx, 20*time.Millisecond)
	}
}

// within waits for d, or until ctx ends.
func (m *mix) within(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// between returns a random time.
func (m *mix) between(low, high time.Duration) time.Duration {
	return low + time.Duration(m.rng.Int64N(int64(high-low)))
}

// fault begins, and returns a function that ends it.
type fault struct {
	name  string
	begin func() (end func())
}

var crashSteps = []string{"after claim", "before commit", "after ack", "before mark", "after mark", "catch-up",
	"before closing", "after closing"}

// ofRelay are the faults of relay i.
func (m *mix) ofRelay(i int) []fault {
	step, nth := crashSteps[m.rng.IntN(len(crashSteps))], 1+m.rng.IntN(5)
	proxy, server := m.links[i].nats, "NATS"
	if m.rng.IntN(2) == 0 {
		proxy, server = m.links[i].db, "PostgreSQL"
	}
	healed := func(disturb func()) func() func() {
		return func() func() { disturb(); return proxy.Heal }
	}
	frozen := func(step string) func() func() {
		return func() func() {
			p := m.relays[i]
			p.arm(crash{Step: step, Signal: syscall.SIGSTOP, Nth: nth})
			ctx, cancel := context.WithTimeout(m.t.Context(), time.Second)
			defer cancel()
			for stopped := false; !stopped && ctx.Err() == nil; {
				m.within(ctx, 5*time.Millisecond)
				stopped, _ = p.Stopped() // fails only if the process has ended
			}
			p.Signal(syscall.SIGSTOP) // stops it anywhere if it did not reach the crash point
			return func() {
				m.within(m.t.Context(), m.between(leaseTTL, 2*leaseTTL)) // its lease expires, and another relay takes over
				p.arm(crash{})
				p.Signal(syscall.SIGCONT) // it may have been killed
			}
		}
	}
	return []fault{
		{"kill " + step, func() func() {
			p := m.relays[i]
			p.arm(crash{Step: step, Signal: syscall.SIGKILL, Nth: nth})
			return func() {
				select {
				case <-p.Ended():
				case <-time.After(time.Second): // it did not reach the crash point: kill it anywhere
				}
				m.replace(i)
			}
		}},
		{"freeze " + step, frozen(step)},
		{"freeze before a publish", frozen("after claim")}, // only the tail check helps here
		{"freeze before a publish, and resize", func() func() { // and the new partitions must not begin yet
			thaw := frozen("after claim")()
			m.resizeSome()
			return thaw
		}},
		{"stop", func() func() {
			m.relays[i].Signal(syscall.SIGTERM)
			return func() { m.replace(i) }
		}},
		{"cut " + server, healed(proxy.Cut)},
		{"delay " + server, healed(func() { proxy.Slow(200 * time.Millisecond) })},
		{"stall " + server, healed(proxy.Stall)},
	}
}

// resizeSome requests a random number of partitions.
func (m *mix) resizeSome() {
	ctx, cancel := context.WithTimeout(m.t.Context(), time.Second)
	defer cancel()
	_, _ = outbox.Resize(ctx, m.pool, 1<<m.rng.IntN(4)) // the server may be unavailable, or the last resize still running
}

// ofServers are the faults that affect every relay.
func (m *mix) ofServers() []fault {
	return []fault{
		{"kill NATS", func() func() { m.b.Kill(m.t); return func() { m.b.Restart(m.t) } }},
		{"freeze NATS", func() func() { m.b.Freeze(m.t); return func() { m.b.Thaw(m.t) } }},
		{"restart PostgreSQL", func() func() { m.server.Restart(m.t); return func() {} }},
		{"freeze PostgreSQL", func() func() { m.server.Freeze(m.t); return func() { m.server.Thaw(m.t) } }},
		{"cut everything", func() func() {
			for _, l := range m.links {
				l.db.Cut()
				l.nats.Cut()
			}
			return func() {
				for _, l := range m.links {
					l.db.Heal()
					l.nats.Heal()
				}
			}
		}},
		{"the database's clock leaps", func() func() {
			// Every lease ends at once, and for a moment two relays hold a partition.
			ctx, cancel := context.WithTimeout(m.t.Context(), time.Second)
			defer cancel()
			for _, table := range []string{"leases", "lease_members"} {
				// the server may be unavailable
				_, _ = m.pool.Exec(ctx, `UPDATE `+table+` SET expires_at = expires_at - interval '10 minutes'`)
			}
			return func() {}
		}},
		{"resize", func() func() { m.resizeSome(); return func() {} }},
		{"the database loses its last marks", func() func() {
			ctx, cancel := context.WithTimeout(m.t.Context(), time.Second)
			defer cancel()
			_, _ = m.pool.Exec(ctx, loseMarksSQL) // the server may be unavailable
			return func() {}
		}},
		{"a stray message", func() func() {
			for n := range 3 { // of whichever exist
				// the server may be unavailable
				_ = m.stray.Publish(event.Subjects(m.b.Config().Prefix, n)[:len(m.b.Config().Prefix)+2]+".x", []byte("hello"))
			}
			return func() {}
		}},
	}
}

// run causes that many rounds of faults, each of one or two different faults, and logs them.
func (m *mix) run(rounds int) {
	m.t.Helper()
	for range rounds {
		order := m.rng.Perm(len(m.relays))
		var now []fault
		if m.rng.IntN(3) > 0 {
			of := m.ofRelay(order[0])
			now = append(now, of[m.rng.IntN(len(of))])
		}
		if of := m.ofServers(); m.rng.IntN(3) == 0 || now == nil {
			now = append(now, of[m.rng.IntN(len(of))])
		} else if m.rng.IntN(2) == 0 {
			of := m.ofRelay(order[1])
			now = append(now, of[m.rng.IntN(len(of))])
		}
		var end []func()
		for _, f := range now {
			m.t.Logf("%s: %s", time.Now().Format("15:04:05.000"), f.name)
			end = append(end, f.begin())
		}
		m.within(m.t.Context(), m.between(100*time.Millisecond, time.Second))
		for _, e := range end {
			e()
		}
		if m.rng.IntN(2) == 0 { // otherwise the next faults hit relays that still recover
			m.progress()
		}
	}
}

// settle ends the remaining faults, stops the writers and lets the relays drain the outbox. It
// returns the damage.
func (m *mix) settle() damage {
	m.t.Helper()
	for i, p := range m.relays {
		select {
		case <-p.Ended():
			m.replace(i)
		default:
		}
	}
	m.stop()
	m.writers.Wait()
	ctx, cancel := context.WithTimeout(m.t.Context(), 2*time.Minute)
	defer cancel()
	for pending := 1; pending > 0 && ctx.Err() == nil; {
		for _, p := range m.relays {
			p.Signal(syscall.SIGCONT) // a relay may have reached its crash point late
		}
		if err := m.pool.QueryRow(ctx, `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`).Scan(&pending); err != nil {
			pending = 1
		}
		m.within(ctx, 20*time.Millisecond)
	}
	d := inspect(m.t, m.t.Context(), m.pool, m.b)
	d.BelowFloor = int(m.belowFloor.Load())
	return d
}

// runMix is one run from its seed.
func runMix(t *testing.T, binary string, seed uint64, rounds int) damage {
	t.Helper()
	m := newMix(t, binary, seed)
	m.run(rounds)
	d := m.settle()
	t.Logf("seed %d: %d rows, %d messages", seed, d.Rows, d.Messages)
	return d
}
