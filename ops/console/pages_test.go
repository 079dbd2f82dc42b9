package console_test

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
)

func TestTheStateOfTheInstallation(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.declare(t)
	h.pend(t, 1234)
	ada, amy := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.TenantAdmin)
	page(t, ada, "/console/").says("Truth and outbox", "1,234 pending", "No running relay holds partition 0", "followercounts")
	page(t, ada, "/console/partitions").says("stuck", "no relay", "EVENTS-0", "0–31")
	page(t, ada, "/console/consumers").says("followercounts", "nobody runs it", "not verified yet", "has not compared anything yet")
	page(t, ada, "/console/kinds").says("follow", "threaded", "built in", "No kind was added", "change the kinds above")
	page(t, ada, "/console/doctor").says("unheld-partition", "No running relay holds partition 0", "Remedy")
	for _, path := range []string{"/console/partitions", "/console/consumers", "/console/doctor", "/console/live/partitions"} {
		if a := amy.get(path); a.status != 403 || strings.Contains(a.body, "EVENTS") {
			t.Errorf("%s: a tenant's token gets %d", path, a.status)
		}
	}
	page(t, amy, "/console/").says("that tenant alone").without("pending", "/console/partitions")
	page(t, amy, "/console/kinds").says("follow").without("No kind was added")
}

// TestTheNavigationHasEveryPage also finds two pages with the same key.
func TestTheNavigationHasEveryPage(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada := page(t, h.signIn(t, h.Tokens.Admin), "/console/")
	for _, title := range []string{"Overview", "Partitions", "Event", "Dead letters", "Consumers", "Inspector", "Moderation", "Kinds",
		"Tokens", "Archive", "Erasure", "Doctor", "Audit log"} {
		ada.link(title)
	}
	keys := map[string]string{}
	for _, p := range h.console.Pages() {
		if p.Group == "" {
			continue
		}
		if other, taken := keys[p.Key]; taken || len(p.Key) != 1 {
			t.Errorf("%s has the key %q, as has %q: want a letter of its own", p.Title, p.Key, other)
		}
		keys[p.Key] = p.Title
	}
}

func TestOperatorsSeeTheUpstreams(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada := h.signIn(t, h.Tokens.Admin)
	page(t, ada, "/console/kinds").says("No service appends events of its own.")
	u, err := kindfile.ReadUpstream([]byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n" +
		"events: {placed: {versions: {1: {type: object}}}}"))
	if err != nil {
		t.Fatal(err)
	}
	u.Logins = []string{"orders_service"}
	if _, err := declared.Add(t.Context(), h.pool, declared.Request{Upstream: *u, Actor: "ada"}); err != nil {
		t.Fatal(err)
	}
	page(t, ada, "/console/kinds").says("order com.example.order.placed.v1 /shop all 65,536 bytes orders_service")
	page(t, h.signIn(t, h.Tokens.TenantAdmin), "/console/kinds").without("orders_service")

	// Its events are on the pages of events, failed attempts and dead letters.
	h.appends(t, tenant, "order", "placed", 41)
	h.appends(t, tenant, "order", "shipped", 42)
	h.appends(t, tenant, "follow", "placed", 43)
	rita := h.signIn(t, h.Tokens.TenantReader)
	page(t, rita, "/console/event?kind=order&type=placed").says("order/41").without("order/42", "follow/43")
	page(t, rita, "/console/event?q=order.placed").says("order/41").without("order/42", "follow/43")
	page(t, rita, "/console/event?q=order/42").says("order/42").without("order/41")
	h.exec(t, `UPDATE outbox_messages SET attempts = 3, last_error = 'too large', available_at = now() + interval '1 h'
		WHERE aggregate_id = '41'`)
	page(t, rita, "/console/retrying").says("order/41", "too large").without("order/42")
	h.bury(t, 4001, 2, tenant, "too large", "")
	h.exec(t, `UPDATE outbox_messages_dlq SET aggregate_type = 'order', event_type = 'placed'`)
	page(t, rita, "/console/dead-letters?source=outbox").says("placed", "too large")
	page(t, rita, "/console/dead-letters/letters?source=outbox&aggregate=order").says("order/4001", "order/4002")
	page(t, rita, "/console/dead-letters/letters?source=outbox&aggregate=post").without("4001")
}

// declare declares the stream of partition 0.
func (h *harness) declare(t *testing.T) {
	t.Helper()
	if _, err := broker.Declare(t.Context(), h.js, h.nats.Config(), broker.Partition{LastSlot: event.Slots - 1},
		testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
}

// pend writes n messages that are pending for an hour.
func (h *harness) pend(t *testing.T, n int) {
	t.Helper()
	if _, err := h.pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id,
		event_type, payload, inserted_at, available_at)
		SELECT 7, 'follow', i, 'created', '{}', now() - interval '1 h', now() - interval '1 h' FROM generate_series(1, $1::int) i`,
		n); err != nil {
		t.Fatal(err)
	}
}

func TestAConsumerIsPausedResumedAndVerified(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada, amy := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.TenantAdmin)
	ada.act(page(t, ada, "/console/consumers").link("Pause")).says("done", "Paused")
	paused, err := consumers.Pauses(t.Context(), h.pool)
	if p := paused["followercounts"]; err != nil || p.Actor != "ada" || p.Reason != "because the test says so" {
		t.Fatalf("%+v, %v", paused, err)
	}
	ada.act("/console/act/consumer.pause?consumer=followercounts").says("It was paused already")
	testkit.Eventually(t, "the page shows it", func() (bool, error) {
		return strings.Contains(ada.get("/console/consumers").text(), "ada paused it"), nil
	})
	ada.act("/console/act/consumer.resume?consumer=followercounts").says("Resumed")
	ada.act("/console/act/consumer.verify?consumer=threadcache").says("0 differences")
	page(t, ada, "/console/consumers").says("0 differences. Verified")
	h.exec(t, `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ('archiver', 'EVENTS-9', 7)`)
	testkit.Eventually(t, "the page names the remedy", func() (bool, error) {
		return strings.Contains(ada.get("/console/consumers").text(),
			"It has lost events of EVENTS-9: run tidings replay --consumer archiver"), nil
	})
	for path, want := range map[string]int{"/console/act/consumer.pause?consumer=nobody": 404,
		"/console/act/consumer.fly?consumer=archiver": 404} {
		if a := ada.get(path); a.status != want {
			t.Errorf("%s: %d, want %d", path, a.status, want)
		}
	}
	if a := amy.get("/console/act/consumer.pause?consumer=archiver"); a.status != 403 || !strings.Contains(a.text(), "for operators") {
		t.Errorf("a tenant's admin pauses: %d", a.status)
	}
}

// TestASubscriberThatAcknowledgesNothingIsOnThePages delivers more events twice than are usual.
func TestASubscriberThatAcknowledgesNothingIsOnThePages(t *testing.T) {
	t.Parallel()
	h := start(t)
	cfg := h.nats.Config()
	if _, err := broker.Declare(t.Context(), h.js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	const events = broker.ManyRedelivered + 1
	for range events {
		if _, err := h.js.Publish(t.Context(), cfg.Prefix+".0.t7.post.created", nil); err != nil {
			t.Fatal(err)
		}
	}
	c, err := h.js.CreateConsumer(t.Context(), cfg.StreamName(0), jetstream.ConsumerConfig{Durable: "mailer",
		AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		t.Fatal(err)
	}
	var held []jetstream.Msg
	for i := range 2 * events {
		m, err := c.Next()
		if err != nil {
			t.Fatal(err)
		}
		if held = append(held, m); i != events-1 {
			continue
		}
		for _, m := range held {
			if err := m.Nak(); err != nil {
				t.Fatal(err)
			}
		}
	}
	rea := h.signIn(t, h.Tokens.Reader)
	page(t, rea, "/console/doctor").says("Subscriber mailer does not acknowledge 11 messages of " + cfg.StreamName(0))
	page(t, rea, "/console/consumers").says("Subscribers", "mailer "+cfg.StreamName(0)+" redelivers 0 11 11")
}

func TestThePagesSayWhichServerIsAway(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada := h.signIn(t, h.Tokens.Admin)
	h.conn.Close()
	testkit.Eventually(t, "the overview says it",
		func() (bool, error) { return strings.Contains(ada.get("/console/").text(), "NATS is unavailable"), nil })
	page(t, ada, "/console/consumers").says("NATS is unavailable", "Behind unknown")
	page(t, ada, "/console/doctor").says("NATS is unavailable")
}
