package api_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

type anyHold struct{}

func (anyHold) Fence(context.Context, pgx.Tx) error { return nil }
func (anyHold) Continue() error                     { return nil }
func (anyHold) Count(string, int64)                 {}

// archive moves every thread to the archive: all of them are old by now.
func (f fixture) archive(t *testing.T) {
	t.Helper()
	archiver, err := store.NewShelver(f.system, func(context.Context) (time.Duration, error) { return time.Hour, nil },
		kinds.Builtin, testkit.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := archiver.Run(t.Context(), anyHold{}); err != nil {
		t.Fatal(err)
	}
	var left int
	if err := f.system.QueryRow(t.Context(), `SELECT count(*) FROM comments`).Scan(&left); err != nil || left > 0 {
		t.Fatalf("%d comments are not archived: %v", left, err)
	}
}

func TestAnArchivedThreadIsAnsweredByteForByteAsBefore(t *testing.T) {
	t.Parallel()
	f := open(t)
	create := func(body, parent, key string) answer {
		t.Helper()
		if parent != "" {
			body += `","parent_id":"` + parent
		}
		return f.want(t, 201, "POST", "/v1/posts/5/comments", `{"author_id":"4","body":"`+body+`"}`, "Idempotency-Key: "+key)
	}
	a := create("first", "", "a")
	b := create("reply", a.text("comment_id"), "b")
	c := create("reply to it", b.text("comment_id"), "c")
	d := create("second", "", "d")
	f.want(t, 204, "DELETE", "/v1/comments/"+b.text("comment_id"), "", "If-Match: *")
	f.want(t, 200, "PATCH", "/v1/comments/"+c.text("comment_id"), `{"body":"edited"}`, "If-Match: *")
	f.want(t, 200, "PUT", "/v1/comments/"+d.text("comment_id")+"/moderation", `{"state":"HIDDEN"}`, "If-Match: *")
	if _, err := f.system.Exec(t.Context(), `UPDATE comments SET updated_at = updated_at - interval '2 hours'`); err != nil {
		t.Fatal(err)
	}
	f.catchUp(t)
	token := c.Header.Get("Tidings-Token")

	paths := []string{"/v1/posts/5/comments/tree", "/v1/posts/5/comments/summary", "/v1/users/4/comments",
		"/v1/moderation/pending", "/v1/posts/5/thread",
		"/v1/posts/5/comments?order=oldest&skip=1", "/v1/posts/5/comments?around=" + b.text("comment_id")}
	for _, order := range []string{"oldest", "newest", "threaded"} {
		paths = append(paths, "/v1/posts/5/comments?limit=1&order="+order, "/v1/posts/5/comments?order="+order)
	}
	for _, x := range []answer{a, b, c, d} {
		id := x.text("comment_id")
		paths = append(paths, "/v1/comments/"+id, "/v1/comments/"+id+"/replies", "/v1/comments/"+id+"/versions",
			"/v1/posts/5/comments/by-slug/"+x.text("slug"))
	}
	read := func() map[string]string {
		t.Helper()
		all := map[string]string{}
		for _, path := range paths {
			for _, with := range []string{"", token} {
				if with != "" && (strings.HasSuffix(path, "/versions") ||
					strings.HasPrefix(path, "/v1/comments/") && !strings.HasSuffix(path, "/replies")) {
					continue // an operation without a token
				}
				var headers []string
				if with != "" {
					headers = []string{"Tidings-Token: " + with}
				}
				x := f.want(t, 200, "GET", path, "", headers...)
				if asOf := x.text("as_of"); asOf != "" {
					x.body = strings.ReplaceAll(x.body, asOf, "as_of")
				}
				all[path+" "+with] = fmt.Sprintln(x.Header.Get("ETag"), x.body)
			}
		}
		for n, body := range []string{`{"author_id":"4","body":"first"}`,
			`{"author_id":"4","body":"reply","parent_id":"` + a.text("comment_id") + `"}`} {
			x := f.want(t, 201, "POST", "/v1/posts/5/comments", body, "Idempotency-Key: "+string(rune('a'+n)))
			all["replay "+body] = fmt.Sprintln(x.Header.Get("Idempotency-Replayed"), x.Header.Get("ETag"), x.Header.Get("Location"), x.body)
		}
		x := f.want(t, 304, "GET", "/v1/comments/"+a.text("comment_id"), "", "If-None-Match: "+a.Header.Get("ETag"))
		all["304"] = x.Header.Get("ETag")
		x = f.want(t, 412, "PATCH", "/v1/comments/"+c.text("comment_id"), `{"body":"late"}`, `If-Match: "1"`)
		all["412"] = strings.ReplaceAll(x.body, x.text("request_id"), "")
		return all
	}
	before := read()
	f.archive(t)
	if diff := cmp.Diff(before, read()); diff != "" {
		t.Errorf("(-before +archived):\n%s", diff)
	}
	x := f.want(t, 200, "PATCH", "/v1/comments/"+c.text("comment_id"), `{"body":"late"}`, `If-Match: "2"`)
	if x.Header.Get("ETag") != `"3"` || x.text("body") != "late" {
		t.Errorf("an edit: %s %s", x.Header.Get("ETag"), x.body)
	}
	f.catchUp(t)
	if x := f.want(t, http.StatusOK, "GET", "/v1/posts/5/comments/by-slug/"+c.text("slug"), ""); x.text("body") != "late" {
		t.Errorf("and its permalink: %s", x.body)
	}
}
