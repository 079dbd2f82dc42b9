package console_test

import (
	"net/http"
	"net/url"
	"slices"
	"testing"

	"github.com/google/uuid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/store"
)

// TestADecisionOnAllIsUndone undoes a decision on all of an author before and after the archiver
// has recorded it. It leaves alone what somebody decided since, and what the act did not decide.
func TestADecisionOnAllIsUndone(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.settings(t, store.ThreadSettings{Object: "5", Premoderated: true})
	ids := d.write(t, "5", "1", "first", "second", "third")
	other := d.write(t, "5", "2", "of another author")
	d.deliver(t)
	max, mo, rita := d.signIn(t, d.Tokens.TenantModerator), d.signIn(t, d.Tokens.Moderator), d.signIn(t, d.Tokens.TenantReader)
	queue := page(t, max, "/console/moderation")
	max.decide(queue, "remove", "because the test says so", other[0]+"@1").says("Removed 1 comment").without("Undo all of it")
	all := max.act(page(t, max, "/console/moderation?author=1").link("Decide on all that match"), "decide", "Remove")
	all.says("Removed 3 comments.")
	link := all.link("Undo all of it")
	page(t, rita, all.path).without("Undo all of it")
	page(t, max, link).says("remove all pending comments of author 1", "pending again", "Removed 3 comments.")
	max.act(link).says("3 comments: the archiver has not recorded the decision yet. Undo again in a moment.", "failed")
	d.deliver(t)
	d.report(t, ids[1], event.ModerationHidden, "somebody else decides")
	d.deliver(t)
	mo.act(link).says("Held 2 comments. 1 comment changed since that act.", "done")
	d.deliver(t)
	if got, want := d.states(t, append(ids, other...)...),
		[]string{"PENDING 3", "HIDDEN 3", "PENDING 3", "REMOVED 2"}; !slices.Equal(got, want) {
		t.Errorf("states %v, want %v", got, want)
	}
	max.act(link).says("Held 0 comments. 3 comments changed since that act.")
	page(t, max, "/console/decisions").says("because the test says so", "somebody else decides")
}

// TestOnlyADecisionOnAllIsUndone sends forms with other acts, and with an act of another tenant.
func TestOnlyADecisionOnAllIsUndone(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	act := func(name string, tenant int64, outcome string) string {
		a := audit.Act{ActID: uuid.New(), TenantID: tenant, TokenName: "max", Fingerprint: "0123456789ab", Name: name,
			Target: "remove all pending comments", Reason: "r"}
		if _, _, err := audit.Begin(t.Context(), d.pool, a); err != nil {
			t.Fatal(err)
		}
		if outcome != "" {
			if err := audit.Finish(t.Context(), d.pool, a.ActID, outcome, false); err != nil {
				t.Fatal(err)
			}
		}
		return a.ActID.String()
	}
	max := d.signIn(t, d.Tokens.TenantModerator)
	for id, want := range map[string]int{
		"no-id": http.StatusUnprocessableEntity, uuid.NewString(): http.StatusNotFound,
		act("moderation.decide", tenant, "Removed 3 comments."):     http.StatusUnprocessableEntity,
		act("moderation.decide_all", tenant, ""):                    http.StatusUnprocessableEntity,
		act("moderation.decide_all", tenant, "Removed 0 comments."): http.StatusUnprocessableEntity,
		act("moderation.decide_all", 8, "Removed 3 comments."):      http.StatusNotFound,
		act("moderation.decide_all", tenant, "Removed 3 comments."): http.StatusOK,
	} {
		if a := max.get("/console/act/moderation.undo?act=" + url.QueryEscape(id)); a.status != want {
			t.Errorf("%s: status %d, want %d: %s", id, a.status, want, a.text())
		}
	}
}

// TestACardTellsWhatAModeratorNeeds shows what an item replies to, and its author's record.
func TestACardTellsWhatAModeratorNeeds(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	said := d.write(t, "6", "3", "the words before")
	by := store.Meta{Actor: "service"}
	out, err := d.store.CreateChildren(t.Context(), tenant, comment,
		[]store.NewChild{{Meta: by, Object: "6", AuthorID: "1", Body: "an answer", ReplyTo: said[0]}})
	if err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	more := d.write(t, "6", "1", "good", "bad", "quiet")
	d.report(t, more[0], event.ModerationApproved, "fine")
	d.report(t, more[1], event.ModerationRemoved, "rude")
	d.report(t, said[0], event.ModerationHidden, "a quarrel")
	d.report(t, out[0].Child.ID, event.ModerationPending, "a quarrel")
	d.deliver(t)
	page(t, d.signIn(t, d.Tokens.TenantModerator), "/console/moderation").says("replies to 3 hidden the words before", "an answer",
		"1 approved, 1 removed of 4", "just now")
	page(t, d.signIn(t, d.Tokens.TenantReader), "/console/moderation").says("replies to 3").without("the words before", "an answer")
}
