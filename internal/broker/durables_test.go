package broker_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// TestDurablesAreThoseOfAllStreamsUpToABound has more durable consumers than the bound on one of
// two streams, and a third stream that does not exist. The leak check of the package finds a
// listing that does not end.
func TestDurablesAreThoseOfAllStreamsUpToABound(t *testing.T) {
	b := testkit.NATS(t)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	create := func(stream string, c jetstream.ConsumerConfig) {
		t.Helper()
		c.AckPolicy, c.MemoryStorage = jetstream.AckExplicitPolicy, true
		if _, err := js.CreateConsumer(t.Context(), stream, c); err != nil {
			t.Fatal(err)
		}
	}
	for _, stream := range []string{"A", "B"} {
		if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: stream, Subjects: []string{stream},
			Storage: jetstream.MemoryStorage}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 300 {
		create("A", jetstream.ConsumerConfig{Durable: fmt.Sprintf("c%03d", i)})
	}
	create("B", jetstream.ConsumerConfig{Durable: "mailer"})
	create("B", jetstream.ConsumerConfig{Name: "passing", InactiveThreshold: time.Hour})
	for range 2 {
		if _, err := js.Publish(t.Context(), "B", nil); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "the consumers to know of the messages", func() (bool, error) {
		all, more, err := broker.Durables(t.Context(), js, "B", "absent", "A")
		if err != nil || len(all) != 1+256 || !slices.Equal(more, []string{"A"}) {
			t.Fatalf("%d consumers, more on %v, %v", len(all), more, err)
		}
		if all[1].Name != "c000" || all[256].Name != "c255" || all[1].State != broker.CaughtUp {
			t.Errorf("%+v to %+v", all[1], all[256])
		}
		got := all[0]
		return got.Name == "mailer" && got.Behind == 2 && got.Last == 2 && got.Floor == 0 && got.State == broker.Working, nil
	})
}

// TestTheLoginsOfRelaysAndConsolesListTheDurableConsumers lists those of both kinds of streams.
func TestTheLoginsOfRelaysAndConsolesListTheDurableConsumers(t *testing.T) {
	for _, unmanaged := range []bool{false, true} {
		publish, _ := broker.Principal{Role: broker.Relay}.Permissions(broker.Config{Unmanaged: broker.Unmanaged(unmanaged)})
		if !slices.Contains(publish, "$JS.API.CONSUMER.LIST.*") {
			t.Errorf("with NATS_MANAGE=%t a relay may not list consumers: %q", !unmanaged, publish)
		}
	}
	for form, logins := range natsForms {
		t.Run(form, func(t *testing.T) {
			l := logins(t)
			prepareReplies(t, l)
			for _, login := range []string{"relay", "serve", "api", "operator"} {
				all, _, err := broker.Durables(t.Context(), l.stream(t, login), "EVENTS-0", "EVENTS-dead")
				if len(all) != len(replyDurables) || err != nil {
					t.Errorf("%s: %+v, %v", login, all, err)
				}
			}
		})
	}
}
