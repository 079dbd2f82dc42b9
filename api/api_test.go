package api_test

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const tenant = 1

type fixture struct {
	http.Handler
	system *pgxpool.Pool
	owner  *pgxpool.Pool
	pool   *pgxpool.Pool // of the API
	reg    *prometheus.Registry
	token  string // of tenant, with every role
}

// fleet are the projections that the API reads.
var fleet = []projections.Projection{followercounts.New(kinds.Builtin), threadcache.New(kinds.Builtin)}

// config has the longest MaxWait: requests that a busy machine makes slow do not lower a tenant's
// limit.
func config() api.Config {
	return api.Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 128 << 10, MaxBatchBytes: 4 << 20,
		RequestTimeout: 25 * time.Second, AddressConnections: 1000, MaxRequests: 512, MaxWait: 25 * time.Second}
}

func open(t *testing.T) fixture {
	t.Helper()
	return openWith(t, config(), testkit.Logger(t))
}

func openWith(t *testing.T, cfg api.Config, log *slog.Logger) fixture {
	t.Helper()
	db := testkit.Postgres(t)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), owner: db.Pool(t, postgres.RoleOwner), reg: prometheus.NewRegistry()}
	pool := db.Pool(t, postgres.RoleAPI)
	f.pool = pool
	var err error
	f.Handler, err = api.New(cfg, api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
		Fleet: fleet, Log: log, Reg: f.reg})
	if err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	return f
}

func (f fixture) newToken(t testing.TB, tenant int64, name string, roles ...string) string {
	t.Helper()
	token, err := tokens.Create(t.Context(), f.system, tenant, name, roles, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

type answer struct {
	*http.Response
	body string
	json map[string]any
}

// do sends a request with the fixture's token. Headers are "Name: value"; a header without a value
// is removed.
func (f fixture) do(t testing.TB, method, path, body string, headers ...string) answer {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, "/", strings.NewReader(body))
	r.URL.Path, r.URL.RawQuery, _ = strings.Cut(path, "?")
	r.Header.Set("Authorization", "Bearer "+f.token)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for _, h := range headers {
		name, value, found := strings.Cut(h, ": ")
		if !found {
			r.Header.Del(name)
			continue
		}
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	return answerOf(t, w)
}

func answerOf(t testing.TB, w *httptest.ResponseRecorder) answer {
	t.Helper()
	a := answer{Response: w.Result()}
	raw, err := io.ReadAll(a.Body)
	if err != nil {
		t.Fatal(err)
	}
	a.body = string(raw)
	if ct := a.Header.Get("Content-Type"); strings.Contains(ct, "json") && !strings.Contains(ct, "ndjson") && len(raw) > 0 {
		if err := json.Unmarshal(raw, &a.json); err != nil {
			t.Fatalf("%v in %q", err, raw)
		}
	}
	return a
}

func (a answer) text(field string) string { s, _ := a.json[field].(string); return s }

func (f fixture) want(t *testing.T, status int, method, path, body string, headers ...string) answer {
	t.Helper()
	a := f.do(t, method, path, body, headers...)
	if a.StatusCode != status {
		t.Fatalf("%s %s %s: %d %s, want %d", method, path, body, a.StatusCode, a.body, status)
	}
	return a
}

func (f fixture) comment(t *testing.T, post int, body string) answer {
	t.Helper()
	return f.want(t, 201, "POST", fmt.Sprintf("/v1/posts/%d/comments", post), fmt.Sprintf(`{"author_id":"3","body":%q}`, body))
}

// rows counts the rows of every table of the truth that the API writes.
func (f fixture) rows(t *testing.T) map[string]int64 {
	t.Helper()
	counts := make(map[string]int64)
	for _, table := range []string{"edges", "children", "child_keys", "threads", "outbox_messages", "outbox_messages_dlq",
		"outbox_dlq_actions", "api_tokens"} {
		var n int64
		var changed string
		if err := f.system.QueryRow(t.Context(), `SELECT count(*), coalesce(max(xmin::text::bigint)::text, '') FROM `+table).Scan(&n,
			&changed); err != nil {
			t.Fatal(err)
		}
		counts[table+" "+changed] = n
	}
	return counts
}

func TestFollowOverHTTP(t *testing.T) {
	t.Parallel()
	f := open(t)
	const path = "/v1/follows/7/42"
	f.want(t, 404, "GET", path, "")
	f.want(t, 204, "DELETE", path, "")
	first := f.want(t, 201, "PUT", path, "", "Tidings-Actor: José", "Traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	if first.text("follower_id") != "7" || first.text("followee_id") != "42" || first.text("status") != "ACTIVE" ||
		first.json["version"] != 1.0 || first.Header.Get("ETag") != `"1"` {
		t.Errorf("PUT: %s %v", first.body, first.Header)
	}
	if _, err := time.Parse("2006-01-02T15:04:05.000000Z", first.text("created_at")); err != nil {
		t.Errorf("created_at: %v", err)
	}
	again := f.want(t, 200, "PUT", path, "")
	get := f.want(t, 200, "GET", path, "")
	if again.body != first.body || get.body != first.body {
		t.Errorf("PUT again %s, GET %s: want %s", again.body, get.body, first.body)
	}
	if a := f.want(t, 304, "GET", path, "", `If-None-Match: "1"`); a.body != "" {
		t.Errorf("304 with a body: %q", a.body)
	}
	f.want(t, 200, "GET", path, "", `If-None-Match: "2"`)
	f.want(t, 204, "DELETE", path, "")
	if a := f.want(t, 204, "DELETE", path, ""); a.body != "" {
		t.Errorf("204 with a body: %q", a.body)
	}
	f.want(t, 404, "GET", path, "")
	if back := f.want(t, 201, "PUT", path, ""); back.json["version"] != 3.0 {
		t.Errorf("followed again: %s", back.body)
	}
	f.want(t, 201, "PUT", "/v1/follows/9223372036854775807/1", "")

	rows, _ := f.system.Query(t.Context(), `SELECT event_type || ' ' || (payload->>'actor') || ' ' || coalesce(trace_id, '-')
		FROM outbox_messages WHERE aggregate_id = '42' ORDER BY id`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"created José 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "removed tester -", "created tester -"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestCommentOverHTTP(t *testing.T) {
	t.Parallel()
	f := open(t)
	const thread = "/v1/posts/5/comments"
	created := f.want(t, 201, "POST", thread, `{"author_id":"3","body":" hello \ud83d\ude00\n"}`, "Idempotency-Key: k1")
	id, path := created.text("comment_id"), "/v1/comments/"+created.text("comment_id")
	want := map[string]any{
		"comment_id": id, "post_id": "5", "author_id": "3", "slug": created.text("slug"), "depth": 1.0,
		"body": "hello 😀", "state": "VISIBLE",
		"version": 1.0, "created_at": created.text("created_at"), "updated_at": created.text("created_at"),
	}
	if diff := cmp.Diff(want, created.json); diff != "" || created.Header.Get("ETag") != `"1"` || created.Header.Get("Location") != path {
		t.Errorf("create (-want +got):\n%s%v", diff, created.Header)
	}
	if again := f.want(t, 201, "POST", thread, `{"body":"hello 😀","author_id":"3","parent_id":null}`,
		"Idempotency-Key: k1"); again.body != created.body ||
		again.Header.Get("Idempotency-Replayed") != "true" {
		t.Errorf("replay: %s %v", again.body, again.Header)
	}
	reply := f.want(t, 201, "POST", thread, fmt.Sprintf(`{"author_id":"4","body":"hi","parent_id":%q}`, strings.ToUpper(id)))
	if reply.text("parent_id") != id || reply.json["depth"] != 2.0 {
		t.Errorf("reply: %s", reply.body)
	}
	if get := f.want(t, 200, "GET", "/v1/comments/"+strings.ToUpper(id), ""); get.body != created.body || get.Header.Get("ETag") != `"1"` {
		t.Errorf("get: %s", get.body)
	}
	f.want(t, 304, "GET", path, "", `If-None-Match: "9", W/"1"`)

	edited := f.want(t, 200, "PATCH", path, `{"body":"bye"}`, `If-Match: "1"`)
	if edited.json["version"] != 2.0 || edited.text("body") != "bye" || edited.Header.Get("ETag") != `"2"` {
		t.Errorf("edit: %s", edited.body)
	}
	if same := f.want(t, 200, "PATCH", path, `{"body":" bye"}`, `If-Match: "2"`); same.body != edited.body {
		t.Errorf("an edit to the same body: %s", same.body)
	}
	stale := f.want(t, 412, "PATCH", path, `{"body":"no"}`, `If-Match: "1"`)
	if diff := cmp.Diff(edited.json, stale.json["current"]); diff != "" {
		t.Errorf("412 has the current one (-want +got):\n%s", diff)
	}
	f.want(t, 412, "DELETE", path, "", `If-Match: "1"`)
	f.want(t, 412, "DELETE", path, "", `If-Match: W/"2"`)
	f.want(t, 204, "DELETE", path, "", `If-Match: "2"`)
	gone := f.want(t, 200, "GET", path, "")
	wantGone := maps.Clone(edited.json)
	delete(wantGone, "body")
	delete(wantGone, "author_id")
	wantGone["state"], wantGone["version"], wantGone["updated_at"] = "DELETED", 3.0, gone.text("updated_at")
	if diff := cmp.Diff(wantGone, gone.json); diff != "" {
		t.Errorf("a tombstone (-want +got):\n%s", diff)
	}
	for _, method := range []string{"PATCH", "DELETE"} {
		a := f.want(t, 409, method, path, `{"body":"x"}`, `If-Match: "3"`)
		if diff := cmp.Diff(gone.json, a.json["current"]); diff != "" || a.text("code") != "comment-gone" {
			t.Errorf("%s: 409 has the current one (-want +got):\n%s", method, diff)
		}
	}
	f.want(t, 200, "PATCH", "/v1/comments/"+reply.text("comment_id"), `{"body":"whatever version"}`, `If-Match: *`)
}

func TestModerationOverHTTP(t *testing.T) {
	t.Parallel()
	f := open(t)
	const settings = "/v1/posts/5/thread"
	unset := f.want(t, 200, "GET", settings, "")
	if diff := cmp.Diff(map[string]any{"post_id": "5", "locked": false, "premoderated": false, "version": 0.0}, unset.json); diff != "" ||
		unset.Header.Get("ETag") != "" {
		t.Errorf("what was never set (-want +got):\n%s%v", diff, unset.Header)
	}
	first := f.want(t, 200, "PUT", settings, `{"premoderated":true,"title":" Rules "}`, "If-None-Match: *", "Tidings-Actor: mod")
	want := map[string]any{"post_id": "5", "locked": false, "premoderated": true, "title": "Rules", "version": 1.0,
		"updated_at": first.text("updated_at")}
	if diff := cmp.Diff(want, first.json); diff != "" || first.Header.Get("ETag") != `"1"` {
		t.Errorf("the first settings (-want +got):\n%s%v", diff, first.Header)
	}
	if get := f.want(t, 200, "GET", settings, ""); get.body != first.body || get.Header.Get("ETag") != `"1"` {
		t.Errorf("get: %s", get.body)
	}
	f.want(t, 304, "GET", settings, "", `If-None-Match: "1"`)
	if stale := f.want(t, 412, "PUT", settings, `{"locked":true}`, `If-Match: "7"`); !cmp.Equal(stale.json["current"], any(first.json)) {
		t.Errorf("412: %s", stale.body)
	}
	if same := f.want(t, 200, "PUT", settings, `{"title":"Rules","premoderated":true,"locked":false}`,
		`If-Match: "1"`); same.body != first.body {
		t.Errorf("the same again: %s", same.body)
	}

	c := f.comment(t, 5, "let me in")
	path := "/v1/comments/" + c.text("comment_id")
	if get := f.want(t, 200, "GET", path, ""); get.text("state") != "PENDING" || get.text("body") != "let me in" {
		t.Errorf("a pending comment: %s", get.body)
	}
	visible := f.want(t, 200, "PUT", path+"/moderation", `{"state":"APPROVED"}`, `If-Match: "1"`)
	if visible.text("state") != "VISIBLE" || visible.json["version"] != 2.0 || visible.Header.Get("ETag") != `"2"` ||
		visible.text("body") != "let me in" {
		t.Errorf("approved: %s", visible.body)
	}
	hidden := f.want(t, 200, "PUT", path+"/moderation", `{"state":"HIDDEN","reason":"spam, \"again\""}`,
		`If-Match: "2"`, "Tidings-Actor: mod")
	if hidden.text("state") != "HIDDEN" || hidden.json["body"] != nil {
		t.Errorf("hidden: %s", hidden.body)
	}
	if same := f.want(t, 200, "PUT", path+"/moderation", `{"state":"HIDDEN","reason":"other"}`, `If-Match: "3"`); same.body != hidden.body {
		t.Errorf("hidden again: %s", same.body)
	}
	if stale := f.want(t, 412, "PUT", path+"/moderation", `{"state":"REMOVED"}`,
		`If-Match: "2"`); !cmp.Equal(stale.json["current"], any(hidden.json)) {
		t.Errorf("412: %s", stale.body)
	}
	if locked := f.want(t, 200, "PUT", settings, `{"locked":true}`, `If-Match: *`); locked.json["version"] != 2.0 ||
		locked.json["title"] != nil || locked.json["premoderated"] != false {
		t.Errorf("locked: %s", locked.body)
	}
	f.want(t, 409, "POST", "/v1/posts/5/comments", `{"author_id":"3","body":"late"}`)
	f.want(t, 204, "DELETE", path, "", `If-Match: "3"`)
	if gone := f.want(t, 409, "PUT", path+"/moderation", `{"state":"APPROVED"}`, `If-Match: "4"`); gone.text("code") != "comment-gone" ||
		gone.json["current"].(map[string]any)["state"] != "DELETED" {
		t.Errorf("409: %s", gone.body)
	}

	rows, _ := f.system.Query(t.Context(), `SELECT concat_ws(' ', aggregate_type, event_type, payload->>'version', payload->>'actor',
		payload->>'reason')
		FROM outbox_messages ORDER BY id`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	wantEvents := []string{"thread updated 1 mod", "comment created 1 tester", "comment moderated 2 tester",
		`comment moderated 3 mod spam, "again"`, "thread updated 2 tester", "comment deleted 4 tester"}
	if diff := cmp.Diff(wantEvents, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestBadInput has invalid requests. The answer to each is a 4xx problem whose code the route
// documents, and the API writes nothing.
func TestBadInput(t *testing.T) {
	t.Parallel()
	f := open(t)
	const post, settings, check = "/v1/posts/5/comments", "/v1/posts/8/thread", "/v1/follows:check"
	const follows, comments = "/v1/follows:batch", "/v1/comments:batch"
	operations := func(n int) string {
		return `{"operations":[` + strings.TrimSuffix(strings.Repeat(`{"op":"put","follower_id":"8","followee_id":"9"},`, n), ",") + `]}`
	}
	parent := f.comment(t, 5, "parent").text("comment_id")
	other := f.comment(t, 6, "elsewhere")
	elsewhere, elsewhereSlug := other.text("comment_id"), other.text("slug")
	deleted := f.comment(t, 5, "deleted").text("comment_id")
	f.want(t, 204, "DELETE", "/v1/comments/"+deleted, "", `If-Match: "1"`)
	f.want(t, 201, "POST", post, `{"author_id":"3","body":"keyed"}`, "Idempotency-Key: k")
	f.want(t, 201, "PUT", "/v1/follows/1/2", "")
	f.want(t, 200, "PUT", settings, `{"locked":true}`)
	foreign := f
	foreign.token = f.newToken(t, 2, "foreigner", tokens.Roles()...)
	foreigners := foreign.comment(t, 5, "theirs")
	theirs, theirSlug, theirToken := foreigners.text("comment_id"), foreigners.text("slug"), foreigners.Header.Get("Tidings-Token")
	expired := f.newToken(t, tenant, "expired", tokens.Roles()...)
	f.exec(t, `UPDATE api_tokens SET expires_at = now() - interval '1 s' WHERE name = 'expired'`)
	f.catchUp(t)
	reader, writer := f.newToken(t, tenant, "reader", tokens.RoleRead), f.newToken(t, tenant, "writer", tokens.RoleWrite)

	body := func(b string) string { return fmt.Sprintf(`{"author_id":"3","body":%s}`, b) }
	reply := func(to string) string { return fmt.Sprintf(`{"author_id":"3","body":"x","parent_id":%s}`, to) }
	type c struct {
		name, method, path, body string
		headers                  []string
		status                   int
		code, at                 string // at: the pointer, parameter or header that errors names
	}
	cases := []c{
		{"no token", "PUT", "/v1/follows/1/3", "", []string{"Authorization"}, 401, "unauthenticated", ""},
		{"a wrong token", "PUT", "/v1/follows/1/3", "", []string{"Authorization: Bearer tdg_wrong"}, 401, "unauthenticated", ""},
		{"another scheme", "PUT", "/v1/follows/1/3", "", []string{"Authorization: Basic " + f.token}, 401, "unauthenticated", ""},
		{"a token of NUL and bytes", "PUT", "/v1/follows/1/3", "", []string{"Authorization: Bearer \x00\xff"}, 401, "unauthenticated", ""},
		{"no token and a bad body", "POST", post, `{`, []string{"Authorization"}, 401, "unauthenticated", ""},
		{"no token and a bad id", "PUT", "/v1/follows/0/x", "", []string{"Authorization"}, 401, "unauthenticated", ""},
		{"a reader writes", "PUT", "/v1/follows/1/3", "", []string{"Authorization: Bearer " + reader}, 403, "role-missing", ""},
		{"a writer reads", "GET", "/v1/follows/1/2", "", []string{"Authorization: Bearer " + writer}, 403, "role-missing", ""},
		{"a reader sends a bad body", "POST", post, `{`, []string{"Authorization: Bearer " + reader}, 403, "role-missing", ""},
		{"a self-follow", "PUT", "/v1/follows/7/7", "", nil, 422, "self-follow", "followee_id"},
		{"the end of a self-follow", "DELETE", "/v1/follows/7/7", "", nil, 422, "self-follow", "followee_id"},
		{"an actor of control characters", "PUT", "/v1/follows/1/3", "", []string{"Tidings-Actor: a\tb"}, 400,
			"header-invalid", "Tidings-Actor"},
		{"an actor of invalid UTF-8", "PUT", "/v1/follows/1/3", "", []string{"Tidings-Actor: \xff"}, 400,
			"header-invalid", "Tidings-Actor"},
		{"an actor too long", "PUT", "/v1/follows/1/3", "", []string{"Tidings-Actor: " + strings.Repeat("a", 201)}, 400,
			"header-invalid", "Tidings-Actor"},
		{"an unknown member", "POST", post, `{"author_id":"3","body":"x","extra":1}`, nil, 422, "validation-failed", "#/extra"},
		{"a member in another case", "POST", post, `{"author_id":"3","Body":"x"}`, nil, 400, "json-invalid", "#"},
		{"a member twice", "POST", post, `{"author_id":"3","body":"x","body":"y"}`, nil, 400, "json-invalid", "#"},
		{"no body member", "POST", post, `{"author_id":"3"}`, nil, 422, "validation-failed", "#"},
		{"no author", "POST", post, `{"body":"x"}`, nil, 422, "validation-failed", "#"},
		{"a body that is a number", "POST", post, body(`5`), nil, 422, "validation-failed", "#/body"},
		{"a body that is null", "POST", post, body(`null`), nil, 422, "validation-failed", "#/body"},
		{"an author that is a number", "POST", post, `{"author_id":3,"body":"x"}`, nil, 422, "validation-failed", "#/author_id"},
		{"an empty author", "POST", post, `{"author_id":"","body":"x"}`, nil, 422, "validation-failed", "#/author_id"},
		{"an author with a slash", "POST", post, `{"author_id":"a/b","body":"x"}`, nil, 422, "validation-failed", "#/author_id"},
		{"author ..", "POST", post, `{"author_id":"..","body":"x"}`, nil, 422, "validation-failed", "#/author_id"},
		{"an author of 129 bytes", "POST", post, `{"author_id":"` + strings.Repeat("x", 129) + `","body":"x"}`, nil, 422,
			"validation-failed", "#/author_id"},
		{"an array", "POST", post, `[]`, nil, 422, "validation-failed", "#"},
		{"null", "POST", post, `null`, nil, 422, "validation-failed", "#"},
		{"nothing", "POST", post, ``, nil, 400, "bad-request", ""},
		{"half an object", "POST", post, `{"author_id":"3",`, nil, 400, "json-invalid", "#"},
		{"two objects", "POST", post, body(`"x"`) + body(`"y"`), nil, 400, "json-invalid", "#"},
		{"invalid UTF-8", "POST", post, body("\"a\xffb\""), nil, 400, "json-invalid", "#"},
		{"half of a surrogate pair", "POST", post, body(`"\ud83d"`), nil, 400, "json-invalid", "#"},
		{"NUL", "POST", post, body(`"a\u0000b"`), nil, 422, "body-invalid", "#/body"},
		{"an empty body", "POST", post, body(`""`), nil, 422, "body-empty", "#/body"},
		{"a body of white space", "POST", post, body(`" \n\t\u2003"`), nil, 422, "body-empty", "#/body"},
		{"a body too long", "POST", post, body(`"` + strings.Repeat("x", 16385) + `"`), nil, 422, "body-too-long", "#/body"},
		{"a request too large", "POST", post, body(`"` + strings.Repeat("x", 140000) + `"`), nil, 413, "request-too-large", ""},
		{"nested too deep", "POST", post, strings.Repeat("[", 100000), nil, 400, "json-invalid", "#"},
		{"not JSON by its type", "POST", post, body(`"x"`), []string{"Content-Type: application/x-www-form-urlencoded"}, 415,
			"unsupported-media-type", "Content-Type"},
		{"JSON in another charset", "POST", post, body(`"x"`), []string{"Content-Type: application/json; charset=latin1"}, 415,
			"unsupported-media-type", "Content-Type"},
		{"JSON in two charsets", "POST", post, body(`"x"`), []string{"Content-Type: application/json; charset=utf-8; charset=latin1"}, 415,
			"unsupported-media-type", "Content-Type"},
		{"a form with files", "POST", post, body(`"x"`), []string{"Content-Type: multipart/form-data; boundary=x"}, 415,
			"unsupported-media-type", "Content-Type"},
		{"another JSON by its type", "PATCH", "/v1/comments/" + parent, `{"body":"x"}`,
			[]string{"Content-Type: application/merge-patch+json", `If-Match: "1"`}, 415, "unsupported-media-type", "Content-Type"},
		{"a type that is none", "POST", post, body(`"x"`), []string{"Content-Type: json"}, 415, "unsupported-media-type", "Content-Type"},
		{"lines where there are none", "POST", post, body(`"x"`), []string{ndjson}, 415, "unsupported-media-type", "Content-Type"},
		{"a body that is said to be zipped", "POST", post, body(`"x"`), []string{"Content-Encoding: gzip"}, 415,
			"unsupported-media-type", "Content-Encoding"},
		{"a zipped batch", "POST", follows, operations(1), []string{"Content-Encoding: br"}, 415,
			"unsupported-media-type", "Content-Encoding"},
		{"a batch in another charset", "POST", comments, `{"op":"delete"}`, []string{ndjson + "; charset=utf-16"}, 415,
			"unsupported-media-type", "Content-Type"},
		{"a number beyond all", "POST", post, `{"author_id":1e400,"body":"x"}`, nil, 400, "json-invalid", "#"},
		{"a number beyond 64 bits", "POST", post, `{"author_id":99999999999999999999999,"body":"x"}`, nil, 422,
			"validation-failed", "#/author_id"},
		{"a byte order mark", "POST", post, "\ufeff" + body(`"x"`), nil, 400, "json-invalid", "#"},
		{"NUL as it is", "POST", post, body("\"a\x00b\""), nil, 400, "json-invalid", "#"},
		{"an actor of two lines", "PUT", "/v1/follows/1/3", "", []string{"Tidings-Actor: a\r\nX-Evil: 1"}, 400,
			"header-invalid", "Tidings-Actor"},
		{"a key of two lines", "POST", post, body(`"x"`), []string{"Idempotency-Key: a\r\nX-Evil: 1"}, 422,
			"validation-failed", "Idempotency-Key"},
		{"a token that is one letter off", "PUT", "/v1/follows/1/3", "",
			[]string{"Authorization: Bearer " + f.token[:len(f.token)-1] + "!"}, 401, "unauthenticated", ""},
		{"a token and more", "PUT", "/v1/follows/1/3", "", []string{"Authorization: Bearer " + f.token + " " + f.token},
			401, "unauthenticated", ""},
		{"an expired token", "PUT", "/v1/follows/1/3", "", []string{"Authorization: Bearer " + expired}, 401, "unauthenticated", ""},
		{"a write's token of another tenant", "GET", "/v1/users/1/counts", "", []string{"Tidings-Token: " + theirToken}, 400,
			"header-invalid", "Tidings-Token"},
		{"a write's token that was tampered with", "GET", "/v1/users/1/counts", "", []string{"Tidings-Token: A" + theirToken[1:]}, 400,
			"header-invalid", "Tidings-Token"},
		{"a write's token as a cursor", "GET", "/v1/users/1/followers?cursor=" + theirToken, "", nil, 400, "cursor-invalid", "cursor"},
		{"a parent that is no UUID", "POST", post, reply(`"x"`), nil, 422, "validation-failed", "#/parent_id"},
		{"a parent that is a number", "POST", post, reply(`5`), nil, 422, "validation-failed", "#/parent_id"},
		{"an unknown parent", "POST", post, reply(`"00000000-0000-7000-8000-000000000000"`), nil, 422, "parent-unknown", "#/parent_id"},
		{"a parent of another post", "POST", post, reply(`"` + elsewhere + `"`), nil, 422, "parent-unknown", "#/parent_id"},
		{"a parent of another tenant", "POST", post, reply(`"` + theirs + `"`), nil, 422, "parent-unknown", "#/parent_id"},
		{"a parent that is gone", "POST", post, reply(`"` + deleted + `"`), nil, 409, "parent-gone", "#/parent_id"},
		{"a locked thread", "POST", "/v1/posts/8/comments", body(`"x"`), nil, 409, "thread-locked", ""},
		{"a key used with another body", "POST", post, body(`"other"`), []string{"Idempotency-Key: k"}, 422,
			"idempotency-key-reused", "Idempotency-Key"},
		{"a key with a blank", "POST", post, body(`"x"`), []string{"Idempotency-Key: a b"}, 422, "validation-failed", "Idempotency-Key"},
		{"a key of other letters", "POST", post, body(`"x"`), []string{"Idempotency-Key: é"}, 422, "validation-failed", "Idempotency-Key"},
		{"a key too long", "POST", post, body(`"x"`), []string{"Idempotency-Key: " + strings.Repeat("k", 256)}, 422,
			"validation-failed", "Idempotency-Key"},
		{"an empty key", "POST", post, body(`"x"`), []string{"Idempotency-Key: "}, 400, "header-invalid", "Idempotency-Key"},
		{"an edit without If-Match", "PATCH", "/v1/comments/" + parent, `{"body":"x"}`, nil, 428, "if-match-missing", ""},
		{"a deletion without If-Match", "DELETE", "/v1/comments/" + parent, "", nil, 428, "if-match-missing", ""},
		{"an If-Match without quotes", "PATCH", "/v1/comments/" + parent, `{"body":"x"}`, []string{"If-Match: 1"}, 400,
			"header-invalid", "If-Match"},
		{"an If-Match of no version", "PATCH", "/v1/comments/" + parent, `{"body":"x"}`, []string{`If-Match: "abc"`},
			412, "version-stale", ""},
		{"a stale If-Match", "DELETE", "/v1/comments/" + parent, "", []string{`If-Match: "2"`}, 412, "version-stale", ""},
		{"an edit of a gone comment", "PATCH", "/v1/comments/" + deleted, `{"body":"x"}`, []string{`If-Match: "2"`},
			409, "comment-gone", ""},
		{"a second deletion", "DELETE", "/v1/comments/" + deleted, "", []string{`If-Match: "2"`}, 409, "comment-gone", ""},
		{"an edit to nothing", "PATCH", "/v1/comments/" + parent, `{"body":" "}`, []string{`If-Match: "1"`}, 422, "body-empty", "#/body"},
		{"an edit with an unknown member", "PATCH", "/v1/comments/" + parent, `{"body":"x","author_id":"1"}`, []string{`If-Match: "1"`},
			422, "validation-failed", "#/author_id"},
		{"an edit of an unknown comment", "PATCH", "/v1/comments/00000000-0000-7000-8000-000000000000", `{"body":"x"}`,
			[]string{`If-Match: "1"`}, 404, "not-found", ""},
		{"an edit of another tenant's comment", "PATCH", "/v1/comments/" + theirs, `{"body":"x"}`,
			[]string{`If-Match: "1"`}, 404, "not-found", ""},
		{"a deletion of another tenant's comment", "DELETE", "/v1/comments/" + theirs, "", []string{`If-Match: *`}, 404, "not-found", ""},
		{"another tenant's comment", "GET", "/v1/comments/" + theirs, "", nil, 404, "not-found", ""},
		{"an unknown comment", "GET", "/v1/comments/00000000-0000-7000-8000-000000000000", "", nil, 404, "not-found", ""},
		{"a comment that is no UUID", "GET", "/v1/comments/1", "", nil, 422, "validation-failed", "comment_id"},
		{"a comment in braces", "GET", "/v1/comments/{" + parent + "}", "", nil, 422, "validation-failed", "comment_id"},
		{"a skip below 0", "GET", post + "?skip=-1", "", nil, 422, "validation-failed", "skip"},
		{"a skip that is no number", "GET", post + "?skip=1e3", "", nil, 422, "validation-failed", "skip"},
		{"a skip of 2^63", "GET", post + "?skip=9223372036854775808", "", nil, 422, "validation-failed", "skip"},
		{"a skip with a cursor", "GET", post + "?skip=1&cursor=x", "", nil, 422, "validation-failed", "skip"},
		{"a skip around a comment", "GET", post + "?skip=1&around=" + parent, "", nil, 422, "validation-failed", "skip"},
		{"a skip in the threaded order", "GET", post + "?skip=1&order=threaded", "", nil, 422, "validation-failed", "skip"},
		{"around what is no UUID", "GET", post + "?around=1", "", nil, 422, "validation-failed", "around"},
		{"around with a cursor", "GET", post + "?cursor=x&around=" + parent, "", nil, 422, "validation-failed", "around"},
		{"around, newest first", "GET", post + "?order=newest&around=" + parent, "", nil, 422, "validation-failed", "around"},
		{"around an unknown comment", "GET", post + "?around=00000000-0000-7000-8000-000000000000", "", nil, 404, "not-found", ""},
		{"around a comment of another post", "GET", post + "?around=" + elsewhere, "", nil, 404, "not-found", ""},
		{"around another tenant's comment", "GET", post + "?around=" + theirs, "", nil, 404, "not-found", ""},
		{"an unknown slug", "GET", post + "/by-slug/00000000", "", nil, 404, "not-found", ""},
		{"a slug of another post", "GET", post + "/by-slug/" + elsewhereSlug, "", nil, 404, "not-found", ""},
		{"another tenant's slug", "GET", post + "/by-slug/" + theirSlug, "", nil, 404, "not-found", ""},
		{"a slug with NUL", "GET", post + "/by-slug/abcd234\x00", "", nil, 422, "validation-failed", "slug"},
		{"a slug too long", "GET", post + "/by-slug/abcd23456", "", nil, 422, "validation-failed", "slug"},
		{"replies to an unknown comment", "GET", "/v1/comments/00000000-0000-7000-8000-000000000000/replies", "",
			nil, 404, "not-found", ""},
		{"replies to another tenant's comment", "GET", "/v1/comments/" + theirs + "/replies", "", nil, 404, "not-found", ""},
		{"replies to what is no UUID", "GET", "/v1/comments/x/replies", "", nil, 422, "validation-failed", "comment_id"},
		{"a tree by skip", "GET", post + "/tree?skip=1", "", nil, 422, "validation-failed", "skip"},
		{"pending for a writer", "GET", "/v1/moderation/pending", "", []string{"Authorization: Bearer " + writer}, 403, "role-missing", ""},
		{"pending of post a,b", "GET", "/v1/moderation/pending?post_id=a,b", "", nil, 422, "validation-failed", "post_id"},
		{"an order that is none", "GET", post + "?order=best", "", nil, 422, "validation-failed", "order"},
		{"an unknown parameter", "GET", post + "?offset=5", "", nil, 422, "validation-failed", "offset"},
		{"a parameter twice", "GET", post + "?limit=5&limit=6", "", nil, 400, "bad-request", "limit"},
		{"an empty parameter", "GET", post + "?cursor=", "", nil, 400, "bad-request", "cursor"},
		{"the DLQ for a writer", "GET", "/v1/outbox/dlq", "", []string{"Authorization: Bearer " + writer}, 403, "role-missing", ""},
		{"a dead message for a reader", "GET", "/v1/outbox/dlq/1", "", []string{"Authorization: Bearer " + reader},
			403, "role-missing", ""},
		{"a retry by a writer", "POST", "/v1/outbox/dlq/1:retry", "{", []string{"Authorization: Bearer " + writer},
			403, "role-missing", ""},
		{"a discard by a reader", "POST", "/v1/outbox/dlq/1:discard", "", []string{"Authorization: Bearer " + reader},
			403, "role-missing", ""},
		{"a dead message that never was", "GET", "/v1/outbox/dlq/1", "", nil, 404, "not-found", ""},
		{"a retry of nothing", "POST", "/v1/outbox/dlq/1:retry", "", nil, 404, "not-found", ""},
		{"a discard of nothing", "POST", "/v1/outbox/dlq/1:discard", `{"reason":"x"}`, nil, 404, "not-found", ""},
		{"a retry of no id", "POST", "/v1/outbox/dlq/x:retry", "", nil, 422, "validation-failed", "message_id"},
		{"a reason that is a number", "POST", "/v1/outbox/dlq/1:retry", `{"reason":5}`, nil, 422, "validation-failed", "#/reason"},
		{"a reason with NUL", "POST", "/v1/outbox/dlq/1:retry", `{"reason":"a\u0000"}`, nil, 422, "validation-failed", "#/reason"},
		{"a reason too long", "POST", "/v1/outbox/dlq/1:discard", `{"reason":"` + strings.Repeat("é", 501) + `"}`, nil, 422,
			"validation-failed", "#/reason"},
		{"an unknown member beside the reason", "POST", "/v1/outbox/dlq/1:discard", `{"dry_run":true}`, nil, 422,
			"validation-failed", "#/dry_run"},
		{"half a reason", "POST", "/v1/outbox/dlq/1:retry", `{"reason":`, nil, 400, "json-invalid", "#"},
		{"an event type with NUL", "GET", "/v1/outbox/dlq?event_type=%00", "", nil, 422, "validation-failed", "event_type"},
		{"an aggregate type of bytes", "GET", "/v1/outbox/dlq?aggregate_type=%ff", "", nil, 422, "validation-failed", "aggregate_type"},
		{"aggregate a,b", "GET", "/v1/outbox/dlq?aggregate_id=a,b", "", nil, 422, "validation-failed", "aggregate_id"},
		{"a time that is none", "GET", "/v1/outbox/dlq?dead_before=yesterday", "", nil, 422, "validation-failed", "dead_before"},
		{"1001 operations", "POST", follows, operations(1001), nil, 413, "too-many-operations", ""},
		{"1001 lines", "POST", comments, strings.Repeat("{}\n", 1001), []string{ndjson}, 413, "too-many-operations", ""},
		{"1001 empty lines", "POST", comments, strings.Repeat("\n", 1001), []string{ndjson}, 413, "too-many-operations", ""},
		{"a batch too large", "POST", follows, strings.Repeat(" ", 4<<20+1), nil, 413, "request-too-large", ""},
		{"a batch of nothing", "POST", follows, "", nil, 400, "bad-request", ""},
		{"no operations", "POST", follows, `{"operations":[]}`, nil, 422, "validation-failed", "#/operations"},
		{"operations that are none", "POST", follows, `{"operations":{}}`, nil, 422, "validation-failed", "#"},
		{"operations and more", "POST", follows, strings.TrimSuffix(operations(1), "}") + `,"atomic":true}`, nil, 422,
			"validation-failed", "#"},
		{"an array of operations", "POST", follows, `[]`, nil, 422, "validation-failed", "#"},
		{"half of a batch", "POST", follows, strings.TrimSuffix(operations(2), "}]}"), nil, 400, "json-invalid", "#/operations/1"},
		{"two batches", "POST", follows, operations(1) + operations(1), nil, 400, "json-invalid", "#"},
		{"a batch of another type", "POST", follows, operations(1), []string{"Content-Type: text/csv"}, 415,
			"unsupported-media-type", "Content-Type"},
		{"a batch with a key", "POST", comments, `{"operations":[{"op":"create","post_id":"1","author_id":"1","body":"x"}]}`,
			[]string{"Idempotency-Key: k2"}, 400, "header-invalid", "Idempotency-Key"},
		{"a reader's batch", "POST", follows, operations(1), []string{"Authorization: Bearer " + reader}, 403, "role-missing", ""},
		{"no pair", "POST", check, `{"pairs":[]}`, nil, 422, "validation-failed", "#/pairs"},
		{"pairs that are null", "POST", check, `{"pairs":null}`, nil, 422, "validation-failed", "#/pairs"},
		{"no pairs at all", "POST", check, `{}`, nil, 422, "validation-failed", "#"},
		{"501 pairs", "POST", check, pairs(501), nil, 422, "validation-failed", "#/pairs"},
		{"more pairs than a request may have", "POST", check, pairs(5000), nil, 413, "request-too-large", ""},
		{"a pair of one", "POST", check, `{"pairs":[{"follower_id":"1"}]}`, nil, 422, "validation-failed", "#/pairs/0"},
		{"a pair with ..", "POST", check, `{"pairs":[{"follower_id":"1","followee_id":"2"},{"follower_id":"..","followee_id":"2"}]}`, nil,
			422, "validation-failed", "#/pairs/1/follower_id"},
		{"a pair with a slash", "POST", check, `{"pairs":[{"follower_id":"1","followee_id":"a/b"}]}`, nil, 422,
			"validation-failed", "#/pairs/0/followee_id"},
		{"a pair of numbers", "POST", check, `{"pairs":[{"follower_id":1,"followee_id":2}]}`, nil, 422, "validation-failed",
			"#/pairs/0/follower_id"},
		{"a pair of three", "POST", check, `{"pairs":[{"follower_id":"1","followee_id":"2","x":"3"}]}`, nil, 422,
			"validation-failed", "#/pairs/0/x"},
		{"pairs that are text", "POST", check, `{"pairs":"1"}`, nil, 422, "validation-failed", "#/pairs"},
		{"half of a check", "POST", check, `{"pairs":[`, nil, 400, "json-invalid", "#"},
		{"a writer checks", "POST", check, pairs(1), []string{"Authorization: Bearer " + writer}, 403, "role-missing", ""},
		{"counts of nothing", "POST", "/v1/posts:counts", `{"ids":[]}`, nil, 422, "validation-failed", "#/ids"},
		{"counts of null", "POST", "/v1/posts:counts", `{"ids":null}`, nil, 422, "validation-failed", "#/ids"},
		{"counts without ids", "POST", "/v1/posts:counts", `{}`, nil, 422, "validation-failed", "#"},
		{"counts of 201 posts", "POST", "/v1/posts:counts", ids(201), nil, 422, "validation-failed", "#/ids"},
		{"counts of post ..", "POST", "/v1/posts:counts", `{"ids":["1",".."]}`, nil, 422, "validation-failed", "#/ids/1"},
		{"counts of a post with a comma", "POST", "/v1/posts:counts", `{"ids":["1,2"]}`, nil, 422, "validation-failed", "#/ids/0"},
		{"counts of a number", "POST", "/v1/posts:counts", `{"ids":[1]}`, nil, 422, "validation-failed", "#/ids/0"},
		{"counts of a null", "POST", "/v1/posts:counts", `{"ids":[null]}`, nil, 422, "validation-failed", "#/ids/0"},
		{"counts of a post", "POST", "/v1/posts:counts", `{"ids":["1"],"id":"1"}`, nil, 422, "validation-failed", "#/id"},
		{"half of the counts", "POST", "/v1/posts:counts", `{"ids":[`, nil, 400, "json-invalid", "#"},
		{"a check of nothing", "POST", "/v1/posts:check", `{"user_id":"7","ids":[]}`, nil, 422, "validation-failed", "#/ids"},
		{"a check without ids", "POST", "/v1/posts:check", `{"user_id":"7"}`, nil, 422, "validation-failed", "#"},
		{"a check of nobody", "POST", "/v1/posts:check", `{"ids":["1"]}`, nil, 422, "validation-failed", "#"},
		{"a check of user ..", "POST", "/v1/posts:check", `{"user_id":"..","ids":["1"]}`, nil, 422, "validation-failed", "#/user_id"},
		{"a check of user 7 by number", "POST", "/v1/posts:check", `{"user_id":7,"ids":["1"]}`, nil, 422, "validation-failed", "#/user_id"},
		{"a check from a group", "POST", "/v1/posts:check", `{"user_id":"7","group_id":"7","ids":["1"]}`, nil, 422, "validation-failed",
			"#/group_id"},
		{"a check of post ..", "POST", "/v1/posts:check", `{"user_id":"7","ids":["1",".."]}`, nil, 422, "validation-failed", "#/ids/1"},
		{"a check of 201 posts", "POST", "/v1/posts:check", strings.Replace(ids(201), "{", `{"user_id":"7",`, 1), nil, 422,
			"validation-failed", "#/ids"},
		{"a check of no kinds", "POST", "/v1/posts:check", `{"user_id":"7","ids":["1"],"edges":[]}`, nil, 422, "validation-failed",
			"#/edges"},
		{"a check of a kind to users", "POST", "/v1/posts:check", `{"user_id":"7","ids":["1"],"edges":["like","follow"]}`, nil, 422,
			"validation-failed", "#/edges/1"},
		{"half of a check of posts", "POST", "/v1/posts:check", `{"user_id":`, nil, 400, "json-invalid", "#"},
		{"a writer checks posts", "POST", "/v1/posts:check", `{"user_id":"7","ids":["1"]}`, []string{"Authorization: Bearer " + writer},
			403, "role-missing", ""},
		{"a writer counts", "POST", "/v1/posts:counts", ids(1), []string{"Authorization: Bearer " + writer}, 403, "role-missing", ""},
		{"mutuals by 0", "GET", "/v1/users/1/mutuals/2?limit=0", "", nil, 422, "validation-failed", "limit"},
		{"mutuals by 201", "GET", "/v1/users/1/mutuals/2?limit=201", "", nil, 422, "validation-failed", "limit"},
		{"mutuals from a cursor", "GET", "/v1/users/1/mutuals/2?cursor=x", "", nil, 422, "validation-failed", "cursor"},
		{"settings by a writer", "PUT", settings, "{", []string{"Authorization: Bearer " + writer}, 403, "role-missing", ""},
		{"settings for a writer", "GET", settings, "", []string{"Authorization: Bearer " + writer}, 403, "role-missing", ""},
		{"settings without If-Match", "PUT", settings, `{"locked":false}`, nil, 428, "if-match-missing", ""},
		{"the first settings of a thread that has some", "PUT", settings, `{"locked":false}`, []string{"If-None-Match: *"},
			412, "version-stale", ""},
		{"settings of a stale version", "PUT", settings, `{"locked":false}`, []string{`If-Match: "2"`}, 412, "version-stale", ""},
		{"settings of no version", "PUT", settings, `{"locked":false}`, []string{`If-Match: "0"`}, 412, "version-stale", ""},
		{"settings of a version that never was", "PUT", "/v1/posts/9/thread", `{"locked":true}`, []string{`If-Match: "1"`},
			412, "version-stale", ""},
		{"settings with an If-Match without quotes", "PUT", settings, `{"locked":false}`, []string{"If-Match: 1"}, 400,
			"header-invalid", "If-Match"},
		{"settings with another If-None-Match", "PUT", "/v1/posts/9/thread", `{"locked":true}`, []string{`If-None-Match: "1"`}, 400,
			"header-invalid", "If-None-Match"},
		{"settings with both", "PUT", settings, `{"locked":false}`, []string{`If-Match: "1"`, "If-None-Match: *"}, 400,
			"header-invalid", "If-None-Match"},
		{"settings with an unknown member", "PUT", settings, `{"locked":false,"slow":true}`, []string{`If-Match: "1"`}, 422,
			"validation-failed", "#/slow"},
		{"a lock that is a string", "PUT", settings, `{"locked":"yes"}`, []string{`If-Match: "1"`}, 422, "validation-failed", "#/locked"},
		{"a title that is a number", "PUT", settings, `{"title":5}`, []string{`If-Match: "1"`}, 422, "validation-failed", "#/title"},
		{"a title too long", "PUT", settings, `{"title":"` + strings.Repeat("é", 151) + `"}`, []string{`If-Match: "1"`}, 422,
			"validation-failed", "#/title"},
		{"a title with a line break", "PUT", settings, `{"title":"a\nb"}`, []string{`If-Match: "1"`}, 422, "validation-failed", "#/title"},
		{"a title with NUL", "PUT", settings, `{"title":"a\u0000"}`, []string{`If-Match: "1"`}, 422, "validation-failed", "#/title"},
		{"no settings", "PUT", settings, ``, []string{`If-Match: "1"`}, 400, "bad-request", ""},
		{"settings that are an array", "PUT", settings, `[]`, []string{`If-Match: "1"`}, 422, "validation-failed", "#"},
		{"half of the settings", "PUT", settings, `{"locked":`, []string{`If-Match: "1"`}, 400, "json-invalid", "#"},
		{"moderation by a writer", "PUT", "/v1/comments/" + parent + "/moderation", "{", []string{"Authorization: Bearer " + writer},
			403, "role-missing", ""},
		{"moderation without If-Match", "PUT", "/v1/comments/" + parent + "/moderation", `{"state":"HIDDEN"}`, nil, 428,
			"if-match-missing", ""},
		{"moderation of a stale version", "PUT", "/v1/comments/" + parent + "/moderation", `{"state":"HIDDEN"}`, []string{`If-Match: "2"`},
			412, "version-stale", ""},
		{"moderation to no state", "PUT", "/v1/comments/" + parent + "/moderation", `{"reason":"x"}`, []string{`If-Match: "1"`}, 422,
			"validation-failed", "#"},
		{"moderation in lower case", "PUT", "/v1/comments/" + parent + "/moderation", `{"state":"hidden"}`, []string{`If-Match: "1"`}, 422,
			"validation-failed", "#/state"},
		{"moderation for a reason too long", "PUT", "/v1/comments/" + parent + "/moderation",
			`{"state":"HIDDEN","reason":"` + strings.Repeat("é", 501) + `"}`, []string{`If-Match: "1"`}, 422,
			"validation-failed", "#/reason"},
		{"moderation for a reason with NUL", "PUT", "/v1/comments/" + parent + "/moderation", `{"state":"HIDDEN","reason":"\u0000"}`,
			[]string{`If-Match: "1"`}, 422, "validation-failed", "#/reason"},
		{"moderation with an unknown member", "PUT", "/v1/comments/" + parent + "/moderation", `{"state":"HIDDEN","by":"me"}`,
			[]string{`If-Match: "1"`}, 422, "validation-failed", "#/by"},
		{"moderation of a deleted comment", "PUT", "/v1/comments/" + deleted + "/moderation", `{"state":"APPROVED"}`,
			[]string{`If-Match: *`}, 409, "comment-gone", ""},
		{"moderation of another tenant's comment", "PUT", "/v1/comments/" + theirs + "/moderation", `{"state":"HIDDEN"}`,
			[]string{`If-Match: *`}, 404, "not-found", ""},
		{"moderation of no UUID", "PUT", "/v1/comments/1/moderation", `{"state":"HIDDEN"}`, []string{`If-Match: *`}, 422,
			"validation-failed", "comment_id"},
		{"a query that is none", "GET", post + "?limit=%zz", "", nil, 400, "bad-request", ""},
	}
	for _, id := range []string{" 1", "1\x00", "\xff", "٣", "é", "a b", "a,b", "*", `"`, "{1}", strings.Repeat("x", 129)} {
		cases = append(cases,
			c{"follower " + id, "PUT", "/v1/follows/" + id + "/2", "", nil, 422, "validation-failed", "follower_id"},
			c{"followee " + id, "PUT", "/v1/follows/2/" + id, "", nil, 422, "validation-failed", "followee_id"},
			c{"follow of " + id, "GET", "/v1/follows/" + id + "/2", "", nil, 422, "validation-failed", "follower_id"},
			c{"unfollow of " + id, "DELETE", "/v1/follows/" + id + "/2", "", nil, 422, "validation-failed", "follower_id"},
			c{"user " + id, "GET", "/v1/users/" + id + "/counts", "", nil, 422, "validation-failed", "user_id"},
			c{"followers of " + id, "GET", "/v1/users/" + id + "/followers", "", nil, 422, "validation-failed", "user_id"},
			c{"mutuals of " + id, "GET", "/v1/users/" + id + "/mutuals/2", "", nil, 422, "validation-failed", "user_id"},
			c{"mutuals with " + id, "GET", "/v1/users/2/mutuals/" + id, "", nil, 422, "validation-failed", "other_id"},
			c{"post " + id, "POST", "/v1/posts/" + id + "/comments", body(`"x"`), nil, 422, "validation-failed", "post_id"},
			c{"settings of " + id, "PUT", "/v1/posts/" + id + "/thread", "{}", nil, 422, "validation-failed", "post_id"},
			c{"thread of " + id, "GET", "/v1/posts/" + id + "/comments", "", nil, 422, "validation-failed", "post_id"},
			c{"tree of " + id, "GET", "/v1/posts/" + id + "/comments/tree", "", nil, 422, "validation-failed", "post_id"},
			c{"summary of " + id, "GET", "/v1/posts/" + id + "/comments/summary", "", nil, 422, "validation-failed", "post_id"},
			c{"comments of user " + id, "GET", "/v1/users/" + id + "/comments", "", nil, 422, "validation-failed", "user_id"},
		)
	}
	for _, path := range []string{"/v1/users/1/followers", "/v1/users/1/following", "/v1/outbox/dlq", post,
		post + "?order=threaded", post + "?order=newest",
		"/v1/comments/" + parent + "/replies", "/v1/users/1/comments", "/v1/moderation/pending"} {
		sep := "?"
		if strings.Contains(path, "?") {
			sep = "&"
		}
		for _, limit := range []string{"0", "201", "-1", "abc", "1.5", "99999999999999999999"} {
			cases = append(cases, c{path + " by " + limit, "GET", path + sep + "limit=" + limit, "", nil, 422,
				"validation-failed", "limit"})
		}
		for _, cursor := range []string{"x", "AAAA", "%25", strings.Repeat("A", 5000)} {
			cases = append(cases, c{path + " from " + cursor[:1], "GET", path + sep + "cursor=" + cursor, "", nil, 400,
				"cursor-invalid", "cursor"})
		}
	}

	documented := f.documented(t)
	before := f.rows(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			a := f.do(t, c.method, c.path, c.body, c.headers...)
			if a.StatusCode != c.status || a.text("code") != c.code {
				t.Fatalf("got %d %s, want %d %s", a.StatusCode, a.body, c.status, c.code)
			}
			if got := a.Header.Get("Content-Type"); got != "application/problem+json" {
				t.Errorf("Content-Type %q", got)
			}
			if a.json["status"] != float64(c.status) || a.text("title") == "" || a.text("type") != "/docs#"+c.code ||
				a.text("request_id") != a.Header.Get("X-Request-Id") {
				t.Errorf("problem %s", a.body)
			}
			if c.at != "" && !strings.Contains(a.body, fmt.Sprintf("%q", c.at)) {
				t.Errorf("problem %s does not name %s", a.body, c.at)
			}
			if strings.Contains(a.body, `"value"`) {
				t.Errorf("problem %s echoes the value", a.body)
			}
			if codes := documented(c.method, c.path); !strings.Contains(codes[fmt.Sprint(c.status)], "`"+c.code+"`") {
				t.Errorf("%s is not documented: %v", c.code, codes)
			}
		})
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("something was written (-before +after):\n%s", diff)
	}
}

// documented returns the descriptions of a path's answers in the OpenAPI document.
func (f fixture) documented(t *testing.T) func(method, path string) map[string]string {
	t.Helper()
	spec := f.want(t, 200, "GET", "/v1/openapi.json", "", "Authorization")
	paths := spec.json["paths"].(map[string]any)
	return func(method, path string) map[string]string {
		path, _, _ = strings.Cut(path, "?")
		got := strings.Split(path, "/")
		codes := make(map[string]string)
		for pattern, item := range paths {
			want := strings.Split(pattern, "/")
			if len(want) != len(got) || !slices.EqualFunc(want, got,
				func(w, g string) bool { return w == g || strings.HasPrefix(w, "{") }) {
				continue
			}
			op, ok := item.(map[string]any)[strings.ToLower(method)].(map[string]any)
			if !ok {
				continue
			}
			for status, r := range op["responses"].(map[string]any) {
				codes[status], _ = r.(map[string]any)["description"].(string)
			}
		}
		return codes
	}
}

func TestUnknownRoutesAndMethodsAreProblems(t *testing.T) {
	t.Parallel()
	f := open(t)
	for _, c := range []struct {
		method, path string
		status       int
		code, allow  string
	}{
		{"GET", "/", 404, "route-unknown", ""},
		{"GET", "/v2/follows/1/2", 404, "route-unknown", ""},
		{"GET", "/v1/follows/1", 404, "route-unknown", ""},
		{"GET", "/v1/follows/1/2/", 404, "route-unknown", ""},
		{"GET", "//v1/follows/1/2", 404, "route-unknown", ""},
		{"GET", "/v1/../v1/follows/1/2", 404, "route-unknown", ""},
		{"OPTIONS", "*", 404, "route-unknown", ""},
		{"POST", "/v1/users/..:remove-edges", 404, "route-unknown", ""},
		{"POST", "/v1/users/:remove-edges", 404, "route-unknown", ""},
		{"POST", "/v1/follows/1/2", 405, "method-not-allowed", "GET, HEAD, PUT, DELETE"},
		{"DELETE", "/v1/posts/1/comments", 405, "method-not-allowed", "GET, HEAD, POST"},
		{"BREW", "/v1/comments/1", 405, "method-not-allowed", "GET, HEAD, PATCH, DELETE"},
		{"POST", "/v1/openapi.json", 405, "method-not-allowed", "GET, HEAD"},
	} {
		a := f.do(t, c.method, c.path, "")
		if a.StatusCode != c.status || a.text("code") != c.code || a.Header.Get("Allow") != c.allow ||
			a.Header.Get("Content-Type") != "application/problem+json" {
			t.Errorf("%s %s: %d %s %v", c.method, c.path, a.StatusCode, a.body, a.Header)
		}
	}
}

// operations calls fn for every operation of the OpenAPI document.
func (f fixture) operations(t *testing.T, fn func(method, path string, op map[string]any)) {
	t.Helper()
	spec := f.want(t, 200, "GET", "/v1/openapi.json", "", "Authorization")
	paths := spec.json["paths"].(map[string]any)
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		item := paths[path].(map[string]any)
		for _, method := range slices.Sorted(maps.Keys(item)) {
			fn(strings.ToUpper(method), path, item[method].(map[string]any))
		}
	}
}

func TestEveryRouteNeedsATokenWithItsDocumentedRole(t *testing.T) {
	t.Parallel()
	f := open(t)
	with, without := make(map[string]string), make(map[string]string)
	for _, role := range tokens.Roles() {
		with[role] = f.newToken(t, tenant, "with "+role, role)
		without[role] = f.newToken(t, tenant, "without "+role,
			slices.DeleteFunc(tokens.Roles(), func(r string) bool { return r == role })...)
	}
	n := 0
	f.operations(t, func(method, path string, op map[string]any) {
		n++
		security, _ := json.Marshal(op["security"])
		var required []struct{ Token []string }
		if err := json.Unmarshal(security, &required); err != nil || len(required) != 1 || len(required[0].Token) != 1 ||
			with[required[0].Token[0]] == "" {
			t.Fatalf("%s %s: security %s, %v: want one role", method, path, security, err)
		}
		role := required[0].Token[0]
		if !strings.Contains(op["description"].(string), "Needs the role `"+role+"`.") {
			t.Errorf("%s %s: its role is not described: %s", method, path, op["description"])
		}
		if a := f.do(t, method, path, "{", "Authorization"); a.StatusCode != 401 || a.text("code") != "unauthenticated" ||
			a.Header.Get("WWW-Authenticate") == "" {
			t.Errorf("%s %s without a token: %d %s", method, path, a.StatusCode, a.body)
		}
		if a := f.do(t, method, path, "{", "Authorization: Bearer "+without[role]); a.StatusCode != 403 ||
			a.text("code") != "role-missing" {
			t.Errorf("%s %s with every role but %s: %d %s", method, path, role, a.StatusCode, a.body)
		}
		if a := f.do(t, method, path, "{", "Authorization: Bearer "+with[role]); a.StatusCode == 401 ||
			a.StatusCode == 403 || a.StatusCode >= 500 {
			t.Errorf("%s %s with the role %s: %d %s", method, path, role, a.StatusCode, a.body)
		}
	})
	if n < 32 {
		t.Errorf("%d routes, want 32 or more", n)
	}
}

// routesOf returns the routes of a kind of edges.
func routesOf(k kinds.Edge) []string {
	one, plural := "/v1/"+k.Plural+"/{"+k.Ends[0]+"}/{"+k.Ends[1]+"}", kinds.Builtin().Plural
	all := []string{"PUT " + one, "GET " + one, "DELETE " + one, "GET " + one + "/versions", "POST /v1/" + k.Plural + ":batch",
		"POST /v1/" + k.Plural + ":check",
		"GET /v1/" + plural(k.To) + "/{" + k.To + "_id}/" + k.Reverse, "GET /v1/" + plural(k.From) + "/{" + k.From + "_id}/" + k.Forward}
	if len(k.Attributes) > 0 {
		all = append(all, "PATCH "+one)
	}
	return all
}

func TestDocuments(t *testing.T) {
	t.Parallel()
	f := open(t)
	spec := f.want(t, 200, "GET", "/v1/openapi.json", "", "Authorization")
	if spec.text("openapi") != "3.1.0" || strings.Contains(spec.body, "ErrorModel") {
		t.Errorf("the document: %.200s", spec.body)
	}
	var got []string
	for path, item := range spec.json["paths"].(map[string]any) {
		for method := range item.(map[string]any) {
			got = append(got, strings.ToUpper(method)+" "+path)
		}
	}
	slices.Sort(got)
	want := []string{
		"DELETE /v1/comments/{comment_id}", "DELETE /v1/follows/{follower_id}/{followee_id}", "GET /v1/comments/{comment_id}",
		"GET /v1/comments/{comment_id}/replies", "GET /v1/comments/{comment_id}/versions",
		"GET /v1/follows/{follower_id}/{followee_id}", "GET /v1/follows/{follower_id}/{followee_id}/versions", "GET /v1/moderation/pending",
		"GET /v1/outbox/dlq", "GET /v1/outbox/dlq/{message_id}", "GET /v1/posts/{post_id}/comments",
		"GET /v1/posts/{post_id}/comments/by-slug/{slug}", "GET /v1/posts/{post_id}/comments/tree",
		"GET /v1/posts/{post_id}/comments/summary",
		"GET /v1/posts/{post_id}/thread", "GET /v1/posts/{post_id}/thread/versions",
		"GET /v1/users/{user_id}/comments", "GET /v1/users/{user_id}/counts", "GET /v1/users/{user_id}/followers",
		"GET /v1/users/{user_id}/following",
		"GET /v1/users/{user_id}/mutuals/{other_id}", "PATCH /v1/comments/{comment_id}",
		"POST /v1/comments:batch", "POST /v1/follows:batch", "POST /v1/follows:check", "POST /v1/outbox/dlq/{message_id}:discard",
		"POST /v1/outbox/dlq/{message_id}:retry", "POST /v1/posts/{post_id}/comments",
		"PUT /v1/comments/{comment_id}/moderation", "PUT /v1/follows/{follower_id}/{followee_id}", "PUT /v1/posts/{post_id}/thread",
	}
	for _, k := range kinds.Builtin().AllEdges() {
		if k.Name != "follow" {
			want = append(want, routesOf(k)...)
		}
	}
	for _, k := range kinds.Builtin().AllChildren() {
		if k.Name != "comment" {
			parents := kinds.Builtin().Objects[k.Parent].Plural
			under, one := "/v1/"+parents+"/{"+k.Parent+"_id}/"+k.Plural, "/v1/"+k.Plural+"/{"+k.Name+"_id}"
			want = append(want, "POST "+under, "GET "+under, "GET "+under+"/summary", "GET "+one, "PATCH "+one, "DELETE "+one,
				"GET "+one+"/versions", "GET /v1/users/{user_id}/"+k.Plural, "POST /v1/"+k.Plural+":batch",
				"GET /v1/"+parents+"/{"+k.Parent+"_id}/counts", "GET "+under+"/settings", "PUT "+under+"/settings",
				"GET "+under+"/settings/versions", "PUT "+one+"/moderation", "GET /v1/moderation/"+k.Plural+"/pending")
		}
	}
	for _, k := range kinds.Builtin().AllEdges() {
		want = append(want, "GET /v1/"+k.Plural+":export")
	}
	for _, k := range kinds.Builtin().AllChildren() {
		want = append(want, "GET /v1/"+k.Plural+":export")
	}
	want = append(want, "GET /v1/threads:export", "GET /v1/kinds", "GET /v1/posts/{post_id}/counts", "GET /v1/groups/{group_id}/counts",
		"GET /v1/edge-removals/{removal_id}", "POST /v1/users/{user_id}:remove-edges", "POST /v1/posts/{post_id}:remove-edges",
		"POST /v1/groups/{group_id}:remove-edges", "POST /v1/comments/{comment_id}:remove-edges",
		"GET /v1/comments/{comment_id}/counts", "POST /v1/comments:counts", "POST /v1/comments:check")
	for _, o := range kinds.Builtin().Objects {
		want = append(want, "POST /v1/"+o.Plural+":counts")
	}
	want = append(want, "POST /v1/users:check", "POST /v1/posts:check", "POST /v1/groups:check")
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
	yaml := f.want(t, 200, "GET", "/v1/openapi.yaml", "", "Authorization")
	page := f.want(t, 200, "GET", "/docs", "", "Authorization")
	for _, body := range []string{yaml.body, page.body} {
		if !strings.Contains(body, "/v1/posts/{post_id}/comments") || !strings.Contains(body, "parent-gone") {
			t.Errorf("a document without its routes: %.300s", body)
		}
	}
	if strings.Contains(page.body, "http://") || strings.Contains(page.body, "https://") || strings.Contains(page.body, "<script") {
		t.Error("the page fetches something from elsewhere")
	}
}

func (f fixture) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := f.system.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// walk reads a list to its end.
func (f fixture) walk(t *testing.T, path string, limit int) (items []map[string]any, pages int) {
	t.Helper()
	next := ""
	for {
		p := fmt.Sprintf("%s&limit=%d", path, limit)
		if next != "" {
			p += "&cursor=" + next
		}
		a := f.want(t, 200, "GET", p, "")
		page := a.json["items"].([]any)
		for _, item := range page {
			items = append(items, item.(map[string]any))
		}
		pages++
		next = a.text("next")
		if next == "" {
			return items, pages
		}
		if len(page) != limit {
			t.Fatalf("page %d has %d items, want %d", pages, len(page), limit)
		}
	}
}

func TestListsAndCountsComeFromTheProjection(t *testing.T) {
	t.Parallel()
	f := open(t)
	// 250 users follow 42, many of them at the same time. User 1 follows 9 users and has unfollowed
	// one. Another tenant has an edge too.
	f.exec(t, `INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
		SELECT 1, 'follow', g, 42, true, 1, timestamptz '2026-01-01' + (g / 20) * interval '1 microsecond' FROM generate_series(100, 349) g
		UNION ALL SELECT 1, 'follow', 1, g, g <> 55, 1, timestamptz '2026-01-01' FROM generate_series(50, 59) g
		UNION ALL SELECT 2, 'follow', 5000, 42, true, 1, timestamptz '2026-01-01'`)
	f.exec(t, `INSERT INTO edge_counts (tenant_id, kind, object_id, incoming, outgoing)
		VALUES (1, 'follow', 42, 250, 0), (1, 'follow', 1, 0, 9), (2, 'follow', 42, 1, 0)`)
	f.exec(t, `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of)
		SELECT 'followercounts', 'p' || lpad(n::text, 2, '0'), 5, timestamptz '2026-02-03T04:05:06.789012Z' + n * interval '1 s'
		FROM generate_series(0, 31) n`)

	counts := f.want(t, 200, "GET", "/v1/users/42/counts", "")
	for _, k := range kinds.Builtin().AllEdges() { // the other kinds with edges of users
		if k.Name != "follow" && k.From == "user" {
			if counts.json[k.Forward] != 0.0 {
				t.Errorf("%s: %v", k.Forward, counts.json[k.Forward])
			}
			delete(counts.json, k.Forward)
		}
	}
	if diff := cmp.Diff(map[string]any{"followers": 250.0, "following": 0.0, "as_of": "1970-01-01T00:00:00.000000Z"},
		counts.json); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	if unknown := f.want(t, 200, "GET", "/v1/users/77/counts", ""); unknown.json["followers"] != 0.0 || unknown.json["following"] != 0.0 {
		t.Errorf("an unknown user: %s", unknown.body)
	}
	if empty := f.want(t, 200, "GET", "/v1/users/77/followers", ""); !strings.Contains(empty.body, `"items":[]`) ||
		strings.Contains(empty.body, "next") || empty.text("as_of") != "1970-01-01T00:00:00.000000Z" {
		t.Errorf("an unknown user's followers: %s", empty.body)
	}
	for _, limit := range []int{1, 7, 50, 125, 200} {
		items, pages := f.walk(t, "/v1/users/42/followers?", limit)
		if want := (250 + limit - 1) / limit; len(items) != 250 || pages != want {
			t.Errorf("limit %d: %d items on %d pages, want 250 on %d", limit, len(items), pages, want)
		}
		for i, item := range items {
			if want := fmt.Sprint(349 - i); item["user_id"] != want {
				t.Fatalf("limit %d, item %d: %v, want user %s", limit, i, item, want)
			}
		}
	}
	if a := f.want(t, 200, "GET", "/v1/users/42/followers", ""); len(a.json["items"].([]any)) != 50 {
		t.Errorf("%d items by default, want 50", len(a.json["items"].([]any)))
	}
	following, _ := f.walk(t, "/v1/users/1/following?", 4)
	if len(following) != 9 {
		t.Errorf("following %d, want 9", len(following))
	}

	// A cursor belongs to its list and its tenant.
	cursor := f.want(t, 200, "GET", "/v1/users/42/followers?limit=1", "").text("next")
	foreign := f
	foreign.token = f.newToken(t, 2, "foreigner", tokens.Roles()...)
	for name, a := range map[string]answer{
		"another user":   f.do(t, "GET", "/v1/users/43/followers?cursor="+cursor, ""),
		"another list":   f.do(t, "GET", "/v1/users/42/following?cursor="+cursor, ""),
		"a thread":       f.do(t, "GET", "/v1/posts/42/comments?cursor="+cursor, ""),
		"another tenant": foreign.do(t, "GET", "/v1/users/42/followers?cursor="+cursor, ""),
	} {
		if a.StatusCode != 400 || a.text("code") != "cursor-invalid" {
			t.Errorf("a cursor of %s: %d %s", name, a.StatusCode, a.body)
		}
	}
	if theirs, _ := foreign.walk(t, "/v1/users/42/followers?", 50); len(theirs) != 1 || theirs[0]["user_id"] != "5000" {
		t.Errorf("another tenant's followers: %v", theirs)
	}
}

func TestMetricsAndRequestIDs(t *testing.T) {
	t.Parallel()
	f := open(t)
	a := f.want(t, 404, "GET", "/v1/follows/1/2", "", "X-Request-Id: abc-1")
	if a.Header.Get("X-Request-Id") != "abc-1" {
		t.Errorf("the request's id: %v", a.Header)
	}
	if a := f.do(t, "GET", "/nope", "", "X-Request-Id: a b"); a.Header.Get("X-Request-Id") == "a b" || a.Header.Get("X-Request-Id") == "" {
		t.Errorf("an id that is none: %v", a.Header)
	}
	f.do(t, "GET", "/v1/follows/3/4", "")
	f.do(t, "BREW", "/v1/follows/3/4", "")
	series := testkit.Series(t, f.reg)
	const route = "/v1/follows/{follower_id}/{followee_id}"
	for name, want := range map[string]float64{
		"tidings_api_requests_total 404 GET " + route: 2, "tidings_api_requests_total 200 GET " + route: 0,
		"tidings_api_requests_total 201 PUT " + route: 0,
		"tidings_api_requests_total 404 GET none":     1, "tidings_api_requests_total 405 other none": 1,
		"tidings_api_request_duration_seconds GET " + route: 2, "tidings_api_request_duration_seconds PATCH /v1/comments/{comment_id}": 0,
	} {
		if got, ok := series[name]; !ok || got != want {
			t.Errorf("%s is %v (%t), want %v", name, got, ok, want)
		}
	}
	if n, p99 := f.Handler.(*api.Handler).Traffic(); n != 4 || p99 <= 0 {
		t.Errorf("the traffic is %d requests, p99 %s; want 4 requests", n, p99)
	}
}

func TestADatabaseThatIsAwayIsA503(t *testing.T) {
	t.Parallel()
	pg := testkit.PostgresProcess(t)
	db := pg.DB(t)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}
	pool := db.Pool(t, postgres.RoleAPI)
	var err error
	if f.Handler, err = api.New(config(), api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil),
		Projections: pool, Fleet: fleet, Log: testkit.Logger(t), Reg: f.reg}); err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	f.want(t, 201, "PUT", "/v1/follows/1/2", "")
	pg.Kill(t)
	for _, c := range [][2]string{{"PUT", "/v1/follows/1/3"}, {"GET", "/v1/follows/1/2"}, {"GET", "/v1/users/1/counts"},
		{"GET", "/v1/posts/1/comments"}} {
		a := f.do(t, c[0], c[1], "")
		if a.StatusCode != 503 || a.text("code") != "unavailable" || a.Header.Get("Retry-After") == "" ||
			a.Header.Get("Content-Type") != "application/problem+json" {
			t.Errorf("%s %s: %d %s %v", c[0], c[1], a.StatusCode, a.body, a.Header)
		}
	}
	pg.Restart(t)
	testkit.Eventually(t, "writes to work again", func() (bool, error) {
		return f.do(t, "PUT", "/v1/follows/1/3", "").StatusCode == 201, nil
	})
	f.want(t, 200, "GET", "/v1/follows/1/2", "")
}
