package relay

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// pathSeen returns the number of heartbeats that the relay has published, and the sum of their ages
// in seconds.
func (r *Relay) pathSeen(t *testing.T) (n int, seconds float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(r.metrics.path)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	h := families[0].GetMetric()[0].GetHistogram()
	return int(h.GetSampleCount()), h.GetSampleSum()
}

type beat struct {
	Partition int // its partition when it was written
	On        int // the partition that published it
	At        time.Time
}

func (f beat) String() string { return fmt.Sprintf("%d on %d at %s", f.Partition, f.On, f.At) }

func TestHeartbeatsPassThroughWhateverRelaysDo(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	b := testkit.NATS(t)
	live, err := b.Connect(t).SubscribeSync(b.Config().LivePrefix + ".>")
	if err != nil {
		t.Fatal(err)
	}
	const every = 200 * time.Millisecond
	made := func(heartbeat time.Duration) *Relay {
		r := newRelay(t, pool, b)
		r.cfg.Heartbeat = heartbeat        // less than Validate allows
		r.cfg.PublishTimeout = time.Minute // no relay observes a heartbeat whose late answer it did not await
		return r
	}
	beats := func() []beat {
		t.Helper()
		rows, _ := pool.Query(t.Context(), `SELECT (payload->>'partition')::int, coalesce(partition, -1), occurred_at FROM outbox_messages
			WHERE aggregate_type = $1 ORDER BY id`, event.AggregateHeartbeat)
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[beat])
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	await := func(what string, done func(all []beat) bool) {
		t.Helper()
		testkit.Eventually(t, what, func() (bool, error) { return done(beats()), nil })
	}

	// Heartbeats are off: the relay publishes only the row.
	off := made(0)
	stopOff := start(t, off)
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	stopOff()
	if all := beats(); len(all) > 0 {
		t.Errorf("heartbeats although they are off: %v", all)
	}

	// A relay freezes with a claimed heartbeat for longer than its lease, continues to write
	// others, and thaws.
	frozen, thawed := make(chan struct{}), make(chan struct{})
	thaw := sync.OnceFunc(func() { close(thawed) })
	a, other := made(every), made(0)
	var once atomic.Bool
	a.step = func(step string) {
		if step == "before commit" && once.CompareAndSwap(false, true) {
			close(frozen)
			<-thawed
		}
	}
	stopA := start(t, a)
	t.Cleanup(thaw) // otherwise a failed test waits for its end forever
	select {
	case <-frozen:
	case <-time.After(time.Minute):
		t.Fatal("the relay published no heartbeat")
	}
	stopOther := start(t, other)
	await("a relay that writes none to publish another's", func(all []beat) bool {
		// The frozen relay may take the lease again at any time, and then keeps it.
		if _, err := pool.Exec(t.Context(), `UPDATE leases SET expires_at = now() - interval '1 s', owner = '' WHERE owner = $1`,
			a.owner); err != nil {
			t.Fatal(err)
		}
		return len(all) > 3 && all[3].On == 0
	})
	thaw()
	if n, seconds := other.pathSeen(t); n < 3 || seconds <= 0 {
		t.Errorf("the relay that took over has published %d heartbeats, %f s old", n, seconds)
	}

	// Two relays write heartbeats while the partitions are replaced.
	second := made(every)
	stopSecond := start(t, second)
	if _, err := outbox.Resize(t.Context(), pool, 4); err != nil {
		t.Fatal(err)
	}
	await("two heartbeats through each of the new partitions", func(all []beat) bool {
		through := map[int]int{}
		for _, h := range all {
			through[h.On]++
		}
		return through[1] > 1 && through[2] > 1 && through[3] > 1 && through[4] > 1
	})
	stopA()
	stopSecond()
	for _, r := range []*Relay{a, second} {
		r.pool.Close()
	}
	testkit.Eventually(t, "their sessions to end, which may still commit a heartbeat", func() (bool, error) {
		var sessions int32
		err := owner.QueryRow(t.Context(), `SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database()
			AND backend_type = 'client backend'`).Scan(&sessions)
		for _, p := range []*pgxpool.Pool{pool, owner, off.pool, other.pool} {
			sessions -= p.Stat().TotalConns()
		}
		return sessions == 0, err
	})
	awaitDrained(t, t.Context(), pool, time.Minute)
	stopOther()

	last := map[int]time.Time{}
	all := beats()
	for _, h := range all {
		if since := h.At.Sub(last[h.Partition]); since < every {
			t.Errorf("a heartbeat %s, %s after the last", h, since)
		}
		last[h.Partition] = h.At
		if h.On != h.Partition && h.Partition != 0 {
			t.Errorf("a heartbeat in the wrong partition: %s", h)
		}
	}
	published, caughtUp := 0, 0
	for _, r := range []*Relay{a, second, other} {
		n, _ := r.pathSeen(t)
		published, caughtUp = published+n, caughtUp+int(testutil.ToFloat64(r.metrics.caughtUp))
	}
	if published < len(all)-caughtUp || published > len(all) { // no relay observes a heartbeat that only a catch-up found
		t.Errorf("%d heartbeats, %d observed when they were published, %d found by catch-ups", len(all), published, caughtUp)
	}
	d := inspect(t, t.Context(), pool, b)
	if d.Inversions = 0; d.any() { // they have no versions
		t.Errorf("the stream differs from the committed rows: %+v", d)
	}
	for m, err := live.NextMsg(time.Second); ; m, err = live.NextMsg(10 * time.Millisecond) {
		if errors.Is(err, nats.ErrTimeout) {
			break
		} else if err != nil || m.Header.Get(event.HeaderType) != "tidings.post.created.v1" {
			t.Errorf("live: %v, %v", m, err)
			break
		}
	}
}

// TestHeartbeatsShowThatTheBrokerIsAway: relays write heartbeats without a broker, and these are
// old when published.
func TestHeartbeatsShowThatTheBrokerIsAway(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATSProcess(t)
	r := newRelay(t, pool, b)
	r.cfg.Heartbeat = 100 * time.Millisecond
	r.cfg.PublishTimeout = time.Minute // no relay observes a heartbeat whose late answer it did not await
	start(t, r)
	published := func(least int) (seconds float64) {
		t.Helper()
		testkit.Eventually(t, "heartbeats to be published", func() (bool, error) {
			n, s := r.pathSeen(t)
			seconds = s
			return n >= least, nil
		})
		return seconds
	}
	published(2)
	b.Kill(t)
	testkit.Eventually(t, "the relay to notice", func() (bool, error) { return r.Ready(t.Context()) != nil, nil })
	before, _ := r.pathSeen(t)
	written := testutil.ToFloat64(r.metrics.heartbeats)
	testkit.Eventually(t, "ten to be written meanwhile",
		func() (bool, error) { return testutil.ToFloat64(r.metrics.heartbeats) >= written+10, nil })
	if n, _ := r.pathSeen(t); n > before {
		t.Errorf("%d heartbeats were published without a broker", n-before)
	}
	_, young := r.pathSeen(t)
	b.Restart(t)
	if old := published(before+10) - young; old < 10*9/2*0.1 { // each waited at least for the later ones
		t.Errorf("the ages of ten delayed heartbeats add up to %f s", old)
	}
}
