package doctor

import (
	"testing"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
)

func TestASubscriberOfEventsThatNobodyDeclaresIsFound(t *testing.T) {
	t.Parallel()
	truth := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	order, err := kindfile.ReadUpstream([]byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n" +
		"events: {paid: {versions: {1: {type: object}}}}"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := declared.Add(t.Context(), truth, declared.Request{Upstream: *order, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	for filter, want := range map[string]string{
		"events.*.*.order.paid":            "",
		"events.*.t7.order.paid":           "",
		"events.*.*.order.*":               "",
		"events.*.t1.order.>":              "",
		"events.*.*.follow.created":        "",
		"events.*.*.person.erased":         "",
		"events.*.system.*.heartbeat.sent": "",
		"events.>":                         "",
		"events.*.*.*.created":             "",
		"":                                 "",
		"EVENTS-dead.retry.m-ordr-paid":    "",
		"events.*.*.ordr.paid":             "there is no kind or upstream ordr",
		"events.*.t7.ordr.*":               "there is no kind or upstream ordr",
		"events.*.*.order.payed":           "the upstream order has no event type payed",
	} {
		found, err := undeclared(t.Context(), truth, "events", []broker.Durable{{Name: "m", Stream: "EVENTS-0", Filter: filter},
			{Name: "m", Stream: "EVENTS-1", Filter: filter}})
		what := ""
		if len(found) == 1 {
			what = found[0].What
		}
		if want != "" {
			want = "it waits for events that no service may write: " + want
		}
		if err != nil || len(found) > 1 || what != want || (want != "" && (found[0].Where != "m" || found[0].Action() == "")) {
			t.Errorf("%s: %+v, %v, want %q", filter, found, err, want)
		}
	}
	if err := declared.Remove(t.Context(), truth, "order", "test", ""); err != nil {
		t.Fatal(err)
	}
	if found, err := undeclared(t.Context(), truth, "events", []broker.Durable{{Name: "m", Filter: "events.*.*.order.paid"}}); err != nil ||
		len(found) != 1 {
		t.Errorf("after the upstream's removal: %+v, %v", found, err)
	}
}
