package api_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// catchUp applies the outbox to the threads and the histories, like relay and consumers do. Only
// the histories have edges.
func (f fixture) catchUp(t *testing.T) { f.catchUpWith(t, kinds.Builtin) }

func (f fixture) catchUpWith(t *testing.T, now func() *kinds.Set) {
	t.Helper()
	all := []projections.Projection{history.New(now), threadcache.New(now), followercounts.New(now)}
	err := postgres.InTx(t.Context(), f.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
		rows, _ := tx.Query(context.Background(), `
			WITH taken AS (UPDATE outbox_messages SET processed_at = now() WHERE processed_at IS NULL RETURNING *)
			SELECT event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload FROM taken ORDER BY id`)
		events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e event.Event, err error) {
			err = row.Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.Type, &e.Version, &e.Payload)
			return e, err
		})
		if err != nil {
			return err
		}
		for _, p := range all {
			wanted := slices.DeleteFunc(slices.Clone(events), func(e event.Event) bool { return !p.Wants(e.AggregateType) })
			if err := p.Apply(t.Context(), tx, wanted); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// reply writes a reply to a comment.
func (f fixture) reply(t *testing.T, post int, to, body string) answer {
	t.Helper()
	return f.want(t, 201, "POST", fmt.Sprintf("/v1/posts/%d/comments", post),
		fmt.Sprintf(`{"author_id":"4","body":%q,"parent_id":%q}`, body, to))
}

func bodies(items []map[string]any) []string {
	got := []string{}
	for _, item := range items {
		body, _ := item["body"].(string)
		if body == "" {
			body = fmt.Sprint("(", item["state"], ")")
		}
		got = append(got, body)
	}
	return got
}

func itemsOf(a answer) (items []map[string]any) {
	for _, item := range a.json["items"].([]any) {
		items = append(items, item.(map[string]any))
	}
	return items
}

func TestThreadPages(t *testing.T) {
	t.Parallel()
	f := open(t)
	// 12 top-level comments; every third has a reply, which has a reply.
	var oldest, threaded []string
	ids := map[string]answer{}
	for i := range 12 {
		name := fmt.Sprintf("c%02d", i)
		ids[name] = f.comment(t, 5, name)
		oldest, threaded = append(oldest, name), append(threaded, name)
		if i%3 == 0 {
			ids[name+"r"] = f.reply(t, 5, ids[name].text("comment_id"), name+"r")
			ids[name+"rr"] = f.reply(t, 5, ids[name+"r"].text("comment_id"), name+"rr")
			oldest, threaded = append(oldest, name+"r", name+"rr"), append(threaded, name+"r", name+"rr")
		}
	}
	gone := func(name string) {
		t.Helper()
		f.want(t, 204, "DELETE", "/v1/comments/"+ids[name].text("comment_id"), "", "If-Match: *")
		for i, list := range [][]string{oldest, threaded} {
			for k, n := range list {
				if n != name {
					continue
				}
				if i == 1 && name != "c04" {
					list[k] = "(DELETED)"
				} else {
					list[k] = ""
				}
			}
		}
	}
	gone("c03")  // a chain of tombstones above c03rr
	gone("c03r") //
	gone("c04")  // no replies: left out
	left := func(list []string) []string {
		return strings.Fields(strings.Join(list, " "))
	}
	oldest, threaded = left(oldest), left(threaded)
	f.catchUp(t)
	reversed := func(list []string) (all []string) {
		for i := range list {
			all = append(all, list[len(list)-1-i])
		}
		return all
	}
	const post = "/v1/posts/5/comments"
	for order, want := range map[string][]string{"oldest": oldest, "newest": reversed(oldest), "threaded": threaded} {
		for _, limit := range []int{1, 4, 17, 200} {
			items, _ := f.walk(t, post+"?order="+order, limit)
			if diff := cmp.Diff(want, bodies(items)); diff != "" {
				t.Errorf("%s by %d (-want +got):\n%s", order, limit, diff)
			}
		}
		if order == "threaded" {
			continue
		}
		for skip := range len(want) + 2 {
			a := f.want(t, 200, "GET", fmt.Sprintf("%s?order=%s&skip=%d&limit=3", post, order, skip), "")
			from, to := min(skip, len(want)), min(skip+3, len(want))
			if diff := cmp.Diff(append([]string{}, want[from:to]...), bodies(itemsOf(a))); diff != "" {
				t.Errorf("%s behind %d (-want +got):\n%s", order, skip, diff)
			}
			if got, more := a.text("next") != "", to < len(want); got != more {
				t.Errorf("%s behind %d: next %t, want %t", order, skip, got, more)
			}
		}
		// Read to the end and back.
		a := f.want(t, 200, "GET", post+"?limit=5&order="+order, "")
		pages := []string{a.body[:strings.Index(a.body, "next")]}
		for a.text("next") != "" {
			a = f.want(t, 200, "GET", post+"?limit=5&order="+order+"&cursor="+a.text("next"), "")
			pages = append(pages, a.body[:strings.Index(a.body, "]")])
		}
		for i := len(pages) - 2; i > 0; i-- {
			a = f.want(t, 200, "GET", post+"?limit=5&order="+order+"&cursor="+a.text("prev"), "")
			if got := a.body[:strings.Index(a.body, "]")]; got != pages[i] {
				t.Errorf("%s, page %d from behind: %s, want %s", order, i, got, pages[i])
			}
		}
		first := f.want(t, 200, "GET", post+"?limit=5&order="+order+"&cursor="+a.text("prev"), "")
		if first.text("prev") != "" || first.text("next") == "" || a.text("prev") == "" {
			t.Errorf("%s, the first page from behind: %s", order, first.body)
		}
	}

	around := func(name string, limit int) answer {
		return f.want(t, 200, "GET", fmt.Sprintf("%s?around=%s&limit=%d", post, strings.ToUpper(ids[name].text("comment_id")), limit), "")
	}
	for name, want := range map[string]string{
		"c00": "c00 c00r c00rr c01 c02", "c01": "c00r c00rr c01 c02 c03rr", "c11": "c09 c09r c09rr c10 c11", "c03": "c01 c02 c03rr c05 c06",
	} {
		a := around(name, 5)
		if got := strings.Join(bodies(itemsOf(a)), " "); got != want || (a.text("prev") == "") != (name == "c00") ||
			(a.text("next") == "") != (name == "c11") {
			t.Errorf("around %s: %s (prev %t, next %t), want %s", name, got, a.text("prev") != "", a.text("next") != "", want)
		}
	}
	a := around("c01", 3)
	before, after := f.want(t, 200, "GET", post+"?cursor="+a.text("prev"), ""),
		f.want(t, 200, "GET", post+"?limit=2&cursor="+a.text("next"), "")
	if got := bodies(append(itemsOf(before), itemsOf(after)...)); strings.Join(got, " ") != "c00 c00r c03rr c05" {
		t.Errorf("the pages on both sides: %v", got)
	}

	cursor := f.want(t, 200, "GET", post+"?limit=1", "").text("next")
	for _, other := range []string{"?order=threaded&", "?order=newest&"} {
		if a := f.do(t, "GET", post+other+"cursor="+cursor, ""); a.text("code") != "cursor-invalid" {
			t.Errorf("a cursor of another order: %d %s", a.StatusCode, a.body)
		}
	}
	if a := f.want(t, 200, "GET", "/v1/posts/6/comments", ""); !strings.Contains(a.body, `"items":[]`) ||
		a.text("as_of") != "1970-01-01T00:00:00.000000Z" {
		t.Errorf("an unknown post: %s", a.body)
	}
	if a := f.want(t, 200, "GET", post+"?skip=9223372036854775807", ""); !strings.Contains(a.body, `"items":[]`) {
		t.Errorf("behind everything: %s", a.body)
	}
}

func TestThreadReads(t *testing.T) {
	t.Parallel()
	f := open(t)
	const post = "/v1/posts/5"
	first := f.comment(t, 5, "first")
	reply := f.reply(t, 5, first.text("comment_id"), "reply")
	below := f.reply(t, 5, reply.text("comment_id"), "below")
	f.comment(t, 6, "elsewhere")
	last := f.comment(t, 5, "last")
	f.want(t, 204, "DELETE", "/v1/comments/"+reply.text("comment_id"), "", "If-Match: *")
	f.want(t, 200, "PUT", post+"/thread", `{"premoderated":true,"title":"Questions"}`)
	waiting := f.comment(t, 5, "waiting")
	f.catchUp(t)
	thread := map[string]any{"locked": false, "premoderated": true, "title": "Questions", "version": 1.0}

	// The whole tree, a branch, a comment by its slug, and the counts: each has the state of the
	// thread.
	tree := f.want(t, 200, "GET", post+"/comments/tree", "")
	var flat func(items any) string
	flat = func(items any) string {
		all := ""
		list, _ := items.([]any)
		for _, item := range list {
			m := item.(map[string]any)
			all += strings.Join(bodies([]map[string]any{m}), "") + "[" + flat(m["replies"]) + "]"
		}
		return all
	}
	if got := flat(tree.json["items"]); got != "first[(DELETED)[below[]]]last[]" {
		t.Errorf("tree: %s", got)
	}
	replies := f.want(t, 200, "GET", "/v1/comments/"+first.text("comment_id")+"/replies?limit=1", "")
	rest := f.want(t, 200, "GET", "/v1/comments/"+first.text("comment_id")+"/replies?cursor="+replies.text("next"), "")
	if got := bodies(append(itemsOf(replies), itemsOf(rest)...)); strings.Join(got, " ") != "(DELETED) below" || rest.text("next") != "" {
		t.Errorf("replies: %v", got)
	}
	if a := f.do(t, "GET", "/v1/comments/"+reply.text("comment_id")+"/replies?cursor="+replies.text("next"),
		""); a.text("code") != "cursor-invalid" {
		t.Errorf("a cursor of another comment's replies: %d %s", a.StatusCode, a.body)
	}
	slug := f.want(t, 200, "GET", post+"/comments/by-slug/"+below.text("slug"), "")
	if slug.text("comment_id") != below.text("comment_id") || slug.text("body") != "below" || slug.json["version"] != 1.0 {
		t.Errorf("by slug: %s", slug.body)
	}
	if a := f.want(t, 200, "GET", post+"/comments/by-slug/"+reply.text("slug"), ""); a.text("state") != "DELETED" ||
		a.json["body"] != nil || a.json["author_id"] != nil {
		t.Errorf("a tombstone by its slug: %s", a.body)
	}
	sum := f.want(t, 200, "GET", post+"/comments/summary", "")
	want := map[string]any{"post_id": "5", "visible": 3.0, "total": 5.0, "last_activity_at": last.text("created_at"), "thread": thread,
		"as_of": sum.text("as_of")}
	if diff := cmp.Diff(want, sum.json); diff != "" {
		t.Errorf("summary (-want +got):\n%s", diff)
	}
	for name, a := range map[string]answer{"list": f.want(t, 200, "GET", post+"/comments", ""), "tree": tree,
		"replies": replies, "by slug": slug} {
		if diff := cmp.Diff(any(thread), a.json["thread"]); diff != "" {
			t.Errorf("%s: thread (-want +got):\n%s", name, diff)
		}
	}
	unset := map[string]any{"locked": false, "premoderated": false, "version": 0.0}
	nobody := f.want(t, 200, "GET", "/v1/posts/77/comments/summary", "")
	want = map[string]any{"post_id": "77", "visible": 0.0, "total": 0.0, "thread": unset, "as_of": nobody.text("as_of")}
	if diff := cmp.Diff(want, nobody.json); diff != "" {
		t.Errorf("summary of an unknown post (-want +got):\n%s", diff)
	}

	// The comments of a user on all posts. Comments that are gone or pending are missing.
	users, _ := f.walk(t, "/v1/users/3/comments?", 2)
	if got := strings.Join(bodies(users), " "); got != "last elsewhere first" {
		t.Errorf("comments of user 3: %s", got)
	}

	// A comment is pending until it is approved. Then it is hidden, and approved again.
	for _, path := range []string{"/v1/moderation/pending", "/v1/moderation/pending?post_id=5"} {
		if a := itemsOf(f.want(t, 200, "GET", path, "")); len(a) != 1 || a[0]["comment_id"] != waiting.text("comment_id") ||
			a[0]["body"] != "waiting" {
			t.Errorf("%s: %v", path, a)
		}
	}
	if a := f.want(t, 200, "GET", "/v1/moderation/pending?post_id=6", ""); len(itemsOf(a)) != 0 {
		t.Errorf("pending of another post: %s", a.body)
	}
	moderate := func(state string) {
		t.Helper()
		f.want(t, 200, "PUT", "/v1/comments/"+waiting.text("comment_id")+"/moderation", fmt.Sprintf(`{"state":%q}`, state), "If-Match: *")
		f.catchUp(t)
	}
	for _, step := range []struct {
		state, newest string
		visible       float64
	}{{"APPROVED", "waiting", 4}, {"HIDDEN", "last", 3}, {"APPROVED", "waiting", 4}, {"REMOVED", "last", 3}} {
		moderate(step.state)
		if a := bodies(itemsOf(f.want(t, 200, "GET", post+"/comments?order=newest", ""))); a[0] != step.newest {
			t.Errorf("%s: newest first %v", step.state, a)
		}
		if a := f.want(t, 200, "GET", post+"/comments/summary", ""); a.json["visible"] != step.visible || a.json["total"] != 5.0 {
			t.Errorf("%s: %s", step.state, a.body)
		}
	}
	if a := f.want(t, 200, "GET", "/v1/moderation/pending", ""); len(itemsOf(a)) != 0 {
		t.Errorf("pending: %s", a.body)
	}
}

func TestATreeHasAThousandComments(t *testing.T) {
	t.Parallel()
	f := open(t)
	write := func(from, to int) {
		t.Helper()
		f.exec(t, `INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body, author_state,
			moderation_state, version,
				created_at, updated_at, visible, shown)
			SELECT 1, 'comment', gen_random_uuid(), 5, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 3, 'x', 'ACTIVE', 'NONE', 1, now(),
			now(), true, true
			  FROM generate_series($1::int, $2::int) g`, from, to)
	}
	write(1, 1000)
	if a := f.want(t, 200, "GET", "/v1/posts/5/comments/tree", ""); len(itemsOf(a)) != 1000 {
		t.Errorf("%d comments", len(itemsOf(a)))
	}
	write(1001, 1001)
	a := f.want(t, 422, "GET", "/v1/posts/5/comments/tree", "")
	if a.text("code") != "thread-too-large" || !strings.Contains(a.text("detail"), "/v1/posts/5/comments?order=threaded") {
		t.Errorf("too large: %s", a.body)
	}
}
