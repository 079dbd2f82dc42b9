package api_test

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const answersFile = `
objects: {question: questions}
edges:
  verdict: {plural: verdicts, from: user, to: answer, forward: judged_answers, reverse: judges,
    attributes: {value: {enum: [-1, 1], aggregate: true, required: true}, face: {enum: [smile, frown], aggregate: true}}}
  bookmark: {plural: bookmarks, from: user, to: answer, forward: bookmarked_answers, reverse: bookmarkers}
children:
  answer: {plural: answers, parent: question, threaded: true, ranked_by: verdict}
`

// judged writes answers to the question 1 and edges to them, and returns the ids of the answers,
// those with the highest score first: 2, 1, 0 (the newer one), 0, -1.
func (f fixture) judged(t *testing.T) (ranked []string) {
	t.Helper()
	var ids []string
	for n := range 5 {
		a := f.want(t, 201, "POST", "/v1/questions/1/answers", fmt.Sprintf(`{"author_id":"%d","body":"x"}`, n+1))
		ids = append(ids, a.text("answer_id"))
	}
	for n, verdicts := range map[int][]string{0: {"1"}, 2: {"-1", "-1", "1"}, 3: {"1", "1"}, 4: {"1", "-1"}} {
		for user, value := range verdicts {
			f.want(t, 201, "PUT", fmt.Sprintf("/v1/verdicts/%d/%s", user+1, ids[n]), `{"value":`+value+`,"face":"smile"}`)
		}
	}
	f.want(t, 201, "PUT", "/v1/verdicts/9/"+ids[3], `{"value":-1,"face":"frown"}`)
	f.want(t, 200, "PUT", "/v1/verdicts/9/"+ids[3], `{"value":1}`)
	f.want(t, 204, "DELETE", "/v1/verdicts/9/"+ids[3], "")
	f.want(t, 201, "PUT", "/v1/bookmarks/7/"+ids[3], "")
	return []string{ids[3], ids[0], ids[4], ids[1], ids[2]}
}

// pages follows a list to its end, and returns the ids of its answers.
func (f fixture) pages(t *testing.T, path string, headers ...string) (ids []string) {
	t.Helper()
	for cursor := ""; ; {
		page := f.want(t, 200, "GET", path+cursor, "", headers...)
		for _, item := range itemsOf(page) {
			ids = append(ids, item["answer_id"].(string))
		}
		next := page.text("next")
		if next == "" {
			return ids
		}
		cursor = "&cursor=" + url.QueryEscape(next)
	}
}

func TestChildrenAreRankedByTheEdgesToThem(t *testing.T) {
	t.Parallel()
	f, _, a := openKindsOf(t, answersFile, true)
	want := f.judged(t)
	f.catchUpWith(t, a.Now)
	for _, limit := range []int{1, 2, 5, 200} {
		if diff := cmp.Diff(want, f.pages(t, fmt.Sprintf("/v1/questions/1/answers?order=top&limit=%d", limit))); diff != "" {
			t.Errorf("pages of %d (-want +got):\n%s", limit, diff)
		}
	}
	// A vote between two pages moves one answer, and each other one is on exactly one page.
	first := f.want(t, 200, "GET", "/v1/questions/1/answers?order=top&limit=2", "")
	f.want(t, 201, "PUT", "/v1/verdicts/7/"+want[0], `{"value":1}`)
	f.want(t, 204, "DELETE", "/v1/answers/"+want[3], "", `If-Match: "1"`)
	f.catchUpWith(t, a.Now)
	rest := f.pages(t, "/v1/questions/1/answers?order=top&limit=2&cursor="+url.QueryEscape(first.text("next")))
	if diff := cmp.Diff([]string{want[2], want[4]}, rest); diff != "" {
		t.Errorf("after a vote and a deletion (-want +got):\n%s", diff)
	}
	if empty := f.pages(t, "/v1/questions/2/answers?order=top"); len(empty) > 0 {
		t.Errorf("another question has %v", empty)
	}
	for path, detail := range map[string]string{
		"/v1/questions/1/answers?order=top&skip=2":              "skip needs the order oldest or newest",
		"/v1/questions/1/answers?order=top&around=" + want[0]:   "around needs the order oldest",
		"/v1/posts/1/comments?order=best":                       "expected value to be one of",
		"/v1/products/1/reviews?order=top":                      "expected value to be one of",
		"/v1/questions/1/answers?counts=judges,followers":       "expected value to be one of",
		"/v1/products/1/reviews?counts=judges":                  "unknown query parameter",
		"/v1/questions/1/answers/tree?counts=liked":             "expected value to be one of",
		"/v1/answers/" + want[0] + "/replies?counts=bookmarked": "expected value to be one of",
	} {
		if got := f.want(t, 422, "GET", path, ""); !strings.Contains(got.body, detail) {
			t.Errorf("%s: %s; want %s", path, got.body, detail)
		}
	}
}

// TestListsOfChildrenHaveTheCountsThatTheyAreAskedFor has every list of children.
func TestListsOfChildrenHaveTheCountsThatTheyAreAskedFor(t *testing.T) {
	t.Parallel()
	f, _, a := openKindsOf(t, answersFile, true)
	ids := f.judged(t)
	reply := f.want(t, 201, "POST", "/v1/questions/1/answers", `{"author_id":"4","body":"x","parent_id":"`+ids[0]+`"}`)
	f.want(t, 201, "PUT", "/v1/verdicts/3/"+reply.text("answer_id"), `{"value":-1}`)
	f.catchUpWith(t, a.Now)
	judged := func(count, sum, ups, downs, smiles float64) map[string]any {
		return map[string]any{"judges": count, "aggregates": map[string]any{"judges": map[string]any{
			"value": map[string]any{"count": count, "sum": sum, "values": map[string]any{"-1": downs, "1": ups}},
			"face":  map[string]any{"count": smiles, "values": map[string]any{"smile": smiles, "frown": 0.0}}}}}
	}
	want := map[string]any{ids[0]: judged(2, 2, 2, 0, 2), ids[3]: judged(0, 0, 0, 0, 0), ids[4]: judged(3, -1, 1, 2, 3),
		reply.text("answer_id"): judged(1, -1, 0, 1, 0)}
	slug := f.want(t, 200, "GET", "/v1/answers/"+ids[0], "").text("slug")
	for path, all := range map[string]bool{
		"/v1/questions/1/answers?":                      true,
		"/v1/questions/1/answers?order=newest&":         true,
		"/v1/questions/1/answers?order=threaded&":       true,
		"/v1/questions/1/answers?order=top&":            true,
		"/v1/questions/1/answers/tree?":                 true,
		"/v1/users/4/answers?":                          false,
		"/v1/answers/" + ids[0] + "/replies?":           false,
		"/v1/questions/1/answers/by-slug/" + slug + "?": false,
	} {
		got := make(map[string]any)
		var collect func(any)
		collect = func(v any) {
			switch v := v.(type) {
			case []any:
				for _, item := range v {
					collect(item)
				}
			case map[string]any:
				if id, ok := v["answer_id"].(string); ok {
					got[id] = v["counts"]
				}
				collect(v["items"])
				collect(v["replies"])
			}
		}
		collect(any(f.want(t, 200, "GET", path+"counts=judges", "").json))
		if len(got) == 0 || all && len(got) != 6 {
			t.Errorf("%s: %d answers", path, len(got))
		}
		for id, counts := range got {
			if w, ok := want[id]; ok {
				if diff := cmp.Diff(w, counts); diff != "" {
					t.Errorf("%s, %s (-want +got):\n%s", path, id, diff)
				}
			}
		}
		if body := f.want(t, 200, "GET", strings.TrimRight(path, "?&"), "").body; strings.Contains(body, "counts") {
			t.Errorf("%s: without a parameter there are counts: %s", path, body)
		}
	}
	both := itemsOf(f.want(t, 200, "GET", "/v1/questions/1/answers?order=top&limit=1&counts=bookmarkers,judges", ""))[0]["counts"]
	if diff := cmp.Diff(judged(2, 2, 2, 0, 2)["aggregates"], both.(map[string]any)["aggregates"]); diff != "" ||
		both.(map[string]any)["bookmarkers"] != 1.0 {
		t.Errorf("two lists: %v", both)
	}
	one := f.want(t, 200, "GET", "/v1/answers/"+ids[0]+"/counts", "").json
	delete(one, "as_of")
	wantOne := judged(2, 2, 2, 0, 2)
	wantOne["bookmarkers"] = 1.0
	if diff := cmp.Diff(wantOne, one); diff != "" {
		t.Errorf("the counts of one (-want +got):\n%s", diff)
	}
	many := itemsOf(f.want(t, 200, "POST", "/v1/answers:counts", `{"ids":["`+ids[0]+`"]}`))
	if diff := cmp.Diff(any(wantOne), many[0]["counts"]); diff != "" {
		t.Errorf("the counts of many (-want +got):\n%s", diff)
	}
	check := itemsOf(f.want(t, 200, "POST", "/v1/answers:check", `{"user_id":"1","ids":["`+ids[0]+`"]}`))[0]["edges"].(map[string]any)
	attributes := any(map[string]any{"value": 1.0, "face": "smile"})
	if v := check["verdict"].(map[string]any); v["active"] != true || !cmp.Equal(v["attributes"], attributes) ||
		check["bookmark"].(map[string]any)["active"] != false {
		t.Errorf("the check says %v", check)
	}
}

// TestRanksIncludeTheWritesOfTokens has no consumer: both projections are read as if they had
// applied the writes.
func TestRanksIncludeTheWritesOfTokens(t *testing.T) {
	t.Parallel()
	f, _, _ := openKindsOf(t, answersFile, true)
	var ids, tokens []string
	for n := range 3 {
		a := f.want(t, 201, "POST", "/v1/questions/1/answers", fmt.Sprintf(`{"author_id":"%d","body":"x"}`, n+1))
		ids, tokens = append(ids, a.text("answer_id")), append(tokens, a.Header.Get("Tidings-Token"))
	}
	tokens = append(tokens, f.want(t, 201, "PUT", "/v1/verdicts/7/"+ids[0], `{"value":1}`).Header.Get("Tidings-Token"))
	tokens = append(tokens, f.want(t, 201, "PUT", "/v1/verdicts/7/"+ids[2], `{"value":-1}`).Header.Get("Tidings-Token"))
	got := f.pages(t, "/v1/questions/1/answers?order=top&limit=200", "Tidings-Token: "+strings.Join(tokens, ","))
	if diff := cmp.Diff([]string{ids[0], ids[1], ids[2]}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := f.pages(t, "/v1/questions/1/answers?order=top&limit=200"); len(got) > 0 {
		t.Errorf("without tokens: %v", got)
	}
}
