package console_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

// appends writes a pending event of a tenant.
func (h *harness) appends(t *testing.T, of int64, kind, eventType string, id int) {
	t.Helper()
	h.exec(t, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES ($1, $2, $3::int, $4, '{}')`, of, kind, id, eventType)
}

// TestTheEventPageFollowsTheNewestEvents watches the live page as an operator, and as a tenant.
func TestTheEventPageFollowsTheNewestEvents(t *testing.T) {
	t.Parallel()
	h := start(t)
	rea, rita := h.signIn(t, h.Tokens.Reader), h.signIn(t, h.Tokens.TenantReader)
	page(t, rita, "/console/event").says("There are no events yet.")
	h.events0(t, 2)
	h.bury(t, 4001, 1, tenant, "too large", "")
	watch := func(r *reader, query string) func(want, not string) {
		next, stop := events(t, r, "/console/live/event?"+query)
		t.Cleanup(stop)
		return func(want, not string) {
			t.Helper()
			testkit.Eventually(t, query+" shows "+want, func() (bool, error) {
				got := next()
				if not != "" && strings.Contains(got, not) {
					t.Fatalf("%s shows %s: %s", query, not, got)
				}
				return strings.Contains(got, want), nil
			})
		}
	}
	all, ours, likes := watch(rea, ""), watch(rita, ""), watch(rea, "kind=like&state=pending")
	all("follow/2", "like/")
	ours("follow/2", "like/")
	likes("No event matches.", "follow/")
	h.appends(t, 8, "like", "created", 31)
	all("like/31", "")
	likes("like/31", "follow/")
	h.appends(t, tenant, "like", "removed", 32)
	ours("like/32", "like/31")

	page(t, rea, "/console/event?type=removed").says("like/32", "pending").without("like/31", "follow/1<")
	page(t, rea, "/console/event?state=dead").says("post/4001", "dead").without("follow/1<", "like/3")
	page(t, rea, "/console/event?state=published").says("follow/1", "published EVENTS-0:1").without("post/", "like/3")
	page(t, rea, "/console/event?kind=follow").says("follow/1").without("post/", "like/3")
	page(t, rea, "/console/event?tenant=8").says("like/31").without("like/32", "follow/1<")
	if a := rea.get("/console/event?state=lost"); a.status != http.StatusUnprocessableEntity {
		t.Errorf("an unknown state: %d", a.status)
	}

	// Only the tail is live: a search reads more than a page may read every second.
	for _, query := range []string{"q=like/31&tenant=8", "since=2020-01-01", "before=5"} {
		if a := page(t, rea, "/console/event?"+query); strings.Contains(a.body, "data-live") {
			t.Errorf("%s is live", query)
		}
		if a := rea.get("/console/live/event?" + query); a.status != http.StatusNotFound {
			t.Errorf("%s has a stream: %d", query, a.status)
		}
	}
}

// TestTheEventsOfATraceAreListed searches by a trace id and by a traceparent.
func TestTheEventsOfATraceAreListed(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.events0(t, 2)
	h.appends(t, 8, "like", "created", 31)
	h.exec(t, `UPDATE outbox_messages SET tenant_id = 8 WHERE id = 2`)
	const trace = "0af7651916cd43dd8448eb211c80319c"
	rea, rita := h.signIn(t, h.Tokens.Reader), h.signIn(t, h.Tokens.TenantReader)
	for _, q := range []string{trace, "00-" + trace + "-b7ad6b7169203331-01"} {
		a := rea.get("/console/find?q="+q).says("follow/1", "follow/2", "No index has the traces of events").without("like/31")
		if a.status != http.StatusOK {
			t.Errorf("%s: %d", q, a.status)
		}
		page(t, rita, "/console/event?q="+q).says("follow/1").without("follow/2", "like/31")
	}
	page(t, rea, "/console/event?q=1"+trace[1:]).says("No event matches.")
}
