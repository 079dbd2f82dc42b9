//go:build faults

package consumers_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/testkit"
)

// cluster is three brokers in this process.
type cluster struct {
	t       *testing.T
	opts    [3]*server.Options
	servers [3]*server.Server
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t}
	var routes []*url.URL
	for i := range c.opts {
		port, err := pglocal.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", port)})
		client, err := pglocal.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		c.opts[i] = &server.Options{ServerName: fmt.Sprintf("n%d", i), Host: "127.0.0.1", Port: client, JetStream: true,
			JetStreamMaxStore: 1 << 30, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
			Cluster: server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: port}}
	}
	for i := range c.opts {
		c.opts[i].Routes = routes
		c.start(i)
	}
	t.Cleanup(func() {
		for i := range c.servers {
			c.stop(i)
		}
	})
	return c
}

func (c *cluster) start(i int) {
	c.t.Helper()
	s, err := server.NewServer(c.opts[i].Clone())
	if err != nil {
		c.t.Fatal(err)
	}
	s.Start()
	c.servers[i] = s
}

func (c *cluster) stop(i int) {
	if c.servers[i] != nil {
		c.servers[i].Shutdown()
		c.servers[i].WaitForShutdown()
		c.servers[i] = nil
	}
}

// config connects to server i only; the client learns the other servers from it.
func (c *cluster) config(i, replicas int) broker.Config {
	return broker.Config{URL: fmt.Sprintf("nats://127.0.0.1:%d", c.opts[i].Port), Stream: "EVENTS", Prefix: "events",
		LivePrefix: "live", Replicas: replicas, MaxAge: time.Hour, MaxBytes: -1, Timeout: 5 * time.Second, Ping: time.Second}
}

func (c *cluster) rig(t *testing.T, cfg broker.Config, partitions int) *rig {
	t.Helper()
	nc, err := broker.Connect(cfg, "test", testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return newRigOn(t, testkit.Postgres(t), js, cfg, partitions)
}

// awaitPublish waits until the stream has a leader, and publishes an event.
func (r *rig) awaitPublish(follower, followee event.ID, version int64) {
	r.t.Helper()
	testkit.Eventually(r.t, "the stream to have a leader", func() (bool, error) {
		_, err := broker.ReadStream(context.Background(), r.js, r.cfg, r.of(followee))
		return err == nil, err
	})
	r.publish(follow(follower, followee, version))
}

// leads waits until broker i leads the cluster and the stream. It makes the stream's leader step
// down until then.
func (c *cluster) leads(r *rig, i int, stream string) {
	c.t.Helper()
	testkit.Eventually(c.t, "one broker to lead the cluster and the stream", func() (bool, error) {
		s := c.servers[i]
		if !s.JetStreamIsLeader() {
			return false, fmt.Errorf("broker %d no longer leads the cluster", i)
		}
		if s.JetStreamIsStreamLeader(server.DEFAULT_GLOBAL_ACCOUNT, stream) {
			return true, nil
		}
		_, _ = r.js.Conn().Request("$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil, time.Second) // an election may be under way
		return false, nil
	})
}

// TestWithoutAMajorityNothingIsConfirmed leaves one broker running. It remains leader until it
// notices the loss of the others, but its answers prove nothing.
func TestWithoutAMajorityNothingIsConfirmed(t *testing.T) {
	c := newCluster(t)
	left := -1
	testkit.Eventually(t, "a leader of the cluster", func() (bool, error) {
		left = slices.IndexFunc(c.servers[:], (*server.Server).JetStreamIsLeader)
		return left >= 0, nil
	})
	r := c.rig(t, c.config(left, 3), 1)
	c.leads(r, left, r.cfg.StreamName(0))
	in := r.runWith(config(), connect(t, r.cfg), r.system, logbook{}) // its own connection, which it may move to another broker
	r.publish(follow("1", "3", 1))
	r.awaitLag(0)
	testkit.Eventually(t, "as_of to move", func() (bool, error) { return time.Since(r.asOf()) < 2*time.Second, nil })
	others := []int{(left + 1) % 3, (left + 2) % 3}
	for _, i := range others {
		c.stop(i)
	}
	lost := time.Now()
	testkit.Eventually(t, "the consumer to wait for a leader", func() (bool, error) {
		err := in.Ready(context.Background())
		return err != nil && in.metric(t, "tidings_consumer_partitions_waiting") == 1, nil
	})
	if err := in.Ready(context.Background()); err == nil || strings.Contains(err.Error(), "tidings re") {
		t.Errorf("ready: %v", err)
	}
	testkit.Eventually(t, "some reads of the streams", tick(3*time.Second))
	// The leader counts a follower for up to 4 s after it is gone.
	if at := r.asOf(); at.After(lost.Add(4 * time.Second)) {
		t.Errorf("without a leader as_of moved to %s after its loss", at.Sub(lost))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if l, err := consumers.Lag(ctx, r.system, r.js, r.cfg, name); err == nil {
		t.Errorf("without a leader the lag is %+v", l)
	}
	if got := in.metric(t, "tidings_consumer_partitions_stuck"); got > 0 {
		t.Errorf("%v partitions are stuck", got)
	}
	if got := in.metric(t, "tidings_consumer_lag_seconds"); got == 0 {
		t.Error("the lag is 0")
	}
	for _, i := range others {
		c.start(i)
	}
	r.awaitPublish("1", "3", 2)
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}})
	testkit.Eventually(t, "ready", func() (bool, error) { err := in.Ready(context.Background()); return err == nil, err })
}

// TestAStreamWithoutALeaderIsWaitedFor stops the broker that has some of the streams, each without
// a replica. The other streams continue.
func TestAStreamWithoutALeaderIsWaitedFor(t *testing.T) {
	c := newCluster(t)
	const partitions = 8
	r := c.rig(t, c.config(0, 1), partitions)
	in := r.run(r.system, logbook{})
	victim := 1
	if !slices.ContainsFunc(r.open, func(s broker.Stream) bool { return s.Leader == c.opts[victim].ServerName }) {
		victim = 2 // the brokers choose where the streams are
	}
	var gone []int
	for _, s := range r.open {
		if s.Leader == c.opts[victim].ServerName {
			gone = append(gone, s.Number)
		}
	}
	if len(gone) == 0 || len(gone) == partitions {
		t.Fatalf("the broker to stop has the streams %v, want some but not all", gone)
	}
	want := r.flood(64)
	r.awaitLag(0)
	c.stop(victim)
	testkit.Eventually(t, "the consumer to wait for leaders", func() (bool, error) {
		return in.metric(t, "tidings_consumer_partitions_waiting") == float64(len(gone)), nil
	})
	for _, s := range r.open {
		if followee := event.IDOf(s.FirstSlot + 320); s.Leader != c.opts[victim].ServerName {
			r.awaitPublish("1", followee, 1)
			want = append(want, line{"1", followee, 1})
		}
	}
	testkit.Eventually(t, "the other streams", func() (bool, error) { return len(r.lines()) == len(want), nil })
	if got := in.metric(t, "tidings_consumer_partitions_stuck"); got > 0 {
		t.Errorf("%v partitions are stuck", got)
	}
	if got := in.metric(t, "tidings_consumer_partitions_held"); got != partitions {
		t.Errorf("%v partitions are held", got)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if l, err := consumers.Lag(ctx, r.system, r.js, r.cfg, name); err == nil || errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("the lag is %+v, %v", l, err)
	}
	c.start(victim)
	r.awaitPublish("1", event.IDOf(r.open[gone[0]].FirstSlot+320), 1)
	want = append(want, line{"1", event.IDOf(r.open[gone[0]].FirstSlot + 320), 1})
	r.awaitLag(0)
	r.wantLines(want)
	testkit.Eventually(t, "ready", func() (bool, error) { err := in.Ready(context.Background()); return err == nil, err })
}
