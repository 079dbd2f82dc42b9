//go:build faults

package relay

import (
	"errors"
	"maps"
	"regexp"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// clusterFleet is a fleet of two relays on three brokers, with a replica of each stream on each
// broker.
type clusterFleet struct {
	*fleet
	c      *testkit.BrokerCluster
	relays [2]*process
}

func newClusterFleet(t *testing.T) *clusterFleet {
	t.Helper()
	c := testkit.NATSCluster(t, 3)
	f := &clusterFleet{fleet: fleetOn(t, testkit.Postgres(t), c.Any(), seeded(t)), c: c}
	for i := range f.relays {
		f.relays[i] = f.relay("", 0)
	}
	f.awaitTakeover()
	c.AwaitReplicas(t, f.stream())
	return f
}

func (f *clusterFleet) stream() string { return f.c.Config().StreamName(0) }

// clusterResumes is the longest time that rows may wait after the loss of a leader. By
// nats-server's election timeouts, an election takes 4 s to 9 s after the last sign of the old
// leader. If two servers are candidates at the same moment, the election takes as long again.
const clusterResumes = 25 * time.Second

// outage returns the longest wait of a row from its commit to its publish, and the wait that one
// row in a hundred exceeds. It does not count earlier waits.
func (f *clusterFleet) outage(since time.Time) (longest, p99 time.Duration) {
	f.t.Helper()
	var most, hundredth float64
	if err := f.pool.QueryRow(f.t.Context(), `
		SELECT coalesce(max(s), 0), coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY s), 0)
		  FROM (SELECT extract(epoch FROM processed_at - greatest(inserted_at, $1))::float8 AS s FROM outbox_messages
		  WHERE processed_at > $1) waits`,
		since).Scan(&most, &hundredth); err != nil {
		f.t.Fatal(err)
	}
	return time.Duration(most * float64(time.Second)), time.Duration(hundredth * float64(time.Second))
}

// resumes fails unless all rows committed by now are published, and no row has waited since then
// for longer than an election.
func (f *clusterFleet) resumes(what string, since time.Time) {
	f.t.Helper()
	f.last(500 * time.Millisecond) // rows are written meanwhile
	f.awaitTakeover()
	longest, p99 := f.outage(since)
	f.t.Logf("%s: rows waited %s at most, 1 in 100 for %s", what, longest.Round(time.Millisecond), p99.Round(time.Millisecond))
	if longest > clusterResumes {
		f.t.Errorf("%s: rows waited for %s", what, longest)
	}
}

// check verifies every promise, and that no relay ever believed a loss of the stream.
func (f *clusterFleet) check() {
	f.t.Helper()
	f.fleet.check()
	if n := f.refused.Load(); n > 0 {
		f.t.Errorf("relays refused the stream %d times", n)
	}
}

func (f *clusterFleet) killLeader() {
	leader, _ := f.c.Leader(f.t, f.stream())
	since := time.Now()
	leader.Kill(f.t)
	f.resumes("leader killed", since)
	leader.Restart(f.t)
	f.awaitTakeover()
	f.c.AwaitReplicas(f.t, f.stream())
}

func TestOnThreeBrokersTheLeaderIsKilledAndRestarted(t *testing.T) {
	t.Parallel()
	f := newClusterFleet(t)
	f.killLeader()
	f.check()
}

func (f *clusterFleet) freezeLeader(d time.Duration) {
	leader, _ := f.c.Leader(f.t, f.stream())
	since := time.Now()
	leader.Freeze(f.t)
	f.last(d)
	leader.Thaw(f.t)
	f.resumes("leader frozen for "+d.String(), since)
	f.c.AwaitReplicas(f.t, f.stream())
}

func TestOnThreeBrokersTheLeaderIsFrozen(t *testing.T) {
	t.Parallel()
	f := newClusterFleet(t)
	f.freezeLeader(6 * time.Second)
	f.check()
}

func (f *clusterFleet) stepDown(times int) {
	since := time.Now()
	for range times {
		f.c.StepDown(f.t, f.stream())
		f.last(time.Second)
	}
	f.resumes("leader stepped down every second", since)
}

func TestOnThreeBrokersTheLeaderStepsDownAgainAndAgain(t *testing.T) {
	t.Parallel()
	f := newClusterFleet(t)
	f.stepDown(6)
	f.check()
}

// loseMajority kills two brokers for d, with or without the leader of the stream.
func (f *clusterFleet) loseMajority(leaderToo bool, d time.Duration) {
	leader, others := f.c.Leader(f.t, f.stream())
	if leaderToo {
		others[0] = leader
	}
	for _, b := range others {
		b.Kill(f.t)
	}
	f.last(d)
	for _, b := range others {
		b.Restart(f.t)
	}
	f.resumes("majority lost for "+d.String(), time.Now())
	f.c.AwaitReplicas(f.t, f.stream())
}

func TestOnThreeBrokersTheMajorityIsLostAndBack(t *testing.T) {
	t.Parallel()
	f := newClusterFleet(t)
	f.loseMajority(false, 6*time.Second)
	f.check()
}

// cutOff separates the leader of the stream from the other brokers for d. Relays still reach it.
func (f *clusterFleet) cutOff(d time.Duration) {
	leader, _ := f.c.Leader(f.t, f.stream())
	since := time.Now()
	f.c.Cut(leader)
	f.last(d)
	f.resumes("leader cut off for "+d.String(), since)
	f.c.Heal(leader)
	f.awaitTakeover()
	f.c.AwaitReplicas(f.t, f.stream())
}

func TestOnThreeBrokersTheLeaderIsCutOff(t *testing.T) {
	t.Parallel()
	f := newClusterFleet(t)
	f.cutOff(12 * time.Second)
	f.check()
}

// onCluster returns a relay in this process, on its own database.
func onCluster(t *testing.T, cfg broker.Config) (*Relay, *pgxpool.Pool) {
	t.Helper()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	r, err := New(testConfig(), pool, cfg, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return r, pool
}

func TestOnThreeBrokersAStreamThatIsGoneIsBelievedOnlyAfterAWhile(t *testing.T) {
	t.Parallel()
	c := testkit.NATSCluster(t, 3)
	r, pool := onCluster(t, c.Config())
	r.sureAfter = 12 * time.Second
	start(t, r)
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	js, err := jetstream.New(c.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	gone := time.Now() // the relay may notice before the answer arrives here
	if err := js.DeleteStream(t.Context(), c.Config().StreamName(0)); err != nil {
		t.Fatal(err)
	}
	insertRow(t, pool, 1, "edited")
	testkit.Within(t, r.sureAfter-time.Second, "the relay to wait", func() (bool, error) {
		return r.Ready(t.Context()) != nil && testutil.ToFloat64(r.metrics.waiting) == 1, nil
	})
	testkit.Eventually(t, "the relay to report that the stream is gone", func() (bool, error) {
		return errors.Is(r.Ready(t.Context()), ErrStreamRefused) && testutil.ToFloat64(r.metrics.stuck) == 1 &&
			testutil.ToFloat64(r.metrics.waiting) == 0, nil
	})
	if waited := time.Since(gone); waited < r.sureAfter {
		t.Errorf("the loss was believed after %s", waited)
	}
}

// TestOnThreeBrokersAPartitionWithoutALeaderDoesNotHoldUpOthers stops a broker with some of the
// streams. No stream has a replica.
func TestOnThreeBrokersAPartitionWithoutALeaderDoesNotHoldUpOthers(t *testing.T) {
	t.Parallel()
	c := testkit.NATSCluster(t, 3)
	cfg := c.Nodes[0].Config()
	cfg.Replicas = 1
	r, pool := onCluster(t, cfg)
	r.cfg.Lease.TTL = time.Minute // so that no lease expires on a busy machine
	added, err := outbox.Resize(t.Context(), pool, 8)
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(c.Nodes[0].Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	victim, gone, kept := c.Nodes[1], 0, []int{}
	for _, p := range added { // one after the other, so that the cluster spreads them
		s, err := broker.Declare(t.Context(), js, cfg, broker.Partition{Number: p.Number, FirstSlot: p.FirstSlot, LastSlot: p.LastSlot,
			After: p.After}, testkit.Logger(t))
		if err != nil {
			t.Fatal(err)
		}
		if s.Leader == "n1" {
			gone++
		} else {
			kept = append(kept, s.Number)
		}
	}
	start(t, r)
	if gone == 0 || len(kept) == 0 {
		t.Fatalf("the broker to stop has %d of the streams", gone)
	}
	epochs := func() map[int]int64 {
		held, err := lease.Holders(t.Context(), pool, LeaseKind)
		if err != nil {
			t.Fatal(err)
		}
		of := map[int]int64{}
		for _, h := range held {
			if slices.Contains(kept, h.Partition) {
				of[h.Partition] = h.Epoch
			}
		}
		return of
	}
	var before map[int]int64
	testkit.Eventually(t, "the relay to hold all partitions", func() (bool, error) {
		before = epochs()
		return len(before) == len(kept), nil
	})
	published := func() (bool, error) {
		var pending int
		err := pool.QueryRow(t.Context(), `
			SELECT count(*) FROM outbox_messages m JOIN outbox_partitions p ON m.slot BETWEEN p.first_slot AND p.last_slot
			 WHERE m.processed_at IS NULL AND p.partition = ANY($1)`, kept).Scan(&pending)
		return pending == 0, err
	}
	write := func() {
		for n := range int64(16) {
			insertRow(t, pool, n, "created")
		}
	}
	write()
	testkit.Eventually(t, "the catch-up of the other partitions", published)
	victim.Kill(t)
	const during = 10 * time.Second
	var slow time.Duration // the sum of the waits above a second; a busy machine can cause one
	for deadline := time.Now().Add(during); time.Now().Before(deadline); {
		write()
		at := time.Now()
		testkit.Within(t, during, "the other partitions to publish", published)
		if waited := time.Since(at); waited > time.Second {
			slow += waited
		}
	}
	if slow > during/2 {
		t.Errorf("for %s of %s, the rows of the other partitions waited for over a second", slow, during)
	}
	testkit.Eventually(t, "the partitions without a leader to wait",
		func() (bool, error) { return testutil.ToFloat64(r.metrics.waiting) == float64(gone), nil })
	if after := epochs(); !maps.Equal(before, after) {
		t.Errorf("the leases of the other partitions were given up: epochs %v, before %v", after, before)
	}
	victim.Restart(t)
	awaitDrained(t, t.Context(), pool, time.Minute)
	testkit.Eventually(t, "the relay to be ready",
		func() (bool, error) { err := r.Ready(t.Context()); return err == nil, err })
	if got := testutil.ToFloat64(r.metrics.waiting); got != 0 {
		t.Errorf("%v partitions wait", got)
	}
}

var connectedTo = regexp.MustCompile(`msg="connected to NATS".* url=(\S+)`)

// TestOnThreeBrokersARelaysOwnBrokerIsFrozen freezes a broker that is not the leader, so only the
// relay's connection is lost.
func TestOnThreeBrokersARelaysOwnBrokerIsFrozen(t *testing.T) {
	t.Parallel()
	f := newClusterFleet(t)
	f.relays[1].Signal(syscall.SIGTERM)
	f.relays[1].AwaitEnd()
	f.awaitTakeover()
	all := connectedTo.FindAllStringSubmatch(f.relays[0].Log(), -1)
	url := all[len(all)-1][1]
	var leader *testkit.Broker
	testkit.Eventually(t, "another broker to lead", func() (bool, error) {
		if leader, _ = f.c.Leader(t, f.stream()); leader.URL != url {
			return true, nil
		}
		f.c.StepDown(t, f.stream())
		return false, nil
	})
	for _, b := range f.c.Nodes {
		if b.URL == url {
			since := time.Now()
			b.Freeze(t)
			f.last(6 * time.Second)
			f.resumes("the relay's broker frozen", since)
			if longest, _ := f.outage(since); longest > clusterResumes {
				t.Errorf("rows waited for %s, although other brokers were available", longest)
			}
			b.Thaw(t)
		}
	}
	f.check()
}
