package relay

import (
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
)

// clusterFleet is a fleet of two relays on three brokers with a replica of each stream.
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

// clusterResumes is the longest that rows may wait when a leader is lost. An election takes the brokers 4 s to 9 s (nats-server's
// election timeouts) after the last that they have heard of the old leader.
const clusterResumes = 15 * time.Second

// outage returns the longest that a row has waited to be published, and the least that one in a hundred has, not counting what it had waited by since.
func (f *clusterFleet) outage(since time.Time) (longest, p99 time.Duration) {
	f.t.Helper()
	var most, hundredth float64
	if err := f.pool.QueryRow(f.t.Context(), `
		SELECT coalesce(max(s), 0), coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY s), 0)
		  FROM (SELECT extract(epoch FROM processed_at - greatest(inserted_at, $1))::float8 AS s FROM outbox_messages WHERE processed_at > $1) waits`,
		since).Scan(&most, &hundredth); err != nil {
		f.t.Fatal(err)
	}
	return time.Duration(most * float64(time.Second)), time.Duration(hundredth * float64(time.Second))
}

// resumes fails unless everything that is committed now is published, and no row has waited for longer than an election takes since then.
func (f *clusterFleet) resumes(what string, since time.Time) {
	f.t.Helper()
	f.last(500 * time.Millisecond) // so that rows are written meanwhile
	f.awaitTakeover()
	longest, p99 := f.outage(since)
	f.t.Logf("%s: rows waited %s at most, 1 in 100 for %s", what, longest.Round(time.Millisecond), p99.Round(time.Millisecond))
	if longest > clusterResumes {
		f.t.Errorf("%s: rows waited for %s", what, longest)
	}
}

// check checks every promise, and that no relay ever took the stream for lost.
func (f *clusterFleet) check() {
	f.t.Helper()
	f.fleet.check()
	if n := f.refused.Load(); n > 0 {
		f.t.Errorf("relays refused the stream %d times", n)
	}
}

func TestOnThreeBrokersTheLeaderIsKilledAndRestarted(t *testing.T) {
	t.Parallel()
	f := newClusterFleet(t)
	leader, _ := f.c.Leader(t, f.stream())
	since := time.Now()
	leader.Kill(t)
	f.resumes("leader killed", since)
	leader.Restart(t)
	f.awaitTakeover()
	f.c.AwaitReplicas(t, f.stream())
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

// loseMajority kills two brokers, the leader of the stream among them or not, for d.
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

// cutOff cuts the leader of the stream off from the other brokers for d. Relays that are connected to it reach it still.
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
