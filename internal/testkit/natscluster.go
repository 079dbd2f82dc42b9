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

// BrokerCluster is a NATS cluster of one test. Each node is a process, which the test may kill, freeze, thaw, restart, and cut off from the others.
type BrokerCluster struct {
	Nodes []*Broker // their Config connects to the node alone, with as many replicas as there are nodes

	cfg    broker.Config
	js     jetstream.JetStream // for Leader and AwaitReplicas
	routes map[*Broker][]*Proxy
}

// clusterTimeout bounds how long a cluster may take to elect: seconds, on a busy machine more.
const clusterTimeout = 90 * time.Second

// NATSCluster returns a cluster of the test's own with n servers in child processes, once it takes streams of n replicas. Like
// NATSProcess it syncs lazily. TEST_NATS_URL is not used.
func NATSCluster(t testing.TB, n int) *BrokerCluster {
	t.Helper()
	skipIfShort(t)
	c := &BrokerCluster{Nodes: make([]*Broker, n), routes: make(map[*Broker][]*Proxy)}
	ports := freePorts(t, 2*n) // clients' ports and routes' ports in turn
	var urls []string
	for i := range n {
		// Streams go to the node with the most room, so all have the same.
		// Each node connects to those before it, by a proxy for each pair, and what it advertises leads nowhere: so there is no other way.
		member := &broker.Cluster{Server: nodeName(i), Port: ports[2*i+1], Advertise: "127.0.0.1:1"}
		c.Nodes[i] = &Broker{serve: broker.ServerConfig{Dir: t.TempDir(), Port: ports[2*i], MaxStore: 4 << 30, LazySync: true, Cluster: member}}
		for j := range i {
			p := NewProxy(t, fmt.Sprintf("127.0.0.1:%d", ports[2*j+1]))
			member.Routes = append(member.Routes, "nats://"+p.Addr())
			for _, end := range []*Broker{c.Nodes[i], c.Nodes[j]} {
				c.routes[end] = append(c.routes[end], p)
			}
		}
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
	return c.Any().Connect(t)
}

// Any returns the cluster as one broker: a client of it connects to whichever node answers.
func (c *BrokerCluster) Any() *Broker { return &Broker{URL: c.cfg.URL, cfg: c.cfg} }

// Cut has a node and the others hear nothing of each other any more. Clients reach all of them.
func (c *BrokerCluster) Cut(b *Broker) {
	for _, p := range c.routes[b] {
		p.Stall()
	}
}

// Heal undoes Cut.
func (c *BrokerCluster) Heal(b *Broker) {
	for _, p := range c.routes[b] {
		p.Heal()
	}
}

// StepDown has a stream's leader give its part to another. There may be none just now.
func (c *BrokerCluster) StepDown(t testing.TB, stream string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, _ = c.js.Conn().RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil)
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
