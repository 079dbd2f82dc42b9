package consumers_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
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

// oneReader returns the only JetStream consumer of a stream, without the number that the NATS
// client appends. The client replaces its consumer by the next number when it has missed
// heartbeats, and the reader does not start again.
func (r *rig) oneReader(partition int) (name string, from uint64) {
	r.t.Helper()
	testkit.Eventually(r.t, "one reader of the stream", func() (bool, error) {
		all := r.readersOf(partition)
		for n, seq := range all {
			name, from = n[:strings.LastIndexByte(n, '_')], seq
		}
		return len(all) == 1, nil
	})
	return name, from
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
	r.publish(follow("1", "3", 1))
	r.stray("x")
	r.publish(follow("1", "3", 2))
	r.stray("t1.follow.created")
	r.stray("closed")
	r.publish(follow("1", "3", 3))
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}})
	testkit.Eventually(t, "all of them to be counted", func() (bool, error) {
		return in.metric(t, "tidings_consumer_skipped_total") == 3, nil
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
	once := follow("1", "3", 1)
	r.publish(once)
	r.publish(once, follow("2", "3", 1), once)
	testkit.Eventually(t, "all to be applied", func() (bool, error) {
		all, err := consumers.Lag(context.Background(), r.system, r.js, r.cfg, followercounts.Name)
		return err == nil && all[0].Messages == 0, err
	})
	var followers int
	if err := r.owner.QueryRow(t.Context(), `SELECT incoming FROM edge_counts WHERE object_id = '3'`).Scan(&followers); err != nil ||
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
	want := r.flood(250) // more than it takes to grow from one event, if the machine stalls at the beginning
	cfg := config()
	cfg.ApplyTimeout = testkit.Stretched(200 * time.Millisecond)
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
	if got := in.metric(t, "tidings_consumer_failures_total"); got < float64(tooLarge) {
		t.Errorf("%v failures, with batches of %v", got, sizes)
	}
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

// TestAStreamIsNotClosedBeforeItsSuccessorsExist: without the successors the consumer would not
// know where the events continue, and no offset would carry as_of.
func TestAStreamIsNotClosedBeforeItsSuccessorsExist(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow("1", "3", 1))
	r.close(0)
	r.awaitLag(1) // the closing message
	r.declare(broker.Partition{Number: 1, FirstSlot: 0, LastSlot: 15, After: []int{0}})
	r.publish(follow("1", "3", 2))
	testkit.Eventually(t, "some attempts to close the stream", tick(2*time.Second))
	if l := r.lag(); l.Messages != 2 {
		t.Fatalf("lag %+v, want the closing message and the event on the next stream", l)
	}
	r.wantLines([]line{{"1", "3", 1}})
	r.declare(broker.Partition{Number: 2, FirstSlot: 16, LastSlot: 31, After: []int{0}})
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}})
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	for want, seqs := range map[int]map[string]uint64{0: {"EVENTS-0": 2, "EVENTS-1": 1}, 1: {"EVENTS-0": 2, "EVENTS-1": 2}} {
		created := map[string]time.Time{"EVENTS-0": {}, "EVENTS-1": r.open[0].Created}
		behind, err := consumers.NotYetApplied(t.Context(), r.system, seqs, created)
		if err != nil || behind[name] != want {
			t.Errorf("not past %v: %v, %v", seqs, behind, err)
		}
	}
}

// TestALostPredecessorStopsItsSuccessors deletes a stream that the consumer has not read to its
// end. The consumer stops until a repair calls Rebase.
func TestALostPredecessorStopsItsSuccessors(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow("1", "3", 1))
	r.awaitLag(0)
	in.stop()
	r.publish(follow("1", "3", 2))
	r.close(0)
	s := r.declare(broker.Partition{Number: 1, FirstSlot: 0, LastSlot: 31, After: []int{0}})
	r.publish(follow("1", "3", 3))
	if err := r.js.DeleteStream(t.Context(), r.cfg.StreamName(0)); err != nil {
		t.Fatal(err)
	}
	in = r.run(r.system, logbook{})
	r.awaitStuck(in, 1, "stream EVENTS-0 is gone")
	r.wantLines([]line{{"1", "3", 1}})
	if err := consumers.Rebase(t.Context(), r.system, r.cfg.StreamName(0), 0, s); err != nil {
		t.Fatal(err)
	}
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 3}})

	// A consumer that never ran stops, too.
	in.stop()
	r.exec(`DELETE FROM consumer_offsets`)
	in = r.run(r.system, logbook{})
	r.awaitStuck(in, 1, "stream EVENTS-0, the predecessor of EVENTS-1, is gone")
}

// TestAStreamWaitsForAllOfItsPredecessors closes one of two predecessors, whose transaction creates
// the successor's offset.
func TestAStreamWaitsForAllOfItsPredecessors(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 2)
	in := r.run(r.system, logbook{})
	r.close(0)
	r.declare(broker.Partition{Number: 2, FirstSlot: 0, LastSlot: 31, After: []int{0, 1}})
	r.publish(follow("1", "3", 1), follow("1", "20", 1)) // on the new stream, and on the old one that is still open
	r.awaitLag(1)
	testkit.Eventually(t, "some reads of the streams", tick(2*time.Second))
	r.wantLines([]line{{"1", "20", 1}})
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	r.close(1)
	r.publish(follow("1", "20", 2))
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "20", 1}, {"1", "20", 2}})
}
