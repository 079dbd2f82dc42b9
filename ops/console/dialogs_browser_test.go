//go:build browser

package console_test

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// step does the steps, each of which is one click, and counts them.
func (b *browser) step(n *int, steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	*n += len(steps)
	b.run(steps...)
}

// TestAnActIsADialogInTheBrowser retries a cause of dead letters in two clicks, and pauses a
// consumer on one page. The page shows the effect in its place. The next act offers the reason.
func TestAnActIsADialogInTheBrowser(t *testing.T) {
	h := start(t)
	h.bury(t, 1, 40, 7, "too large", "")
	c := chromium(t)
	for _, l := range []look{{}, {Phone: true, Dark: true}} {
		b := h.browser(t, c, h.Tokens.Admin, l)
		b.open("/console/consumers")
		b.until(`Number(document.documentElement.dataset.live) > 0`)
		eval[*bool](b, `window.stays = true, null`)
		b.click("Pause") // of the first consumer
		b.until(`document.activeElement.id === "act-reason"`)
		b.accessible("the dialog of a pause, " + l.String())
		b.keys("a migration")
		eval[*bool](b, `document.activeElement.dispatchEvent(new KeyboardEvent("keydown",
			{key: "Enter", ctrlKey: true, bubbles: true, cancelable: true})), null`)
		b.waits("done Paused.")
		b.run(chromedp.WaitVisible(chromedp.CSS("#toast .ok")), chromedp.WaitNotPresent(chromedp.CSS("#dialog[open]")))
		b.until(`document.querySelector("main").innerText.includes("a migration")`)
		b.conforms("the outcome of a pause, " + l.String())
		b.click("Resume")
		b.until(`document.querySelector("#dialog[open] .reasons button")?.innerText === "a migration"`)
		b.conforms("the dialog with a reason, " + l.String())
		b.run(chromedp.Click(chromedp.CSS("#dialog .reasons button")), chromedp.Click(chromedp.CSS("#dialog form.stack .row button")))
		b.waits("done Resumed.")
		b.until(`!document.querySelector("main").innerText.includes("a migration")`)
		if !eval[bool](b, `window.stays === true`) {
			t.Error("another page was opened")
		}
	}

	amy, n := h.browser(t, c, h.Tokens.TenantAdmin, look{}), 0
	amy.open("/console/dead-letters")
	amy.step(&n, chromedp.Click(chromedp.Search(`//tr[contains(., "too large")]//a[normalize-space(.)="Retry"]`)))
	amy.until(`document.activeElement.id === "act-reason"`)
	amy.keys("the limit is raised")
	amy.step(&n, chromedp.Click(chromedp.CSS("#dialog form.stack .row button")))
	amy.waits("Retried 40 dead letters.")
	amy.until(`(says => !says.includes("too large") && says.includes("ended"))(document.querySelector("main").innerText)`)
	if got := h.count(t, `SELECT count(*) FROM outbox_messages WHERE tenant_id = 7`); got != 40 || n != 2 {
		t.Errorf("%d messages in the outbox after %d clicks", got, n)
	}
}

// TestADialogKeepsWhatFailedInTheBrowser lacks an answer, then a confirmation, and then succeeds in
// part.
func TestADialogKeepsWhatFailedInTheBrowser(t *testing.T) {
	h := start(t)
	h.bury(t, 1, 12, 7, "too large", "")
	h.park(t, 2)
	h.exec(t, `UPDATE consumer_dead_letters SET payload = 'no JSON' WHERE aggregate_id = '1'`)
	b := h.browser(t, chromium(t), h.Tokens.Admin, look{})
	b.open("/console/dead-letters")
	b.click("too large")
	b.click("Discard all")
	b.until(`document.activeElement.id === "act-reason"`)
	b.keys("by mistake")
	b.run(chromedp.SendKeys(chromedp.CSS("#confirm"), "5"))
	b.expect("status of 422")
	b.run(chromedp.Click(chromedp.CSS("#dialog form.stack .row button")))
	b.waits("To confirm, type 12.")
	if got := eval[string](b, `document.activeElement.id + " " + document.activeElement.value`); got != "act-reason by mistake" {
		t.Errorf("the form has %q", got)
	}
	b.accessible("a dialog that lacks a confirmation")
	eval[*bool](b, `window.fetch = (was => () => {
		window.fetch = was;
		return Promise.reject(new TypeError("cut"));
	})(window.fetch), null`)
	b.run(chromedp.SendKeys(chromedp.CSS("#confirm"), "12"), chromedp.Click(chromedp.CSS("#dialog form.stack .row button")))
	b.waits("No answer came.")
	b.run(chromedp.Click(chromedp.CSS("#dialog form.stack .row button")))
	b.waits("Discarded 12 dead letters.")
	b.open("/console/dead-letters?source=consumers")
	b.click("a bug")
	b.click("Retry all")
	b.until(`document.activeElement.id === "act-reason"`)
	b.keys("again" + kb.Tab)
	b.run(chromedp.Click(chromedp.CSS("#dialog form.stack .row button")))
	b.waits("done in part Retried 2 dead letters, 1 failed.")
	b.run(chromedp.WaitVisible(chromedp.CSS("#toast .warn")))
	b.conforms("an outcome in part")
	b.click("View")
	b.waits("dead_letter.retry")
}

// TestAReasonIsTwoClicksAwayInTheBrowser asks why an event was not delivered.
func TestAReasonIsTwoClicksAwayInTheBrowser(t *testing.T) {
	h := start(t)
	h.bury(t, 1, 1, 7, "too large", "")
	b, n := h.browser(t, chromium(t), h.Tokens.TenantAdmin, look{}), 0
	b.run(chromedp.Focus(chromedp.CSS("#find")))
	b.keys("post/1")
	b.step(&n, chromedp.KeyEvent(kb.Enter))
	b.waits("post.made")
	b.step(&n, chromedp.Click(chromedp.CSS("main td a code")))
	b.waits("after 11 attempts: too large")
	if n != 2 {
		t.Errorf("%d clicks", n)
	}
}
