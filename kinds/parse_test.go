package kinds_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/kinds"
)

func TestAFileOfKindsIsCheckedAsAWholeWithLines(t *testing.T) {
	for _, c := range []struct{ name, file, want string }{
		{"no file", ``, "the file is empty: `{}` is a file without kinds"},
		{"not YAML", "edges: [", "line 1: did not find expected node content"},
		{"two documents", "{}\n---\n{}\n", "line 2: this is a second document: want one"},
		{"unknown and mistyped members", "objects: {song: songs}\nedges:\n  plays: {plurals: x,\n    partitions: many}\n",
			"line 3: field plurals not found\nline 4: cannot unmarshal !!str `many` into int"},
		{"a member twice", "children:\n  note: {plural: notes, parent: post, plural: nots}\n",
			`line 2: mapping key "plural" already defined at line 2`},
		{"every required member is missing", "edges:\n  play: {}\nchildren:\n  note: {}\n",
			"line 2: edges.play.plural: is missing\nline 2: edges.play.from: is missing\nline 2: edges.play.to: is missing\nline 2: " +
				"edges.play.forward: is missing\n" +
				"line 2: edges.play.reverse: is missing\nline 4: children.note.plural: is missing\n" +
				"line 4: children.note.parent: is missing"},
		{"invalid names", "objects: {Song: songs}\nedges:\n  pl-ay: {plural: plays_of_a_song_that_is_quite_long, from: user, to: " +
			"post, forward: Plays, reverse: players}\n",
			`line 1: objects.Song: "Song" is not a valid name: want a lower-case letter, then up to 30 lower-case letters, ` +
				`digits and underscores` + "\n" +
				`line 3: edges.pl-ay: "pl-ay" is not a valid name: want a lower-case letter, then up to 30 lower-case letters, ` +
				`digits and underscores` + "\n" +
				`line 3: edges.pl-ay.plural: "plays_of_a_song_that_is_quite_long" is not a valid name: want ` +
				`a lower-case letter, then up to 30 lower-case letters, digits and underscores` + "\n" +
				`line 3: edges.pl-ay.forward: "Plays" is not a valid name: want a lower-case letter, then up to 30 lower-case letters, ` +
				`digits and underscores`},
		{"reserved words", "objects: {box: outbox}\nedges:\n  thread: {plural: threads, from: user, to: post, forward: " +
			"counts, reverse: summary}\n" +
			"children:\n  heartbeat: {plural: all_beats, parent: post}\n  parent: {plural: versions, parent: post}\n  archive_note: " +
			"{plural: notes, parent: post}\n  note_7: {plural: edges, parent: post}\n",
			`line 1: objects.box: "outbox" is reserved` + "\n" +
				`line 3: edges.thread: "thread" is reserved` + "\n" + `line 3: edges.thread.plural: "threads" is reserved` + "\n" +
				`line 3: edges.thread.forward: "counts" is reserved` + "\n" + `line 3: edges.thread.reverse: "summary" is reserved` + "\n" +
				`line 5: children.heartbeat: "heartbeat" is reserved` + "\n" +
				`line 5: children.heartbeat.plural: "all_beats" is reserved: tables have names like it` + "\n" +
				`line 6: children.parent: "parent_id" is the name of another member of children` + "\n" +
				`line 6: children.parent.plural: "versions" is reserved` + "\n" +
				`line 7: children.archive_note: "archive_note" is reserved: tables have names like it` + "\n" +
				`line 8: children.note_7: "note_7" is reserved: tables have names like it` + "\n" +
				`line 8: children.note_7.plural: "edges" is reserved: tables have names like it`},
		{"unknown objects", "edges:\n  play:\n    plural: plays\n    from: user\n    to: song\n    forward: plays\n    " +
			"reverse: players\nchildren:\n  note: {plural: notes, parent: song}\n",
			`line 5: edges.play.to: the object "song" does not exist: add it to objects` + "\n" +
				`line 9: children.note.parent: the object "song" does not exist: add it to objects`},
		{"ambiguous words", "objects: {fan: follows}\nedges:\n  post: {plural: postings, from: user, to: post, forward: followers, " +
			"reverse: comments}\n" +
			"children:\n  answer: {plural: answers, parent: post}\n  reply: {plural: answers, parent: post}\n  aside: {plural: " +
			"following, parent: post}\n",
			`line 1: objects.fan: "follows" is taken by the edges follow` + "\n" +
				`line 3: edges.post: "post" is taken by the object post` + "\n" +
				`line 3: edges.post.forward: "followers" is taken by the edges follow` + "\n" +
				`line 3: edges.post.reverse: "comments" is taken by the children comment` + "\n" +
				`line 6: children.reply.plural: "answers" is taken by the children answer` + "\n" +
				`line 7: children.aside.plural: "following" is taken by the edges follow`},
		{"ends", "edges:\n  block: {plural: blocks, from: user, to: user, forward: blocked, reverse: blockers}\n" +
			"  play: {plural: plays, from: user, to: post, ends: [status, B], forward: plays, reverse: players, self: " +
			"true, partitions: 257}\n",
			`line 2: edges.block.ends: both ends are "user_id": give two names, as in ` + "`ends: [blocker_id, blocked_id]`\n" +
				`line 3: edges.play.ends: "status" cannot name an end: it is not a valid name, or all edges have a member ` +
				`of this name` + "\n" +
				`line 3: edges.play.ends: "B" cannot name an end: it is not a valid name, or all edges have a member of this name` + "\n" +
				"line 3: edges.play.self: the ends are different objects, so no edge leads to its own origin\n" +
				"line 3: edges.play.partitions: 257: want 0 to 256"},
		{"two filters", "edges:\n  play:\n    plural: plays\n    from: user\n    to: post\n    forward: played\n    reverse: " +
			"players\n    attributes:\n" +
			"      a: {enum: [x], filter: true}\n      b: {enum: [y], filter: true}\n",
			"line 10: edges.play.attributes.b.filter: a kind has at most one filter, and it has a"},
		{"attributes", "children:\n  note:\n    plural: notes\n    parent: post\n    attributes:\n" +
			"      A: {type: string}\n      b: {}\n      c: {type: float}\n      d: {enum: []}\n      e: {enum: [x, x, y " +
			"z], type: integer}\n" +
			"      f: {type: integer, minimum: 2, maximum: 1, max_length: 3}\n      g: {type: string, minimum: 1, aggregate: " +
			"true, filter: true}\n" +
			"      h: {type: boolean, default: true, required: true}\n      i: {type: string, max_length: 4097}\n      j: {type: " +
			"integer, minimum: -9007199254740992}\n" +
			"      k: {type: integer, aggregate: true, maximum: 1000000001}\n",
			`line 6: children.note.attributes.A: "A" is not a valid name: want a lower-case letter, then up to 30 lower-case letters, ` +
				`digits and underscores` + "\n" +
				"line 7: children.note.attributes.b.type: is missing: want string, integer or boolean\n" +
				"line 8: children.note.attributes.c.type: \"float\": want string, integer or boolean\n" +
				"line 9: children.note.attributes.d.type: is missing: want string, integer or boolean\nline 9: " +
				"children.note.attributes.d.enum: has no values\n" +
				"line 10: children.note.attributes.e.enum: only strings have an enum\nline 10: children.note.attributes.e.enum: " +
				"\"x\" is repeated\n" +
				"line 10: children.note.attributes.e.enum: \"y z\": want letters, digits, and `_`, `.`, `-` inside, " +
				"at most 64 characters\n" +
				"line 11: children.note.attributes.f.minimum: 2 is above the maximum, 1\nline 11: children.note.attributes.f.max_length: " +
				"only strings without an enum have a length\n" +
				"line 12: children.note.attributes.g.minimum: only integers have bounds\nline 12: children.note.attributes.g.aggregate: " +
				"only integers of children have aggregates\n" +
				"line 12: children.note.attributes.g.filter: only enums of edges are filters\n" +
				"line 13: children.note.attributes.h.required: an attribute with a default is never missing: remove one of the two\n" +
				"line 14: children.note.attributes.i.max_length: 4097: want 1 to 4096\n" +
				"line 15: children.note.attributes.j.minimum: -9007199254740992: want -9007199254740991 to 9007199254740991\n" +
				"line 16: children.note.attributes.k.maximum: 1000000001: want -1000000000 to 1000000000"},
		{"a filter with a reserved name", "edges:\n  play: {plural: plays, from: user, to: post, forward: plays, reverse: players, " +
			"attributes: {limit: {enum: [a], filter: true}}}\n",
			`line 2: edges.play.attributes.limit: "limit" is reserved: lists have a parameter of this name`},
		{"defaults that do not fit", "edges:\n  play:\n    {plural: plays, from: user, to: post, forward: plays, reverse: players, " +
			"attributes: {\n      a: {enum: [x], default: y},\n" +
			"      b: {type: integer, default: 1.5},\n      c: {type: integer, maximum: 5, default: 6},\n      d: {type: boolean, " +
			"default: 1},\n      e: {type: string, default: 1}}}\n",
			"line 4: edges.play.attributes.a.default: expected value to be one of \"x\"\nline 5: " +
				"edges.play.attributes.b.default: expected integer\n" +
				"line 6: edges.play.attributes.c.default: expected number <= 5\nline 7: edges.play.attributes.d.default: expected " +
				"boolean\nline 8: edges.play.attributes.e.default: expected string"},
		{"changed built-in kinds", "objects: {user: people}\nedges:\n  like: {plural: likes, from: user, to: post, forward: likes, " +
			"reverse: fans}\nchildren:\n  comment: {plural: comments, parent: post}\n",
			"line 1: objects.user: is built in and cannot be changed; give the new one another name\nline 3: edges.like: is built in and " +
				"cannot be changed; give the new one another name\n" +
				"line 5: children.comment: is built in and cannot be changed; give the new one another name"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := kinds.Builtin().Extend([]byte(c.file))
			if err == nil {
				t.Fatal("the file is accepted")
			}
			if diff := cmp.Diff(strings.Split(c.want, "\n"), strings.Split(err.Error(), "\n")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

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
	s, err := kinds.Builtin().Extend([]byte(music))
	if err != nil {
		t.Fatal(err)
	}
	if len(s.AllEdges()) != 6 || len(s.AllChildren()) != 4 || s.Objects["song"] != "songs" || s.Objects["user"] != "users" {
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

	// The database keeps the kinds that are not built in, as JSON, which is also YAML.
	kept, err := json.Marshal(s.Without(kinds.Builtin()))
	if err != nil {
		t.Fatal(err)
	}
	again, err := kinds.Builtin().Extend(kept)
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
	s, err := kinds.Builtin().Extend([]byte(`
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
`))
	if err != nil {
		t.Fatal(err)
	}
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
