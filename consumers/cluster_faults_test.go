//go:build faults

package consumers_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/testkit"
)

// underFault has two instances on three brokers and a publisher that never pauses. Each stream has
// a replica on each broker.
type underFault struct {
	*rig
	c         *testkit.BrokerCluster
	instances [2]*instance

	stop func()
	mu   sync.Mutex
	want []line
	at   []time.Time // when the publish of each was acknowledged
}

// newUnderFault connects the second instance to the last broker. With knows, that instance also
// knows the other brokers.
func newUnderFault(t *testing.T, n int, knows bool) *underFault {
	t.Helper()
	c := testkit.NATSCluster(t, 3)
	second, opts := c.Nodes[2].Config(), []nats.Option{nats.DontRandomize(), nats.IgnoreDiscoveredServers()}
	if knows {
		second.URL += "," + c.Nodes[0].URL + "," + c.Nodes[1].URL
	}
	publisher := connect(t, c.Config(), nats.DontRandomize()) // to the first broker, which no test cuts off, while that lives
	f := &underFault{rig: newRigOn(t, testkit.Postgres(t), publisher, c.Config(), n), c: c}
	f.instances[0] = f.runWith(config(), connect(t, c.Nodes[0].Config()), f.system, logbook{})
	f.instances[1] = f.runWith(config(), connect(t, second, opts...), f.system, logbook{})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { f.publishUntil(ctx) })
	wg.Go(func() { f.watchAsOf(ctx) })
	f.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(f.stop)
	f.awaitMore("at first")
	return f
}

func connect(t *testing.T, cfg broker.Config, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	nc, err := broker.Connect(cfg, "test", testkit.Logger(t), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// publishUntil publishes events one by one. It retries each until it is on its stream.
func (f *underFault) publishUntil(ctx context.Context) {
	for n := int64(1); ctx.Err() == nil; n++ {
		l := line{event.IDOf(n), event.IDOf(100 + n%53), 1}
		e := follow(l.FollowerID, l.FolloweeID, l.Version)
		e.OutboxID = n
		if !f.publishSurely(ctx, &e) {
			return
		}
		f.mu.Lock()
		f.want, f.at = append(f.want, l), append(f.at, time.Now())
		f.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// publishSurely publishes like a relay: it names the stream's last sequence, and reads the stream's
// last message if the outcome is unknown. It reports whether the event is on the stream. After a
// false the event may still be there.
func (f *underFault) publishSurely(ctx context.Context, e *event.Event) bool {
	p := f.of(e.AggregateID)
	stream := f.cfg.StreamName(p)
	for {
		msg := &nats.Msg{Subject: e.Subject(f.cfg.Prefix, p), Header: e.Headers(), Data: e.Payload}
		msg.Header.Set(jetstream.ExpectedLastSeqHeader, fmt.Sprint(f.tails[stream]))
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		ack, err := f.js.PublishMsg(work, msg)
		cancel()
		if err == nil {
			f.tails[stream] = ack.Sequence
			return true
		}
		for looked := false; !looked; {
			work, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			last, err := broker.Last(work, f.js, stream, ">")
			cancel()
			if looked = err == nil; !looked {
				if ctx.Err() != nil {
					return false
				}
				continue
			}
			if last != nil {
				f.tails[stream] = last.Seq
				if last.Header.Get(event.HeaderID) == e.ID {
					return true
				}
			}
		}
	}
}

// watchAsOf fails the test if as_of is later than the publish of an event that is not applied.
func (f *underFault) watchAsOf(ctx context.Context) {
	for ctx.Err() == nil {
		f.mu.Lock()
		acked := f.at
		f.mu.Unlock()
		asOf, applied := f.asOf(), 0
		if err := f.system.QueryRow(context.WithoutCancel(ctx), `SELECT count(*) FROM testlog`).Scan(&applied); err != nil {
			f.t.Error(err)
			return
		}
		before := 0
		for before < len(acked) && acked[before].Before(asOf) {
			before++
		}
		if before > applied {
			f.t.Errorf("up to as_of %s %d events were published, but only %d are applied", asOf.Format("15:04:05.000"), before, applied)
			return
		}
		for i, in := range f.instances {
			if n := in.metric(f.t, "tidings_consumer_partitions_stuck"); n > 0 {
				f.t.Errorf("instance %d: %v partitions are stuck: %v", i, n, in.Ready(context.WithoutCancel(ctx)))
				return
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitMore waits until an event that is published after the call is applied.
func (f *underFault) awaitMore(what string) {
	f.t.Helper()
	begun := time.Now()
	testkit.Eventually(f.t, what+": events to be applied", func() (bool, error) {
		f.mu.Lock()
		published := len(f.at)
		for published > 0 && f.at[published-1].After(begun) {
			published--
		}
		some := len(f.at) > published
		f.mu.Unlock()
		applied := 0
		err := f.system.QueryRow(context.Background(), `SELECT count(*) FROM testlog`).Scan(&applied)
		return some && applied > published, err
	})
	f.t.Logf("%s: events are applied after %s", what, time.Since(begun).Round(time.Millisecond))
}

// check stops the publisher, waits for the consumers, and compares what was applied.
func (f *underFault) check() {
	f.t.Helper()
	f.stop()
	testkit.Eventually(f.t, "everything to be applied", func() (bool, error) {
		applied := 0
		err := f.system.QueryRow(context.Background(), `SELECT count(*) FROM testlog`).Scan(&applied)
		return applied >= len(f.want), err
	})
	f.awaitLag(0)
	got := f.lines()
	if n := len(got) - len(f.want); n == 1 { // the outcome of the last publish is unknown
		f.want = append(f.want, line{event.IDOf(len(f.want) + 1), event.IDOf(100 + int64(len(f.want)+1)%53), 1})
	}
	f.wantLines(f.want)
	for i, in := range f.instances {
		testkit.Eventually(f.t, fmt.Sprintf("instance %d to be ready", i), func() (bool, error) {
			err := in.Ready(context.Background())
			return err == nil, err
		})
	}
}

func (f *underFault) last(d time.Duration) {
	select {
	case <-time.After(d):
	case <-f.t.Context().Done():
	}
}

func TestOnThreeBrokersConsumersApplyEverythingOnce(t *testing.T) {
	for name, fault := range map[string]func(f *underFault, leader *testkit.Broker, others []*testkit.Broker){
		"the leader is killed and restarted": func(f *underFault, leader *testkit.Broker, _ []*testkit.Broker) {
			leader.Kill(f.t)
			f.awaitMore("leader killed")
			leader.Restart(f.t)
		},
		"the leader is frozen": func(f *underFault, leader *testkit.Broker, _ []*testkit.Broker) {
			leader.Freeze(f.t)
			f.last(6 * time.Second)
			leader.Thaw(f.t)
		},
		"the leader steps down again and again": func(f *underFault, _ *testkit.Broker, _ []*testkit.Broker) {
			for range 6 {
				f.c.StepDown(f.t, f.cfg.StreamName(0))
				f.last(time.Second)
			}
		},
		"the majority is lost": func(f *underFault, _ *testkit.Broker, others []*testkit.Broker) {
			for _, b := range others {
				b.Kill(f.t)
			}
			f.last(6 * time.Second)
			for _, b := range others {
				b.Restart(f.t)
			}
		},
		"the leader is cut off": func(f *underFault, leader *testkit.Broker, _ []*testkit.Broker) {
			f.c.Cut(leader)
			f.last(12 * time.Second)
			f.c.Heal(leader)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newUnderFault(t, 1, false)
			leader, others := f.c.Leader(t, f.cfg.StreamName(0))
			fault(f, leader, others)
			f.awaitMore(name)
			f.check()
		})
	}
}

// share waits until each of the two instances holds one of the two partitions.
func (f *underFault) share(what string) {
	f.t.Helper()
	testkit.Eventually(f.t, what, func() (bool, error) {
		held, err := lease.Holders(context.Background(), f.system, name)
		return len(held) == 2 && held[0].Owner != held[1].Owner, err
	})
}

// TestOnThreeBrokersAnInstanceThatIsCutOffGivesItsLeasesUp cuts off the only broker that the
// instance knows.
func TestOnThreeBrokersAnInstanceThatIsCutOffGivesItsLeasesUp(t *testing.T) {
	t.Parallel()
	const partitions = 2
	f := newUnderFault(t, partitions, false)
	f.share("both to share")
	f.c.Cut(f.c.Nodes[2])
	testkit.Eventually(t, "the instance to be cut off",
		func() (bool, error) { return f.instances[1].Ready(context.Background()) != nil, nil })
	testkit.Eventually(t, "the other to have all partitions", func() (bool, error) {
		held, err := lease.Holders(context.Background(), f.system, name)
		return len(held) == partitions && f.instances[0].metric(t, "tidings_consumer_partitions_held") == partitions, err
	})
	f.awaitMore("the other instance alone")
	f.c.Heal(f.c.Nodes[2])
	f.share("both to share again")
	f.check()
}

// TestOnThreeBrokersAnInstanceThatIsCutOffLeavesItsBroker cuts off the broker of an instance for
// the rest of the test.
func TestOnThreeBrokersAnInstanceThatIsCutOffLeavesItsBroker(t *testing.T) {
	t.Parallel()
	f := newUnderFault(t, 2, true)
	f.share("both to share")
	f.c.Cut(f.c.Nodes[2])
	testkit.Eventually(t, "the instance to be cut off",
		func() (bool, error) { return f.instances[1].Ready(context.Background()) != nil, nil })
	testkit.Eventually(t, "the instance to be ready on another broker", func() (bool, error) {
		err := f.instances[1].Ready(context.Background())
		return err == nil, err
	})
	f.share("both to share again")
	f.awaitMore("while the broker is cut off")
	f.check()
}

// TestOnThreeBrokersAStreamThatIsGoneIsNotBelievedAtOnce starts an instance that has never seen the
// stream. The first answers of the brokers may be out of date.
func TestOnThreeBrokersAStreamThatIsGoneIsNotBelievedAtOnce(t *testing.T) {
	t.Parallel()
	f := newUnderFault(t, 1, false)
	f.stop()
	for _, in := range f.instances {
		in.stop()
	}
	if err := f.js.DeleteStream(t.Context(), f.cfg.StreamName(0)); err != nil {
		t.Fatal(err)
	}
	in := f.run(f.system, logbook{})
	testkit.Eventually(t, "the consumer to wait", func() (bool, error) {
		if n := in.metric(t, "tidings_consumer_partitions_stuck"); n > 0 {
			t.Fatalf("it is stuck: %v", in.Ready(context.Background()))
		}
		return in.metric(t, "tidings_consumer_partitions_waiting") == 1, nil
	})
}
