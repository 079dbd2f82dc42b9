package testkit

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
)

// BrokerCluster is a NATS cluster for one test. Each node is a process or a container. The test may
// kill, freeze, thaw and restart it, and cut it off from the others.
type BrokerCluster struct {
	Nodes []*Broker // their Config connects only to this node; replicas: the number of nodes

	t       testing.TB
	cfg     broker.Config
	js      jetstream.JetStream // for Leader and AwaitReplicas
	between routes
}

// routes are the connections between the nodes of a cluster.
type routes interface {
	cut(b *Broker) error
	heal(b *Broker) error
}

// NATSCluster returns a private cluster of n servers, when it accepts streams of n replicas. Like
// NATSProcess it does not sync each write. The first server has the tag zone:a, the others have
// zone:b, and each has its own tag (node:n0). It ignores TEST_NATS_URL.
func NATSCluster(t testing.TB, n int) *BrokerCluster {
	t.Helper()
	skipIfShort(t)
	c := &BrokerCluster{t: t, Nodes: make([]*Broker, n)}
	ports := freePorts(t, 2*n) // alternately for clients and for routes
	for i := range n {
		// A new stream goes to the nodes with the most room, so all nodes have equal room.
		c.Nodes[i] = &Broker{serve: natsserver.Config{Dir: filepath.Join(t.TempDir(), "store"), Port: ports[2*i],
			MaxStore: 4 << 30, LazySync: true,
			Cluster: &natsserver.Cluster{Server: nodeName(i), Port: ports[2*i+1],
				Tags: []string{"node:" + nodeName(i), "zone:" + []string{"a", "b", "b"}[i%3]}}}}
	}
	if forceDocker() {
		c.between = overNetwork(t, c.Nodes)
	} else {
		c.between = throughProxies(t, c.Nodes)
	}
	var starting sync.WaitGroup
	errs := make([]error, n)
	for i, b := range c.Nodes {
		starting.Go(func() { errs[i] = b.start(startChild) })
	}
	starting.Wait()
	var urls []string
	for _, b := range c.Nodes {
		if b.s == nil {
			continue
		}
		t.Cleanup(func() { check(t, "stop NATS", b.s.stop()) })
		b.cfg.Replicas = n
		urls = append(urls, b.URL)
	}
	for i, b := range c.Nodes {
		if errs[i] == nil {
			errs[i] = c.between.heal(b)
		}
		if errs[i] != nil {
			t.Fatalf("NATS cluster for the test: %v", errs[i])
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

// Config returns a configuration that connects to any node that answers, with as many replicas as
// there are nodes.
func (c *BrokerCluster) Config() broker.Config { return c.cfg }

// Connect returns a connection to any node that answers. It is closed when the test ends.
func (c *BrokerCluster) Connect(t testing.TB) *nats.Conn {
	t.Helper()
	return c.Any().Connect(t)
}

// Any returns the cluster as one broker: its clients connect to any node that answers.
func (c *BrokerCluster) Any() *Broker { return &Broker{URL: c.cfg.URL, cfg: c.cfg} }

// Cut interrupts all traffic between a node and the others. Clients still reach all nodes.
func (c *BrokerCluster) Cut(b *Broker) {
	check(c.t, "cut a node off", c.between.cut(b))
}

// Heal undoes Cut.
func (c *BrokerCluster) Heal(b *Broker) {
	check(c.t, "connect a node again", c.between.heal(b))
}

// StepDown asks a stream's leader to step down. It ignores errors, because there may be no leader
// now.
func (c *BrokerCluster) StepDown(t testing.TB, stream string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, _ = c.js.Conn().RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil)
}

// Leader waits until a stream has a leader, and returns the leader's node and the others.
func (c *BrokerCluster) Leader(t testing.TB, stream string) (leader *Broker, others []*Broker) {
	t.Helper()
	Eventually(t, "the stream has a leader", func() (bool, error) {
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

// AwaitReplicas waits until all replicas of a stream have every message of its leader.
func (c *BrokerCluster) AwaitReplicas(t testing.TB, stream string) {
	t.Helper()
	Eventually(t, "the stream's replicas are current", func() (bool, error) {
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

// awaitPeers waits until the cluster accepts a stream with a replica on each node.
func (c *BrokerCluster) awaitPeers(t testing.TB) {
	t.Helper()
	const name = "TESTKIT_READY"
	Eventually(t, "the cluster accepts replicated streams", func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if _, err := c.js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name}, Storage: jetstream.MemoryStorage,
			Replicas: len(c.Nodes)}); err != nil {
			return false, err
		}
		return true, c.js.DeleteStream(ctx, name)
	})
}

// proxied is the routes between processes: a proxy for each pair of nodes.
type proxied map[*Broker][]*Proxy

// throughProxies makes each node connect to those before it through a proxy. No node can use the
// advertised address, so there is no other route.
func throughProxies(t testing.TB, nodes []*Broker) routes {
	r := proxied{}
	for i, b := range nodes {
		member := b.serve.Cluster
		member.Advertise = "127.0.0.1:1"
		for _, other := range nodes[:i] {
			p := NewProxy(t, fmt.Sprintf("127.0.0.1:%d", other.serve.Cluster.Port))
			member.Routes = append(member.Routes, "nats://"+p.Addr())
			r[b], r[other] = append(r[b], p), append(r[other], p)
		}
	}
	return r
}

func (r proxied) cut(b *Broker) error {
	for _, p := range r[b] {
		p.Stall()
	}
	return nil
}

func (r proxied) heal(b *Broker) error {
	for _, p := range r[b] {
		p.Heal()
	}
	return nil
}

// networked is the routes between containers: the id of a network that has only the nodes.
type networked string

// overNetwork makes each node connect to all nodes by their names in a network. A node joins the
// network at its first heal.
func overNetwork(t testing.TB, nodes []*Broker) routes {
	id, err := makeNetwork()
	if err != nil {
		t.Fatalf("NATS cluster for the test: %v", err)
	}
	t.Cleanup(func() { check(t, "remove the network of a cluster", dropNetwork(id)) })
	for _, b := range nodes {
		for i := range nodes {
			b.serve.Cluster.Routes = append(b.serve.Cluster.Routes, fmt.Sprintf("nats://%s:%s", nodeName(i), natsRoutes))
		}
	}
	return networked(id)
}

func (n networked) cut(b *Broker) error { return b.s.(*dockerNATS).leave(string(n)) }

func (n networked) heal(b *Broker) error {
	return b.s.(*dockerNATS).join(string(n), b.serve.Cluster.Server)
}

// freePorts returns n different free ports.
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
