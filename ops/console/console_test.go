package console_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/shares"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/console"
)

func TestASessionIsATokensAndEndsWithIt(t *testing.T) {
	t.Parallel()
	h := start(t)
	stranger := h.visitor(t)
	if a := stranger.get("/console/audit?who=ada"); a.path != "/console/sign-in?next=%2Fconsole%2Faudit%3Fwho%3Dada" ||
		!strings.Contains(a.text(), "Sign in") {
		t.Errorf("without a session: %s: %s", a.path, a.text())
	}
	for name, next := range map[string]string{"another host": "//evil.example/console/", "another scheme": "https://evil.example/console/",
		"another path": "/v1/users", "a script": "javascript:alert(1)", "dots": "/console/../v1/users",
		"dots behind a code": "/console/%2e%2e/v1/users", "dots and a host": "/console/..//evil.example/"} {
		if a := stranger.get("/console/sign-in?next=" + url.QueryEscape(next)); strings.Contains(a.body, "evil") ||
			strings.Contains(a.body, "alert") || strings.Contains(a.body, "v1/users") {
			t.Errorf("%s: the form leads outside the console", name)
		}
	}
	if a := stranger.post("/console/sign-in", url.Values{"token": {h.Tokens.Reader},
		"next": {"/console/audit?who=ada"}}); a.path != "/console/audit?who=ada" || a.status != 200 {
		t.Errorf("signing in leads to %s, status %d", a.path, a.status)
	}
	u, _ := url.Parse(h.url + "/console/")
	cookie := stranger.client.Jar.Cookies(u)[0].Value
	if strings.Contains(cookie, h.Tokens.Reader) || len(cookie) < 60 {
		t.Errorf("the cookie is %q", cookie)
	}
	forged := h.visitor(t)
	forged.client.Jar.SetCookies(u, []*http.Cookie{{Name: "tidings_console",
		Value: cookie[:20] + string("AB"[strings.Count(cookie[20:21], "A")]) + cookie[21:], Path: "/console"}})
	if a := forged.get("/console/"); !strings.HasPrefix(a.path, "/console/sign-in") {
		t.Errorf("a changed cookie opens %s", a.path)
	}
	if _, _, err := tokens.Revoke(t.Context(), h.pool, 0, "rea"); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the session ends with its token", func() (bool, error) {
		return strings.HasPrefix(stranger.get("/console/").path, "/console/sign-in"), nil
	})
	ada := h.signIn(t, h.Tokens.Admin)
	if a := ada.post("/console/sign-out", nil); a.path != "/console/sign-in" || len(ada.client.Jar.Cookies(u)) != 0 {
		t.Errorf("signing out leads to %s", a.path)
	}
}

func TestACookieIsOpenedByAnOldKeyAndSecureBehindTLS(t *testing.T) {
	t.Parallel()
	oldKey, newKey := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	h := start(t)
	u, _ := url.Parse(h.url + "/console/")
	sign := func(h *harness) *http.Cookie { return h.signIn(t, h.Tokens.Reader).client.Jar.Cookies(u)[0] }
	cookie := sign(h)
	opens := func(keys ...[]byte) bool {
		// the audit log reads only the truth
		c, err := console.New(console.Config{On: true}, console.Deps{Truth: h.pool, Projections: h.pool, Keys: keys,
			Log: testkit.Logger(t)})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest("GET", "/console/audit", nil)
		r.AddCookie(cookie)
		w := httptest.NewRecorder()
		c.ServeHTTP(w, r)
		return w.Code == http.StatusOK
	}
	if !opens(oldKey) || !opens(newKey, oldKey) || opens(newKey) {
		t.Errorf("old %t, new and old %t, new %t: want true, true, false", opens(oldKey), opens(newKey, oldKey), opens(newKey))
	}
	for _, https := range []bool{true, false} {
		req, err := http.NewRequestWithContext(t.Context(), "POST", h.url+"/console/sign-in",
			strings.NewReader(url.Values{"token": {h.Tokens.Reader}}.Encode()))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if https {
			req.Header.Set("X-Forwarded-Proto", "https")
		}
		v := h.visitor(t)
		v.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		c, err := http.ParseSetCookie(v.do(req).header.Get("Set-Cookie"))
		if err != nil || !c.HttpOnly || c.SameSite != http.SameSiteLaxMode || c.Path != "/console" || c.Secure != https || c.MaxAge != 0 {
			t.Errorf("https %t: %+v, %v", https, c, err)
		}
	}
}

// TestAStrangerWhoGuessesLocksNobodyOut: only wrong tokens are charged to an address, which a proxy
// may share.
func TestAStrangerWhoGuessesLocksNobodyOut(t *testing.T) {
	t.Parallel()
	h := start(t)
	v := h.visitor(t)
	guess := func() *answer { return v.post("/console/sign-in", url.Values{"token": {tokens.New()}}) }
	for range 10 {
		if a := guess(); a.status != http.StatusUnauthorized {
			t.Fatalf("a guess: status %d", a.status)
		}
	}
	testkit.Eventually(t, "a refusal after ten guesses", func() (bool, error) {
		a := guess() // the ten may have taken so long that the address may guess again
		return a.status == http.StatusTooManyRequests && a.header.Get("Retry-After") != "", nil
	})
	guessing, stop := context.WithCancel(t.Context())
	var strangers sync.WaitGroup
	for range 50 {
		strangers.Go(func() {
			for guessing.Err() == nil {
				req, err := http.NewRequestWithContext(guessing, "POST", h.url+"/console/sign-in",
					strings.NewReader("token="+tokens.New()))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				if res, err := v.client.Do(req); err == nil {
					res.Body.Close()
				}
			}
		})
	}
	defer strangers.Wait()
	defer stop()
	for range 20 {
		page(t, h.signIn(t, h.Tokens.Admin), "/console/audit")
	}
}

// TestASessionEndsWhereverItsCookieIsSent: the server ends it, for all processes. Other sessions of
// the token continue.
func TestASessionEndsWhereverItsCookieIsSent(t *testing.T) {
	t.Parallel()
	h := start(t)
	u, _ := url.Parse(h.url + "/console/")
	other, err := console.New(console.Config{On: true}, console.Deps{Truth: h.pool, Projections: h.pool,
		Keys: [][]byte{bytes.Repeat([]byte{1}, 32)}, Log: testkit.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	opens := func(c *console.Console, cookie *http.Cookie) bool {
		r := httptest.NewRequest("GET", "/console/audit", nil)
		r.AddCookie(cookie)
		w := httptest.NewRecorder()
		c.ServeHTTP(w, r)
		return w.Code == http.StatusOK
	}
	ada, sibling := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.Admin)
	stolen := ada.client.Jar.Cookies(u)[0]
	next, stop := events(t, ada, "/console/live/overview")
	defer stop()
	if !opens(h.console, stolen) || !opens(other, stolen) {
		t.Fatal("the cookie does not open the pages of both processes")
	}
	ada.post("/console/sign-out", nil)
	testkit.Eventually(t, "the process that ended the session to refuse the cookie",
		func() (bool, error) { return !opens(h.console, stolen), nil })
	late := time.AfterFunc(30*time.Second, stop)
	for next() != "" { // the stream ends with its session
	}
	if !late.Stop() {
		t.Error("a live page of the session continued")
	}
	testkit.Eventually(t, "the other process to refuse the cookie",
		func() (bool, error) { return !opens(other, stolen), nil })
	page(t, sibling, "/console/audit")
	page(t, h.signIn(t, h.Tokens.Admin), "/console/audit")
}

func TestATokenHasOnlyItsNewestSessions(t *testing.T) {
	t.Parallel()
	h := start(t)
	first, other := h.signIn(t, h.Tokens.Reader), h.signIn(t, h.Tokens.Admin)
	for range tokens.MaxSessions {
		h.signIn(t, h.Tokens.Reader)
	}
	testkit.Eventually(t, "the oldest session to end", func() (bool, error) {
		return strings.HasPrefix(first.get("/console/audit").path, "/console/sign-in"), nil
	})
	page(t, other, "/console/audit")
}

// TestOneTokensLivePagesLeaveRoomForOthers attacks the row of live pages in the table of shared
// resources.
func TestOneTokensLivePagesLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	h := start(t)
	rita, max, ada := h.signIn(t, h.Tokens.TenantReader), h.signIn(t, h.Tokens.TenantModerator), h.signIn(t, h.Tokens.Admin)
	var stops []func()
	for range shares.LivePages.Each.N {
		_, stop := events(t, rita, "/console/live/overview")
		defer stop()
		stops = append(stops, stop)
	}
	again := h.signIn(t, h.Tokens.TenantReader) // another session gets no other share
	opened := func() int {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "GET", h.url+"/console/live/overview", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := again.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		return res.StatusCode
	}
	if status := opened(); status != http.StatusServiceUnavailable {
		t.Fatalf("one more: status %d", status)
	}
	for _, r := range []*reader{max, ada} { // events fails the test if the stream is refused
		_, stop := events(t, r, "/console/live/overview")
		defer stop()
	}
	page(t, rita, "/console/audit")
	stops[0]()
	testkit.Eventually(t, "its place to be free again",
		func() (bool, error) { return opened() == http.StatusOK, nil })
}

func TestEveryAnswerIsGuarded(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada := h.signIn(t, h.Tokens.Admin)
	for _, path := range []string{"/console/", "/console/nowhere", "/console/sign-in", "/console/assets/x/console.css"} {
		a := ada.get(path)
		for name, want := range map[string]string{"Content-Security-Policy": "default-src 'self';", "X-Content-Type-Options": "nosniff",
			"Referrer-Policy": "same-origin", "Cache-Control": "no-store"} {
			if !strings.Contains(a.header.Get(name), want) {
				t.Errorf("%s: %s is %q", path, name, a.header.Get(name))
			}
		}
		if csp := a.header.Get("Content-Security-Policy"); strings.Contains(csp, "unsafe") ||
			!strings.Contains(csp, "frame-ancestors 'none'") {
			t.Errorf("%s: policy %q", path, csp)
		}
	}
	ada.get("/console/nowhere").says("This does not exist")
	if a := ada.post("/console/audit", nil); a.status != http.StatusMethodNotAllowed {
		t.Errorf("a post to a page: status %d", a.status)
	}
	for site, want := range map[string]int{"cross-site": http.StatusForbidden, "same-site": http.StatusForbidden,
		"same-origin": http.StatusOK} {
		req, err := http.NewRequestWithContext(t.Context(), "POST", h.url+"/console/sign-out", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Sec-Fetch-Site", site)
		if a := ada.do(req); a.status != want {
			t.Errorf("a write of %s: status %d, want %d", site, a.status, want)
		}
	}
	if a := ada.get("/v1/anything"); a.status != http.StatusNotFound || a.header.Get("Content-Security-Policy") != "" {
		t.Errorf("a route of the API: status %d", a.status)
	}
}

func TestAnActIsConfirmedRecordedAndDoneOnce(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada := h.signIn(t, h.Tokens.Admin)
	link := page(t, ada, "/console/tokens").link("Create a token")
	form := page(t, ada, link).form("tenant", "7", "name", "importer", "reason", "")
	path := strings.SplitN(link, "?", 2)[0]
	if a := ada.post(path, form); a.status != http.StatusUnprocessableEntity || !strings.Contains(a.text(), "Give a reason") ||
		a.form().Get("name") != "importer" {
		t.Errorf("without a reason: status %d, name %q: %s", a.status, a.form().Get("name"), a.text())
	}
	form.Set("reason", "a new service")
	made := ada.ended(ada.post(path, form)).says("done", `Made the token "importer" of tenant 7`, "a new service", "not shown again")
	again := ada.post(path, form).says("done").without("tdg_")
	if again.path != made.path {
		t.Errorf("the form again leads to %s, not %s", again.path, made.path)
	}
	if !strings.Contains(made.body, "tdg_") {
		t.Error("the token is not shown")
	}
	all, err := tokens.List(t.Context(), h.pool, 7)
	if err != nil || len(all) != 4 {
		t.Errorf("%d tokens, %v: want one more than three", len(all), err)
	}
	acts, err := audit.List(t.Context(), h.pool, audit.Filter{}, 10)
	if err != nil || len(acts) != 1 || acts[0].TokenName != "ada" || acts[0].Fingerprint != tokens.Fingerprint(h.Tokens.Admin) ||
		acts[0].Target != `token "importer" of tenant 7` || strings.Contains(acts[0].Outcome, "tdg_") {
		t.Errorf("%+v, %v", acts, err)
	}
	list := page(t, ada, "/console/tokens?tenant=7").says("importer", "works")
	if a := ada.act(list.link("Rotate")); !strings.Contains(a.text(), "works until") {
		t.Errorf("rotated: %s", a.text())
	}
	if a := ada.act(link, "tenant", "7", "name", "importer"); !strings.Contains(a.text(), "There is a token of this name already") {
		t.Errorf("the name again: %s", a.text())
	}
	ada.act(page(t, ada, "/console/tokens?tenant=7").link("Revoke")).says("Revoked the token")
	ada.post(path, url.Values{"act_id": {"x"}, "reason": {"r"}}).says("no act id")
}

func TestRolesAndReadOnlyDecideWhatIsOffered(t *testing.T) {
	t.Parallel()
	h := start(t)
	admin, reader, amy := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.Reader), h.signIn(t, h.Tokens.TenantAdmin)
	admin.act("/console/act/token.create?tenant=8", "name", "of-eight").says("done")
	page(t, reader, "/console/audit").says("token.create").without(`href="/console/tokens"`)
	if a := reader.get("/console/tokens"); a.status != http.StatusForbidden {
		t.Errorf("a reader sees tokens: %d", a.status)
	}
	id := map[string][]string{"act_id": {uuid.NewString()}, "reason": {"r"}, "name": {"x"}, "roles": {"read"}}
	if a := reader.post("/console/act/token.create", id); a.status != http.StatusForbidden ||
		!strings.Contains(a.text(), "lacks the role admin") {
		t.Errorf("a reader acts: %d %s", a.status, a.text())
	}
	page(t, amy, "/console/audit").says("Nobody has acted here yet")
	page(t, amy, "/console/tokens?tenant=8").says("amy").without("of-eight")
	amy.act("/console/act/token.create?tenant=8", "tenant", "8", "name", "mine").says(`token "mine" of tenant 7`)
	if a := amy.get("/console/act/token.revoke?tenant=8&name=of-eight"); a.status != http.StatusNotFound {
		t.Errorf("another tenant's token: %d", a.status)
	}
	acts, err := audit.List(t.Context(), h.pool, audit.Filter{Name: "token.create"}, 10)
	if err != nil || len(acts) != 2 {
		t.Fatal(len(acts), err)
	}
	if a := amy.get("/console/acts/" + acts[1].ActID.String()); a.status != http.StatusNotFound {
		t.Errorf("another tenant's act: %d", a.status)
	}
	ro := start(t, func(c *console.Config, _ *console.Deps) { c.ReadOnly = true })
	ada := ro.signIn(t, ro.Tokens.Admin)
	page(t, ada, "/console/tokens").says("ada").without("/console/act/")
	if a := ada.post("/console/act/token.create", id); a.status != http.StatusForbidden || !strings.Contains(a.text(), "read only") {
		t.Errorf("a read-only console acts: %d %s", a.status, a.text())
	}
}

func TestTheAuditLogIsFilteredPagedAndExported(t *testing.T) {
	t.Parallel()
	h := start(t)
	for i := range 60 {
		a := audit.Act{ActID: uuid.New(), TenantID: int64(7 + i%2), TokenName: "ada", Fingerprint: "0123456789ab", Name: "token.create",
			Target: "t", Reason: "because <script>alert(1)</script>"}
		if _, _, err := audit.Begin(t.Context(), h.pool, a); err != nil {
			t.Fatal(err)
		}
	}
	ada, rita := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.TenantReader)
	rows := func(a *answer) int { return strings.Count(a.body, `href="/console/acts/`) }
	first := page(t, ada, "/console/audit").without("<script>alert")
	second := page(t, ada, first.link("Next page")).says("End of the list")
	if rows(first) != 50 || rows(second) != 10 {
		t.Errorf("%d and %d rows", rows(first), rows(second))
	}
	for path, want := range map[string]int{"/console/audit?tenant=8": 30, "/console/audit?who=bob": 0,
		"/console/audit?q=BECAUSE&tenant=7": 30, "/console/audit?from=2099-01-01": 0} {
		if got := rows(page(t, ada, path)); got != want {
			t.Errorf("%s: %d rows, want %d", path, got, want)
		}
	}
	if a := ada.get("/console/audit?from=soon"); a.status != http.StatusUnprocessableEntity {
		t.Errorf("a bad time: %d", a.status)
	}
	for r, want := range map[*reader]int{ada: 60, rita: 30} {
		n := 0
		for s := bufio.NewScanner(strings.NewReader(r.get("/console/audit.ndjson").body)); s.Scan(); n++ {
			var line map[string]any
			if err := json.Unmarshal(s.Bytes(), &line); err != nil || line["reason"] != "because <script>alert(1)</script>" {
				t.Fatalf("%s: %v", s.Text(), err)
			}
		}
		if n != want {
			t.Errorf("exported %d lines, want %d", n, want)
		}
	}
}

// events reads the messages of a stream until it ends.
func events(t *testing.T, r *reader, path string) (next func() string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", r.h.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := r.client.Do(req)
	if err != nil || res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s: %v %v", path, res, err)
	}
	s := bufio.NewScanner(res.Body)
	return func() string {
		var b strings.Builder
		for s.Scan() {
			if event, ok := strings.CutPrefix(s.Text(), "event: "); ok && event != "message" {
				s.Scan() // its data
			} else if data, ok := strings.CutPrefix(s.Text(), "data: "); ok {
				b.WriteString(data + "\n")
			} else if s.Text() == "" && b.Len() > 0 {
				return b.String()
			}
		}
		if s.Err() != nil && !errors.Is(s.Err(), context.Canceled) {
			t.Errorf("stream: %v", s.Err())
		}
		return "" // the stream has ended
	}, func() { cancel(); res.Body.Close() }
}

// counter counts the statements of a pool that contain the text of.
type counter struct {
	of string
	n  atomic.Int64
}

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, c.of) {
		c.n.Add(1)
	}
	return ctx
}

func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, b pgx.TraceBatchStartData) context.Context {
	for _, q := range b.Batch.QueuedQueries {
		c.TraceQueryStart(ctx, nil, pgx.TraceQueryStartData{SQL: q.SQL})
	}
	return ctx
}

func (c *counter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (c *counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func TestALivePageIsReadOncePerSecondHoweverManyLook(t *testing.T) {
	t.Parallel()
	reads := counter{of: "/* outbox.stats */"}
	h := start(t, traced(t, &reads))
	ada := h.signIn(t, h.Tokens.Admin)
	before, began := reads.n.Load(), time.Now()
	var nexts []func() string
	for range 20 {
		next, stop := events(t, ada, "/console/live/overview")
		defer stop()
		nexts = append(nexts, next)
	}
	for _, next := range nexts {
		if got := next(); !strings.Contains(got, "Pending") || strings.Contains(got, "<html") {
			t.Fatalf("a live message: %s", got)
		}
	}
	if n := reads.n.Load() - before; n > 2+int64(time.Since(began)/time.Second) {
		t.Errorf("%d reads for 20 readers in %s", n, time.Since(began))
	}
	if _, _, err := tokens.Revoke(t.Context(), h.pool, 0, "ada"); err != nil {
		t.Fatal(err)
	}
	for _, next := range nexts {
		for next() != "" { // the stream ends with its token
		}
	}
	before = reads.n.Load()
	began = time.Now()
	next, stop := events(t, h.signIn(t, h.Tokens.Reader), "/console/live/overview") // signing in shows the overview once
	defer stop()
	next()
	if n := reads.n.Load() - before; n > 3+int64(time.Since(began)/time.Second) {
		t.Errorf("%d reads for one reader in %s", n, time.Since(began))
	}
}

// blocker is a counter whose statements wait until leave is closed.
type blocker struct {
	counter
	leave chan struct{}
}

func (b *blocker) TraceQueryStart(ctx context.Context, conn *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if b.counter.TraceQueryStart(ctx, conn, q); strings.Contains(q.SQL, b.of) {
		<-b.leave
	}
	return ctx
}

func TestATenantsSlowLivePageDelaysNoOperator(t *testing.T) {
	t.Parallel()
	slow := blocker{counter{of: "/* letters.get */"}, make(chan struct{})}
	defer close(slow.leave)
	h := start(t, traced(t, &slow))
	_, stop := events(t, h.signIn(t, h.Tokens.TenantReader), "/console/live/dead-letters/operation?source=outbox&id="+operation8)
	defer stop()
	testkit.Eventually(t, "the tenant's page to be read", func() (bool, error) { return slow.n.Load() > 0, nil })
	next, stop := events(t, h.signIn(t, h.Tokens.Reader), "/console/live/overview")
	defer stop()
	got := make(chan string, 1)
	go func() { got <- next() }()
	testkit.Eventually(t, "the operator's page", func() (bool, error) { return len(got) > 0, nil })
}

// TestAnOperatorChoosesATenantOnce chooses a tenant on one page, which others then have, and
// clears it.
func TestAnOperatorChoosesATenantOnce(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada, max := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.TenantModerator)
	nav := func(a *answer, want string) {
		t.Helper()
		for _, title := range []string{"Moderation", "Event", "Audit log", "Tokens"} {
			if u, err := url.Parse(a.link(title)); err != nil || u.Query().Get("tenant") != want {
				t.Errorf("%s: %s leads to %s, %v, want tenant %q", a.path, title, u, err, want)
			}
		}
	}
	nav(page(t, ada, "/console/"), "")
	first := page(t, ada, "/console/moderation?list=hidden&after=").says("Choose a tenant")
	if !strings.Contains(first.body, `<input type="hidden" name="list" value="hidden">`) {
		t.Errorf("the field of the header loses the list: %s", first.body)
	}
	nav(page(t, ada, "/console/moderation?tenant=7&list=hidden"), "7")
	nav(page(t, ada, "/console/"), "7")
	nav(page(t, ada, "/console/audit"), "7") // the page itself shows all
	page(t, ada, "/console/audit?tenant=8")
	nav(page(t, ada, "/console/consumers"), "8")
	page(t, ada, "/console/audit?tenant=")
	nav(page(t, ada, "/console/"), "")
	ours := page(t, max, "/console/moderation?tenant=8")
	if strings.Contains(ours.body, ">Tenant <input") || len(ours.header.Values("Set-Cookie")) > 0 ||
		strings.Contains(ours.link("Event"), "tenant") {
		t.Errorf("a tenant's token chooses: %s", ours.body)
	}
}

func TestATimeSaysHowLongAgoItIs(t *testing.T) {
	t.Parallel()
	now := time.Date(2030, 6, 1, 12, 0, 0, 0, time.UTC)
	for since, want := range map[time.Duration]string{0: "just now", 59 * time.Second: "just now", -time.Second: "just now",
		time.Minute: "1 min ago", 47 * time.Hour: "47 h ago", 49 * time.Hour: "2 days ago", -3 * time.Hour: "in 3 h",
		60 * 24 * time.Hour: "2030-04-02"} {
		if got := console.Relative(now.Add(-since), now); got != want {
			t.Errorf("%s ago: %q, want %q", since, got, want)
		}
	}
}
