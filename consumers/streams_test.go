package consumers_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
)

// readersOf returns the JetStream consumers of a stream, with the first sequence of each.
func (r *rig) readersOf(partition int) map[string]uint64 {
	r.t.Helper()
	all := map[string]uint64{}
	list := r.stream(partition).ListConsumers(context.Background())
	for info := range list.Info() {
		all[info.Name] = info.Config.OptStartSeq
	}
	if err := list.Err(); err != nil {
		r.t.Fatal(err)
	}
	return all
}

// oneReader returns the only JetStream consumer of a stream, without the number that the NATS client appends. The client
// replaces its consumer by the next number when it has missed heartbeats, and the reader does not start again.
func (r *rig) oneReader(partition int) (name string, from uint64) {
	r.t.Helper()
	testkit.Eventually(r.t, 30*time.Second, "one reader of the stream", func() (bool, error) {
		all := r.readersOf(partition)
		for n, seq := range all {
			name, from = n[:strings.LastIndexByte(n, '_')], seq
		}
		return len(all) == 1, nil
	})
	return name, from
}

// TestReadersKnowNothingOfEachOther checks that a reader continues a quiet stream from its offset, and that the checks
// of a stuck partition restart no other reader. Measuring the lag creates no readers either.
func TestReadersKnowNothingOfEachOther(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 2)
	cfg := config()
	cfg.Lease.TTL = time.Minute // longer than the test: no reader restarts because a lease expires
	in := r.runWith(cfg, r.js, r.system, logbook{})
	r.publish(follow(1, 3, 1), follow(1, 3, 2), follow(1, 20, 1), follow(1, 20, 2))
	r.awaitLag(0)
	in.stop()
	r.publish(follow(1, 20, 3), follow(1, 20, 4))
	for p := range 2 {
		testkit.Eventually(t, 30*time.Second, "the readers to be gone", func() (bool, error) {
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
		r.publish(follow(1, 3, v+3))
		testkit.Eventually(t, 30*time.Second, "the event", func() (bool, error) { return len(r.lines()) == int(5+v), nil })
		testkit.Eventually(t, 30*time.Second, "the next check", tick(100*time.Millisecond))
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
	if got := in.metric(t, "consumer_failures_total"); got > 0 {
		t.Errorf("%v failures", got)
	}
}

// tick returns a condition that is true once d has passed.
func tick(d time.Duration) func() (bool, error) {
	begun := time.Now()
	return func() (bool, error) { return time.Since(begun) >= d, nil }
}

// stray publishes a message that no relay wrote.
func (r *rig) stray(subject string) {
	r.t.Helper()
	r.send(r.cfg.StreamName(0), &nats.Msg{Subject: r.cfg.Prefix + ".0." + subject, Header: nats.Header{}, Data: []byte("hello")})
}

func TestMessagesThatNoRelayWroteAreSkippedAndCounted(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	r.stray("x")
	r.publish(follow(1, 3, 2))
	r.stray("t1.follow.created")
	r.stray("closed")
	r.publish(follow(1, 3, 3))
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 3, 2}, {1, 3, 3}})
	testkit.Eventually(t, 30*time.Second, "all of them to be counted", func() (bool, error) {
		return in.metric(t, "consumer_skipped_total") == 3, nil
	})
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	if n := len(r.deadLetters()); n > 0 {
		t.Errorf("%d dead letters", n)
	}
}

func TestTheSameEventTwiceIsHarmless(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	reg := prometheus.NewRegistry()
	c, err := consumers.New(config(), consumers.Deps{Pool: r.system, JetStream: r.js,
		Streams: consumers.Streams{Name: r.cfg.Stream, Prefix: r.cfg.Prefix, Timeout: r.cfg.Timeout}, Registry: reg,
		Log: testkit.Logger(t)}, followercounts.New(kinds.Builtin))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	once := follow(1, 3, 1)
	r.publish(once)
	r.publish(once, follow(2, 3, 1), once)
	testkit.Eventually(t, 30*time.Second, "all to be applied", func() (bool, error) {
		all, err := consumers.Lag(context.Background(), r.system, r.js, r.cfg, followercounts.Name)
		return err == nil && all[0].Messages == 0, err
	})
	var followers int
	if err := r.owner.QueryRow(t.Context(), `SELECT incoming FROM edge_counts WHERE object_id = 3`).Scan(&followers); err != nil ||
		followers != 2 {
		t.Errorf("%d followers, %v", followers, err)
	}
	if err := c.Ready(t.Context()); err != nil {
		t.Errorf("ready: %v", err)
	}
}

// TestABatchThatIsTooSlowIsHalved makes a batch of more than 10 events exceed ApplyTimeout.
func TestABatchThatIsTooSlowIsHalved(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	want := r.flood(100)
	cfg := config()
	cfg.ApplyTimeout = 200 * time.Millisecond
	var mu sync.Mutex
	var sizes []int
	in := r.runWith(cfg, r.js, r.system, logbook{hook: func(ctx context.Context, _ pgx.Tx, events []event.Event) error {
		mu.Lock()
		defer mu.Unlock()
		sizes = append(sizes, len(events))
		if len(events) > 10 {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}})
	r.awaitLag(0)
	r.wantLines(want)
	mu.Lock()
	defer mu.Unlock()
	tooLarge := 0 // each of them failed; a machine that stalls may also make small ones fail
	for _, n := range sizes {
		if n > 10 {
			tooLarge++
		}
	}
	if tooLarge < 1 || tooLarge > 10 {
		t.Errorf("batches of %v: want 1 to 10 of more than 10 events", sizes)
	}
	if got := in.metric(t, "consumer_failures_total"); got < float64(tooLarge) {
		t.Errorf("%v failures, with batches of %v", got, sizes)
	}
}

// wire is a TCP proxy that the test can cut. While it is cut, no data passes and the connections stay open.
type wire struct {
	mu   sync.Mutex
	cut  bool
	cond *sync.Cond
}

func newWire(t *testing.T, to string) (w *wire, url string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w = &wire{}
	w.cond = sync.NewCond(&w.mu)
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	pass := func(from, to net.Conn) {
		defer to.Close()
		b := make([]byte, 64<<10)
		for {
			n, err := from.Read(b)
			w.mu.Lock()
			for w.cut && ctx.Err() == nil {
				w.cond.Wait()
			}
			w.mu.Unlock()
			if _, werr := to.Write(b[:n]); err != nil || werr != nil {
				return
			}
		}
	}
	wg.Go(func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", strings.TrimPrefix(to, "nats://"))
			if err != nil {
				_ = in.Close()
				continue
			}
			wg.Go(func() { pass(in, out) })
			wg.Go(func() { pass(out, in) })
			context.AfterFunc(ctx, func() { _, _ = in.Close(), out.Close() })
		}
	})
	t.Cleanup(func() {
		stop()
		w.set(false)
		_ = listener.Close()
		wg.Wait()
	})
	return w, "nats://" + listener.Addr().String()
}

func (w *wire) set(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
	w.cond.Broadcast()
}

// TestAnInstanceThatIsCutOffFromNATSLeavesItsPartitions cuts only the connection to NATS. The instance still reaches
// the database, and must not renew its leases there.
func TestAnInstanceThatIsCutOffFromNATSLeavesItsPartitions(t *testing.T) {
	b := testkit.NATS(t)
	r := newRig(t, testkit.Postgres(t), b)
	w, url := newWire(t, b.URL)
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
	testkit.Eventually(t, 30*time.Second, "the first instance to have the partition", func() (bool, error) {
		return victim.metric(t, "consumer_partitions_held") == 1, nil
	})
	want := r.flood(50)
	r.awaitLag(0)
	other := r.runWith(conf, r.js, r.system, logbook{})
	w.set(true)
	want = append(want, r.flood(50)...)
	r.awaitLag(0)
	r.wantLines(want)
	if got := other.metric(t, "consumer_partitions_held"); got != 1 {
		t.Errorf("the other instance has %v partitions", got)
	}
	testkit.Eventually(t, 30*time.Second, "the first one to report it", func() (bool, error) {
		err := victim.Ready(context.Background())
		return err != nil && strings.Contains(err.Error(), "cut off") && victim.metric(t, "consumer_lag_seconds") > 0, nil
	})
	w.set(false)
	testkit.Eventually(t, 30*time.Second, "the first one to be back",
		func() (bool, error) { err := victim.Ready(context.Background()); return err == nil, err })
	other.stop()
	testkit.Eventually(t, 30*time.Second, "the first one to have the partition again", func() (bool, error) {
		return victim.metric(t, "consumer_partitions_held") == 1, nil
	})
	want = append(want, r.flood(50)...)
	r.awaitLag(0)
	r.wantLines(want)
}

// layouts are two resizes: the number of old partitions, and the new ones.
var layouts = map[string]struct {
	from int
	to   []broker.Partition
}{
	"one to two": {1, []broker.Partition{{Number: 2, FirstSlot: 0, LastSlot: 15, After: []int{0}},
		{Number: 3, FirstSlot: 16, LastSlot: 31, After: []int{0}}}},
	"two to one": {2, []broker.Partition{{Number: 2, FirstSlot: 0, LastSlot: 31, After: []int{0, 1}}}},
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
						r.child(t, time.Second, step, syscall.SIGKILL).awaitEnd()
					}
				}
				kill()
				want = append(want, r.flood(100)...) // the first instance may have applied all of the first ones
				// All streams are complete before an instance reads. The new ones come first in the broker's list and have more events.
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
				testkit.Eventually(t, 30*time.Second, "only the new ones to be held", func() (bool, error) {
					holders, err = lease.Holders(t.Context(), r.system, name)
					return len(holders) == len(c.to) && holders[0].Partition == 2, err
				})
				at := r.asOf()
				testkit.Eventually(t, 30*time.Second, "as_of to move", func() (bool, error) { return r.asOf().After(at), nil })
			})
		}
	}
}

// TestAStreamIsNotClosedBeforeItsSuccessorsExist: without the successors the consumer would not know where the events
// continue, and no offset would carry as_of.
func TestAStreamIsNotClosedBeforeItsSuccessorsExist(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	r.close(0)
	r.awaitLag(1) // the closing message
	r.declare(broker.Partition{Number: 1, FirstSlot: 0, LastSlot: 15, After: []int{0}})
	r.publish(follow(1, 3, 2))
	r.awaitLag(2)
	r.wantLines([]line{{1, 3, 1}})
	r.declare(broker.Partition{Number: 2, FirstSlot: 16, LastSlot: 31, After: []int{0}})
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 3, 2}})
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	for want, seqs := range map[int]map[string]uint64{0: {"EVENTS-0": 2, "EVENTS-1": 1}, 1: {"EVENTS-0": 2, "EVENTS-1": 2}} {
		created := map[string]time.Time{"EVENTS-0": {}, "EVENTS-1": r.open[0].Created}
		behind, err := consumers.NotPast(t.Context(), r.system, seqs, created)
		if err != nil || behind[name] != want {
			t.Errorf("not past %v: %v, %v", seqs, behind, err)
		}
	}
}

// TestALostPredecessorStopsItsSuccessors deletes a stream that the consumer has not read to its end. The consumer stops
// until a repair calls Rebase.
func TestALostPredecessorStopsItsSuccessors(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	r.awaitLag(0)
	in.stop()
	r.publish(follow(1, 3, 2))
	r.close(0)
	s := r.declare(broker.Partition{Number: 1, FirstSlot: 0, LastSlot: 31, After: []int{0}})
	r.publish(follow(1, 3, 3))
	if err := r.js.DeleteStream(t.Context(), r.cfg.StreamName(0)); err != nil {
		t.Fatal(err)
	}
	in = r.run(r.system, logbook{})
	r.awaitStuck(in, 1, "stream EVENTS-0 is gone")
	r.wantLines([]line{{1, 3, 1}})
	if err := consumers.Rebase(t.Context(), r.system, r.cfg.StreamName(0), 0, s); err != nil {
		t.Fatal(err)
	}
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 3, 3}})

	// A consumer that never ran stops, too.
	in.stop()
	r.exec(`DELETE FROM consumer_offsets`)
	in = r.run(r.system, logbook{})
	r.awaitStuck(in, 1, "stream EVENTS-0, the predecessor of EVENTS-1, is gone")
}

// TestAReaderThatIsStartedAnewReadsNoOtherStream makes the NATS client recreate its consumer by the stream's name after
// another stream has got that name.
func TestAReaderThatIsStartedAnewReadsNoOtherStream(t *testing.T) {
	b := testkit.NATS(t)
	r := newRig(t, testkit.Postgres(t), b)
	w, url := newWire(t, b.URL)
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
		r.publish(follow(1, 3, v+1))
	}
	r.awaitLag(0)
	w.set(true)
	testkit.Eventually(t, 30*time.Second, "the reader to miss heartbeats", tick(3*time.Second))
	r.remake(50)
	w.set(false)
	r.awaitStuck(in, 1, "was recreated")
	r.wantFollowee(3, 20)
}

// TestAStreamWaitsForAllOfItsPredecessors closes one of two predecessors, whose transaction creates the successor's
// offset.
func TestAStreamWaitsForAllOfItsPredecessors(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 2)
	in := r.run(r.system, logbook{})
	r.close(0)
	r.declare(broker.Partition{Number: 2, FirstSlot: 0, LastSlot: 31, After: []int{0, 1}})
	r.publish(follow(1, 3, 1), follow(1, 20, 1)) // on the new stream, and on the old one that is still open
	r.awaitLag(1)
	testkit.Eventually(t, 30*time.Second, "some reads of the streams", tick(2*time.Second))
	r.wantLines([]line{{1, 20, 1}})
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	r.close(1)
	r.publish(follow(1, 20, 2))
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 20, 1}, {1, 20, 2}})
}
