package console_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// fails writes a message of a tenant that failed a number of times, and is due after a while.
func (h *harness) fails(t *testing.T, of int64, id, attempts int, why string, after time.Duration) {
	t.Helper()
	h.exec(t, `INSERT INTO outbox_messages
		(tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts, last_error, available_at)
		VALUES ($1, 'post', $2::int, 'made', '{}', $3, $4, now() + $5)`, of, id, attempts, why, after)
}

// TestMessagesThatAreRetriedAreShownByCause lists them, retries one, kills one, and refuses what
// cannot be done.
func TestMessagesThatAreRetriedAreShownByCause(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada, amy, rita := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.TenantAdmin), h.signIn(t, h.Tokens.TenantReader)
	page(t, amy, "/console/retrying").says("No message is being retried.")
	for i := range 12 {
		h.fails(t, tenant, 100+i, 7, fmt.Sprint("no response from stream ", i), time.Duration(5+i)*time.Minute+30*time.Second)
	}
	h.fails(t, tenant, 200, 1, "<i id=X1>too large", 2*time.Hour+time.Minute)
	h.fails(t, 8, 300, 2, "of eight", time.Minute+30*time.Second)
	h.exec(t, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, behind)
		SELECT 7, 'post', 100, 'changed', '{}', available_at, 1 FROM outbox_messages WHERE id = 1`) // waits, and has not failed

	list := page(t, ada, "/console/retrying").says("of eight 1 message post.made", "2 of 11 in 1 min",
		"no response from stream # 12 messages",
		"the next 10:", "7 of 11 in 5 min", "no response from stream 9", "1 of 11 in 2 h").without("stream 10", "changed", "<i id=X1>")
	if at := strings.Index(list.text(), "of eight"); at > strings.Index(list.text(), "no response") {
		t.Error("the cause with the next attempt is not the first")
	}
	page(t, rita, "/console/retrying?tenant=8").says("too large").without("of eight", "/console/act/")
	live, stop := events(t, amy, "/console/live/retrying")
	defer stop()
	if got := live(); !strings.Contains(got, "too large") || strings.Contains(got, "of eight") {
		t.Errorf("the live page: %s", got)
	}

	amy.act("/console/act/message.retry?id=15").says("Message 15 waits behind message 1.", "failed")
	page(t, amy, "/console/event?q=15").says("Waiting behind message 1").without("message.retry")
	first := page(t, amy, "/console/retrying")
	event := page(t, amy, first.link("1")).says("Failed", "7 of 10 times: no response from stream 0", "Waiting")
	form := page(t, amy, event.link("Retry now")).says("message 1, post.made of post/100", "It failed 7 of 11 times", "not in 5 min")
	amy.act(form.path).says("Message 1 is due now.", "done")
	if n := h.count(t, `SELECT count(*) FROM outbox_messages WHERE id = 1 AND available_at <= now()`); n != 1 {
		t.Error("message 1 is not due")
	}
	amy.act("/console/act/message.kill?id=1").says("Message 1 is due, and a relay may be publishing it. Nothing was done.", "failed")
	amy.act("/console/act/message.kill?id=13").says("Message 13 is in the DLQ.", "done")
	dead := page(t, amy, "/console/event?q=13").says("Dead", "killed by amy: because the test says so", "Moved to the DLQ")
	page(t, amy, dead.link("Retry")).says("Puts 1 message back into the outbox")
	page(t, amy, dead.link("Discard")).says("Deletes 1 message")
	if n := h.count(t, `SELECT count(*) FROM outbox_dlq_actions WHERE actor = 'amy' AND reason = 'because the test says so'`); n != 2 {
		t.Errorf("%d actions are recorded, want 2", n)
	}

	for name, in := range map[string]url.Values{"another tenant's": {"id": {"14"}}, "one in the DLQ": {"id": {"13"}},
		"none": {"id": {"999"}}} {
		in.Set("act_id", uuid.NewString())
		in.Set("reason", "r")
		if a := amy.post("/console/act/message.kill", in); a.status != http.StatusNotFound {
			t.Errorf("%s: status %d: %s", name, a.status, a.text())
		}
	}
	if a := rita.post("/console/act/message.kill", url.Values{"id": {"2"}}); a.status != http.StatusForbidden {
		t.Errorf("a reader kills: %d", a.status)
	}
}
