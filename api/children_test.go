package api_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/tokens"
)

// TestChildrenOfEveryKindGoThroughTheirRoutes writes, reads, edits, lists and deletes children of
// each kind. One kind exists only in this test.
func TestChildrenOfEveryKindGoThroughTheirRoutes(t *testing.T) {
	t.Parallel()
	f, set, applied := openKinds(t, true)
	stranger := f
	stranger.token = f.newToken(t, tenant+1, "stranger", tokens.Roles()...)
	for _, k := range set.AllChildren() {
		t.Run(k.Name, func(t *testing.T) {
			n, attributes := k.Names(), map[string]string{"review": `,"attributes":{"rating":4}`,
				"report": `,"attributes":{"stars":4}`}[k.Name]
			object := "/v1/" + set.Objects[k.Parent].Plural + "/42"
			under := object + "/" + k.Plural
			create := func(author any, body string) string {
				return fmt.Sprintf(`{"author_id":"%v","body":%q%s}`, author, body, attributes)
			}
			first := f.want(t, 201, "POST", under, create(3, " first "), "Idempotency-Key: one")
			id := first.text(n.ID)
			one := "/v1/" + k.Plural + "/" + id
			if first.text(n.Parent) != "42" || first.text("body") != "first" || first.Header.Get("ETag") != `"1"` ||
				first.Header.Get("Location") != one || first.Header.Get("Tidings-Token") == "" ||
				(first.json["slug"] != nil) != k.Threaded || (first.json["attributes"] != nil) != (len(k.Attributes) > 0) {
				t.Errorf("POST: %v %s", first.Header, first.body)
			}
			if again := f.want(t, 201, "POST", under, create(3, "first"), "Idempotency-Key: one"); again.body != first.body ||
				again.Header.Get("Idempotency-Replayed") != "true" {
				t.Errorf("POST again: %v %s", again.Header, again.body)
			}
			if reused := f.want(t, 422, "POST", under, create(3, "other"),
				"Idempotency-Key: one"); reused.text("code") != "idempotency-key-reused" {
				t.Errorf("the key again: %s", reused.body)
			}
			if k.OnePerAuthor {
				taken := f.want(t, 409, "POST", under, create(3, "second"))
				current, _ := taken.json["current"].(map[string]any)
				if taken.text("code") != "already-written" || current[n.ID] != id || taken.Header.Get("Location") != one {
					t.Errorf("a second one: %v %s", taken.Header, taken.body)
				}
			} else {
				f.want(t, 201, "POST", under, create(3, "second"))
			}
			f.want(t, 201, "POST", under, create(4, "of another"))
			if got := f.want(t, 200, "GET", one, ""); got.body != first.body {
				t.Errorf("GET: %s", got.body)
			}
			f.want(t, 304, "GET", one, "", `If-None-Match: "1"`)
			stranger.want(t, 404, "GET", one, "")
			stranger.want(t, 404, "DELETE", one, "", "If-Match: *")

			for name, c := range map[string]struct {
				method, path, body, header string
				status                     int
				code, at                   string
			}{
				"no body":      {"POST", under, create(9, " "), "", 422, "body-empty", "The " + k.Name + "'s body is empty"},
				"a bad author": {"POST", under, create("a/b", "x"), "", 422, "validation-failed", "#/author_id"},
				"a bad object": {"POST", strings.Replace(under, "42", "a,b", 1), create(9, "x"), "", 422, "validation-failed",
					fmt.Sprintf(`"parameter":%q`, n.Parent)},
				"an unknown member":   {"POST", under, `{"author_id":"9","body":"x","nope":1}`, "", 422, "validation-failed", "#/nope"},
				"no version":          {"PATCH", one, `{"body":"x"}`, "", 428, "if-match-missing", ""},
				"an old version":      {"PATCH", one, `{"body":"x"}`, `If-Match: "7"`, 412, "version-stale", id},
				"an edit of nothing":  {"PATCH", one, `{}`, `If-Match: *`, 422, "validation-failed", `"#`},
				"a removal of an old": {"DELETE", one, ``, `If-Match: "7"`, 412, "version-stale", id},
			} {
				headers := []string{}
				if c.header != "" {
					headers = append(headers, c.header)
				}
				if a := f.do(t, c.method, c.path, c.body, headers...); a.StatusCode != c.status || a.text("code") != c.code ||
					!strings.Contains(a.body, c.at) {
					t.Errorf("%s: %d %s, want %d %s with %s", name, a.StatusCode, a.body, c.status, c.code, c.at)
				}
			}
			edited := f.want(t, 200, "PATCH", one, `{"body":"edited"}`, `If-Match: "1"`)
			if edited.text("body") != "edited" || edited.json["version"] != 2.0 ||
				fmt.Sprint(edited.json["attributes"]) != fmt.Sprint(first.json["attributes"]) {
				t.Errorf("PATCH: %s", edited.body)
			}

			// The last operations of this batch find the results of the first ones.
			op := func(op string, members string) string { return `{"op":"` + op + `",` + members + `}` }
			batch := f.want(t, 200, "POST", "/v1/"+k.Plural+":batch", `{"operations":[`+strings.Join([]string{
				op("create", fmt.Sprintf(`%q:"42","author_id":"5","body":"x","idempotency_key":"b"%s`, n.Parent, attributes)),
				op("create", fmt.Sprintf(`%q:"42","author_id":"5","body":"x","idempotency_key":"b"%s`, n.Parent, attributes)),
				op("edit", fmt.Sprintf(`%q:%q,"body":"in a batch","if_match":2`, n.ID, id)),
				op("edit", fmt.Sprintf(`%q:%q,"body":"late","if_match":2`, n.ID, id)),
				op("create", fmt.Sprintf(`%q:"a/b","author_id":"5","body":"x"%s`, n.Parent, attributes)),
				op("nope", `"body":"x"`),
			}, ",")+`]}`)
			items := itemsOf(batch)
			var statuses []any
			for _, item := range items {
				statuses = append(statuses, item["status"])
			}
			if diff := cmp.Diff([]any{201.0, 201.0, 200.0, 412.0, 422.0, 422.0}, statuses); diff != "" {
				t.Errorf("batch (-want +got):\n%s in %s", diff, batch.body)
			}
			if entity, _ := items[2][k.Name].(map[string]any); entity["body"] != "in a batch" || items[1]["replayed"] != true ||
				items[0]["token"] == nil {
				t.Errorf("batch: %s", batch.body)
			}

			f.catchUpWith(t, applied.Now)
			list := f.want(t, 200, "GET", under, "")
			visible := len(itemsOf(list))
			if visible < 3 || itemsOf(list)[0][n.ID] != id || (list.json["thread"] != nil) != k.Moderated {
				t.Errorf("list: %s", list.body)
			}
			if newest := itemsOf(f.want(t, 200, "GET", under+"?order=newest&limit=1", "")); len(newest) != 1 ||
				newest[0]["author_id"] != "5" {
				t.Errorf("newest: %v", newest)
			}
			if skip := itemsOf(f.want(t, 200, "GET", under+"?skip=1", "")); len(skip) != visible-1 {
				t.Errorf("skip: %v", skip)
			}
			if around := itemsOf(f.want(t, 200, "GET", under+"?limit=1&around="+id, "")); len(around) != 1 || around[0][n.ID] != id {
				t.Errorf("around: %v", around)
			}
			threaded := f.do(t, "GET", under+"?order=threaded", "")
			if k.Threaded != (threaded.StatusCode == 200) || threaded.StatusCode > 422 {
				t.Errorf("threaded: %d %s", threaded.StatusCode, threaded.body)
			}
			if theirs := itemsOf(f.want(t, 200, "GET", "/v1/users/4/"+k.Plural, "")); len(theirs) != 1 ||
				theirs[0]["body"] != "of another" {
				t.Errorf("by author: %v", theirs)
			}
			if none := itemsOf(stranger.want(t, 200, "GET", under, "")); len(none) != 0 {
				t.Errorf("another tenant's list: %v", none)
			}
			if versions := itemsOf(f.want(t, 200, "GET", one+"/versions", "")); len(versions) != 3 ||
				versions[0][k.Name].(map[string]any)["body"] != "in a batch" {
				t.Errorf("versions: %v", versions)
			}
			gone := f.want(t, 204, "DELETE", one, "", `If-Match: "3"`)
			if tombstone := f.want(t, 200, "GET", one, ""); tombstone.text("state") != "DELETED" || tombstone.json["body"] != nil ||
				tombstone.json["author_id"] != nil || tombstone.json["attributes"] != nil {
				t.Errorf("a tombstone: %s", tombstone.body)
			}
			code := map[bool]string{true: "comment-gone", false: "child-gone"}[k.Name == "comment"]
			if again := f.want(t, 409, "PATCH", one, `{"body":"x"}`, "If-Match: *"); again.text("code") != code {
				t.Errorf("an edit of a deleted one: %s", again.body)
			}
			// A read with the token includes the deletion before the projection has applied it.
			if after := itemsOf(f.want(t, 200, "GET", under, "",
				"Tidings-Token: "+gone.Header.Get("Tidings-Token"))); len(after) != visible-1 {
				t.Errorf("after the deletion: %v", after)
			}
			count, _ := f.want(t, 200, "GET", object+"/counts", "",
				"Tidings-Token: "+gone.Header.Get("Tidings-Token")).json[k.Plural].(map[string]any)
			if count["visible"] != float64(visible-1) || count["total"] != float64(visible) {
				t.Errorf("counts: %v", count)
			}
			for _, name := range k.Aggregates() {
				if sum := count["aggregates"].(map[string]any)[name]; !cmp.Equal(sum,
					any(map[string]any{"count": float64(visible - 1), "sum": float64(4 * (visible - 1))})) {
					t.Errorf("aggregates: %v", count)
				}
			}
			if k.OnePerAuthor {
				f.want(t, 201, "POST", under, create(3, "a new one"))
			}
		})
	}
}

func TestAttributesOfAChild(t *testing.T) {
	t.Parallel()
	f, _, _ := openKinds(t, true)
	one := "/v1/reports/" + f.want(t, 201, "POST", "/v1/places/42/reports",
		`{"author_id":"3","body":"x","attributes":{"stars":3}}`).text("report_id")
	attributes := func(a answer, want string) {
		t.Helper()
		if got, err := json.Marshal(a.json["attributes"]); err != nil || string(got) != want {
			t.Errorf("attributes %s, want %s", got, want)
		}
	}
	attributes(f.want(t, 200, "GET", one, ""), `{"mood":"calm","stars":3}`)
	attributes(f.want(t, 200, "PATCH", one, `{"attributes":{"stars":5,"mood":"cross"}}`, `If-Match: "1"`), `{"mood":"cross","stars":5}`)
	both := f.want(t, 200, "PATCH", one, `{"body":"y","attributes":{"mood":null,"again":true}}`, `If-Match: *`)
	attributes(both, `{"again":true,"mood":"calm","stars":5}`)
	if both.text("body") != "y" || both.json["version"] != 3.0 {
		t.Errorf("both: %s", both.body)
	}
	if same := f.want(t, 200, "PATCH", one, `{"attributes":{"stars":5}}`, `If-Match: *`); same.json["version"] != 3.0 {
		t.Errorf("the same again: %s", same.body)
	}
	id := strings.TrimPrefix(one, "/v1/reports/")
	batch := f.want(t, 200, "POST", "/v1/reports:batch", fmt.Sprintf(`{"operations":[
		{"op":"edit","report_id":%[1]q,"attributes":{"stars":2},"if_match":3},
		{"op":"edit","report_id":%[1]q,"attributes":{"again":null},"if_match":"*"},
		{"op":"edit","report_id":%[1]q,"attributes":{"stars":null},"body":"z","if_match":"*"},
		{"op":"edit","report_id":%[1]q,"attributes":{"stars":6},"if_match":"*"},
		{"op":"edit","report_id":%[1]q,"attributes":{"stars":5},"if_match":"*"}]}`, id))
	var changes []string
	for _, item := range itemsOf(batch) {
		entity, _ := item["report"].(map[string]any)
		changes = append(changes, fmt.Sprintf("%v %v %v %v", item["status"], entity["version"], entity["attributes"], entity["body"]))
	}
	if diff := cmp.Diff([]string{"200 4 map[again:true mood:calm stars:2] y", "200 5 map[mood:calm stars:2] y", "200 6 map[mood:calm] z",
		"422 <nil> <nil> <nil>", "200 7 map[mood:calm stars:5] z"}, changes); diff != "" {
		t.Errorf("a batch of edits (-want +got):\n%s in %s", diff, batch.body)
	}
	for body, at := range map[string]string{
		`{"author_id":"9","body":"x","attributes":{"stars":6}}`:      "#/attributes/stars",
		`{"author_id":"9","body":"x","attributes":{"mood":"merry"}}`: "#/attributes/mood",
		`{"author_id":"9","body":"x","attributes":{"hat":1}}`:        "#/attributes/hat",
		`{"author_id":"9","body":"x","attributes":[]}`:               "#/attributes",
	} {
		if a := f.want(t, 422, "POST", "/v1/places/42/reports", body); a.text("code") != "validation-failed" ||
			!strings.Contains(a.body, `"`+at+`"`) {
			t.Errorf("%s: %s", body, a.body)
		}
	}
	if missing := f.want(t, 422, "POST", "/v1/products/42/reviews",
		`{"author_id":"9","body":"x"}`); missing.text("code") != "validation-failed" {
		t.Errorf("a required one is missing: %s", missing.body)
	}
	f.want(t, 422, "POST", "/v1/conversations/42/messages", `{"author_id":"9","body":"x","attributes":{}}`)
	if a := f.want(t, 412, "PATCH", one, `{"attributes":{"stars":1}}`, `If-Match: "1"`); !strings.Contains(a.body, `"stars":5`) {
		t.Errorf("an old version: %s", a.body)
	}
}

// TestThreadsOfEveryKind reads threads in every way of a threaded kind. A kind without replies has
// no such routes.
func TestThreadsOfEveryKind(t *testing.T) {
	t.Parallel()
	f, set, applied := openKinds(t, true)
	for _, k := range set.AllChildren() {
		t.Run(k.Name, func(t *testing.T) {
			id, object := k.Names().ID, "/v1/"+set.Objects[k.Parent].Plural+"/42"
			under, summary := object+"/"+k.Plural, object+"/"+k.Plural+"/summary"
			attributes := map[string]string{"review": `,"attributes":{"rating":4}`}[k.Name]
			if none := f.want(t, 200, "GET", summary, ""); none.json["total"] != 0.0 || none.json["last_activity_at"] != nil {
				t.Errorf("the summary of nothing: %s", none.body)
			}
			write := func(author int, parent string) answer {
				t.Helper()
				if parent != "" {
					parent = fmt.Sprintf(`,"parent_id":%q`, parent)
				}
				return f.want(t, 201, "POST", under, fmt.Sprintf(`{"author_id":"%d","body":"by %[1]d"%s%s}`, author, parent, attributes))
			}
			first := write(31, "")
			if !k.Threaded {
				write(32, "")
				f.catchUpWith(t, applied.Now)
				for _, path := range []string{under + "/tree", under + "/by-slug/abcd2345",
					"/v1/" + k.Plural + "/" + first.text(id) + "/replies"} {
					if a := f.want(t, 404, "GET", path, ""); a.text("code") != "route-unknown" {
						t.Errorf("%s: %s", path, a.body)
					}
				}
			} else {
				reply := write(32, first.text(id))
				below := write(33, reply.text(id))
				write(34, "")
				f.want(t, 204, "DELETE", "/v1/"+k.Plural+"/"+reply.text(id), "", "If-Match: *")
				f.catchUpWith(t, applied.Now)
				thread := func(a answer) {
					t.Helper()
					state, _ := a.json["thread"].(map[string]any)
					if (state != nil) != k.Moderated || k.Moderated && state["locked"] != false || a.text("as_of") == "" {
						t.Errorf("its thread: %s", a.body)
					}
				}
				tree := f.want(t, 200, "GET", under+"/tree", "")
				thread(tree)
				var shape func(items []any) string
				shape = func(items []any) (s string) {
					for _, item := range items {
						node := item.(map[string]any)
						replies, _ := node["replies"].([]any)
						s += fmt.Sprintf("(%v %v %v%s)", node["author_id"], node["depth"], node["state"], shape(replies))
					}
					return s
				}
				if got := shape(tree.json["items"].([]any)); got != "(31 1 VISIBLE(<nil> 2 DELETED(33 3 VISIBLE)))(34 1 VISIBLE)" {
					t.Errorf("tree: %s in %s", got, tree.body)
				}
				replies := f.want(t, 200, "GET", "/v1/"+k.Plural+"/"+first.text(id)+"/replies?limit=1", "")
				thread(replies)
				rest := f.want(t, 200, "GET", "/v1/"+k.Plural+"/"+first.text(id)+"/replies?cursor="+replies.text("next"), "")
				if len(itemsOf(replies)) != 1 || itemsOf(replies)[0][id] != reply.text(id) || len(itemsOf(rest)) != 1 ||
					itemsOf(rest)[0][id] != below.text(id) || rest.text("next") != "" {
					t.Errorf("replies: %s, then %s", replies.body, rest.body)
				}
				f.want(t, 400, "GET", under+"?order=threaded&cursor="+replies.text("next"), "")
				f.want(t, 404, "GET", "/v1/"+k.Plural+"/0196b2d4-7c00-7000-8000-000000000001/replies", "")
				linked := f.want(t, 200, "GET", under+"/by-slug/"+below.text("slug"), "")
				thread(linked)
				if linked.text(id) != below.text(id) || linked.text(k.Names().Parent) != "42" || linked.text("body") != "by 33" ||
					linked.Header.Get("ETag") != "" {
					t.Errorf("by slug: %s", linked.body)
				}
				f.want(t, 404, "GET", strings.Replace(under, "42", "43", 1)+"/by-slug/"+below.text("slug"), "")
				thread(f.want(t, 200, "GET", under+"?order=threaded", ""))
			}
			sum := f.want(t, 200, "GET", summary, "")
			total := map[bool]float64{true: 4, false: 2}[k.Threaded]
			if sum.text(k.Names().Parent) != "42" || sum.json["total"] != total ||
				sum.json["visible"] != total-total/4*map[bool]float64{true: 1}[k.Threaded] || sum.text("last_activity_at") == "" ||
				(sum.json["thread"] != nil) != k.Moderated {
				t.Errorf("summary: %s", sum.body)
			}
		})
	}
}

// TestAModeratedKindOfATestsOwn moderates, locks, and lists pending children, with replies.
func TestAModeratedKindOfATestsOwn(t *testing.T) {
	t.Parallel()
	f, _, applied := openKinds(t, true)
	const under = "/v1/places/42/reports"
	writer := f
	writer.token = f.newToken(t, tenant, "writer", tokens.RoleRead, tokens.RoleWrite)
	if none := f.want(t, 200, "GET", under+"/settings", ""); none.text("place_id") != "42" || none.json["version"] != 0.0 ||
		none.Header.Get("ETag") != "" {
		t.Errorf("settings: %s", none.body)
	}
	writer.want(t, 403, "PUT", under+"/settings", `{}`)
	if set := f.want(t, 200, "PUT", under+"/settings", `{"premoderated":true,"title":"Reports"}`); set.Header.Get("ETag") != `"1"` ||
		set.text("title") != "Reports" {
		t.Errorf("PUT: %s", set.body)
	}
	f.want(t, 428, "PUT", under+"/settings", `{}`)
	if stale := f.want(t, 412, "PUT", under+"/settings", `{}`, `If-Match: "2"`); !strings.Contains(stale.body, `"place_id":"42"`) {
		t.Errorf("stale: %s", stale.body)
	}
	if comments := f.want(t, 200, "GET", "/v1/posts/42/thread", ""); comments.json["version"] != 0.0 {
		t.Errorf("the settings of another kind: %s", comments.body)
	}
	first := f.want(t, 201, "POST", under, `{"author_id":"3","body":"x"}`)
	id := first.text("report_id")
	if first.text("state") != "PENDING" {
		t.Errorf("premoderated: %s", first.body)
	}
	f.catchUpWith(t, applied.Now)
	if alias := f.want(t, 422, "GET", "/v1/moderation/reports/pending?object_id=42", ""); !strings.Contains(alias.body,
		`"parameter":"object_id"`) {
		t.Errorf("the framework's name of the parameter: %s", alias.body)
	}
	for _, query := range []string{"", "?place_id=42"} {
		if pending := itemsOf(f.want(t, 200, "GET", "/v1/moderation/reports/pending"+query, "")); len(pending) != 1 ||
			pending[0]["report_id"] != id {
			t.Errorf("pending%s: %v", query, pending)
		}
	}
	if pending := itemsOf(f.want(t, 200, "GET", "/v1/moderation/reports/pending?place_id=43", "")); len(pending) != 0 {
		t.Errorf("pending elsewhere: %v", pending)
	}
	writer.want(t, 403, "GET", "/v1/moderation/reports/pending", "")
	writer.want(t, 403, "PUT", "/v1/reports/"+id+"/moderation", `{"state":"APPROVED"}`, "If-Match: *")
	if approved := f.want(t, 200, "PUT", "/v1/reports/"+id+"/moderation", `{"state":"APPROVED"}`,
		`If-Match: "1"`); approved.text("state") != "VISIBLE" {
		t.Errorf("approved: %s", approved.body)
	}
	reply := f.want(t, 201, "POST", under, fmt.Sprintf(`{"author_id":"4","body":"y","parent_id":%q}`, id))
	if reply.text("parent_id") != id || reply.json["depth"] != 2.0 {
		t.Errorf("a reply: %s", reply.body)
	}
	if unknown := f.want(t, 422, "POST", under,
		`{"author_id":"5","body":"y","parent_id":"0196b2d4-7c00-7000-8000-000000000001"}`); unknown.text("code") != "parent-unknown" ||
		!strings.Contains(unknown.text("title"), "report of this place") {
		t.Errorf("an unknown parent: %s", unknown.body)
	}
	f.want(t, 200, "PUT", "/v1/reports/"+reply.text("report_id")+"/moderation", `{"state":"APPROVED"}`, `If-Match: *`)
	f.want(t, 200, "PUT", "/v1/reports/"+id+"/moderation", `{"state":"HIDDEN","reason":"spam"}`, `If-Match: *`)
	f.catchUpWith(t, applied.Now)
	threaded := f.want(t, 200, "GET", under+"?order=threaded", "")
	if items := itemsOf(threaded); len(items) != 2 || items[0]["state"] != "HIDDEN" || items[0]["body"] != nil ||
		items[0]["attributes"] != nil || items[1]["body"] != "y" {
		t.Errorf("threaded: %s", threaded.body)
	}
	if thread, _ := threaded.json["thread"].(map[string]any); thread["premoderated"] != true {
		t.Errorf("thread: %s", threaded.body)
	}
	if versions := itemsOf(writer.want(t, 200, "GET", "/v1/reports/"+id+"/versions", "")); len(versions) != 3 ||
		versions[2]["report"].(map[string]any)["body"] != nil || versions[0]["reason"] != nil {
		t.Errorf("versions to a reader: %v", versions)
	}
	if versions := itemsOf(f.want(t, 200, "GET", "/v1/reports/"+id+"/versions",
		"")); versions[2]["report"].(map[string]any)["body"] != "x" || versions[0]["reason"] != "spam" {
		t.Errorf("versions to a moderator: %v", versions)
	}
	f.want(t, 200, "PUT", under+"/settings", `{"locked":true}`, `If-Match: "1"`)
	if locked := f.want(t, 409, "POST", under, `{"author_id":"6","body":"z"}`); locked.text("code") != "thread-locked" ||
		!strings.Contains(locked.text("title"), "reports") {
		t.Errorf("locked: %s", locked.body)
	}
	if versions := itemsOf(f.want(t, 200, "GET", under+"/settings/versions", "")); len(versions) != 2 ||
		versions[0]["settings"].(map[string]any)["locked"] != true {
		t.Errorf("versions of settings: %v", versions)
	}
}
