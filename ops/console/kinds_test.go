package console_test

import (
	"bytes"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/store"
)

// music declares an object, a kind of edges and a kind of children.
const music = `objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players, attributes: {mood: {enum: [calm, loud]}}}
children:
  remark: {plural: remarks, parent: song}
`

// file returns the file of kinds in the form.
func (a *answer) file() string {
	for n := range a.doc.Descendants() {
		if n.Type == html.ElementNode && n.Data == "textarea" && attr(n, "name") == "file" && n.FirstChild != nil {
			return n.FirstChild.Data
		}
	}
	return ""
}

// TestAFileOfKindsIsUploaded sends a form as a browser without scripts does. The file replaces the
// field, and the plan's form has it in the field.
func TestAFileOfKindsIsUploaded(t *testing.T) {
	t.Parallel()
	h := openDesk(t)
	ada := h.signIn(t, h.Tokens.Admin)
	const apply = "/console/act/kinds.apply"
	form := page(t, ada, apply).form("reason", "a shop for music")
	send := func(file string, in url.Values) *answer {
		t.Helper()
		var body bytes.Buffer
		w := multipart.NewWriter(&body)
		for name, values := range in {
			for _, value := range values {
				if err := w.WriteField(name, value); err != nil {
					t.Fatal(err)
				}
			}
		}
		part, err := w.CreateFormFile("file_upload", "kinds.yaml")
		if err == nil {
			_, err = io.WriteString(part, file)
		}
		if err := errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.url+apply, &body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", w.FormDataContentType())
		return ada.do(req)
	}
	large := strings.Repeat("# too large\n", 30_000)
	for _, a := range []*answer{send(large, form), ada.post(apply, page(t, ada, apply).form("file", large))} {
		if a.says("The form is too large"); a.status != http.StatusRequestEntityTooLarge {
			t.Errorf("a large file: status %d", a.status)
		}
	}
	send("\x00\xff", form).says("This is not a file of kinds")
	file := strings.Replace(music, "children:", "  admire: {plural: admires, from: user, to: user, self: true, "+
		"ends: [admirer_id, admired_id], forward: admires, reverse: admirers}\nchildren:", 1)
	plan := send(file, form).says("The plan", "edges.play: added")
	if plan.status != http.StatusOK || plan.file() != file || !strings.Contains(plan.body, `enctype="multipart/form-data"`) {
		t.Errorf("the plan: status %d, %q\n%s", plan.status, plan.file(), plan.body)
	}
	in := plan.form("reason", "a shop for music", "file", file)
	if other := send("objects: {song: songs}\n", in).says("The plan"); other.form().Get("seen") == in.Get("seen") {
		t.Errorf("another file is applied under the plan of the first: %s", other.text())
	}
	ada.ended(send("", in)).says("done", "Applied version ", "4 changes") // without a file the field counts
	page(t, ada, "/console/kinds").says("admires, admirers lead to itself applied")
}

// TestAChangeOfKindsIsPlannedAndApplied pastes a file, sees its plan, applies it, and then removes
// what it added. Nothing changes before the reader has seen the plan that is applied.
func TestAChangeOfKindsIsPlannedAndApplied(t *testing.T) {
	t.Parallel()
	h := openDesk(t)
	ada := h.signIn(t, h.Tokens.Admin)
	const apply = "/console/act/kinds.apply"
	form := page(t, ada, page(t, ada, "/console/kinds").link("Change the kinds")).says("You see the plan before anything changes.")
	if got := form.file(); got != "{}\n" {
		t.Errorf("the form begins with %q", got)
	}
	send := func(file string, pairs ...string) *answer {
		t.Helper()
		return ada.post(apply, form.form(append([]string{"reason", "a shop for music", "file", file}, pairs...)...))
	}
	applied := func() (n int) {
		t.Helper()
		all, err := catalog.History(t.Context(), h.pool)
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	for file, want := range map[string]string{"edges: {play: 1}": "This is not a file of kinds:", "{}": "there is nothing to change",
		"  ": "File: a value is required."} {
		if a := send(file).says(want); a.status != http.StatusUnprocessableEntity {
			t.Errorf("%s: status %d", file, a.status)
		}
	}
	plan := send(music).says("The plan", "edges.play: added", "children.remark: added", "objects.song: added", "Apply")
	if plan.status != http.StatusOK || plan.file() != music || applied() != 0 {
		t.Errorf("the plan: status %d, %d versions, file %q", plan.status, applied(), plan.file())
	}
	send(music + "# " + strings.Repeat("x", 100_000) + "\n").says("The plan")
	seen := plan.form().Get("seen")
	other := send(strings.Replace(music, "loud", "wild", 1), "seen", seen).says("The plan")
	if other.form().Get("seen") == seen || applied() != 0 {
		t.Errorf("another file is applied under the plan of the first: %s", other.text())
	}
	ada.ended(send(music, "seen", seen)).says("done", "Applied version ", "3 changes", "a shop for music")
	page(t, ada, "/console/kinds").says("play", "remark", "a shop for music", "edges.play: added")
	if all, err := catalog.History(t.Context(), h.pool); err != nil || len(all) != 1 || all[0].By != "ada" ||
		all[0].Reason != "a shop for music" {
		t.Errorf("%+v, %v", all, err)
	}

	// The form begins with the file in force. The reader types how many changes remove kinds.
	form = page(t, ada, apply)
	send(form.file()).says("there is nothing to change")
	edges := music[:strings.Index(music, "children:")]
	less := send(edges).says("children.remark: removed", "To confirm, type 1",
		"removes or restricts kinds, which have no rows: 1 change.")
	seen = less.form().Get("seen")
	send(edges, "seen", seen, "confirm", "2").says("To confirm, type 1.")
	if applied() != 1 {
		t.Fatal("applied without a confirmation")
	}
	ada.ended(send(edges, "seen", seen, "confirm", "1")).says("done", "1 change")

	// Rows prevent a change, and the page names them.
	out, err := h.store.PutEdges(t.Context(), tenant, testkit.Kinds(t, music).Edges["play"],
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "ann"}, From: "1", To: "2"}})
	if err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	form = page(t, ada, apply)
	send("{}").says("The change is refused, and nothing was changed:", "edges.play: removed: refused, because play has rows in")
	page(t, ada, "/console/kinds").says("play")
	for _, token := range []string{h.Tokens.TenantAdmin, h.Tokens.Moderator} {
		r := h.signIn(t, token)
		page(t, r, "/console/kinds").without("kinds.apply")
		if a := r.post(apply, form.form("reason", "r", "file", music)); a.status != http.StatusForbidden {
			t.Errorf("somebody who may not: %d", a.status)
		}
	}
}
