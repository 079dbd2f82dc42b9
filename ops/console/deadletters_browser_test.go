//go:build browser

package console_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/google/uuid"
)

// tabTo presses Tab until the link or button with the text has the focus.
func (b *browser) tabTo(text string) {
	b.t.Helper()
	var seen []string
	for range 60 {
		b.keys(kb.Tab)
		at := eval[string](b, `document.activeElement.textContent.trim()`)
		if at == text {
			return
		}
		seen = append(seen, fmt.Sprintf("%.20s", at))
	}
	b.t.Fatalf("Tab does not reach %q: %q", text, seen)
}

// TestDeadLettersAreMendedInTheBrowserByKeys retries and discards dead letters without a mouse.
func TestDeadLettersAreMendedInTheBrowserByKeys(t *testing.T) {
	h := start(t)
	h.bury(t, 1, 300, 7, "too large", "")
	h.park(t, 3)
	c := chromium(t)
	amy, rita := h.browser(t, c, h.Tokens.TenantAdmin, look{}), h.browser(t, c, h.Tokens.TenantReader, look{Phone: true})
	amy.chord("l")
	amy.waits("too large")
	amy.keys("/")
	amy.until(`document.activeElement.id === "q"`)
	eval[*bool](amy, `document.activeElement.select(), null`) // chromedp types a pressed key even where the page handles it
	amy.keys("large" + kb.Enter)
	amy.until(`document.readyState === "complete" && location.search.includes("q=large&")`)
	amy.tabTo("too large")
	amy.keys(kb.Enter)
	amy.waits("Retry all")
	amy.tabTo("Write a note")
	amy.keys(kb.Enter)
	amy.waits("Everybody who sees the group")
	amy.run(chromedp.Focus(chromedp.CSS("#f-note")))
	amy.keys("ask the writers" + kb.Tab + "so that they know" + kb.Tab + kb.Enter)
	amy.waits("Wrote the note.")
	amy.waits("ask the writers")
	if at := eval[string](amy, `document.activeElement.textContent.trim()`); at != "Write a note" {
		t.Errorf("after the dialog the focus is at %q", at)
	}
	eval[*bool](amy, `document.querySelector("main").focus(), null`)
	amy.tabTo("Retry all")
	amy.keys(kb.Enter)
	amy.waits("Puts 300 messages back")
	amy.run(chromedp.Focus(chromedp.CSS("#act-reason")))
	amy.keys("the limit is raised" + kb.Tab + kb.Enter)
	amy.waits("Retried 300 dead letters.")
	if n := h.count(t, `SELECT count(*) FROM outbox_messages WHERE tenant_id = 7`); n != 300 {
		t.Errorf("%d messages in the outbox", n)
	}
	if n := h.count(t, `SELECT count(*) FROM operator_acts WHERE act = 'dead_letter.retry' AND reason = 'the limit is raised'
		AND token_name = 'amy' AND outcome LIKE 'Retried 300%'`); n != 1 {
		t.Errorf("%d records", n)
	}

	// The page offers no acts to a reader. An admin discards one letter of a consumer and retries
	// the others.
	rita.open("/console/dead-letters/letters?source=consumers&consumer=followercounts")
	rita.waits("a bug")
	if eval[int](rita, `document.querySelectorAll("main a[href*='/console/act/']").length`) != 0 {
		t.Error("the page offers acts to a reader")
	}
	amy.open("/console/dead-letters")
	amy.click("a bug")
	amy.waits("Discard all")
	amy.act("Discard")
	amy.waits("Discarded 1 dead letter.")
	amy.click("Back")
	amy.until(`document.readyState === "complete" && document.body.innerText.includes("follow/2") && ` +
		`!document.body.innerText.includes("follow/1")`)
	if n := h.count(t, `SELECT count(*) FROM consumer_dead_letters`); n != 5 {
		t.Errorf("%d letters are parked", n)
	}
}

// TestAnOperationIsFollowedInTheBrowserAndStopped follows an operation of another process.
func TestAnOperationIsFollowedInTheBrowserAndStopped(t *testing.T) {
	h := start(t)
	id := uuid.NewString()
	h.exec(t, `INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, total, worker, lease_until)
		VALUES ($1, 7, 'retry', '{}', 'amy', 50000, 'other', 'infinity')`, id)
	b := h.browser(t, chromium(t), h.Tokens.Admin, look{})
	b.open("/console/dead-letters")
	b.click("retry")
	b.waits("0 of 50,000")
	h.exec(t, `UPDATE outbox_dlq_operations SET seen = 12345, done = 12345`)
	b.waits("12,345 of 50,000")
	b.accessible("an operation")
	b.act("Stop")
	b.waits("Stopped it after 12,345 of 50,000.")
	b.click("Back")
	b.waits("by ada")
}

// TestNoPayloadRunsInTheBrowser opens pages with payloads in every field that a writer or an
// operator controls. It fails if a payload runs, or if the policy stops one.
func TestNoPayloadRunsInTheBrowser(t *testing.T) {
	h := start(t)
	h.hostile(t)
	b := h.browser(t, chromium(t), h.Tokens.TenantAdmin, look{})
	// Two of the five pages of each letter are enough: TestNoPayloadRunsNorBreaksAPage reads the
	// others.
	paths := slices.DeleteFunc(h.hostilePages(t), func(path string) bool {
		return strings.Contains(path, "&group=") || strings.Contains(path, "payload=show&q=")
	})
	for i, path := range paths {
		b.open(path)
		got := eval[[]string](b, `[document.title, location.pathname + location.search, `+
			`String(document.querySelectorAll("script").length), String(window.XSS), String(document.querySelectorAll("i").length)]`)
		if !strings.HasSuffix(got[0], "Tidings") || got[2] != "4" || got[3] != "undefined" || got[4] != "0" || len(got[1]) == 0 ||
			!strings.HasPrefix(path, strings.SplitN(got[1], "?", 2)[0]) {
			t.Errorf("%d of %d, %s: %q", i, len(paths), path, got)
		}
	}
	b.open("/console/dead-letters/letter?source=outbox&payload=show&id=1")
	if text := b.text(); strings.Count(text, payloads()[0]) < 4 {
		t.Errorf("the payload is not shown as it is: %s", text)
	}
}
