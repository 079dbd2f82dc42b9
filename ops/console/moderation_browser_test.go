//go:build browser

package console_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/input"
	cdppage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// moderationPages are the lines of browserPages for moderation and inspection.
func moderationPages(h *harness) []browserPage {
	return []browserPage{
		{path: "/console/moderation?tenant=7", says: "reported", who: h.Tokens.Moderator},
		{path: "/console/moderation", says: "Bodies are for tokens", who: h.Tokens.TenantReader},
		{path: "/console/moderation?list=removed", says: "is removed", who: h.Tokens.TenantModerator},
		{path: "/console/moderation?author=1&object=5", says: "Decide on all", who: h.Tokens.TenantModerator},
		{path: "/console/moderation", says: "Choose a tenant", who: h.Tokens.Moderator},
		{path: "/console/moderation-threads", says: "premoderated", who: h.Tokens.TenantModerator},
		{path: "/console/decisions", says: "spam-rule", who: h.Tokens.TenantReader},
		{path: "/console/act/thread.settings?kind=comment&object=5", says: "Settings", who: h.Tokens.TenantModerator},
		{path: "/console/inspect", says: "Choose an entity", who: h.Tokens.Admin},
		{path: "/console/inspect?tenant=7&kind=comment&id=5", says: "differs", who: h.Tokens.Admin},
		{path: "/console/archive", says: "Ranges of the outbox", who: h.Tokens.Admin},
		{path: "/console/erasure", says: "not finished", who: h.Tokens.Admin},
		{path: "/console/act/erasure.start?tenant=7&author=42", says: "permanently", who: h.Tokens.Admin},
		{path: "/console/inspect?tenant=7&kind=user&id=1", says: "counts of user 1", who: h.Tokens.Admin},
	}
}

// sampleModeration fills the queue and makes the projection differ from the truth.
func (h *harness) sampleModeration(t *testing.T) (held []string) {
	t.Helper()
	d := &desk{harness: h, store: store.New(h.db.Pool(t, postgres.RoleAPI), nil)}
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true, Title: "Questions to the author"})
	held = d.write(t, "5", "1", "May I translate this?", "A first comment, which waits.", "And a third one.")
	seen := d.write(t, "6", "2", "Buy followers here: example.com", "A quiet comment.")
	d.report(t, seen[0], event.ModerationPending, "a link in the first comment of an account")
	if out, err := d.store.PutEdges(t.Context(), tenant, kinds.Builtin().Edges["follow"],
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "ann"}, From: "2", To: "1"}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	d.deliver(t)
	d.exec(t, `UPDATE child_lists SET version = 9 WHERE child_id = '`+held[1]+`'`)
	d.exec(t, `INSERT INTO erasures (tenant_id, author_id, requested_by, reason, counts)
		VALUES (7, 42, 'ann', 'ticket 17', '{"children": 3, "outbox": 7}')`)
	d.exec(t, `INSERT INTO outbox_archive_holds (tenant_id, reason, created_by) VALUES (7, 'a dispute', 'ann')`)
	return append(held, seen...)
}

// TestTheQueueIsWorkedByKeys decides, holds and undoes without a mouse.
func TestTheQueueIsWorkedByKeys(t *testing.T) {
	h := start(t)
	ids := h.sampleModeration(t)
	d := &desk{harness: h, store: store.New(h.db.Pool(t, postgres.RoleAPI), nil)}
	b := h.browser(t, chromium(t), h.Tokens.TenantModerator, look{})
	b.chord("m")
	b.waits("May I translate this?")
	here := func() string {
		return eval[string](b, `(document.querySelector(".item.here") || {dataset: {}}).dataset.item || ""`)
	}
	says := func(text string) {
		t.Helper()
		b.until(`document.getElementById("moderated").innerText.includes("` + text + `")`)
	}
	b.keys("a")
	says("Select an item first")
	b.keys("j")
	b.keys("j")
	b.keys("k")
	if got := here(); got != ids[0] {
		t.Errorf("j, j and k lead to %q, want %q", got, ids[0])
	}
	b.keys("a")
	says("Give a reason first")
	b.keys("a good question" + kb.Enter) // the keys moved the focus to the reason
	b.keys("a")
	says("Approved 1 comment")
	if got := here(); got != ids[1] {
		t.Errorf("then %q is next, want %q", got, ids[1])
	}
	b.keys("s")
	b.keys("j")
	b.keys("s")
	b.keys("x")
	says("Hid 2 comments")
	b.keys("u")
	says("Held 2 comments")
	b.keys("u")
	says("Held 1 comment.")
	b.chord("x") // g x opens no page here, and must not decide either
	b.keys("d")
	says("Removed 1 comment")
	got := strings.Join(d.states(t, ids...), ", ")
	if want := "REMOVED 4, PENDING 3, PENDING 3, PENDING 2, VISIBLE 1"; got != want {
		t.Errorf("the comments are %s, want %s", got, want)
	}
	b.keys("r")
	b.until(`document.readyState === "complete" && document.querySelectorAll(".item").length === 3`)
	b.accessible("the queue")
	events := 0
	if err := h.pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE event_type = 'moderated'
		AND payload ->> 'actor' = 'max' AND payload ->> 'reason' <> ''`).Scan(&events); err != nil || events != 7 {
		t.Errorf("%d events of max, %v: want 7", events, err)
	}
}

// TestNoKeyIsLostInModeration types ten decisions a second, faster than the console answers, and
// then takes some of them back.
func TestNoKeyIsLostInModeration(t *testing.T) {
	h := start(t)
	d := &desk{harness: h, store: store.New(h.db.Pool(t, postgres.RoleAPI), nil)}
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true})
	for i := range 30 {
		d.write(t, "5", "1", fmt.Sprint("comment ", i))
	}
	d.deliver(t)
	b := h.browser(t, chromium(t), h.Tokens.TenantModerator, look{})
	b.open("/console/moderation")
	b.until(`document.readyState === "complete" && document.querySelectorAll(".item").length === 30`)
	b.run(chromedp.SendKeys(chromedp.CSS("#reason"), "quick"))
	b.keys(kb.Enter)
	order := eval[[]string](b, `[...document.querySelectorAll(".item")].map(i => i.dataset.item)`)
	eval[*bool](b, `new Promise(done => {
		const keys = [..."axd".repeat(9)];
		const press = () => {
			if (!keys.length) { done(null); return; }
			const key = new KeyboardEvent("keydown", {key: keys.shift(), bubbles: true, cancelable: true});
			document.activeElement.dispatchEvent(key);
			setTimeout(press, 100);
		};
		press();
	})`)
	b.until(`document.querySelectorAll(".item").length === 3`)
	b.keys("u")
	b.keys("z")
	b.until(`!document.querySelector("form[aria-busy]")`)
	if got := eval[[]string](b, `[...document.querySelectorAll(".item")].map(i => i.dataset.item)`); !slices.Equal(got, order[25:]) {
		t.Errorf("the list has %q, want %q", got, order[25:])
	}
	for i, state := range d.states(t, order...) {
		want := []string{"VISIBLE", "HIDDEN", "REMOVED"}[i%3]
		if i >= 25 {
			want = "PENDING"
		}
		if !strings.HasPrefix(state, want+" ") {
			t.Errorf("comment %d is %s, want %s", i, state, want)
		}
	}
	b.keys("a")
	b.until(`document.getElementById("moderated").innerText.includes("Approved 1 comment")`)
	if got := d.states(t, order[25]); !strings.HasPrefix(got[0], "VISIBLE ") {
		t.Errorf("the item that came back is %s", got[0])
	}
}

// TestADecisionOfEachSortInTheBrowser decides on a phone, and on a desktop without JavaScript.
func TestADecisionOfEachSortInTheBrowser(t *testing.T) {
	c := chromium(t)
	for _, l := range []look{{Phone: true}, {NoScript: true}} {
		h := start(t)
		ids := h.sampleModeration(t)
		d := &desk{harness: h, store: store.New(h.db.Pool(t, postgres.RoleAPI), nil)}
		b := h.browser(t, c, h.Tokens.TenantModerator, l)
		b.open("/console/moderation")
		b.run(chromedp.Click(chromedp.CSS(`[data-item="`+ids[3]+`"] input`)), chromedp.SendKeys(chromedp.CSS("#reason"), "spam"),
			chromedp.Click(chromedp.CSS(`button[value=remove]`)))
		if l.NoScript {
			b.run(chromedp.WaitVisible(chromedp.CSS("#outcome")))
			b.click("Back")
			b.run(chromedp.WaitVisible(chromedp.CSS(".items")))
		} else {
			b.waits("Removed 1 comment")
		}
		b.open("/console/moderation?author=1")
		b.click("Decide on all that match")
		b.run(chromedp.SetValue(chromedp.CSS("#f-decide"), "Approve"))
		b.confirm("all good")
		b.run(chromedp.WaitVisible(chromedp.CSS("#outcome .badge.ok")))
		b.open("/console/inspect?kind=comment&id=" + ids[4])
		b.act("Decide")
		b.run(chromedp.WaitVisible(chromedp.CSS("#outcome .badge.ok")))
		b.open("/console/inspect?kind=comment&id=6")
		b.click("Change settings")
		b.run(chromedp.Click(chromedp.CSS(`input[value=locked]`)))
		b.confirm("enough")
		b.run(chromedp.WaitVisible(chromedp.CSS("#outcome .badge.ok")))
		if got, want := strings.Join(d.states(t, ids...), ", "), "VISIBLE 2, VISIBLE 2, VISIBLE 2, REMOVED 3, VISIBLE 2"; got != want {
			t.Errorf("%s: the comments are %s, want %s", l, got, want)
		}
		if s, err := d.store.GetThread(t.Context(), tenant, comment, "6"); err != nil || !s.Locked {
			t.Errorf("%s: the thread is %+v, %v", l, s, err)
		}
		amy := h.browser(t, c, h.Tokens.TenantAdmin, l)
		d.deliver(t)
		d.exec(t, `UPDATE child_lists SET version = 9 WHERE child_id = '`+ids[0]+`'`)
		amy.open("/console/inspect?kind=comment&id=" + ids[0])
		amy.act("Repair")
		amy.run(chromedp.WaitVisible(chromedp.CSS("#outcome .badge.ok")))
		amy.click("Back")
		amy.run(chromedp.WaitVisible(chromedp.CSS(".diff .badge.ok")), chromedp.WaitNotPresent(chromedp.CSS(".differs")))
	}
}

// TestNothingThatIsModeratedRunsInTheBrowser opens pages with text of people. It turns the policy
// off, so only escaping keeps the text from running.
func TestNothingThatIsModeratedRunsInTheBrowser(t *testing.T) {
	d := openDesk(t)
	ids := d.plant(t)
	b := d.browser(t, chromium(t), d.Tokens.TenantModerator, look{})
	b.run(chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, cdppage.SetBypassCSP, cdppage.SetBypassCSPParams{Enabled: true})
		return err
	}))
	b.expect("status of 4") // for an invalid query
	for _, path := range hostile(ids) {
		b.open(path)
		b.until(`document.readyState === "complete"`)
		b.untouched(path)
	}
}

// TestTheQueueInABrowserGoesOn works a queue of more than a page with a mouse and digits: the next
// page joins the list, reasons return after a reload, and the badge follows what waits.
func TestTheQueueInABrowserGoesOn(t *testing.T) {
	h := start(t)
	d := &desk{harness: h, store: store.New(h.db.Pool(t, postgres.RoleAPI), nil)}
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true})
	var ids []string
	for i := range 60 {
		ids = append(ids, d.write(t, "5", "1", fmt.Sprint("comment ", i))...)
	}
	d.deliver(t)
	b := h.browser(t, chromium(t), h.Tokens.TenantModerator, look{})
	b.open("/console/moderation")
	b.waits("comments 60 pending")
	d.write(t, "5", "2", "one more")
	d.deliver(t)
	b.waits("comments 61 pending")
	count := func(n int) {
		t.Helper()
		b.until(fmt.Sprintf(`document.querySelectorAll(".item").length === %d`, n))
	}
	count(50)
	b.run(chromedp.SendKeys(chromedp.CSS("#reason"), "rude"))
	mouse := func(id, decision string) {
		b.run(chromedp.Click(chromedp.CSS(`[data-item="` + id + `"] [data-decide=` + decision + `]`)))
	}
	mouse(ids[1], "remove")
	b.waits("Removed 1 comment")
	eval[*bool](b, `document.querySelector(".pager").scrollIntoView(), null`)
	count(60) // 61 without the one that is decided
	b.waits("End of the list")
	b.accessible("a queue of two pages")
	order := eval[[]string](b, `[...document.querySelectorAll(".item")].map(i => i.dataset.item)`)
	if want := append([]string{ids[0]}, ids[2:]...); !slices.Equal(order[:59], want) {
		t.Errorf("the list has %q, want %q", order, want)
	}
	mouse(ids[59], "hide")
	b.waits("Hid 1 comment")
	b.run(chromedp.SetValue(chromedp.CSS("#reason"), "fine"))
	mouse(ids[0], "approve")
	b.waits("Approved 1 comment")
	b.open("/console/moderation")
	b.until(`document.readyState === "complete" && document.getElementById("reasons").innerText.split("\n").join() === "1 rude,2 fine"`)
	b.accessible("the reasons")
	b.keys("j")
	b.keys("1")
	b.keys("x")
	b.waits("Hid 1 comment")
	b.click("2 fine")
	if got := eval[string](b, `document.getElementById("reason").value`); got != "fine" {
		t.Errorf("the reason is %q", got)
	}
	d.deliver(t)
	b.waits("comments 57 pending")
	if got, want := strings.Join(d.states(t, ids[0], ids[1], ids[2], ids[59]), ", "),
		"VISIBLE 2, REMOVED 2, HIDDEN 2, HIDDEN 2"; got != want {
		t.Errorf("the comments are %s, want %s", got, want)
	}
	if n := h.count(t, `SELECT count(*) FROM outbox_messages WHERE event_type = 'moderated' AND payload ->> 'reason' = 'rude'`); n != 3 {
		t.Errorf("%d decisions have the first reason, want 3", n)
	}
}

// TestTheQueueIsWorkedByAFinger moves cards to the sides on a phone. A short way decides nothing.
func TestTheQueueIsWorkedByAFinger(t *testing.T) {
	h := start(t)
	d := &desk{harness: h, store: store.New(h.db.Pool(t, postgres.RoleAPI), nil)}
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true})
	ids := d.write(t, "5", "1", "first", "second", "third")
	d.deliver(t)
	b := h.browser(t, chromium(t), h.Tokens.TenantModerator, look{Phone: true})
	b.open("/console/moderation")
	b.waits("first")
	swipe := func(id string, by float64) {
		t.Helper()
		at := eval[[]float64](b, `(item => {
			item.scrollIntoView({block: "start"});
			const r = item.querySelector(".prose").getBoundingClientRect();
			return [r.x + r.width / 2, r.y + r.height / 2];
		})(document.querySelector("[data-item='`+id+`']"))`)
		b.run(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
			for i, kind := range []input.DispatchTouchEventType{"touchStart", "touchMove", "touchMove", "touchEnd"} {
				points := []*input.TouchPoint{{X: at[0] + by*float64(i)/2, Y: at[1]}}
				if kind == "touchEnd" {
					points = []*input.TouchPoint{}
				}
				if _, err := cdp.Call(ctx, target, input.DispatchTouchEvent,
					input.DispatchTouchEventParams{Type: kind, TouchPoints: points}); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	b.run(chromedp.SendKeys(chromedp.CSS("#reason"), "looked at"))
	swipe(ids[0], 40)
	if n := eval[int](b, `document.querySelectorAll(".item").length`); n != 3 {
		t.Errorf("%d items after a short way, want 3", n)
	}
	swipe(ids[0], 180)
	b.waits("Approved 1 comment")
	swipe(ids[2], -180)
	b.waits("Removed 1 comment")
	swipe(ids[1], -180)
	b.until(`document.querySelectorAll(".item").length === 0 && document.getElementById("moderated").textContent.includes("Removed 1")`)
	b.click("Undo")
	b.until(`document.querySelectorAll(".item").length === 1`)
	b.accessible("the queue on a phone")
	testkit.Eventually(t, "the decisions", func() (bool, error) {
		d.deliver(t)
		return strings.Join(d.states(t, ids...), ", ") == "VISIBLE 2, PENDING 3, REMOVED 2", nil
	})
}
