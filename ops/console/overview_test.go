package console_test

import (
	"net/http"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/relay"
)

// TestTheOverviewNamesWhatTheDoctorFinds needs servers about whose settings the doctor finds
// nothing. It plays the relay and the consumers.
func TestTheOverviewNamesWhatTheDoctorFinds(t *testing.T) {
	t.Parallel()
	h := startOn(t, testkit.PostgresProcess(t, "fsync=on", "full_page_writes=on").DB(t), testkit.NATS(t))
	h.declare(t)
	fleet := []string{"followercounts", "threadcache", "archiver"}
	hold := func(kind string) {
		h.exec(t, `INSERT INTO leases (kind, partition, owner, expires_at) VALUES ($1, 0, $1 || '-1', now() + interval '1 hour')`, kind)
	}
	hold(relay.LeaseKind)
	for _, name := range fleet {
		hold(consumers.LeaseKind(name, h.nats.Config().Stream))
	}
	h.bury(t, 1, 40, tenant, "too large", "")
	h.exec(t, `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
		event_id, event_type, event_version, headers, payload, error, cause)
		SELECT unnest($1::text[]), g, 'EVENTS-0', 7, 'follow', g, gen_random_uuid(), 'created', 1, '{}', '', 'a bug', 'a bug'
		  FROM generate_series(1, 160) g`, fleet[:1])
	h.exec(t, `INSERT INTO consumer_pauses (consumer_name, actor, reason) VALUES ('archiver', 'ann', 'a migration')`)
	h.exec(t, `INSERT INTO job_runs (job, owner, started_at, failed_at, last_error) VALUES ('retention', 'x', now(), now(), 'no luck')`)
	ada := h.signIn(t, h.Tokens.Admin)
	overview := page(t, ada, "/console/").says("40 messages in the DLQ", "Followercounts: 160 dead letters",
		"Retention: its last run failed").without("All clear") // Rule job-failed asks the server
	if !regexp.MustCompile(`ann paused it .* for \d+ s Consumers Resume tidings resume`).MatchString(overview.text()) {
		t.Errorf("a finding lacks its time, its page or what repairs it: %.2000s", overview.text())
	}
	if strings.Index(overview.body, "40 messages in the DLQ") > strings.Index(overview.body, "<svg viewBox") {
		t.Error("the findings are below the picture")
	}
	targets := 0
	for n := range overview.first("svg").Descendants() {
		if n.Type != html.ElementNode || n.Data != "a" {
			continue
		}
		if targets++; ada.get(attr(n, "href")).status != http.StatusOK {
			t.Errorf("a box leads to %s", attr(n, "href"))
		}
	}
	if targets != 4+len(fleet) {
		t.Errorf("%d boxes are links", targets)
	}
	if got, want := overview.link("Resume"), "/console/act/consumer.resume?back=%2Fconsole%2F&consumer=archiver"; got != want {
		t.Errorf("the button leads to %s, want %s", got, want)
	}
	if !strings.Contains(overview.body, `href="/console/dead-letters?source=consumers&amp;consumer=followercounts"`) {
		t.Error("no link leads to the dead letters of the consumer")
	}
	page(t, ada, "/console/audit").health("4", "warn")
	page(t, ada, "/console/doctor").says("outbox-dlq", "dead-letters", "paused", "job-failed").without("No findings.")

	h.exec(t, `DELETE FROM outbox_messages_dlq`)
	h.exec(t, `DELETE FROM consumer_dead_letters`)
	h.exec(t, `DELETE FROM consumer_pauses`)
	h.exec(t, `UPDATE job_runs SET succeeded_at = now()`)
	page(t, ada, "/console/doctor").says("No findings.")
	page(t, ada, "/console/").says("All clear").without("160 dead letters", "paused it")
	page(t, ada, "/console/audit").health("", "ok")
	page(t, h.signIn(t, h.Tokens.TenantAdmin), "/console/audit").without(`id="causes"`)

	h.exec(t, `UPDATE leases SET expires_at = now() WHERE kind = $1`, relay.LeaseKind)
	h.conn.Close()
	testkit.Eventually(t, "the overview to put the cause before its consequence", func() (bool, error) {
		text := ada.get("/console/").text()
		cause, then := strings.Index(text, "NATS is unavailable"), strings.Index(text, "So:")
		return 0 <= cause && cause < then && strings.Contains(text[then:], "No running relay holds partition 0") &&
			!strings.Contains(text, "All clear"), nil
	})
	page(t, ada, "/console/audit").health("1", "bad") // a consequence is no cause
	nested := page(t, ada, "/console/doctor").says("1 error", "unavailable NATS is unavailable", "Remedy:").text()
	cause, then := strings.Index(nested, "NATS is unavailable"), strings.Index(nested, "So:")
	if cause > then || !strings.Contains(nested[then:], "No running relay holds partition 0") {
		t.Errorf("the doctor does not nest: %s", nested)
	}
}

// health fails the test unless the page's title, badge and icon show that many causes.
func (a *answer) health(causes, level string) {
	a.t.Helper()
	title, icon := "<title>", "/icon.svg"
	if causes != "" {
		title, icon = "<title>("+causes+") ", "/icon-"+level+".svg"
	}
	for _, want := range []string{title, icon, `<span class="badge ` + level + `" id="causes">` + causes + "</span>"} {
		if !strings.Contains(a.body, want) {
			a.t.Errorf("%s lacks %q: %.1500s", a.path, want, a.body)
		}
	}
}
