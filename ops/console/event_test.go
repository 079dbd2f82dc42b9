package console_test

import (
	"context"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/console"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
)

// events0 writes follows of tenant 7 for the accounts 1 to n, published to EVENTS-0 at the
// sequences 1 to n.
func (h *harness) events0(t *testing.T, n int) (events []string) {
	t.Helper()
	h.exec(t, `UPDATE outbox_partitions SET stream = 'EVENTS-0', created = now() - interval '60 days'`)
	h.exec(t, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, inserted_at, available_at,
		processed_at, partition, stream_seq, trace_id)
		SELECT 7, 'follow', g, 'created', jsonb_build_object('n', g), now() - interval '1 h', now() - interval '1 h', now(), 0, g,
		'00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01' FROM generate_series(1, $1::int) g`, n)
	rows, _ := h.pool.Query(t.Context(), `SELECT event_id::text FROM outbox_messages ORDER BY id`)
	events, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return events
}

func TestThePathOfAnEventIsShownHoweverItIsFound(t *testing.T) {
	t.Parallel()
	h := start(t, func(c *console.Config, _ *console.Deps) { c.TraceURL = "https://traces.example/{trace_id}?x" })
	events := h.events0(t, 5)
	h.exec(t, `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id)
		VALUES ('followercounts', 'EVENTS-0', 3), ('threadcache', 'EVENTS-0', 5), ('archiver', 'EVENTS-0', 5)`)
	h.exec(t, `UPDATE outbox_messages SET aggregate_type = 'comment', event_type = 'created', stream_seq = NULL WHERE id = 5`) // erased
	h.exec(t, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts, last_error)
		VALUES (7, 'follow', 1, 'removed', '{}', 3, 'too large'), (8, 'follow', 1, 'removed', '{}', 0, NULL)`)
	h.park(t, 1)
	h.exec(t, `UPDATE consumer_dead_letters SET event_id = $1, stream_seq = 1 WHERE id = 1`, events[0])
	h.exec(t, `INSERT INTO consumer_dead_letter_actions (actor, action, dead_letter_id, consumer_name, stream_seq, tenant_id,
		aggregate_type, aggregate_id, event_id, event_type, error, reason)
		VALUES ('ann', 'retry', 1, 'followercounts', 1, 7, 'follow', 1, $1, 'created', 'still a bug', 'mended?')`, events[0])
	ada, amy := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.TenantAdmin)
	for _, q := range []string{events[1], strings.ToUpper(events[1]), "2", "EVENTS-0:2", "EVENTS-0%202"} {
		a := page(t, amy, "/console/event?q="+q).says("Occurred", "Written", "as message 2", "Published", "to EVENTS-0 at sequence 2",
			"Applied by followercounts at the latest", events[1], "EVENTS-0:2", "follow/2",
			"0af7651916cd43dd8448eb211c80319c", "Show the payload").without(`{&#34;n&#34;: 2}`, "threadcache")
		if link := a.link("Open the trace"); link != "https://traces.example/0af7651916cd43dd8448eb211c80319c?x" {
			t.Errorf("the trace is at %s", link)
		}
		page(t, amy, a.link("Show the payload")).says(`{ "n": 2 }`)
	}
	page(t, ada, "/console/event?q=4").says("Not yet applied by followercounts it is at sequence 3, 1 behind")
	first := page(t, ada, "/console/event?q=1").says("Parked by followercounts", "a bug", "Retried for followercounts",
		"by ann: mended?; then it failed again: still a bug")
	page(t, ada, first.link("Dead letter")).says("Dead letter 1", "still a bug")
	page(t, ada, first.link("Retry for followercounts")).says("Applies the dead letters of 1 aggregate")
	page(t, ada, first.link("Discard for followercounts")).says("Deletes 1 dead letter")
	page(t, ada, "/console/event?q=5").says("to EVENTS-0, from which it was erased")
	page(t, ada, "/console/event?q=6").says("Failed", "3 of 10 times: too large", "Waiting")

	// Its waterfall, and the event before and after it.
	fall := page(t, amy, "/console/event?q=3").says("Durations count from the write", "Published", "(+1 h 0 min)",
		"None before among 20,000 messages None after among 20,000 messages All of follow/3")
	for bars, a := range map[string]*answer{`x="0" y="1" width="3[12][0-9]".*x="3[12][0-9]" y="1" width="[1-9]"`: fall,
		`class="by" x="3[12][0-9]" y="1" width="8[01]"`: page(t, amy, "/console/event?q=2")} {
		if !regexp.MustCompile(`(?s)` + bars).MatchString(a.body) {
			t.Errorf("no bars %s: %s", bars, a.body)
		}
	}
	after := page(t, amy, "/console/event?q=1&payload=show").link("Event after")
	before := page(t, amy, after).says("as message 6", "None after").without(`"n"`).link("Event before")
	page(t, amy, before).says("as message 1", "None before")
	page(t, ada, "/console/event?q=7").says("Pending")

	// Events of other tenants and unknown events have the same answer.
	for q, want := range map[string]string{"7": "No such event", "999": "No such event", uuid.NewString(): "No such event",
		"EVENTS-0:99": "There is no event at sequence 99"} {
		page(t, amy, "/console/event?q="+q).says(want)
	}
	for _, q := range []string{"EVENTS-9:1", "EVENTS-0:0", "what", "follow/a,b", "99999999999999999999", "follow/.."} {
		if a := amy.get("/console/event?q=" + q); a.status != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d %s", q, a.status, a.text())
		}
	}
	if a := ada.get("/console/event?q=follow/1"); a.status != http.StatusUnprocessableEntity ||
		!strings.Contains(a.text(), "Enter the tenant") {
		t.Errorf("an aggregate of no tenant: %d", a.status)
	}
	rows := func(r *reader, query string) int {
		return strings.Count(page(t, r, "/console/event?"+query).body, "<code>")
	}
	for query, want := range map[string]int{"q=follow/1&tenant=7": 2, "q=follow/1&tenant=8": 1, "type=removed": 2,
		"type=removed&tenant=8": 1, "type=removed&until=2020-01-01": 0, "since=2020-01-01": 7} {
		if got := rows(ada, query); got != want {
			t.Errorf("%s: %d rows, want %d", query, got, want)
		}
	}
	if got := rows(amy, "type=removed&tenant=8"); got != 1 {
		t.Errorf("a tenant's token sees %d rows of type removed, want only its own", got)
	}
	page(t, amy, "/console/event?type=nothing").says("No event matches.")
	page(t, amy, "/console/event").says("Find an event")
}

// TestASequenceIsLookedUpOnItsStreamFirst finds an event whose row has no sequence yet.
func TestASequenceIsLookedUpOnItsStreamFirst(t *testing.T) {
	t.Parallel()
	h := start(t)
	events := h.events0(t, 2)
	h.exec(t, `UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL WHERE id = 2`)
	cfg := h.nats.Config()
	s, err := broker.Declare(t.Context(), h.js, cfg, broker.Partition{Number: 0, LastSlot: 31}, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	h.exec(t, `UPDATE outbox_partitions SET stream = $1`, s.Name)
	for _, id := range events {
		e := event.Event{ID: id, TenantID: 7, AggregateType: "follow", AggregateID: "1", Type: "created", Version: 1}
		if _, err := h.js.PublishMsg(t.Context(), &nats.Msg{Subject: e.Subject(cfg.Prefix, 0), Header: e.Headers(),
			Data: []byte(`{}`)}); err != nil {
			t.Fatal(err)
		}
	}
	page(t, h.signIn(t, h.Tokens.Reader), "/console/event?q="+s.Name+":2").says("Pending", events[1])
}

func TestAnArchivedAndAnExportedEventKeepTheirPath(t *testing.T) {
	t.Parallel()
	h := start(t)
	events := h.events0(t, 20)
	owner := h.db.Pool(t, postgres.RoleOwner)
	for _, sql := range []string{`UPDATE outbox_partitions SET floor_id = 50000000`,
		`UPDATE outbox_ranges SET settled_at = now() WHERE from_id = 1`, `SELECT outbox_range_archive(1, 0), outbox_range_index(1)`} {
		if _, err := owner.Exec(t.Context(), sql); err != nil {
			t.Fatal(sql, err)
		}
	}
	amy, max := h.signIn(t, h.Tokens.TenantAdmin), h.signIn(t, h.Tokens.Reader)
	page(t, amy, "/console/event?q="+events[6]).says("Published", "to EVENTS-0 at sequence 7", "Archived",
		"with the messages 1 to 50000000")
	page(t, amy, "/console/event?q=EVENTS-0:7").says(events[6])
	dir := t.TempDir()
	cold := coldstore.New(h.pool, "file://"+dir, func(context.Context, pgx.Tx) error { return nil }, nil, nil)
	t.Cleanup(func() { _ = cold.Close() })
	ranges, _, err := outbox.Ranges(t.Context(), h.pool)
	if err != nil {
		t.Fatal(err)
	}
	e, err := cold.Export(t.Context(), ranges[0])
	if err != nil {
		t.Fatal(err)
	}
	page(t, amy, "/console/event?q=7").says("Exported", "as "+e.ID)
	h.exec(t, `UPDATE outbox_ranges SET archived_at = archived_at - interval '200 days' WHERE from_id = 1`)
	if _, err := owner.Exec(t.Context(), `SELECT outbox_range_drop(1)`); err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{events[6], "7"} {
		gone := page(t, amy, "/console/event?q="+q).says("No such event", "Its range of ids was dropped",
			"An export may have it.").without(events[7])
		a := page(t, amy, gone.link("Search the export")).says("read from an export", "Published", "to EVENTS-0 at sequence 7", "Archived",
			"Exported", "Dropped", events[6]).without(`{&#34;n&#34;`)
		page(t, amy, a.link("Show the payload")).says(`{ "n": 7 }`)
	}
	page(t, max, "/console/event?q=1000&export=read").says("Its export does not have the event.")
	page(t, max, "/console/event?tenant=8&q=7&export=read").says("Its export does not have the event.").without(events[6])
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if a := max.get("/console/event?q=7&export=read"); a.status != http.StatusServiceUnavailable ||
		!strings.Contains(a.text(), "The export cannot be read") {
		t.Errorf("%d: %s", a.status, a.text())
	}
}
