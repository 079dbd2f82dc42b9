package kinds_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
)

const answers = `
objects: {question: questions}
edges:
  verdict: {plural: verdicts, from: user, to: answer, forward: judged_answers, reverse: judges,
    attributes: {value: {enum: [-1, 1], aggregate: true, required: true}, face: {enum: [smile, frown], aggregate: true}}}
  bookmark: {plural: bookmarks, from: user, to: answer, forward: bookmarked_answers, reverse: bookmarkers}
children:
  answer: {plural: answers, parent: question, ranked_by: verdict}
`

func TestEdgesLeadToChildrenAndRankThem(t *testing.T) {
	s := testkit.Kinds(t, answers)
	verdict, _ := s.Edge("verdict")
	if verdict.Ends != [2]string{"user_id", "answer_id"} || s.Plural("answer") != "answers" || s.Plural("user") != "users" {
		t.Errorf("a verdict is %+v", verdict)
	}
	if !cmp.Equal(verdict.Aggregates(), []string{"face", "value"}) {
		t.Errorf("a verdict aggregates %v", verdict.Aggregates())
	}
	if score, ok := verdict.Score(); score != "value" || !ok {
		t.Errorf("the score is %q, %v", score, ok)
	}
	bookmark, _ := s.Edge("bookmark")
	if _, ok := bookmark.Score(); ok {
		t.Error("a kind without attributes sums one")
	}
	if c, ok := s.Ranks(verdict); !ok || c.Name != "answer" {
		t.Errorf("a verdict ranks %q, %v", c.Name, ok)
	}
	if _, ok := s.Ranks(bookmark); ok {
		t.Error("a bookmark ranks answers")
	}
	if to := s.EdgesTo("answer"); len(to) != 2 || to[0].Name != "bookmark" || to[1].Name != "verdict" {
		t.Errorf("the edges to an answer are %v", to)
	}
	for in, want := range map[string]string{
		`{"value": -1.0}`: `{"value":-1}`, `{"value": 1, "face": "smile"}`: `{"face":"smile","value":1}`,
		`{"value": 0}`: "", `{"value": "1"}`: "", `{"value": 1, "face": "1"}`: ""} {
		if got, err := verdict.Check(json.RawMessage(in)); string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%s: %s, %v; want %s", in, got, err, want)
		}
	}

	kept, err := json.Marshal(s.Without(kinds.Builtin()))
	if err != nil {
		t.Fatal(err)
	}
	again, err := kinds.Builtin().ExtendJSON(kept)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s, again); diff != "" {
		t.Error(diff)
	}
	summed := testkit.Kinds(t, strings.Replace(answers, "ranked_by: verdict", "ranked_by: bookmark", 1))
	weighed := testkit.Kinds(t, strings.Replace(strings.Replace(answers, "ranked_by: verdict", "ranked_by: bookmark", 1),
		"reverse: bookmarkers}", "reverse: bookmarkers, attributes: {weight: {type: integer, aggregate: true}}}", 1))
	if c := kinds.Changes(summed, weighed); len(c) != 2 || c[0].Path != "children.answer.ranked_by" ||
		!strings.HasPrefix(c[0].What, "the score is weight: ") || c[0].Kind != "" {
		t.Errorf("%+v", c)
	}
	more := testkit.Kinds(t, strings.Replace(answers, "[-1, 1]", "[-1, 1, 2]", 1))
	if c := kinds.Changes(s, more); len(c) != 1 || c[0].What != "with 2" || c[0].Kind != "" {
		t.Errorf("%+v", c)
	}
	if c := kinds.Changes(more, s); len(c) != 1 || c[0].What != "without 2" || c[0].Kind != "verdict" {
		t.Errorf("%+v", c)
	}
}

func TestWhatCannotBeRankedOrCounted(t *testing.T) {
	const noVerdict, noObject = `there are no edges "verdict" to answers`, `the object %q does not exist`
	for name, c := range map[string]struct{ old, new, want string }{
		"no such edges":           {"ranked_by: verdict", "ranked_by: like", `there are no edges "like" to answers`},
		"edges to another object": {"to: answer, forward: judged", "to: question, forward: judged", noVerdict},
		"two sums":                {"enum: [smile, frown]", "type: integer", "verdict aggregates face and value: want one integer"},
		"mixed values":            {"[-1, 1]", "[-1, one]", "one: want integers"},
		"numbers in words":        {"[smile, frown]", "[smile, 1]", "1: want strings: put it in quotes"},
		"a repeated number":       {"[-1, 1]", "[1, 1]", `"1" is repeated`},
		"too large to sum":        {"[-1, 1]", "[-1, 2000000000]", "2000000000: want integers"},
		"text":                    {"enum: [smile, frown]", "type: string", "only integers and enums of edges"},
		"no such children":        {"to: answer, forward: bookmarked", "to: reply, forward: bookmarked", fmt.Sprintf(noObject, "reply")},
		"a list of every child":   {"reverse: judges", "reverse: replies", `"replies" is reserved`},
		"from a child":            {"user, to: answer, forward: boo", "answer, to: user, forward: boo", fmt.Sprintf(noObject, "answer")},
	} {
		file := strings.Replace(answers, c.old, c.new, 1)
		if file == answers {
			t.Errorf("%s: the file does not have %s", name, c.old)
		}
		if _, err := kindfile.Extend(kinds.Builtin(), []byte(file)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %s", name, err, c.want)
		}
	}
}

// An object that becomes a kind of children of its name gives edges to it another meaning.
func TestEdgesLeadFromNowOnToChildren(t *testing.T) {
	objects := testkit.Kinds(t, `
objects: {song: songs, album: albums}
edges: {play: {plural: plays, from: user, to: song, forward: plays, reverse: players}}
`)
	children := testkit.Kinds(t, `
objects: {album: albums}
edges: {play: {plural: plays, from: user, to: song, forward: plays, reverse: players}}
children: {song: {plural: songs, parent: album}}
`)
	if objects.Edges["play"].ToChild || !children.Edges["play"].ToChild {
		t.Error("the edges do not know what they lead to")
	}
	for _, c := range kinds.Changes(objects, children) {
		if c.Path == "edges.play.to" && c.Kind == "play" {
			return
		}
	}
	t.Errorf("%+v", kinds.Changes(objects, children))
}
