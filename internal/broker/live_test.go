package broker_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// listener records its calls. Each Hear waits for hold, if set.
type listener struct {
	told chan string
	hold chan struct{}
}

func (l *listener) Begin(last map[string]uint64) { l.told <- fmt.Sprintf("begin %d", last["EVENTS-0"]) }
func (l *listener) End()                         { l.told <- "end" }
func (l *listener) Hear(e *event.Event, err error) {
	if l.hold != nil {
		<-l.hold
		return
	}
	l.told <- fmt.Sprintf("%s %d: %s of %d, %t", e.Stream, e.Seq, e.AggregateID, e.TenantID, err == nil)
}

func (l *listener) want(t *testing.T, what string) {
	t.Helper()
	select {
	case got := <-l.told:
		if got != what {
			t.Fatalf("the listener got %q, want %q", got, what)
		}
	case <-time.After(time.Minute):
		t.Fatalf("the listener did not get %q", what)
	}
}

func listen(t *testing.T, nc *nats.Conn, cfg broker.Config, l *listener) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- broker.Listen(ctx, nc, cfg, l, testkit.Logger(t)) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

// heard is an event with this outbox id.
func heard(id int64) event.Event {
	return event.Event{OutboxID: id, ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: "1",
		Type: event.Created, Version: 1, OccurredAt: time.Now(), Payload: []byte(`{}`)}
}

func TestAListenerHearsWhatIsStoredAndIsToldWhenItMissesSomething(t *testing.T) {
	b := testkit.NATSProcess(t)
	nc := b.Connect(t)
	l := &listener{told: make(chan string, 100)}
	stop := listen(t, nc, b.Config(), l) // no stream exists yet
	s, cfg := js(t, b.Connect(t)), b.Config()
	declare(t, s, cfg, broker.Partition{LastSlot: event.Slots - 1})
	publish := func(e event.Event, change func(*nats.Msg)) {
		t.Helper()
		m := &nats.Msg{Subject: e.Subject(cfg.Prefix, 0), Header: e.Headers(), Data: e.Payload}
		if change != nil {
			change(m)
		}
		if _, err := s.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	l.want(t, "begin 0")
	publish(heard(1), nil)
	l.want(t, "EVENTS-0 1: 1 of 1, true")
	comment := heard(2)
	comment.AggregateType = event.AggregateComment
	publish(comment, nil)
	l.want(t, "EVENTS-0 2: 1 of 1, true") // of any type
	publish(heard(3), func(m *nats.Msg) { m.Header.Set(event.HeaderTime, "soon") })
	l.want(t, "EVENTS-0 3: 1 of 1, false")
	for range 2 { // a server may repeat an event, and a message that no relay wrote is not an event
		e := heard(1)
		for _, seq := range []string{"1", "3"} {
			msg := &nats.Msg{Subject: cfg.LivePrefix + ".t1.follow.created", Header: e.Headers(), Data: e.Payload}
			msg.Header.Set(jetstream.StreamHeader, "EVENTS-0")
			msg.Header.Set(jetstream.SequenceHeader, seq)
			if err := nc.PublishMsg(msg); err != nil {
				t.Fatal(err)
			}
		}
		if err := nc.Publish(cfg.LivePrefix+".t1.follow.created", nil); err != nil {
			t.Fatal(err)
		}
	}
	publish(heard(4), nil)
	l.want(t, "EVENTS-0 4: 1 of 1, true")
	b.Kill(t)
	l.want(t, "end")
	b.Restart(t)
	l.want(t, "begin 4")
	testkit.Eventually(t, "a publish", func() (bool, error) { // it has another connection
		_, err := broker.ReadStream(t.Context(), s, cfg, 0)
		return err == nil, nil
	})
	publish(heard(5), nil)
	l.want(t, "EVENTS-0 5: 1 of 1, true")
	stop()
	l.want(t, "end")
}

// TestAListenerWithoutPermissionDoesNotBegin: nothing is said to be heard if NATS refuses the
// subscription. The old permissions allowed a part of the events.
func TestAListenerWithoutPermissionDoesNotBegin(t *testing.T) {
	const may = "live.*.follow.*"
	user := func(name string, subscribe ...string) *server.User {
		return &server.User{Username: name, Password: "p",
			Permissions: &server.Permissions{Subscribe: &server.SubjectPermission{Allow: append(subscribe, "_INBOX.>")}}}
	}
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, JetStream: true,
		StoreDir: t.TempDir(), Users: []*server.User{user("old", may), user("new", "live.*.*.*")}})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	defer srv.WaitForShutdown()
	defer srv.Shutdown()
	if !srv.ReadyForConnections(10 * time.Second) {
		t.Fatal("no server")
	}
	for _, name := range []string{"old", "new"} {
		cfg := broker.Config{URL: strings.Replace(srv.ClientURL(), "nats://", "nats://"+name+":p@", 1), Stream: "EVENTS", Prefix: "events",
			LivePrefix: "live", Replicas: 1, MaxBytes: -1, Timeout: 10 * time.Second, Ping: time.Second}
		var out lockedBuffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		nc, err := broker.Connect(cfg, "test", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		l := &listener{told: make(chan string, 100)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- broker.Listen(ctx, nc, cfg, l, log) }()
		if name == "new" {
			l.want(t, "begin 0")
		} else {
			testkit.Eventually(t, "the refusal is in the log", func() (bool, error) {
				return strings.Contains(out.String(), "cannot listen to events"), nil
			})
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if name == "old" && len(l.told) > 0 {
			t.Errorf("the listener was told %q", <-l.told)
		}
	}
}

func TestAListenerThatIsTooSlowBeginsAnew(t *testing.T) {
	b := testkit.NATS(t)
	nc, cfg := b.Connect(t), b.Config()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: 31}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	l := &listener{told: make(chan string, 100), hold: make(chan struct{})}
	stop := listen(t, nc, cfg, l)
	l.want(t, "begin 0")
	e := heard(1)
	publisher := b.Connect(t)
	for range 20_000 { // more than the queue holds
		if err := publisher.PublishMsg(&nats.Msg{Subject: cfg.LivePrefix + ".t1.follow.created", Header: e.Headers(),
			Data: e.Payload}); err != nil {
			t.Fatal(err)
		}
	}
	if err := publisher.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil { // all of them have arrived
		t.Fatal(err)
	}
	close(l.hold)
	l.want(t, "end")
	l.want(t, "begin 0")
	stop()
	l.want(t, "end")
}
