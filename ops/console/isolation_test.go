package console_test

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// eight describes tenant 8, which is not the harness's tenant. All its rows contain its secret.
type eight struct {
	child, event, group, act string
	outbox, waiting          int64
}

const (
	secret8 = "only-of-eight"
	letter8 = 900_001
)

// populate8 inserts rows of tenant 8 into every table.
func (d *desk) populate8(t *testing.T) (e eight) {
	t.Helper()
	ctx, meta := t.Context(), store.Meta{Actor: secret8}
	if _, err := d.store.SetThreads(ctx, 8, comment, []store.ThreadSettings{{Meta: meta, Object: "88", Premoderated: true,
		Title: secret8}}); err != nil {
		t.Fatal(err)
	}
	made, err := d.store.CreateChildren(ctx, 8, comment,
		[]store.NewChild{{Meta: meta, Object: "88", AuthorID: "81", Body: secret8},
			{Meta: meta, Object: "88", AuthorID: "81", Body: secret8}})
	if err != nil {
		t.Fatal(err)
	}
	e.child = made[0].Child.ID
	if out, err := d.store.ModerateChildren(ctx, 8, comment,
		[]store.ChildModeration{{Meta: meta, ID: made[1].Child.ID, State: event.ModerationRemoved, Reason: secret8}}); err != nil ||
		out[0].Err != nil {
		t.Fatal(err, out)
	}
	if _, err := d.store.PutEdges(ctx, 8, kinds.Builtin().Edges["follow"],
		[]store.EdgeWrite{{Meta: meta, From: "81", To: "82"}}); err != nil {
		t.Fatal(err)
	}
	d.deliver(t)
	d.bury(t, letter8, 2, 8, secret8, "")
	d.exec(t, `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
		event_id, event_type, event_version, headers, payload, error, cause)
		SELECT 'threadcache', 8, 'EVENTS-0', 8, 'comment', 88, gen_random_uuid(), 'created', 1, '{}', convert_to($1, 'UTF8'), $1, $1`,
		secret8)
	d.exec(t, `INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, reason, total, worker, lease_until)
		VALUES ($1, 8, 'retry', '{}', $2, $2, 9, 'other', 'infinity')`, operation8, secret8)
	d.exec(t, `INSERT INTO erasures (tenant_id, author_id, requested_by, reason) VALUES (8, 81, $1, $1)`, secret8)
	d.exec(t, `INSERT INTO consumer_pauses (consumer_name, actor, reason) VALUES ('threadcache', $1, $1)`, secret8)
	if _, err := outbox.AddHold(ctx, d.pool, outbox.ArchiveHold{TenantID: 8, CreatedBy: secret8, Reason: secret8}); err != nil {
		t.Fatal(err)
	}
	if _, err := tokens.Create(ctx, d.pool, 8, secret8, []string{tokens.RoleRead}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	a := audit.Act{ActID: uuid.New(), TenantID: 8, TokenTenant: 8, TokenName: secret8, Fingerprint: "0123456789ab", Name: "token.create",
		Target: secret8, Reason: secret8}
	if _, _, err := audit.Begin(ctx, d.pool, a); err != nil {
		t.Fatal(err)
	}
	e.act = a.ActID.String()
	if err := d.pool.QueryRow(ctx, `SELECT id, event_id::text FROM outbox_messages WHERE tenant_id = 8 AND payload ->> 'body' = $1
		ORDER BY id LIMIT 1`, secret8).Scan(&e.outbox, &e.event); err != nil {
		t.Fatal(err)
	}
	if err := d.pool.QueryRow(ctx, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts,
		last_error, available_at) VALUES (8, 'comment', '88', 'created', '{}', 3, $1, now() + interval '1 h') RETURNING id`,
		secret8).Scan(&e.waiting); err != nil {
		t.Fatal(err)
	}
	if err := d.pool.QueryRow(ctx, `SELECT group_id::text FROM outbox_messages_dlq WHERE id = $1`, letter8).Scan(&e.group); err != nil {
		t.Fatal(err)
	}
	d.exec(t, `INSERT INTO dead_letter_notes (tenant_id, group_id, note, actor) VALUES (8, $1, $2, $2), (0, $1, $2, $2)`, e.group, secret8)
	return e
}

const operation8 = "00000000-0000-4000-8000-000000000008"

// pages returns queries that try to read tenant 8, for every page of the registry.
func (e eight) pages() map[string][]string {
	return map[string][]string{
		"/console/day": {""},
		"/console/":    {""}, "/console/kinds": {""}, "/console/doctor": {""}, "/console/partitions": {""}, "/console/consumers": {""},
		"/console/archive": {""}, "/console/erasure": {""},
		"/console/event": {"q=" + e.event + "&payload=show", fmt.Sprintf("q=%d&payload=show", e.outbox), "q=comment/88",
			"", "type=created", "kind=comment&state=pending", fmt.Sprint("payload=show&q=", e.waiting),
			fmt.Sprintf("q=%d&payload=show", letter8)},
		"/console/retrying":               {""},
		"/console/dead-letters":           {"", "q=only"},
		"/console/dead-letters/letters":   {"source=outbox&group=" + e.group, "source=consumers", "source=outbox"},
		"/console/dead-letters/letter":    {fmt.Sprintf("source=outbox&payload=show&id=%d", letter8), "source=consumers&payload=show&id=1"},
		"/console/dead-letters/operation": {"source=outbox&id=" + operation8},
		"/console/inspect": {"kind=comment&payload=show&id=" + e.child, "kind=comment&id=88", "kind=user&id=81",
			"kind=follow&id=81&to=82"},
		"/console/moderation":         {"", "list=removed", "object=88", "author=81"},
		"/console/moderation-threads": {""}, "/console/decisions": {""}, "/console/tokens": {""},
		"/console/audit": {"", "who=" + secret8[:4]},
	}
}

// forms returns input that tries to change tenant 8, for every act of the registry.
func (e eight) forms() map[string]url.Values {
	key := fmt.Sprintf(`{"Type":"comment","TenantID":8,"Aggregate":"88","Child":%q}`, e.child)
	form := func(pairs ...string) url.Values {
		in := url.Values{"tenant": {"8"}}
		for i := 0; i < len(pairs); i += 2 {
			in.Set(pairs[i], pairs[i+1])
		}
		return in
	}
	letter := fmt.Sprint(letter8)
	return map[string]url.Values{
		"dead_letter.retry": form("source", "outbox", "id", letter), "dead_letter.discard": form("source", "outbox", "id", letter),
		"dead_letter.stop":      form("source", "outbox", "operation", operation8),
		"dead_letter.note":      form("source", "outbox", "group", e.group, "note", "mine"),
		"message.retry":         form("id", fmt.Sprint(e.waiting)),
		"message.kill":          form("id", fmt.Sprint(e.waiting)),
		"moderation.decide":     form("kind", "comment", "item", e.child+"@1", "decide", "remove"),
		"moderation.decide_all": form("kind", "comment", "list", "pending", "decide", "approve", "until", "2099-01-01T00:00:00.000000Z"),
		"moderation.undo":       form("act", e.act),
		"thread.settings":       form("kind", "comment", "object", "88", "on", "locked"),
		"inspect.repair":        form("projection", "threadcache", "key", key), "consumer.pause": form("consumer", "archiver"),
		"consumer.resume": form("consumer", "threadcache"), "consumer.verify": form("consumer", "archiver"),
		"kinds.apply":     form("file", "objects: {only: onlys}"),
		"consumer.replay": form("consumer", "archiver"), "hold.add": form(), "hold.release": form("hold", "1"),
		"erasure.count": form("author", "81"), "erasure.start": form("author", "81"),
		"token.create": form("name", secret8+"2", "roles", "read"), "token.rotate": form("name", secret8, "overlap", "0"),
		"token.revoke": form("name", secret8),
	}
}

// digests returns digests of all rows of tenant 8 and of the installation.
func (d *desk) digests(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, table := range []string{"outbox_messages", "outbox_messages_dlq", "outbox_dlq_operations", "dead_letter_notes",
		"consumer_dead_letters", "child_lists", "child_settings", "children_comment", "threads", "edges_follow",
		"api_tokens", "operator_acts", "erasures"} {
		where := ` WHERE tenant_id IN (0, 8)`
		var digest string
		if err := d.pool.QueryRow(t.Context(), `SELECT count(*) || ' rows, ' || coalesce(md5(string_agg(r::text, ';' ORDER BY r::text)), '')
			FROM `+table+` r`+where).Scan(&digest); err != nil {
			t.Fatal(err)
		}
		all[table] = digest
	}
	all["outbox_archive_holds"] = fmt.Sprint(d.count(t, `SELECT count(*) FROM outbox_archive_holds WHERE released_at IS NULL`))
	all["consumer_pauses"] = fmt.Sprint(d.count(t, `SELECT count(*) FROM consumer_pauses`))
	return all
}

func TestATenantSeesAndChangesNothingOfAnother(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	e := d.populate8(t)
	ada := d.signIn(t, d.Tokens.Admin)
	readers := map[string]*reader{"a reader": d.signIn(t, d.Tokens.TenantReader), "a moderator": d.signIn(t, d.Tokens.TenantModerator),
		"an admin": d.signIn(t, d.Tokens.TenantAdmin)}
	pages := e.pages()
	// These pages show no rows of a tenant.
	nothing := []string{"/console/", "/console/day", "/console/kinds", "/console/doctor", "/console/partitions"}
	for _, p := range d.console.Pages() {
		queries, ok := pages[p.Path]
		if !ok {
			t.Errorf("%s has no line in eight.pages", p.Path)
		}
		seen := slices.Contains(nothing, p.Path)
		for _, q := range queries {
			path := p.Path + "?tenant=8&" + q
			seen = seen || strings.Contains(ada.get(path).body, secret8)
			for who, r := range readers {
				if a := r.get(path); strings.Contains(strings.ReplaceAll(a.body, `value="`+secret8[:4], ""), secret8) || a.status >= 500 {
					t.Errorf("%s of tenant 7 gets %d from %s: %s", who, a.status, path, a.text())
				}
			}
		}
		if !seen {
			t.Errorf("%s shows an operator no row of tenant 8, so this test proves nothing", p.Path)
		}
	}
	for who, r := range readers {
		if a := r.get("/console/acts/" + e.act); a.status != http.StatusNotFound {
			t.Errorf("%s gets another tenant's act: %d", who, a.status)
		}
		if a := r.get("/console/audit.ndjson?tenant=8"); strings.Contains(a.body, secret8) {
			t.Errorf("%s exports another tenant's acts", who)
		}
	}

	before, forms := d.digests(t), e.forms()
	amy := readers["an admin"]
	for _, name := range d.console.Acts() {
		in, ok := forms[name]
		if !ok {
			t.Errorf("%s has no line in eight.forms", name)
		}
		in.Set("act_id", uuid.NewString())
		in.Set("reason", "because the test says so")
		for _, r := range []*reader{ada, amy} { // a GET of the form does not act
			if a := r.get("/console/act/" + name + "?" + in.Encode()); a.status >= 500 || strings.Contains(a.path, "/console/acts/") {
				t.Errorf("%s by GET: %d at %s", name, a.status, a.path)
			}
		}
		a := amy.post("/console/act/"+name, in)
		if a.status >= 500 || strings.Contains(a.body, secret8) && !strings.Contains(name, "token.") {
			t.Errorf("%s on tenant 8's: %d: %s", name, a.status, a.text())
		}
	}
	if diff := cmp.Diff(before, d.digests(t)); diff != "" {
		t.Errorf("an admin of tenant 7 changed tenant 8 (-before +after):\n%s", diff)
	}
	if n := d.count(t, `SELECT count(*) FROM operator_acts WHERE tenant_id <> 7 AND act_id::text <> $1`, e.act); n != 0 {
		t.Errorf("the audit log has %d acts outside tenant 7", n)
	}
}

// Payloads may contain hidden or removed text. The API gives payloads to admins only.
func TestPayloadsAreForModeratorsAndAdmins(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.write(t, "5", "1", "the words")
	d.bury(t, 900_001, 1, tenant, "too large", "the words")
	id := d.count(t, `SELECT id FROM outbox_messages`)
	for token, may := range map[string]bool{d.Tokens.TenantReader: false, d.Tokens.Reader: false, d.Tokens.TenantModerator: true,
		d.Tokens.TenantAdmin: true} {
		r := d.signIn(t, token)
		for _, path := range []string{fmt.Sprintf("/console/event?q=%d", id), "/console/dead-letters/letter?source=outbox&id=900001"} {
			if shown := strings.Contains(page(t, r, path+"&payload=show").text(), `"the words"`); shown != may {
				t.Errorf("%s: the payload is shown: %t, want %t", path, shown, may)
			}
			if may {
				page(t, r, page(t, r, path).link("Show the payload")).says("the words")
			} else {
				page(t, r, path).says("The payload is for tokens with the role moderate or admin.").without("payload=show")
			}
		}
	}
}

func TestTheAuditLogSaysWhatWasMendedNotWhatTheFormSays(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.write(t, "5", "1", "words")[0]
	d.deliver(t)
	amy := d.signIn(t, d.Tokens.TenantAdmin)
	amy.ended(amy.post("/console/act/inspect.repair", url.Values{"act_id": {uuid.NewString()}, "reason": {"r"},
		"projection": {"threadcache"}, "entity": {"something else"},
		"key": {fmt.Sprintf(`{"Type":"comment","TenantID":7,"Aggregate":"5","Child":%q}`, id)}})).says("done").without("something else")
	acts, err := audit.List(t.Context(), d.pool, audit.Filter{}, 1)
	if err != nil || len(acts) != 1 || !strings.Contains(acts[0].Target, id) || strings.Contains(acts[0].Target, "something else") {
		t.Errorf("%+v, %v", acts, err)
	}
}

func TestATenantLeavesLivePagesToOthers(t *testing.T) {
	t.Parallel()
	h := start(t)
	rita := h.signIn(t, h.Tokens.TenantReader)
	refused := 0
	for i := range 70 {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet,
			fmt.Sprintf("%s/console/live/dead-letters/operation?source=outbox&id=%s&n=%d", h.url, operation8, i), nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := rita.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode == http.StatusServiceUnavailable {
			refused++
		}
	}
	if refused == 0 {
		t.Error("the hub reads 70 different live pages for one tenant")
	}
	next, stop := events(t, h.signIn(t, h.Tokens.Reader), "/console/live/overview")
	defer stop()
	if got := next(); !strings.Contains(got, "Pending") {
		t.Errorf("an operator's live page: %s", got)
	}
}

func TestAFormThatIsCanceledLeadsBack(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.bury(t, 1, 1, tenant, "too large", "")
	amy := h.signIn(t, h.Tokens.TenantAdmin)
	from := "/console/tokens?all=yes"
	form := page(t, amy, page(t, amy, from).link("Create a token"))
	if got := form.link("Cancel"); got != from {
		t.Errorf("Cancel leads to %s, want %s", got, from)
	}
	for _, back := range []string{"https://evil.example/console/", "//evil.example/console/", "/v1/users", "/console/../v1/users",
		"javascript:alert(1)"} {
		if got := page(t, amy, "/console/act/token.create?back="+url.QueryEscape(back)).link("Cancel"); got != "/console/tokens" {
			t.Errorf("with back=%s Cancel leads to %s", back, got)
		}
	}
	letter := page(t, amy, "/console/dead-letters/letter?source=outbox&id=1")
	if a := amy.get(amy.act(letter.link("Discard")).says("Discarded 1").link("Back")); a.status != http.StatusOK {
		t.Errorf("Cancel on a letter that no longer exists: %d at %s", a.status, a.path)
	}
}
