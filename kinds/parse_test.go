package kinds_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/tidings/tidings/event"
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
	if len(s.AllEdges()) != 8 || len(s.AllChildren()) != 4 || s.Objects["song"].Plural != "songs" || s.Objects["user"].Plural != "users" {
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

func TestAnObjectMayNarrowItsIDs(t *testing.T) {
	s := testkit.Kinds(t, `
objects: {song: {plural: songs, id: uuid}, disc: {plural: discs, id: integer}, choir: {plural: choirs, id: string}, band: bands}
edges:
  play: {plural: plays, from: disc, to: song, forward: plays, reverse: players}
children:
  remark: {plural: remarks, parent: song}
`)
	play, _ := s.Edge("play")
	remark, _ := s.Child("remark")
	follow, _ := s.Edge("follow")
	if play.FromIDs != kinds.Integer || play.ToIDs != kinds.UUID || remark.ParentIDs != kinds.UUID || remark.AuthorIDs != kinds.String ||
		follow.FromIDs != kinds.String {
		t.Errorf("%+v\n%+v\n%+v", play, remark, follow)
	}
	kept, err := json.Marshal(s.Without(kinds.Builtin()).Objects)
	want := `{"band":"bands","choir":"choirs","disc":{"plural":"discs","id":"integer"},"song":{"plural":"songs","id":"uuid"}}`
	if err != nil || string(kept) != want {
		t.Errorf("%v\n%s\n%s", err, kept, want)
	}
	again, err := kinds.Builtin().ExtendJSON([]byte(`{"objects":` + want + `}`))
	if err != nil || again.Objects["disc"] != (kinds.Object{Plural: "discs", ID: kinds.Integer}) {
		t.Errorf("%+v, %v", again, err)
	}
	for _, file := range []string{`{"objects":{"song":{"plural":"songs","form":"uuid"}}}`, `{"objects":{"song":7}}`} {
		if _, err := kinds.Builtin().ExtendJSON([]byte(file)); err == nil {
			t.Errorf("%s is accepted", file)
		}
	}
}

func TestAFileMayChangeBuiltInKinds(t *testing.T) {
	s := testkit.Kinds(t, `
objects: {post: {id: uuid}, user: users}
edges:
  follow: {partitions: 16}
  like: {plural: likes, from: user, to: post, forward: likes, reverse: likers}
  membership: {attributes: {role: {enum: [guest, member, owner]}, note: {type: string}}}
children:
  message: {attributes: {mood: {type: string}}}
  review: {plural: reviews, parent: product, one_per_author: true, attributes: {helpful: {type: integer, aggregate: true}}}
  comment: {}
`)
	follow, like, membership := s.Edges["follow"], s.Edges["like"], s.Edges["membership"]
	message, review := s.Children["message"], s.Children["review"]
	if follow.Partitions != 16 || follow.Plural != "follows" || follow.Ends != [2]string{"follower_id", "followee_id"} ||
		like.ToIDs != kinds.UUID || like.FromIDs != kinds.String || s.Children["comment"].ParentIDs != kinds.UUID ||
		s.Objects["post"] != (kinds.Object{Plural: "posts", ID: kinds.UUID}) {
		t.Errorf("%+v\n%+v\n%+v", follow, like, s.Objects)
	}
	// an attribute of a file replaces the one of its name, and the others stay
	if role := membership.Attributes["role"]; len(role.Enum) != 3 || role.Default != nil || role.Filter ||
		membership.Attributes["note"].Type != kinds.String {
		t.Errorf("%+v", membership)
	}
	if message.Attributes["mood"].Type == "" || message.Parent != "conversation" ||
		!cmp.Equal(review.Aggregates(), []string{"helpful", "rating"}) ||
		!review.OnePerAuthor {
		t.Errorf("%+v\n%+v", message, review)
	}
	if b := kinds.Builtin(); b.Edges["follow"].Partitions != 0 || len(b.Edges["membership"].Attributes) != 1 ||
		b.Objects["post"].ID != kinds.String || b.Edges["like"].ToIDs != kinds.String {
		t.Errorf("the built-in kinds have changed: %+v", b)
	}

	// The database keeps the kinds that differ, and reads them again.
	stated := s.Without(kinds.Builtin())
	if !cmp.Equal(slices.Sorted(maps.Keys(stated.Edges)), []string{"follow", "membership"}) || len(stated.Objects) != 1 ||
		!cmp.Equal(slices.Sorted(maps.Keys(stated.Children)), []string{"message", "review"}) {
		t.Errorf("%+v", stated)
	}
	kept, err := json.Marshal(stated)
	if err != nil {
		t.Fatal(err)
	}
	again, err := kinds.Builtin().ExtendJSON(kept)
	if err != nil {
		t.Fatal(err)
	}
	if d := kinds.Changes(s, again); len(d) > 0 || again.Edges["like"].ToIDs != kinds.UUID {
		t.Errorf("%s is read as %+v", kept, d)
	}
	if same := testkit.Kinds(t, `{objects: {user: {id: string}}, edges: {follow: {}, share: {partitions: 0}}}`); len(
		kinds.Changes(kinds.Builtin(), same)) > 0 || len(same.Without(kinds.Builtin()).Edges) > 0 {
		t.Errorf("a file that changes nothing: %+v", same)
	}
}

func TestAnIDHasTheFormOfItsObject(t *testing.T) {
	const id = "0196b2d4-7c00-7000-8000-00000000000a"
	for _, c := range []struct {
		form      kinds.IDForm
		good, bad []string
		rule      string
	}{
		{"", []string{"7", "a|b", id}, []string{"", "a b", ".", strings.Repeat("x", 129)}, "1 to 128 of the characters"},
		{kinds.String, []string{"7", "007", strings.ToUpper(id)}, []string{"a/b"}, "1 to 128 of the characters"},
		{kinds.Integer, []string{"1", "9223372036854775807"},
			[]string{"0", "-1", "+1", "007", "1.0", "1e3", "9223372036854775808", "99999999999999999999", "x", id},
			"a decimal number from 1 to 9223372036854775807"},
		{kinds.UUID, []string{id}, []string{strings.ToUpper(id), strings.ReplaceAll(id, "-", ""), "{" + id + "}", id[:35], id + "0",
			"0196b2d4-7c00-7000-8000-00000000000g", "0196b2d47-c00-7000-8000-00000000000a", "7"}, "a UUID in lower case with hyphens"},
	} {
		pattern := regexp.MustCompile(c.form.Pattern())
		for _, text := range c.good {
			if got, err := c.form.ParseID(text); err != nil || string(got) != text || !pattern.MatchString(text) {
				t.Errorf("%q as %q: %v", text, c.form, err)
			}
		}
		for _, text := range c.bad {
			got, err := c.form.ParseID(text)
			if err == nil || got != "" {
				t.Errorf("%q is an id of the form %q", text, c.form)
			} else if _, any := event.ParseID(text); any == nil &&
				!strings.Contains(err.Error(), fmt.Sprintf("%q is not an id: %s", text, c.rule)) {
				t.Errorf("%q: %v", text, err)
			}
			if pattern.MatchString(text) && text != "9223372036854775808" && text != "." {
				t.Errorf("%q matches %s", text, pattern)
			}
		}
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
