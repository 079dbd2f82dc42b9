//go:build browser

package console_test

import (
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/tidings/tidings/consumers"
)

// TestTheOverviewInABrowserKeepsItsPlace opens the overview on a small phone, with paused
// consumers. Its text stays in the boxes, and what the header says of its age moves nothing.
func TestTheOverviewInABrowserKeepsItsPlace(t *testing.T) {
	h := start(t)
	h.sample(t)
	for _, name := range []string{"followercounts", "threadcache"} {
		if _, err := consumers.Pause(t.Context(), h.pool, name, consumers.Paused{Actor: "ann", Reason: "the test"}); err != nil {
			t.Fatal(err)
		}
	}
	page(t, h.signIn(t, h.Tokens.Admin), "/console/doctor") // reads anew, as sample does
	c := chromium(t)
	for _, width := range []int64{375, 1280} {
		b := h.browser(t, c, h.Tokens.Admin, look{})
		b.run(chromedp.EmulateViewport(width, 800))
		b.open("/console/")
		b.until(`Number(document.documentElement.dataset.live) > 0`)
		for _, out := range eval[[]string](b, `[...document.querySelectorAll(".box")].flatMap(g => {
			const box = g.querySelector("rect").getBoundingClientRect();
			return [...g.querySelectorAll("text")].filter(e => {
				const r = e.getBoundingClientRect();
				return r.left < box.left || r.right > box.right || r.top < box.top || r.bottom > box.bottom;
			}).map(e => e.textContent);
		})`) {
			t.Errorf("%d pixels wide: %q leaves its box", width, out)
		}
		for _, out := range eval[[]string](b, `(edge => [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll") &&
			e.getBoundingClientRect().right > edge).map(e => e.outerHTML.slice(0, 200))
		)(document.querySelector("main").getBoundingClientRect().right)`) {
			t.Errorf("%d pixels wide: %s leaves the page", width, out)
		}
		for _, text := range []string{"Live, 12 s ago", "Stale, 14 s", "PostgreSQL does not answer, data of 12:34:56"} {
			eval[*bool](b, `document.getElementById("fresh").textContent = "`+text+`", null`)
			b.still(text)
		}
		b.conforms("the overview")
	}
}
