//go:build browser

package console_test

import (
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/tidings/tidings/internal/testkit"
)

// window opens the page in another window with the same cookies.
func (b *browser) window(path string) *browser {
	b.t.Helper()
	w := &browser{t: b.t, h: b.h}
	ctx, end := chromedp.NewContext(b.ctx, chromedp.WithListener(w.hear))
	b.t.Cleanup(end)
	w.ctx = ctx
	if err := chromedp.Do(w.ctx); err != nil { // the window exists as long as this context
		b.t.Fatalf("open a window: %v", err)
	}
	w.open(path)
	return w
}

// TestAFrozenDatabaseIsShownAsStale has ten windows open, which share one stream: a browser has six
// connections.
func TestAFrozenDatabaseIsShownAsStale(t *testing.T) {
	pg := testkit.PostgresProcess(t)
	h := startOn(t, pg.DB(t), testkit.NATS(t))
	h.declare(t)
	h.pend(t, 4321)
	first := h.browser(t, chromium(t), h.Tokens.Reader, look{})
	first.open("/console/")
	windows := []*browser{first}
	for len(windows) < 10 {
		windows = append(windows, first.window("/console/"))
	}
	for _, w := range windows {
		w.waits("4,321")
		w.until(`document.getElementById("fresh").textContent.startsWith("Live, ")`)
	}
	if n := h.streams.Load(); n != 1 {
		t.Errorf("ten windows of a page have %d streams, want 1", n)
	}
	pg.Freeze(t)
	for _, w := range windows {
		w.until(`/^PostgreSQL does not answer, data of \d\d:\d\d:\d\d$/.test(document.getElementById("fresh").textContent)`)
		if text := w.text(); !strings.Contains(text, "4,321") ||
			!eval[bool](w, `getComputedStyle(document.querySelector("main")).filter === "grayscale(1)"`) {
			t.Errorf("the last data are gone, or not dimmed: %.500s", text)
		}
	}
	first.accessible("a page with old data")
	pg.Thaw(t)
	for _, w := range windows {
		w.until(`document.getElementById("fresh").textContent.startsWith("Live, ") && !document.documentElement.matches(".stale")`)
	}
}

func TestAFrozenNATSIsShownInTheBrowserAsTheCause(t *testing.T) {
	h := startOn(t, testkit.Postgres(t), testkit.NATSProcess(t))
	h.declare(t)
	b := h.browser(t, chromium(t), h.Tokens.Reader, look{})
	b.open("/console/")
	b.waits("No running relay holds partition 0")
	h.nats.Freeze(t)
	b.until(`/^Stale, \d+ s$/.test(document.getElementById("fresh").textContent)`)
	b.waits("NATS is unavailable")
	b.until(`document.querySelector(".findings .findings").innerText.includes("No running relay holds partition 0")`)
	causes := eval[string](b, `[...document.querySelectorAll(".attention > .findings > li > p:first-child")].map(p => p.innerText).join()`)
	if !strings.HasPrefix(causes, "error NATS is unavailable") || strings.Contains(causes, "No running") {
		t.Errorf("the causes are %s", causes)
	}
}
