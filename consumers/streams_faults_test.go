//go:build faults

package consumers_test

import (
	"context"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// via returns a proxy to a broker, and its URL.
func via(t *testing.T, b *testkit.Broker) (p *testkit.Proxy, url string) {
	t.Helper()
	p = testkit.NewProxy(t, strings.TrimPrefix(b.URL, "nats://"))
	return p, "nats://" + p.Addr()
}

// TestAnInstanceThatIsCutOffFromNATSLeavesItsPartitions cuts only the connection to NATS. The
// instance still reaches the database, and must not renew its leases there.
func TestAnInstanceThatIsCutOffFromNATSLeavesItsPartitions(t *testing.T) {
	b := testkit.NATS(t)
	r := newRig(t, testkit.Postgres(t), b)
	w, url := via(t, b)
	cfg := r.cfg
	cfg.URL, cfg.Timeout, cfg.Ping = url, 500*time.Millisecond, 200*time.Millisecond
	nc, err := broker.Connect(cfg, "cut", testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	conf := config()
	conf.Lease.TTL = time.Minute // longer than the test: no lease expires
	victim := r.runWith(conf, js, r.system, logbook{})
	testkit.Eventually(t, "the first instance to have the partition", func() (bool, error) {
		return victim.metric(t, "tidings_consumer_partitions_held") == 1, nil
	})
	want := r.flood(50)
	r.awaitLag(0)
	other := r.runWith(conf, r.js, r.system, logbook{})
	w.Stall()
	want = append(want, r.flood(50)...)
	r.awaitLag(0)
	r.wantLines(want)
	if got := other.metric(t, "tidings_consumer_partitions_held"); got != 1 {
		t.Errorf("the other instance has %v partitions", got)
	}
	testkit.Eventually(t, "the first one to report it", func() (bool, error) {
		err := victim.Ready(context.Background())
		return err != nil && strings.Contains(err.Error(), "cut off") && victim.metric(t, "tidings_consumer_lag_seconds") > 0, nil
	})
	w.Heal()
	testkit.Eventually(t, "the first one to be back",
		func() (bool, error) { err := victim.Ready(context.Background()); return err == nil, err })
	other.stop()
	testkit.Eventually(t, "the first one to have the partition again", func() (bool, error) {
		return victim.metric(t, "tidings_consumer_partitions_held") == 1, nil
	})
	want = append(want, r.flood(50)...)
	r.awaitLag(0)
	r.wantLines(want)
}

// staller is a logbook whose link to the database fails once, in the first batch after it is armed:
// before the batch is written, or after that and before the commit.
type staller struct {
	logbook
	armed         atomic.Bool
	before, after func()
}

func (s *staller) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	armed := s.armed.CompareAndSwap(true, false)
	if armed && s.before != nil {
		s.before()
	}
	err := s.logbook.Apply(ctx, tx, events)
	if armed && err == nil && s.after != nil {
		s.after()
	}
	return err
}

// TestAnInstanceWhoseLinkToPostgreSQLStallsLosesAndRepeatsNothing stalls the link of one of two
// instances in a batch. The connections stay open. The messages that the instance sent arrive late,
// when the link works again.
func TestAnInstanceWhoseLinkToPostgreSQLStallsLosesAndRepeatsNothing(t *testing.T) {
	for what, c := range map[string]struct {
		arm    func(s *staller, link *testkit.Proxy)
		leaves bool // the instance cannot renew its leases
	}{
		"nothing passes before the batch is written": {func(s *staller, link *testkit.Proxy) { s.before = link.Stall }, true},
		"nothing passes before the commit":           {func(s *staller, link *testkit.Proxy) { s.after = link.Stall }, true},
		"the answer to the commit is lost":           {func(s *staller, link *testkit.Proxy) { s.after = link.LoseAnswers }, false},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t), partitions)
			u, err := url.Parse(r.url)
			if err != nil {
				t.Fatal(err)
			}
			link := testkit.NewProxy(t, u.Host)
			u.Host = link.Addr()
			pool, err := postgres.Open(t.Context(), u.String(), postgres.Config{MaxConns: 8, ConnectTimeout: 2 * time.Second},
				postgres.RoleConsumer, name)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			t.Cleanup(link.Cut) // otherwise the pool waits for the end of its connections
			cfg := config()
			cfg.Lease.TTL, cfg.ApplyTimeout = 4*time.Second, 2*time.Second
			var s staller
			c.arm(&s, link)
			victim := r.runWith(cfg, r.js, pool, &s)
			r.runWith(cfg, r.js, r.system, logbook{})
			r.awaitShares("both to have their share", 2)
			want := r.flood(200)
			r.awaitLag(0)

			s.armed.Store(true)
			want = append(want, r.flood(200)...)
			testkit.Eventually(t, "the link to stall in a batch", func() (bool, error) { return !s.armed.Load(), nil })
			if c.leaves {
				r.awaitShares("the other to have all partitions", 1)
			}
			want = append(want, r.flood(200)...)
			r.awaitLag(0)
			r.wantLines(want)

			link.Heal()
			r.awaitShares("both to have their share again", 2)
			want = append(want, r.flood(200)...)
			r.awaitLag(0)
			r.wantLines(want)
			if got := victim.metric(t, "tidings_consumer_failures_total"); got < 1 {
				t.Errorf("the stalled instance counts %v failures, want its batch", got)
			}
			testkit.Eventually(t, "the instance to be ready",
				func() (bool, error) { err := victim.Ready(context.Background()); return err == nil, err })
		})
	}
}

// TestOldStreamsAreFinishedBeforeNewOnes resizes while instances are killed between the steps.
func TestOldStreamsAreFinishedBeforeNewOnes(t *testing.T) {
	for what, c := range layouts {
		for _, step := range append([]string{""}, steps...) {
			t.Run(what+", killed at "+step, func(t *testing.T) {
				r := newRig(t, testkit.Postgres(t), testkit.NATS(t), c.from)
				want := r.flood(100)
				kill := func() {
					if step != "" {
						r.child(t, time.Second, step, syscall.SIGKILL).AwaitKilled()
					}
				}
				kill()
				want = append(want, r.flood(100)...) // the first instance may have applied all of the first ones
				// All streams are complete before an instance reads. The new ones come first in the
				// broker's list and have more events.
				for p := range c.from {
					r.close(p)
				}
				kill()
				for _, p := range c.to {
					r.declare(p)
				}
				want = append(want, r.flood(300)...)
				kill()
				kill()
				in := r.run(r.system, logbook{})
				r.awaitLag(0)
				want = append(want, r.flood(50)...)
				r.awaitLag(0)
				r.wantLines(want)
				if err := in.Ready(context.Background()); err != nil {
					t.Errorf("ready: %v", err)
				}
				holders, err := lease.Holders(t.Context(), r.system, name)
				testkit.Eventually(t, "only the new ones to be held", func() (bool, error) {
					holders, err = lease.Holders(t.Context(), r.system, name)
					return len(holders) == len(c.to) && holders[0].Partition == 2, err
				})
				at := r.asOf()
				testkit.Eventually(t, "as_of to move", func() (bool, error) { return r.asOf().After(at), nil })
			})
		}
	}
}

// TestAReaderThatIsStartedAnewReadsNoOtherStream makes the NATS client recreate its consumer by the
// stream's name after another stream has got that name.
func TestAReaderThatIsStartedAnewReadsNoOtherStream(t *testing.T) {
	b := testkit.NATS(t)
	r := newRig(t, testkit.Postgres(t), b)
	w, url := via(t, b)
	cfg := r.cfg
	cfg.URL, cfg.Ping = url, time.Minute
	nc, err := broker.Connect(cfg, "cut", testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	conf := config()
	conf.LagInterval = time.Minute // only the reader can notice the other stream
	in := r.runWith(conf, js, r.system, logbook{})
	for v := range int64(20) {
		r.publish(follow("1", "3", v+1))
	}
	r.awaitLag(0)
	w.Stall()
	testkit.Eventually(t, "the reader to miss heartbeats", tick(3*time.Second))
	r.remake(50)
	w.Heal()
	r.awaitStuck(in, 1, "was recreated")
	r.wantFollowee("3", 20)
}

// TestReadersKnowNothingOfEachOther checks that a reader continues a quiet stream from its offset,
// and that the checks of a stuck partition restart no other reader. Measuring the lag creates no
// readers either.
func TestReadersKnowNothingOfEachOther(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 2)
	cfg := config()
	cfg.Lease.TTL = time.Minute // longer than the test: no reader restarts because a lease expires
	in := r.runWith(cfg, r.js, r.system, logbook{})
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "20", 1), follow("1", "20", 2))
	r.awaitLag(0)
	in.stop()
	r.publish(follow("1", "20", 3), follow("1", "20", 4))
	for p := range 2 {
		testkit.Eventually(t, "the readers to be gone", func() (bool, error) {
			for name := range r.readersOf(p) {
				if err := r.stream(p).DeleteConsumer(context.Background(), name); err != nil {
					return false, err
				}
			}
			return len(r.readersOf(p)) == 0, nil
		})
	}
	r.delete(1, 3)
	in = r.runWith(cfg, r.js, r.system, logbook{})
	r.awaitStuck(in, 1, "messages 3 to 3 of stream EVENTS-1 are missing")
	name, from := r.oneReader(0)
	if from != 3 {
		t.Errorf("the quiet stream is read from %d, want 3", from)
	}
	var before time.Time
	if err := r.owner.QueryRow(t.Context(), `SELECT as_of FROM consumer_offsets WHERE partition_key = 'EVENTS-1'`).Scan(
		&before); err != nil {
		t.Fatal(err)
	}
	for v := range int64(20) { // 2 s, in which the consumer checks the stuck partition ten times
		r.publish(follow("1", "3", v+3))
		testkit.Eventually(t, "the event", func() (bool, error) { return len(r.lines()) == int(5+v), nil })
		testkit.Eventually(t, "the next check", tick(100*time.Millisecond))
	}
	if now, _ := r.oneReader(0); now != name {
		t.Errorf("the reader of the healthy stream is %s, it was %s before", now, name)
	}
	if all := r.readersOf(1); len(all) > 0 {
		t.Errorf("the stuck stream has readers: %v", all)
	}
	if after := r.lag().AsOf; after.After(before) {
		t.Errorf("as_of moved to %s from %s although a stream is stuck", after, before)
	}
	if got := in.metric(t, "tidings_consumer_failures_total"); got > 0 {
		t.Errorf("%v failures", got)
	}
}
