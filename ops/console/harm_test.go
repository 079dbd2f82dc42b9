package console_test

import (
	"net/http"
	"strings"
	"testing"
)

func TestARetryThatFailedIsNotDone(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.park(t, 2)
	h.exec(t, `UPDATE consumer_dead_letters SET payload = 'no JSON' WHERE aggregate_id = '1'`)
	ada := h.signIn(t, h.Tokens.Admin)
	all := "/console/act/dead_letter.retry?source=consumers"
	for _, want := range []struct{ badge, says string }{
		{`<span class="badge warn">done in part</span>`, "Retried 2 dead letters, 1 failed. The last error: "},
		{`<span class="badge bad">failed</span>`, "Retried 0 dead letters, 1 failed. The last error: "},
	} {
		a := ada.act(all).says(want.says)
		list := page(t, ada, "/console/audit").says(want.says)
		if !strings.Contains(a.body, want.badge) || !strings.Contains(list.body, want.badge) {
			t.Errorf("want %s: %s", want.badge, a.text())
		}
	}
}

func TestADiscardOfAllNeedsTheirCount(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.bury(t, 1, 12, tenant, "too large", "")
	amy := h.signIn(t, h.Tokens.TenantAdmin)
	all := "/console/act/dead_letter.discard?source=outbox"
	form := page(t, amy, all).says("The first of them:", "made of post/", "too large", "To confirm, type 12")
	if n := strings.Count(form.body, `<li dir="auto">`); n != 5 {
		t.Errorf("%d samples", n)
	}
	for _, typed := range []string{"", "5"} {
		a := amy.post("/console/act/dead_letter.discard", form.form("reason", "r", "confirm", typed))
		if a.status != http.StatusUnprocessableEntity || !strings.Contains(a.text(), "To confirm, type 12.") {
			t.Errorf("with %q typed: %d %s", typed, a.status, a.text())
		}
	}
	h.bury(t, 101, 1, tenant, "too large", "") // the count is that of the form
	a := amy.post("/console/act/dead_letter.discard", form.form("reason", "r"))
	amy.ended(a).says("Discarded 13 dead letters.")
}

func TestADecisionOnAllIsChosen(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.write(t, "5", "1", "the first", "the second")
	d.deliver(t)
	d.exec(t, `UPDATE child_lists SET moderation_state = 'PENDING'`)
	max := d.signIn(t, d.Tokens.TenantModerator)
	form := page(t, max, "/console/act/moderation.decide_all?kind=comment&list=pending&until=2099-01-01T00:00:00.000000Z")
	if !strings.Contains(form.body, `<option value="">Choose one</option>`) || strings.Contains(form.body, " selected") {
		t.Errorf("a decision is chosen: %s", form.body)
	}
	if a := max.post("/console/act/moderation.decide_all", form.form("reason", "r")); a.status != http.StatusUnprocessableEntity ||
		!strings.Contains(a.text(), "Decision: a value is required.") {
		t.Errorf("without a decision: %d %s", a.status, a.text())
	}
}
