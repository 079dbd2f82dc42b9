package console_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/tokens"
)

func TestTheEventPageTakesTypesAndIdsOfComments(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.declare(t)
	id := d.write(t, "5", "41", "مرحبا")[0]
	max := d.signIn(t, d.Tokens.TenantModerator)
	page(t, max, "/console/event?q=comment.created").says("comment/5")
	page(t, max, "/console/event?q=comment.deleted").says("No event matches.").without("comment/5")
	page(t, max, "/console/event?q="+id).says("This is the id of a comment, and not of an event.", "the aggregate comment/5", "Inspect it")
	page(t, d.signIn(t, d.Tokens.Reader), "/console/event?q="+id).says("No such event", "For the id of a comment, enter its tenant.")
	var event string
	const written = `SELECT event_id FROM outbox_messages WHERE aggregate_type = 'comment'`
	if err := d.pool.QueryRow(t.Context(), written).Scan(&event); err != nil {
		t.Fatal(err)
	}
	shown := page(t, max, "/console/event?payload=show&q="+event).says("Actor service", `"actor": "service"`)
	if !strings.Contains(shown.body, `<pre class="payload" dir="auto"`) {
		t.Error("the payload has no direction of its own")
	}

	// a mistake keeps the form
	for _, q := range []string{"what", "99999999999999999999", "EVENTS-9:1", "comment/a,b"} {
		a := max.get("/console/event?q=" + q)
		if a.status != http.StatusUnprocessableEntity {
			t.Errorf("%s: status %d", q, a.status)
		}
		a.says("The request is not valid.", "Or leave it empty and search by kind, type, state and time.")
		if got := a.form().Get("q"); got != q {
			t.Errorf("the form has %q, want %q", got, q)
		}
	}
}

// TestARotatedTokenLivesAsLongAsItsPredecessor also creates tokens, for which an operator names the
// tenant.
func TestARotatedTokenLivesAsLongAsItsPredecessor(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada := h.signIn(t, h.Tokens.Admin)
	life := func(name string) (d time.Duration) {
		t.Helper()
		all, err := tokens.List(t.Context(), h.pool, tenant)
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range all {
			if one.Name == name && one.Replaced == nil && one.Expires != nil {
				d = one.Expires.Sub(one.Created).Round(time.Hour)
			}
		}
		return d
	}
	create := "/console/act/token.create"
	if got := page(t, ada, create).form().Get("tenant"); got != "" {
		t.Errorf("the form begins with tenant %q", got)
	}
	ada.act(create, "name", "importer").says("Tenant: a value is required.")
	ada.act(create, "name", "importer", "tenant", "7", "days", "90").says("done")
	ada.act("/console/act/token.rotate?tenant=7&name=importer").says("done")
	if got := life("importer"); got != 90*24*time.Hour {
		t.Errorf("the token after one of 90 days lives for %s", got)
	}
	ada.act("/console/act/token.rotate?tenant=7&name=importer", "days", "30").says("done")
	if got := life("importer"); got != 30*24*time.Hour {
		t.Errorf("a token of 30 days lives for %s", got)
	}
	ada.act("/console/act/token.rotate?tenant=7&name=importer", "days", "").says("done")
	if got := life("importer"); got != 0 {
		t.Errorf("a token without end lives for %s", got)
	}
	if got := page(t, ada, "/console/act/token.rotate?tenant=7&name=importer").form().Get("days"); got != "" {
		t.Errorf("the token after one without end is to live for %s days", got)
	}
}

func TestOneSearchTakesAnything(t *testing.T) {
	t.Parallel()
	h := start(t)
	amy, rita := h.signIn(t, h.Tokens.TenantAdmin), h.signIn(t, h.Tokens.TenantReader)
	for text, want := range map[string]string{
		"":                                     "/console/",
		"dead letters":                         "/console/dead-letters",
		"Audit log":                            "/console/audit",
		"user 42":                              "/console/inspect?id=42&kind=user",
		"comment/135":                          "/console/event?q=comment%2F135",
		"EVENTS-0:17":                          "/console/event?q=EVENTS-0%3A17",
		"comment.created":                      "/console/event?q=comment.created",
		"0123456789ab":                         "/console/tokens?all=yes",
		"00000000-0000-4000-8000-000000000001": "/console/event?q=00000000-0000-4000-8000-000000000001",
		"what?":                                "/console/event?q=what%3F",
		"Doctor":                               "/console/event?q=Doctor", // a page of operators
		" user 4 ":                             "/console/inspect?id=4&kind=user",
	} {
		if a := amy.get("/console/find?q=" + url.QueryEscape(text)); a.path != want {
			t.Errorf("%q leads to %s, want %s", text, a.path, want)
		}
	}
	if a := rita.get("/console/find?tenant=7&q=" + url.QueryEscape("user 42")); a.path != "/console/inspect?id=42&kind=user&tenant=7" {
		t.Errorf("the search forgets the tenant: %s", a.path)
	}
	id := tokens.Fingerprint(h.Tokens.TenantAdmin)
	if a := page(t, amy, "/console/tokens?all=yes"); !strings.Contains(a.body, `id="t-`+id+`"`) {
		t.Errorf("the list of tokens has no place %s", id)
	}
}
