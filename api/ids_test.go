package api_test

import (
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
)

// TestIDsOfEveryFormGoThroughEveryWay writes and reads with ids of any form that is allowed: they
// are percent-decoded once, and what looks like a verb is part of an id.
func TestIDsOfEveryFormGoThroughEveryWay(t *testing.T) {
	f := open(t)
	ask := func(status int, method, target, body string, headers ...string) answer { // unlike f.want, with an encoded path
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+f.token)
		if body != "" {
			r.Header.Set("Content-Type", "application/json")
		}
		for _, token := range headers {
			r.Header.Set("Tidings-Token", token)
		}
		w := httptest.NewRecorder()
		f.ServeHTTP(w, r)
		a := answerOf(t, w)
		if a.StatusCode != status {
			t.Fatalf("%s %s: %d %s, want %d", method, target, a.StatusCode, a.body, status)
		}
		return a
	}
	for _, id := range []string{"0", "007", "-1", "9223372036854775808", "0196b2d4-7c00-7000-8000-00000000000a",
		"01ARZ3NDEKTSV4RRFFQ69G5FAV",
		"auth0|5f7c8ec7c33c6c004bbafe82", "a.b+c@example.com", "~x=y", "7:batch", "7:retry", "7:remove-edges", ":remove-edges", "7.", "...",
		strings.Repeat("x", 128)} {
		in := url.PathEscape(id)
		token := ask(201, "PUT", "/v1/follows/"+in+"/2", "").Header.Get("Tidings-Token")
		encoded := strings.NewReplacer(":", "%3A", "@", "%40", "+", "%2B", "~", "%7E").Replace(in)
		if a := ask(200, "GET", "/v1/follows/"+encoded+"/2", ""); a.text("follower_id") != id {
			t.Errorf("%s: %s", id, a.body)
		}
		if a := ask(200, "GET", "/v1/users/"+in+"/following", "", token); len(itemsOf(a)) != 1 {
			t.Errorf("%s follows: %s", id, a.body)
		}
		ask(201, "PUT", "/v1/likes/1/"+in, "")
		post := "/v1/posts/" + in + "/comments"
		written := ask(201, "POST", post, `{"author_id":"`+id+`","body":"x"}`)
		if written.text("post_id") != id || written.text("author_id") != id {
			t.Errorf("%s: %s", id, written.body)
		}
		if a := ask(200, "GET", post, "", written.Header.Get("Tidings-Token")); len(itemsOf(a)) != 1 {
			t.Errorf("comments of %s: %s", id, a.body)
		}
		batch := ask(200, "POST", "/v1/follows:batch", `{"operations":[{"op":"put","follower_id":"`+id+`","followee_id":"3"},`+
			`{"op":"put","follower_id":"a/`+id+`","followee_id":"3"}]}`)
		if items := itemsOf(batch); items[0]["status"] != 201.0 || items[1]["status"] != 422.0 {
			t.Errorf("batch of %s: %s", id, batch.body)
		}
		if a := ask(202, "POST", "/v1/users/"+in+":remove-edges", ""); a.text("object_id") != id {
			t.Errorf("removal of %s: %s", id, a.body)
		}
	}
	ask(422, "PUT", "/v1/follows/%2541/2", "") // decoded twice, it would be the id A
	ask(201, "PUT", "/v1/follows/%41/2", "")
	ask(200, "GET", "/v1/follows/A/2", "")
	for _, id := range []string{".", "..", "%2E", "%2e%2E"} { // a path cannot have them
		ask(404, "GET", "/v1/follows/"+id+"/2", "")
	}
	ask(404, "GET", "/v1/follows/7/2", "") // 007 and 7. are other ids
}
