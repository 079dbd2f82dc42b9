package relay

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// exports returns the series about durable consumers that the relay exports now.
func (r *Relay) exports(t *testing.T) map[string]float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(newDurables(r))
	return testkit.Series(t, reg)
}

// TestOneRelayExportsTheDurableConsumers has two relays, whose streams and consumers change.
func TestOneRelayExportsTheDurableConsumers(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	made := func() *Relay {
		r := newRelay(t, pool, b)
		r.durablesEvery = 20 * time.Millisecond
		return r
	}
	all := []*Relay{made(), made()}
	stops := []func(){start(t, all[0]), start(t, all[1])}
	// one awaits that one relay exports such a series with the value, and no other one any.
	one := func(what, series string, value float64) (by int) {
		t.Helper()
		testkit.Eventually(t, what, func() (bool, error) {
			first, second := all[0].exports(t), all[1].exports(t)
			if len(first) > 0 && len(second) > 0 {
				t.Fatalf("both export: %v and %v", first, second)
			}
			if by = 0; len(second) > 0 {
				by, first = 1, second
			}
			got, is := first[series]
			return is && got == value, nil
		})
		return by
	}
	one("the streams without a consumer to be read", "tidings_durable_incomplete_streams", 0)

	// A relay makes a stream when it claims the partition, which may be after the first series.
	create := func(stream, name string) {
		t.Helper()
		testkit.Eventually(t, stream, func() (bool, error) {
			_, err := js.Stream(t.Context(), stream)
			return err == nil, err
		})
		if _, err := js.CreateConsumer(t.Context(), stream, jetstream.ConsumerConfig{Durable: name,
			AckPolicy: jetstream.AckExplicitPolicy}); err != nil {
			t.Fatal(err)
		}
	}
	first, second := b.Config().StreamName(0), b.Config().StreamName(1)
	create(first, "mailer")
	junk := "m\u00e4\x1b[31m\"{" + strings.Repeat("x", 200)
	create(first, junk)
	insertRow(t, pool, 1, "created")
	by := one("an event to wait", "tidings_durable_pending_messages mailer "+first, 1)
	other := all[1-by]
	other.mu.Lock()
	if other.durables != nil {
		t.Error("the other relay asks the servers too")
	}
	other.mu.Unlock()
	one("the end of the stream", "tidings_durable_stream_sequence mailer "+first, 1)
	c, err := js.Consumer(t.Context(), first, "mailer")
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.Next()
	if err != nil {
		t.Fatal(err)
	}
	one("the event to be in hand", "tidings_durable_unacknowledged_messages mailer "+first, 1)
	if err := m.NakWithDelay(time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if m, err = c.Next(); err != nil {
		t.Fatal(err)
	}
	one("the event to be in hand again", "tidings_durable_redelivered_messages mailer "+first, 1)
	if err := m.DoubleAck(t.Context()); err != nil {
		t.Fatal(err)
	}
	one("the event to be done", "tidings_durable_ack_floor mailer "+first, 1)
	pulling, err := c.Consume(func(jetstream.Msg) {})
	if err != nil {
		t.Fatal(err)
	}
	one("somebody to wait for events", "tidings_durable_waiting_pulls mailer "+first, 1)
	pulling.Stop()
	for series := range all[by].exports(t) {
		label := strings.Fields(series)[1:]
		if len(label) > 0 && label[0] != "mailer" && (len(label[0]) > 64 || !strings.HasPrefix(label[0], "m___31m__xxxx")) {
			t.Errorf("a name of a consumer is a label as it is: %q", series)
		}
	}

	stops[by]()
	if got := all[by].exports(t); len(got) > 0 {
		t.Errorf("a relay without the lease exports %v", got)
	}
	if now := one("the other relay to take over", "tidings_durable_pending_messages mailer "+first, 0); now == by {
		t.Errorf("relay %d exports, which has stopped", now)
	}
	if err := js.DeleteConsumer(t.Context(), first, "mailer"); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the series of the deleted consumer to end", func() (bool, error) {
		now := all[1-by].exports(t)
		_, is := now["tidings_durable_pending_messages mailer "+first]
		return len(now) > 0 && !is, nil
	})
	if _, err := outbox.Resize(t.Context(), pool, 2); err != nil {
		t.Fatal(err)
	}
	create(second, "mailer")
	one("the consumer of a new stream", "tidings_durable_pending_messages mailer "+second, 0)
}

// TestTheSeriesOfDurableConsumersAreBounded has more consumers than are exported, and names that
// would have one label.
func TestTheSeriesOfDurableConsumersAreBounded(t *testing.T) {
	var names []string
	for _, name := range []string{"mailer", "m\xff", "m\xfe", "m ", "", strings.Repeat("x", 65), strings.Repeat("x", 66)} {
		got := label(name)
		if slices.Contains(names, got) || !regexp.MustCompile(`^[A-Za-z0-9_~-]{1,64}$`).MatchString(got) {
			t.Errorf("%q: the label is %q, and others are %q", name, got, names)
		}
		names = append(names, got)
	}
	if names[0] != "mailer" {
		t.Errorf("the label of a usual name is %q", names[0])
	}
	var list []broker.Durable
	for _, stream := range []string{"B", "A"} {
		for i := range 255 {
			list = append(list, broker.Durable{Name: fmt.Sprint("c", i), Stream: stream})
		}
		list = append(list, broker.Durable{Name: "c7", Stream: stream}) // a name that has another one's label
	}
	for want, d := range map[int]*durables{0: durablesOf(0, list[:255], nil), 1: durablesOf(0, list[:256], nil),
		2: durablesOf(0, list, []string{"B"})} {
		if d.incomplete != want || len(d.all) > maxDurables || len(d.all) < min(len(list), 255) {
			t.Errorf("%d exported, %d streams incomplete, want %d", len(d.all), d.incomplete, want)
		}
	}
}
