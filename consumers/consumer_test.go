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

// logbook is a projection that records its events without comparing versions, so an event that is
// applied twice has two lines.
type logbook struct {
	hook func(ctx context.Context, tx pgx.Tx, events []event.Event) error // before writing; nil for none
}

func (logbook) Name() string                { return name }
func (logbook) Wants(aggregate string) bool { return aggregate == event.AggregateFollow }

type line struct {
	FollowerID, FolloweeID event.ID
	Version                int64
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
			f.FollowerID, f.FolloweeID, f.Version); err != nil {
			return err
		}
	}
	return nil
}

// rig has a database with the logbook's table, streams, and a publisher that acts as a relay.
type rig struct {
	t      testing.TB
	url    string
	owner  *pgxpool.Pool
	system *pgxpool.Pool
	worker *pgxpool.Pool // as the role that consumers have
	cfg    broker.Config
	js     jetstream.JetStream
	open   []broker.Stream // that have not ended
	tails  map[string]uint64
	n      int64
}

// newRig returns a rig with one partition, or with the given number of partitions of equal size.
func newRig(t testing.TB, db *testkit.DB, b *testkit.Broker, partitions ...int) *rig {
	t.Helper()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	return newRigOn(t, db, js, b.Config(), append(partitions, 1)[0])
}

func newRigOn(t testing.TB, db *testkit.DB, js jetstream.JetStream, cfg broker.Config, n int) *rig {
	t.Helper()
	r := &rig{t: t, url: db.URL, owner: db.Pool(t, postgres.RoleOwner), system: db.Pool(t, postgres.RoleSystem),
		worker: db.Pool(t, postgres.RoleConsumer), cfg: cfg, js: js, tails: map[string]uint64{}}
	r.exec(`CREATE TABLE testlog (id bigserial, follower_id text, followee_id text COLLATE "C", version bigint CHECK (version < 1000))`)
	r.exec(`GRANT ALL ON testlog, testlog_id_seq TO tidings_consumer`)
	for i := range n {
		r.declare(broker.Partition{Number: i, FirstSlot: i * event.Slots / n, LastSlot: (i+1)*event.Slots/n - 1})
	}
	return r
}

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.owner.Exec(context.Background(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

// declare creates a partition's stream. From then on publish sends it the events of its slots.
func (r *rig) declare(p broker.Partition) (s broker.Stream) {
	r.t.Helper()
	testkit.Eventually(r.t, "the stream", func() (bool, error) {
		var err error
		s, err = broker.Declare(context.Background(), r.js, r.cfg, p, testkit.Logger(r.t))
		return err == nil, err
	})
	r.open = append(r.open, s)
	r.tails[s.Name] = s.Last
	return s
}

// close publishes the closing message of a partition's stream. publish sends it no more events.
func (r *rig) close(partition int) {
	r.t.Helper()
	name := r.cfg.StreamName(partition)
	subject, headers := event.ClosingMessage(r.cfg.Prefix, partition)
	msg := &nats.Msg{Subject: subject, Header: headers}
	r.send(name, msg)
	r.open = slices.DeleteFunc(r.open, func(s broker.Stream) bool { return s.Number == partition })
}

// of returns the partition of an aggregate. It uses a simpler hash than the product.
func (r *rig) of(followee event.ID) int {
	slot := testkit.Number(followee) % event.Slots
	i := slices.IndexFunc(r.open, func(s broker.Stream) bool { return s.FirstSlot <= slot && slot <= s.LastSlot })
	return r.open[i].Number
}

func follow(follower, followee event.ID, version int64) event.Event {
	payload, err := json.Marshal(event.Follow{FollowerID: follower, FolloweeID: followee, Status: event.StatusActive,
		Version: version, Actor: "test"})
	if err != nil {
		panic(err)
	}
	return event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: followee,
		Type: event.Created, Version: 1, OccurredAt: time.Now(), Payload: payload}
}

// publish publishes like a relay that publishes single rows: each publish names the stream's last
// sequence.
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
		p := r.of(e.AggregateID)
		msg := &nats.Msg{Subject: e.Subject(r.cfg.Prefix, p), Header: e.Headers(), Data: e.Payload}
		if change != nil {
			change(msg)
		}
		last = r.send(r.cfg.StreamName(p), msg)
	}
	return last
}

func (r *rig) send(stream string, msg *nats.Msg) uint64 {
	r.t.Helper()
	msg.Header.Set(jetstream.ExpectedLastSeqHeader, fmt.Sprint(r.tails[stream]))
	ack, err := r.js.PublishMsg(context.Background(), msg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.tails[stream] = ack.Sequence
	return ack.Sequence
}

// config has leases that outlast a stall of the machine. An instance that stops frees its leases at
// once.
func config() consumers.Config {
	return consumers.Config{BatchEvents: 500, BatchBytes: 8 << 20, ApplyTimeout: 20 * time.Second, LagInterval: 100 * time.Millisecond,
		Recheck: 200 * time.Millisecond, Lease: lease.Config{TTL: 10 * time.Second}}
}

// instance is a running consumer.
type instance struct {
	*consumers.Consumer
	reg    *prometheus.Registry
	cancel func() // begins the shutdown
	stop   func() // waits for its end
}

// run starts an instance on pool. The end of the test stops it.
func (r *rig) run(pool *pgxpool.Pool, p consumers.Projection) *instance {
	r.t.Helper()
	return r.runWith(config(), r.js, pool, p)
}

func (r *rig) runWith(cfg consumers.Config, js jetstream.JetStream, pool *pgxpool.Pool, p consumers.Projection) *instance {
	r.t.Helper()
	return r.start(cfg, consumers.Deps{Pool: pool, JetStream: js}, p)
}

// start starts an instance with deps, of which it fills in the streams, the registry and the log.
func (r *rig) start(cfg consumers.Config, deps consumers.Deps, p consumers.Projection) *instance {
	r.t.Helper()
	in := &instance{reg: prometheus.NewRegistry()}
	if deps.Pool == r.system {
		deps.Pool = r.worker
	}
	deps.Streams = consumers.Streams{Name: r.cfg.Stream, Prefix: r.cfg.Prefix, Timeout: r.cfg.Timeout}
	deps.Registry, deps.Log = in.reg, testkit.Logger(r.t)
	var err error
	in.Consumer, err = consumers.New(cfg, deps, p)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	in.cancel = cancel
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

func (in *instance) metric(t testing.TB, name string) float64 {
	t.Helper()
	return testkit.Metric(t, in.reg, name)
}

// awaitMetric waits until a metric has the value. A batch counts after its commit, so the database
// may show it earlier.
func (in *instance) awaitMetric(t testing.TB, name string, want float64) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%s to be %v", name, want), func() (bool, error) {
		if got := in.metric(t, name); got != want {
			return false, fmt.Errorf("it is %v", got)
		}
		return true, nil
	})
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
	testkit.Eventually(r.t, fmt.Sprintf("a lag of %d messages", want), func() (bool, error) {
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

// lines returns the applied events by followee, in the order of application.
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
	slices.SortStableFunc(want, func(a, b line) int { return strings.Compare(string(a.FolloweeID), string(b.FolloweeID)) })
	if diff := cmp.Diff(want, r.lines()); diff != "" {
		r.t.Errorf("applied (-want +got):\n%s", diff)
	}
}

// flood publishes n events over all partitions, up to 7 at a time, and returns the expected lines.
func (r *rig) flood(n int) (want []line) {
	r.t.Helper()
	for i := 0; i < n; {
		followee := event.IDOf(100 + i%53)
		if i%3 == 2 {
			followee = "auth0|" + followee
		}
		var events []event.Event
		for range min(1+i%7, n-i) {
			events = append(events, follow(event.IDOf(i+1), followee, int64(1+i%5)))
			want = append(want, line{event.IDOf(i + 1), followee, int64(1 + i%5)})
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
	in.awaitMetric(t, "tidings_consumer_applied_total", 400)
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

// TestBatchesAreAsLargeAsTheLag checks that a consumer takes full batches while it is behind, and
// otherwise applies each event alone and at once.
func TestBatchesAreAsLargeAsTheLag(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.flood(1700)
	sizes := make(chan int, 100)
	r.run(r.system, logbook{hook: func(_ context.Context, _ pgx.Tx, events []event.Event) error {
		sizes <- len(events)
		return nil
	}})
	r.awaitLag(0)
	batches := 0
	for events := 0; events < 1700; batches++ {
		events += <-sizes
	}
	if batches > 17 { // four, unless the machine stalls: TestAConsumerThatIsBehindTakesFullBatches is exact
		t.Errorf("1,700 events came in %d batches of up to 500", batches)
	}
	var waits []time.Duration
	for i := range int64(20) {
		start := time.Now()
		r.publish(follow(event.IDOf(i+1), "3", 1))
		if got := <-sizes; got != 1 {
			t.Errorf("a batch of %d events, want 1", got)
		}
		waits = append(waits, time.Since(start))
	}
	slices.Sort(waits)
	t.Logf("from the publish to the projection: shortest %s, median %s, longest %s", waits[0], waits[10], waits[19])
	if waits[0] > 100*time.Millisecond { // far below every timer except the reader's own
		t.Errorf("each of the single events waited for %s or longer", waits[0])
	}
}

func TestWhatIsNotWantedIsPassedOver(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	thread, unknown := follow("1", "2", 1), follow("1", "2", 1)
	thread.AggregateType, thread.Type = event.AggregateThread, event.Updated
	unknown.AggregateType = "like"
	r.publish(follow("1", "2", 1), thread, unknown, follow("1", "2", 2))
	in := r.run(r.system, logbook{})
	r.awaitLag(0)
	r.wantLines([]line{{"1", "2", 1}, {"1", "2", 2}})
	in.awaitMetric(t, "tidings_consumer_skipped_total", 2)
}

// deadLetters returns the parked versions by followee.
func (r *rig) deadLetters() map[event.ID][]string {
	rows, _ := r.owner.Query(context.Background(), `SELECT aggregate_id, event_type, error FROM consumer_dead_letters
		WHERE consumer_name = $1 ORDER BY stream_seq`, name)
	all := map[event.ID][]string{}
	var id event.ID
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
		"a payload that the table refuses": func(e *event.Event) { *e = follow("1", e.AggregateID, 5000) },
	}
	for what, damage := range poison {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
			bad := follow("1", "3", 2)
			damage(&bad)
			const same = 35 // another aggregate of the same partition
			r.publish(follow("1", "3", 1), bad, follow("1", event.IDOf(same), 1), follow("1", "3", 3))
			in := r.run(r.system, logbook{})
			r.awaitLag(0)
			r.publish(follow("1", "3", 4), follow("1", event.IDOf(same), 2)) // in a later batch
			r.awaitLag(0)
			r.wantLines([]line{{"1", "3", 1}, {"1", event.IDOf(same), 1}, {"1", event.IDOf(same), 2}})
			dead := r.deadLetters()
			if len(dead) != 1 || len(dead["3"]) != 3 || !strings.HasPrefix(dead["3"][0], bad.Type+": ") {
				t.Fatalf("dead letters: %v", dead)
			}
			testkit.Eventually(t, "the gauge",
				func() (bool, error) { return in.metric(t, "tidings_consumer_dead_letters") == 3, nil })
		})
	}
}

// TestAnEventThatFailsHalfwayLeavesNothing parks an event that has changed the read table before it
// failed.
func TestAnEventThatFailsHalfwayLeavesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2)
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "35", 1))
	r.run(r.system, logbook{hook: func(ctx context.Context, tx pgx.Tx, events []event.Event) error {
		err := defect.hook(ctx, tx, events)
		if err != nil {
			_, failed := tx.Exec(ctx, `INSERT INTO testlog (follower_id, followee_id, version) VALUES (1, 3, 2)`)
			err = errors.Join(err, failed)
		}
		return err
	}})
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "35", 1}})
	if dead := r.deadLetters(); len(dead["3"]) != 1 {
		t.Errorf("dead letters: %v", dead)
	}
}

func TestADamagedEnvelopeIsParked(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.publish(follow("1", "3", 1))
	r.publishWith(func(m *nats.Msg) {
		m.Header.Set(event.HeaderTime, "yesterday\x01")
		m.Data = []byte("a\x00b")
	}, follow("1", "3", 2))
	r.publishWith(func(m *nats.Msg) { m.Header.Set(event.HeaderSubject, "3\x00\xff") }, follow("1", "3", 2)) // no id, nor a text
	r.publish(follow("1", "3", 3), follow("1", "35", 1))
	r.run(r.system, logbook{})
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "35", 1}})
	if dead := r.deadLetters(); len(dead["3"]) != 2 || len(dead[""]) != 1 {
		t.Errorf("dead letters: %v", dead)
	}
}

func TestTheDatabasesOwnTroubleIsNotPoison(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.exec(`REVOKE ALL ON testlog FROM tidings_consumer`)
	r.publish(follow("1", "3", 1))
	in := r.run(r.system, logbook{})
	testkit.Eventually(t, "two failures", func() (bool, error) { return in.metric(t, "tidings_consumer_failures_total") >= 2, nil })
	if err := in.Ready(context.Background()); err == nil {
		t.Error("the consumer is ready although it cannot apply events")
	}
	r.exec(`GRANT ALL ON testlog TO tidings_consumer`)
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}})
	if dead := r.deadLetters(); len(dead) > 0 {
		t.Errorf("dead letters: %v", dead)
	}
	testkit.Eventually(t, "ready again",
		func() (bool, error) { err := in.Ready(context.Background()); return err == nil, err })
}

// TestAnErrorOfTheDatabaseParksNothing fails an event with errors that no event causes, more often
// than a transaction is repeated and a batch is read again.
func TestAnErrorOfTheDatabaseParksNothing(t *testing.T) {
	for what, c := range map[string]struct {
		code  string
		times int
	}{"a deadlock": {"40P01", 9}, "a missing permission": {"42501", 4}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
			failures := 0
			r.publish(follow("1", "3", 1))
			r.run(r.system, logbook{hook: func(ctx context.Context, tx pgx.Tx, _ []event.Event) error {
				if failures++; failures > c.times {
					return nil
				}
				_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'trouble' USING ERRCODE = '`+c.code+`'; END $$`)
				return err
			}})
			r.awaitLag(0)
			r.wantLines([]line{{"1", "3", 1}})
			if dead := r.deadLetters(); len(dead) > 0 {
				t.Errorf("dead letters: %v", dead)
			}
		})
	}
}

// awaitStuck waits until the instance reports that it is stuck, with the reason. A partition that
// is stuck has a lag.
func (r *rig) awaitStuck(in *instance, partitions float64, why string) {
	r.t.Helper()
	testkit.Eventually(r.t, "stuck: "+why, func() (bool, error) {
		err := in.Ready(context.Background())
		if err == nil {
			if l := r.lag(); l.Messages == 0 {
				r.t.Fatalf("everything is applied; want a partition that is stuck: %s", why)
			}
			return false, errors.New("it is ready")
		}
		if !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "tidings replay --consumer "+name) {
			return false, err
		}
		return in.metric(r.t, "tidings_consumer_partitions_stuck") == partitions, nil
	})
}

func (r *rig) stream(partition int) jetstream.Stream {
	r.t.Helper()
	s, err := r.js.Stream(context.Background(), r.cfg.StreamName(partition))
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// erase records sequences as erased and deletes their messages.
func (r *rig) erase(partition int, seqs ...uint64) {
	r.t.Helper()
	if err := broker.RecordErased(context.Background(), r.js, r.cfg, r.cfg.StreamName(partition), seqs); err != nil {
		r.t.Fatal(err)
	}
	r.delete(partition, seqs...)
}

func (r *rig) delete(partition int, seqs ...uint64) {
	r.t.Helper()
	for _, seq := range seqs {
		if err := r.stream(partition).DeleteMsg(context.Background(), seq); err != nil {
			r.t.Fatal(err)
		}
	}
}

func TestWhatWasErasedIsPassedOver(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	for v := range int64(8) {
		r.publish(follow("1", "3", v+1))
	}
	r.erase(0, 1, 2, 5, 8) // at the head, in the middle and at the end
	r.awaitLag(8)
	in := r.run(r.system, logbook{})
	r.awaitLag(0)
	want := []line{{"1", "3", 3}, {"1", "3", 4}, {"1", "3", 6}, {"1", "3", 7}}
	r.wantLines(want)
	// The same with a running consumer, and with erased events at the end that it has not read.
	r.publish(follow("1", "3", 9))
	r.awaitLag(0)
	in.stop()
	r.publish(follow("1", "3", 10), follow("1", "3", 11))
	r.erase(0, 10, 11)
	in = r.run(r.system, logbook{})
	r.awaitLag(0)
	r.publish(follow("1", "3", 12))
	r.awaitLag(0)
	r.wantLines(append(want, line{"1", "3", 9}, line{"1", "3", 12}))
	if err := in.Ready(context.Background()); err != nil {
		t.Errorf("ready: %v", err)
	}
}

// TestAHoleStopsItsPartitionOnly removes messages without a record of an erasure, from each place
// of a stream.
func TestAHoleStopsItsPartitionOnly(t *testing.T) {
	for what, c := range map[string]struct {
		gone, erased []uint64
		expired      uint64 // messages before it
		why          string
		left         int64
	}{
		"in the middle":                {[]uint64{4, 5}, nil, 0, "messages 4 to 5 of stream EVENTS-0 are missing", 4},
		"in the middle, partly erased": {[]uint64{4}, []uint64{5}, 0, "messages 4 to 5 of stream EVENTS-0 are missing", 4},
		"at the end":                   {[]uint64{7}, nil, 0, "messages 7 to 7 of stream EVENTS-0 are missing", 1},
		"at the head":                  {nil, nil, 4, "messages 2 to 3 of stream EVENTS-0 expired", 6},
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 2)
			r.publish(follow("1", "3", 1), follow("1", "20", 1))
			in := r.run(r.system, logbook{})
			r.awaitLag(0)
			in.stop()
			for v := range int64(6) {
				r.publish(follow("1", "3", v+2))
			}
			if c.expired > 0 {
				testkit.Expire(t, r.stream(0), c.expired)
			}
			r.delete(0, c.gone...)
			r.erase(0, c.erased...)
			in = r.run(r.system, logbook{})
			r.awaitStuck(in, 1, c.why)
			r.publish(follow("1", "20", 2))
			r.awaitLag(c.left)
			testkit.Eventually(t, "the gauge of the lag",
				func() (bool, error) { return in.metric(t, "tidings_consumer_lag_messages") == float64(c.left), nil })
			r.wantFollowee("20", 2)
			r.wantFollowee("3", int(7-c.left))
			r.exec(`UPDATE consumer_offsets SET last_processed_id = 7 WHERE partition_key = 'EVENTS-0'`) // as a replay does
			testkit.Eventually(t, "the partition to continue",
				func() (bool, error) { err := in.Ready(context.Background()); return err == nil, err })
			r.publish(follow("1", "3", 8))
			r.awaitLag(0)
		})
	}
}

// wantFollowee fails the test unless n events of a followee are applied.
func (r *rig) wantFollowee(followee event.ID, n int) {
	r.t.Helper()
	got := 0
	for _, l := range r.lines() {
		if l.FolloweeID == followee {
			got++
		}
	}
	if got != n {
		r.t.Errorf("%d events of %s are applied, want %d", got, followee, n)
	}
}

func TestAPartitionWhoseAppliedMessagesExpiredGoesOn(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.run(r.system, logbook{})
	r.publish(follow("1", "3", 1))
	r.awaitLag(0)
	testkit.Expire(t, r.stream(0), 0)
	r.awaitLag(0)
	r.publish(follow("1", "3", 2))
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}})
}

// TestABatchOfAnotherStreamIsNotApplied assigns the offset to another stream between the reading of
// a batch and its transaction.
func TestABatchOfAnotherStreamIsNotApplied(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow("1", "3", 1))
	r.awaitLag(0)
	err := postgres.InTx(t.Context(), r.owner, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `UPDATE consumer_offsets SET stream_created = now()`); err != nil {
			return err
		}
		r.publish(follow("1", "3", 2))
		r.awaitOffsetLock()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r.awaitStuck(in, 1, "was recreated")
	r.wantLines([]line{{"1", "3", 1}})
}

// awaitOffsetLock waits until a consumer waits for the offset of a batch.
func (r *rig) awaitOffsetLock() {
	r.t.Helper()
	testkit.Eventually(r.t, "a consumer to wait for an offset", func() (waits bool, err error) {
		err = r.owner.QueryRow(context.Background(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%consumers.move%')`).Scan(&waits)
		return waits, err
	})
}

// remake replaces the stream of partition 0 by one with n events. With a negative n it only deletes
// the stream.
func (r *rig) remake(n int) {
	r.t.Helper()
	if err := r.js.DeleteStream(context.Background(), r.cfg.StreamName(0)); err != nil {
		r.t.Fatal(err)
	}
	if n < 0 {
		return
	}
	old := r.open[0].Partition
	r.open = r.open[1:]
	r.declare(old)
	for v := range n {
		r.publish(follow("1", "3", int64(v+1)))
	}
}

// cutter makes a pool whose connections can all be cut without a farewell to the server, as when a
// process is killed.
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
	cfg.ConnConfig.RuntimeParams["role"] = string(postgres.RoleConsumer)
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

func TestTheBatchInHandIsFinishedAtShutdown(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	inBatch, goOn := make(chan struct{}), make(chan struct{})
	cfg := config()
	cfg.Lease.TTL = time.Minute // PostgreSQL ends a transaction that is idle for so long
	in := r.runWith(cfg, r.js, r.system, logbook{hook: func(ctx context.Context, _ pgx.Tx, _ []event.Event) error {
		close(inBatch)
		<-goOn
		return ctx.Err()
	}})
	r.publish(follow("1", "3", 1))
	<-inBatch
	in.cancel() // when it returns, every context that ends with the instance's has ended
	close(goOn)
	in.stop()
	r.wantLines([]line{{"1", "3", 1}})
	if l := r.lag(); l.Messages != 0 {
		t.Errorf("lag %+v", l)
	}
}

// TestOffsetsThatAreReliedOnOutliveACrash: an erasure deletes messages that every consumer has
// applied, so a crash must not take an offset back to before them.
func TestOffsetsThatAreReliedOnOutliveACrash(t *testing.T) {
	pg := testkit.PostgresProcess(t, "wal_writer_delay=10s")
	r := newRig(t, pg.DB(t), testkit.NATS(t))
	cfg := config()
	cfg.Lease.TTL = time.Minute // a renewal would write the batches to disk
	in := r.runWith(cfg, r.js, r.system, logbook{})
	want := r.flood(10)
	r.awaitLag(0)
	behind, err := consumers.NotYetApplied(t.Context(), r.system, map[string]uint64{"EVENTS-0": 10},
		map[string]time.Time{"EVENTS-0": r.open[0].Created})
	if err != nil || len(behind) > 0 {
		t.Fatalf("not past: %v, %v", behind, err)
	}
	pg.Kill(t)
	in.stop()
	pg.Restart(t)
	r.owner.Reset()
	r.wantLines(want)
}

func TestLagCountsWhatIsNotApplied(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t), 4)
	r.awaitLag(0) // no offsets, no events
	for range 10 {
		r.publish(follow("1", "3", 1), follow("1", "11", 1), follow("1", "19", 1))
	}
	for partition, offset := range map[int]int64{0: 4, 1: 10} { // the third partition has no offset
		r.exec(`INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ($1, $2, $3)`, name,
			r.cfg.StreamName(partition), offset)
	}
	l := r.lag()
	if l.Messages != 16 || l.Partitions != 2 || l.Seconds <= 0 || len(l.Lost) > 0 {
		t.Errorf("lag %+v, want 16 messages in 2 partitions", l)
	}
	all, err := consumers.Lag(context.Background(), r.system, r.js, r.cfg)
	if err != nil || len(all) != 1 || all[0].Messages != 16 {
		t.Errorf("all consumers: %+v, %v", all, err)
	}
}

// TestAsOfAndLagAreByTheBrokersClock shifts the clock of the projections' database against the
// broker's. Its functions come before pg_catalog in the search_path, so statements use them, but
// defaults of columns do not.
func TestAsOfAndLagAreByTheBrokersClock(t *testing.T) {
	for _, skew := range []time.Duration{-time.Hour, time.Hour} {
		t.Run(skew.String(), func(t *testing.T) {
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
			r.exec(`CREATE SCHEMA skewed`)
			r.exec(`GRANT USAGE ON SCHEMA skewed TO PUBLIC`)
			for _, clock := range []string{"now", "transaction_timestamp", "statement_timestamp", "clock_timestamp"} {
				r.exec(fmt.Sprintf(`CREATE FUNCTION skewed.%s() RETURNS timestamptz LANGUAGE sql AS $$
					SELECT pg_catalog.%[1]s() + interval '%d s' $$`, clock, int(skew.Seconds())))
			}
			r.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = skewed, pg_catalog, public',
				current_database()); END $$`)
			r.system.Reset()
			var at time.Time
			if err := r.system.QueryRow(t.Context(), `SELECT now()`).Scan(&at); err != nil ||
				time.Since(at.Add(-skew)).Abs() > time.Minute {
				t.Fatalf("the database's clock is at %s: %v", at, err)
			}
			began := time.Now()
			in := r.run(r.system, logbook{})
			r.publish(follow("1", "3", 1))
			r.awaitLag(0)
			published := time.Now()
			testkit.Eventually(t, "as_of to move", func() (bool, error) {
				return r.asOf().After(published), nil
			})
			if at := r.asOf(); at.After(time.Now()) {
				t.Errorf("as_of is %s ahead of the broker's clock", time.Until(at))
			}
			tx, err := r.owner.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			if _, err := tx.Exec(t.Context(), `SELECT FROM consumer_offsets FOR UPDATE`); err != nil {
				t.Fatal(err)
			}
			r.publish(follow("1", "3", 2))
			r.awaitOffsetLock()
			testkit.Eventually(t, "the gauge of the lag",
				func() (bool, error) { return in.metric(t, "tidings_consumer_lag_seconds") > 0, nil })
			for what, seconds := range map[string]float64{"the gauge": in.metric(t, "tidings_consumer_lag_seconds"),
				"Lag": r.lag().Seconds} {
				if most := time.Since(began).Seconds(); seconds <= 0 || seconds > most {
					t.Errorf("%s has a lag of %v s; want more than 0 and up to %v", what, seconds, most)
				}
			}
		})
	}
}

func (r *rig) asOf() (at time.Time) {
	r.t.Helper()
	err := postgres.InTx(context.Background(), r.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
		progress, err := consumers.ReadProgress(context.Background(), tx, name)
		if err == nil {
			at = progress[0].AsOf
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return at
}

func TestAsOfBeginsWithTheStream(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	r.publish(follow("1", "3", 1))
	r.run(r.system, logbook{hook: func(context.Context, pgx.Tx, []event.Event) error { return context.Canceled }}) // no batch is applied
	created := r.open[0].Created
	testkit.Eventually(t, "the offsets", func() (bool, error) { return r.asOf().Unix() > 0, nil })
	if at := r.asOf(); !at.Equal(created) {
		t.Errorf("as of %s, want %s", at, created)
	}
}

func TestAsOfIsTrueAndMovesWithoutEvents(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	asOf := r.asOf
	if at := asOf(); at.Unix() != 0 {
		t.Errorf("before the first run as_of is %s", at)
	}
	r.publish(follow("1", "3", 1))
	start := time.Now()
	in := r.run(r.system, logbook{})
	after := func(what string, than time.Time) time.Time {
		t.Helper()
		var at time.Time
		testkit.Eventually(t, what, func() (bool, error) { at = asOf(); return at.After(than), nil })
		if at.After(time.Now()) {
			t.Errorf("as of %s, which is in the future", at)
		}
		return at
	}
	first := after("everything to be applied", start)
	after("it to move while nothing is written", first)
	in.stop()
	stopped := asOf()
	r.publish(follow("1", "3", 2))
	if at := asOf(); !at.Equal(stopped) {
		t.Errorf("as_of moved from %s to %s while no instance runs", stopped, at)
	}
}

// TestAsOfDoesNotPassAnEventThatIsNotApplied measures a consumer that fails to apply an event.
func TestAsOfDoesNotPassAnEventThatIsNotApplied(t *testing.T) {
	t.Parallel()
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{hook: func(_ context.Context, _ pgx.Tx, events []event.Event) error {
		if events[0].AggregateID == "4" {
			return context.Canceled
		}
		return nil
	}})
	r.publish(follow("1", "3", 1))
	r.awaitLag(0)
	msg, err := r.stream(0).GetMsg(t.Context(), r.publish(follow("1", "4", 1)))
	if err != nil {
		t.Fatal(err)
	}
	in.awaitMetric(t, "tidings_consumer_lag_messages", 1)
	testkit.Eventually(t, "some more measurements", tick(time.Second))
	if at := r.asOf(); at.After(msg.Time) {
		t.Errorf("as_of is %s, and the event of %s is not applied", at, msg.Time)
	}
}
