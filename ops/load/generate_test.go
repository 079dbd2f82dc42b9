package load

import (
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/client"
)

func TestGenerate(t *testing.T) {
	for _, c := range []struct {
		name string
		spec Spec
	}{
		{"a sparse graph", graph(1000, 5000, 1)},
		{"fewer edges than users", graph(1000, 10, 1)},
		{"one edge", graph(2, 1, 3)},
		{"every user follows every other", graph(30, 30*29, 1)},
		{"all but one edge", graph(30, 30*29-1, 1)},
		{"a dense graph", graph(100, 5000, 9)},
		{"few targets", Spec{Origins: 1000, Targets: 3, Edges: 2000, Seed: 1}},
		{"one origin", Spec{Origins: 1, Targets: 50, Edges: 50, Seed: 1}},
		{"one pair", Spec{Origins: 1, Targets: 1, Edges: 1, Seed: 1}},
		{"every pair", Spec{Origins: 30, Targets: 20, Edges: 600, Seed: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[Edge]bool{}
			var all []Edge
			for e := range Generate(c.spec) {
				if c.spec.NoSelf && e.From == e.To || number(t, e.From) < 1 || number(t, e.To) < 1 ||
					number(t, e.From) > int(c.spec.Origins) || number(t, e.To) > int(c.spec.Targets) {
					t.Fatalf("edge %v", e)
				}
				if seen[e] {
					t.Fatalf("edge %v came twice", e)
				}
				seen[e] = true
				all = append(all, e)
			}
			if int64(len(all)) != c.spec.Edges {
				t.Errorf("%d edges, want %d", len(all), c.spec.Edges)
			}
			if d := cmp.Diff(all, slices.Collect(Generate(c.spec))); d != "" {
				t.Error("two calls with the same spec make different graphs")
			}
		})
	}
}

func number(t *testing.T, id client.ID) int {
	t.Helper()
	n, err := strconv.Atoi(string(id))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestGeneratedDegreesAreSkewed(t *testing.T) {
	const users, edges = 10_000, 100_000
	followers, following := make([]int, users+1), make([]int, users+1)
	for e := range Generate(graph(users, edges, 7)) {
		followers[number(t, e.To)]++
		following[number(t, e.From)]++
	}
	for name, degrees := range map[string][]int{"followers": followers, "following": following} {
		slices.Sort(degrees)
		slices.Reverse(degrees)
		top, median := 0, degrees[users/2]
		for _, d := range degrees[:users/100] {
			top += d
		}
		// An even graph would give the first hundredth 1 % of the edges, and each user about ten.
		if top < edges/10 || degrees[0] < 15*median || median < 1 {
			t.Errorf("%s: the first hundredth has %d of %d, the first %d, the median %d", name, top, edges, degrees[0], median)
		}
	}
}

func TestAnotherSeedIsAnotherGraph(t *testing.T) {
	if cmp.Equal(slices.Collect(Generate(graph(100, 200, 1))), slices.Collect(Generate(graph(100, 200, 2)))) {
		t.Error("another seed makes the same graph")
	}
}

func TestSpecOfEdges(t *testing.T) {
	all := &Kinds{Objects: []struct{ Name, Plural, ID string }{{"user", "users", "string"}, {"post", "posts", "uuid"}}}
	all.Children = []ChildKind{{Name: "comment", Plural: "comments", Parent: "post"}}
	pin := EdgeKind{Name: "pin", From: "user", To: "post", ToIDs: "uuid"}
	for _, c := range []struct {
		kind EdgeKind
		spec string
		want Spec // zero for an error
	}{
		{follows, "users=10,edges=20,seed=3", graph(10, 20, 3)},
		{pin, "users=10,posts=5,edges=50", Spec{Origins: 10, Targets: 5, Edges: 50, Seed: 1, ToIDs: "uuid"}},
		{EdgeKind{From: "user", To: "user", Self: true}, "users=1,edges=1", Spec{Origins: 1, Targets: 1, Edges: 1, Seed: 1}},
		{kind: pin, spec: "users=10,posts=5,edges=51"},
		{kind: pin, spec: "users=10,edges=1"},
		{kind: EdgeKind{Name: "nod", From: "user", To: "comment"}, spec: "users=10,comments=5,edges=1"},
		{kind: pin, spec: "users=10,posts=5,pins=1"},
		{kind: follows, spec: ""},
		{kind: follows, spec: "users=10"},
		{kind: follows, spec: "users=1,edges=1"},
		{kind: follows, spec: "users=3,edges=7"},
		{kind: follows, spec: "users=3,edges=-1"},
		{kind: follows, spec: "users=x,edges=1"},
		{kind: follows, spec: "users=3,edges=1,sed=1"},
	} {
		got, err := all.EdgeSpec(c.kind, c.spec)
		if (err != nil) != (c.want == Spec{}) || err == nil && got != c.want {
			t.Errorf("%s of %+v: %+v, %v, want %+v", c.spec, c.kind, got, err, c.want)
		}
	}
}

func TestGeneratedIDsHaveTheFormOfTheirObject(t *testing.T) {
	all := &Kinds{Objects: []struct{ Name, Plural, ID string }{{"user", "users", "uuid"}, {"post", "posts", "integer"}},
		Edges: []EdgeKind{{Name: "pin", From: "user", To: "post"}}, Children: []ChildKind{{Name: "note", Plural: "notes", Parent: "user"}}}
	uuids, integers := regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`), regexp.MustCompile(`^[1-9][0-9]*$`)
	pin, _ := all.Edge("pin")
	spec, err := all.EdgeSpec(pin, "users=10,posts=5,edges=50")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[Edge]bool{}
	for e := range Generate(spec) {
		seen[e] = true
		if !uuids.MatchString(string(e.From)) || !integers.MatchString(string(e.To)) {
			t.Errorf("%+v", e)
		}
	}
	note, _ := all.Child("note")
	plan := GenerateChildren(note, ChildSpec{Objects: 3, Children: 20, Seed: 1})
	if author, parent := plan.Child(7).AuthorID, plan.id(2); len(seen) != 50 || !uuids.MatchString(string(author)) ||
		parent != "00000000-0000-4000-8000-000000000003" {
		t.Errorf("%d edges, author %s, parent %s", len(seen), author, parent)
	}
}

func BenchmarkGenerate(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		for range Generate(graph(100_000, 1_000_000, 1)) {
		}
	}
}
