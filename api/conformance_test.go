package api_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// document is the OpenAPI document, with numbers in their original form.
type document map[string]any

func decode(t testing.TB, text string) (v any) {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	return v
}

func (f fixture) document(t *testing.T) document {
	t.Helper()
	return decode(t, f.want(t, 200, "GET", "/v1/openapi.json", "", "Authorization").body).(map[string]any)
}

// ref returns the schema that a reference names.
func (d document) ref(to string) map[string]any {
	at := map[string]any(d)
	for name := range strings.SplitSeq(strings.TrimPrefix(to, "#/"), "/") {
		at = at[name].(map[string]any)
	}
	return at
}

func typeOf(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case bool:
		return "boolean"
	case string:
		return "string"
	case json.Number:
		if strings.ContainsAny(v.String(), ".eE") {
			return "number"
		}
		return "integer"
	case []any:
		return "array"
	}
	return "object"
}

var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// check returns the errors of a value by its schema. An unknown keyword of the schema is an error
// too.
func (d document) check(at string, schema map[string]any, v any) (wrong []string) {
	say := func(format string, args ...any) {
		wrong = append(wrong, fmt.Sprintf("%s: %s", at, fmt.Sprintf(format, args...)))
	}
	text, _ := v.(string)
	n, number := v.(json.Number)
	size, _ := n.Float64()
	object, _ := v.(map[string]any)
	list, _ := v.([]any)
	bound := func(limit any) float64 { f, _ := limit.(json.Number).Float64(); return f }
	for keyword, rule := range schema {
		switch keyword {
		case "$ref":
			wrong = append(wrong, d.check(at, d.ref(rule.(string)), v)...)
		case "type":
			if types, ok := rule.([]any); !(ok && slices.Contains(types, any(typeOf(v))) || rule == typeOf(v)) {
				say("a %s, want %v", typeOf(v), rule)
			}
		case "properties":
			for name, member := range rule.(map[string]any) {
				if value, ok := object[name]; ok {
					wrong = append(wrong, d.check(at+"/"+name, member.(map[string]any), value)...)
				}
			}
		case "required":
			for _, name := range rule.([]any) {
				if _, ok := object[name.(string)]; !ok {
					say("no %v", name)
				}
			}
		case "additionalProperties":
			properties, _ := schema["properties"].(map[string]any)
			for name := range object {
				if _, ok := properties[name]; !ok && rule == false {
					say("%s is unknown", name)
				}
			}
		case "items":
			for i, item := range list {
				wrong = append(wrong, d.check(fmt.Sprintf("%s/%d", at, i), rule.(map[string]any), item)...)
			}
		case "oneOf":
			fits := 0
			for _, s := range rule.([]any) {
				if len(d.check(at, s.(map[string]any), v)) == 0 {
					fits++
				}
			}
			if fits != 1 {
				say("%d schemas fit, want one", fits)
			}
		case "enum":
			if !slices.Contains(rule.([]any), v) {
				say("%v, want one of %v", v, rule)
			}
		case "pattern":
			if !regexp.MustCompile(rule.(string)).MatchString(text) {
				say("%q does not match %v", text, rule)
			}
		case "maxLength":
			if float64(len(text)) > bound(rule) {
				say("%d bytes, want at most %v", len(text), rule)
			}
		case "format":
			_, dateErr := time.Parse(time.RFC3339Nano, text)
			_, intErr := strconv.ParseInt(n.String(), 10, 64)
			switch {
			case rule == "date-time" && dateErr != nil, rule == "uuid" && !uuidForm.MatchString(text), rule == "int64" && intErr != nil:
				say("%v is no %v", v, rule)
			case !slices.Contains([]any{"date-time", "uuid", "int64", "uri-reference"}, rule):
				say("the format %v is unknown", rule)
			}
		case "minimum", "maximum":
			if low := keyword == "minimum"; number && (low && size < bound(rule) || !low && size > bound(rule)) {
				say("%v, want %s %v", v, keyword, rule)
			}
		case "minItems", "maxItems":
			if low := keyword == "minItems"; low && float64(len(list)) < bound(rule) || !low && float64(len(list)) > bound(rule) {
				say("%d items, want %s %v", len(list), keyword, rule)
			}
		case "description", "examples", "default", "patternDescription":
		default:
			say("the keyword %s is unknown", keyword)
		}
	}
	return wrong
}

// safe returns the numbers that JavaScript cannot hold, and the ids that are numbers.
func safe(at string, v any) (wrong []string) {
	switch v := v.(type) {
	case map[string]any:
		for name, member := range v {
			if _, number := member.(json.Number); number && (name == "id" || strings.HasSuffix(name, "_id")) {
				wrong = append(wrong, at+"/"+name+" is an id and a number")
			}
			wrong = append(wrong, safe(at+"/"+name, member)...)
		}
	case []any:
		for i, item := range v {
			wrong = append(wrong, safe(fmt.Sprintf("%s/%d", at, i), item)...)
		}
	case json.Number:
		if f, err := v.Float64(); err != nil || math.Abs(f) > 1<<53 {
			wrong = append(wrong, fmt.Sprintf("%s is %s, beyond 2^53", at, v))
		}
	}
	return wrong
}

// content returns the document's schema of an answer or a body of this type, and whether it has
// one.
func content(of map[string]any, mediaType string) (map[string]any, bool) {
	all, _ := of["content"].(map[string]any)
	media, _ := all[mediaType].(map[string]any)
	schema, ok := media["schema"].(map[string]any)
	return schema, ok
}

// conforms returns the differences between an answer and the document with docs/api.md.
func (d document) conforms(t testing.TB, op map[string]any, a answer) (wrong []string) {
	t.Helper()
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	for name, want := range map[string]string{"Cache-Control": "private, no-cache", "Vary": "Authorization",
		"X-Content-Type-Options": "nosniff"} {
		if got := a.Header[name]; len(got) != 1 || got[0] != want {
			say("%s is %q, want %q", name, got, want)
		}
	}
	if a.Header.Get("X-Request-Id") == "" {
		say("no X-Request-Id")
	}
	described, ok := op["responses"].(map[string]any)[strconv.Itoa(a.StatusCode)].(map[string]any)
	if !ok {
		say("the status is not documented")
		return wrong
	}
	for name := range a.Header {
		headers, _ := described["headers"].(map[string]any)
		if _, ok := headers[name]; !ok && slices.Contains([]string{"Etag", "Location", "Tidings-Token", "Idempotency-Replayed"}, name) {
			if _, ok := headers["ETag"]; name != "Etag" || !ok {
				say("the header %s is not documented", name)
			}
		}
	}
	mediaType := a.Header.Get("Content-Type")
	if a.StatusCode == 204 || a.StatusCode == 304 {
		if a.body != "" || mediaType != "" {
			say("a %d with a body of %q", a.StatusCode, mediaType)
		}
		return wrong
	}
	schema, ok := content(described, mediaType)
	if !ok {
		say("the Content-Type %q is not documented", mediaType)
		return wrong
	}
	if mediaType == "application/x-ndjson" {
		return wrong
	}
	body := decode(t, a.body)
	wrong = append(wrong, d.check("", schema, body)...)
	wrong = append(wrong, safe("", body)...)
	if a.StatusCode >= 400 {
		if code := a.text("code"); !strings.Contains(described["description"].(string), "`"+code+"`") {
			say("the code %s is not documented", code)
		}
		if mediaType != "application/problem+json" || a.json["status"] != float64(a.StatusCode) ||
			a.text("request_id") != a.Header.Get("X-Request-Id") {
			say("no problem of its own status and request")
		}
	}
	return wrong
}

func parametersOf(op map[string]any) (all []map[string]any) {
	list, _ := op["parameters"].([]any)
	for _, p := range list {
		all = append(all, p.(map[string]any))
	}
	return all
}

// TestEveryOperationHasExamplesThatHold checks every example by its schema, and sends requests made
// of the examples.
func TestEveryOperationHasExamplesThatHold(t *testing.T) {
	t.Parallel()
	for name, file := range map[string]string{"own kinds": ownKinds, "narrowed ids": narrowKinds, "changed built-in kinds": changedKinds} {
		t.Run(name, func(t *testing.T) { examplesHold(t, file) })
	}
}

func examplesHold(t *testing.T, file string) {
	t.Helper()
	f, _, _ := openKindsOf(t, file, true)
	d := f.document(t)
	for code, e := range d.ref("#/components/examples") {
		if wrong := d.check("", d.ref("#/components/schemas/Problem"), e.(map[string]any)["value"]); len(wrong) > 0 {
			t.Errorf("the example of %s: %v", code, wrong)
		}
	}
	for name, schema := range d.ref("#/components/schemas") {
		properties, _ := schema.(map[string]any)["properties"].(map[string]any)
		for member, s := range properties {
			if id := member == "id" || strings.HasSuffix(member, "_id"); id && s.(map[string]any)["type"] != "string" {
				t.Errorf("%s of %s is an id and no string", member, name)
			}
		}
	}
	f.operations(t, func(method, path string, _ map[string]any) {
		op := d["paths"].(map[string]any)[path].(map[string]any)[strings.ToLower(method)].(map[string]any)
		name := method + " " + path
		needed, optional := []string{}, [][]string{nil}
		filled, query := path, [][2]string{{}}
		for _, p := range parametersOf(op) {
			example := p["example"]
			if example == nil {
				t.Errorf("%s: %s has no example", name, p["name"])
				continue
			}
			if wrong := d.check(p["name"].(string), p["schema"].(map[string]any), example); len(wrong) > 0 {
				t.Errorf("%s: the example does not fit: %v", name, wrong)
			}
			value := fmt.Sprint(example)
			if list, ok := example.([]any); ok {
				value = fmt.Sprint(list[0])
			}
			switch pname := p["name"].(string); {
			case p["in"] == "path":
				filled = strings.ReplaceAll(filled, "{"+pname+"}", value)
			case pname == "cursor" || pname == "Tidings-Token": // they are signed with a secret key
			case p["in"] == "query":
				query = append(query, [2]string{pname, value})
			case strings.HasPrefix(fmt.Sprint(p["description"]), "Required"):
				needed = append(needed, pname+": "+value)
			default:
				optional = append(optional, []string{pname + ": " + value})
			}
		}
		bodies := map[string]string{"": ""}
		if body, ok := op["requestBody"].(map[string]any); ok {
			bodies = make(map[string]string)
			for mediaType, c := range body["content"].(map[string]any) {
				c := c.(map[string]any)
				if wrong := d.check("", c["schema"].(map[string]any), c["example"]); len(wrong) > 0 || c["example"] == nil {
					t.Errorf("%s: the example of a %s does not fit: %v", name, mediaType, wrong)
				}
				text, isText := c["example"].(string)
				if !isText {
					raw, err := json.Marshal(c["example"])
					if err != nil {
						t.Fatal(err)
					}
					text = string(raw)
				}
				bodies[mediaType] = text
			}
		}
		succeeds := false
		for status, answer := range op["responses"].(map[string]any) {
			answer := answer.(map[string]any)
			succeeds = succeeds || status < "300"
			all, _ := answer["content"].(map[string]any)
			for mediaType, c := range all {
				c := c.(map[string]any)
				if status < "400" {
					if wrong := append(d.check("", c["schema"].(map[string]any), c["example"]),
						safe("", c["example"])...); len(wrong) > 0 || c["example"] == nil {
						t.Errorf("%s: the example of %s %s does not fit: %v", name, status, mediaType, wrong)
					}
				}
				if examples, _ := c["examples"].(map[string]any); status >= "400" {
					if got, want := len(examples), strings.Count(answer["description"].(string), "\n")+1; got != want {
						t.Errorf("%s: %d examples of %s, want %d", name, got, status, want)
					}
					for code, e := range examples {
						if value := d.ref(e.(map[string]any)["$ref"].(string))["value"].(map[string]any); value["code"] != code ||
							fmt.Sprint(value["status"]) != status {
							t.Errorf("%s: the example of %s is %v", name, code, value)
						}
					}
				}
			}
		}
		if !succeeds {
			t.Errorf("%s: no answer of success", name)
		}

		// The objects in the examples do not exist, so answers may be 404 or 412. But the API must
		// understand the request.
		understood := []int{200, 201, 202, 204, 304, 404, 412, 428}
		for mediaType, body := range bodies {
			for _, headers := range optional {
				for _, q := range query {
					to := filled
					if q[0] != "" {
						to += "?" + url.Values{q[0]: {q[1]}}.Encode()
					}
					headers := append(slices.Clone(needed), headers...)
					if mediaType != "" {
						headers = append(headers, "Content-Type: "+mediaType)
					}
					a := f.do(t, method, to, body, headers...)
					// These problems come from objects in the truth, and from the requests before.
					understands := slices.Contains([]string{"parent-unknown", "already-written"}, a.text("code"))
					if !slices.Contains(understood, a.StatusCode) && !understands {
						t.Errorf("%s: the request of the examples %s %v is not understood: %d %s", name, to, headers, a.StatusCode, a.body)
					}
					if wrong := d.conforms(t, op, a); len(wrong) > 0 {
						t.Errorf("%s: %d %s: %v", name, a.StatusCode, a.body, wrong)
					}
				}
			}
		}
	})
}

// TestEveryOperationConforms calls every operation of the document for a tenant that has objects of
// every type.
func TestEveryOperationConforms(t *testing.T) {
	t.Parallel()
	f := open(t)
	w := f.populate(t, "text")
	d := f.document(t)
	check := func(name string, op map[string]any, a answer) {
		t.Helper()
		if wrong := d.conforms(t, op, a); len(wrong) > 0 {
			t.Errorf("%s: %d %s: %v", name, a.StatusCode, a.body, wrong)
		}
	}
	refused := func(name string, op map[string]any, a answer, status int, code, at string) {
		t.Helper()
		check(name, op, a)
		if a.StatusCode != status || a.text("code") != code || !strings.Contains(a.body, fmt.Sprintf("%q", at)) {
			t.Errorf("%s: %d %s, want %d %s at %s", name, a.StatusCode, a.body, status, code, at)
		}
	}
	succeeded := make(map[string]bool)
	type paged struct {
		request walked
		op      map[string]any
	}
	lists := make(map[string]paged)
	walk := func(method, path string, _ map[string]any) {
		op := d["paths"].(map[string]any)[path].(map[string]any)[strings.ToLower(method)].(map[string]any)
		name := method + " " + path
		plain := requests(t, method, path, op)[0]
		if method == "GET" {
			a := f.send(t, w, plain)
			check(name, op, a)
			if tag := a.Header.Get("ETag"); tag != "" {
				for _, header := range []string{tag, "W/" + tag, `"999", ` + tag, "*"} {
					same := f.send(t, w, plain, "If-None-Match: "+header)
					check(name, op, same)
					if same.StatusCode != http.StatusNotModified || same.Header.Get("ETag") != tag {
						t.Errorf("%s with If-None-Match %s: %d, ETag %s, want 304 with %s", name, header, same.StatusCode,
							same.Header.Get("ETag"), tag)
					}
				}
				if other := f.send(t, w, plain, `If-None-Match: "999"`); other.StatusCode != 200 {
					t.Errorf("%s with another ETag: %d, want 200", name, other.StatusCode)
				}
			}
			head := plain
			head.method = "HEAD"
			if b := f.send(t, w, head); b.StatusCode != a.StatusCode || b.Header.Get("Content-Type") != a.Header.Get("Content-Type") ||
				b.Header.Get("ETag") != a.Header.Get("ETag") {
				t.Errorf("HEAD %s: %d %v, GET %d %v", path, b.StatusCode, b.Header, a.StatusCode, a.Header)
			}
		}
		for _, r := range requests(t, method, path, op) {
			if r.query == "cursor=$cursor" {
				continue // below
			}
			a := f.send(t, w, r)
			check(fmt.Sprintf("%s %s %s", name, r.query, r.header), op, a)
			if a.StatusCode < 300 {
				succeeded[name] = true
			}
		}
		unknown := plain
		unknown.query = "nope=1"
		refused(name+" with an unknown parameter", op, f.send(t, w, unknown), 422, "validation-failed", "nope")
		if strings.HasPrefix(plain.body, "{") && !strings.Contains(path, ":batch") {
			more := plain
			more.body = strings.Replace(plain.body, "{", `{"nope":1,`, 1)
			refused(name+" with an unknown member", op, f.send(t, w, more, `If-Match: *`), 422, "validation-failed", "#/nope")
		}
		if a := f.send(t, w, plain, "Accept: json, text/html;q=0.9", "If-Match: *"); a.StatusCode != 204 &&
			!strings.HasPrefix(a.Header.Get("Content-Type"), "application/") {
			t.Errorf("%s, json asked for: %q", name, a.Header.Get("Content-Type"))
		}

		names := make([]string, 0)
		for _, p := range parametersOf(op) {
			names = append(names, p["name"].(string))
		}
		if !slices.Contains(names, "limit") {
			return
		}
		for _, limit := range []string{"0", "201", "-1", "abc", "1.0", "9223372036854775808"} {
			r := plain
			r.query = "limit=" + limit
			refused(name+" by "+limit, op, f.send(t, w, r), 422, "validation-failed", "limit")
		}
		for _, limit := range []int{1, 2, 200} {
			r := plain
			r.query = fmt.Sprintf("limit=%d", limit)
			if a := f.send(t, w, r); a.StatusCode != 200 || len(itemsOf(a)) > limit {
				t.Errorf("%s by %d: %d %s", name, limit, a.StatusCode, a.body)
			}
		}
		if slices.Contains(names, "cursor") {
			orders := []string{""}
			if slices.Contains(names, "order") {
				orders = []string{"order=oldest", "order=newest"}
				if strings.HasSuffix(path, "/comments") {
					orders = append(orders, "order=threaded")
				}
			}
			for _, order := range orders {
				r := plain
				r.query = order
				lists[name+" "+order] = paged{r, op}
			}
		}
	}
	only := func(methods ...string) {
		f.operations(t, func(method, path string, op map[string]any) {
			if slices.Contains(methods, method) {
				walk(method, path, op)
			}
		})
	}
	only("GET")

	// The pages of each list together are the list at once. Cursors of another list, tenant or key
	// are refused.
	pool := f.pool
	cfg := config()
	cfg.CursorKey = strings.Repeat("cd", 32)
	otherKey, stranger := f, f
	var err error
	if otherKey.Handler, err = api.New(cfg, api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil),
		Projections: pool, Fleet: fleet, Log: testkit.Logger(t), Reg: prometheus.NewRegistry()}); err != nil {
		t.Fatal(err)
	}
	stranger.token = f.newToken(t, tenant+1, "stranger", tokens.Roles()...)
	cursors := make(map[string]string)
	page := func(r walked, limit int, cursor string) walked {
		q := url.Values{"limit": {strconv.Itoa(limit)}}
		if cursor != "" {
			q.Set("cursor", cursor)
		}
		r.query = strings.TrimPrefix(r.query+"&"+q.Encode(), "&")
		return r
	}
	for name, l := range lists {
		all := f.send(t, w, page(l.request, 200, ""))
		var one []map[string]any
		for cursor := ""; ; {
			a := f.send(t, w, page(l.request, 1, cursor))
			check(name, l.op, a)
			one = append(one, itemsOf(a)...)
			if cursor = a.text("next"); cursor == "" || len(one) > 1000 {
				break
			}
			cursors[name] = cursor
		}
		if got, want := fmt.Sprint(one), fmt.Sprint(itemsOf(all)); got != want || len(one) < 2 {
			t.Errorf("%s page by page:\n%s\nat once:\n%s", name, got, want)
		}
	}
	for name, l := range lists {
		wrong := maps.Clone(cursors)
		delete(wrong, name)
		own := []byte(cursors[name])
		own[len(own)/2] ^= 1
		wrong["a tampered one"], wrong["half of one"], wrong["one and more"] = string(own), cursors[name][:len(own)/2], cursors[name]+"AAAA"
		for of, cursor := range wrong {
			refused(name+" with the cursor of "+of, l.op, f.send(t, w, page(l.request, 1, cursor)), 400, "cursor-invalid", "cursor")
		}
		r := page(l.request, 1, cursors[name])
		refused(name+" with the cursor of another key", l.op, otherKey.send(t, w, r), 400, "cursor-invalid", "cursor")
		if a := stranger.send(t, w, r); a.StatusCode != 404 { // the list of an object that the tenant does not have
			refused(name+" with the cursor of another tenant", l.op, a, 400, "cursor-invalid", "cursor")
		}
	}
	if len(lists) < 11 {
		t.Errorf("%d lists, want 11 or more: %v", len(lists), slices.Sorted(maps.Keys(lists)))
	}

	only("PUT", "POST", "PATCH")
	only("DELETE")
	for _, name := range []string{"PUT /v1/follows/{follower_id}/{followee_id}", "POST /v1/posts/{post_id}/comments",
		"PATCH /v1/comments/{comment_id}", "PUT /v1/comments/{comment_id}/moderation",
		"POST /v1/follows:batch", "POST /v1/comments:batch", "GET /v1/outbox/dlq", "POST /v1/outbox/dlq/{message_id}:discard",
		"DELETE /v1/comments/{comment_id}", "PUT /v1/posts/{post_id}/thread"} {
		if !succeeded[name] {
			t.Errorf("%s never succeeded", name)
		}
	}
}

// TestEveryPathRefusesOtherMethods also verifies the common headers of answers without an
// operation.
func TestEveryPathRefusesOtherMethods(t *testing.T) {
	t.Parallel()
	f := open(t)
	for path, item := range f.document(t)["paths"].(map[string]any) {
		methods := slices.Collect(maps.Keys(item.(map[string]any)))
		for _, method := range []string{"GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"} {
			if slices.Contains(methods, strings.ToLower(method)) || method == "HEAD" && slices.Contains(methods, "get") {
				continue
			}
			a := f.do(t, method, path, "", "Authorization")
			if a.StatusCode != 405 || a.text("code") != "method-not-allowed" || a.Header.Get("Cache-Control") == "" ||
				a.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s %s: %d %s", method, path, a.StatusCode, a.body)
			}
			for _, m := range methods {
				if !slices.Contains(strings.Split(a.Header.Get("Allow"), ", "), strings.ToUpper(m)) {
					t.Errorf("%s %s: Allow is %q, want %v", method, path, a.Header.Get("Allow"), methods)
				}
			}
		}
	}
}
