//go:build browser

package console_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
)

// TestTheTailInTheBrowserStandsStillUnderThePointer writes events while the page is open, points at
// a row, and opens it.
func TestTheTailInTheBrowserStandsStillUnderThePointer(t *testing.T) {
	h := start(t)
	h.events0(t, 3)
	page(t, h.signIn(t, h.Tokens.Admin), "/console/doctor") // reads anew: the header of the page does not move
	c := chromium(t)
	for i, l := range []look{{}, {Phone: true, Dark: true}} {
		b := h.browser(t, c, h.Tokens.TenantReader, l)
		b.open("/console/")
		b.waits("Overview")
		b.chord("e")
		b.waits("follow/3")
		b.until(`Number(document.documentElement.dataset.live) > 0`)
		b.accessible("the tail, " + l.String())
		h.appends(t, tenant, "like", "created", 70+10*i)
		b.waits(fmt.Sprint("like/", 70+10*i))
		h.appends(t, 8, "like", "created", 5)

		at := eval[struct{ X, Y float64 }](b, `(r => ({X: r.x + 20, Y: r.y + r.height / 2}))(
			document.querySelector("tbody tr").getBoundingClientRect())`)
		b.run(chromedp.MouseEvent(chromedp.MouseMoved, at.X, at.Y))
		b.until(`document.querySelector("[data-hold]:hover")`)
		h.appends(t, tenant, "like", "created", 71+10*i)
		b.until(`document.getElementById("live").ariaBusy === "true"`)
		first := eval[string](b, `document.querySelector("tbody tr").innerText`)
		if !strings.Contains(first, fmt.Sprint("like/", 70+10*i)) {
			t.Errorf("the rows move under the pointer: %s", first)
		}
		b.run(chromedp.MouseEvent(chromedp.MouseMoved, 5, 5))
		b.waits(fmt.Sprint("like/", 71+10*i))
		b.conforms("after the pointer has left")

		b.run(chromedp.SetValue(chromedp.CSS("#kind"), "follow"))
		b.click("Find")
		b.until(`document.querySelectorAll("tbody tr").length === 3`)
		b.run(chromedp.Click(chromedp.CSS("tbody a")))
		b.waits("follow.created of follow/3")
	}
}
