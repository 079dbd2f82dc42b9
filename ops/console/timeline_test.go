package console_test

import (
	"strings"
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/store"
)

// TestAHistoryIsReadAsATimeline reads who did what to a comment, when and why, with the difference
// of its words for those who may read them, and finds the event of each version.
func TestAHistoryIsReadAsATimeline(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.write(t, "5", "1", "the quick brown fox jumps")[0]
	by, body := store.Meta{Actor: "ann"}, "the slow brown fox sleeps well"
	if out, err := d.store.EditChildren(t.Context(), tenant, comment,
		[]store.ChildEdit{{Meta: by, ID: id, Body: &body}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	d.report(t, id, event.ModerationPending, "links")
	d.report(t, id, event.ModerationRemoved, "rude words")
	d.deliver(t)
	max, rita := d.signIn(t, d.Tokens.TenantModerator), d.signIn(t, d.Tokens.TenantReader)
	path := "/console/inspect?kind=comment&id=" + id
	a := page(t, max, path+"&payload=show").says("removed by spam-rule", ": rude words", "held by spam-rule", ": links", "edited by ann",
		"wrote by service", "the slow brown fox sleeps well")
	want := `the <del>quick</del> <ins>slow</ins> brown fox <del>jumps</del> <ins>sleeps well</ins>`
	if !strings.Contains(a.body, want) {
		t.Errorf("the page lacks %s: %s", want, a.body)
	}
	if n := strings.Count(a.body, `class="words"`); n != 2 {
		t.Errorf("%d versions show words, want the first and the edited one: %s", n, a.text())
	}
	if h, side := strings.Index(a.body, "<h2>History"), strings.Index(a.body, "<h2>Truth beside"); h < 0 || h > side {
		t.Error("the history is not before the comparison")
	}
	if strings.Contains(a.body, `<details class="diff" open>`) || !strings.Contains(a.body, `<details class="diff">`) {
		t.Errorf("a comparison of what is the same is not folded: %s", a.text())
	}
	for link, says := range map[string]string{"Event 4": "moderated", "Event 2": "edited", "Event 1": "created"} {
		list := page(t, max, a.link(link)).says(says)
		if n := strings.Count(list.body, `<tr id="e-`); n != 1 {
			t.Errorf("%s leads to %d events: %s", link, n, list.text())
		}
	}
	page(t, max, path).says("edited by ann").without("brown")
	page(t, rita, path+"&payload=show").says("edited by ann", "rude words").without("brown")
	d.exec(t, `UPDATE child_lists SET version = 9 WHERE child_id = '`+id+`'`)
	if a := page(t, max, path); strings.Count(a.body, `<details class="diff" open>`) != 1 {
		t.Error("a difference is folded")
	}
}
