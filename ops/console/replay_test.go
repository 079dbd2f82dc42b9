package console_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/ops/console"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/relay"
)

// gated is a projection that waits at its gate before each batch.
type gated struct {
	projections.Projection
	gate *atomic.Pointer[chan struct{}]
}

func (g gated) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	select {
	case <-*g.gate.Load():
		return g.Projection.Apply(ctx, tx, events)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// relay returns a relay that does not run yet.
func (h *harness) relay(t *testing.T) *relay.Relay {
	t.Helper()
	h.declare(t)
	return system.Relay(t, system.RelayConfig(), h.pool, h.nats.Config())
}

// publish publishes the outbox with a relay that ends before the call returns.
func (h *harness) publish(t *testing.T) {
	t.Helper()
	stop := system.Start(t, h.relay(t).Run)
	system.AwaitPublished(t, h.pool)
	stop()
}

func TestAConsumerIsReplayedFollowedAndInterrupted(t *testing.T) {
	t.Parallel()
	var gate atomic.Pointer[chan struct{}]
	open := func() { c := make(chan struct{}); close(c); gate.Store(&c) }
	open()
	d := openDesk(t, func(_ *console.Config, deps *console.Deps) { deps.Fleet[1] = gated{deps.Fleet[1], &gate} })
	d.write(t, "1", "5", "one", "two", "three")
	d.publish(t)
	stream, err := d.js.Stream(t.Context(), d.nats.Config().StreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Expire(t, stream, 0)
	ada := d.signIn(t, d.Tokens.Admin)
	const link = "/console/act/consumer.replay?consumer=threadcache"
	page(t, ada, link).says("An interrupted replay changes nothing", "It reads the truth: stream EVENTS-0 begins at 4.",
		"It rebuilds child_lists,")

	d.exec(t, `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ('threadcache', 'EVENTS-0', 0)`)
	batch, err := d.pool.Begin(t.Context()) // a batch of the live consumer; the switch waits for it
	if err != nil {
		t.Fatal(err)
	}
	defer batch.Rollback(context.WithoutCancel(t.Context()))
	if _, err := batch.Exec(t.Context(), `SELECT FROM consumer_offsets FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	first := ada.begin(link).says("under way")
	testkit.Eventually(t, "the replay waits",
		func() (bool, error) { return strings.Contains(ada.get(first.path).text(), "switching: 3 done"), nil })
	page(t, ada, "/console/consumers").says("replay under way", "switching: 3 events.")
	if a := ada.get(link); a.status != 409 || !strings.Contains(a.text(), "another replay of this consumer is running") {
		t.Errorf("the console offers a second replay: %d: %s", a.status, a.text())
	}
	if n := d.count(t, `SELECT count(*) FROM child_lists`); n != 0 {
		t.Errorf("%d live rows during the replay", n)
	}
	if err := batch.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the replay ends",
		func() (bool, error) { return !strings.Contains(ada.get(first.path).text(), "under way"), nil })
	page(t, ada, first.path).says("done Replayed from the truth: 3 events applied in", "It has 0 dead letters now.")
	if n := d.count(t, `SELECT count(*) FROM child_lists`); n != 3 {
		t.Errorf("%d rows after the replay, want 3", n)
	}

	d.exec(t, `UPDATE child_lists SET body = 'damaged'`)
	shut := make(chan struct{})
	gate.Store(&shut)
	stopped := ada.begin(link).says("under way", "making the new tables")
	d.stop()
	testkit.Eventually(t, "the outcome is recorded",
		func() (bool, error) { return strings.Contains(ada.get(stopped.path).text(), "failed"), nil })
	page(t, ada, stopped.path).says("The replay was stopped before its end: Nothing has changed: the live tables are as they were.")
	if n := d.count(t, `SELECT count(*) FROM child_lists WHERE body = 'damaged'`); n != 3 {
		t.Errorf("%d rows are as they were, want 3", n)
	}
}

func TestAReplayIsOfferedToThoseWhoMayAndWhereItCanBeDone(t *testing.T) {
	t.Parallel()
	h := start(t)
	page(t, h.signIn(t, h.Tokens.Admin), "/console/consumers").link("Replay")
	page(t, h.signIn(t, h.Tokens.Reader), "/console/consumers").without("consumer.replay", "tidings replay")
	for name, token := range map[string]string{"a reader": h.Tokens.Reader, "a tenant's admin": h.Tokens.TenantAdmin} {
		if a := h.signIn(t, token).get("/console/act/consumer.replay?consumer=archiver"); a.status != 403 {
			t.Errorf("%s may replay: %d", name, a.status)
		}
	}
	for name, c := range map[string]struct {
		change func(*console.Config, *console.Deps)
		status int
		says   string
	}{
		"read only":        {func(cfg *console.Config, _ *console.Deps) { cfg.ReadOnly = true }, 403, "read only"},
		"without an owner": {func(_ *console.Config, deps *console.Deps) { deps.OwnerURL = "" }, 409, "no login that owns"},
	} {
		h := start(t, c.change)
		ada := h.signIn(t, h.Tokens.Admin)
		a := page(t, ada, "/console/consumers").without("consumer.replay")
		if c.status == 409 {
			a.says("tidings replay --consumer archiver", "the console has no login that owns its tables")
		}
		if a := ada.get("/console/act/consumer.replay?consumer=archiver"); a.status != c.status || !strings.Contains(a.text(), c.says) {
			t.Errorf("%s: %d: %s", name, a.status, a.text())
		}
	}
}
