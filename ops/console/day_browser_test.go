//go:build browser

package console_test

import (
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/testkit"
)

// TestTheLastDayInTheBrowser reads values by pointer and as a table, in the reader's zone, and sees
// the samples of a pause.
func TestTheLastDayInTheBrowser(t *testing.T) {
	h := start(t)
	h.declare(t)
	h.pend(t, 7)
	h.fill(t, "api-1", daemon.Version(), 90, map[string]string{"requests": "100000 - 1234 * n", "p99": "0.025"})
	c := chromium(t)
	for _, l := range []look{{}, {Phone: true, Dark: true}} {
		b := h.browser(t, c, h.Tokens.Admin, l)
		b.chord("y")
		b.waits("Pending messages")
		testkit.Eventually(t, "a sample of the console", func() (bool, error) {
			return h.count(t, `SELECT count(*) FROM samples WHERE source = '' AND (figures ->> 'pending')::int = 7`) > 0, nil
		})
		b.waits("pending: 7, at most 7") // the live page
		b.accessible("the last day, " + l.String())

		eval[*bool](b, `document.querySelector("#chart-7").scrollIntoView(), null`)
		at := eval[struct{ X, Y float64 }](b, `(r => ({X: r.x + r.width / 2, Y: r.y + r.height / 2}))(
			document.querySelector("#chart-7 ~ svg rect:nth-of-type(60)").getBoundingClientRect())`)
		b.run(chromedp.MouseClickXY(at.X, at.Y))
		b.until(`(tip => !tip.hidden && /^[-0-9]{10} [:0-9]{8}\nrequests: 123\/s$/.test(tip.textContent))(` +
			`document.getElementById("hover"))`)
		b.accessible("the values under the pointer, " + l.String())
		moment := strings.SplitN(eval[string](b, `document.getElementById("hover").textContent`), "\n", 2)[0]
		if n := h.count(t, `SELECT count(*) FROM samples WHERE source = 'api-1' AND at = $1::timestamp AT TIME ZONE 'UTC'`,
			moment); n != 1 {
			t.Errorf("the pointer is at %s, which has %d samples", moment, n)
		}
		b.click("1 hour")
		b.waits("Pending messages")
		b.run(chromedp.Click(chromedp.CSS("summary")))
		b.until(`document.querySelectorAll("tbody tr").length === 120`)
		b.accessible("the table, " + l.String())
	}
	b := h.browser(t, c, h.Tokens.Admin, look{})
	b.open("/console/consumers")
	b.act("Pause") // the button of the first consumer, followercounts
	b.open("/console/day")
	b.waits("followercounts paused")
	if n := h.count(t, `SELECT count(*) FROM samples WHERE figures ->> 'paused followercounts' = '1'`); n == 0 {
		t.Error("no sample has the pause")
	}
	if n, want := eval[int](b, `document.querySelectorAll("line.mark").length`), 9; n != want {
		t.Errorf("%d marks, want %d: %s", n, want, b.text())
	}
	b.accessible("a mark")
	b.open("/console/")
	b.waits("Truth and outbox")
	b.until(`document.querySelectorAll(".box .spark").length >= 4`)
	b.accessible("the overview with lines")
}
