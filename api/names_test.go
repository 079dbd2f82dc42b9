package api_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The words with which an operation id begins, and the actions at the end of a path. A `:verb` is a
// POST, except an export, which is a GET because it changes nothing and has no body.
var (
	idVerbs = []string{"batch", "check", "count", "create", "delete", "discard", "edit", "export", "get", "list", "moderate", "patch",
		"put", "remove", "retry"}
	actions = []string{"batch", "check", "counts", "discard", "export", "remove-edges", "retry"}
)

var (
	inPath    = regexp.MustCompile(`\{([^}]*)\}`)
	idForm    = regexp.MustCompile(`^[a-z]+(-[a-z0-9]+)+$`)
	isState   = regexp.MustCompile(`^(.*_)?(state|status)$`)
	inCapital = regexp.MustCompile(`^[A-Z][A-Z_]*$`)
)

// misnamed returns the names of an OpenAPI document that break the rules: a parameter of a path is
// named after what it identifies, an action is a POST with a verb, an operation id is a verb and a
// noun, and the values of a state are in upper case.
func misnamed(doc map[string]any) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	paths := doc["paths"].(map[string]any)
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		for _, m := range inPath.FindAllStringSubmatch(path, -1) {
			if name := m[1]; name != "slug" && (!strings.HasSuffix(name, "_id") || name == "_id") {
				say("%s: the parameter %s does not say what it identifies", path, name)
			}
		}
		last := path[strings.LastIndexByte(path, '/')+1:]
		_, action, acts := strings.Cut(last, ":")
		for method, op := range paths[path].(map[string]any) {
			id := op.(map[string]any)["operationId"].(string)
			verb, _, _ := strings.Cut(id, "-")
			if !slices.Contains(idVerbs, verb) || !idForm.MatchString(id) {
				say("%s %s: the operation id %s is not a verb and a noun", method, path, id)
			}
			switch {
			case acts && (!slices.Contains(actions, action) || (method == "post") == (action == "export")):
				say("%s %s: %s is not an action", method, path, action)
			case acts && !strings.HasPrefix(action, verb):
				say("%s %s: the operation id %s is not of the action %s", method, path, id, action)
			case !acts && method == "post" && verb != "create":
				say("%s %s: an action has no :verb", method, path)
			}
		}
	}
	states("#", doc, say)
	slices.Sort(wrong)
	return wrong
}

// states reports the enums of members and parameters of a state with a value that is not in upper
// case.
func states(at string, v any, say func(string, ...any)) {
	check := func(at, name string, schema any) {
		s, _ := schema.(map[string]any)
		values, _ := s["enum"].([]any)
		for _, value := range values {
			if text, _ := value.(string); isState.MatchString(name) && !inCapital.MatchString(text) {
				say("%s/%s: the state %v is not in upper case", at, name, value)
			}
		}
	}
	switch v := v.(type) {
	case map[string]any:
		if name, ok := v["name"].(string); ok {
			check(at, name, v["schema"])
		}
		for name, member := range v {
			check(at, name, member)
			states(at+"/"+name, member, say)
		}
	case []any:
		for i, item := range v {
			states(fmt.Sprintf("%s/%d", at, i), item, say)
		}
	}
}

// TestNamesAreOneWay checks the names of the built-in kinds and of the kinds of a file.
func TestNamesAreOneWay(t *testing.T) {
	t.Parallel()
	f, _, _ := openKinds(t, true)
	doc := f.document(t)
	for _, wrong := range misnamed(doc) {
		t.Error(wrong)
	}
	servers, _ := json.Marshal(doc["servers"])
	license, _ := json.Marshal(doc["info"].(map[string]any)["license"])
	if !strings.Contains(string(servers), `"url":"/"`) || !strings.Contains(string(license), `"identifier":"Apache-2.0"`) {
		t.Errorf("the document has the servers %s and the license %s", servers, license)
	}
}

// TestMisnamedPartsAreFound puts one wrong name at a time into a document.
func TestMisnamedPartsAreFound(t *testing.T) {
	const good = `{"paths": {
		"/v1/users/{user_id}/likes": {"get": {"operationId": "list-user-likes"}, "post": {"operationId": "create-like"}},
		"/v1/users/{user_id}:remove-edges": {"post": {"operationId": "remove-user-edges"}},
		"/v1/likes:export": {"get": {"operationId": "export-likes", "parameters": [{"name": "state", "schema": {"enum": ["ACTIVE"]}}]}}},
		"components": {"schemas": {"Like": {"properties": {"status": {"enum": ["ACTIVE"]}, "version_state": {"enum": ["LATEST"]},
			"direction": {"enum": ["from"]}}}}}}`
	find := func(text string) []string {
		var doc map[string]any
		if err := json.Unmarshal([]byte(text), &doc); err != nil {
			t.Fatal(err)
		}
		return misnamed(doc)
	}
	if wrong := find(good); len(wrong) > 0 {
		t.Errorf("a good document: %q", wrong)
	}
	for _, c := range [][2]string{
		{"{user_id}/likes", "{id}/likes"}, {"{user_id}/likes", "{other}/likes"}, {`"create-like"`, `"retry-like"`},
		{"{user_id}:remove-edges", "{user_id}/remove-edges"}, {":remove-edges", ":edges"}, {`"remove-user-edges"`, `"drop-user-edges"`},
		{`"remove-user-edges"`, `"get-user-edges"`}, {`"list-user-likes"`, `"likes"`}, {`"list-user-likes"`, `"list"`},
		{`"list-user-likes"`, `"read-user-likes"`}, {"likes:export", "likes:batch"},
		{`"status": {"enum": ["ACTIVE"`, `"status": {"enum": ["active"`},
		{`"LATEST"`, `"LATEST", "deleted"`}, {`"schema": {"enum": ["ACTIVE"`, `"schema": {"enum": ["active"`},
	} {
		if text := strings.Replace(good, c[0], c[1], 1); text == good || len(find(text)) == 0 {
			t.Errorf("%s in place of %s is not found", c[1], c[0])
		}
	}
}

// A body that an operation does not expect is read too, because the next request of the connection
// begins after it. So every operation refuses a large one, and its document says so.
func TestEveryOperationRefusesALargeBody(t *testing.T) {
	t.Parallel()
	f := open(t)
	large := bytes.Repeat([]byte(" "), 4<<20+1)
	n := 0
	f.operations(t, func(method, path string, op map[string]any) {
		n++
		answers := op["responses"].(map[string]any)
		for status, code := range map[string]string{"408": "request-timeout", "413": "request-too-large"} {
			r, _ := answers[status].(map[string]any)
			if text, _ := r["description"].(string); !strings.Contains(text, code) {
				t.Errorf("%s %s: the answer %s is %q, want the code %s", method, path, status, text, code)
			}
		}
		r := httptest.NewRequestWithContext(t.Context(), method, inPath.ReplaceAllString(path, "1"), bytes.NewReader(large))
		r.Header.Set("Authorization", "Bearer "+f.token)
		w := httptest.NewRecorder()
		f.ServeHTTP(w, r)
		if w.Code != http.StatusRequestEntityTooLarge || !strings.Contains(w.Body.String(), `"request-too-large"`) {
			t.Errorf("%s %s with %d bytes: %d %s", method, path, len(large), w.Code, w.Body)
		}
	})
	if n < 32 {
		t.Errorf("%d operations, want 32 or more", n)
	}
}
