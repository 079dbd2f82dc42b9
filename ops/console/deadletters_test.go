package console_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"golang.org/x/net/html"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/console"
)

func (h *harness) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := h.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func (h *harness) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	if err := h.pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// bury inserts n messages of a tenant into the outbox's DLQ, with ids from first on. Each has the
// text in every field that a writer controls.
func (h *harness) bury(t *testing.T, first, n int, of int64, cause, text string) {
	t.Helper()
	h.exec(t, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, attempts,
		       event_id, inserted_at, slot, last_error, cause, dead_at, trace_id)
		SELECT g, $3, 'post', g, 'made' || $5::text, 1, jsonb_build_object('body', $5::text), now(), now(), 11, gen_random_uuid(), now(), 0,
		$4::text || $5::text, $4, now() - interval '1 minute',
		       '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'
		  FROM generate_series($1::bigint, $1 + $2 - 1) g`, first, n, of, cause, text)
}

// park parks letters of followercounts. Each of the accounts 1 to accounts has one letter that
// cannot be applied, and a valid one behind it.
func (h *harness) park(t *testing.T, accounts int) {
	t.Helper()
	h.exec(t, `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ('followercounts', 'EVENTS-0', 100000)
		ON CONFLICT DO NOTHING`)
	h.exec(t, `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
		event_id, event_type,
		       event_version, headers, payload, error, cause, dead_at)
		SELECT 'followercounts', g, 'EVENTS-0', 7, 'follow', a, id, 'created', 1,
		       jsonb_build_object('ce-id', ARRAY[id], 'ce-type', ARRAY['tidings.follow.created.v1'], 'ce-subject', ARRAY[a::text],
		                          'ce-time', ARRAY['2030-01-01T00:00:00.000000Z'], 'Tidings-Outbox-Id', ARRAY[g::text]),
		       convert_to(jsonb_build_object('follower_id', (1000 + g)::text, 'followee_id', a::text, 'status', 'ACTIVE', 'version', 1,
		       'created_at', now(), 'positioned_at', now(),
		         'updated_at', now(), 'actor', 'x')::text, 'UTF8'), e, e, now() - interval '1 minute'
		  FROM (SELECT g, 1 + (g - 1) % $1::int AS a, gen_random_uuid() AS id,
		  CASE WHEN g <= $1::int THEN 'a bug' ELSE 'an earlier event of its aggregate is parked' END AS e
		          FROM generate_series(1, 2 * $1::int) g) f ORDER BY g`, accounts)
}

func TestDeadLettersAreSeenByTheirCauseAndMended(t *testing.T) {
	t.Parallel()
	var woken atomic.Int64
	h := start(t, func(_ *console.Config, deps *console.Deps) { deps.Wake = func(int) { woken.Add(1) } })
	h.bury(t, 1, 300, 7, "too large", "")
	h.bury(t, 1001, 3, 8, "no stream", "")
	h.park(t, 60)
	h.exec(t, `INSERT INTO consumer_dead_letters (id, consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
		event_id, event_type, event_version, headers, payload, error, cause, dead_at)
		OVERRIDING SYSTEM VALUE SELECT 800, consumer_name, 800, partition_key, 8, aggregate_type, 99, gen_random_uuid(), event_type, 1,
		headers, payload, 'of eight', 'of eight', dead_at
		  FROM consumer_dead_letters WHERE id = 1`)
	ada, amy, rita, rea := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.TenantAdmin), h.signIn(t, h.Tokens.TenantReader),
		h.signIn(t, h.Tokens.Reader)

	// The groups, for each reader.
	groups := page(t, ada, "/console/dead-letters").says("too large outbox made 300", "no stream outbox made 3",
		"a bug followercounts created 60", "an earlier event of its aggregate is parked followercounts created 60")
	page(t, amy, "/console/dead-letters?tenant=8").says("too large").without("no stream", "of eight")
	page(t, ada, "/console/dead-letters?tenant=8").says("no stream", "of eight").without("too large")
	page(t, ada, "/console/dead-letters?q=LARGE&source=outbox").says("too large").without("no stream", "a bug<")
	page(t, ada, "/console/dead-letters?consumer=threadcache").says("No dead letter matches.")
	if a := ada.get("/console/dead-letters?before=x"); a.status != http.StatusUnprocessableEntity {
		t.Errorf("a bad cursor: %d", a.status)
	}
	page(t, rita, groups.link("too large")).says("300").without("/console/act/")

	// One letter: its payload on request, and its tenant.
	group := page(t, amy, groups.link("too large")).says("too large", "300", "post/1", "Next page")
	page(t, rea, group.link("1")).says("Dead letter 1", "too large").without(`&#34;body&#34;`, "/console/act/")
	letter := page(t, amy, group.link("1")).without(`&#34;body&#34;`)
	page(t, amy, letter.link("Show the payload")).says(`{ "body": "" }`, "0af7651916cd43dd8448eb211c80319c")
	page(t, rea, letter.link("Path")).says("Dead", "after 11 attempts: too large")
	for _, path := range []string{"/console/dead-letters/letter?source=outbox&id=1001", "/console/dead-letters/letter?source=outbox&id=999",
		"/console/dead-letters/letter?source=consumers&id=999", "/console/dead-letters/letter?source=consumers&id=800",
		"/console/act/dead_letter.retry?source=consumers&id=800&tenant=8",
		"/console/dead-letters/letter?source=x&id=1", "/console/dead-letters/letter?source=outbox",
		"/console/dead-letters/operation?source=outbox&id=" + uuid.NewString()} {
		if a := amy.get(path); a.status != http.StatusNotFound && a.status != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d", path, a.status)
		}
	}
	page(t, amy, "/console/dead-letters/letters?source=outbox&group="+uuid.NewString()).says("No letter is left here.")
	const ofOne = "/console/dead-letters/letters?source=outbox&aggregate=post&aggregate_id=1002"
	page(t, ada, ofOne+"&tenant=8").says("post/1002").without("post/1001")
	ada.get(ofOne).says("Enter the tenant of the aggregate.")
	if a := amy.get("/console/dead-letters/letters?source=outbox&group=x"); a.status != http.StatusUnprocessableEntity {
		t.Errorf("a bad group: %d", a.status)
	}

	// Retry one, then the whole group, of the own tenant only.
	amy.act(group.link("Retry")).says("Retried 1 dead letter.", "dead letter 1 of the outbox")
	wokenByOne := woken.Load()
	if n := h.count(t, `SELECT count(*) FROM outbox_messages WHERE tenant_id = 7 AND aggregate_id = '1'`); n != 1 {
		t.Errorf("%d messages in the outbox", n)
	}
	if a := amy.get(group.link("Retry")); a.status != http.StatusNotFound || !strings.Contains(a.text(), "There is no such dead letter") {
		t.Errorf("once more: %d %s", a.status, a.text())
	}
	if a := amy.post("/console/act/dead_letter.discard",
		url.Values{"act_id": {uuid.NewString()}, "reason": {"r"}, "source": {"outbox"}, "id": {"1001"},
			"tenant": {"8"}}); a.status != http.StatusNotFound {
		t.Errorf("another tenant's: %d", a.status)
	}
	if a := rita.post("/console/act/dead_letter.retry",
		url.Values{"act_id": {uuid.NewString()}, "reason": {"r"}, "source": {"outbox"}, "id": {"2"}}); a.status != http.StatusForbidden {
		t.Errorf("a reader: %d", a.status)
	}
	done := amy.act(group.link("Retry all")).says("Retried 299 dead letters.", `group "too large" of the outbox, made`,
		"because the test says so")
	empty := page(t, amy, done.link("Back")).says("No letter is left here.", "Operations on the group", "299", "ended")
	page(t, amy, empty.link("retry")).says("299 of 299", "ended", "amy")
	if n, left := h.count(t, `SELECT count(*) FROM outbox_messages`),
		h.count(t, `SELECT count(*) FROM outbox_messages_dlq`); n != 300 || left != 3 {
		t.Errorf("%d in the outbox, %d dead", n, left)
	}
	if one, all := wokenByOne, woken.Load(); one != 1 || all < 2 {
		t.Errorf("the relay is woken %d times by one retry, %d times after all", one, all)
	}

	// The page counts the letters that failed again since.
	h.bury(t, 5001, 2, 7, "too large", "")
	h.exec(t, `UPDATE outbox_messages_dlq SET retries = 1, dead_at = now() WHERE id = 5001`)
	page(t, amy, groups.link("too large")).says("1 came", "1 of them failed again")

	amy.act(page(t, amy, groups.link("too large")).link("Write a note"), "note", "ask the writers <b>first</b>").says("Wrote the note.")
	page(t, amy, "/console/dead-letters").says("ask the writers <b>first</b>").without("<b>first")
	page(t, ada, "/console/dead-letters").without("ask the writers")

	// A consumer's letters: a retry includes the ones behind; the form of a discard warns that it
	// cannot be undone.
	bugs := page(t, ada, groups.link("a bug")).says("60", "follow/1")
	page(t, ada, groups.link("an earlier event of its aggregate is parked")).says(
		"These letters did not fail").without("dead_letter.retry?id=")
	ada.act(bugs.link("Discard")).says("Discarded 1 dead letter.")
	ada.act(bugs.link("Retry all")).says("Retried 118 dead letters.")
	if n, followers := h.count(t, `SELECT count(*) FROM consumer_dead_letters`),
		h.count(t, `SELECT sum(incoming) FROM edge_counts WHERE tenant_id = 7`); n != 2 || followers != 118 {
		t.Errorf("%d are parked, %d followers are counted", n, followers)
	}
	acts, err := audit.List(t.Context(), h.pool, audit.Filter{}, 20)
	if err != nil || len(acts) != 5 || acts[0].Name != "dead_letter.retry" || acts[0].TenantID != 0 || acts[4].TenantID != 7 ||
		acts[4].TokenName != "amy" {
		t.Errorf("%+v, %v", acts, err)
	}
}

// TestAnOperationIsContinuedByAnotherConsole leaves an act to another process, which completes it
// and records its outcome.
func TestAnOperationIsContinuedByAnotherConsole(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.bury(t, 1, 500, 7, "too large", "")
	record, _, err := audit.Begin(t.Context(), h.pool,
		audit.Act{ActID: uuid.New(), TenantID: 7, TokenTenant: 7, TokenName: "amy", Fingerprint: "0123456789ab",
			Name: "dead_letter.discard", Target: "t", Reason: "r"})
	if err != nil {
		t.Fatal(err)
	}
	h.exec(t, `INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, reason, total, seen, done, after_id,
		worker, lease_until)
		VALUES ($1, 7, 'discard', '{}', 'amy', 'r', 500, 200, 200, 200, 'dead', now())`, record.ActID)
	h.exec(t, `DELETE FROM outbox_messages_dlq WHERE id <= 200`)
	amy, max := h.signIn(t, h.Tokens.TenantAdmin), h.signIn(t, h.Tokens.Admin)
	at := "/console/dead-letters/operation?source=outbox&id=" + record.ActID.String()
	// The last slice counts the last letter. A later one, which finds none, ends the operation, and
	// the record follows that.
	testkit.Eventually(t, "the operation to end", func() (bool, error) {
		return strings.Contains(amy.get(at).text(), "ended") && !strings.Contains(amy.get("/console/acts/"+record.ActID.String()).text(),
			"not finished"), nil
	})
	page(t, amy, at).says("500 of 500", "ended", "amy").without("dead_letter.stop")
	page(t, amy, "/console/acts/"+record.ActID.String()).says("done", "Discarded 500 dead letters.")
	if a := max.get("/console/act/dead_letter.stop?source=outbox&operation=" + record.ActID.String()); a.status != http.StatusConflict ||
		!strings.Contains(a.text(), "has ended") {
		t.Errorf("stopping what has ended: %d %s", a.status, a.text())
	}
	// Stop an operation of another process from here.
	id := uuid.NewString()
	h.exec(t, `INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, total, worker, lease_until)
		VALUES ($1, 7, 'retry', '{}', 'amy', 5, 'other', 'infinity')`, id)
	running := page(t, amy, "/console/dead-letters/operation?source=outbox&id="+id).says("under way", "0 of 5")
	amy.act(running.link("Stop")).says("Stopped it after 0 of 5.")
	page(t, amy, "/console/dead-letters/operation?source=outbox&id="+id).says("stopped", "by amy")
}

// hostile buries a letter for each payload, in every field that a writer or an operator controls.
func (h *harness) hostile(t *testing.T) {
	t.Helper()
	for i, p := range payloads() {
		h.bury(t, i+1, 1, 7, p, p)
	}
	h.exec(t, `INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, reason)
		SELECT last_error, 'discard', id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, last_error
		FROM outbox_messages_dlq`)
	h.exec(t, `INSERT INTO dead_letter_notes (tenant_id, group_id, note, actor) SELECT 7, group_id, cause, cause FROM outbox_messages_dlq`)
	h.exec(t, `INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, reason,
		total, finished_at, stopped_by, last_error)
		SELECT event_id, 7, 'retry', jsonb_build_object('group', group_id), cause, cause, 1, now(), cause, cause FROM outbox_messages_dlq`)
	h.exec(t, `UPDATE outbox_messages_dlq SET aggregate_type = 'post' || cause`)
}

// hostilePages returns the pages that show the payloads.
func (h *harness) hostilePages(t *testing.T) (paths []string) {
	t.Helper()
	paths = []string{"/console/dead-letters", "/console/dead-letters/letters?source=outbox", "/console/event?since=2020-01-01"}
	rows, _ := h.pool.Query(t.Context(), `SELECT id, event_id::text, group_id::text FROM outbox_messages_dlq ORDER BY id`)
	defer rows.Close()
	for rows.Next() {
		var id int
		var event, group string
		if err := rows.Scan(&id, &event, &group); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, fmt.Sprintf("/console/dead-letters/letter?source=outbox&id=%d&payload=show", id),
			"/console/event?payload=show&q="+event,
			"/console/dead-letters/letters?source=outbox&group="+group, "/console/dead-letters/operation?source=outbox&id="+event,
			"/console/act/dead_letter.note?source=outbox&group="+group)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for _, p := range payloads()[:10] {
		q := url.QueryEscape(p)
		paths = append(paths, "/console/event?type="+q+"&q="+uuid.NewString(), "/console/dead-letters?q="+q+"&type="+q)
	}
	return paths
}

func TestNoPayloadRunsNorBreaksAPage(t *testing.T) {
	t.Parallel()
	if n := len(payloads()); n < 50 {
		t.Fatalf("%d payloads", n)
	}
	h := start(t)
	h.hostile(t)
	amy := h.signIn(t, h.Tokens.TenantAdmin)
	for _, path := range h.hostilePages(t) {
		a := page(t, amy, path) // page fails the test for any inline script, style, handler or javascript: URL
		scripts := 0
		for n := range a.doc.Descendants() {
			if n.Type != html.ElementNode {
				continue
			}
			switch n.Data {
			case "script":
				scripts++
				if !strings.HasPrefix(attr(n, "src"), "/console/assets/") {
					t.Errorf("%s has a script from %q", path, attr(n, "src"))
				}
			case "iframe", "object", "embed", "svg", "math", "base", "video", "audio", "marquee", "template", "i":
				t.Errorf("%s has <%s>", path, n.Data)
			}
		}
		if scripts != 4 {
			t.Errorf("%s has %d scripts, want the layout's 4", path, scripts)
		}
	}
	for i, p := range payloads() {
		if a := page(t, amy, fmt.Sprintf("/console/dead-letters/letter?source=outbox&id=%d&payload=show", i+1)); strings.Count(a.text(),
			strings.Join(strings.Fields(p), " ")) < 3 {
			t.Errorf("the letter does not show %q as it is: %s", p, a.text())
		}
	}
	if a := amy.get("/console/event?q=" + url.QueryEscape(payloads()[0])); a.status != http.StatusUnprocessableEntity ||
		strings.Contains(a.body, "<script>d") {
		t.Errorf("%d: %s", a.status, a.body)
	}
}

// n counts the groups on a page.
func n(a *answer) int { return strings.Count(a.body, "/console/dead-letters/letters?") }
