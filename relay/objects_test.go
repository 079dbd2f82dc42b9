package relay

import (
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// subscribed returns a subscription that the server has.
func subscribed(t *testing.T, nc *nats.Conn, subject string) *nats.Subscription {
	t.Helper()
	sub, err := nc.SubscribeSync(subject)
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	return sub
}

// TestASubscriberOfOneObjectGetsItsEventsAlone has objects with ids of both forms, and an erasure,
// whose aggregate has the id of an object but is none.
func TestASubscriberOfOneObjectGetsItsEventsAlone(t *testing.T) {
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	nc := b.Connect(t)
	subs := make(map[event.ID]*nats.Subscription)
	for _, id := range []event.ID{"1", "auth0|7", "_1"} {
		subs[id] = subscribed(t, nc, event.ObjectSubject(b.Config().LivePrefix, 1, "*", "*", id))
	}
	created := subscribed(t, nc, event.ObjectSubject(b.Config().LivePrefix, 1, "post", "created", "2"))
	all := subscribed(t, nc, b.Config().LivePrefix+".*.*.*.*")
	add := func(n int) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `
			INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			SELECT 1, 'post', o, CASE WHEN i % 2 = 0 THEN 'created' ELSE 'edited' END, jsonb_build_object('n', i)
			  FROM generate_series(1, $1) i, unnest(ARRAY['1', '2', 'auth0|7', '_1', '_MQ']) o
			UNION ALL SELECT 1, 'person', '1', 'erased', '{"person_id": "9"}'`, n); err != nil {
			t.Fatal(err)
		}
		awaitDrained(t, t.Context(), pool, time.Minute)
	}
	plain := start(t, newRelay(t, pool, b))
	add(3)
	plain()
	if m, err := all.NextMsg(100 * time.Millisecond); err == nil {
		t.Errorf("a relay without the setting publishes %s", m.Subject)
	}
	before := len(readStream(t, t.Context(), b))

	cfg := b.Config()
	cfg.LiveObjects, cfg.Source = true, "/tidings/here"
	r, err := New(testConfig(), pool, cfg, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	stop := start(t, r)
	for range 3 {
		add(1)
	}
	add(100) // a batch
	stop()
	stored := readStream(t, t.Context(), b)[before:]
	if len(stored) != 4+5*(3+100) {
		t.Errorf("the streams have %d more messages", len(stored))
	}
	get := func(sub *nats.Subscription, want func(e *event.Event) bool) {
		t.Helper()
		for i := range stored {
			e := &stored[i].Event
			if !want(e) {
				continue
			}
			m, err := sub.NextMsg(time.Minute)
			if err != nil {
				t.Fatalf("%s: %v, instead of event %d", sub.Subject, err, e.OutboxID)
			}
			got, err := event.Decode(m.Subject, m.Header, m.Data)
			if err != nil || got.ID != e.ID || string(got.Payload) != string(e.Payload) || got.AggregateID != e.AggregateID ||
				m.Header.Get(event.HeaderSource) != cfg.Source ||
				m.Header.Get(jetstream.StreamHeader) != cfg.StreamName(stored[i].partition) ||
				m.Header.Get(jetstream.SequenceHeader) != strconv.FormatUint(e.Seq, 10) || len(m.Header) != len(e.Headers())+2 {
				t.Fatalf("%s: got %s %v %s, %v; want event %d at %d", sub.Subject, m.Subject, m.Header, m.Data, err, e.OutboxID, e.Seq)
			}
		}
		if m, err := sub.NextMsg(100 * time.Millisecond); err == nil {
			t.Errorf("%s: one more message, %s", sub.Subject, m.Subject)
		}
	}
	for id, sub := range subs {
		get(sub, func(e *event.Event) bool { return e.AggregateID == id && e.AggregateType == "post" })
	}
	get(created, func(e *event.Event) bool { return e.AggregateID == "2" && e.Type == event.Created })
}

// TestTheLoginsAllowTheEventsOfObjects uses the logins that `tidings nats users` prints with the
// setting. After a denial the relay publishes none for a while.
func TestTheLoginsAllowTheEventsOfObjects(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b, connect := withLogins(t, true)
	denied := make(chan error, 10)
	refused := func(what string) {
		t.Helper()
		select {
		case <-denied:
		case <-time.After(time.Minute):
			t.Fatalf("%s, and nobody refuses it", what)
		}
	}
	own := subscribed(t, connect("t1_feed", denied), "live.t1.post.created.7")
	for login, subject := range map[string]string{"t1_feed": "live.t1.post.edited.7", "t2_feed": "live.t1.post.created.7",
		"api": "live.t1.post.created.7"} {
		subscribed(t, connect(login, denied), subject)
		refused(login + " subscribes to " + subject)
	}
	for _, subject := range []string{"live.t1.post.created", "live.t1.post.created.7.8"} {
		if err := connect("relay", denied).Publish(subject, nil); err != nil {
			t.Fatal(err)
		}
		refused("the relay publishes to " + subject)
	}
	r := withObjects(t, pool, b, testkit.Logger(t))
	start(t, r)
	insertRow(t, pool, 8, "created")
	insertRow(t, pool, 7, "edited")
	insertRow(t, pool, 7, "created")
	if m, err := own.NextMsg(time.Minute); err != nil || m.Header.Get(event.HeaderOutboxID) != "3" {
		t.Errorf("got %v, %v", m, err)
	}
	r.objects.denied.Store(time.Now().UnixNano())
	insertRow(t, pool, 7, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	testkit.Eventually(t, "the queue to be empty", func() (bool, error) { return r.objects.waiting.Load() == 0, nil })
	if n := testutil.ToFloat64(r.metrics.dropped); n != 1 {
		t.Errorf("%v events are dropped, want the one after the denial", n)
	}
	closed := connect("relay", denied)
	closed.Close()
	two := published{rows: []outbox.Row{{Event: event.Event{AggregateType: "post"}}, {Event: event.Event{AggregateType: "post"}}},
		at: make([]outbox.Published, 2)}
	r.objects.denied.Store(time.Now().Add(-objectsQuiet).UnixNano())
	if err := r.objects.send(closed, &nats.Msg{Header: nats.Header{}}, &two); !errors.Is(err, nats.ErrConnectionClosed) ||
		testutil.ToFloat64(r.metrics.dropped) != 3 {
		t.Errorf("a closed connection: %v, %v events are dropped", err, testutil.ToFloat64(r.metrics.dropped))
	}
	r.objects.denied.Store(time.Now().Add(time.Hour).UnixNano()) // the clock was set back since
	insertRow(t, pool, 7, "created")
	if m, err := own.NextMsg(time.Minute); err != nil || m.Header.Get(event.HeaderOutboxID) != "5" {
		t.Errorf("after a denial and a minute: got %v, %v", m, err)
	}
}

// TestARelayThatMayNotPublishTheEventsOfObjectsPublishes has permissions without the setting, and
// one warning for all its events.
func TestARelayThatMayNotPublishTheEventsOfObjectsPublishes(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b, _ := withLogins(t, false)
	log := &testkit.Output{}
	r := withObjects(t, pool, b, slog.New(slog.NewTextHandler(log, nil)))
	start(t, r)
	for range 20 {
		insertRow(t, pool, 1, "created")
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	testkit.Eventually(t, "the relay to notice", func() (bool, error) { return r.objects.denied.Load() > 0, nil })
	for range 20 {
		insertRow(t, pool, 1, "created")
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	testkit.Eventually(t, "the relay to count all events", func() (bool, error) {
		if n := testutil.ToFloat64(r.metrics.dropped); n != 40 {
			return false, fmt.Errorf("it counts %v", n)
		}
		return true, nil
	})
	if text := log.String(); strings.Count(text, "miss events") != 1 || strings.Contains(text, "level=ERROR") ||
		!strings.Contains(text, `ermissions Violation for Publish`) {
		t.Errorf("it says:\n%s", text)
	}
}

// withLogins starts a server with the logins that `tidings nats users` prints. connect sends what
// the server denies to denied.
func withLogins(t *testing.T, objects bool) (b *testkit.Broker, connect func(login string, denied chan error) *nats.Conn) {
	t.Helper()
	users, err := broker.Complete([]broker.Principal{
		{Role: broker.Subscriber, Name: "feed", Tenant: 1, Filter: "post.created"},
		{Role: broker.Subscriber, Name: "feed", Tenant: 2, Filter: "post.created"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range users {
		t.Setenv(p.Variable(), "secret")
	}
	naming := broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live", LiveObjects: objects}
	b = testkit.NATSWith(t, broker.Users(naming, users))
	return b, func(login string, denied chan error) *nats.Conn {
		nc, err := nats.Connect(b.URL, nats.UserInfo(login, "secret"),
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { denied <- err }))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
}

// withObjects returns a relay with its own login and the setting.
func withObjects(t *testing.T, pool *pgxpool.Pool, b *testkit.Broker, log *slog.Logger) *Relay {
	t.Helper()
	cfg := b.Config()
	cfg.LiveObjects, cfg.InboxPrefix = true, "_INBOX_relay"
	cfg.URL = strings.Replace(b.URL, "nats://", "nats://relay:secret@", 1)
	r, err := New(testConfig(), pool, cfg, log, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestTheEventsOfObjectsContinueAfterAnOutage restarts NATS, and freezes it while the relay stops.
func TestTheEventsOfObjectsContinueAfterAnOutage(t *testing.T) {
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATSProcess(t)
	cfg := b.Config()
	cfg.LiveObjects = true
	r, err := New(testConfig(), pool, cfg, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	stop := start(t, r)
	nc := b.Connect(t)
	sub := subscribed(t, nc, event.ObjectSubject(cfg.LivePrefix, 1, "*", "*", "1"))
	insertRow(t, pool, 1, "created")
	if _, err := sub.NextMsg(time.Minute); err != nil {
		t.Fatal(err)
	}
	b.Kill(t)
	insertRow(t, pool, 1, "created")
	b.Restart(t)
	testkit.Eventually(t, "an event after the restart", func() (bool, error) {
		insertRow(t, pool, 1, "created")
		_, err := sub.NextMsg(100 * time.Millisecond)
		return err == nil, err
	})
	awaitDrained(t, t.Context(), pool, time.Minute)
	checkNothingBut(t, nc, cfg.StreamName(0))
	b.Freeze(t)
	large := event.Event{AggregateType: "post", AggregateID: "1", Type: "created", Payload: make([]byte, 1<<19)}
	for range 100 { // more than sockets buffer
		r.objects.offer(published{cfg.StreamName(0), []outbox.Row{{Event: large}}, []outbox.Published{{Seq: 1}}, nil})
	}
	stop()
	b.Thaw(t)
}

// checkNothingBut fails if NATS has another stream.
func checkNothingBut(t *testing.T, nc *nats.Conn, stream string) {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for name := range js.StreamNames(t.Context()).Name() {
		if name != stream {
			t.Errorf("NATS has the stream %s", name)
		}
	}
}

// TestTheEventsOfObjectsNeverWait offers more than the queue takes, by number and by bytes.
func TestTheEventsOfObjectsNeverWait(t *testing.T) {
	for _, c := range []struct{ bytes, queued int }{{1, objectsQueue}, {objectsWaiting / 2, 3}} {
		log := &testkit.Output{}
		m := newMetrics(prometheus.NewRegistry())
		o := newObjects(&Relay{log: slog.New(slog.NewTextHandler(log, nil)), metrics: m})
		p := published{rows: []outbox.Row{{Event: event.Event{AggregateType: "post", Payload: make([]byte, c.bytes)}},
			{Event: event.Event{AggregateType: event.AggregatePerson}}}}
		for range objectsQueue + 10 {
			o.offer(p)
		}
		if len(o.queue) != c.queued || o.waiting.Load() != int64(c.queued*c.bytes) || strings.Count(log.String(), "miss events") != 1 {
			t.Errorf("%d publishes with %d bytes wait; the log: %s", len(o.queue), o.waiting.Load(), log)
		}
		if got, want := testutil.ToFloat64(m.dropped), objectsQueue+10-c.queued; int(got) != want {
			t.Errorf("%v events are dropped, want %d", got, want)
		}
	}
}
