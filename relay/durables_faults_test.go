//go:build faults

package relay

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestTheMetricsTellASubscriberThatIsGoneFromOneThatAcknowledgesNothing has one of each, and one
// that works. Its series are what the alerts SubscriberAbsent, SubscriberLagHigh and
// SubscriberRedelivers ask for, but for the time that these wait.
func TestTheMetricsTellASubscriberThatIsGoneFromOneThatAcknowledgesNothing(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATSProcess(t)
	r := newRelay(t, pool, b)
	r.durablesEvery = 100 * time.Millisecond
	start(t, r)
	stream := b.Config().StreamName(0)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the stream", func() (bool, error) {
		_, err := js.Stream(t.Context(), stream)
		return err == nil, err
	})
	// reads starts a program that reads with its own durable consumer, over its own connection.
	reads := func(name string, do func(jetstream.Msg)) (kill func()) {
		t.Helper()
		nc := b.Connect(t)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		c, err := js.CreateConsumer(t.Context(), stream, jetstream.ConsumerConfig{Durable: name, AckWait: time.Second,
			AckPolicy: jetstream.AckExplicitPolicy})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Consume(do); err != nil {
			t.Fatal(err)
		}
		return nc.Close
	}
	ack := func(m jetstream.Msg) { _ = m.Ack() } // its connection may be closed
	kill := reads("killed", ack)
	reads("deaf", func(jetstream.Msg) {})
	reads("works", ack)
	await := func(what string, is func(of func(metric, consumer string) float64) bool) {
		t.Helper()
		testkit.Eventually(t, what, func() (bool, error) {
			all := r.exports(t)
			return len(all) > 0 && is(func(metric, consumer string) float64 {
				return all["tidings_durable_"+metric+" "+consumer+" "+stream]
			}), nil
		})
	}
	const events = broker.ManyRedelivered + 2
	for i := range int64(events) {
		insertRow(t, pool, i+1, "created")
	}
	await("two subscribers to have everything", func(of func(metric, consumer string) float64) bool {
		return of("ack_floor", "killed") == events && of("ack_floor", "works") == events && of("waiting_pulls", "killed") > 0 &&
			of("pending_messages", "killed") == 0
	})
	kill()
	insertRow(t, pool, 100, "created")
	await("nobody to serve the killed one, for some seconds", func(of func(metric, consumer string) float64) bool {
		return of("pending_messages", "killed") == 1 && of("waiting_pulls", "killed") == 0 && of("idle_seconds", "killed") > 3 &&
			of("ack_floor", "killed") < of("stream_sequence", "killed") &&
			of("waiting_pulls", "works") > 0 && of("ack_floor", "works") == events+1
	})
	await("what the deaf one gets to be delivered again and again", func(of func(metric, consumer string) float64) bool {
		return of("redelivered_messages", "deaf") > broker.ManyRedelivered && of("ack_floor", "deaf") == 0 &&
			of("waiting_pulls", "deaf") > 0 && of("idle_seconds", "deaf") < 3 && of("redelivered_messages", "works") == 0
	})
	b.Kill(t)
	testkit.Eventually(t, "no series without NATS", func() (bool, error) { return len(r.exports(t)) == 0, nil })
	b.Restart(t)
	await("the series after a restart of NATS", func(of func(metric, consumer string) float64) bool {
		return of("pending_messages", "killed") == 1 && of("waiting_pulls", "killed") == 0 && of("redelivered_messages", "deaf") > 0
	})
}

// TestARelayThatMayNotListConsumersPublishes has the permissions of an older release, and asks
// seldom: the server logs each refusal.
func TestARelayThatMayNotListConsumersPublishes(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	all, err := broker.Complete(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		t.Setenv(p.Variable(), "secret")
	}
	cfg := broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live"}
	b := testkit.NATSWith(t, strings.ReplaceAll(broker.Users(cfg, all), `"$JS.API.CONSUMER.LIST.*", "$JS.API.CONSUMER.INFO`,
		`"$JS.API.CONSUMER.INFO`))
	cfg = b.Config()
	cfg.URL, cfg.InboxPrefix = strings.Replace(b.URL, "nats://", "nats://relay:secret@", 1), "_INBOX_relay"
	log := &testkit.Output{}
	r, err := New(testConfig(), pool, cfg, slog.New(slog.NewTextHandler(log, nil)), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	r.durablesEvery = 20 * time.Millisecond
	start(t, r)
	testkit.Eventually(t, "the relay to give up", func() (bool, error) {
		return strings.Contains(log.String(), `"cannot list the durable consumers; retrying" component=relay wait=5m0s`), nil
	})
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	if got := r.exports(t); len(got) > 0 || strings.Count(log.String(), "CONSUMER.LIST") != 1 {
		t.Errorf("it exports %v, and says:\n%s", got, log)
	}
}
