package api_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// verified compares every projection with the truth.
func (f fixture) verified(t *testing.T, now func() *kinds.Set) {
	t.Helper()
	for _, p := range []projections.Projection{history.New(now), threadcache.New(now), followercounts.New(now)} {
		differs := func(d projections.Difference) { t.Errorf("%s: %v", p.Name(), d) }
		if _, err := p.Verify(t.Context(), f.system, f.system, differs); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAFlatKindIsModerated has moderators decide on reviews and messages, which have no replies.
func TestAFlatKindIsModerated(t *testing.T) {
	t.Parallel()
	for _, k := range []kinds.Child{kinds.Builtin().Children["review"], kinds.Builtin().Children["message"]} {
		t.Run(k.Name, func(t *testing.T) {
			f := open(t)
			writer := f
			writer.token = f.newToken(t, tenant, "writer", tokens.RoleRead, tokens.RoleWrite)
			under, pending := "/v1/"+kinds.Builtin().Objects[k.Parent].Plural+"/5/"+k.Plural, "/v1/moderation/"+k.Plural+"/pending"
			write := func(author, rating int) answer {
				t.Helper()
				attributes := ""
				if len(k.Attributes) > 0 {
					attributes = fmt.Sprintf(`,"attributes":{"rating":%d}`, rating)
				}
				return f.want(t, 201, "POST", under, fmt.Sprintf(`{"author_id":"%d","body":"text of %[1]d"%s}`, author, attributes))
			}
			decide := func(of answer, state string) answer {
				t.Helper()
				return f.want(t, 200, "PUT", "/v1/"+k.Plural+"/"+of.text(k.Names().ID)+"/moderation",
					fmt.Sprintf(`{"state":%q,"reason":"because of %[1]s"}`, state), "If-Match: *", "Tidings-Actor: max")
			}
			// read compares what readers see: the bodies, the counts, and the sum of the ratings
			read := func(want []string, total, sum int) {
				t.Helper()
				f.catchUp(t)
				f.verified(t, kinds.Builtin)
				list := f.want(t, 200, "GET", under, "")
				if got := bodies(itemsOf(list)); !slices.Equal(got, want) {
					t.Errorf("readers see %v, want %v", got, want)
				}
				counts := f.want(t, 200, "GET", strings.TrimSuffix(under, k.Plural)+"counts", "").json[k.Plural].(map[string]any)
				if counts["visible"] != float64(len(want)) || counts["total"] != float64(total) {
					t.Errorf("counts %v, want %d of %d", counts, len(want), total)
				}
				if len(k.Attributes) > 0 {
					rating := counts["aggregates"].(map[string]any)["rating"].(map[string]any)
					if rating["count"] != float64(len(want)) || rating["sum"] != float64(sum) {
						t.Errorf("ratings %v, want the sum %d of %d", rating, sum, len(want))
					}
				}
			}

			one, two, three := write(1, 5), write(2, 3), write(3, 1)
			read([]string{"text of 1", "text of 2", "text of 3"}, 3, 9)
			if hidden := decide(two, "HIDDEN"); hidden.text("state") != "HIDDEN" || hidden.text("body") != "" ||
				hidden.text("author_id") != "" || hidden.json["attributes"] != nil || hidden.json["version"] != 2.0 {
				t.Errorf("hidden: %s", hidden.body)
			}
			if again := decide(two, "HIDDEN"); again.json["version"] != 2.0 {
				t.Errorf("hidden again: %s", again.body)
			}
			decide(three, "REMOVED")
			read([]string{"text of 1"}, 3, 5)
			decide(two, "APPROVED")
			read([]string{"text of 1", "text of 2"}, 3, 8)
			decide(one, "PENDING")
			read([]string{"text of 2"}, 3, 3)
			if waiting := itemsOf(f.want(t, 200, "GET", pending+"?"+k.Parent+"_id=5", "")); len(waiting) != 1 ||
				waiting[0]["body"] != "text of 1" {
				t.Errorf("pending: %v", waiting)
			}
			writer.want(t, 403, "GET", pending, "")
			writer.want(t, 403, "PUT", "/v1/"+k.Plural+"/"+one.text(k.Names().ID)+"/moderation", `{"state":"APPROVED"}`, "If-Match: *")

			// a hidden one cannot be edited, and where an author has one it remains the author's
			decide(two, "HIDDEN")
			if gone := f.want(t, 409, "PATCH", "/v1/"+k.Plural+"/"+two.text(k.Names().ID), `{"body":"x"}`,
				"If-Match: *"); gone.text("code") != "child-gone" {
				t.Errorf("an edit of a hidden one: %s", gone.body)
			}
			if k.OnePerAuthor {
				f.want(t, 409, "POST", under, `{"author_id":"2","body":"again","attributes":{"rating":1}}`)
			}

			// premoderated and locked threads
			set := f.want(t, 200, "PUT", under+"/settings", `{"premoderated":true,"title":"Rules"}`)
			if set.text(k.Names().Parent) != "5" || set.Header.Get("ETag") != `"1"` {
				t.Errorf("settings: %s", set.body)
			}
			four := write(4, 4)
			if four.text("state") != "PENDING" {
				t.Errorf("in a premoderated thread: %s", four.body)
			}
			read([]string{}, 4, 0)
			decide(four, "APPROVED")
			read([]string{"text of 4"}, 4, 4)
			if thread, _ := f.want(t, 200, "GET", under, "").json["thread"].(map[string]any); thread["premoderated"] != true ||
				thread["title"] != "Rules" {
				t.Errorf("the thread of a page: %v", thread)
			}
			f.want(t, 200, "PUT", under+"/settings", `{"locked":true}`, `If-Match: "1"`)
			rating := map[bool]string{true: `,"attributes":{"rating":1}`}[k.OnePerAuthor]
			if locked := f.want(t, 409, "POST", under, `{"author_id":"9","body":"x"`+rating+`}`); locked.text("code") != "thread-locked" ||
				!strings.Contains(locked.text("title"), k.Plural) {
				t.Errorf("in a locked thread: %s", locked.body)
			}
			if versions := itemsOf(f.want(t, 200, "GET", under+"/settings/versions", "")); len(versions) != 2 {
				t.Errorf("versions of the settings: %v", versions)
			}

			// the history has the decisions, and their reasons for moderators alone
			var told []string
			for _, v := range itemsOf(f.want(t, 200, "GET", "/v1/"+k.Plural+"/"+two.text(k.Names().ID)+"/versions", "")) {
				told = append(told, fmt.Sprint(v["actor"], ": ", v[k.Name].(map[string]any)["state"], ", ", v["reason"]))
			}
			if want := []string{"max: HIDDEN, because of HIDDEN", "max: VISIBLE, because of APPROVED", "max: HIDDEN, because of HIDDEN",
				"tester: VISIBLE, <nil>"}; !slices.Equal(told, want) {
				t.Errorf("the history is %q, want %q", told, want)
			}
			for _, v := range itemsOf(writer.want(t, 200, "GET", "/v1/"+k.Plural+"/"+two.text(k.Names().ID)+"/versions", "")) {
				if shown := v[k.Name].(map[string]any); v["reason"] != nil || shown["body"] != nil || shown["attributes"] != nil {
					t.Errorf("a version to a reader: %v", v)
				}
			}
			var types []string
			for _, e := range f.edgeEvents(t, k.Name) {
				if e.Payload[k.Names().ID] == two.text(k.Names().ID) {
					types = append(types, fmt.Sprint(e.Type, " ", e.Payload["reason"]))
				}
			}
			if want := []string{"created <nil>", "moderated because of HIDDEN", "moderated because of APPROVED",
				"moderated because of HIDDEN"}; !slices.Equal(types, want) {
				t.Errorf("the events are %q, want %q", types, want)
			}
		})
	}
}

// TestAKindWithRowsBecomesModerated has a kind of a file that gets moderated after its first rows.
func TestAKindWithRowsBecomesModerated(t *testing.T) {
	t.Parallel()
	const plain = "objects: {place: places}\nchildren:\n  tip: {plural: tips, parent: place, attributes: {stars: {type: integer, " +
		"aggregate: true}}}\n"
	f, _, a := openKindsOf(t, plain, true)
	write := func(author, body string) string {
		t.Helper()
		return f.want(t, 201, "POST", "/v1/places/5/tips",
			fmt.Sprintf(`{"author_id":%q,"body":%q,"attributes":{"stars":2}}`, author, body)).text("tip_id")
	}
	old := write("1", "old")
	f.catchUpWith(t, a.Now)
	f.want(t, 404, "PUT", "/v1/tips/"+old+"/moderation", `{"state":"HIDDEN"}`, "If-Match: *")
	f.want(t, 404, "GET", "/v1/places/5/tips/settings", "")

	moderated := testkit.Kinds(t, strings.Replace(plain, "parent: place,", "parent: place, moderated: true,", 1))
	done, err := catalog.Apply(t.Context(), catalog.Databases{Truth: f.system, Projections: f.system},
		catalog.Request{Kinds: moderated, Actor: "t"})
	if err != nil || len(done.Changes) != 1 || done.Changes[0].Path != "children.tip.moderated" {
		t.Fatalf("%+v, %v", done, err)
	}
	a.next.Store(moderated)
	a.now.Store(moderated)
	f.want(t, 200, "PUT", "/v1/tips/"+old+"/moderation", `{"state":"HIDDEN"}`, "If-Match: *")
	f.want(t, 200, "PUT", "/v1/places/5/tips/settings", `{"premoderated":true}`)
	held := write("2", "new")
	f.catchUpWith(t, a.Now)
	f.verified(t, a.Now)
	if waiting := itemsOf(f.want(t, 200, "GET", "/v1/moderation/tips/pending", "")); len(waiting) != 1 || waiting[0]["tip_id"] != held {
		t.Errorf("pending: %v", waiting)
	}
	if counts := f.want(t, 200, "GET", "/v1/places/5/counts", ""); !strings.Contains(counts.body, `"stars":{"count":0,"sum":0}`) ||
		!strings.Contains(counts.body, `"visible":0`) || !strings.Contains(counts.body, `"total":2`) {
		t.Errorf("counts: %s", counts.body)
	}
	f.want(t, 200, "PUT", "/v1/tips/"+held+"/moderation", `{"state":"APPROVED"}`, "If-Match: *")
	f.want(t, 200, "PUT", "/v1/tips/"+old+"/moderation", `{"state":"APPROVED"}`, "If-Match: *")
	f.catchUpWith(t, a.Now)
	f.verified(t, a.Now)
	if list := bodies(itemsOf(f.want(t, 200, "GET", "/v1/places/5/tips", ""))); !slices.Equal(list, []string{"old", "new"}) {
		t.Errorf("readers see %v", list)
	}
}
