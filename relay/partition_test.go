package relay

import (
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// awaitResized waits until exactly so many partitions are open.
func (f *fleet) awaitResized(to int) {
	f.t.Helper()
	testkit.Eventually(f.t, "the partitions to be resized", func() (bool, error) {
		all, err := outbox.Partitions(f.t.Context(), f.pool)
		if err != nil {
			return false, err
		}
		open := 0
		for _, p := range all {
			if !p.Closed {
				open++
			}
		}
		return open == to && len(outbox.Active(all)) == to, nil
	})
}

func TestPartitionsAreResizedWhileWritersAndRelaysWork(t *testing.T) {
	t.Parallel()
	f := newFleet(t, testkit.Postgres(t))
	f.relay("", 0)
	f.relay("", 0)
	f.awaitTakeover()
	for _, to := range []int{4, 2, 32, 1} {
		f.resize(to)
		f.awaitResized(to)
		f.awaitTakeover()
	}
	f.check()
}

func TestARelayKilledBeforeItClosesAStreamLosesNothing(t *testing.T) {
	t.Parallel()
	resizedBeside(t, crash{Step: "before closing", Signal: syscall.SIGKILL})
}

// resizedBeside resizes twice, and a relay fails during the first resize.
func resizedBeside(t *testing.T, c crash) {
	f := newFleet(t, testkit.Postgres(t))
	victim := f.start(options{patient: true})
	f.awaitTakeover()
	victim.arm(c)
	f.resize(4)
	if c.Signal == syscall.SIGKILL {
		victim.AwaitKilled()
	} else {
		victim.AwaitStopped()
	}
	f.relay("", 0)
	f.awaitResized(4)
	f.awaitTakeover()
	if c.Signal == syscall.SIGSTOP {
		victim.Signal(syscall.SIGCONT)
		victim.awaitReached(c.Then)
	}
	f.resize(2)
	f.awaitResized(2)
	f.awaitTakeover()
	if c.Signal == syscall.SIGSTOP {
		victim.stop()
	}
	f.check()
	f.checkClosed()
}

// checkClosed fails unless each closed partition's stream ends with a closing message, at the
// sequence that the database has.
func (f *fleet) checkClosed() {
	f.t.Helper()
	js, err := jetstream.New(f.b.Connect(f.t))
	if err != nil {
		f.t.Fatal(err)
	}
	all, err := outbox.Partitions(f.t.Context(), f.pool)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, p := range all {
		if !p.Closed {
			continue
		}
		s, err := broker.ReadStream(f.t.Context(), js, f.b.Config(), p.Number)
		if err != nil {
			f.t.Fatal(err)
		}
		if final, err := broker.Closed(f.t.Context(), js, f.b.Config(), s); err != nil || final != p.Final || s.Last != final {
			f.t.Errorf("partition %d is closed at %d, its closing message is %d, and its stream ends at %d: %v", p.Number, p.Final, final,
				s.Last, err)
		}
	}
}

func TestAMessageThatNoRelayWroteIsPassedOver(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	r := newRelay(t, pool, b)
	start(t, r)
	insertRow(t, pool, 1, "created", `{"version": 1}`)
	awaitDrained(t, t.Context(), pool, time.Minute)
	nc := b.Connect(t)
	for _, m := range []*nats.Msg{
		{Subject: b.Config().Prefix + ".0.x", Data: []byte("hello")},
		// a closing message without a relay
		{Subject: b.Config().Prefix + ".0.t1.post.created", Header: nats.Header{event.HeaderClosed: {"1"}}},
	} {
		if _, err := nc.RequestMsg(m, 5*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	insertRow(t, pool, 1, "edited", `{"version": 2}`)
	awaitDrained(t, t.Context(), pool, time.Minute)
	checkStream(t, t.Context(), pool, b)
	if n := testutil.ToFloat64(r.metrics.skipped.WithLabelValues(skipForeign)); n != 2 {
		t.Errorf("counted %v foreign messages, want 2", n)
	}
	if err := r.Ready(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestAnEventThatIsOnTheStreamTwiceCountsOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	r := newRelay(t, pool, b)
	start(t, r)
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	first, err := broker.Next(t.Context(), js, b.Config().StreamName(0), 1)
	if err != nil {
		t.Fatal(err)
	}
	again := &nats.Msg{Subject: first.Subject, Data: first.Data, Header: nats.Header{}}
	for name, v := range first.Header {
		if name != headerExpectLastSequence {
			again.Header[name] = v
		}
	}
	if _, err := js.PublishMsg(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	insertRow(t, pool, 1, "edited")
	awaitDrained(t, t.Context(), pool, time.Minute)
	var seq int64
	if err := pool.QueryRow(t.Context(), `SELECT min(stream_seq) FROM outbox_messages`).Scan(&seq); err != nil || seq != 1 {
		t.Errorf("the event is marked with sequence %d, %v: want the sequence of its first message", seq, err)
	}
	if n := testutil.ToFloat64(r.metrics.skipped.WithLabelValues(skipDuplicate)); n != 1 {
		t.Errorf("counted %v duplicates, want 1", n)
	}
}

func TestAnIdleRelayNoticesThatItsStreamIsGone(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	r := newRelay(t, pool, b)
	start(t, r)
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), b.Config().StreamName(0)); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the relay to report that the stream is gone", func() (bool, error) {
		return r.Ready(t.Context()) != nil && testutil.ToFloat64(r.metrics.stuck) == 1, nil
	})
}

func TestAFloorOutlivesItsRelay(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	stop := start(t, newRelay(t, pool, b))
	var last int64
	for range 200 {
		last = insertRow(t, pool, 1, "created")
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	testkit.Eventually(t, "the stored floor to rise", func() (bool, error) {
		p, err := outbox.ReadPartition(t.Context(), pool, 0)
		return p.Floor >= last, err
	})
	stop()
}
