package api_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// TestEdgesToChildren puts edges to comments in every state, alone and in a batch, with and without
// attributes, reads the lists of both ends, and removes all edges of a comment.
func TestEdgesToChildren(t *testing.T) {
	t.Parallel()
	f := open(t)
	const unknown = "0196b2d4-7c00-7000-8000-00000000000a"
	state := func(state string) string {
		id := f.comment(t, 5, "state "+state).text("comment_id")
		switch state {
		case "":
		case "DELETED":
			f.want(t, 204, "DELETE", "/v1/comments/"+id, "", "If-Match: *")
		default:
			f.want(t, 200, "PUT", "/v1/comments/"+id+"/moderation", fmt.Sprintf(`{"state":%q}`, state), "If-Match: *")
		}
		return id
	}
	old := f.comment(t, 6, "of an old thread").text("comment_id")
	f.exec(t, `UPDATE comments SET updated_at = updated_at - interval '2 hours'`)
	f.archive(t)
	visible, erased := state(""), state("")
	system := store.New(f.system, nil)
	if _, err := system.EraseChildren(t.Context(), tenant, kinds.Builtin().Children["comment"], kinds.Builtin().EdgesTo("comment"),
		[]string{erased}, false, store.Meta{Actor: "officer"}, anyHold{}.Fence); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		id     string
		status int
		code   string
		detail string
	}{
		{visible, 201, "", ""}, {state("PENDING"), 201, "", ""}, {old, 201, "", ""},
		{state("DELETED"), 409, "target-gone", "the comment was deleted by its author"},
		{state("HIDDEN"), 409, "target-gone", "the comment was hidden by a moderator"},
		{state("REMOVED"), 409, "target-gone", "the comment was removed by a moderator"},
		{erased, 409, "target-gone", "the comment was erased"},
		{unknown, 404, "not-found", "there is no such comment"},
		{strings.ToUpper(visible), 422, "validation-failed", ""}, {"42", 422, "validation-failed", ""},
	}
	for plural, attributes := range map[string]string{"comment_likes": "", "votes": `{"value":-1}`} {
		var ops, want []string
		for _, c := range cases {
			a := f.want(t, c.status, "PUT", "/v1/"+plural+"/7/"+c.id, attributes)
			if a.text("code") != c.code || c.detail != "" && a.text("detail") != c.detail ||
				c.status == 422 && !strings.Contains(a.body, `"parameter":"comment_id"`) {
				t.Errorf("%s/7/%s: %s", plural, c.id, a.body)
			}
			op := fmt.Sprintf(`{"op":"put","user_id":"8","comment_id":%q`, c.id)
			if attributes != "" {
				op += `,"attributes":` + attributes
			}
			ops, want = append(ops, op+"}"), append(want, strings.TrimSpace(fmt.Sprint(c.status, " ", c.code)))
		}
		batch := f.want(t, 200, "POST", "/v1/"+plural+":batch", `{"operations":[`+strings.Join(ops, ",")+`]}`)
		var got []string
		for _, item := range itemsOf(batch) {
			problem, _ := item["problem"].(map[string]any)
			code, _ := problem["code"].(string)
			got = append(got, strings.TrimSpace(fmt.Sprint(item["status"], " ", code)))
			if item["status"] == 422.0 && !strings.Contains(fmt.Sprint(problem), "#/comment_id") {
				t.Errorf("%v", problem)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", plural, diff)
		}
		f.want(t, 422, "POST", "/v1/"+plural+":check", `{"pairs":[{"user_id":"7","comment_id":"42"}]}`)
		for _, method := range []string{"GET", "DELETE"} {
			f.want(t, 422, method, "/v1/"+plural+"/7/42", "")
		}
		f.want(t, 204, "DELETE", "/v1/"+plural+"/7/"+unknown, "")
		f.want(t, 404, "GET", "/v1/"+plural+"/7/"+unknown, "")
	}
	f.want(t, 422, "PUT", "/v1/votes/7/"+visible, `{"value":0}`)
	f.want(t, 422, "PUT", "/v1/votes/7/"+visible, "{}")
	f.want(t, 409, "PATCH", "/v1/votes/7/"+cases[4].id, `{"value":1}`, "If-Match: *")
	f.want(t, 404, "PATCH", "/v1/votes/7/"+unknown, `{"value":1}`, "If-Match: *")
	f.want(t, 422, "GET", "/v1/comments/42/likers", "")

	f.catchUp(t)
	read := func(path, member string) (ids []any) {
		for _, item := range itemsOf(f.want(t, 200, "GET", path, "")) {
			ids = append(ids, item[member])
		}
		return ids
	}
	if got := read("/v1/comments/"+visible+"/likers", "user_id"); !cmp.Equal(got, []any{"8", "7"}) {
		t.Errorf("likers %v", got)
	}
	if got := fmt.Sprint(read("/v1/users/8/liked_comments", "comment_id")); !strings.Contains(got, old) || len(got) != len("[]")+3*36+2 {
		t.Errorf("liked comments %v", got)
	}
	if got := read("/v1/users/7/voted_comments", "comment_id"); !cmp.Equal(got, []any{old, cases[1].id, visible}) {
		t.Errorf("voted comments %v", got)
	}
	voters := itemsOf(f.want(t, 200, "GET", "/v1/comments/"+old+"/voters", ""))
	if len(voters) != 2 || fmt.Sprint(voters[0]["attributes"]) != "map[value:-1]" {
		t.Errorf("voters %v", voters)
	}

	f.want(t, 422, "POST", "/v1/comments/42:remove-edges", "")
	f.want(t, 422, "POST", "/v1/comments/"+visible+":remove-edges", `{"direction":"from"}`)
	asked := f.want(t, 202, "POST", "/v1/comments/"+visible+":remove-edges", `{"kinds":["like_comment"]}`)
	remover, err := store.NewRemover(f.system, nil, kinds.Builtin, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- remover.Run(ctx) }()
	testkit.Eventually(t, "the removal to end", func() (bool, error) {
		a := f.want(t, 200, "GET", asked.Header.Get("Location"), "")
		return a.text("state") == "DONE" && fmt.Sprint(a.json["removed"]) == "map[like_comment:2]", nil
	})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	f.want(t, 404, "GET", "/v1/comment_likes/7/"+visible, "")
	f.want(t, 200, "GET", "/v1/votes/7/"+visible, "")
	f.want(t, 200, "GET", "/v1/comment_likes/7/"+old, "")
}
