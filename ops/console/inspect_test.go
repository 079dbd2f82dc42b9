package console_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/uuid"
	"golang.org/x/net/html"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

func (d *desk) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := d.db.Pool(t, postgres.RoleOwner).Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func TestTheInspectorMarksWhatDiffersAndMendsIt(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	follow := kinds.Builtin().Edges["follow"]
	if out, err := d.store.PutEdges(t.Context(), tenant, follow,
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "ann"}, From: "1", To: "2"},
			{Meta: store.Meta{Actor: "ann"}, From: "1", To: "3"}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	ids := d.write(t, "5", "1", "one", "two", "three")
	uuidPost := event.ID("0b6F3f6e-2c4e-4b1c-9a53-7d0f6d1f2a90") // a UUID may be the id of a child or of its object
	d.write(t, uuidPost, "auth0|ann", "four")
	d.report(t, ids[1], event.ModerationHidden, "links")
	liked := event.ID(ids[0])
	if out, err := d.store.PutEdges(t.Context(), tenant, kinds.Builtin().Edges["like_comment"],
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "ann"}, From: "1", To: liked}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	d.deliver(t)
	amy, max := d.signIn(t, d.Tokens.TenantAdmin), d.signIn(t, d.Tokens.TenantModerator)
	pages := []string{"kind=user&id=1", "kind=follow&id=1&to=2", "kind=follow&id=1", "kind=comment&id=" + ids[1],
		"kind=comment&id=" + ids[0], "kind=like_comment&id=1&to=" + ids[0], "kind=comment&id=5", "kind=post&id=5"}
	for _, query := range pages {
		page(t, amy, "/console/inspect?"+query).says("same").without("differs", "inspect.repair")
	}
	page(t, amy, "/console/inspect?kind=follow&id=1&to=2").says("follow from user 1 to user 2", "ann", "active", "wrote version 1 by ann",
		"archiver: history of follow 1/2")
	page(t, amy, "/console/inspect?kind=comment&id="+ids[0]).says("like_comment: counts of comment "+ids[0],
		"likers 1", "vote: counts of comment")
	page(t, amy, "/console/inspect?kind=comment&id="+uuidPost.String()).says("comments of post "+uuidPost.String(),
		"same").without("differs")
	page(t, amy, "/console/inspect?kind=comment&id="+ids[1]).says("spam-rule", "links", "hidden", "service", "visible")

	d.exec(t, `DELETE FROM edge_lists WHERE to_id = '2'`)
	d.exec(t, `UPDATE edge_counts SET outgoing = 9 WHERE object_id = '1'`)
	d.exec(t, `UPDATE child_lists SET version = 4, body = 'wrong' WHERE child_id = '`+ids[0]+`'`)
	d.exec(t, `UPDATE edge_counts SET incoming = 5 WHERE object_id = '`+ids[0]+`'`)
	d.exec(t, `UPDATE child_totals SET total = 8`)
	d.exec(t, `DELETE FROM comment_history WHERE comment_id = '`+ids[2]+`'`)
	for query, says := range map[string][]string{
		"kind=user&id=1": {"following 2 9 differs"}, "kind=follow&id=1&to=2": {"Projection: absent"},
		"kind=follow&id=1":          {"the projection lacks it"},
		"kind=comment&id=5":         {"total 3 8 differs", "version 1 | 4", "body 3 bytes | 5 different bytes"},
		"kind=comment&id=" + ids[0]: {"version 1 4 differs", "likers 1 5 differs"},
		"kind=comment&id=" + ids[2]: {"Projection: absent", "No history is recorded here"},
	} {
		page(t, amy, "/console/inspect?"+query).says(says...)
		page(t, max, "/console/inspect?"+query).without("inspect.repair")
	}
	for _, query := range []string{"kind=follow&id=1&to=2", "kind=user&id=1", "kind=comment&id=5",
		"kind=comment&id=" + ids[2], "kind=comment&id=" + ids[0]} {
		for n := 0; ; n++ {
			a := page(t, amy, "/console/inspect?"+query)
			if !strings.Contains(a.body, "inspect.repair") {
				break
			}
			if n == 3 {
				t.Fatalf("%s still differs: %s", query, a.text())
			}
			amy.act(a.link("Repair")).says("done", "Set to the state in the truth")
		}
	}
	for _, query := range pages {
		page(t, amy, "/console/inspect?"+query).says("same").without("differs")
	}
	if !slices.ContainsFunc(d.acts(t), func(s string) bool {
		return strings.HasPrefix(s, "inspect.repair by amy of 7, tenant 7: threadcache: comment")
	}) {
		t.Errorf("the audit log: %q", d.acts(t))
	}
}

func TestTheInspectorKeepsTenantsApartAndSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.write(t, "5", "1", "words")[0]
	d.deliver(t)
	ada, amy := d.signIn(t, d.Tokens.Admin), d.signIn(t, d.Tokens.TenantAdmin)
	page(t, ada, "/console/inspect?tenant=8&kind=comment&id="+id).says("Neither the truth nor a projection has it")
	page(t, ada, "/console/inspect?tenant=7&kind=comment&id="+id).says("same")
	page(t, amy, "/console/inspect?tenant=8&kind=comment&id="+id).says("same") // shows its own tenant instead
	page(t, amy, "/console/inspect").says("Choose an entity")
	key := func(tenant int, child string) string {
		return fmt.Sprintf(`{"Type":"comment","TenantID":%d,"Aggregate":"5","Child":%q}`, tenant, child)
	}
	for name, c := range map[string]struct {
		projection, key string
		status          int
	}{
		"another tenant": {"threadcache", key(8, id), http.StatusNotFound},
		"no projection":  {"x", key(7, id), http.StatusUnprocessableEntity}, "no key": {"threadcache", "x", http.StatusUnprocessableEntity},
		"a child that is none": {"threadcache", key(7, "x"), http.StatusUnprocessableEntity},
		"its own":              {"threadcache", key(7, id), http.StatusOK},
	} {
		if a := amy.post("/console/act/inspect.repair", url.Values{"act_id": {uuid.NewString()}, "reason": {"r"},
			"projection": {c.projection}, "key": {c.key}}); a.status != c.status {
			t.Errorf("%s: %d, want %d: %s", name, a.status, c.status, a.text())
		}
	}
	for _, query := range []string{"kind=comment&id=a,b", "kind=follow&id=a,b", "kind=follow&id=1&to=a,b", "kind=nothing&id=1",
		"kind=follow&id=1&after=a,b", "kind=user&id=.."} {
		if a := amy.get("/console/inspect?" + query); a.status != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d", query, a.status)
		}
	}
}

// printed returns the payloads that are valid as an actor, a reason and a title.
func printed() (all []string) {
	for _, p := range payloads() {
		all = append(all, strings.Map(func(r rune) rune {
			if !unicode.IsPrint(r) {
				return -1
			}
			return r
		}, p))
	}
	return all
}

// plant writes every payload as a body, an actor, a reason, a title and a slug.
func (d *desk) plant(t *testing.T) (ids []string) {
	t.Helper()
	ids = d.write(t, "5", "1", printed()...)
	for i, p := range printed() {
		d.settings(t, store.ThreadSettings{Object: event.IDOf(100 + i), Title: p, Premoderated: true})
		d.write(t, event.IDOf(100+i), "1", p)
		meta := store.Meta{Actor: p}
		for _, state := range []string{event.ModerationPending, event.ModerationHidden, event.ModerationPending}[:1+2*(i%2)] {
			if out, err := d.store.ModerateChildren(t.Context(), tenant, comment,
				[]store.ChildModeration{{Meta: meta, ID: ids[i], State: state, Reason: p}}); err != nil || out[0].Err != nil {
				t.Fatal(p, err, out)
			}
		}
	}
	d.deliver(t)
	d.exec(t, `UPDATE children_comment SET slug = left(body, 40) || child_id WHERE object_id = '5'`)
	return ids
}

// hostile returns the pages that show text of people.
func hostile(ids []string) []string {
	all := []string{"/console/moderation", "/console/moderation?author=1&after=" +
		url.QueryEscape("2000-01-01T00:00:00.000000Z/"+uuid.Nil.String()), "/console/moderation?object=101", "/console/moderation-threads",
		"/console/decisions", "/console/inspect?kind=comment&id=5",
		"/console/inspect?kind=comment&id=102", "/console/audit", "/console/act/thread.settings?kind=comment&object=103"}
	for _, id := range ids[:6] {
		all = append(all, "/console/inspect?payload=show&kind=comment&id="+id)
	}
	for _, p := range printed() {
		q := url.QueryEscape(p)
		all = append(all, "/console/audit?q="+q+"&who="+q, "/console/inspect?kind="+q+"&tenant="+q+"&id=x")
	}
	return all
}

func TestNothingThatPeopleWriteRuns(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	ids := d.plant(t)
	max := d.signIn(t, d.Tokens.TenantModerator)
	queue := page(t, max, "/console/moderation")
	in := queue.form("reason", printed()[0], "decide", "approve")
	in["item"] = queue.items()[:1]
	max.ended(max.post("/console/act/moderation.decide", in)).says("done", printed()[0])
	seen := ""
	for _, path := range hostile(ids) {
		a := max.get(path)
		if a.status == http.StatusOK {
			seen += a.text()
		}
		for n := range a.doc.Descendants() {
			if n.Type != html.ElementNode {
				continue
			}
			if strings.HasPrefix(attr(n, "id"), "X") {
				t.Errorf("%s has a payload's markup: %s", path, attr(n, "id"))
			}
			if n.Data == "script" && n.FirstChild != nil {
				t.Errorf("%s has a script: %.100s", path, n.FirstChild.Data)
			}
			if slices.Contains([]string{"iframe", "object", "embed", "svg", "math", "marquee", "video", "audio", "base", "template",
				"details", "style", "noscript"}, n.Data) && attr(n, "class") != "diff" {
				t.Errorf("%s has <%s>", path, n.Data)
			}
			for _, at := range n.Attr {
				value := strings.ToLower(strings.TrimSpace(at.Val))
				if strings.HasPrefix(at.Key, "on") || strings.HasPrefix(at.Key, "hx-") || at.Key == "srcdoc" ||
					slices.Contains([]string{"src", "href", "action", "formaction"}, at.Key) && !strings.HasPrefix(value, "/console") &&
						!strings.HasPrefix(value, "#") && value != "" {
					t.Errorf("%s: <%s %s=%q>", path, n.Data, at.Key, at.Val)
				}
			}
		}
	}
	for _, p := range printed() {
		if p = spaces.ReplaceAllString(p, " "); !strings.Contains(seen, p) {
			t.Errorf("no page shows %q as it was written", p)
		}
	}
}
