package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// offline is a server without a database. The targets below send input that the server must refuse
// before it needs the database, or that does not need one.
func offline(f *testing.F) *server {
	f.Helper()
	pool, err := pgxpool.New(context.Background(), "postgres://nobody@127.0.0.1:1/none")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(pool.Close)
	cfg := Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 1 << 17, MaxBatchBytes: 1 << 20, RequestTimeout: time.Second,
		AddressConnections: 100, MaxRequests: 100, MaxWait: time.Second}
	h, err := New(cfg, Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
		Fleet: []projections.Projection{followercounts.New(kinds.Builtin), threadcache.New(kinds.Builtin)},
		Log:   slog.New(slog.DiscardHandler), Reg: prometheus.NewRegistry()})
	if err != nil {
		f.Fatal(err)
	}
	return h.Handler.(*router).now.Load()
}

// A cursor that decode accepts is one that encode wrote: its content has only one text.
func FuzzCursor(f *testing.F) {
	c := newCursors([][]byte{[]byte("0123456789abcdef0123456789abcdef")})
	home := list{tenant: 1, name: "followers", of: "42"}
	for _, user := range []event.ID{"1", event.IDOf(1 << 62)} {
		given, err := c.encode(home, edgeCursor{At: event.Time{Time: time.Unix(1, 1000).UTC()}, User: user})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(given, int64(1), "followers", int64(42))
		f.Add(given+"A", int64(1), "followers", int64(42))
		f.Add(given, int64(2), "following", int64(43))
	}
	f.Add("", int64(1), "", int64(0))
	f.Fuzz(func(t *testing.T, cursor string, tenant int64, name string, of int64) {
		var got edgeCursor
		l := list{tenant, name, event.IDOf(of)}
		if err := c.decode(l, cursor, &got); err != nil {
			if !errors.Is(err, errCursor) {
				t.Fatalf("%q: %v", cursor, err)
			}
			return
		}
		again, err := c.encode(l, got)
		if err != nil || again != cursor || l != home {
			t.Fatalf("%q of %v is decoded as %q, %v", cursor, l, again, err)
		}
	})
}

// The header has tokens of this tenant, or the API refuses it by name.
func FuzzTidingsToken(f *testing.F) {
	s := offline(f)
	given, err := s.cursors.encode(tokenList(1), []event.Ref{{Type: event.AggregateFollow, From: "7", To: "42", Version: 1}})
	if err != nil {
		f.Fatal(err)
	}
	other, err := s.cursors.encode(tokenList(2), []event.Ref{{Type: event.AggregateThread, Thread: "5", Version: 1}})
	if err != nil {
		f.Fatal(err)
	}
	for _, header := range []string{given, given + ", " + given, other, given + "," + other, ",", "", " " + given + "\t",
		strings.Repeat(given+",", 64) + given, "\x00"} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		refs, err := s.sessionRefs(1, []string{header})
		var p *Problem
		if err != nil {
			if !errors.As(err, &p) || p.Code != codeHeaderInvalid || p.Errors[0].Header != tokenHeader {
				t.Fatalf("%q: %v", header, err)
			}
			return
		}
		parts := strings.Split(header, ",")
		if len(refs) > maxSessionRefs || len(refs) != len(parts) {
			t.Fatalf("%q: %d refs", header, len(refs))
		}
		for _, part := range parts {
			if strings.TrimSpace(part) != given {
				t.Fatalf("%q is accepted", header)
			}
		}
	})
}

// Only "Bearer" and a token reach the database.
func FuzzAuthorization(f *testing.F) {
	s := offline(f)
	for _, header := range []string{"", "Bearer", "Bearer ", "bearer x", "Bearer\tx", "Basic eA==", "Bearer a b", "Bearer \x00",
		"Bearer  tdg_x ", "BEARER tdg_\xff", "Bearer,Bearer x"} {
		f.Add(header)
	}
	f.Fuzz(func(t *testing.T, header string) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // so that no look-up begins
		h, asked := bearer(header)
		if asked {
			if p, err := s.auth.principal(ctx, h, func() error { return nil }); err == nil || p.TenantID != 0 {
				t.Fatalf("%q is %v", header, p)
			}
		}
		scheme, token, _ := strings.Cut(header, " ")
		if may := strings.EqualFold(scheme, "bearer") && strings.TrimSpace(token) != ""; asked != may {
			t.Fatalf("%q reached the database: %t", header, asked)
		}
	})
}

var uuidForm = regexp.MustCompile(uuidPattern)

// Any path and query without a token lead to a 4xx problem, and never elsewhere. An id has only one
// text.
func FuzzPath(f *testing.F) {
	s := offline(f)
	for _, target := range []string{
		"/v1/follows/1/2", "/v1/follows/1%2F2/3", "/v1/follows/1%00/2", "//v1/follows/1/2", "/v1/./users/1/counts",
		"/v1/users/%2e%2e/counts", "/v1/users/1/followers?limit=1&cursor=x",
		"/v1/users/1/followers?a;b", "/v1/users:counts", "/v1/comments/0196b2d4-7c00-7000-8000-000000000001",
		"/v1/comments/{0196b2d4-7c00-7000-8000-000000000001}", "/%", "*", "", "/v1/users/٣/counts",
	} {
		p, q, _ := strings.Cut(target, "?")
		f.Add("GET", p, q)
	}
	f.Fuzz(func(t *testing.T, method, path, query string) {
		u := &url.URL{RawPath: path, RawQuery: query}
		var err error
		if u.Path, err = url.PathUnescape(path); err != nil || method == "" {
			return // HTTP refuses it
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, &http.Request{Method: method, URL: u, Header: http.Header{}, Body: http.NoBody, Host: "x",
			ProtoMajor: 1, ProtoMinor: 1})
		document := w.Code == 200 && (u.Path == docsPath || strings.HasPrefix(u.Path, openAPIPath))
		if problem := w.Code >= 400 && w.Code < 500 && w.Header().Get("Content-Type") == problemMediaType; !problem && !document {
			t.Fatalf("%s %q?%q: %d %v", method, path, query, w.Code, w.Header())
		}
		for segment := range strings.SplitSeq(u.Path, "/") {
			if id, err := event.ParseID(segment); err == nil && (id == "" || id.String() != segment) {
				t.Fatalf("%q is the id %s", segment, id)
			}
			if c := childID(segment); uuidForm.MatchString(segment) {
				if parsed, err := uuid.Parse(segment); err != nil || parsed.String() != c.lower() {
					t.Fatalf("%q is a UUID here, and %v elsewhere: %v", segment, parsed, err)
				}
			}
		}
	})
}

// Accepted input is one JSON value that encoding/json accepts too, with the same meaning when it is
// encoded again, and without repeated members.
func FuzzStrictJSON(f *testing.F) {
	for _, body := range []string{
		`{"author_id":"3","body":"hello \ud83d\ude00"}`, `{"a":1,"a":2}`, `{"a":1,"\u0061":2}`, `{"A":1}`, `{"x":[{"a":1},{"a":2}]}`,
		`{"a":"\ud83d"}`, `{"a":"\\ud83d"}`, `{"a":1e400}`, `{"a":9223372036854775808}`,
		"\"\xff\"", `{"a":1}{}`, `{"a":1}]`, `[1,2`, ` null `, `"\u0000"`, "\ufeff{}", strings.Repeat("[", 40), `{"":{"":{}}}`, `{"a":1,}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var got any
		if strictJSON(body, &got) != nil {
			return
		}
		if !utf8.Valid(body) || !json.Valid(body) {
			t.Fatalf("%q is accepted", body)
		}
		if names := countNames(body); names != countMembers(got) {
			t.Fatalf("%q has %d names, and what was read of it %d", body, names, countMembers(got))
		}
		again, err := json.Marshal(got)
		var second any
		if err != nil || strictJSON(again, &second) != nil || !reflect.DeepEqual(got, second) {
			t.Fatalf("%q is decoded as %s, %v", body, again, err)
		}
	})
}

// countNames counts the members of valid JSON: the colons outside strings.
func countNames(body []byte) (n int) {
	quoted := false
	for i := 0; i < len(body); i++ {
		switch {
		case quoted && body[i] == '\\':
			i++
		case body[i] == '"':
			quoted = !quoted
		case !quoted && body[i] == ':':
			n++
		}
	}
	return n
}

func countMembers(v any) (n int) {
	switch v := v.(type) {
	case map[string]any:
		for _, member := range v {
			n += 1 + countMembers(member)
		}
	case []any:
		for _, item := range v {
			n += countMembers(item)
		}
	}
	return n
}

// Every line of a batch is an unchanged operation, or is refused alone with a 4xx problem that
// points into it.
func FuzzBatchLines(f *testing.F) {
	s := offline(f)
	schema := func(name string) *huma.Schema { return s.api.OpenAPI().Components.Schemas.Map()[name] }
	follows := &edgeRoutes{archetype: newArchetype(s, "follow", "follows", edgeNaming(kinds.Builtin().Edges["follow"])),
		k: kinds.Builtin().Edges["follow"]}
	comments := &childRoutes{archetype: newArchetype(s, "comment", "comments", childNaming(kinds.Builtin().Children["comment"])),
		k: kinds.Builtin().Children["comment"]}
	operations := []kind{
		{"put", schema("FollowOperation"), follows.take, nil}, {"remove", schema("FollowOperation"), follows.take, nil},
		{"create", schema("CreateOperation"), comments.takeCreate, nil}, {"edit", schema("EditOperation"), comments.takeEdit, nil},
		{"delete", schema("DeleteOperation"), comments.takeDelete, nil},
	}
	for _, line := range []string{
		`{"op":"put","follower_id":"7","followee_id":"42"}`, `{"op":"remove","follower_id":"7","followee_id":"7"}`,
		`{"op":"create","post_id":"5","author_id":"3","body":"x","idempotency_key":"k"}`,
		`{"op":"edit","comment_id":"0196b2d4-7c00-7000-8000-000000000001","body":"x","if_match":"*"}`,
		`{"op":"delete","comment_id":"0196b2d4-7c00-7000-8000-000000000001","if_match":9223372036854775807}`,
		`{"op":"delete","comment_id":"0196b2d4-7c00-7000-8000-000000000001","if_match":1e3}`, `{"op":"create","op":"delete"}`,
		`{"op":["create"]}`, `null`, ``, "\r", `{"op":"put","follower_id":"9223372036854775808","followee_id":"1"}`,
	} {
		f.Add([]byte(line + "\n" + line))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		raws, err := s.linesOf(body)
		if err != nil {
			return // too many
		}
		if whole := bytes.Join(raws, []byte("\n")); !bytes.Equal(whole, bytes.TrimSuffix(body, []byte("\n"))) {
			t.Fatalf("%q became %q", body, whole)
		}
		for _, raw := range raws {
			op := s.takeOperation(t.Context(), operations, raw)
			if op.out.Status != 0 {
				if p := op.out.Problem; op.in != nil && p == nil || p.Status != op.out.Status || p.Status < 400 || p.Status > 499 {
					t.Fatalf("%q: %d %v", raw, op.out.Status, p)
				}
				continue
			}
			var object map[string]any
			if err := strictJSON(raw, &object); err != nil || object["op"] != op.kind {
				t.Fatalf("%q is decoded as %s: %v", raw, op.kind, err)
			}
			var took, wrote []any
			switch in := op.in.(type) {
			case store.EdgeWrite:
				took, wrote = []any{in.From.String(), in.To.String()},
					[]any{object["follower_id"], object["followee_id"]}
			case store.NewChild:
				took, wrote = []any{in.Object.String(), in.AuthorID.String(), in.Body},
					[]any{object["post_id"], object["author_id"], object["body"]}
			case store.ChildEdit:
				took, wrote = []any{in.ID, *in.Body, in.IfVersion >= 0},
					[]any{strings.ToLower(object["comment_id"].(string)), object["body"], true}
			case store.ChildDelete:
				took, wrote = []any{in.ID, in.IfVersion >= 0}, []any{strings.ToLower(object["comment_id"].(string)), true}
			}
			if len(took) == 0 || !reflect.DeepEqual(took, wrote) {
				t.Fatalf("%q is decoded as %v", raw, op.in)
			}
		}
	})
}
