package relay

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
)

// TestARunningRelayNamesEventsAsTheirUpstreamDoes: an upstream is declared beside a running relay,
// which has published other events, and removed while an event of it is pending.
func TestARunningRelayNamesEventsAsTheirUpstreamDoes(t *testing.T) {
	t.Parallel()
	db, b := testkit.Postgres(t), testkit.NATS(t)
	system := db.Pool(t, postgres.RoleSystem)
	stop := start(t, newRelay(t, system, b))
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	append1 := func(aggregateType, eventType string) {
		t.Helper()
		if _, err := system.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (1, $1, 7, $2, '{}')`, aggregateType, eventType); err != nil {
			t.Fatal(err)
		}
	}
	seq := uint64(0)
	next := func() (published string) {
		t.Helper()
		seq++
		testkit.Eventually(t, fmt.Sprintf("message %d", seq), func() (bool, error) {
			stream, err := js.Stream(t.Context(), b.Config().StreamName(0))
			if err != nil {
				return false, nil // not created yet
			}
			m, err := stream.GetMsg(t.Context(), seq)
			if err != nil {
				return false, nil // not published yet
			}
			published = m.Header.Get(event.HeaderType) + " of " + m.Header.Get(event.HeaderSource)
			return true, nil
		})
		return published
	}
	for _, undeclared := range []string{"post", "order"} {
		append1(undeclared, "placed")
		if got := next(); got != "tidings."+undeclared+".placed.v1 of "+event.Source {
			t.Error(got)
		}
	}
	for i, name := range []string{"order", "invoice"} {
		u, err := kindfile.ReadUpstream(fmt.Appendf(nil, "upstream: %s\ntype_prefix: com.example\nsource: /shop\n"+
			"events: {placed: {versions: {1: {type: object}}}}", name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := declared.Add(t.Context(), system, declared.Request{Upstream: *u, Actor: "test"}); err != nil {
			t.Fatal(err)
		}
		if i == 1 { // another relay publishes what waits
			stop()
		}
		if i == 0 {
			testkit.Eventually(t, "the relay looks a type up again that was none of an upstream", func() (bool, error) {
				append1(name, "placed")
				return strings.HasPrefix(next(), "com.example."), nil
			})
		}
		append1(name, "placed")
		if i == 1 {
			if err := declared.Remove(t.Context(), system, name, "test", ""); err != nil {
				t.Fatal(err)
			}
			start(t, newRelay(t, system, b))
		}
		want := "com.example." + name + ".placed.v1 of /shop"
		if got := next(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
