package event

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// objectOf reads the last token of a subject of ObjectSubject, by its rule.
func objectOf(t *testing.T, token string) ID {
	t.Helper()
	if encoded, is := strings.CutPrefix(token, "_"); is {
		id, err := base64.RawURLEncoding.DecodeString(encoded)
		if err != nil {
			t.Fatalf("%s: %v", token, err)
		}
		return ID(id)
	}
	return ID(token)
}

func TestASubjectNamesAnyObjectInOneToken(t *testing.T) {
	uuid, long := "0196b2d4-7c00-7000-8000-000000000001", strings.Repeat("x", MaxIDBytes)
	for id, want := range map[ID]string{"42": "42", "a_b-C": "a_b-C", "-_": "-_", ID(uuid): uuid, ID(long): long,
		"_": "_Xw", "_42": "_XzQy", "a.b": "_YS5i", "auth0|7": "_YXV0aDB8Nw", "~~~": "_fn5-", "me@example.com": "_bWVAZXhhbXBsZS5jb20"} {
		if got, want := ObjectSubject("live", 7, "comment", "created", id), "live.t7.comment.created."+want; got != want {
			t.Errorf("%q: got %s, want %s", id, got, want)
		}
	}
	for a := range 256 { // every id of one and of two characters
		for b := -1; b < 256; b++ {
			text := []byte{byte(a)}
			if b >= 0 {
				text = append(text, byte(b))
			}
			id, err := ParseID(string(text))
			if err != nil {
				continue
			}
			of, is := strings.CutPrefix(ObjectSubject("live", 7, "*", "*", id), "live.t7.*.*.")
			if !is || !isPlainToken(of) || objectOf(t, of) != id {
				t.Errorf("%q: the token is %q", id, of)
			}
		}
	}
}

func TestTheMessagesOfAnObjectDecodeLikeThoseOfTheStream(t *testing.T) {
	for _, typ := range [][2]string{{"comment", "created"}, {"t5", "t5"}, {"task", "t7"}, {"created", "created"}} {
		for _, id := range []ID{"42", "created", "t7", "t5", "task", "_", "a.b", "live.t7.comment.created"} {
			want := Event{ID: "00000000-0001-8f46-9cd0-3550f4453cf8", TenantID: 7, AggregateType: typ[0], AggregateID: id, Type: typ[1],
				Version: 1, OccurredAt: when, Payload: []byte("{}"), OutboxID: 1}
			for _, subject := range []string{ObjectSubject("live", 7, typ[0], typ[1], id), want.Subject("events", 0),
				"live.t7." + typ[0] + "." + typ[1]} {
				got, err := Decode(subject, want.Headers(), want.Payload)
				if d := cmp.Diff(want, got); d != "" || err != nil {
					t.Errorf("%s with the id %s: %v %s", subject, id, err, d)
				}
			}
			if _, err := Decode(ObjectSubject("live", 7, typ[0], typ[1], id+"x"), want.Headers(), want.Payload); err == nil {
				t.Errorf("the subject of %sx with the id %s is decoded", id, id)
			}
		}
	}
}
