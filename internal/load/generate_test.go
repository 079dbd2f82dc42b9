package load

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestGenerate(t *testing.T) {
	for _, c := range []struct {
		name string
		spec Spec
	}{
		{"a sparse graph", Spec{1000, 5000, 1}},
		{"fewer edges than users", Spec{1000, 10, 1}},
		{"one edge", Spec{2, 1, 3}},
		{"everybody follows everybody", Spec{30, 30 * 29, 1}},
		{"all but one edge", Spec{30, 30*29 - 1, 1}},
		{"a dense graph", Spec{100, 5000, 9}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[Edge]bool{}
			var all []Edge
			for e := range Generate(c.spec) {
				if e.From == e.To || e.From < 1 || e.To < 1 || e.From > c.spec.Users || e.To > c.spec.Users {
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
				t.Error("another graph the second time")
			}
		})
	}
}

func TestGeneratedDegreesAreSkewed(t *testing.T) {
	const users, edges = 10_000, 100_000
	followers, following := make([]int, users+1), make([]int, users+1)
	for e := range Generate(Spec{users, edges, 7}) {
		followers[e.To]++
		following[e.From]++
	}
	for name, degrees := range map[string][]int{"followers": followers, "following": following} {
		slices.Sort(degrees)
		slices.Reverse(degrees)
		top, median := 0, degrees[users/2]
		for _, d := range degrees[:users/100] {
			top += d
		}
		// An even graph would give the first hundredth 1 % of the edges, and everybody about ten.
		if top < edges/10 || degrees[0] < 15*median || median < 1 {
			t.Errorf("%s: the first hundredth has %d of %d, the first %d, the median %d", name, top, edges, degrees[0], median)
		}
	}
}

func TestAnotherSeedIsAnotherGraph(t *testing.T) {
	if cmp.Equal(slices.Collect(Generate(Spec{100, 200, 1})), slices.Collect(Generate(Spec{100, 200, 2}))) {
		t.Error("the same graph")
	}
}

func TestParseSpec(t *testing.T) {
	got, err := ParseSpec("users=10,edges=20,seed=3")
	if err != nil || got != (Spec{10, 20, 3}) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "users=10", "users=1,edges=1", "users=3,edges=7", "users=3,edges=-1", "users=x,edges=1", "users=3,edges=1,sed=1"} {
		if got, err := ParseSpec(bad); err == nil {
			t.Errorf("%q: %v, want an error", bad, got)
		}
	}
}

func BenchmarkGenerate(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		for range Generate(Spec{100_000, 1_000_000, 1}) {
		}
	}
}
