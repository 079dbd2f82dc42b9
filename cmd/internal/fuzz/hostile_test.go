package fuzz_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/tidings/tidings/kinds"
)

// hostile makes a request that the API must refuse without a change.
func (l *lane) hostile() error {
	return pick(l, (*lane).strangeIDs, (*lane).strangeQuery, (*lane).strangeBody, (*lane).strangeBody, (*lane).strangeHeaders,
		(*lane).strangeRoute, (*lane).foreignChild,
		(*lane).foreignChild, (*lane).foreignCursor, (*lane).foreignToken, (*lane).strangeBatch)(l)
}

// refuse makes a request and requires this refusal.
func (l *lane) refuse(status int, code, method, path, body string, headers ...string) error {
	a, err := l.call(method, path, body, headers...)
	if err != nil {
		return err
	}
	return a.expect(status, code)
}

const validation = "validation-failed"

func (l *lane) strangeIDs() error {
	id := pick(l, "*", "1,2", "1!", "1%00", "%ff", "１", "%20", "a%20b", "1%2F2", "1%25", "%22", "é", strings.Repeat("9", 129),
		strings.Repeat("9", 3000))
	if l.chance(2) {
		k := l.childKind(anyKind)
		return l.refuse(422, validation, pick(l, http.MethodGet, http.MethodGet, http.MethodDelete),
			onePath(k, pick(l, id, "0", "1.0", "auth0|5f7c-12", "{00000000-0000-7000-8000-000000000000}",
				"00000000000070008000000000000000", "00000000-0000-7000-8000-00000000000g", "00000000-0000-7000-8000-000000000000%00")), "",
			"If-Match: *")
	}
	k := l.edgeKind()
	path := pick(l, fmt.Sprintf("/v1/%s/%s/1", k.Plural, id), fmt.Sprintf("/v1/%s/1/%s", k.Plural, id),
		fmt.Sprintf("/v1/users/%s/counts", id))
	if k.ToChild && l.chance(2) { // in one form, which is not every UUID's
		path = fmt.Sprintf("/v1/%s/1/%s", k.Plural, pick(l, "1", "auth0|5f7c-12", "0197A2B4-5F0E-4D3A-9A51-000000000007",
			"0197a2b45f0e4d3a9a51000000000007"))
	}
	method := pick(l, http.MethodGet, http.MethodPut, http.MethodDelete)
	if strings.HasSuffix(path, "counts") {
		method = http.MethodGet
	}
	return l.refuse(422, validation, method, path, "")
}

func (l *lane) strangeQuery() error {
	k := l.childKind(anyKind)
	list := pick(l, l.underPath(k, l.object()), fmt.Sprintf("/v1/users/%s/followers", l.user()),
		fmt.Sprintf("/v1/users/%s/%s", l.user(), k.Plural))
	type query struct {
		text   string
		status int
		code   string
	}
	q := pick(l, query{"limit=0", 422, validation}, query{"limit=201", 422, validation}, query{"limit=-1", 422, validation},
		query{"limit=%2B5", 422, validation}, query{"limit=05", 422, validation},
		query{"limit=1e1", 422, validation}, query{"limit=%00", 422, validation}, query{"limit=5&limit=5", 400, "bad-request"},
		query{"limit=", 400, "bad-request"}, query{"x=1", 422, validation},
		query{"cursor=x", 400, "cursor-invalid"}, query{"cursor=%00%ff", 400, "cursor-invalid"},
		query{"cursor=" + strings.Repeat("A", 5000), 400, "cursor-invalid"}, query{"%zz=1", 400, "bad-request"},
		query{"limit=99999999999999999999", 422, validation}, query{"a=1;b=2", 400, "bad-request"})
	return l.refuse(q.status, q.code, http.MethodGet, list+"?"+q.text, "")
}

func (l *lane) strangeBody() error {
	k := l.childKind(func(k kinds.Child) bool { return len(k.Attributes) == 0 })
	body := func(text string) string { return `{"author_id":"1","body":` + text + `}` }
	type refused struct {
		body   string
		status int
		code   string
	}
	r := pick(l, refused{body("\"\xff\""), 400, "json-invalid"}, refused{body(`"\ud800"`), 400, "json-invalid"},
		refused{body(`"a\u0000b"`), 422, "body-invalid"}, refused{body(`" \n"`), 422, "body-empty"},
		refused{body(`"` + strings.Repeat("y", 16_385) + `"`), 422, "body-too-long"},
		refused{body(`"` + strings.Repeat("z", 1<<17) + `"`), 413, "request-too-large"}, refused{body(`5`), 422, validation},
		refused{`{"author_id":"1","body":"x","x":1}`, 422, validation},
		refused{`{"author_id":"1","body":"x","body":"y"}`, 400, "json-invalid"}, refused{`{"author_id":1,"body":"x"}`, 422, validation},
		refused{`{"author_id":"a b","body":"x"}`, 422, validation}, refused{`{`, 400, "json-invalid"},
		refused{strings.Repeat("[", 50_000), 400, "json-invalid"},
		refused{body(`"x"`) + "{}", 400, "json-invalid"}, refused{`null`, 422, validation},
		refused{`{"author_id":"1","body":"x","attributes":{}}`, 422, validation})
	if l.chance(4) {
		if c := l.child(anyKind); c != nil && r.code != "body-empty" {
			return l.refuse(422, validation, http.MethodPatch, onePath(c.k, c.now().ID), `{"body":"x","author_id":"1"}`, "If-Match: *")
		}
	}
	return l.refuse(r.status, r.code, http.MethodPost, l.underPath(k, l.object()), r.body)
}

func (l *lane) strangeHeaders() error {
	k := l.childKind(func(k kinds.Child) bool { return len(k.Attributes) == 0 })
	type refused struct {
		header string
		status int
		code   string
	}
	r := pick(l, refused{"Authorization", 401, "unauthenticated"}, refused{"Authorization: Bearer nobody", 401, "unauthenticated"},
		refused{"Authorization: Basic " + l.all, 401, "unauthenticated"},
		refused{"Authorization: Bearer " + l.reader, 403, "role-missing"},
		refused{"Tidings-Actor: " + strings.Repeat("a", 201), 400, "header-invalid"}, refused{"Tidings-Actor: \xff", 400, "header-invalid"},
		refused{"Tidings-Actor: ", 400, "header-invalid"}, refused{"Idempotency-Key: a b", 422, validation},
		refused{"Idempotency-Key: " + strings.Repeat("k", 256), 422, validation},
		refused{"Idempotency-Key: é", 422, validation}, refused{"Content-Type: text/plain", 415, "unsupported-media-type"},
		refused{"Content-Type: application/json; charset=latin1", 415, "unsupported-media-type"},
		refused{"Content-Encoding: gzip", 415, "unsupported-media-type"}, refused{"Tidings-Token: x", 400, "header-invalid"},
		refused{"Tidings-Token: ,", 400, "header-invalid"})
	return l.refuse(r.status, r.code, http.MethodPost, l.underPath(k, l.object()), `{"author_id":"1","body":"x"}`, r.header)
}

func (l *lane) strangeRoute() error {
	c := l.child(anyKind)
	if c == nil {
		return nil
	}
	one := onePath(c.k, c.now().ID)
	switch l.rng.IntN(6) {
	case 0:
		return l.refuse(405, "method-not-allowed", pick(l, http.MethodPost, http.MethodPut, "PROPFIND"), one, "")
	case 1:
		return l.refuse(405, "method-not-allowed", http.MethodPost, fmt.Sprintf("/v1/likes/%s/1", l.user()), "")
	case 2:
		if !c.k.Moderated {
			return l.refuse(404, "route-unknown", http.MethodPut, one+"/moderation", `{"state":"HIDDEN"}`, "If-Match: *")
		}
		return l.refuse(422, validation, http.MethodPut, one+"/moderation", `{"state":"VISIBLE"}`, "If-Match: *")
	case 3:
		if path := pick(l, one+"/", "/v1//comments", "/v1/none", "/", "/v1/users/1:remove-edge", ""); path != "" {
			return l.refuse(404, "route-unknown", http.MethodGet, path, "")
		}
		return l.refuse(404, "not-found", http.MethodGet, "/v1/edge-removals/00000000-0000-7000-8000-000000000000", "")
	case 4: // a child of another kind
		for _, k := range l.kinds.AllChildren() {
			if k.Name != c.k.Name {
				return l.refuse(404, "not-found", pick(l, http.MethodGet, http.MethodDelete), onePath(k, c.now().ID), "", "If-Match: *")
			}
		}
	}
	return l.refuse(403, "role-missing", http.MethodDelete, one, "", "If-Match: *", "Authorization: Bearer "+l.reader)
}

// foreignChild tries to reach another tenant's child in every way.
func (l *lane) foreignChild() error {
	s, ok := l.board.find(l.tenant, l.rng.IntN(1000), func(s shared) bool { return s.id != "" })
	if !ok {
		return nil
	}
	k := l.kinds.Children[s.kind]
	one := onePath(k, s.id)
	switch l.rng.IntN(7) {
	case 0:
		return l.refuse(404, "not-found", http.MethodGet, one, "")
	case 1:
		return l.refuse(404, "not-found", http.MethodPatch, one, `{"body":"mine"}`, pick(l, "If-Match: *", `If-Match: "1"`))
	case 2:
		return l.refuse(404, "not-found", http.MethodDelete, one, "", pick(l, "If-Match: *", `If-Match: "1"`))
	case 3:
		return l.refuse(404, "not-found", http.MethodGet, one+"/versions", "")
	case 4:
		return l.refuse(404, "not-found", http.MethodGet, fmt.Sprintf("%s?around=%s", l.underPath(k, s.object), s.id), "")
	case 5:
		if k.Moderated {
			return l.refuse(404, "not-found", http.MethodPut, one+"/moderation", `{"state":"HIDDEN"}`, "If-Match: *")
		}
	}
	if !k.Threaded {
		return nil
	}
	if l.chance(2) {
		return l.refuse(404, "not-found", http.MethodGet, pick(l, one+"/replies", l.underPath(k, s.object)+"/by-slug/"+s.slug), "")
	}
	if k.Moderated && l.m.thread(k, s.object).now().Locked {
		return nil
	}
	return l.refuse(422, "parent-unknown", http.MethodPost, l.underPath(k, s.object), `{"author_id":"1","body":"x","parent_id":"`+s.id+`"}`)
}

// foreignCursor sends a cursor of another tenant or of another list, or a changed one.
func (l *lane) foreignCursor() error {
	if s, ok := l.board.find(l.tenant, l.rng.IntN(1000), func(s shared) bool { return s.cursor != "" }); ok && l.chance(2) {
		sep := "?"
		if strings.Contains(s.path, "?") {
			sep = "&"
		}
		a, err := l.call(http.MethodGet, s.path+sep+"cursor="+url.QueryEscape(s.cursor), "")
		if err != nil || a.status == http.StatusNotFound { // a list of another tenant's child
			return err
		}
		return a.expect(400, "cursor-invalid")
	}
	if len(l.cursors) == 0 {
		return nil
	}
	c := pick(l, l.cursors...)
	text := []byte(c.text)
	at := l.rng.IntN(len(text))
	if text[at] == 'A' {
		text[at] = 'B'
	} else {
		text[at] = 'A'
	}
	if turned := strings.NewReplacer("order=oldest", "order=newest", "order=newest", "order=oldest").Replace(c.path); turned != c.path &&
		l.chance(2) {
		return l.refuse(400, "cursor-invalid", http.MethodGet, turned+"&cursor="+url.QueryEscape(c.text), "")
	}
	path, _, _ := strings.Cut(c.path, "?")
	if l.chance(2) && !strings.Contains(path, "/followers") {
		return l.refuse(400, "cursor-invalid", http.MethodGet,
			fmt.Sprintf("/v1/users/%s/followers?cursor=%s", l.user(), url.QueryEscape(c.text)), "")
	}
	if strings.HasSuffix(path, "/replies") || strings.HasSuffix(path, "pending") {
		return nil
	}
	return l.refuse(400, "cursor-invalid", http.MethodGet, path+"?cursor="+url.QueryEscape(string(text)), "")
}

func (l *lane) foreignToken() error {
	s, ok := l.board.find(l.tenant, l.rng.IntN(1000), func(s shared) bool { return s.token != "" })
	if !ok {
		return nil
	}
	return l.refuse(400, "header-invalid", http.MethodGet,
		fmt.Sprintf("/v1/users/%s/%s", l.user(), pick(l, "followers", "counts", "comments")), "", "Tidings-Token: "+s.token)
}

func (l *lane) strangeBatch() error {
	const one = `{"op":"put","follower_id":"1","followee_id":"2"}`
	many := `{"operations":[` + strings.Repeat(one+",", 1000) + one + `]}`
	return errors.Join(
		l.refuse(413, "too-many-operations", http.MethodPost, "/v1/follows:batch", many),
		l.refuse(422, validation, http.MethodPost, "/v1/follows:batch",
			pick(l, `{"operations":[]}`, `{"operation":[`+one+`]}`, `[]`, `{}`)),
		l.refuse(400, "json-invalid", http.MethodPost, "/v1/follows:batch",
			pick(l, `{"operations":[`+one, `{"operations":[`+one+`]}{}`, `{"operations":[}`)),
		l.refuse(400, "header-invalid", http.MethodPost, "/v1/follows:batch", `{"operations":[`+one+`]}`,
			pick(l, "If-Match: *", "Idempotency-Key: k")),
		l.refuse(415, "unsupported-media-type", http.MethodPost, "/v1/follows:batch", one, "Content-Type: text/csv"))
}

// give offers paths, cursors and ids of this tenant to other tenants.
func (l *lane) give(g given) {
	s := shared{token: g.token}
	if r, ok := g.row.(*childRow); ok {
		c := r.now()
		s.kind, s.object, s.id, s.slug = r.k.Name, c.Parent, c.ID, c.Slug
	}
	l.board.put(l.tenant, s)
}
