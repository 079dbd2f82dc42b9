package api_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// lives describes each version: its number, state and actor, and a field of the object.
func lives(items []map[string]any, object, field string) (all []string) {
	for _, item := range items {
		of := item[object].(map[string]any)
		all = append(all, fmt.Sprint(item["version"], " ", item["version_state"], " ", item["actor"], " ", of[field], " ", item["reason"]))
		if of["version"] != item["version"] || of["updated_at"] != item["at"] || item["version_id"] == "" {
			all = append(all, fmt.Sprint("does not fit: ", item))
		}
	}
	return all
}

func TestVersionsSayWhoDidWhat(t *testing.T) {
	t.Parallel()
	f := open(t)
	plain, other := f, f
	plain.token, other.token = f.newToken(t, tenant, "plain", "read"), f.newToken(t, 2, "other", "read", "write", "moderate")

	// A comment that is edited, hidden, approved and deleted.
	c := f.want(t, 201, "POST", "/v1/posts/5/comments", `{"author_id":"4","body":"first"}`, "Tidings-Actor: ann")
	comment := "/v1/comments/" + c.text("comment_id")
	versions := comment + "/versions"
	read := func(f fixture, limit int) []string {
		t.Helper()
		items, _ := f.walk(t, versions+"?", limit)
		return lives(items, "comment", "body")
	}
	if a := f.want(t, 200, "GET", versions, ""); len(itemsOf(a)) != 0 {
		t.Errorf("before the archiver: %s", a.body)
	}
	f.want(t, 200, "PATCH", comment, `{"body":"second"}`, "If-Match: *", "Tidings-Actor: leo")
	f.catchUp(t)
	seen := []string{"2 LATEST leo second <nil>", "1 ARCHIVED ann first <nil>"}
	if diff := cmp.Diff(seen, read(plain, 1)); diff != "" {
		t.Errorf("while it is visible (-want +got):\n%s", diff)
	}
	// A hidden comment is hidden at once, even if the archiver lags.
	f.want(t, 200, "PUT", comment+"/moderation", `{"state":"HIDDEN","reason":"spam"}`, "If-Match: *", "Tidings-Actor: mod")
	if diff := cmp.Diff([]string{"2 LATEST <nil> <nil> <nil>", "1 ARCHIVED <nil> <nil> <nil>"}, read(plain, 2)); diff != "" {
		t.Errorf("hidden, and not recorded yet (-want +got):\n%s", diff)
	}
	f.catchUp(t)
	if a := plain.want(t, 200, "GET", versions, ""); strings.Contains(a.body, "first") || strings.Contains(a.body, "second") ||
		strings.Contains(a.body, "author_id") || strings.Contains(a.body, "spam") {
		t.Errorf("a plain reader is shown a hidden comment: %s", a.body)
	}
	if diff := cmp.Diff([]string{"3 LATEST mod <nil> spam", "2 ARCHIVED leo second <nil>", "1 ARCHIVED ann first <nil>"},
		read(f, 2)); diff != "" {
		t.Errorf("hidden, to a moderator (-want +got):\n%s", diff)
	}
	f.want(t, 200, "PUT", comment+"/moderation", `{"state":"APPROVED"}`, "If-Match: *", "Tidings-Actor: mod")
	f.catchUp(t)
	if diff := cmp.Diff(append([]string{"4 LATEST mod second <nil>", "3 ARCHIVED mod <nil> <nil>", "2 ARCHIVED leo second <nil>"}, seen[1]),
		read(plain, 3)); diff != "" {
		t.Errorf("approved again (-want +got):\n%s", diff)
	}
	f.want(t, 204, "DELETE", comment, "", "If-Match: *", "Tidings-Actor: ann")
	f.catchUp(t)
	if got := read(f, 200); len(got) != 5 || got[0] != "5 DELETED ann <nil> <nil>" || got[4] != seen[1] {
		t.Errorf("deleted, to a moderator: %q", got)
	}
	f.exec(t, `UPDATE comments SET author_state = 'ERASED'`)
	if a := f.want(t, 200, "GET", versions, ""); strings.Contains(a.body, "first") || strings.Contains(a.body, "ann") {
		t.Errorf("a moderator is shown an erased comment: %s", a.body)
	}

	// A pair that is followed, unfollowed and followed again.
	const pair = "/v1/follows/7/42"
	f.want(t, 201, "PUT", pair, "", "Tidings-Actor: ann")
	f.want(t, 204, "DELETE", pair, "", "Tidings-Actor: bob")
	f.want(t, 201, "PUT", pair, "", "Tidings-Actor: ann")
	f.catchUp(t)
	items, _ := plain.walk(t, pair+"/versions?", 2)
	if diff := cmp.Diff([]string{"3 LATEST ann ACTIVE <nil>", "2 ARCHIVED bob REMOVED <nil>", "1 ARCHIVED ann ACTIVE <nil>"},
		lives(items, "follow", "status")); diff != "" {
		t.Errorf("follow (-want +got):\n%s", diff)
	}

	// The settings of a thread come from the truth, so no consumer has to catch up.
	const thread = "/v1/posts/5/thread"
	f.want(t, 200, "PUT", thread, `{"title":"a"}`, "Tidings-Actor: ann")
	f.want(t, 200, "PUT", thread, `{"title":"b"}`, "If-Match: *", "Tidings-Actor: mod")
	items, _ = plain.walk(t, thread+"/versions?", 1)
	if diff := cmp.Diff([]string{"2 LATEST mod b <nil>", "1 ARCHIVED ann a <nil>"}, lives(items, "thread", "title")); diff != "" {
		t.Errorf("thread (-want +got):\n%s", diff)
	}

	// Another tenant sees none of it, and a cursor belongs to its list.
	other.want(t, 404, "GET", versions, "")
	for _, path := range []string{pair, thread} {
		if a := other.want(t, 200, "GET", path+"/versions", ""); len(itemsOf(a)) != 0 {
			t.Errorf("another tenant reads %s: %s", path, a.body)
		}
	}
	next := f.want(t, 200, "GET", pair+"/versions?limit=1", "").text("next")
	for _, path := range []string{"/v1/follows/42/7", "/v1/follows/8/42", thread, comment} {
		if a := f.do(t, "GET", path+"/versions?cursor="+next, ""); a.text("code") != "cursor-invalid" {
			t.Errorf("%s with a cursor of another: %d %s", path, a.StatusCode, a.body)
		}
	}
	f.want(t, 404, "GET", "/v1/comments/0196b2d4-7c00-7000-8000-000000000001/versions", "")
}

func TestVersionsOfEarlierShapesAreShown(t *testing.T) {
	t.Parallel()
	f := open(t)
	fill := func(table, file string) {
		t.Helper()
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		f.exec(t, `INSERT INTO `+table+` (tenant_id, object, metadata) SELECT $1, r -> 'object', r -> 'metadata' FROM `+
			`jsonb_array_elements($2::jsonb) r`, tenant, string(b))
	}
	fill("comment_history", "../projections/history/testdata/comment_history.v0.json")
	fill("follow_history", "../projections/history/testdata/follow_history.v0.json")
	fill("threads", "../store/testdata/threads.v0.json")
	const comment = "0190a000-0000-7000-8000-0000000000a1"
	f.exec(t, `INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body, version)
		VALUES ($1, $2, 42, 'abcdefgh', '00000000000000abcdefgh', 7, 'second', 2)`, tenant, comment)
	for path, want := range map[string][]string{
		"/v1/comments/" + comment + "/versions":           {"2 LATEST leo", "1 ARCHIVED ann"},
		"/v1/follows/7/9007199254740993/versions":         {"2 LATEST leo", "1 ARCHIVED ann"},
		"/v1/posts/42/thread/versions":                    {"2 LATEST leo", "1 ARCHIVED ann"},
		"/v1/posts/42/thread/versions?limit=1":            {"2 LATEST leo"},
		"/v1/follows/7/9007199254740993/versions?limit=1": {"2 LATEST leo"},
	} {
		var got []string
		for _, item := range itemsOf(f.want(t, 200, "GET", path, "")) {
			got = append(got, fmt.Sprint(item["version"], " ", item["version_state"], " ", item["actor"]))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
	}
}
