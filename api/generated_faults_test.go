//go:build faults

package api_test

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http/httptest"
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestGeneratedRequests sends requests made from the document, most of them invalid. Each answer
// conforms to the document, none is an error of the server, and a refused request writes nothing. A
// failure prints the seed.
func TestGeneratedRequests(t *testing.T) {
	log := new(errorLog)
	f := openWith(t, config(), slog.New(log))
	w := f.populate(t, "text")
	d := f.document(t)
	type operation struct {
		method, path string
		op           map[string]any
		good         []walked
	}
	var operations []operation
	f.operations(t, func(method, p string, _ map[string]any) {
		op := d["paths"].(map[string]any)[p].(map[string]any)[strings.ToLower(method)].(map[string]any)
		operations = append(operations, operation{method, p, op, requests(t, method, p, op)})
	})
	w["cursor"] = f.want(t, 200, "GET", w.fill("/v1/users/$user/followers?limit=1"), "").text("next")
	reader := f.newToken(t, tenant, "reader", "read")
	// Every write leaves an event, or an action.
	written := func() (n int64) {
		if err := f.system.QueryRow(t.Context(),
			`SELECT (SELECT count(*) FROM outbox_messages) + (SELECT count(*) FROM outbox_dlq_actions)`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	statuses, sent := make(map[int]int), 0
	before := written()
	rapid.Check(t, func(rt *rapid.T) {
		for range 25 {
			o := rapid.SampledFrom(operations).Draw(rt, "operation")
			r := rapid.SampledFrom(o.good).Draw(rt, "request")
			odd := func(what string) (string, bool) {
				if rapid.IntRange(0, 19).Draw(rt, what) > 0 {
					return "", false
				}
				return rapid.SampledFrom(strange()).Draw(rt, what+" value"), true
			}
			segments := strings.Split(r.path, "/")
			clean := true
			for i, s := range segments {
				segments[i] = url.PathEscape(w.fill(s))
				_, verb, has := strings.Cut(s, ":")
				if v, ok := odd("path"); ok && strings.HasPrefix(s, "$") && !(has && v == "") { // a verb without an id is no route
					segments[i] = url.PathEscape(v)
					if has {
						segments[i] += ":" + verb
						clean = clean && v != "." && v != ".." && v != "*"
					}
				}
			}
			body := w.fill(r.body)
			if o.op["requestBody"] != nil {
				body = mutate(rt, body)
			}
			req := httptest.NewRequestWithContext(t.Context(), r.method, "/", strings.NewReader(body))
			req.URL.RawPath = strings.Join(segments, "/")
			req.URL.Path, _ = url.PathUnescape(req.URL.RawPath)
			clean = clean && req.URL.Path == path.Clean(req.URL.Path)
			query := url.Values{}
			if name, value, ok := strings.Cut(w.fill(r.query), "="); ok {
				query.Set(name, value)
			}
			for _, p := range parametersOf(o.op) {
				name := p["name"].(string)
				v, ok := odd(name)
				if !ok {
					continue
				}
				switch p["in"] {
				case "query":
					query.Add(name, v)
				case "header":
					req.Header.Add(name, v)
				}
			}
			if v, ok := odd("unknown parameter"); ok {
				query.Set("x"+v, v)
			}
			req.URL.RawQuery = query.Encode()
			if v, ok := odd("raw query"); ok {
				req.URL.RawQuery += v
			}
			if name, value, ok := strings.Cut(w.fill(r.header), ": "); ok {
				req.Header.Set(name, value)
			}
			token := f.token
			if v, ok := odd("token"); ok {
				token = rapid.SampledFrom([]string{v, reader, token + v}).Draw(rt, "which token")
			}
			req.Header.Set("Authorization", "Bearer "+token)
			for _, name := range []string{"Content-Type", "Content-Encoding", "Accept", "X-Request-Id",
				"Tidings-Token", "Idempotency-Key"} {
				if v, ok := odd(name); ok {
					req.Header.Add(name, v)
				}
			}
			rec := httptest.NewRecorder()
			f.ServeHTTP(rec, req)
			a := answerOf(t, rec)
			statuses[a.StatusCode]++
			sent++
			tell := fmt.Sprintf("%s %s?%s %v %.300q: %d %s", req.Method, req.URL.RawPath, req.URL.RawQuery, req.Header,
				body, a.StatusCode, a.body)
			if logged := log.last.Load(); a.StatusCode >= 500 || logged != nil {
				rt.Fatalf("%s: the server's fault, logged %v", tell, logged)
			}
			if a.StatusCode == 404 && a.text("code") == "route-unknown" && !clean {
				continue // no path of the document
			}
			if wrong := d.conforms(t, o.op, a); len(wrong) > 0 {
				rt.Fatalf("%s: %v", tell, wrong)
			}
			if r.method == "GET" {
				continue
			}
			after := written()
			if a.StatusCode >= 400 && after != before {
				rt.Fatalf("%s: it has written something", tell)
			}
			before = after
		}
	})
	t.Logf("%d requests, answered %v", sent, statuses)
	for _, status := range []int{200, 201, 204, 304, 400, 401, 403, 404, 412, 415, 422, 428} {
		if statuses[status] == 0 {
			t.Errorf("no request was answered %d: %v", status, slices.Sorted(maps.Keys(statuses)))
		}
	}
}
