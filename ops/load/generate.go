package load

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// Spec says which graph to generate.
type Spec struct {
	Origins int64 // objects from which edges lead
	Targets int64 // objects to which edges lead
	NoSelf  bool  // true: no edge leads from an id to itself
	Edges   int64 // distinct
	Seed    uint64

	FromIDs, ToIDs string // the forms of the ids; see ID
}

// maxObjects limits the generator's memory: it keeps 16 bytes per origin and per target.
const maxObjects = 50_000_000

// EdgeSpec parses the spec of a kind of edges: "users=N,posts=N,edges=M,seed=S", with the plurals
// of its objects. If both ends are of the same object, it is "users=N,edges=M,seed=S". The default
// of seed is 1. Edges to children cannot be generated.
func (k *Kinds) EdgeSpec(e EdgeKind, s string) (Spec, error) {
	if c, ok := k.Child(e.To); ok {
		return Spec{}, fmt.Errorf("%s lead to %s, whose ids Tidings makes: load them from a file", e.Plural, c.Plural)
	}
	from, _ := k.object(e.From)
	to, _ := k.object(e.To)
	keys := []string{from, to, "edges"}
	if from == to {
		keys = keys[1:]
	}
	v, err := parseSpec(s, keys...)
	if err != nil {
		return Spec{}, err
	}
	spec := Spec{Origins: int64(v[from]), Targets: int64(v[to]), NoSelf: e.NoSelf(), Edges: int64(v["edges"]), Seed: v["seed"],
		FromIDs: e.FromIDs, ToIDs: e.ToIDs}
	return spec, spec.validate(from, to)
}

// parseSpec parses "KEY=N,...,seed=S".
func parseSpec(s string, keys ...string) (map[string]uint64, error) {
	values, want := map[string]uint64{"seed": 1}, ""
	for _, key := range keys {
		values[key] = 0
		want += key + "=N,"
	}
	for _, part := range strings.Split(s, ",") {
		key, value, _ := strings.Cut(part, "=")
		n, err := strconv.ParseUint(value, 10, 63)
		if _, known := values[key]; err != nil || !known {
			return nil, fmt.Errorf("%q: want %sseed=S with numbers", part, want)
		}
		values[key] = n
	}
	return values, nil
}

// most returns how many edges an origin can have.
func (s Spec) most() int64 {
	if s.NoSelf {
		return s.Targets - 1
	}
	return s.Targets
}

func (s Spec) validate(from, to string) error {
	least := int64(1)
	if s.NoSelf {
		least = 2
	}
	for name, n := range map[string]int64{from: s.Origins, to: s.Targets} {
		if n < least || n > maxObjects {
			return fmt.Errorf("%s is %d: want %d to %d", name, n, least, maxObjects)
		}
	}
	if most := s.Origins * s.most(); s.Edges < 1 || s.Edges > most {
		return fmt.Errorf("edges is %d: want 1 to %d, one for every pair", s.Edges, most)
	}
	return nil
}

// The weight of the object at place r is r^-skew. So degrees follow a power law with the exponent
// 1 + 1/skew: about 2.3 for incoming and 2.8 for outgoing edges. Studies of follows in social
// networks report 2 to 3: few users have very many followers, and the numbers of followed users
// differ less.
const (
	incomingSkew = 0.75
	outgoingSkew = 0.55
)

// dense decides how targets are drawn. An origin that leads to more than 1/dense of all targets
// draws them by sorting, any other by rejecting repeated ones.
const dense = 8

// Generate yields the distinct edges of spec, origin by origin. Equal specs yield equal edges. The
// objects with many incoming edges and those with many outgoing edges are drawn independently. spec
// must be a result of EdgeSpec. Memory is 16 bytes per origin and target, for any number of edges.
func Generate(spec Spec) iter.Seq[Edge] {
	return func(yield func(Edge) bool) {
		rnd := rand.New(rand.NewPCG(spec.Seed, 0x7469_6469_6e67_7321))
		byIncoming := rnd.Perm(int(spec.Targets)) // place by incoming edges -> object
		byOutgoing := rnd.Perm(int(spec.Origins))
		cumulative := make([]float64, spec.Targets)
		total := 0.0
		for i := range cumulative {
			total += math.Pow(float64(i+1), -incomingSkew)
			cumulative[i] = total
		}
		degrees := outDegrees(int(spec.Origins), spec.most(), spec.Edges)
		var targets []int
		for place, degree := range degrees {
			from, except := byOutgoing[place], -1
			if spec.NoSelf {
				except = from
			}
			if degree > spec.Targets/dense {
				targets = heaviest(rnd, targets[:0], byIncoming, except, int(degree))
			} else {
				seen := map[int]bool{except: true}
				for targets = targets[:0]; int64(len(targets)) < degree; {
					to := byIncoming[min(sort.SearchFloat64s(cumulative, rnd.Float64()*total), len(byIncoming)-1)]
					if !seen[to] {
						seen[to] = true
						targets = append(targets, to)
					}
				}
			}
			for _, to := range targets {
				if !yield(Edge{From: ID(spec.FromIDs, int64(from+1)), To: ID(spec.ToIDs, int64(to+1))}) {
					return
				}
			}
		}
	}
}

// WithAttributes adds the attributes of their kind to generated edges. An edge has equal attributes
// for equal seeds.
func WithAttributes(edges iter.Seq[Edge], of Schema, seed uint64) iter.Seq2[Edge, error] {
	return func(yield func(Edge, error) bool) {
		for e := range edges {
			var err error
			if all := of.Generate(rand.New(rand.NewPCG(seed, hash(e)))); all != nil {
				var text []byte
				text, err = json.Marshal(all)
				e.Attributes = string(text)
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

// hash is the same number for the same ends.
func hash(e Edge) uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, string(e.From)+" "+string(e.To))
	return h.Sum64()
}

// outDegrees divides the edges among the places by weight. No place has more than limit, and the
// sum is edges.
func outDegrees(users int, limit, edges int64) []int64 {
	weights, sum := make([]float64, users), 0.0
	for i := range weights {
		weights[i] = math.Pow(float64(i+1), -outgoingSkew)
		sum += weights[i]
	}
	degrees := make([]int64, users)
	left := edges
	for i, w := range weights { // weights fall, so the excess of a full place goes to later ones
		share := int64(math.Round(float64(left) * w / sum))
		rest := int64(users-i-1) * limit // most that later places can take
		degrees[i] = min(max(share, left-rest), limit, left)
		left -= degrees[i]
		sum = max(sum-w, w*1e-9)
	}
	for i := 0; left > 0; i = (i + 1) % users { // remainder of the rounding
		if degrees[i] < limit {
			degrees[i]++
			left--
		}
	}
	return degrees
}

// heaviest draws n objects other than except without replacement, by weight: those with the n
// smallest Exp(1)/weight (Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
// 2006).
func heaviest(rnd *rand.Rand, targets, byIncoming []int, except, n int) []int {
	type key struct {
		object int
		at     float64
	}
	keys := make([]key, 0, len(byIncoming))
	for place, object := range byIncoming {
		if object != except {
			keys = append(keys, key{object, rnd.ExpFloat64() * math.Pow(float64(place+1), incomingSkew)})
		}
	}
	slices.SortFunc(keys, func(a, b key) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.object, b.object)) })
	for _, k := range keys[:n] {
		targets = append(targets, k.object)
	}
	return targets
}
