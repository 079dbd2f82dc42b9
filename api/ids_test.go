package api_test

import (
	"fmt"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/tidings/tidings/kinds"
)

// TestIDsOfEveryFormGoThroughEveryWay writes and reads with ids of any form that is allowed: they
// are percent-decoded once, and what looks like a verb is part of an id.
func TestIDsOfEveryFormGoThroughEveryWay(t *testing.T) {
	t.Parallel()
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

// narrowKinds has objects whose ids have one form.
const narrowKinds = `
objects: {song: {plural: songs, id: uuid}, disc: {plural: discs, id: integer}}
edges:
  spin: {plural: spins, from: disc, to: song, forward: spun, reverse: spinners, attributes: {speed: {type: integer}}}
children:
  remark: {plural: remarks, parent: song, moderated: true}
  sleeve: {plural: sleeves, parent: disc, threaded: true}
`

const (
	song     = "0196b2d4-7c00-7000-8000-00000000000a"
	uuidRule = "a UUID in lower case with hyphens"
	intRule  = "a decimal number from 1 to 9223372036854775807, without leading zeros"
)

// TestIDsOfANarrowedObjectHaveItsForm asks every route with an id of another form.
func TestIDsOfANarrowedObjectHaveItsForm(t *testing.T) {
	t.Parallel()
	f, _, _ := openKindsOf(t, narrowKinds, true)
	// refused wants a problem that names the place and the rule
	refused := func(p map[string]any, place, at, rule, request string) {
		t.Helper()
		errors, _ := p["errors"].([]any)
		if len(errors) != 1 {
			t.Errorf("%s: %v", request, p)
			return
		}
		e := errors[0].(map[string]any)
		if detail, _ := e["detail"].(string); p["code"] != "validation-failed" || e[place] != at || !strings.HasSuffix(detail, rule) {
			t.Errorf("%s: %v, want the %s %s and %q", request, p, place, at, rule)
		}
	}
	for _, c := range []struct{ method, path, body, parameter, rule string }{
		{"PUT", "/v1/spins/7/abc", "", "song_id", uuidRule},
		{"PUT", "/v1/spins/7/" + strings.ToUpper(song), `{"speed":33}`, "song_id", uuidRule},
		{"PUT", "/v1/spins/07/" + song, "", "disc_id", intRule},
		{"PUT", "/v1/spins/9223372036854775808/" + song, "", "disc_id", intRule},
		{"PATCH", "/v1/spins/x/" + song, `{"speed":33}`, "disc_id", intRule},
		{"DELETE", "/v1/spins/x/" + song, "", "disc_id", intRule},
		{"GET", "/v1/spins/x/" + song, "", "disc_id", intRule},
		{"GET", "/v1/spins/7/x/versions", "", "song_id", uuidRule},
		{"GET", "/v1/discs/x/spun", "", "disc_id", intRule},
		{"GET", "/v1/songs/7/spinners", "", "song_id", uuidRule},
		{"GET", "/v1/songs/7/counts", "", "song_id", uuidRule},
		{"POST", "/v1/songs/7:remove-edges", "", "song_id", uuidRule},
		{"POST", "/v1/songs/7/remarks", `{"author_id":"3","body":"x"}`, "song_id", uuidRule},
		{"GET", "/v1/songs/7/remarks", "", "song_id", uuidRule},
		{"GET", "/v1/songs/7/remarks/summary", "", "song_id", uuidRule},
		{"GET", "/v1/songs/7/remarks/settings", "", "song_id", uuidRule},
		{"PUT", "/v1/songs/7/remarks/settings", `{"locked":true}`, "song_id", uuidRule},
		{"GET", "/v1/songs/7/remarks/settings/versions", "", "song_id", uuidRule},
		{"GET", "/v1/moderation/remarks/pending?song_id=7", "", "song_id", uuidRule},
		{"POST", "/v1/discs/0/sleeves", `{"author_id":"3","body":"x"}`, "disc_id", intRule},
		{"GET", "/v1/discs/x/sleeves/tree", "", "disc_id", intRule},
		{"GET", "/v1/discs/x/sleeves/by-slug/abcd2345", "", "disc_id", intRule},
	} {
		a := f.want(t, 422, c.method, c.path, c.body, "If-Match: *")
		refused(a.json, "parameter", c.parameter, c.rule, c.method+" "+c.path)
	}
	problem := func(item map[string]any) map[string]any { p, _ := item["problem"].(map[string]any); return p }
	const op = `{"op":"put","disc_id":"7","song_id":"` + song + `"}`
	batch := itemsOf(f.want(t, 200, "POST", "/v1/spins:batch", `{"operations":[`+strings.Join([]string{op,
		strings.Replace(op, song, "7", 1), strings.Replace(op, `"7"`, `"9223372036854775808"`, 1),
		strings.Replace(strings.Replace(op, song, "7", 1), "put", "remove", 1)}, ",")+`]}`))
	if batch[0]["status"] != 201.0 {
		t.Errorf("%v", batch[0])
	}
	refused(problem(batch[1]), "pointer", "#/song_id", uuidRule, "put")
	refused(problem(batch[2]), "pointer", "#/disc_id", intRule, "put")
	refused(problem(batch[3]), "pointer", "#/song_id", uuidRule, "remove")
	batch = itemsOf(f.want(t, 200, "POST", "/v1/remarks:batch", `{"operations":[{"op":"create","song_id":"7","author_id":"3","body":"x"},`+
		`{"op":"create","song_id":"`+song+`","author_id":"3","body":"x"}]}`))
	refused(problem(batch[0]), "pointer", "#/song_id", uuidRule, "create")
	if batch[1]["status"] != 201.0 {
		t.Errorf("%v", batch[1])
	}
	check := f.want(t, 422, "POST", "/v1/spins:check", `{"pairs":[{"disc_id":"7","song_id":"`+song+`"},{"disc_id":"7","song_id":"x"}]}`)
	refused(check.json, "pointer", "#/pairs/1/song_id", uuidRule, "check")

	f.want(t, 200, "PUT", "/v1/spins/7/"+song, "")
	f.want(t, 201, "PUT", "/v1/spins/9223372036854775807/"+song, "")
	f.want(t, 201, "POST", "/v1/songs/"+song+"/remarks", `{"author_id":"a|b","body":"x"}`)
	f.want(t, 201, "PUT", "/v1/follows/a/b", "") // other objects have ids of any form

	forms := map[string]any{}
	for _, o := range f.want(t, 200, "GET", "/v1/kinds", "").json["objects"].([]any) {
		o := o.(map[string]any)
		forms[o["name"].(string)] = o["id"]
	}
	if forms["song"] != "uuid" || forms["disc"] != "integer" || forms["user"] != "string" {
		t.Errorf("GET /v1/kinds: %v", forms)
	}
	d := f.document(t)
	path := parametersOf(d["paths"].(map[string]any)["/v1/spins/{disc_id}/{song_id}"].(map[string]any)["get"].(map[string]any))
	for name, form := range map[string]kinds.IDForm{"disc_id": kinds.Integer, "song_id": kinds.UUID} {
		i := slices.IndexFunc(path, func(p map[string]any) bool { return p["name"] == name })
		for where, schema := range map[string]any{"path": path[i]["schema"], "answer": d.ref("#/components/schemas/Spin"),
			"batch": d.ref("#/components/schemas/SpinPut")} {
			s := schema.(map[string]any)
			if properties, ok := s["properties"].(map[string]any); ok {
				s = properties[name].(map[string]any)
			}
			if s["pattern"] != form.Pattern() || (s["format"] == "uuid") != (form == kinds.UUID) || s["type"] != "string" {
				t.Errorf("%s of the %s: %v", name, where, s)
			}
		}
	}
	event := f.want(t, 200, "GET", "/v1/schemas/tidings.spin.created.v1", "", "Authorization").json["properties"].(map[string]any)
	if got := event["song_id"].(map[string]any); got["pattern"] != kinds.IDForm(kinds.UUID).Pattern() || got["format"] != "uuid" {
		t.Errorf("the contract of the event: %v", got)
	}
}

// TestAWrongParameterHasOneError sends wrong values to every operation, one at a time. A value that
// breaks several rules of its schema, such as the pattern and the format of an id, is one error.
func TestAWrongParameterHasOneError(t *testing.T) {
	t.Parallel()
	f, _, _ := openKindsOf(t, narrowKinds, true)
	inPaths := 0
	f.operations(t, func(method, path string, op map[string]any) {
		all := parametersOf(op)
		for _, wrong := range all {
			for _, value := range []string{"zzz", strings.Repeat("!", 300)} {
				target, query, headers := path, url.Values{}, []string{"If-Match: *"}
				for _, p := range all {
					v := fmt.Sprint(p["example"])
					if p["name"] == wrong["name"] {
						v = value
					}
					switch {
					case p["in"] == "path":
						target = strings.Replace(target, "{"+p["name"].(string)+"}", v, 1)
					case p["name"] != wrong["name"]:
					case p["in"] == "query":
						query.Set(p["name"].(string), v)
					case p["in"] == "header":
						headers = append(headers, p["name"].(string)+": "+v)
					}
				}
				body := ""
				if op["requestBody"] != nil {
					body = "{}"
				}
				a := f.do(t, method, strings.TrimSuffix(target+"?"+query.Encode(), "?"), body, headers...)
				errors, _ := a.json["errors"].([]any)
				of := 0
				for _, e := range errors {
					if e := e.(map[string]any); e["parameter"] == wrong["name"] || e["header"] == wrong["name"] {
						of++
					}
				}
				if of > 1 {
					t.Errorf("%s %s with the %s %s: %s", method, path, wrong["name"], value, a.body)
				}
				if wrong["in"] == "path" && len(value) > 128 {
					inPaths++
					if a.StatusCode != 422 || of != 1 {
						t.Errorf("%s %s with the %s %s: %d %s", method, path, wrong["name"], value, a.StatusCode, a.body)
					}
				}
			}
		}
	})
	if inPaths < 50 {
		t.Errorf("%d parameters of paths, want 50 or more", inPaths)
	}
}

// changedKinds changes kinds that are built in.
const changedKinds = `
objects: {user: {id: uuid}, post: {id: integer}}
edges:
  follow: {partitions: 2, attributes: {mood: {enum: [calm, loud], default: calm, filter: true}, note: {type: string}}}
  like: {attributes: {weight: {type: integer}}}
children:
  comment: {partitions: 2, attributes: {stars: {type: integer, minimum: 1, maximum: 5, aggregate: true}}}
  message: {moderated: true}
`

// TestBuiltInKindsAreAsAFileChangesThem writes and reads follows and comments, whose routes are
// older than kinds.
func TestBuiltInKindsAreAsAFileChangesThem(t *testing.T) {
	t.Parallel()
	f, _, a := openKindsOf(t, changedKinds, true)
	ann, bob, eve := song, song[:35]+"b", song[:35]+"e"
	for _, c := range []struct{ method, path, body, parameter, rule string }{
		{"PUT", "/v1/follows/7/" + ann, "", "follower_id", uuidRule},
		{"GET", "/v1/users/7/followers", "", "user_id", uuidRule},
		{"GET", "/v1/users/7/comments", "", "user_id", uuidRule},
		{"GET", "/v1/users/" + ann + "/mutuals/8", "", "other_id", uuidRule},
		{"PUT", "/v1/likes/" + ann + "/x", "", "post_id", intRule},
		{"POST", "/v1/posts/x/comments", `{"author_id":"` + ann + `","body":"x"}`, "post_id", intRule},
		{"PUT", "/v1/posts/x/thread", `{"locked":true}`, "post_id", intRule},
	} {
		if p := f.want(t, 422, c.method, c.path, c.body); !strings.Contains(p.body, `"parameter":"`+c.parameter+`"`) ||
			!strings.Contains(p.body, c.rule) {
			t.Errorf("%s %s: %s", c.method, c.path, p.body)
		}
	}
	for path, c := range map[string]struct{ body, pointer string }{
		"/v1/posts/5/comments": {`{"author_id":"7","body":"x"}`, "#/author_id"},
		"/v1/users:counts":     {`{"ids":["` + ann + `","7"]}`, "#/ids/1"},
		"/v1/follows:check":    {`{"pairs":[{"follower_id":"` + ann + `","followee_id":"7"}]}`, "#/pairs/0/followee_id"},
	} {
		if p := f.want(t, 422, "POST", path, c.body); !strings.Contains(p.body, `"pointer":"`+c.pointer+`"`) ||
			!strings.Contains(p.body, uuidRule) {
			t.Errorf("POST %s: %s", path, p.body)
		}
	}

	f.want(t, 201, "PUT", "/v1/follows/"+ann+"/"+bob, "")
	f.want(t, 201, "PUT", "/v1/follows/"+eve+"/"+bob, `{"mood":"loud","note":"x"}`)
	if got := f.want(t, 200, "PATCH", "/v1/follows/"+ann+"/"+bob, `{"note":"y"}`, `If-Match: *`); got.json["version"] != 2.0 {
		t.Errorf("%s", got.body)
	}
	f.want(t, 201, "PUT", "/v1/likes/"+ann+"/5", `{"weight":3}`)
	first := f.want(t, 201, "POST", "/v1/posts/5/comments", `{"author_id":"`+ann+`","body":"x","attributes":{"stars":4}}`)
	f.want(t, 201, "POST", "/v1/posts/5/comments",
		`{"author_id":"`+bob+`","body":"y","parent_id":"`+first.text("comment_id")+`","attributes":{"stars":2}}`)
	f.want(t, 422, "POST", "/v1/posts/5/comments", `{"author_id":"`+ann+`","body":"x","attributes":{"stars":9}}`)
	f.catchUpWith(t, a.Now)
	followers := func(query string) (all []string) {
		t.Helper()
		for _, item := range itemsOf(f.want(t, 200, "GET", "/v1/users/"+bob+"/followers"+query, "")) {
			attributes, _ := item["attributes"].(map[string]any)
			all = append(all, fmt.Sprintf("%t %v %v", item["user_id"] == ann, attributes["mood"], attributes["note"]))
		}
		return all
	}
	for range 4 { // the first pages of follows are kept
		if got := followers(""); !slices.Equal(got, []string{"false loud x", "true calm y"}) {
			t.Errorf("%v", got)
		}
		if got := followers("?mood=loud"); !slices.Equal(got, []string{"false loud x"}) {
			t.Errorf("%v", got)
		}
	}
	counts := f.want(t, 200, "GET", "/v1/posts/5/counts", "")
	if !strings.Contains(counts.body, `"aggregates":{"stars":{"count":2,"sum":6}}`) || counts.json["likers"] != 1.0 {
		t.Errorf("%s", counts.body)
	}
	if tree := f.want(t, 200, "GET", "/v1/posts/5/comments?order=threaded", ""); len(itemsOf(tree)) != 2 {
		t.Errorf("%s", tree.body)
	}
	f.want(t, 200, "PUT", "/v1/conversations/9/messages/settings", `{"locked":true}`)
	locked := f.want(t, 409, "POST", "/v1/conversations/9/messages", `{"author_id":"`+ann+`","body":"x"}`)
	if locked.text("code") != "thread-locked" {
		t.Errorf("%s", locked.body)
	}
}

// TestAnIDThatWasNarrowedAMomentAgoIsRefused has an API that does not know the new kinds yet.
func TestAnIDThatWasNarrowedAMomentAgoIsRefused(t *testing.T) {
	t.Parallel()
	f, _, _ := openKindsOf(t, `objects: {user: {id: uuid}}`, false)
	if p := f.want(t, 422, "PUT", "/v1/follows/7/8", ""); p.text("code") != "validation-failed" {
		t.Errorf("%s", p.body)
	}
	items := itemsOf(f.want(t, 200, "POST", "/v1/follows:batch", `{"operations":[{"op":"put","follower_id":"7","followee_id":"8"},`+
		`{"op":"put","follower_id":"`+song+`","followee_id":"`+song[:35]+`b"}]}`))
	if items[0]["status"] != 422.0 || items[1]["status"] != 201.0 {
		t.Errorf("%v", items)
	}
}
