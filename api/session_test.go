package api_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// follow sends a write and returns the write's token.
func (f fixture) follow(t *testing.T, method, path string) string {
	t.Helper()
	a := f.do(t, method, "/v1/follows/"+path, "")
	if a.StatusCode/100 != 2 || a.Header.Get("Tidings-Token") == "" {
		t.Fatalf("%s %s: %d %s with the token %q", method, path, a.StatusCode, a.body, a.Header.Get("Tidings-Token"))
	}
	return "Tidings-Token: " + a.Header.Get("Tidings-Token")
}

// users returns the ids of a list's items; next tells whether another page exists.
func (a answer) users() string {
	var ids []string
	for _, item := range a.json["items"].([]any) {
		ids = append(ids, item.(map[string]any)["user_id"].(string))
	}
	return strings.Join(ids, " ")
}

// No consumer runs in this test: a read includes a write only because of its token.
func TestATokensFollowIsSeenByEveryRead(t *testing.T) {
	t.Parallel()
	f := open(t)
	var first, last string
	for n := range 3 {
		last = f.follow(t, "PUT", fmt.Sprintf("%d/42", 7+n))
		if n == 0 {
			first = last
		}
	}
	if got := f.want(t, 200, "GET", "/v1/users/42/followers", "").users(); got != "" {
		t.Errorf("without a token: %q", got)
	}
	for path, want := range map[string]string{"/v1/users/42/followers": "9", "/v1/users/9/following": "42"} {
		if got := f.want(t, 200, "GET", path, "", last).users(); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	counts := f.want(t, 200, "GET", "/v1/users/42/counts", "", last).json
	if counts["followers"] != 1.0 || counts["following"] != 0.0 {
		t.Errorf("counts %v", counts)
	}
	check := f.want(t, 200, "POST", "/v1/follows:check",
		`{"pairs":[{"follower_id":"9","followee_id":"42"},{"follower_id":"8","followee_id":"42"}]}`, last)
	if !strings.Contains(check.body, `"follower_id":"9"`) || strings.Count(check.body, "true") != 1 {
		t.Errorf("check: %s", check.body)
	}
	many := f.want(t, 200, "POST", "/v1/users:counts", `{"ids":["42"]}`, last)
	if !strings.Contains(many.body, `"followers":1`) {
		t.Errorf("many counts: %s", many.body)
	}
	// Several tokens in one header. Mutuals, and pages with their cursors, include all of their
	// writes.
	other := f.follow(t, "PUT", "9/7")
	both := last + ", " + strings.TrimPrefix(other, "Tidings-Token: ")
	if got := f.want(t, 200, "GET", "/v1/users/9/following?limit=1", "", both); got.users() != "7" || got.text("next") == "" {
		t.Errorf("a page of two: %s", got.body)
	} else if rest := f.want(t, 200, "GET", "/v1/users/9/following?limit=1&cursor="+got.text("next"), "", both); rest.users() != "42" ||
		rest.text("next") != "" {
		t.Errorf("its second: %s", rest.body)
	}
	path := first + ", " + strings.TrimPrefix(other, "Tidings-Token: ") // from 9 over 7 to 42
	if got := f.want(t, 200, "GET", "/v1/users/9/mutuals/42", "", path).users(); got != "7" {
		t.Errorf("mutuals: %q", got)
	}
	gone := f.follow(t, "DELETE", "9/42")
	if got := f.want(t, 200, "GET", "/v1/users/42/followers", "", gone).users(); got != "" {
		t.Errorf("after the end of it: %q", got)
	}
	if again := f.follow(t, "DELETE", "9/42"); cmp.Diff(again, gone) != "" {
		t.Errorf("nothing changed, and the token is another: %q, %q", again, gone)
	}
	if a := f.want(t, 204, "DELETE", "/v1/follows/9/1000", ""); a.Header.Get("Tidings-Token") != "" {
		t.Errorf("a token of what never was: %q", a.Header.Get("Tidings-Token"))
	}
	var left int
	if err := f.system.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM edge_lists) + (SELECT count(*) FROM edge_counts)`).Scan(
		&left); err != nil || left != 0 {
		t.Errorf("reading has left %d rows in the projection (%v)", left, err)
	}
}

func TestABadTokenIsRefused(t *testing.T) {
	t.Parallel()
	f := open(t)
	token := f.follow(t, "PUT", "7/42")
	foreign := f
	foreign.token = f.newToken(t, 2, "foreigner", "read", "write")
	for what, c := range map[string]struct {
		as     fixture
		header string
	}{
		"another tenant's": {foreign, token},
		"changed":          {f, token[:len(token)-1] + "A"},
		"empty":            {f, "Tidings-Token: ,"},
		"not one":          {f, "Tidings-Token: x"},
		"too many":         {f, token + strings.Repeat(","+strings.TrimPrefix(token, "Tidings-Token: "), 64)},
	} {
		if a := c.as.do(t, "GET", "/v1/users/42/followers", "", c.header); a.StatusCode != 400 || a.text("code") != "header-invalid" {
			t.Errorf("%s: %d %s", what, a.StatusCode, a.body)
		}
	}
}

func TestATokensCommentIsSeenByEveryRead(t *testing.T) {
	t.Parallel()
	f := open(t)
	token := func(a answer) string { return "Tidings-Token: " + a.Header.Get("Tidings-Token") }
	bodies := func(a answer, path string) string {
		t.Helper()
		if a.StatusCode != 200 {
			t.Fatalf("%s: %d %s", path, a.StatusCode, a.body)
		}
		var all []string
		for _, item := range a.json["items"].([]any) {
			c := item.(map[string]any)
			body, _ := c["body"].(string)
			all = append(all, c["state"].(string)+" "+body)
		}
		return strings.Join(all, ", ")
	}
	list := func(path, token string) string { t.Helper(); return bodies(f.do(t, "GET", path, "", token), path) }

	first := f.comment(t, 100, "first")
	id, slug := first.text("comment_id"), first.text("slug")
	reply := f.want(t, 201, "POST", "/v1/posts/100/comments", fmt.Sprintf(`{"author_id":"4","body":"reply","parent_id":%q}`, id))
	both := token(first) + "," + reply.Header.Get("Tidings-Token")
	for path, want := range map[string]string{
		"/v1/posts/100/comments":                      "VISIBLE first, VISIBLE reply",
		"/v1/posts/100/comments?order=newest":         "VISIBLE reply, VISIBLE first",
		"/v1/posts/100/comments?order=threaded":       "VISIBLE first, VISIBLE reply",
		"/v1/posts/100/comments?skip=1":               "VISIBLE reply",
		"/v1/posts/100/comments?around=" + id:         "VISIBLE first, VISIBLE reply",
		"/v1/comments/" + id + "/replies":             "VISIBLE reply",
		"/v1/users/4/comments":                        "VISIBLE reply",
		"/v1/posts/100/comments/tree":                 "VISIBLE first",
		"/v1/posts/100/comments?order=oldest&limit=1": "VISIBLE first",
	} {
		if got := list(path, both); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	if a := f.want(t, 200, "GET", "/v1/posts/100/comments/by-slug/"+slug, "", both); a.text("body") != "first" {
		t.Errorf("by slug: %s", a.body)
	}
	if a := f.want(t, 200, "GET", "/v1/posts/100/comments/summary", "", both); a.json["visible"] != 2.0 || a.json["total"] != 2.0 {
		t.Errorf("summary: %s", a.body)
	}
	// A read includes a reply whose parent the projection does not have either, and each change.
	if got := list("/v1/posts/100/comments", token(reply)); got != "VISIBLE reply" {
		t.Errorf("the reply alone: %q", got)
	}
	edited := f.want(t, 200, "PATCH", "/v1/comments/"+reply.text("comment_id"), `{"body":"edited"}`, "If-Match: *")
	deleted := f.want(t, 204, "DELETE", "/v1/comments/"+id, "", "If-Match: *")
	if got := list("/v1/posts/100/comments?order=threaded",
		token(edited)+","+deleted.Header.Get("Tidings-Token")); got != "DELETED , VISIBLE edited" {
		t.Errorf("after an edit and a deletion: %q", got)
	}
	hidden := f.want(t, 200, "PUT", "/v1/comments/"+reply.text("comment_id")+"/moderation", `{"state":"HIDDEN"}`, "If-Match: *")
	if got := list("/v1/posts/100/comments?order=threaded", token(hidden)+","+deleted.Header.Get("Tidings-Token")); got != "" {
		t.Errorf("after moderation: %q", got)
	}
	settings := f.want(t, 200, "PUT", "/v1/posts/100/thread", `{"premoderated":true,"title":"T"}`)
	pending := f.comment(t, 100, "waits")
	if a := f.want(t, 200, "GET", "/v1/posts/100/comments", "", token(settings)); !strings.Contains(a.body, `"title":"T"`) {
		t.Errorf("settings: %s", a.body)
	}
	if got := list("/v1/moderation/pending", token(pending)); got != "PENDING waits" {
		t.Errorf("pending: %q", got)
	}
	var left int
	if err := f.system.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM child_lists) + (SELECT count(*)
		FROM child_buckets) + (SELECT count(*) FROM child_totals) + (SELECT count(*) FROM child_aggregates)
		+ (SELECT count(*) FROM child_settings)`).Scan(&left); err != nil || left != 0 {
		t.Errorf("reading has left %d rows in the projection (%v)", left, err)
	}
}
