package console_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/outbox"
)

func TestTheArchiveIsShownHeldAndReleased(t *testing.T) {
	t.Parallel()
	h := start(t)
	ada, rea, amy := h.signIn(t, h.Tokens.Admin), h.signIn(t, h.Tokens.Reader), h.signIn(t, h.Tokens.TenantAdmin)
	if _, err := h.pool.Exec(t.Context(), `INSERT INTO outbox_archive_exports (export_id, from_id, month, url, state, rows, bytes,
		exported_at, verified_at, first_occurred, last_occurred, content_sha256, manifest_sha256)
	  VALUES ('20300101t000000.000000z-ab', 1, '2030-01-01', 'file:///cold', 'COMPLETE', 12345, 3145728, now(), now(), now(), now(), '\x00',
	  '\x00')`); err != nil {
		t.Fatal(err)
	}
	page(t, rea, "/console/archive").says("50,000,001", "No hold is in force", "20300101t000000.000000z-ab", "12,345", "3.0",
		"verified").without("hold.add")
	if a := amy.get("/console/archive"); a.status != http.StatusForbidden {
		t.Errorf("a tenant's token opens the archive: %d", a.status)
	}
	list := page(t, ada, "/console/archive")
	ada.act(list.link("Add a hold"), "tenant", "7", "from", "2030-13").says("A month is written 2030-01")
	ada.act(list.link("Add a hold"), "tenant", "7", "from", "2030-02", "to", "2030-01").says("The last month is before the first one")
	ada.act(list.link("Add a hold"), "tenant", "7", "from", "2030-01", "to", "2030-02").says("done",
		"Hold 1 keeps the archive of tenant 7 from 2030-01 to 2030-02.")
	holds, err := outbox.Holds(t.Context(), h.pool, true)
	if err != nil || len(holds) != 1 || holds[0].TenantID != 7 || holds[0].CreatedBy != "ada" ||
		holds[0].Reason != "because the test says so" {
		t.Errorf("holds: %+v, %v", holds, err)
	}
	list = page(t, ada, "/console/archive").says("the archive of tenant 7 from 2030-01 to 2030-02", "because the test says so")
	release := list.link("Release")
	ada.act(release).says("done", "Hold 1 is released")
	if a := ada.get(release); a.status != http.StatusNotFound {
		t.Errorf("a hold that was released: %d", a.status)
	}
	page(t, ada, "/console/archive").says("No hold is in force")
	page(t, ada, "/console/archive?all=yes").says("by ada")
}

func TestAPersonIsErasedWithAScanAsItsProof(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.declare(t)
	d.write(t, "5", "41", "words of 41")
	d.write(t, "5", "42", "words of 42")
	d.deliver(t)
	d.exec(t, `DELETE FROM outbox_messages`) // no relay runs here, and an erasure would wait for one
	ada, rea := d.signIn(t, d.Tokens.Admin), d.signIn(t, d.Tokens.Reader)
	page(t, rea, "/console/erasure").says("There are no erasures").without("erasure.start")
	list := page(t, ada, "/console/erasure")
	scan := ada.act(list.link("Scan"), "tenant", "7", "author", "41").says("done", "Nothing was changed. Found: ", "children 1",
		"threadcache 1", "archiver 1")
	form := page(t, ada, scan.link("Erase a person")).says("Found: ", "children 1", "threadcache 1", "To confirm, type 41")
	if a := ada.post("/console/act/erasure.start", form.form("reason", "asked for", "confirm", "14")); a.status !=
		http.StatusUnprocessableEntity || !strings.Contains(a.text(), "To confirm, type 41.") {
		t.Errorf("an erasure without the id: %d %s", a.status, a.text())
	}
	for _, way := range []string{"", "&continue=yes"} {
		if a := ada.get("/console/act/erasure.start?tenant=7&author=99" + way); a.status != http.StatusConflict {
			t.Errorf("an erasure without a scan%s: %d", way, a.status)
		}
	}
	if got := d.states(t, d.write(t, "5", "41", "later words of 41")...); got[0] != "VISIBLE 1" {
		t.Errorf("a scan changed %v", got)
	}
	d.deliver(t)
	d.exec(t, `DELETE FROM outbox_messages`)
	if a := ada.post("/console/act/erasure.start", form.form("reason", "asked for", "tenant", "7",
		"author", "a,b")); a.status != http.StatusUnprocessableEntity {
		t.Errorf("an invalid user id: %d", a.status)
	}
	// an erasure of a user with events would wait for a relay, so erase a user without any
	scan = ada.act(list.link("Scan"), "tenant", "7", "author", "99").says("Found: nothing")
	ada.act(scan.link("Erase a person")).says("done",
		"A scan of all stores found nothing more. Redacted: nothing.")
	all, err := erasure.List(t.Context(), d.pool, nil, 10)
	if err != nil || len(all) != 1 || all[0].AuthorID != "99" || all[0].FinishedAt == nil || all[0].RequestedBy != "ada" ||
		all[0].Reason != "because the test says so" {
		t.Errorf("the record: %+v, %v", all, err)
	}
	page(t, rea, "/console/erasure").says("99", "erased", "ada", "because the test says so", "nothing")
	d.exec(t, `INSERT INTO erasures (tenant_id, author_id, requested_by, counts) VALUES (7, 42, 'ann', '{"children": 12345}')`)
	page(t, ada, "/console/erasure").says("not finished", "children 12,345", "Continue", "Scan again")
	page(t, ada, "/console/act/erasure.start?tenant=7&author=42").says("To confirm, type 42") // it has begun: no scan
	if a := d.signIn(t, d.Tokens.TenantAdmin).get("/console/erasure"); a.status != http.StatusForbidden {
		t.Errorf("a tenant's token opens it: %d", a.status)
	}
}
