package redact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tidings/tidings/event"
)

const (
	redactID = "0196b2d4-7c00-7000-8000-00000000000a"
	secret   = "what the author wrote"
)

// redactable is a comment's payload as a SQL writer might have written it.
const redactable = `{"comment_id": "` + redactID +
	`", "post_id": "42", "parent_id": "0196b2d4-7c00-7000-8000-00000000000b", "slug": "abcd2345",
	"path": "0632f8a0000000abcd2344/0632f8a0000001abcd2345", "author_id": "7", "body": "` + secret +
	`", "author_state": "ACTIVE", "moderation_state": "NONE",
	"version": 2, "created_at": "2026-05-01T12:30:00.123456Z", "updated_at": "2026-05-01T12:30:00.123456Z",
	"actor": "user:7", "reason": "` + secret + `"}`

func commentOf(payload string) (c event.Comment, err error) {
	e := event.Event{ID: "id", TenantID: 1, AggregateType: event.AggregateComment, AggregateID: "42", Type: event.Edited, Version: 1,
		Payload: json.RawMessage(payload)}
	return c, e.DecodePayload(&c)
}

// oddForms are forms in which a writer may name the comment. The strict decoder refuses all of
// them, and an erasure finds the comment in each.
var oddForms = map[string]string{
	"in upper case":          strings.ToUpper(redactID),
	"without hyphens":        strings.ReplaceAll(redactID, "-", ""),
	"in braces":              "{" + redactID + "}",
	"as a URN":               "urn:uuid:" + redactID,
	"as a URN in upper case": "URN:UUID:" + strings.ToUpper(redactID),
	"with other dashes":      "0196-b2d4-7c00-7000-8000-0000-0000-000a",
	"with blanks":            " " + redactID + "\n",
}

func TestOnlyTheOneFormOfIDsIsDecoded(t *testing.T) {
	if c, err := commentOf(redactable); err != nil || c.CommentID != redactID || c.AuthorID != "7" {
		t.Fatalf("%+v, %v", c, err)
	}
	quoted := func(s string) string { b, _ := json.Marshal(s); return string(b) }
	bad := map[string][2]string{
		"an author with a blank":  {`"7"`, `"7 "`},
		"an author without an id": {`"7"`, `""`},
		"author in decimals":      {`"7"`, `7700.0`},
		"author as a number":      {`"7"`, `7`},
		"no author":               {`"author_id"`, `"writer_id"`},
		"no comment":              {`"comment_id"`, `"id"`},
		"another post":            {`"42"`, `"43"`},
		"no post":                 {`"post_id"`, `"post"`},
		"parent in upper case":    {"00000000000b", "00000000000B"},
		"an invalid parent":       {"0196b2d4-7c00-7000-8000-00000000000b", "x"},
	}
	for form, id := range oddForms {
		bad["comment "+form] = [2]string{`"` + redactID + `"`, quoted(id)}
	}
	for what, edit := range bad {
		payload := strings.Replace(redactable, edit[0], edit[1], 1)
		if c, err := commentOf(payload); payload == redactable || !event.IsPermanent(err) {
			t.Errorf("%s: got %+v, %v: want a permanent error", what, c, err)
		}
	}
	for _, parent := range []string{`""`, `null`} {
		if _, err := commentOf(strings.Replace(redactable, `"0196b2d4-7c00-7000-8000-00000000000b"`, parent, 1)); err != nil {
			t.Errorf("without a parent, %s: %v", parent, err)
		}
	}
}

func TestAnErasureFindsACommentInAnyForm(t *testing.T) {
	for form, id := range oddForms {
		quoted, err := json.Marshal(id)
		if err != nil {
			t.Fatal(err)
		}
		payload := strings.Replace(redactable, `"`+redactID+`"`, string(quoted), 1)
		if got := ChildID(commentNames, []byte(payload)); got != redactID {
			t.Errorf("%s: found %q", form, got)
		}
		taken(t, event.Edited, payload)
	}
	for _, none := range []string{``, `null`, `[]`, `"` + redactID + `"`, `{}`, `{"comment_id": null}`, `{"comment_id": 7}`,
		`{"comment_id": "` + redactID + `0"}`, `{"comment_id": "` + strings.Repeat("g", 32) + `"}`} {
		if got := ChildID(commentNames, []byte(none)); got != "" {
			t.Errorf("%s: found %q", none, got)
		}
	}
}

// taken checks that redaction removes the text, whatever the payload claims, and keeps the
// comment's identity.
func taken(t *testing.T, eventType, payload string) {
	t.Helper()
	if IsRedacted(commentNames, eventType, []byte(payload)) {
		t.Errorf("Redacted is true for %s", payload)
	}
	redacted, err := Child(commentNames, []byte(payload))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(redacted, []byte(secret)) || ChildID(commentNames, redacted) != ChildID(commentNames, []byte(payload)) ||
		!IsRedacted(commentNames, eventType, redacted) {
		t.Errorf("payload %s\nredacted to %s", payload, redacted)
	}
	if again, err := Child(commentNames, redacted); err != nil || !bytes.Equal(again, redacted) {
		t.Errorf("redacted twice: %s, %v", again, err)
	}
}

func TestNoPayloadSaysThatItIsRedactedWhenItIsNot(t *testing.T) {
	gone := strings.ReplaceAll(redactable, secret, "")
	for what, payload := range map[string]string{
		"a body beside the mark":             strings.Replace(redactable, "{", `{"erased": true, `, 1),
		"a reason beside the mark":           strings.Replace(redactable, "{", `{"erased": true, "body": "", `, 1),
		"a field that we do not know":        strings.Replace(gone, "{", `{"erased": true, "text": "`+secret+`", `, 1),
		"a body in capitals":                 strings.Replace(gone, "{", `{"erased": true, "Body": "`+secret+`", `, 1),
		"the mark in a comment of capitals":  strings.Replace(redactable, "{", `{"ERASED": true, `, 1),
		"a body that is no string":           strings.Replace(gone, `"body": ""`, `"erased": true, "body": ["`+secret+`"]`, 1),
		"a field that names it, in capitals": strings.Replace(gone, "{", `{"erased": true, "Actor": "`+secret+`", `, 1),
	} {
		t.Run(what, func(t *testing.T) {
			taken(t, event.Edited, payload)
			taken(t, event.Erased, payload) // any writer may make one of these
		})
	}
	erased, err := json.Marshal(event.Comment{CommentID: redactID, PostID: "42", AuthorID: "7", AuthorState: event.AuthorErased})
	if err != nil || !IsRedacted(commentNames, event.Erased, erased) || IsRedacted(commentNames, event.Deleted, erased) {
		t.Errorf("a genuine comment.erased: %s, %v", erased, err)
	}
}

// TestEachFieldOfACommentIsKeptOrTaken: a new field must be assigned to one of the two on purpose.
func TestEachFieldOfACommentIsKeptOrTaken(t *testing.T) {
	names := func(typ reflect.Type) (all []string) {
		for i := range typ.NumField() {
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			all = append(all, name)
		}
		return all
	}
	kept := append([]string{commentNames.ID, commentNames.Parent}, kept...)
	for _, name := range names(reflect.TypeFor[event.Comment]()) {
		if slices.Contains(kept, name) == (name == "reason") {
			t.Errorf("%s is neither kept nor removed", name)
		}
	}
}

var canonical = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// FuzzWhatIsAppliedIsFound: every payload that a consumer applies, an erasure finds by ids that are
// equal as text, and redacts.
func FuzzWhatIsAppliedIsFound(f *testing.F) {
	f.Add(redactable)
	for _, id := range oddForms {
		f.Add(strings.Replace(redactable, redactID, id, 1))
	}
	for _, edit := range []string{`"comment_id"/"Comment_ID"`, `"post_id"/"poſt_id"`, `"7"/"07700"`, `"7"/7700.0`, `"42"/42`,
		`"version"/"VERSION"`, `"parent_id"/"path"`,
		`{/{"Comment_ID": "0196b2d4-7c00-7000-8000-00000000000c", "erased": true, `,
		`"reason"/"COMMENT_ID": "0196b2d4-7c00-7000-8000-00000000000c", "reason"`} {
		from, to, _ := strings.Cut(edit, "/")
		f.Add(strings.Replace(redactable, from, to, 1))
	}
	f.Fuzz(func(t *testing.T, payload string) {
		c, err := commentOf(payload)
		if err != nil {
			return
		}
		if !canonical.MatchString(c.CommentID) || c.ParentID != "" && !canonical.MatchString(c.ParentID) ||
			c.PostID != "42" || c.AuthorID == "" {
			t.Errorf("a consumer applies %+v", c)
		}
		if got := ChildID(commentNames, []byte(payload)); got != c.CommentID {
			t.Errorf("a consumer applies comment %s, but an erasure finds %q", c.CommentID, got)
		}
		redacted, err := Child(commentNames, []byte(payload))
		if err != nil || !IsRedacted(commentNames, event.Edited, redacted) {
			t.Fatalf("redacted: %s, %v", redacted, err)
		}
		without := c
		without.Body, without.Reason, without.Erased = "", "", true
		if got, err := commentOf(string(redacted)); err != nil || fmt.Sprint(got) != fmt.Sprint(without) {
			t.Errorf("redacted: %+v, %v: want %+v", got, err, without)
		}
	})
}

var commentNames = event.ChildNames{ID: "comment_id", Parent: "post_id"}

// TestAnEdgesEndsAreFoundInEveryFormAndRedacted: whatever a payload states about its ends, the
// redacted payload names nobody.
func TestAnEdgesEndsAreFoundInEveryFormAndRedacted(t *testing.T) {
	names := event.EdgeNames{From: "user_id", To: "group_id"}
	for form, from := range map[string]string{
		"as events have it": `"user_id":"7"`, "a number": `"user_id":7`, "in decimals": `"user_id":7.00`,
		"with blanks": `"user_id":" 7\n"`, "twice": `"user_id":"8","User_Id":"7"`,
		"in capitals": `"USER_ID":"7"`, "behind an escape": `"user_id":"\u0037"`,
	} {
		payload := `{` + from + `,"group_id":"42","status":"ACTIVE","version":3,"created_at":"2026-05-01T12:30:00.123456Z",` +
			`"attributes":{"role":"` + secret + `"},"actor":"user:7","more":["7"]}`
		if a, b := Ends(names, []byte(payload)); a != "7" || b != "42" {
			t.Errorf("%s: found %s and %s", form, a, b)
		}
		redacted, err := Edge([]byte(payload))
		if want := `{"status":"ACTIVE","version":3,"created_at":"2026-05-01T12:30:00.123456Z","erased":true}`; err != nil ||
			string(redacted) != want {
			t.Errorf("%s: %s, %v", form, redacted, err)
		}
		if a, b := Ends(names, redacted); a != "" || b != "" {
			t.Errorf("%s: redacted, it names %s and %s", form, a, b)
		}
		if again, err := Edge(redacted); err != nil || !bytes.Equal(again, redacted) {
			t.Errorf("%s: redacted twice: %s, %v", form, again, err)
		}
	}
	for _, id := range []event.ID{"null", "true", "1.0", "auth0|7"} { // as text they are ids like any other
		if a, _ := Ends(names, []byte(`{"user_id":"`+id.String()+`"}`)); a != id {
			t.Errorf("found %q, want %s", a, id)
		}
	}
	for _, payload := range []string{`{}`, `[]`, `7`, `{"user_id":"7/5"}`, `{"user_id":null}`, `{"user_id":["7"]}`,
		`{"user_id":""}`, `{"user_id":true}`, `{"follower_id":"7"}`} {
		if a, b := Ends(names, []byte(payload)); a != "" || b != "" {
			t.Errorf("%s: found %s and %s", payload, a, b)
		}
	}
}
