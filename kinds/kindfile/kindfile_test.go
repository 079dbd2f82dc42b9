package kindfile_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
)

func TestAFileOfKindsIsCheckedAsAWholeWithLines(t *testing.T) {
	for _, c := range []struct{ name, file, want string }{
		{"no file", ``, "the file is empty: `{}` is a file without kinds"},
		{"not YAML", "edges: [", "line 1: did not find expected node content"},
		{"a tab", "edges:\n\tplay: {}\n",
			"line 2: found character that cannot start any token: indent with spaces, not tabs, and quote a value that starts " +
				"with @, % or `"},
		{"two documents", "{}\n---\n{}\n", "line 2: this is a second document: want one"},
		{"unknown and mistyped members", "objects: {song: songs}\nedges:\n  plays: {plurals: x,\n    partitions: many}\n",
			"line 3: there is no member \"plurals\"\nline 4: cannot unmarshal !!str `many` into int"},
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
		{"forms of ids", "objects:\n  song: {plural: songs, id: number}\n  disc: {id: uuid}\n  band: [bands]\n" +
			"  choir: {plural: choirs, ids: uuid}\n",
			"line 4: cannot unmarshal !!seq\nline 5: there is no member \"ids\""},
		{"another form of ids", "objects:\n  song: {plural: songs, id: number}\n  disc: {id: uuid}\n",
			"line 2: objects.song.id: \"number\": want string, integer or uuid\nline 3: objects.disc: is missing"},
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
				"line 10: children.note.attributes.e.enum: x: want integers from -9007199254740991 to 9007199254740991\n" +
				"line 10: children.note.attributes.e.enum: \"x\" is repeated\n" +
				"line 10: children.note.attributes.e.enum: y z: want integers from -9007199254740991 to 9007199254740991\n" +
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
			"reverse: fans}\nchildren:\n  comment: {plural: comments, parent: post, one_per_author: true}\n",
			"line 1: objects.user.plural: users is built in and cannot be changed to people, because clients have it compiled in\n" +
				"line 3: edges.like.reverse: likers is built in and cannot be changed to fans, because clients have it compiled in\n" +
				"line 5: children.comment.one_per_author: false is built in and cannot be changed to true, because clients have " +
				"it compiled in"},
		{"words of changed built-in kinds", "edges:\n  follow: {partitions: 16}\n  block: {plural: follows, from: user, to: post, " +
			"forward: x, reverse: y}\n", `line 3: edges.block.plural: "follows" is taken by the edges follow`},
		{"attributes of built-in kinds", "children: {review: {attributes: {rating: {type: text}}}}\n",
			`line 1: children.review.attributes.rating.type: "text": want string, integer or boolean`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := kindfile.Extend(kinds.Builtin(), []byte(c.file))
			if err == nil {
				t.Fatal("the file is accepted")
			}
			if diff := cmp.Diff(strings.Split(c.want, "\n"), strings.Split(err.Error(), "\n")); diff != "" {
				t.Error(diff)
			}
		})
	}
}
