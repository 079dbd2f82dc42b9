package consumers_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

const name = "testlog"

// logbook is a projection that writes down what it is given, without any guard of its own: what is applied twice is there twice.
type logbook struct {
	hook func(ctx context.Context, tx pgx.Tx, events []event.Event) error // before writing; nil for none
}

func (logbook) Name() string         { return name }
func (logbook) Aggregates() []string { return []string{event.AggregateFollow} }

type line struct {
	FollowerID, FolloweeID, Version int64
}

func (l logbook) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	if l.hook != nil {
		if err := l.hook(ctx, tx, events); err != nil {
			return err
		}
	}
	for i := range events {
		var f event.Follow
		if err := events[i].DecodePayload(&f); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO testlog (follower_id, followee_id, version) VALUES ($1, $2, $3)`,
			int64(f.FollowerID), int64(f.FolloweeID), f.Version); err != nil {
			return err
		}
	}
	return nil
}

// rig is a database with the logbook's table, a stream, and a relay's hand.
type rig struct {
	t      testing.TB
	url    string
	owner  *pgxpool.Pool
	system *pgxpool.Pool
	cfg    broker.Config
	js     jetstream.JetStream
	tails  map[int]uint64
	n      int64
}

func newRig(t testing.TB, db *testkit.DB, b *testkit.Broker) *rig {
	t.Helper()
	r := &rig{t: t, url: db.URL, owner: db.Pool(t, postgres.RoleOwner), system: db.Pool(t, postgres.RoleSystem), cfg: b.Config(), tails: map[int]uint64{}}
	r.exec(`CREATE TABLE testlog (id bigserial, follower_id bigint, followee_id bigint, version bigint CHECK (version < 1000))`)
	r.exec(`GRANT ALL ON testlog, testlog_id_seq TO tidings_system`)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	r.js = js
	testkit.Eventually(t, 10*time.Second, "the stream", func() (bool, error) {
		_, err := broker.EnsureStream(context.Background(), js, r.cfg)
		return err == nil, err
	})
	return r
}

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.owner.Exec(context.Background(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

// partition is any function of the aggregate; the consumer reads it from the subject.
func partition(followee int64) int { return int(followee % event.Partitions) }

func follow(follower, followee, version int64) event.Event {
	payload, err := json.Marshal(event.Follow{FollowerID: event.ID(follower), FolloweeID: event.ID(followee), Status: event.StatusActive, Version: version, Actor: "test"})
	if err != nil {
		panic(err)
	}
	return event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: followee, Type: event.Created, Version: 1,
		OccurredAt: time.Now(), Payload: payload, Partition: partition(followee)}
}

// publish does what the relay does with a batch of one partition: the messages stand in a row, the first names the tail.
func (r *rig) publish(events ...event.Event) (last uint64) {
	r.t.Helper()
	return r.publishWith(nil, events...)
}

func (r *rig) publishWith(change func(*nats.Msg), events ...event.Event) (last uint64) {
	r.t.Helper()
	for i := range events {
		e := &events[i]
		r.n++
		e.OutboxID = r.n
		msg := &nats.Msg{Subject: e.Subject(r.cfg.Prefix), Header: e.Headers(), Data: e.Payload}
		if i == 0 {
			msg.Header.Set(event.HeaderPrev, fmt.Sprint(r.tails[e.Partition]))
			msg.Header.Set(event.HeaderGeneration, "1")
		}
		if change != nil {
			change(msg)
		}
		ack, err := r.js.PublishMsg(context.Background(), msg)
		if err != nil {
			r.t.Fatal(err)
		}
		last = ack.Sequence
		r.tails[e.Partition] = last
	}
	return last
}

func config() consumers.Config {
	return consumers.Config{BatchEvents: 500, BatchBytes: 8 << 20, ApplyTimeout: 20 * time.Second, LagInterval: 100 * time.Millisecond,
		Recheck: 200 * time.Millisecond, Lease: lease.Config{TTL: time.Second}}
}

// instance is a running consumer.
type instance struct {
	*consumers.Consumer
	reg  *prometheus.Registry
	stop func()
}

// run starts an instance on pool; it is stopped when the test ends.
func (r *rig) run(pool *pgxpool.Pool, p consumers.Projection) *instance {
	r.t.Helper()
	in := &instance{reg: prometheus.NewRegistry()}
	var err error
	in.Consumer, err = consumers.New(config(), consumers.Deps{Pool: pool, JetStream: r.js, Broker: r.cfg, Registry: in.reg, Log: testkit.Logger(r.t)}, p)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- in.Run(ctx) }()
	in.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("run: %v", err)
		}
	})
	r.t.Cleanup(in.stop)
	return in
}

func (in *instance) metric(t testing.TB, name string) (sum float64) {
	t.Helper()
	families, err := in.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
			return sum
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

func (r *rig) lag() consumers.ConsumerLag {
	r.t.Helper()
	all, err := consumers.Lag(context.Background(), r.system, r.js, r.cfg, name)
	if err != nil {
		r.t.Fatal(err)
	}
	return all[0]
}

func (r *rig) awaitLag(want int64) {
	r.t.Helper()
	testkit.Eventually(r.t, 20*time.Second, fmt.Sprintf("a lag of %d messages", want), func() (bool, error) {
		all, err := consumers.Lag(context.Background(), r.system, r.js, r.cfg, name)
		if err != nil {
			return false, err
		}
		if all[0].Messages != want {
			return false, fmt.Errorf("lag is %+v", all[0])
		}
		return true, nil
	})
}

// lines returns what was applied, in the order of application; per followee that is the order of versions.
func (r *rig) lines() []line {
	r.t.Helper()
	rows, _ := r.owner.Query(context.Background(), `SELECT follower_id, followee_id, version FROM testlog ORDER BY followee_id, id`)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[line])
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

func (r *rig) wantLines(want []line) {
	r.t.Helper()
	slices.SortStableFunc(want, func(a, b line) int { return int(a.FolloweeID - b.FolloweeID) })
	if diff := cmp.Diff(want, r.lines()); diff != "" {
		r.t.Errorf("applied (-want +got):\n%s", diff)
	}
}

// flood publishes n events, in publishes of up to 7, over all partitions, and returns what they should become.
func (r *rig) flood(n int) (want []line) {
	r.t.Helper()
	for i := 0; i < n; {
		followee := int64(100 + i%53)
		var events []event.Event
		for range min(1+i%7, n-i) {
			events = append(events, follow(int64(i+1), followee, int64(1+i%5)))
			want = append(want, line{int64(i + 1), followee, int64(1 + i%5)})
			i++
		}
		r.publish(events...)
	}
	return want
}

func TestEventsAreAppliedOnceAndInOrder(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	want := r.flood(300)
	r.awaitLag(300)
	in := r.run(r.system, logbook{})
	r.awaitLag(0)
	want = append(want, r.flood(100)...)
	r.awaitLag(0)
	r.wantLines(want)
	if got := in.metric(t, "consumer_applied_total"); got != 400 {
		t.Errorf("consumer_applied_total is %v", got)
	}
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	in.stop()
	holders, err := lease.Holders(context.Background(), r.system, name)
	if err != nil || len(holders) > 0 {
		t.Errorf("leases after the stop: %v, %v", holders, err)
	}
	if l := r.lag(); l.Messages != 0 || l.Seconds != 0 {
		t.Errorf("lag %+v", l)
	}
}

// TestBatchesAreAsLargeAsTheLag: a consumer that is behind takes full batches, one that is not applies each event by itself, at once.
func TestBatchesAreAsLargeAsTheLag(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.flood(1700)
	sizes := make(chan int, 100)
	r.run(r.system, logbook{hook: func(_ context.Context, _ pgx.Tx, events []event.Event) error {
		sizes <- len(events)
		return nil
	}})
	r.awaitLag(0)
	for _, want := range []int{500, 500, 500, 200} {
		if got := <-sizes; got != want {
			t.Errorf("a batch of %d events, want %d", got, want)
		}
	}
	var waits []time.Duration
	for i := range int64(20) {
		start := time.Now()
		r.publish(follow(i+1, 3, 1))
		if got := <-sizes; got != 1 {
			t.Errorf("a batch of %d events, want a single one", got)
		}
		waits = append(waits, time.Since(start))
	}
	slices.Sort(waits)
	t.Logf("from the publish to the projection: median %s, longest %s", waits[10], waits[19])
	if waits[10] > 100*time.Millisecond { // that is far below any timer but one of the reader's
		t.Errorf("half of the lone events waited longer than %s", waits[10])
	}
}

func TestWhatIsNotWantedIsPassedOver(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	thread, unknown := follow(1, 2, 1), follow(1, 2, 1)
	thread.AggregateType, thread.Type = event.AggregateThread, event.Updated
	unknown.AggregateType = "like"
	r.publish(follow(1, 2, 1), thread, unknown, follow(1, 2, 2))
	in := r.run(r.system, logbook{})
	r.awaitLag(0)
	r.wantLines([]line{{1, 2, 1}, {1, 2, 2}})
	if got := in.metric(t, "consumer_skipped_total"); got != 2 {
		t.Errorf("consumer_skipped_total is %v", got)
	}
}

// deadLetters returns the parked versions by followee.
func (r *rig) deadLetters() map[int64][]string {
	rows, _ := r.owner.Query(context.Background(), `SELECT aggregate_id, event_type, error FROM consumer_dead_letters WHERE consumer_name = $1 ORDER BY stream_seq`, name)
	all := map[int64][]string{}
	var id int64
	var typ, text string
	if _, err := pgx.ForEachRow(rows, []any{&id, &typ, &text}, func() error {
		all[id] = append(all[id], typ+": "+text)
		return nil
	}); err != nil {
		r.t.Fatal(err)
	}
	return all
}

func TestPoisonStopsItsOwnAggregateOnly(t *testing.T) {
	poison := map[string]func(e *event.Event){
		"an event type of the future":      func(e *event.Event) { e.Type = "muted" },
		"an event version of the future":   func(e *event.Event) { e.Version = 2 },
		"a payload that does not decode":   func(e *event.Event) { e.Payload = []byte(`{"follower_id": 1`) },
		"a payload that the table refuses": func(e *event.Event) { *e = follow(1, e.AggregateID, 5000) },
	}
	for what, damage := range poison {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
			bad := follow(1, 3, 2)
			damage(&bad)
			const same = 3 + event.Partitions // another aggregate of the same partition
			r.publish(follow(1, 3, 1), bad, follow(1, same, 1), follow(1, 3, 3))
			in := r.run(r.system, logbook{})
			r.awaitLag(0)
			r.publish(follow(1, 3, 4), follow(1, same, 2)) // in a later batch
			r.awaitLag(0)
			r.wantLines([]line{{1, 3, 1}, {1, same, 1}, {1, same, 2}})
			dead := r.deadLetters()
			if len(dead) != 1 || len(dead[3]) != 3 || !strings.HasPrefix(dead[3][0], bad.Type+": ") {
				t.Errorf("dead letters: %v", dead)
			}
			testkit.Eventually(t, 5*time.Second, "the gauge", func() (bool, error) { return in.metric(t, "consumer_dead_letters") == 3, nil })
		})
	}
}

func TestADamagedEnvelopeIsParked(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.publish(follow(1, 3, 1))
	r.publishWith(func(m *nats.Msg) {
		m.Header.Set(event.HeaderTime, "yesterday\x01")
		m.Data = []byte("a\x00b")
	}, follow(1, 3, 2))
	r.publish(follow(1, 3, 3), follow(1, 35, 1))
	r.run(r.system, logbook{})
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 35, 1}})
	if dead := r.deadLetters(); len(dead[3]) != 2 {
		t.Errorf("dead letters: %v", dead)
	}
}

func TestTheDatabasesOwnTroubleIsNotPoison(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.exec(`REVOKE ALL ON testlog FROM tidings_system`)
	r.publish(follow(1, 3, 1))
	in := r.run(r.system, logbook{})
	testkit.Eventually(t, 10*time.Second, "two failures", func() (bool, error) { return in.metric(t, "consumer_failures_total") >= 2, nil })
	if err := in.Ready(context.Background()); err == nil {
		t.Error("ready though nothing can be applied")
	}
	r.exec(`GRANT ALL ON testlog TO tidings_system`)
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}})
	if dead := r.deadLetters(); len(dead) > 0 {
		t.Errorf("dead letters: %v", dead)
	}
	testkit.Eventually(t, 5*time.Second, "ready again", func() (bool, error) { err := in.Ready(context.Background()); return err == nil, err })
}

// awaitStuck waits until the instance says that it is stuck, and why.
func (r *rig) awaitStuck(in *instance, partitions float64, why string) {
	r.t.Helper()
	testkit.Eventually(r.t, 10*time.Second, "stuck: "+why, func() (bool, error) {
		err := in.Ready(context.Background())
		if err == nil {
			return false, errors.New("it is ready")
		}
		if !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "tidings replay --consumer "+name) {
			return false, err
		}
		return in.metric(r.t, "consumer_partitions_stuck") == partitions, nil
	})
}

func (r *rig) stream() jetstream.Stream {
	r.t.Helper()
	s, err := r.js.Stream(context.Background(), r.cfg.Stream)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

func TestWhatWasErasedIsPassedOver(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.publish(follow(1, 4, 1)) // the stream's first message stays
	r.publish(follow(1, 3, 1))
	second := r.publish(follow(1, 3, 2), follow(1, 3, 3))
	r.publish(follow(1, 3, 4))
	for _, seq := range []uint64{second - 1, second} {
		if err := r.stream().DeleteMsg(context.Background(), seq); err != nil {
			t.Fatal(err)
		}
	}
	r.awaitLag(3)
	r.run(r.system, logbook{})
	r.awaitLag(0)
	r.wantLines([]line{{1, 4, 1}, {1, 3, 1}, {1, 3, 4}})
}

func TestWhatExpiredUnreadStopsItsPartitionOnly(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	r.publish(follow(1, 4, 1))
	r.awaitLag(0)
	in.stop()
	r.publish(follow(1, 3, 2))
	kept := r.publish(follow(1, 3, 3))
	r.publish(follow(1, 4, 2))
	if err := r.stream().Purge(context.Background(), jetstream.WithPurgeSequence(kept)); err != nil {
		t.Fatal(err)
	}
	in = r.run(r.system, logbook{})
	r.awaitStuck(in, 1, "partition p03: the events after 1 have expired")
	r.awaitLag(1)
	r.publish(follow(1, 4, 3))
	r.awaitLag(1)
	r.wantLines([]line{{1, 3, 1}, {1, 4, 1}, {1, 4, 2}, {1, 4, 3}})
	if got := in.metric(t, "consumer_lag_messages"); got < 1 {
		t.Errorf("consumer_lag_messages is %v", got)
	}
	r.exec(`UPDATE consumer_offsets SET last_processed_id = $1 WHERE partition_key = 'p03'`, int64(kept)) // what a replay comes down to
	testkit.Eventually(t, 10*time.Second, "going on", func() (bool, error) { err := in.Ready(context.Background()); return err == nil, err })
}

// stray publishes a message that no relay wrote.
func (r *rig) stray(subject string) uint64 {
	r.t.Helper()
	ack, err := r.js.Publish(context.Background(), r.cfg.Prefix+"."+subject, []byte("hello"))
	if err != nil {
		r.t.Fatal(err)
	}
	return ack.Sequence
}

func TestMessagesThatNoRelayWroteAreSkippedAndCounted(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	r.stray("p03.x")
	r.publish(follow(1, 3, 2))
	r.stray("p03.t1.follow.created")
	r.stray("p03.x")
	r.stray("x")
	r.awaitLag(0)
	testkit.Eventually(t, 10*time.Second, "all of them to be counted", func() (bool, error) {
		return in.metric(t, "consumer_foreign_messages_total") == 4, nil
	})
	in.stop()
	// The offset is behind messages that the next event does not name; one of them is gone, and one came while nobody read.
	if err := r.stream().DeleteMsg(context.Background(), 5); err != nil {
		t.Fatal(err)
	}
	r.stray("p03.x")
	r.publish(follow(1, 3, 3))
	in = r.run(r.system, logbook{})
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 3, 2}, {1, 3, 3}})
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	if n := len(r.deadLetters()); n > 0 {
		t.Errorf("%d dead letters", n)
	}
}

// TestAStrayMessageHidesNoLoss: what expired unread stops its partition, whoever's message stands behind it.
func TestAStrayMessageHidesNoLoss(t *testing.T) {
	for what, restart := range map[string]bool{"at once": false, "after another start": true} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
			in := r.run(r.system, logbook{})
			r.publish(follow(1, 3, 1))
			r.publish(follow(1, 4, 1))
			r.awaitLag(0)
			in.stop()
			r.publish(follow(1, 3, 2))
			stray := r.stray("p03.x")
			if err := r.stream().Purge(context.Background(), jetstream.WithPurgeSequence(stray)); err != nil {
				t.Fatal(err)
			}
			if restart {
				in = r.run(r.system, logbook{})
				r.publish(follow(1, 4, 2))
				testkit.Eventually(t, 10*time.Second, "it to have read past the stray", func() (bool, error) { return len(r.lines()) == 3, nil })
				in.stop()
			}
			in = r.run(r.system, logbook{})
			r.publish(follow(1, 3, 3))
			r.awaitStuck(in, 1, "partition p03: the events after 1 have expired")
		})
	}
}

func TestTheSameEventTwiceIsAppliedOnce(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	twice := follow(1, 3, 2)
	r.publish(twice)
	r.stray("p03.x")
	r.publish(follow(1, 3, 3))
	first, err := r.stream().GetMsg(context.Background(), 2)
	if err != nil {
		t.Fatal(err)
	}
	first.Header.Del(nats.MsgIdHdr)
	ack, err := r.js.PublishMsg(context.Background(), &nats.Msg{Subject: first.Subject, Header: first.Header, Data: first.Data})
	if err != nil {
		t.Fatal(err)
	}
	r.tails[3] = ack.Sequence // the relay knows the row, and goes on behind it
	r.publish(follow(1, 3, 4))
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 3, 2}, {1, 3, 3}, {1, 3, 4}})
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
	testkit.Eventually(t, 10*time.Second, "both to be counted", func() (bool, error) {
		return in.metric(t, "consumer_foreign_messages_total") == 2, nil
	})
}

func TestAPartitionWhoseAppliedMessagesExpiredGoesOn(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	r.awaitLag(0)
	if err := r.stream().Purge(context.Background()); err != nil {
		t.Fatal(err)
	}
	r.awaitLag(0)
	r.tails = map[int]uint64{} // the relay finds an empty partition
	r.publish(follow(1, 3, 2))
	r.awaitLag(0)
	r.wantLines([]line{{1, 3, 1}, {1, 3, 2}})
}

func TestAnotherStreamIsNotReadOn(t *testing.T) {
	for what, c := range map[string]struct {
		replace func(r *rig)
		why     string
	}{
		"made anew and shorter": {func(r *rig) { r.remake(1) }, "was made anew"},
		"made anew and longer":  {func(r *rig) { r.remake(50) }, "was made anew"},
		"repaired": {func(r *rig) {
			cfg := r.stream().CachedInfo().Config
			cfg.Metadata[broker.MetaGeneration] = "2"
			if _, err := r.js.UpdateStream(context.Background(), cfg); err != nil {
				r.t.Fatal(err)
			}
		}, "is of generation 2"},
		"repaired, by its messages": {func(r *rig) {
			r.publishWith(func(m *nats.Msg) { m.Header.Set(event.HeaderGeneration, "2") }, follow(1, 3, 99))
		}, "is of generation 2"},
		"cut at its end": {func(r *rig) {
			r.exec(`UPDATE consumer_offsets SET last_processed_id = 1000 WHERE partition_key = 'p03'`)
		}, "it has lost events"},
	} {
		for _, running := range []bool{false, true} {
			if running && what == "cut at its end" {
				continue // the offset is moved under the consumer, which only a restore does
			}
			t.Run(fmt.Sprintf("%s, consumer running: %v", what, running), func(t *testing.T) {
				r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
				in := r.run(r.system, logbook{})
				for v := range int64(20) {
					r.publish(follow(1, 3, v+1))
				}
				r.awaitLag(0)
				if !running {
					in.stop()
				}
				c.replace(r)
				if !running {
					in = r.run(r.system, logbook{})
				}
				r.awaitStuck(in, 1, c.why)
				if n := len(r.lines()); n != 20 {
					t.Errorf("%d events applied, want 20", n)
				}
			})
		}
	}
}

// TestABatchOfAnotherGenerationIsNotApplied has the stream repaired between a batch's reading and its transaction, which leaves the
// offset where it was.
func TestABatchOfAnotherGenerationIsNotApplied(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow(1, 3, 1))
	r.awaitLag(0)
	err := postgres.InTx(t.Context(), r.owner, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `UPDATE consumer_offsets SET generation = 2 WHERE partition_key = 'p03'`); err != nil {
			return err
		}
		r.publish(follow(1, 3, 2))
		r.awaitOffsetLock()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r.awaitStuck(in, 1, "the offset 1 belongs to 2")
	r.wantLines([]line{{1, 3, 1}})
}

// awaitOffsetLock waits until a consumer waits for the offset of a batch.
func (r *rig) awaitOffsetLock() {
	r.t.Helper()
	testkit.Eventually(r.t, 10*time.Second, "a consumer to wait for an offset", func() (waits bool, err error) {
		err = r.owner.QueryRow(context.Background(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%consumers.move_offsets%')`).Scan(&waits)
		return waits, err
	})
}

// remake replaces the stream by one with n events.
func (r *rig) remake(n int) {
	r.t.Helper()
	ctx := context.Background()
	if err := r.js.DeleteStream(ctx, r.cfg.Stream); err != nil {
		r.t.Fatal(err)
	}
	if _, err := broker.EnsureStream(ctx, r.js, r.cfg); err != nil {
		r.t.Fatal(err)
	}
	r.tails = map[int]uint64{}
	for v := range n {
		r.publish(follow(1, 3, int64(v+1)))
	}
}

// cutter is a pool whose connections can all be cut, as when a process is killed: nothing is said goodbye to.
type cutter struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func (c *cutter) pool(t testing.TB, url string) *pgxpool.Pool {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.RuntimeParams["role"] = string(postgres.RoleSystem)
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cut {
			return nil, errors.New("cut")
		}
		conn, err := dial(ctx, network, addr)
		if err == nil {
			c.conns = append(c.conns, conn)
		}
		return conn, err
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func (c *cutter) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	if cut {
		for _, conn := range c.conns {
			_ = conn.Close() // it may be closed already
		}
		c.conns = nil
	}
}

// TestAnInstanceKilledInABatchIsReplaced cuts one of two instances off in the middle of a transaction, without freeing its leases,
// and lets it come back as a zombie with its batch.
func TestAnInstanceKilledInABatchIsReplaced(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var victim cutter
	inBatch, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release)
	once := sync.OnceFunc(func() {
		close(inBatch)
		<-goOn
	})
	a := r.run(victim.pool(t, r.url), logbook{hook: func(context.Context, pgx.Tx, []event.Event) error {
		once()
		return nil
	}})
	b := r.run(r.system, logbook{})
	testkit.Eventually(t, 10*time.Second, "a fair share for both", func() (bool, error) {
		return a.metric(t, "consumer_partitions_held") == 16 && b.metric(t, "consumer_partitions_held") == 16, nil
	})
	want := r.flood(400)
	select {
	case <-inBatch:
	case <-time.After(10 * time.Second):
		t.Fatal("the first instance got no batch")
	}
	victim.set(true)
	r.awaitLag(0) // by the other, once the leases have expired
	want = append(want, r.flood(100)...)
	r.awaitLag(0)
	victim.set(false)
	release()
	want = append(want, r.flood(100)...)
	testkit.Eventually(t, 10*time.Second, "a fair share for both again", func() (bool, error) {
		return a.metric(t, "consumer_partitions_held") == 16 && b.metric(t, "consumer_partitions_held") == 16, nil
	})
	want = append(want, r.flood(100)...)
	r.awaitLag(0)
	r.wantLines(want)
}

func TestTheBatchInHandIsFinishedAtShutdown(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	inBatch, goOn := make(chan struct{}), make(chan struct{})
	in := r.run(r.system, logbook{hook: func(ctx context.Context, _ pgx.Tx, _ []event.Event) error {
		close(inBatch)
		<-goOn
		return ctx.Err()
	}})
	r.publish(follow(1, 3, 1))
	<-inBatch
	stopped := make(chan struct{})
	go func() {
		in.stop()
		close(stopped)
	}()
	close(goOn)
	<-stopped
	r.wantLines([]line{{1, 3, 1}})
	if l := r.lag(); l.Messages != 0 {
		t.Errorf("lag %+v", l)
	}
}

func TestServersThatDieLoseAndRepeatNothing(t *testing.T) {
	pg, nats := testkit.PostgresProcess(t), testkit.NATSProcess(t)
	r := newRig(t, pg.DB(t), nats)
	r.run(r.system, logbook{})
	r.run(r.system, logbook{})
	want := r.flood(100)
	pg.Kill(t)
	more := r.flood(100)
	pg.Restart(t)
	r.owner.Reset() // the test's own connections, not those of the consumers
	want = append(want, more...)
	r.awaitLag(0)
	want = append(want, r.flood(50)...)
	nats.Kill(t)
	nats.Restart(t)
	testkit.Eventually(t, 10*time.Second, "the broker", func() (bool, error) {
		_, err := r.js.Stream(context.Background(), r.cfg.Stream)
		return err == nil, err
	})
	want = append(want, r.flood(50)...)
	r.awaitLag(0)
	r.wantLines(want)
}

func TestLagCountsWhatIsNotApplied(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.awaitLag(0) // nobody has an offset, and nothing is there
	for range 10 {
		r.publish(follow(1, 3, 1))
		r.publish(follow(1, 4, 1))
		r.publish(follow(1, 5, 1))
	}
	for key, offset := range map[string]int64{"p03": 4, "p04": 29, "p05": 15} { // p03 has 8 to come, p04 none, p05 5
		r.exec(`INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ($1, $2, $3)`, name, key, offset)
	}
	l := r.lag()
	if l.Messages != 13 || l.Partitions != 2 || l.Seconds <= 0 {
		t.Errorf("lag %+v, want 13 messages in 2 partitions", l)
	}
	all, err := consumers.Lag(context.Background(), r.system, r.js, r.cfg)
	if err != nil || len(all) != 1 || all[0].Messages != 13 {
		t.Errorf("all consumers: %+v, %v", all, err)
	}
}

func (r *rig) asOf() (at time.Time) {
	r.t.Helper()
	err := postgres.InTx(context.Background(), r.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
		progress, err := consumers.ReadProgress(context.Background(), tx, name)
		at = progress.AsOf
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return at
}

func TestAsOfBeginsWithTheStream(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	for p := range int64(event.Partitions) {
		r.publish(follow(1, p+event.Partitions, 1))
	}
	r.run(r.system, logbook{hook: func(context.Context, pgx.Tx, []event.Event) error { return context.Canceled }}) // applies nothing
	created := r.stream().CachedInfo().Created.Truncate(time.Microsecond)
	testkit.Eventually(t, 10*time.Second, "the offsets", func() (bool, error) { return r.asOf().Unix() > 0, nil })
	if at := r.asOf(); !at.Equal(created) {
		t.Errorf("as of %s, want %s", at, created)
	}
}

func TestAsOfIsTrueAndMovesWithoutEvents(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	asOf := r.asOf
	if at := asOf(); at.Unix() != 0 {
		t.Errorf("before anything ran it is %s", at)
	}
	r.publish(follow(1, 3, 1))
	start := time.Now()
	in := r.run(r.system, logbook{})
	after := func(what string, than time.Time) time.Time {
		t.Helper()
		var at time.Time
		testkit.Eventually(t, 10*time.Second, what, func() (bool, error) { at = asOf(); return at.After(than), nil })
		if at.After(time.Now()) {
			t.Errorf("as of %s, which is in the future", at)
		}
		return at
	}
	first := after("everything to be applied", start)
	after("it to move while nothing is written", first)
	in.stop()
	stopped := asOf()
	r.publish(follow(1, 3, 2))
	if at := asOf(); !at.Equal(stopped) {
		t.Errorf("nobody runs and it moved from %s to %s", stopped, at)
	}
}
