//go:build upgrade

package deploy_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
)

// The previous release has other names in its API: the table in CHANGELOG.md under "Renamed before
// the first version". A client of this tree cannot use them, so earlierNames translates states for
// the people of the test, and renamed translates the document.

// earlierPaths has the paths of the previous release whose new names do not follow from one rule.
var earlierPaths = map[string]string{
	"/v1/users:counts":               "/v1/users:count",
	"/v1/posts/{post_id}/summary":    "/v1/posts/{post_id}/comments/summary",
	"/v1/outbox/dlq/{id}":            "/v1/outbox/dlq/{message_id}",
	"/v1/outbox/dlq/{id}/retry":      "/v1/outbox/dlq/{message_id}:retry",
	"/v1/outbox/dlq/{id}/discard":    "/v1/outbox/dlq/{message_id}:discard",
	"/v1/users/{id}/mutuals/{other}": "/v1/users/{user_id}/mutuals/{other_id}",
}

var earlierIDs = map[string]string{
	"follow": "put-follow", "unfollow": "remove-follow", "get-counts": "get-user-counts", "get-many-counts": "count-users",
	"get-summary": "get-comment-summary", "get-tree": "get-comment-tree", "list-dlq": "list-dlq-messages",
	"list-followers": "list-user-followers", "list-following": "list-user-following", "list-mutuals": "list-user-mutuals",
	"list-pending": "list-pending-comments", "list-replies": "list-comment-replies", "list-users-comments": "list-user-comments",
}

var objectID = regexp.MustCompile(`^/v1/([a-z_]+)s/\{id\}`)

// renamed returns the OpenAPI document of the previous release with this tree's names.
func renamed(doc map[string]any) map[string]any {
	paths := map[string]any{}
	for path, item := range object(doc["paths"]) {
		names := map[string]string{"other": "other_id"}
		now, special := earlierPaths[path]
		if m := objectID.FindStringSubmatch(path); m != nil {
			names["id"] = m[1] + "_id"
		}
		if strings.HasPrefix(path, "/v1/outbox/") {
			names["id"] = "message_id"
		}
		if !special {
			now = strings.Replace(path, "{id}", "{"+names["id"]+"}", 1)
		}
		paths[now] = item
		for _, op := range object(item) {
			op := object(op)
			if id, ok := earlierIDs[op["operationId"].(string)]; ok {
				op["operationId"] = id
			}
			for _, p := range list(op["parameters"]) {
				p := object(p)
				if name, ok := names[p["name"].(string)]; ok && p["in"] == "path" {
					p["name"] = name
				}
			}
		}
	}
	renameValues(doc)
	doc = maps.Clone(doc)
	doc["paths"] = paths
	return doc
}

// renameValues changes the values of states and of the operations of a batch of follows.
func renameValues(v any) {
	for _, item := range list(v) {
		renameValues(item)
	}
	for name, member := range object(v) {
		values := list(object(member)["enum"])
		for i, value := range values {
			text, _ := value.(string)
			if name == "state" {
				values[i] = strings.ToUpper(text)
			}
			if op, ok := map[string]string{"follow": "put", "unfollow": "remove"}[text]; ok && name == "op" {
				values[i] = op
			}
		}
		renameValues(member)
	}
}

// TestTheDocumentOfTheReleaseBeforeIsKept compares the checked-in OpenAPI documents of both
// releases, without running one. When the previous release has this tree's names, this file has no
// purpose.
func TestTheDocumentOfTheReleaseBeforeIsKept(t *testing.T) {
	const golden = "api/testdata/openapi.json.gz"
	now, err := os.ReadFile(filepath.Join("..", golden))
	if err != nil {
		t.Fatal(err)
	}
	was := released(t, golden)[golden]
	unpacked := func(packed []byte) (doc map[string]any) {
		r, err := gzip.NewReader(bytes.NewReader(packed))
		if err == nil {
			err = json.NewDecoder(r).Decode(&doc)
		}
		if err != nil {
			t.Fatal(err)
		}
		return doc
	}
	if len(brokenPromises(unpacked(was), unpacked(now))) == 0 {
		t.Error("the previous release has the names of this tree: delete renamed_test.go")
	}
	for _, broken := range brokenPromises(renamed(unpacked(was)), unpacked(now)) {
		t.Error(broken)
	}
}

// earlierNames translates states in requests to the APIs of the previous release and in their
// answers. A state has the same length in both, so no length changes.
type earlierNames struct {
	http.RoundTripper
	mu   sync.Mutex
	apis map[string]bool // those of the previous release
}

func (e *earlierNames) add(api string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.apis[api] = true
}

var stateMember = regexp.MustCompile(`"state":"[A-Za-z]+"`)

// RoundTrip implements http.RoundTripper.
func (e *earlierNames) RoundTrip(req *http.Request) (*http.Response, error) {
	e.mu.Lock()
	earlier := e.apis[req.URL.Host]
	e.mu.Unlock()
	if !earlier {
		return e.RoundTripper.RoundTrip(req)
	}
	if req.Body != nil {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		req = req.Clone(req.Context())
		req.Body, req.GetBody = io.NopCloser(bytes.NewReader(stateMember.ReplaceAllFunc(body, bytes.ToLower))), nil
	}
	resp, err := e.RoundTripper.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(stateMember.ReplaceAllFunc(body, func(member []byte) []byte {
		return append([]byte(`"state":`), bytes.ToUpper(member[len(`"state":`):])...)
	})))
	return resp, nil
}
