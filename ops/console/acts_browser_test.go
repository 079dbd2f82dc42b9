//go:build browser

package console_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// actCase is an act that the test does with the mouse.
type actCase struct {
	before func() // prepares the act
	by     string // one of the harness's tokens; empty: the system's admin
	page   string // the page with its button
	first  string // a link to click before the button
	button string
	in     string            // XPath of the part of the page with the button; empty: the whole page
	fill   map[string]string // fields of the form
	upload map[string]string // fields that take a file with this text
	check  []string          // boxes to click
	says   string            // the outcome
	want   string            // a condition in SQL that the act makes true
	plan   string            // what the form shows before the reader confirms again
	secret bool              // the outcome shows a token once
}

// sampleActs fills the database for the cases. Each act of the registry has one case.
func (d *desk) sampleActs(t *testing.T) map[string]actCase {
	t.Helper()
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true})
	held := d.write(t, "5", "1", "the first to wait", "the second")
	d.write(t, "8", "3", "words of 3", "more words of 3")
	d.settings(t, store.ThreadSettings{Object: "9", Premoderated: true})
	all := d.write(t, "9", "4", "one of many", "another of many")
	if out, err := d.store.PutEdges(t.Context(), tenant, kinds.Builtin().Edges["follow"],
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "ann"}, From: "1", To: "2"}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	d.publish(t)
	d.deliver(t)
	d.exec(t, `UPDATE edge_counts SET incoming = 9 WHERE object_id = '2'`)
	d.bury(t, 900_001, 3, tenant, "too large", "")
	d.bury(t, 910_001, 2, tenant, "no stream", "")
	d.bury(t, 920_001, 2, tenant, "to be noted", "")
	d.exec(t, `INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, total, worker, lease_until)
	  VALUES ($1, 7, 'retry', '{}', 'amy', 50000, 'other', 'infinity')`, operation)
	if _, err := consumers.Pause(t.Context(), d.pool, "threadcache", consumers.Paused{Actor: "ann", Reason: "the test"}); err != nil {
		t.Fatal(err)
	}
	if _, err := outbox.AddHold(t.Context(), d.pool, outbox.ArchiveHold{TenantID: 9, CreatedBy: "ann", Reason: "a dispute"}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"old", "leaked"} {
		if _, err := tokens.Create(t.Context(), d.pool, tenant, name, []string{tokens.RoleRead}, time.Time{}); err != nil {
			t.Fatal(err)
		}
	}
	for i, id := range []int{7001, 7002} {
		d.fails(t, tenant, id, 3+i, "no stream for 7001", time.Duration(i+1)*time.Hour)
	}
	amy, max := d.Tokens.TenantAdmin, d.Tokens.TenantModerator
	return map[string]actCase{
		"dead_letter.retry": {by: amy, page: "/console/dead-letters", first: "too large", button: "Retry all",
			says: "Retried 3 dead letters.",
			want: `(SELECT count(*) = 3 FROM outbox_messages WHERE event_type = 'made' AND attempts = 0) AND NOT EXISTS ` +
				`(SELECT FROM outbox_messages_dlq WHERE cause = 'too large')`},
		"dead_letter.discard": {by: amy, page: "/console/dead-letters/letter?source=outbox&id=910001", button: "Discard",
			says: "Discarded 1 dead letter.",
			want: `(SELECT array_agg(id) = '{910002}' FROM outbox_messages_dlq WHERE cause = 'no stream')`},
		"dead_letter.stop": {page: "/console/dead-letters/operation?source=outbox&id=" + operation, button: "Stop",
			says: "Stopped it after 0 of 50,000.",
			want: `(SELECT stopped_by = 'ada' AND finished_at IS NOT NULL FROM outbox_dlq_operations WHERE total = 50000)`},
		"dead_letter.note": {by: amy, page: "/console/dead-letters", first: "to be noted", button: "Write a note",
			fill: map[string]string{"note": "ask the writers"}, says: "Wrote the note.",
			want: `EXISTS (SELECT FROM dead_letter_notes WHERE tenant_id = 7 AND note = 'ask the writers' AND actor = 'amy')`},
		"message.retry": {by: amy, page: "/console/retrying", in: "//tr[td='post/7001']", button: "Retry now", says: "is due now",
			want: `(SELECT available_at < now() + interval '1 minute' FROM outbox_messages WHERE aggregate_id = '7001')`},
		"message.kill": {by: amy, page: "/console/retrying", in: "//tr[td='post/7002']", button: "Kill", says: "is in the DLQ.",
			want: `(SELECT count(*) = 1 FROM outbox_messages_dlq WHERE aggregate_id = '7002' AND last_error ~ 'killed by amy: because')`},
		"moderation.decide": {by: max, page: "/console/inspect?kind=comment&id=" + held[0], button: "Decide",
			fill: map[string]string{"decide": "Remove"}, says: "Removed 1 comment.",
			want: `(SELECT moderation_state = 'REMOVED' FROM children_comment WHERE child_id = '` + held[0] + `')`},
		"moderation.decide_all": {by: max, page: "/console/moderation?author=4", button: "Decide on all that match",
			fill: map[string]string{"decide": "Approve"}, says: "Approved 2 comments.",
			want: `(SELECT count(*) = 2 FROM children_comment WHERE moderation_state = 'APPROVED' AND child_id IN ('` +
				strings.Join(all, "', '") + `'))`},
		"moderation.undo": {before: func() { d.deliver(t) }, by: max, page: "/console/audit?act=moderation.decide_all",
			first: "moderation.decide_all", button: "Undo all of it", says: "Held 2 comments.",
			want: `(SELECT count(*) = 2 FROM children_comment WHERE moderation_state = 'PENDING' AND version = 3 AND child_id IN ('` +
				strings.Join(all, "', '") + `'))`},
		"thread.settings": {by: max, page: "/console/moderation-threads", button: "Change settings", check: []string{"locked"},
			says: "Locked: yes. Premoderated: yes.",
			want: `EXISTS (SELECT FROM threads WHERE tenant_id = 7 AND version_state = 'LATEST' AND (object ->> 'locked')::boolean)`},
		"inspect.repair": {by: amy, page: "/console/inspect?kind=user&id=2", button: "Repair", says: "Set to the state in the truth",
			want: `(SELECT incoming = 1 FROM edge_counts WHERE object_id = '2')`},
		"consumer.pause": {page: "/console/consumers", in: "//section[@aria-labelledby='c-followercounts']",
			button: "Pause", says: "Paused.",
			want: `EXISTS (SELECT FROM consumer_pauses WHERE consumer_name = 'followercounts' AND actor = 'ada' AND reason = ` +
				`'because the test says so')`},
		"consumer.resume": {page: "/console/consumers", in: "//section[@aria-labelledby='c-threadcache']",
			button: "Resume", says: "Resumed.", want: `NOT EXISTS (SELECT FROM consumer_pauses WHERE consumer_name = 'threadcache')`},
		"consumer.verify": {page: "/console/consumers", in: "//section[@aria-labelledby='c-threadcache']",
			button: "Verify", says: "Compared ",
			want: `EXISTS (SELECT FROM operator_acts WHERE act = 'consumer.verify' AND target = 'threadcache' AND outcome ~ '^Compared ` +
				`[1-9][0-9]* rows: ')`},
		"consumer.replay": {page: "/console/consumers", in: "//section[@aria-labelledby='c-archiver']", button: "Replay",
			says: "Replayed from the ",
			want: `EXISTS (SELECT FROM operator_acts WHERE act = 'consumer.replay' AND target = 'archiver' AND outcome ~ ': ` +
				`[1-9][0-9]* events? applied')`},
		"hold.add": {page: "/console/archive", button: "Add a hold",
			fill: map[string]string{"tenant": "7", "from": "2030-01", "to": "2030-02"},
			says: "keeps the archive of tenant 7 from 2030-01 to 2030-02.",
			want: `EXISTS (SELECT FROM outbox_archive_holds WHERE tenant_id = 7 AND from_month = '2030-01-01' AND to_month = ` +
				`'2030-02-01' AND created_by = 'ada' AND reason = 'because the test says so')`},
		"hold.release": {page: "/console/archive", button: "Release", says: "is released",
			want: `EXISTS (SELECT FROM outbox_archive_holds WHERE tenant_id = 9 AND released_by = 'ada' AND release_reason = ` +
				`'because the test says so')`},
		"erasure.count": {page: "/console/erasure", button: "Scan", fill: map[string]string{"tenant": "7", "author": "3"},
			says: "Nothing was changed. Found: ",
			want: `EXISTS (SELECT FROM operator_acts WHERE act = 'erasure.count' AND outcome LIKE '%children 2%') AND (SELECT count(*) = ` +
				`2 FROM children_comment WHERE author_id = '3' AND body LIKE '%words of 3')`},
		"erasure.start": {before: func() { d.fleet(t) }, page: "/console/audit?act=erasure.count", first: "erasure.count",
			button: "Erase a person", says: "A scan of all stores found nothing more.",
			want: `EXISTS (SELECT FROM erasures WHERE tenant_id = 7 AND author_id = '3' AND finished_at IS NOT NULL AND requested_by = 'ada'
					AND reason = 'because the test says so' AND (counts ->> 'children')::int = 2)
				AND NOT EXISTS (SELECT FROM children_comment WHERE body LIKE '%words of 3')`},
		"kinds.apply": {page: "/console/kinds", button: "Change the kinds", upload: map[string]string{"file": music},
			plan: "edges.play: added", says: "Applied version ",
			want: `to_regclass('edges_play') IS NOT NULL`},
		"token.create": {page: "/console/tokens", button: "Create a token", fill: map[string]string{"tenant": "7", "name": "importer"},
			check: []string{"write"}, says: "Made the token", secret: true,
			want: `EXISTS (SELECT FROM api_tokens WHERE tenant_id = 7 AND name = 'importer' AND roles @> '{read,write}' AND expires_at > ` +
				`now() + interval '364 days')`},
		"token.rotate": {by: amy, page: "/console/tokens", in: "//tr[th='old']", button: "Rotate", fill: map[string]string{"overlap": "3"},
			says: "The token before it works until", secret: true,
			want: `(SELECT count(*) = 2 AND count(replaced_at) = 1 AND min(expires_at) < now() + interval '181 minutes' FROM api_tokens ` +
				`WHERE tenant_id = 7 AND name = 'old')`},
		"token.revoke": {by: amy, page: "/console/tokens", in: "//tr[th='leaked']", button: "Revoke",
			says: `Revoked the token "leaked" of tenant 7: 1 ended.`,
			want: `EXISTS (SELECT FROM api_tokens WHERE tenant_id = 7 AND name = 'leaked' AND revoked_at IS NOT NULL)`},
	}
}

// fleet runs a relay and the consumers until the test ends, because an erasure waits for them.
func (d *desk) fleet(t *testing.T) {
	t.Helper()
	d.exec(t, `DELETE FROM consumer_pauses`)
	system.Start(t, d.relay(t).Run)
	for _, p := range []projections.Projection{followercounts.New(kinds.Builtin), threadcache.New(kinds.Builtin),
		history.New(kinds.Builtin)} {
		deps := consumers.Deps{Pool: d.pool, JetStream: d.js}
		system.Start(t, system.Consumer(t, system.ConsumerConfig(), deps, d.nats.Config(), p).Run)
	}
}

// TestEveryActInTheBrowser follows each act of the registry from the click to the database and the
// audit log. An act without a case fails the test.
func TestEveryActInTheBrowser(t *testing.T) {
	d := openDesk(t)
	cases, names := d.sampleActs(t), d.console.Acts()
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		if !slices.Contains(names, name) {
			t.Errorf("pages.go has no act for the case %q", name)
		}
	}
	c, tabs, all := chromium(t), map[string]*browser{}, t
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			a, ok := cases[name]
			if !ok {
				t.Fatal("sampleActs has no case for this act of pages.go, so no test does it with a mouse")
			}
			if a.by == "" {
				a.by = d.Tokens.Admin
			}
			if a.before != nil {
				a.before()
			}
			if tabs[a.by] == nil {
				tabs[a.by] = d.browser(all, c, a.by, look{})
			}
			tabs[a.by].doAct(t, name, a)
		})
	}
}

// doAct does an act with the mouse and checks its outcome.
func (b *browser) doAct(t *testing.T, name string, a actCase) {
	defer b.tells(b.tells(t))
	is := func() bool { return b.h.count(t, `SELECT (`+a.want+`)::int`) == 1 }
	if is() {
		t.Fatalf("the condition is true before the act: %s", a.want)
	}
	b.expect("status of 404") // an act may end what its page is about
	b.open(a.page)
	if a.first != "" {
		b.click(a.first)
	}
	b.run(chromedp.Click(chromedp.Search(fmt.Sprintf(`%s//*[self::a or self::button][normalize-space(.)=%q]`, a.in, a.button))))
	b.run(chromedp.WaitVisible(chromedp.CSS("#act-reason")))
	b.accessible("the form of " + name)
	for field, value := range a.fill {
		b.run(chromedp.SetValue(chromedp.CSS("#f-"+field), value))
	}
	for field, value := range a.upload {
		path := filepath.Join(t.TempDir(), "mine.yaml")
		if err := os.WriteFile(path, []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
		b.run(chromedp.SetUploadFiles(chromedp.CSS("#u-"+field), []string{path}))
		b.waits("The text above is that of mine.yaml.")
		got := eval[string](b, `document.querySelector("#f-`+field+`").value + document.querySelector("#u-`+field+`").value`)
		if got != value {
			t.Errorf("the field has %q", got)
		}
	}
	for _, value := range a.check {
		b.run(chromedp.Click(chromedp.CSS(`input[type=checkbox][value="` + value + `"]`)))
	}
	why := "because the test says so"
	if a.plan != "" {
		b.run(chromedp.SendKeys(chromedp.CSS("#act-reason"), why),
			chromedp.Click(chromedp.CSS("form.stack .row button")))
		b.waits(a.plan)
		b.accessible("the plan of " + name)
		why = "" // the form keeps it
	}
	eval[*bool](b, `document.querySelectorAll("#confirm").forEach(e => { e.value = e.placeholder; }), null`)
	b.confirm(why)
	b.waits(a.says)
	if shown := strings.Contains(eval[string](b, `document.body.innerText`), "tdg_"); shown != a.secret {
		t.Errorf("the outcome shows a token: %t, want %t", shown, a.secret)
	}
	if !is() {
		t.Errorf("false after the act: %s: the page shows: %.600s", a.want, b.text())
	}
	acts, err := audit.List(t.Context(), b.h.pool, audit.Filter{Name: name}, 10)
	if err != nil || len(acts) != 1 {
		t.Fatalf("%d records, %v: want 1", len(acts), err)
	}
	who := "ada"
	if a.by != b.h.Tokens.Admin {
		who = map[string]string{b.h.Tokens.TenantAdmin: "amy", b.h.Tokens.TenantModerator: "max"}[a.by]
	}
	if r := acts[0]; r.TokenName != who || r.Reason != "because the test says so" || r.Failed || r.Finished == nil ||
		!strings.Contains(r.Outcome, a.says) || r.Target == "" {
		t.Errorf("the audit log has %+v", r)
	}
	from := eval[string](b, `location.pathname`)
	b.click("Back")
	b.until(`document.querySelector("main h1") && ` +
		`(location.pathname !== "` + from + `" || !document.querySelector("#dialog[open], #outcome"))`)
}
