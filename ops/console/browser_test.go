//go:build browser

package console_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/google/uuid"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/store"
)

// browserPages lists the pages that TestEveryPageInABrowser opens in both sizes and themes, without
// JavaScript, and with axe-core. It has one line per state of a page. who is one of the harness's
// tokens.
func browserPages(h *harness) []browserPage {
	return []browserPage{
		{path: "/console/", says: "Overview", who: h.Tokens.Admin},
		{path: "/console/", says: "Overview", who: h.Tokens.TenantReader},
		{path: "/console/day", says: "Pending messages", who: h.Tokens.Reader},
		{path: "/console/day?range=24h", says: "Pending messages", who: h.Tokens.Reader},
		{path: "/console/partitions", says: "stuck", who: h.Tokens.Reader},
		{path: "/console/consumers", says: "followercounts", who: h.Tokens.Admin},
		{path: "/console/act/consumer.pause?consumer=archiver", says: "Reason", who: h.Tokens.Admin},
		{path: "/console/act/consumer.replay?consumer=followercounts", says: "It rebuilds", who: h.Tokens.Admin},
		{path: "/console/kinds", says: "built in", who: h.Tokens.Reader},
		{path: "/console/doctor", says: "Remedy", who: h.Tokens.Reader},
		{path: "/console/doctor", says: "for operators", who: h.Tokens.TenantReader, status: 403},
		{path: "/console/tokens", says: "Tokens", who: h.Tokens.Admin},
		{path: "/console/act/token.create", says: "Reason", who: h.Tokens.Admin},
		{path: "/console/act/token.revoke?name=rita&tenant=7", says: "cannot be undone", who: h.Tokens.Admin},
		{path: "/console/audit", says: "Audit log", who: h.Tokens.Reader},
		{path: "/console/audit?q=nobody", says: "No act matches", who: h.Tokens.TenantReader},
		{path: "/console/event", says: "Find an event", who: h.Tokens.TenantReader},
		{path: "/console/event?q=900001&payload=show", says: "after 11 attempts", who: h.Tokens.Moderator},
		{path: "/console/event?type=created", says: "Searched", who: h.Tokens.Reader},
		{path: "/console/event?q=post/7001&tenant=9", says: "failed 7 times", who: h.Tokens.Reader},
		{path: "/console/event?q=900002", says: "None before", who: h.Tokens.Admin},
		{path: "/console/event?q=0af7651916cd43dd8448eb211c80319c", says: "No index has the traces", who: h.Tokens.Reader},
		{path: "/console/retrying", says: "7 of 11", who: h.Tokens.Admin},
		{path: "/console/retrying", says: "No message is being retried", who: h.Tokens.TenantReader},
		{path: "/console/event?q=what", says: "not valid", who: h.Tokens.Reader, status: 422},
		{path: "/console/dead-letters", says: "too large", who: h.Tokens.Admin},
		{path: "/console/dead-letters?q=nothing", says: "No dead letter matches", who: h.Tokens.TenantReader},
		{path: "/console/dead-letters/letters?source=consumers&consumer=followercounts", says: "behind another", who: h.Tokens.Admin},
		{path: "/console/dead-letters/letter?source=outbox&id=900001", says: "Show the payload", who: h.Tokens.Admin},
		{path: "/console/act/dead_letter.discard?source=outbox&id=900001", says: "cannot be undone", who: h.Tokens.Admin},
		{path: "/console/dead-letters/operation?source=outbox&id=" + operation, says: "of 50,000", who: h.Tokens.TenantAdmin},
		{path: "/console/acts/" + operation, says: "Another process does it", who: h.Tokens.TenantReader},
		{path: "/console/sign-in", says: "system token", who: ""},
	}
}

// operation is the id of an operation of another process, and of its act.
const operation = "00000000-0000-4000-8000-000000000001"

// sample fills the harness's servers with data for the pages.
func (h *harness) sample(t *testing.T) {
	t.Helper()
	h.sampleModeration(t)
	h.declare(t)
	h.pend(t, 400)
	h.bury(t, 900_001, 300, 7, "too large", "")
	h.bury(t, 910_001, 3, 8, "no stream", "")
	h.park(t, 2)
	h.fails(t, 9, 7001, 7, "nats: no response from stream 17", 2*time.Hour)
	h.exec(t, `INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, total, seen, done, worker, lease_until)
		VALUES ($1, 7, 'retry', '{}', 'amy', 50000, 12345, 12300, 'other', 'infinity')`, operation)
	h.exec(t, `INSERT INTO operator_acts (act_id, tenant_id, token_tenant, token_name, fingerprint, act, target, reason)
		VALUES ($1, 7, 7, 'amy', '0123456789ab', 'dead_letter.retry', 'group "too large" of the outbox, made', 'the limit is raised')`,
		operation)
	ada := h.signIn(t, h.Tokens.Admin)
	ada.act("/console/act/consumer.pause?consumer=threadcache").says("done")
	ada.act("/console/act/token.create?tenant=7", "name", "importer").says("done")
	ada.act("/console/act/token.create?tenant=7", "name", "importer").says("failed")
	page(t, ada, "/console/doctor") // reads anew: no page shows a reading from before all this, and then moves
}

type browserPage struct {
	path, says, who string
	shot            string // name of the file in docs/images; empty: no screenshot
	status          int    // expected status; 0: 200
}

// look describes a browser's size, theme and use of JavaScript.
type look struct {
	Phone, Dark, NoScript bool
}

func (l look) String() string {
	name := "desktop"
	if l.Phone {
		name = "phone"
	}
	if l.Dark {
		name += " dark"
	}
	if l.NoScript {
		name += " without JavaScript"
	}
	return name
}

// chromium starts a Chromium for the test. Without one it skips the test, or fails it in CI.
func chromium(t *testing.T) context.Context {
	t.Helper()
	var path string
	for _, name := range []string{os.Getenv("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(name); name != "" && err == nil {
			path = p
			break
		}
	}
	if path == "" {
		const says = "no Chromium here, so the console is not tested in a browser (Debian: apt-get install chromium; or set CHROMIUM)"
		if os.Getenv("CI") == "true" {
			t.Fatal(says)
		}
		t.Skip(says)
	}
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(path), chromedp.DisableGPU,
		chromedp.Flag("force-color-profile", "srgb"),
		// no network except loopback
		chromedp.ProxyServer("direct://"), chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
		chromedp.Env("TZ=UTC"), chromedp.WSURLReadTimeout(time.Minute))
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // with its sandbox Chromium refuses root
	}
	allocator, stop := chromedp.NewExecAllocator(context.WithoutCancel(t.Context()), options...)
	ctx, end := chromedp.NewContext(allocator)
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Logf("close Chromium: %v", err)
		}
		end()
		stop()
	})
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	return ctx
}

// browser is one tab with its own cookies. Each error in the page's console and each violation of
// its policy fails the test.
type browser struct {
	t   *testing.T
	h   *harness
	ctx context.Context

	mu     sync.Mutex
	lawful []string
}

const browserTimeout = time.Minute // for one step on a busy machine

// browser opens a tab in the Chromium. It signs in if token is not empty.
func (h *harness) browser(t *testing.T, chromium context.Context, token string, l look) *browser {
	t.Helper()
	b := &browser{t: t, h: h}
	var end context.CancelFunc
	b.ctx, end = chromedp.NewContext(chromium, chromedp.WithNewBrowserContext(), chromedp.WithListener(b.hear))
	t.Cleanup(end)
	if err := chromedp.Do(b.ctx); err != nil { // the tab exists as long as this context
		t.Fatalf("open a tab: %v", err)
	}
	width, height, scheme := int64(1280), int64(900), "light"
	if l.Phone {
		width, height = 390, 844
	}
	if l.Dark {
		scheme = "dark"
	}
	b.run(chromedp.EmulateViewport(width, height), chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		features := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}
		if _, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features}); err != nil {
			return err
		}
		_, err := cdp.Call(ctx, t, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: l.NoScript})
		return err
	}))
	if token != "" {
		b.open("/console/sign-in")
		b.run(chromedp.SendKeys(chromedp.CSS("#token"), token+kb.Enter), chromedp.WaitVisible(chromedp.CSS("nav[aria-label=Pages]")))
		if !l.NoScript {
			b.until(`document.readyState === "complete"`) // before that, no script hears a key
		}
	}
	return b
}

// hear handles the tab's events.
func (b *browser) hear(ev any) {
	switch ev := ev.(type) {
	case *runtime.EventExceptionThrown:
		said, _ := json.Marshal(ev.ExceptionDetails)
		b.wrong("exception: " + string(said))
	case *runtime.EventConsoleAPICalled:
		if ev.Type == "error" || ev.Type == "warning" {
			said, _ := json.Marshal(ev.Args)
			b.wrong("console: " + string(said))
		}
	case *network.EventRequestWillBeSent:
		if u, err := url.Parse(ev.Request.URL); err != nil || u.Host != "" && !loopback(u.Hostname()) {
			b.wrong("a request to another host: " + ev.Request.URL)
		}
	case *log.EventEntryAdded:
		if ev.Entry.Level == log.EntryLevelError {
			b.wrong(fmt.Sprintf("%s: %s %s", ev.Entry.Source, ev.Entry.Text, ev.Entry.URL))
		}
	}
}

// tells reports the browser's findings to another test. It returns the previous one.
func (b *browser) tells(t *testing.T) (before *testing.T) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before, b.t = b.t, t
	return before
}

// loopback reports whether host is this machine.
func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

func (b *browser) wrong(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.ContainsFunc(b.lawful, func(s string) bool { return strings.Contains(what, s) }) {
		b.t.Errorf("the browser reports: %.500s", what)
	}
}

// expect allows an error in the page's console that contains part: "status of 404".
func (b *browser) expect(part string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lawful = append(b.lawful, part)
}

// run runs the steps. It fails the test if they do not succeed within browserTimeout.
func (b *browser) run(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, browserTimeout)
	defer cancel()
	if err := chromedp.Do(ctx, steps...); err != nil {
		say, cancel := context.WithTimeout(b.ctx, time.Second)
		defer cancel()
		at, _ := chromedp.Run(say, chromedp.Location())
		text, _ := chromedp.Run(say, chromedp.Text(chromedp.CSS("body")))
		b.t.Fatalf("at %s: %v: %.1000s", at, err, text)
	}
}

// open opens a page.
func (b *browser) open(path string) { b.t.Helper(); b.run(chromedp.Navigate(b.h.url + path)) }

// waits waits until the page shows the text, for a live page or after a click.
func (b *browser) waits(says string) {
	b.t.Helper()
	b.until(fmt.Sprintf(`document.readyState === "complete" && document.body.innerText.includes(%q)`, says))
}

// until waits for a JavaScript expression to be true.
func (b *browser) until(js string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, browserTimeout)
	defer cancel()
	look := chromedp.Evaluate[bool]("new Promise(done => { const look = () => { if ("+js+
		") done(true); else setTimeout(look, 20); }; look(); })", chromedp.EvalAwaitPromise)
	for { // chromedp.Poll needs eval, which the policy forbids
		_, err := chromedp.Run(ctx, look)
		if err == nil {
			return
		}
		if says := err.Error(); !strings.Contains(says, "navigated or closed") && !strings.Contains(says, "context") || ctx.Err() != nil {
			say, cancel := context.WithTimeout(b.ctx, time.Second)
			defer cancel()
			text, _ := chromedp.Run(say, chromedp.Text(chromedp.CSS("body")))
			b.t.Fatalf("still false: %s: %v: %.1000s", js, err, text)
		}
	}
}

// click clicks the link or button with the text.
func (b *browser) click(what string) {
	b.t.Helper()
	b.run(chromedp.Click(chromedp.Search(fmt.Sprintf(`//*[self::a or self::button][normalize-space(.)=%q]`, what))))
}

// keys types into the element with the focus.
func (b *browser) keys(text string) { b.t.Helper(); b.run(chromedp.KeyEvent(text)) }

// chord types g and the letter of a page. The page's clock stands still: it forgets a g after 1.5
// seconds.
func (b *browser) chord(letter string) {
	b.t.Helper()
	eval[*bool](b, `Date.now = (at => () => at)(Date.now()), null`)
	b.keys("g")
	b.keys(letter)
}

// act opens an act's form by its button, enters a reason and confirms. It returns on the page of
// the outcome.
func (b *browser) act(button string) {
	b.t.Helper()
	b.click(button)
	b.confirm("because the test says so")
}

// confirm enters the reason of an act and confirms. It returns on the page of the outcome, to which
// a message leads if the form was a dialog, or in a dialog with a secret.
func (b *browser) confirm(reason string) {
	b.t.Helper()
	from, scripts := eval[string](b, `location.pathname`), eval[bool](b, `document.documentElement.classList.contains("scripts")`)
	b.run(chromedp.SendKeys(chromedp.CSS("#act-reason"), reason), chromedp.Click(chromedp.CSS("form.stack .row button")))
	if !scripts {
		b.run(chromedp.WaitVisible(chromedp.CSS("#outcome")))
		return
	}
	b.until(`document.querySelector("#dialog[open] .secret") || document.querySelector("main #outcome") && location.pathname !== "` + from +
		`" || (document.querySelector("#view")?.click(), false)`)
}

// eval evaluates and awaits a JavaScript expression. The page's policy does not apply to it.
func eval[T any](b *browser, js string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, browserTimeout)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](js, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%.200s: %v", js, err)
	}
	return v
}

// text returns the text of the main part.
func (b *browser) text() string {
	b.t.Helper()
	return eval[string](b, `document.querySelector("main").innerText`)
}

// shot writes docs/images/NAME.png when TIDINGS_SCREENSHOTS names the folder.
func (b *browser) shot(name string) {
	b.t.Helper()
	dir := os.Getenv("TIDINGS_SCREENSHOTS")
	if dir == "" || name == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644); err != nil {
		b.t.Error(err)
	}
}

// axe reads the source of axe-core, which test-browser.sh downloads.
var axe = sync.OnceValues(func() (string, error) {
	b, err := os.ReadFile(os.Getenv("TIDINGS_AXE"))
	return string(b), err
})

// accessible fails the test for each rule of WCAG 2.2 AA that axe-core finds broken. It also fails
// the test for a page that scrolls sideways or shifts while it loads.
func (b *browser) accessible(where string) {
	b.t.Helper()
	b.conforms(where)
	b.still(where)
}

// conforms is accessible without the shifts, for a page that shows the effect of an act.
func (b *browser) conforms(where string) {
	b.t.Helper()
	source, err := axe()
	if err != nil {
		b.t.Fatalf("read axe-core (run make test-browser, which fetches it): %v", err)
	}
	eval[*bool](b, source+"; null")
	type violation struct {
		ID, Help string
		Nodes    []struct{ HTML, FailureSummary string }
	}
	for _, v := range eval[[]violation](b,
		`axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
			resultTypes: ["violations"]}).then(r =>
		r.violations.map(v => ({ID: v.id, Help: v.help, Nodes: v.nodes.map(n => ({HTML: n.html, FailureSummary: n.failureSummary}))})))`) {
		for _, n := range v.Nodes {
			b.t.Errorf("%s: %s (%s): %.300s: %.300s", where, v.ID, v.Help, n.HTML, n.FailureSummary)
		}
	}
	if wide := eval[int](b, `document.documentElement.scrollWidth - document.documentElement.clientWidth`); wide > 0 {
		b.t.Errorf("%s: the page is %d pixels too wide", where, wide)
	}
}

// still fails the test for a page that has shifted since it was opened.
func (b *browser) still(where string) {
	b.t.Helper()
	shift := eval[struct {
		All  float64
		What []string // by how much, and where from and to
	}](b, `new Promise(done => {
		const shift = {All: 0, What: []};
		const at = r => [r.x, r.y, r.width, r.height].map(Math.round).join(" ");
		new PerformanceObserver(list => { for (const e of list.getEntries()) if (!e.hadRecentInput) {
			shift.All += e.value;
			for (const s of e.sources) shift.What.push(e.value.toFixed(3) + " " + at(s.previousRect) + " -> " + at(s.currentRect) + " " +
				(s.node?.outerHTML ?? s.node?.textContent ?? "a node that is gone").slice(0, 80));
		} }).observe({type: "layout-shift", buffered: true});
		requestAnimationFrame(() => requestAnimationFrame(() => done(shift)));
	})`)
	if shift.All > 0.02 {
		b.t.Errorf("%s: the layout shifts by %.3f: %q", where, shift.All, shift.What)
	}
}

func TestEveryPageInABrowser(t *testing.T) {
	c, h := chromium(t), start(t)
	h.sample(t)
	pages := append(browserPages(h), moderationPages(h)...)
	times := 0
	for _, p := range h.console.Pages() {
		if !slices.ContainsFunc(pages, func(b browserPage) bool { return strings.SplitN(b.path, "?", 2)[0] == p.Path && b.status == 0 }) {
			t.Errorf("browserPages has no line for %s (%s) of pages.go", p.Path, p.Title)
		}
	}
	for _, l := range []look{{}, {Dark: true}, {Phone: true}, {Phone: true, Dark: true}, {NoScript: true}} {
		tabs := map[string]*browser{}
		for _, p := range pages {
			b := tabs[p.who]
			if b == nil {
				b = h.browser(t, c, p.who, l)
				tabs[p.who] = b
			}
			if p.status != 0 {
				b.expect(fmt.Sprintf("status of %d", p.status))
			}
			b.open(p.path)
			if l.NoScript {
				b.run(chromedp.WaitVisible(chromedp.CSS("main")))
				if text := b.text(); !strings.Contains(text, p.says) {
					t.Errorf("%s, %s: does not show %q: %.500s", p.path, l, p.says, text)
				}
				if dead := eval[int](b, `[...document.querySelectorAll(".scripted")].filter(e => e.checkVisibility()).length`); dead > 0 {
					t.Errorf("%s, %s: shows %d buttons that need scripts", p.path, l, dead)
				}
				zones := `[...document.querySelectorAll("time")].map(t => getComputedStyle(t, "::after").content)`
				for _, zone := range eval[[]string](b, zones) {
					if times++; zone != `" UTC"` {
						t.Errorf("%s, %s: a time ends in %s, want UTC", p.path, l, zone)
					}
				}
				continue
			}
			b.waits(p.says)
			b.accessible(p.path + ", " + l.String())
		}
	}
	if times == 0 {
		t.Error("no page has a time")
	}
}

func TestTheConsoleIsWorkedByKeys(t *testing.T) {
	h := start(t)
	b := h.browser(t, chromium(t), h.Tokens.Admin, look{})
	b.chord("a")
	b.waits("Nobody has acted here yet")
	b.keys("/")
	b.until(`document.activeElement.id === "q"`)
	b.keys("nothing" + kb.Enter)
	b.waits("No act matches")
	b.keys("?")
	b.run(chromedp.WaitVisible(chromedp.CSS("#help[open]")))
	b.accessible("the list of keys")
	b.keys(kb.Escape)
	b.run(chromedp.WaitNotPresent(chromedp.CSS("#help[open]")))
	eval[bool](b, `window.before = true`)
	b.keys("r")
	b.until(`window.before === undefined && document.readyState === "complete"`)
	b.keys(kb.Tab)
	if at := eval[string](b, `document.activeElement.textContent`); at != "Skip to the content" {
		t.Errorf("the first stop of Tab is %q", at)
	}
	eval[*bool](b, `history.back(), null`)
	b.waits("Nobody has acted here yet")
}

func TestATokenIsMadeInTheBrowserAndShownOnce(t *testing.T) {
	h := start(t)
	b := h.browser(t, chromium(t), h.Tokens.Admin, look{Phone: true})
	b.open("/console/tokens")
	b.click("Create a token")
	b.run(chromedp.SetValue(chromedp.CSS("#f-tenant"), "7"), chromedp.SendKeys(chromedp.CSS("#f-name"), "importer"),
		chromedp.SendKeys(chromedp.CSS("#act-reason"), "a new service"), chromedp.Click(chromedp.CSS("form.stack .row button")))
	b.waits("not shown again")
	b.accessible("the outcome")
	b.click("Back")
	b.run(chromedp.WaitVisible(chromedp.Search(`//th[normalize-space(.)="importer"]`)))
	b.open("/console/audit")
	b.click("token.create")
	b.waits("Made the token")
	if strings.Contains(b.text(), "tdg_") {
		t.Error("the token is shown again")
	}
}

func TestAConsumerIsReplayedInTheBrowser(t *testing.T) {
	d := openDesk(t)
	if _, err := d.store.PutEdges(t.Context(), tenant, kinds.Builtin().Edges["follow"],
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "service"}, From: "1", To: "2"}}); err != nil {
		t.Fatal(err)
	}
	d.publish(t)
	// the replay may switch only when the new tables have reached this offset
	d.exec(t, `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ('followercounts', 'EVENTS-0', 1)`)
	b := d.browser(t, chromium(t), d.Tokens.Admin, look{Phone: true})
	b.open("/console/consumers")
	b.act("Replay") // the button of the first consumer, followercounts
	b.waits("Replayed from the stream: 1 event applied")
	b.accessible("the outcome of a replay")
	if n := d.count(t, `SELECT count(*) FROM edge_counts WHERE tenant_id = 7 AND incoming = 1`); n != 1 {
		t.Errorf("%d users have a follower, want 1", n)
	}
	b.click("Back")
	b.waits("followercounts")
}

func TestALivePageInABrowserFollowsAndStopsWhenHidden(t *testing.T) {
	h := start(t)
	b := h.browser(t, chromium(t), h.Tokens.Reader, look{})
	b.open("/console/")
	b.until(`Number(document.documentElement.dataset.live) > 0`)
	if _, err := h.pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 1, 'follow', i, 'created', '{}' FROM generate_series(1, 4321) i`); err != nil {
		t.Fatal(err)
	}
	b.waits("4,321")
	for _, hidden := range []bool{true, false} {
		eval[*bool](b, fmt.Sprintf(`Object.defineProperty(document, "hidden", {value: %t, configurable: true}), `+
			`document.dispatchEvent(new Event("visibilitychange")), null`, hidden))
		testkit.Eventually(t, fmt.Sprintf("a tab is served: %t", !hidden),
			func() (bool, error) { return (h.streams.Load() > 0) == !hidden, nil })
	}
	h.pend(t, 5000)
	b.waits("9,321")
}

// untouched fails the test if the browser ran text of people, or shows it as markup.
func (b *browser) untouched(where string) {
	b.t.Helper()
	if got := eval[string](b, `[window.XSS, document.querySelectorAll("i[id^=X]").length, `+
		`document.querySelectorAll("script:not([src^='/console/assets/'])").length, document.querySelectorAll("style, iframe, object, `+
		`embed, base").length].join()`); got != ",0,0,0" {
		b.t.Errorf("%s: text of people ran, or is markup: %s", where, got)
	}
}

func TestNothingThatPeopleWriteRunsInTheBrowser(t *testing.T) {
	h := start(t)
	ids := make([]uuid.UUID, 0, len(payloads()))
	for i, p := range payloads() {
		a := audit.Act{ActID: uuid.New(), TenantID: int64(i % 2), TokenName: p, Fingerprint: "0123456789ab", Name: p, Target: p, Reason: p}
		if _, _, err := audit.Begin(t.Context(), h.pool, a); err != nil {
			t.Fatal(err)
		}
		if err := audit.Finish(t.Context(), h.pool, a.ActID, p, i%3 == 0); err != nil {
			t.Fatal(err)
		}
		name := []string{"followercounts", "threadcache", "archiver"}[i%3]
		if _, err := consumers.Pause(t.Context(), h.pool, name, consumers.Paused{Actor: p, Reason: p}); err != nil {
			t.Fatal(err)
		}
		if _, err := tokens.Create(t.Context(), h.pool, tenant, strings.Map(func(r rune) rune {
			if r < ' ' || r == '\u202e' || r == '\u2066' {
				return -1
			}
			return r
		}, p), []string{"read"}, time.Time{}); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, a.ActID)
	}
	b := h.browser(t, chromium(t), h.Tokens.Admin, look{})
	for _, path := range []string{"/console/audit", "/console/audit?before=30", "/console/tokens", "/console/consumers", "/console/",
		"/console/acts/" + ids[0].String(), "/console/acts/" + ids[8].String()} {
		b.open(path)
		b.run(chromedp.WaitVisible(chromedp.CSS("main")))
		b.untouched(path)
	}
	for _, p := range payloads()[:12] {
		for _, path := range []string{"/console/audit?q=", "/console/audit?who=", "/console/act/token.create?name=",
			"/console/tokens?all="} {
			b.open(path + url.QueryEscape(p))
			b.untouched(path + p)
		}
	}
	b.expect("status of 422")
	b.expect("status of 404")
	for _, path := range []string{"/console/audit?from=", "/console/tokens?tenant=", "/console/act/", "/console/acts/"} {
		b.open(path + url.QueryEscape(payloads()[0]))
		b.untouched(path)
	}
}
