package testkit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/pglocal"
)

// BrokerCluster is a NATS cluster of one test. Each node is a process, which the test may kill, freeze, thaw and restart.
type BrokerCluster struct {
	Nodes []*Broker // their Config connects to the node alone, with as many replicas as there are nodes

	cfg broker.Config
	js  jetstream.JetStream // for Leader and AwaitReplicas
}

// clusterTimeout bounds how long a cluster may take to elect: seconds, on a busy machine more.
const clusterTimeout = 90 * time.Second

// NATSCluster returns a cluster of the test's own with n servers in child processes, once it takes streams of n replicas. Like
// NATSProcess it syncs lazily. TEST_NATS_URL is not used.
func NATSCluster(t testing.TB, n int) *BrokerCluster {
	t.Helper()
	skipIfShort(t)
	c := &BrokerCluster{Nodes: make([]*Broker, n)}
	ports := freePorts(t, 2*n) // clients' ports and routes' ports in turn
	var routes, urls []string
	for i := range n {
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", ports[2*i+1]))
	}
	for i := range n {
		c.Nodes[i] = &Broker{serve: broker.ServerConfig{Dir: t.TempDir(), Port: ports[2*i], LazySync: true,
			Cluster: &broker.Cluster{Server: nodeName(i), Port: ports[2*i+1], Routes: routes}}}
	}
	var starting sync.WaitGroup
	errs := make([]error, n)
	for i, b := range c.Nodes {
		starting.Go(func() { b.child, errs[i] = startChild(b.serve) })
	}
	starting.Wait()
	for i, b := range c.Nodes {
		if errs[i] != nil {
			continue
		}
		t.Cleanup(func() { check(t, "stop NATS", b.child.kill()) })
		b.setURL(b.child.url)
		b.cfg.Replicas = n
		urls = append(urls, b.URL)
	}
	for _, err := range errs {
		if err != nil {
			t.Fatalf("NATS cluster for the test: %v", err)
		}
	}
	c.cfg = c.Nodes[0].cfg
	c.cfg.URL = strings.Join(urls, ",")
	var err error
	if c.js, err = jetstream.New(c.Connect(t)); err != nil {
		t.Fatal(err)
	}
	c.awaitPeers(t)
	return c
}

func nodeName(i int) string { return fmt.Sprintf("n%d", i) }

// Config connects to whichever node answers, with as many replicas as there are nodes.
func (c *BrokerCluster) Config() broker.Config { return c.cfg }

// Connect returns a connection to whichever node answers, which is closed when the test ends.
func (c *BrokerCluster) Connect(t testing.TB) *nats.Conn {
	t.Helper()
	return (&Broker{cfg: c.cfg}).Connect(t)
}

// Leader returns the node that leads a stream and the others, once there is a leader.
func (c *BrokerCluster) Leader(t testing.TB, stream string) (leader *Broker, others []*Broker) {
	t.Helper()
	Eventually(t, clusterTimeout, "the stream has a leader", func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s, err := c.js.Stream(ctx, stream)
		if err != nil {
			return false, err
		}
		info := s.CachedInfo().Cluster
		others = nil
		for i, b := range c.Nodes {
			if nodeName(i) == info.Leader {
				leader = b
			} else {
				others = append(others, b)
			}
		}
		return len(others) == len(c.Nodes)-1, nil
	})
	return leader, others
}

// AwaitReplicas waits until all replicas of a stream have what its leader has.
func (c *BrokerCluster) AwaitReplicas(t testing.TB, stream string) {
	t.Helper()
	Eventually(t, clusterTimeout, "the stream's replicas are current", func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s, err := c.js.Stream(ctx, stream)
		if err != nil {
			return false, err
		}
		info := s.CachedInfo().Cluster
		return info.Leader != "" && len(info.Replicas) == len(c.Nodes)-1 &&
			!slices.ContainsFunc(info.Replicas, func(p *jetstream.PeerInfo) bool { return p.Offline || !p.Current }), nil
	})
}

// awaitPeers waits until the cluster takes a stream with a replica on each node.
func (c *BrokerCluster) awaitPeers(t testing.TB) {
	t.Helper()
	const name = "TESTKIT_READY"
	Eventually(t, clusterTimeout, "the cluster takes replicated streams", func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if _, err := c.js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name}, Storage: jetstream.MemoryStorage, Replicas: len(c.Nodes)}); err != nil {
			return false, err
		}
		return true, c.js.DeleteStream(ctx, name)
	})
}

// freePorts returns n different ones.
func freePorts(t testing.TB, n int) (ports []int) {
	t.Helper()
	for len(ports) < n {
		port, err := pglocal.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(ports, port) {
			ports = append(ports, port)
		}
	}
	return ports
}
