package console_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"golang.org/x/net/html"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/console"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

var comment = kinds.Builtin().Children["comment"]

// desk is a harness with a store and with consumers that apply events on request.
type desk struct {
	*harness
	store *store.Store
	after int64 // id of the outbox message that was delivered last
}

func openDesk(t *testing.T, change ...func(*console.Config, *console.Deps)) *desk {
	t.Helper()
	h := start(t, change...)
	return &desk{harness: h, store: store.New(h.db.Pool(t, postgres.RoleAPI), nil)}
}

// deliver applies the outbox messages since the last call.
func (d *desk) deliver(t *testing.T) {
	t.Helper()
	rows, _ := d.pool.Query(t.Context(), `SELECT id, event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, event_version,
		occurred_at, payload FROM outbox_messages WHERE id > $1 ORDER BY id`, d.after)
	var events []event.Event
	var e event.Event
	if _, err := pgx.ForEachRow(rows, []any{&d.after, &e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.Type, &e.Version,
		&e.OccurredAt, &e.Payload}, func() error {
		events = append(events, e)
		e.Payload = nil
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, p := range []projections.Projection{followercounts.New(kinds.Builtin), threadcache.New(kinds.Builtin),
		history.New(kinds.Builtin)} {
		mine := slices.DeleteFunc(slices.Clone(events), func(e event.Event) bool { return !p.Wants(e.AggregateType) })
		if err := postgres.InTx(t.Context(), d.pool, pgx.TxOptions{},
			func(tx pgx.Tx) error { return p.Apply(t.Context(), tx, mine) }); err != nil {
			t.Fatal(p.Name(), err)
		}
	}
}

// write creates comments of an author under a post and returns their ids.
func (d *desk) write(t *testing.T, post, author event.ID, bodies ...string) (ids []string) {
	t.Helper()
	for _, body := range bodies {
		out, err := d.store.CreateChildren(t.Context(), tenant, comment,
			[]store.NewChild{{Meta: store.Meta{Actor: "service"}, Object: post, AuthorID: author, Body: body}})
		if err != nil || out[0].Err != nil {
			t.Fatal(err, out)
		}
		ids = append(ids, out[0].Child.ID)
	}
	return ids
}

func (d *desk) settings(t *testing.T, s store.ThreadSettings) {
	t.Helper()
	s.Actor = "service"
	if out, err := d.store.SetThreads(t.Context(), tenant, comment, []store.ThreadSettings{s}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
}

func (d *desk) report(t *testing.T, id, state, reason string) {
	t.Helper()
	out, err := d.store.ModerateChildren(t.Context(), tenant, comment,
		[]store.ChildModeration{{Meta: store.Meta{Actor: "spam-rule"}, ID: id, State: state, Reason: reason}})
	if err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
}

// states returns the states and versions of the children in the truth.
func (d *desk) states(t *testing.T, ids ...string) (all []string) {
	t.Helper()
	for _, id := range ids {
		c, err := d.store.GetChild(t.Context(), tenant, comment, id)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, fmt.Sprint(c.State(), " ", c.Version))
	}
	return all
}

// items returns the children in the page's list, with their versions.
func (a *answer) items() (all []string) {
	for n := range a.doc.Descendants() {
		if n.Type == html.ElementNode && n.Data == "input" && attr(n, "name") == "item" {
			all = append(all, attr(n, "value"))
		}
	}
	return all
}

// decide sends the form of the list.
func (r *reader) decide(from *answer, decide, reason string, items ...string) *answer {
	r.t.Helper()
	in := from.form("reason", reason, "decide", decide, "act_id", uuid.NewString())
	in["item"] = items
	return r.ended(r.post("/console/act/moderation.decide", in))
}

func (d *desk) acts(t *testing.T) (all []string) {
	t.Helper()
	acts, err := audit.List(t.Context(), d.pool, audit.Filter{}, 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range slices.Backward(acts) {
		all = append(all, fmt.Sprintf("%s by %s of %d, tenant %d: %s: %s", a.Name, a.TokenName, a.TokenTenant,
			a.TenantID, a.Target, a.Outcome))
	}
	return all
}

func TestModeratorsDecideOnWhatWaits(t *testing.T) {
	t.Parallel()
	var woken atomic.Int64
	d := openDesk(t, func(_ *console.Config, deps *console.Deps) { deps.Wake = func(int) { woken.Add(1) } })
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true, Title: "Rules"})
	held := d.write(t, "5", "1", "first", "second", "third")
	seen := d.write(t, "6", "2", "reported words", "other words")
	d.report(t, seen[0], event.ModerationPending, "links: 9")
	d.deliver(t)
	max := d.signIn(t, d.Tokens.TenantModerator)
	queue := page(t, max, "/console/moderation?tenant=8") // shows its own tenant instead
	queue.says("first", "second", "third", "reported words", "reported by spam-rule", "links: 9", "held since it was written",
		"comments 4 pending").without("other words")
	if want := []string{held[0] + "@1", held[1] + "@1", held[2] + "@1", seen[0] + "@2"}; !slices.Equal(queue.items(), want) {
		t.Errorf("the queue is %v, want %v", queue.items(), want)
	}
	max.decide(queue, "approve", "", held[0]+"@1").says("Give a reason")
	max.decide(queue, "approve", "fine", held[0]+"@1", held[1]+"@1", held[2]+"@7").says("done",
		"Approved 2 comments. 1 comment changed since you opened the page")
	queue = page(t, max, "/console/moderation") // the projection is behind
	if want := []string{held[2] + "@1", seen[0] + "@2"}; !slices.Equal(queue.items(), want) {
		t.Errorf("the queue is then %v, want %v", queue.items(), want)
	}
	queue.says("2 more: somebody decided on them a moment ago")
	max.decide(queue, "hold", "undo", held[0]+"@2").says("Held 1 comment")
	max.decide(queue, "remove", "spam", seen[0]+"@2").says("Removed 1 comment")
	d.deliver(t)
	page(t, max, "/console/moderation?list=removed").says("reported words", "removed by max", "spam")
	page(t, max, "/console/moderation?author=1&object=5").says("first", "third", "“Rules”", "premoderated").without("second")
	page(t, max, "/console/moderation-threads").says("5", "2", "Rules", "premoderated")
	page(t, max, "/console/decisions").says("max", "pending", "removed", "spam", "spam-rule", "links: 9", "undo")
	if got, want := d.states(t, append(held, seen...)...),
		[]string{"PENDING 3", "VISIBLE 2", "PENDING 1", "REMOVED 3", "VISIBLE 1"}; !slices.Equal(got, want) {
		t.Errorf("states %v, want %v", got, want)
	}
	if n := woken.Load(); n < 3 {
		t.Errorf("the relay is woken %d times by three decisions", n)
	}
	if diff := cmp.Diff([]string{
		"moderation.decide by max of 7, tenant 7: approve 3 comments: Approved 2 comments. " +
			"1 comment changed since you opened the page: reload it.",
		"moderation.decide by max of 7, tenant 7: hold comment " + held[0] + ": Held 1 comment.",
		"moderation.decide by max of 7, tenant 7: remove comment " + seen[0] + ": Removed 1 comment.",
	}, d.acts(t)); diff != "" {
		t.Errorf("the audit log (-want +got):\n%s", diff)
	}
}

func TestModeratorsDecideOnAllOfAnAuthorInSlices(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true})
	kept := d.write(t, "5", "2", "of another author")
	if _, err := d.db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`INSERT INTO children_comment (tenant_id, child_id, object_id, slug, path, author_id, body, moderation_state, created_at)
	  SELECT 7, ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 5, lpad(n::text, 8, 'x'), lpad(n::text, 22, '0'), 1,
	  'spam ' || n, 'PENDING', now() - interval '1 hour' FROM generate_series(1, 450) n`); err != nil {
		t.Fatal(err)
	}
	for e, err := range threadcache.New(kinds.Builtin).Truth(t.Context(), d.pool) {
		if err == nil {
			err = postgres.InTx(t.Context(), d.pool, pgx.TxOptions{},
				func(tx pgx.Tx) error { return threadcache.New(kinds.Builtin).Apply(t.Context(), tx, []event.Event{e}) })
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	mo := d.signIn(t, d.Tokens.Moderator)
	page(t, mo, "/console/moderation").says("Choose a tenant")
	list := page(t, mo, "/console/moderation?tenant=7&author=1")
	link := list.link("Decide on all that match")
	late := d.write(t, "5", "1", "written after the page")
	d.deliver(t)
	page(t, mo, link).says("all pending comments of author 1", "Items in the list now: 451", "slices")
	mo.act(link, "decide", "Hold").says("The items are pending already")
	mo.act(link, "decide", "Remove").says("Removed 450 comments.")
	var removed int
	if err := d.pool.QueryRow(t.Context(), `SELECT count(*) FROM children_comment
		WHERE moderation_state = 'REMOVED' AND version = 2`).Scan(&removed); err != nil || removed != 450 {
		t.Errorf("%d removed, %v", removed, err)
	}
	if got := d.states(t, kept[0], late[0]); !slices.Equal(got, []string{"PENDING 1", "PENDING 1"}) {
		t.Errorf("the others are %v", got)
	}
	events := 0
	if err := d.pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE event_type = 'moderated'
		AND payload ->> 'actor' = 'mo' AND payload ->> 'reason' = 'because the test says so'`).Scan(&events); err != nil || events != 450 {
		t.Errorf("%d events, %v", events, err)
	}
}

func TestThreadSwitchesAndRolesOfModeration(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.write(t, "5", "1", "words of 5")[0]
	d.report(t, id, event.ModerationPending, "rule 3")
	d.deliver(t)
	max, rita := d.signIn(t, d.Tokens.TenantModerator), d.signIn(t, d.Tokens.TenantReader)
	link := page(t, max, "/console/moderation?object=5").link("Change settings")
	form := page(t, max, link).form("reason", "too hot", "title", "Cool down")
	form["on"] = []string{"locked"}
	path := strings.SplitN(link, "?", 2)[0]
	max.ended(max.post(path, form)).says("done", "Locked: yes. Premoderated: no. The settings are at version 1.")
	form.Set("act_id", uuid.NewString())
	max.ended(max.post(path, form)).says("failed", "Somebody changed the settings meanwhile: they are at version 1")
	d.deliver(t)
	page(t, max, "/console/moderation?object=5").says("locked", "Cool down")
	page(t, max, "/console/inspect?kind=comment&id=5").says("Cool down", "max", "locked yes").without("words of 5")

	page(t, rita, "/console/moderation").says("rule 3", "Bodies are for tokens with the role moderate").without("words of 5",
		`name="item"`, "moderation.decide")
	page(t, rita, "/console/inspect?kind=comment&id="+id+
		"&payload=show").says("The body is for tokens with the role moderate").without("words of 5")
	page(t, max, "/console/inspect?kind=comment&id="+id).says("Show the payload", "rule 3").without("words of 5")
	page(t, max, "/console/inspect?kind=comment&id="+id+"&payload=show").says("words of 5")
	for _, act := range []string{"moderation.decide", "moderation.decide_all", "thread.settings"} {
		if a := rita.post("/console/act/"+act, url.Values{"act_id": {uuid.NewString()}, "reason": {"r"}, "decide": {"remove"},
			"item": {id + "@2"}, "kind": {"comment"}, "object": {"5"}}); a.status != http.StatusForbidden {
			t.Errorf("a reader does %s: %d", act, a.status)
		}
	}
	for name, in := range map[string]url.Values{
		"no decision": {"item": {id + "@2"}}, "an unknown one": {"item": {id + "@2"}, "decide": {"erase"}}, "no item": {"decide": {"hide"}},
		"an item without a version":    {"item": {id}, "decide": {"hide"}},
		"a kind that nobody moderates": {"item": {id + "@2"}, "decide": {"hide"}, "kind": {"like"}},
		"a reason of two lines":        {"item": {id + "@2"}, "decide": {"hide"}, "reason": {"a\nb"}},
	} {
		form := url.Values{"act_id": {uuid.NewString()}, "reason": {"r"}}
		for k, v := range in {
			form[k] = v
		}
		if a := max.post("/console/act/moderation.decide", form); a.status != http.StatusUnprocessableEntity && name != "no decision" {
			t.Errorf("%s: %d: %s", name, a.status, a.text())
		}
	}
	for _, query := range []string{"list=x", "object=a,b", "author=..", "kind=like", "after=x", "after=2026-01-01T00:00:00.000000Z/x"} {
		if a := max.get("/console/moderation?" + query); a.status != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d", query, a.status)
		}
	}
	if got := d.states(t, id); got[0] != "PENDING 2" {
		t.Errorf("the comment is %v", got)
	}
}

// fill writes n pending comments of one post, and as many versions in another history, to the truth
// and the projection.
func (d *desk) fill(t *testing.T, n int) {
	t.Helper()
	owner := d.db.Pool(t, postgres.RoleOwner)
	for _, sql := range []string{
		`INSERT INTO children_comment (tenant_id, child_id, object_id, slug, path, author_id, body,
			moderation_state, created_at, updated_at)
		 SELECT 7, ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 5, lpad(n::text, 8, '0'), lpad(n::text, 22, '0'),
		 1 + n % 1000, 'body ' || n, 'PENDING',
		        '2026-01-01'::timestamptz + n * interval '1 second', '2026-01-01'::timestamptz + n * interval '1 second'
		        FROM generate_series(1, $1::int) n`,
		`INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body, author_state, moderation_state,
			version, created_at, updated_at, visible, shown)
		 SELECT tenant_id, 'comment', child_id, object_id, slug, path, author_id, body, author_state, moderation_state, version, created_at,
		 updated_at, false, false FROM children_comment WHERE object_id = '5' AND $1::int > 0`,
		`INSERT INTO child_totals (tenant_id, kind, object_id, total) VALUES (7, 'comment', 5, $1::int)`,
	} {
		if _, err := owner.Exec(t.Context(), sql, n); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := owner.Exec(t.Context(), "ANALYZE children_comment, child_lists"); err != nil {
		t.Fatal(err)
	}
}

// fast opens each page that shows the large thread, at its beginning and deep inside. They take
// about a tenth of slow.
func fast(t *testing.T, d *desk) {
	t.Helper()
	max := d.signIn(t, d.Tokens.TenantModerator)
	last := "00000000-0000-7000-8000-000000050000"
	for path, says := range map[string]string{
		"/console/moderation": "more than 10,000 pending", "/console/moderation?author=17&object=5": "body 16",
		"/console/moderation?object=5&after=" + url.QueryEscape("2026-01-01T13:53:20.000000Z/"+last): "body 50001",
		"/console/moderation-threads": "1,000 or more", "/console/inspect?kind=comment&id=5": "same",
		"/console/inspect?kind=comment&id=5&after=" + fmt.Sprintf("%022d", 50000):                     "same",
		"/console/inspect?kind=comment&id=" + last:                                                    "pending",
		"/console/inspect?kind=user&id=17":                                                            "pending comments",
		"/console/act/moderation.decide_all?kind=comment&author=17&until=2026-01-01T00:00:00.000000Z": "of author 17",
	} {
		a := quickPage(t, max, path).says(says)
		if strings.Contains(a.text(), "differs") && !strings.Contains(path, last) { // last has no history
			t.Errorf("%s: %.1000s", path, a.text())
		}
	}
}

// TestModeratorsDecideOnChildrenWithoutReplies uses the queue of another kind than comments.
func TestModeratorsDecideOnChildrenWithoutReplies(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	review, by := kinds.Builtin().Children["review"], store.Meta{Actor: "service"}
	if out, err := d.store.SetThreads(t.Context(), tenant, review,
		[]store.ThreadSettings{{Meta: by, Object: "5", Premoderated: true}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	out, err := d.store.CreateChildren(t.Context(), tenant, review, []store.NewChild{{Meta: by, Object: "5", AuthorID: "1",
		Body: "good value", Attributes: []byte(`{"rating":4}`)}, {Meta: by, Object: "5", AuthorID: "2", Body: "advertising",
		Attributes: []byte(`{"rating":5}`)}})
	if err != nil || out[1].Err != nil {
		t.Fatal(err, out)
	}
	good, bad := out[0].Child.ID, out[1].Child.ID
	d.deliver(t)
	max := d.signIn(t, d.Tokens.TenantModerator)
	page(t, max, "/console/moderation").says("comments 0 pending", "messages 0 pending", "reviews 2 pending")
	queue := page(t, max, "/console/moderation?kind=review").says("good value", "advertising", "held since it was written")
	max.decide(queue, "approve", "fine", good+"@1").says("Approved 1 review")
	max.decide(queue, "remove", "advertising", bad+"@1").says("Removed 1 review")
	d.deliver(t)
	page(t, max, "/console/moderation?kind=review&list=removed").says("removed by max", "advertising").without("good value")
	for id, want := range map[string]string{good: "VISIBLE", bad: "REMOVED"} {
		if c, err := d.store.GetChild(t.Context(), tenant, review, id); err != nil || c.State() != want {
			t.Errorf("%+v, %v, want %s", c, err, want)
		}
	}
	if diff := cmp.Diff([]string{
		"moderation.decide by max of 7, tenant 7: approve review " + good + ": Approved 1 review.",
		"moderation.decide by max of 7, tenant 7: remove review " + bad + ": Removed 1 review.",
	}, d.acts(t)); diff != "" {
		t.Errorf("the audit log (-want +got):\n%s", diff)
	}
}
