package api_test

import (
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
)

// world has the ids that the walk puts into its requests: ids of another tenant, or ids that nobody
// has.
type world map[string]string

// walkPaths, walkQueries, walkHeaders and walkBodies say where a world's ids go. The walk fails on
// an operation with a place that they do not have.
var (
	walkPaths = map[string]string{ // by "segment/parameter", else by parameter
		"comment_id": "comment", "dlq/message_id": "dlq", "follower_id": "user", "followee_id": "followee",
		"other_id": "followee", "post_id": "post", "slug": "slug",
		"removal_id": "removal", "user_id": "user", "group_id": "post",
		"product_id": "post", "conversation_id": "post", "review_id": "review", "message_id": "message",
	}
	walkQueries = map[string]string{ // $name is an id of the world
		"role": "owner", "after": "5", "lines": "3",
		"limit": "1", "skip": "1", "order": "threaded", "around": "$comment", "cursor": "$cursor", "post_id": "$post", "counts": "likers",
		"conversation_id": "$post", "product_id": "$post",
		"aggregate_type": "comment", "aggregate_id": "$post",
		"event_type": "created", "dead_before": "2030-01-01T00:00:00Z", "dead_after": "2020-01-01T00:00:00Z",
	}
	walkHeaders = map[string][]string{
		"If-Match": {`*`, `"1"`, `"2"`}, "If-None-Match": {`*`, `"1"`, `"2"`}, "Idempotency-Key": {"$key"}, "Tidings-Token": {"$token"},
		"Tidings-Actor": {"mallory"},
		"traceparent":   {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}, "Content-Type": {"application/json"},
	}
	walkBodies = map[string][]string{ // by operationId
		"check-follows":       {`{"pairs":[{"follower_id":"$user","followee_id":"$followee"}]}`},
		"create-comment":      {`{"author_id":"$user","body":"mine"}`, `{"author_id":"$user","body":"mine","parent_id":"$comment"}`},
		"edit-comment":        {`{"body":"mine"}`},
		"moderate-comment":    {`{"state":"HIDDEN","reason":"mine"}`},
		"put-thread":          {`{"locked":true,"title":"mine"}`},
		"retry-dlq-message":   {``, `{"reason":"mine"}`},
		"discard-dlq-message": {``, `{"reason":"mine"}`},
		"batch-follows": {`{"operations":[{"op":"remove","follower_id":"$user","followee_id":"$followee"},{"op":"put",` +
			`"follower_id":"$user","followee_id":"$followee"}]}`},
		"batch-comments": {`{"operations":[{"op":"create","post_id":"$post","author_id":"$user","body":"mine","idempotency_key":"$key"},` +
			`{"op":"create","post_id":"$post","author_id":"$user","body":"mine","parent_id":"$comment"},{"op":"edit",` +
			`"comment_id":"$comment","body":"mine","if_match":"*"},` +
			`{"op":"delete","comment_id":"$comment","if_match":1}]}`},
	}
)

func init() {
	for _, name := range slices.Concat(kinds.Builtin().Ends(), slices.Collect(maps.Keys(kinds.Builtin().Objects))) {
		plural, target := kinds.Builtin().Plural(name), "$post"
		if _, child := kinds.Builtin().Child(name); child {
			target = "$" + name
		}
		walkBodies["remove-"+name+"-edges"] = []string{``, `{"direction":"to"}`}
		walkBodies["count-"+plural] = []string{`{"ids":["` + target + `"]}`}
		walkBodies["check-"+plural] = []string{`{"user_id":"$user","ids":["` + target + `"]}`}
	}
	for _, k := range kinds.Builtin().AllEdges() {
		if k.Name == "follow" {
			continue
		}
		target, name, plural := "$post", strings.ReplaceAll(k.Name, "_", "-"), strings.ReplaceAll(k.Plural, "_", "-")
		if k.ToChild {
			target = "$" + k.To
		}
		pair, attributes := fmt.Sprintf(`"%s":"$user","%s":"%s"`, k.Ends[0], k.Ends[1], target), ""
		if own := edgeAttributes(k); len(own) > 0 {
			attributes = `,"attributes":` + own[0]
			walkBodies["put-"+name], walkBodies["patch-"+name] = own[:1], own[1:]
			if !strings.Contains(own[0], "value") {
				walkBodies["put-"+name] = []string{own[0], `{}`}
			}
		}
		walkBodies["check-"+plural] = []string{`{"pairs":[{` + pair + `}]}`}
		walkBodies["batch-"+plural] = []string{`{"operations":[{"op":"remove",` + pair + `},{"op":"put",` + pair + attributes + `}]}`}
	}
	for _, k := range kinds.Builtin().AllChildren() {
		if k.Name == "comment" {
			continue
		}
		attributes := ""
		if len(k.Attributes) > 0 {
			attributes = `,"attributes":{"rating":4}`
		}
		n := k.Names()
		create := `"author_id":"$user","body":"mine"` + attributes
		walkBodies["create-"+k.Name] = []string{"{" + create + "}"}
		walkBodies["moderate-"+k.Name], walkBodies["put-"+k.Name+"-settings"] = walkBodies["moderate-comment"], walkBodies["put-thread"]
		walkBodies["edit-"+k.Name] = []string{`{"body":"mine"` + attributes + `}`}
		walkBodies["batch-"+k.Plural] = []string{fmt.Sprintf(`{"operations":[{"op":"create",%q:"$post",%s,"idempotency_key":"$key"},`+
			`{"op":"edit",%q:"$%s","body":"mine"%s,"if_match":"*"},{"op":"delete",%[3]q:"$%[4]s","if_match":1}]}`, n.Parent, create,
			n.ID, k.Name, attributes)}
	}
}

// edgeAttributes returns two values of the attributes of a kind, or none if it has no attributes.
func edgeAttributes(k kinds.Edge) []string {
	switch _, votes := k.Attributes["value"]; {
	case len(k.Attributes) == 0:
		return nil
	case votes:
		return []string{`{"value":1}`, `{"value":-1}`}
	}
	return []string{`{"role":"owner"}`, `{"role":"moderator"}`}
}

func (w world) fill(text string) string {
	var pairs []string
	for _, name := range slices.Backward(slices.Sorted(maps.Keys(w))) {
		pairs = append(pairs, "$"+name, w[name])
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// walked is a request of the walk, with $names for ids.
type walked struct{ method, path, query, body, header string }

// requests returns the walk's requests of an operation: a plain one, then one with each parameter,
// header and body.
func requests(t *testing.T, method, path string, op map[string]any) (all []walked) {
	t.Helper()
	id := op["operationId"].(string)
	segments := strings.Split(path, "/")
	for i, s := range segments {
		if !strings.HasPrefix(s, "{") {
			continue
		}
		name, verb, _ := strings.Cut(s[1:], "}")
		value, ok := walkPaths[segments[i-1]+"/"+name]
		if !ok {
			value, ok = walkPaths[name]
		}
		if !ok {
			t.Fatalf("%s has the path parameter %q, for which walkPaths has no value", id, name)
		}
		segments[i] = "$" + value + verb
	}
	plain := walked{method: method, path: strings.Join(segments, "/")}
	bodies := []string{""}
	if op["requestBody"] != nil {
		var ok bool
		if bodies, ok = walkBodies[id]; !ok {
			t.Fatalf("%s has a body, for which walkBodies has no value", id)
		}
	}
	headers := []string{"", "Tidings-Token: $token"} // every route reads it
	var queries []string
	parameters, _ := op["parameters"].([]any)
	for _, p := range parameters {
		p := p.(map[string]any)
		name := p["name"].(string)
		switch p["in"] {
		case "query":
			value, ok := walkQueries[name]
			if !ok {
				t.Fatalf("%s has the query parameter %q, for which walkQueries has no value", id, name)
			}
			if name == "order" && !strings.HasSuffix(path, "/comments") {
				value = "newest"
			}
			if kind := strings.TrimSuffix(segments[len(segments)-1], "s"); name == "around" && kind != "comment" {
				value = "$" + kind
			}
			queries = append(queries, name+"="+value)
		case "header":
			values, ok := walkHeaders[name]
			if !ok {
				t.Fatalf("%s has the header %q, for which walkHeaders has no value", id, name)
			}
			for _, v := range values {
				headers = append(headers, name+": "+v)
			}
		}
	}
	for _, body := range bodies {
		for _, header := range headers {
			r := plain
			r.body, r.header = body, header
			all = append(all, r)
		}
		for _, query := range queries {
			r := plain
			r.body, r.query = body, query
			all = append(all, r)
		}
	}
	return all
}

func (f fixture) send(t *testing.T, w world, r walked, headers ...string) answer {
	t.Helper()
	path := w.fill(r.path)
	if r.query != "" {
		path += "?" + w.fill(r.query)
	}
	headers = append(headers, "X-Request-Id: walk")
	if r.header != "" {
		headers = append(headers, w.fill(r.header))
	}
	return f.do(t, r.method, path, w.fill(r.body), headers...)
}

// Parts in which any two answers differ: times, and the names of new objects.
var incidental = regexp.MustCompile(
	`\d{4}-\d\d-\d\dT[0-9:.]+Z|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|"slug":"[^"]*"|"version_id":"\d+"|"token":"[^"]*"|"next":"[^"]*"`)

// seen returns everything that a client sees of an answer, without the ids that it has sent itself.
func (w world) seen(a answer) string {
	var b strings.Builder
	fmt.Fprintln(&b, a.StatusCode)
	for _, name := range slices.Sorted(maps.Keys(a.Header)) {
		value := strings.Join(a.Header[name], "|")
		if name == "Tidings-Token" {
			value = "a token"
		}
		fmt.Fprintln(&b, name, value)
	}
	b.WriteString(a.body)
	text := b.String()
	for _, name := range slices.Sorted(maps.Keys(w)) {
		text = strings.ReplaceAll(text, w[name], "$"+name)
	}
	return incidental.ReplaceAllString(text, "...")
}

// digests returns digests of all rows of the tenant, by table.
func (f fixture) digests(t *testing.T, tenant int) map[string]string {
	t.Helper()
	rows, _ := f.system.Query(t.Context(), `SELECT c.table_name FROM information_schema.columns c JOIN information_schema.tables t
		USING (table_schema, table_name)
		WHERE c.table_schema = current_schema() AND c.column_name = 'tenant_id' AND t.table_type = 'BASE TABLE'`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, table := range tables {
		var digest string
		if err := f.system.QueryRow(t.Context(), fmt.Sprintf(
			`SELECT count(*) || ' ' || coalesce(md5(string_agg(r::text, '|' ORDER BY r::text)), '') FROM %s r WHERE tenant_id = $1`,
			pgx.Identifier{table}.Sanitize()), tenant).
			Scan(&digest); err != nil {
			t.Fatal(err)
		}
		all[table] = digest
	}
	return all
}

// populate gives the tenant objects of every type and returns their ids. Every text has secret in
// it, and every list has a second page.
func (f fixture) populate(t *testing.T, secret string) world {
	t.Helper()
	w := world{"user": "7000000000001", "followee": "7000000000002", "post": "7000000000005", "dlq": "7000001", "key": "key-7000000000009"}
	put := func(status int, method, path, body string, headers ...string) answer {
		t.Helper()
		return f.want(t, status, method, w.fill(path), w.fill(body), append(headers, "Tidings-Actor: actor "+secret)...)
	}
	put(201, "PUT", "/v1/follows/$user/$followee", "")
	put(204, "DELETE", "/v1/follows/$user/$followee", "")
	w["token"] = put(201, "PUT", "/v1/follows/$user/$followee", "").Header.Get("Tidings-Token")
	for _, pair := range []string{"$user/1", "$user/7000000000008", "1/$followee", "7000000000008/$followee", "1/$user", "2/$user"} {
		put(201, "PUT", "/v1/follows/"+pair, "") // so that every list has a second page
	}
	first := put(201, "POST", "/v1/posts/$post/comments", `{"author_id":"$user","body":"body `+secret+`"}`, w.fill("Idempotency-Key: $key"))
	w["comment"], w["slug"] = first.text("comment_id"), first.text("slug")
	put(200, "PATCH", "/v1/comments/$comment", `{"body":"another body `+secret+`"}`, `If-Match: "1"`)
	for range 2 {
		w["reply"] = put(201, "POST", "/v1/posts/$post/comments", `{"author_id":"$user","body":"reply `+secret+`","parent_id":"$comment"}`).
			text("comment_id")
	}
	for _, k := range kinds.Builtin().AllEdges() {
		if k.Name == "follow" {
			continue
		}
		targets, body := []string{"$post", "$followee"}, ""
		if k.ToChild {
			targets = []string{"$comment", "$reply"}
		}
		if own := edgeAttributes(k); len(own) > 0 {
			body = own[1]
		}
		put(201, "PUT", "/v1/"+k.Plural+"/$user/"+targets[0], body)
		put(204, "DELETE", "/v1/"+k.Plural+"/$user/"+targets[0], "")
		for _, pair := range []string{"$user/" + targets[0], "$followee/" + targets[0], "$user/" + targets[1]} {
			put(201, "PUT", "/v1/"+k.Plural+"/"+pair, body)
		}
	}
	put(200, "PUT", "/v1/posts/$post/thread", `{"title":"title `+secret+`"}`)
	put(200, "PUT", "/v1/posts/$post/thread", `{"title":"another title `+secret+`","premoderated":true}`, `If-Match: "1"`)
	for range 2 {
		put(201, "POST", "/v1/posts/$post/comments", `{"author_id":"$user","body":"pending `+secret+`"}`)
	}
	for _, k := range kinds.Builtin().AllChildren() {
		if k.Name == "comment" {
			continue
		}
		under, attributes := "/v1/"+kinds.Builtin().Objects[k.Parent].Plural+"/$post/"+k.Plural, ""
		if len(k.Attributes) > 0 {
			attributes = `,"attributes":{"rating":2}`
		}
		w[k.Name] = put(201, "POST", under, `{"author_id":"$user","body":"body `+secret+`"`+attributes+`}`,
			w.fill("Idempotency-Key: $key"+k.Name)).text(k.Name + "_id")
		put(200, "PATCH", "/v1/"+k.Plural+"/$"+k.Name, `{"body":"another body `+secret+`"}`, `If-Match: "1"`)
		put(201, "POST", under, `{"author_id":"$followee","body":"body `+secret+`"`+attributes+`}`)
		put(200, "PUT", under+"/settings", `{"title":"title `+secret+`"}`)
		put(200, "PUT", under+"/settings", `{"title":"another title `+secret+`","premoderated":true}`, `If-Match: "1"`)
		for _, author := range []string{"91", "92"} {
			put(201, "POST", under, `{"author_id":"`+author+`","body":"pending `+secret+`"`+attributes+`}`)
		}
		elsewhere := strings.Replace(under, "$post", "$user", 1)
		put(201, "POST", elsewhere, `{"author_id":"$user","body":"body `+secret+`"`+attributes+`}`)
	}
	w["removal"] = put(202, "POST", "/v1/users/$user:remove-edges", "").text("id")
	f.bury(t, tenant, 7000001, 2)
	f.exec(t, `UPDATE outbox_messages_dlq SET last_error = $1, payload = jsonb_build_object('comment_id', gen_random_uuid(), 'post_id',
		$2::text, 'author_id', '1', 'body', $1::text), aggregate_type = 'comment', event_type = 'created', aggregate_id = $2`,
		secret, w["post"])
	f.catchUp(t)
	f.exec(t, `INSERT INTO edge_shards (tenant_id, kind, object_id, shards) VALUES ($1, 'follow', $2, 4)`, tenant, w["followee"])
	return w
}

// exports reports whether the answer at a path has all rows of the tenant itself, whatever ids the
// request has. Two such answers differ.
func exports(path string) bool { return strings.HasSuffix(path, ":export") }

var exportCursor = regexp.MustCompile(`^{"export":.*"cursor":"([^"]*)"`)

// TestATenantFindsNothingOfAnothers calls every operation of the document with another tenant's
// token: with ids of the tenant, and with ids that nobody has. The answers do not differ, and the
// tenant's rows do not change.
func TestATenantFindsNothingOfAnothers(t *testing.T) {
	t.Parallel()
	f := open(t)
	const secret = "of the other tenant"
	theirs := f.populate(t, secret)
	nobodys := world{"user": "8000000000001", "followee": "8000000000002", "post": "8000000000005", "dlq": "8000001",
		"key":     "key-8000000000009",
		"comment": "01890000-0000-7000-8000-000000000001", "reply": "01890000-0000-7000-8000-000000000005",
		"review":  "01890000-0000-7000-8000-000000000002",
		"message": "01890000-0000-7000-8000-000000000003", "removal": "01890000-0000-4000-8000-000000000004", "slug": "zzzzzzzz",
		"cursor": "bm9ib2R5IGhhcyBnaXZlbiB0aGlzIGN1cnNvciB0byBhbnlib2R5", "token": "bm9ib2R5IGhhcyBnaXZlbiB0aGlzIHRva2Vu"}

	stranger := f
	stranger.token = f.newToken(t, 2, "stranger", tokens.Roles()...)
	before := f.digests(t, tenant)
	walked, writes := 0, 0
	f.operations(t, func(method, path string, op map[string]any) {
		for i, r := range requests(t, method, path, op) {
			if r.query == "cursor=$cursor" { // a cursor of this list
				page := r
				page.query = "limit=1"
				if exports(path) {
					page.query = "lines=1"
				}
				own := f.send(t, theirs, page)
				next := own.text("next")
				if head := exportCursor.FindStringSubmatch(own.body); head != nil {
					next = head[1]
				}
				if theirs["cursor"] = url.QueryEscape(next); theirs["cursor"] == "" {
					t.Errorf("%s %s: the tenant has no second page: %s", method, path, own.body)
				}
			}
			if i == 0 && method == "GET" {
				if own := f.send(t, theirs, r); own.StatusCode != 200 {
					t.Errorf("%s %s is not there for the tenant itself: %d %s", method, path, own.StatusCode, own.body)
				}
			}
			got, want := stranger.send(t, theirs, r), stranger.send(t, nobodys, r)
			if diff := cmp.Diff(nobodys.seen(want), theirs.seen(got)); diff != "" && (!exports(path) || got.StatusCode != want.StatusCode) {
				t.Errorf("%s %s %s %s is answered differently when the ids are another tenant's (-nobody's +another's):\n%s", method, path,
					r.query, r.header, diff)
			}
			if strings.Contains(fmt.Sprint(got.Header)+got.body, secret) || got.StatusCode >= 500 {
				t.Errorf("%s %s: %d %s", method, path, got.StatusCode, got.body)
			}
			walked++
			if method != "GET" && got.StatusCode < 300 {
				writes++
			}
			delete(theirs, "cursor")
		}
	})
	if diff := cmp.Diff(before, f.digests(t, tenant)); diff != "" {
		t.Errorf("the tenant's rows have changed (-before +after):\n%s", diff)
	}
	if walked < 100 || writes < 10 {
		t.Errorf("%d requests, %d of them writes that were done: want 100 and 10 or more", walked, writes)
	}
}
