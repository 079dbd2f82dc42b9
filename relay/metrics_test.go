package relay

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
)

// TestFailedAttemptsHaveTheTypesOfUpstreams also bounds the number of types.
func TestFailedAttemptsHaveTheTypesOfUpstreams(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	m := newMetrics(reg)
	const name = "tidings_outbox_failed_attempts_total "
	got := func() map[string]float64 {
		t.Helper()
		all := map[string]float64{}
		for series, n := range testkit.Series(t, reg) {
			if len(series) > len(name) && series[:len(name)] == name && n > 0 {
				all[series[len(name):]] = n
			}
		}
		return all
	}
	for _, e := range []event.Event{{AggregateType: "order", Type: "placed"}, {AggregateType: "order", Type: "placed"},
		{AggregateType: "follow", Type: "created"}, {AggregateType: "no token", Type: "placed"}} {
		m.failed(&e)
	}
	if diff := cmp.Diff(map[string]float64{"order.placed": 2, "follow.created": 1, otherEvents: 1}, got()); diff != "" {
		t.Errorf("failed attempts (-want +got):\n%s", diff)
	}
	for i := range 2 * maxEventTypes {
		m.failed(&event.Event{AggregateType: "order", Type: fmt.Sprint("t", i)})
	}
	m.failed(&event.Event{AggregateType: "order", Type: "placed"})
	if all := got(); len(all) > maxEventTypes || all["order.placed"] != 3 || all[otherEvents] < maxEventTypes {
		t.Errorf("after %d types: %d series, %v of order.placed, %v of others", 2*maxEventTypes, len(all), all["order.placed"],
			all[otherEvents])
	}
}
