package kinds_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

const music = `
objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players,
    attributes: {mood: {enum: [calm, loud], filter: true}, times: {type: integer, default: 1}}}
  block: {plural: blocks, from: user, to: user, ends: [blocker_id, blocked_id], forward: blocked, reverse: blockers}
  like: {plural: likes, from: user, to: post, forward: likes, reverse: likers}
children:
  remark: {plural: remarks, parent: song, threaded: true, one_per_author: true,
    attributes: {stars: {type: integer, minimum: 1, maximum: 5, aggregate: true}}}
`

func TestAFileExtendsTheBuiltInKinds(t *testing.T) {
	s := testkit.Kinds(t, music)
	if len(s.AllEdges()) != 8 || len(s.AllChildren()) != 4 || s.Objects["song"] != "songs" || s.Objects["user"] != "users" {
		t.Errorf("%d edges, %d children, objects %v", len(s.AllEdges()), len(s.AllChildren()), s.Objects)
	}
	play, _ := s.Edge("play")
	if play.Ends != [2]string{"user_id", "song_id"} || play.NoSelf() || !cmp.Equal(play.Filters(), []string{"mood"}) {
		t.Errorf("a play is %+v", play)
	}
	if block, _ := s.Edge("block"); !block.NoSelf() {
		t.Error("a user may block themselves")
	}
	if remark, _ := s.Child("remark"); !cmp.Equal(remark.Aggregates(), []string{"stars"}) {
		t.Errorf("a remark is %+v", remark)
	}

	// The database keeps the kinds that are not built in, as JSON.
	kept, err := json.Marshal(s.Without(kinds.Builtin()))
	if err != nil {
		t.Fatal(err)
	}
	again, err := kinds.Builtin().ExtendJSON(kept)
	if err != nil {
		t.Fatal(err)
	}
	if twice, err := json.Marshal(again.Without(kinds.Builtin())); err != nil || string(twice) != string(kept) {
		t.Errorf("%v\n%s\n%s", err, kept, twice)
	}
	if strings.Contains(string(kept), "like") || strings.Contains(string(kept), "posts") {
		t.Errorf("%s has built-in kinds", kept)
	}
}

func TestAttributesAreCheckedAndHaveOneForm(t *testing.T) {
	s := testkit.Kinds(t, `
edges:
  play:
    plural: plays
    from: user
    to: post
    forward: plays
    reverse: players
    attributes:
      mood: {enum: [calm, loud], default: calm}
      times: {type: integer, required: true, minimum: 1, maximum: 9}
      note: {type: string, max_length: 3}
      long: {type: string}
      live: {type: boolean}
`)
	play, _ := s.Edge("play")
	for _, c := range []struct {
		name, in, want string
		bad            []kinds.FieldError
	}{
		{name: "defaults and order", in: `{"times": 3.0, "note": "<é>", "live": false}`,
			want: `{"live":false,"mood":"calm","note":"<é>","times":3}`},
		{name: "none given", in: ``, bad: []kinds.FieldError{{"/times", "expected required property times to be present"}}},
		{name: "not an object", in: `[1]`, bad: []kinds.FieldError{{"", "expected object"}}},
		{name: "null", in: `null`, bad: []kinds.FieldError{{"", "expected object"}}},
		{name: "every error at once", in: `{"times": 10, "mood": "sad", "note": "four", "live": 1, "a/b": 1}`, bad: []kinds.FieldError{
			{"/a~1b", "unexpected property"}, {"/live", "expected boolean"}, {"/mood", `expected value to be one of "calm, loud"`},
			{"/note", "expected length <= 3"}, {"/times", "expected number <= 9"}}},
		{name: "null is no value", in: `{"times": null}`, bad: []kinds.FieldError{{"/times", "expected integer"}}},
		{name: "a number that takes megabytes", in: `{"times": 1e999999}`,
			bad: []kinds.FieldError{{"/times", "expected a number of at most 32 characters without an exponent"}}},
		{name: "a character that PostgreSQL cannot store", in: `{"times": 1, "long": "a\u0000b"}`,
			bad: []kinds.FieldError{{"/long", "expected no character U+0000"}}},
		{name: "too much", in: `{"times": 1, "long": "` + strings.Repeat("x", 4096) + `"}`,
			bad: []kinds.FieldError{{"", "expected at most 4096 bytes"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := play.Check(json.RawMessage(c.in))
			var bad *kinds.AttributeError
			if errors.As(err, &bad) != (c.bad != nil) {
				t.Fatalf("%s, %v", got, err)
			}
			if bad != nil {
				if diff := cmp.Diff(c.bad, bad.Fields); diff != "" {
					t.Error(diff)
				}
			} else if string(got) != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}

	if _, err := play.Check(json.RawMessage(`{"times": 1`)); !errors.As(err, new(*kinds.AttributeError)) {
		t.Errorf("half an object: %v", err)
	}
	like, _ := s.Edge("like")
	if got, err := like.Check(json.RawMessage(`{}`)); got != nil || err != nil {
		t.Errorf("of a kind without attributes: %s, %v", got, err)
	}
	if _, err := like.Check(json.RawMessage(`{"x": 1}`)); err == nil {
		t.Error("a kind without attributes accepts one")
	}
	if got, err := (kinds.Edge{Attributes: play.Attributes}).Check(json.RawMessage(`{"times": 2}`)); err != nil ||
		string(got) != `{"mood":"calm","times":2}` {
		t.Errorf("of a kind that no file has: %s, %v", got, err)
	}
}

// Contracts have the schema, so a client that checks it gets the answer of the server.
func TestAttributesFitIfTheyFitTheirSchema(t *testing.T) {
	least, most := int64(-2), int64(9)
	k := kinds.Child{Attributes: map[string]kinds.Attribute{
		"mood": {Type: kinds.String, Enum: []any{"calm", "loud"}},
		"vote": {Type: kinds.Integer, Enum: []any{int64(-1), int64(1)}}, "note": {Type: kinds.String, MaxLength: 3},
		"text": {Type: kinds.String}, "live": {Type: kinds.Boolean, Required: true}, "any": {Type: kinds.Integer},
		"some": {Type: kinds.Integer, Minimum: &least, Maximum: &most}, "sum": {Type: kinds.Integer, Aggregate: true}}}
	text, err := json.Marshal(k.Schema())
	if err != nil {
		t.Fatal(err)
	}
	read := func(text []byte) any {
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		return doc
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("x.json", read(text)); err != nil {
		t.Fatal(err)
	}
	s := c.MustCompile("x.json")
	for _, name := range []string{"mood", "note", "text", "live", "any", "some", "sum", "other", "a/b"} {
		for _, v := range []string{`null`, `true`, `"calm"`, `"sad"`, `""`, `"é€𝄞"`, `"four"`, `1`, `1.0`, `-0`, `1.5`, `-2`, `-3`, `9`,
			`10`, `9.5`, `9007199254740991`, `9007199254740992`, `-9007199254740992`, `1000000001`, `-1000000000.0`,
			`99999999999999999999`, `[]`, `{}`} {
			for _, format := range []string{`{%q: %s}`, `{"live": false, %q: %s}`} {
				in := fmt.Appendf(nil, format, name, v)
				_, got := k.Check(in)
				if want := s.Validate(read(in)); (got == nil) != (want == nil) {
					t.Errorf("%s: %v, but by the schema: %v", in, got, want)
				}
			}
		}
	}
}

func TestAChangeOfAttributesIsMergedOverThoseThatAreThere(t *testing.T) {
	m, _ := kinds.Builtin().Edge("membership")
	for _, c := range []struct{ present, change, want string }{
		{``, `{"role": "owner"}`, `{"role":"owner"}`},
		{`{"role": "owner"}`, `{}`, `{"role":"owner"}`},
		{`{"role": "owner"}`, `{"role": null}`, `{"role":"member"}`},
	} {
		got, err := m.Patch(json.RawMessage(c.present), json.RawMessage(c.change))
		if err != nil || string(got) != c.want {
			t.Errorf("%s over %s: %s, %v; want %s", c.change, c.present, got, err, c.want)
		}
	}
	for _, change := range []string{`null`, `[]`, `{"role": "king"}`, `{"other": 1}`, `{`} {
		if got, err := m.Patch(nil, json.RawMessage(change)); !errors.As(err, new(*kinds.AttributeError)) {
			t.Errorf("%s: %s, %v", change, got, err)
		}
	}
	r, _ := kinds.Builtin().Child("review")
	if _, err := r.Patch(json.RawMessage(`{"rating": 3}`), json.RawMessage(`{"rating": null}`)); err == nil {
		t.Error("a required attribute was taken away")
	}
}

func TestTheSchemaOfAttributesIsJSONSchema(t *testing.T) {
	r, _ := kinds.Builtin().Child("review")
	got, err := json.Marshal(r.Schema())
	want := `{"additionalProperties":false,"properties":{"rating":{"maximum":5,"minimum":1,"type":"integer"}},` +
		`"required":["rating"],"type":"object"}`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v; want %s", got, err, want)
	}
}
