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
	"github.com/tidings/tidings/internal/pglocal"
)

// BrokerCluster is a NATS cluster of one test. Each node is a process or a container, which the test may kill, freeze, thaw, restart, and cut off from the others.
type BrokerCluster struct {
	Nodes []*Broker // their Config connects to the node alone, with as many replicas as there are nodes

	t       testing.TB
	cfg     broker.Config
	js      jetstream.JetStream // for Leader and AwaitReplicas
	between routes
}

// routes is what connects the nodes of a cluster.
type routes interface {
	cut(b *Broker) error
	heal(b *Broker) error
}

// clusterTimeout bounds how long a cluster may take to elect: seconds, on a busy machine more.
const clusterTimeout = 90 * time.Second

// NATSCluster returns a cluster of the test's own with n servers, once it takes streams of n replicas. Like NATSProcess it syncs lazily. The first has
// the tag zone:a, the others have zone:b, and each has one of its own, node:n0. TEST_NATS_URL is not used.
func NATSCluster(t testing.TB, n int) *BrokerCluster {
	t.Helper()
	skipIfShort(t)
	c := &BrokerCluster{t: t, Nodes: make([]*Broker, n)}
	ports := freePorts(t, 2*n) // clients' ports and routes' ports in turn
	for i := range n {
		// Streams go to the node with the most room, so all have the same.
		c.Nodes[i] = &Broker{serve: broker.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Port: ports[2*i], MaxStore: 4 << 30, LazySync: true,
			Cluster: &broker.Cluster{Server: nodeName(i), Port: ports[2*i+1], Tags: []string{"node:" + nodeName(i), "zone:" + []string{"a", "b", "b"}[i%3]}}}}
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
	check(c.t, "cut a node off", c.between.cut(b))
}

// Heal undoes Cut.
func (c *BrokerCluster) Heal(b *Broker) {
	check(c.t, "connect a node again", c.between.heal(b))
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

// proxied is the routes of processes: a proxy for each pair of nodes.
type proxied map[*Broker][]*Proxy

// throughProxies has each node connect to those before it. What it advertises leads nowhere: so there is no other way.
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

// networked is the routes of containers: the id of a network that has nothing but the nodes.
type networked string

// overNetwork has each node connect to all by their names in a network, which each joins when it is healed first.
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
