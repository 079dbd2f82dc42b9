//go:build browser

package console_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/ops/console"
)

// TestTimesInABrowserAreRelative shows times by the script and by the server, which agree. The
// title has the exact time. A time grows old while the page stays open.
func TestTimesInABrowserAreRelative(t *testing.T) {
	h := start(t)
	b := h.browser(t, chromium(t), h.Tokens.Admin, look{})
	now := time.Date(2030, 6, 1, 12, 0, 0, 0, time.UTC)
	eval[*bool](b, fmt.Sprintf(`Date.now = () => %d, null`, now.UnixMilli()))
	for _, since := range []time.Duration{0, 59 * time.Second, time.Minute, 59 * time.Minute, time.Hour, 47 * time.Hour, 48 * time.Hour,
		59 * 24 * time.Hour, 60 * 24 * time.Hour, -30 * time.Second, -5 * time.Hour, -364 * 24 * time.Hour} {
		at := now.Add(-since)
		exact := at.Format("2006-01-02T15:04:05.000000Z")
		eval[*bool](b, `document.querySelector("main").innerHTML =
			'<time datetime="`+exact+`"><span class="scripted"></span></time>', null`)
		b.until(`document.querySelector("main time").title`)
		if got, want := b.text(), console.Relative(at, now); got != want {
			t.Errorf("%s ago: the script says %q, the server %q", since, got, want)
		}
		if title := eval[string](b, `document.querySelector("main time").title`); !strings.Contains(title, exact) {
			t.Errorf("the title is %q, want %s in it", title, exact)
		}
	}
	eval[*bool](b, fmt.Sprintf(`Date.now = () => %d, null`, now.Add(364*24*time.Hour-3*time.Minute).UnixMilli()))
	b.until(`document.querySelector("main").innerText === "in 3 min"`)
}
