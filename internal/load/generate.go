package load

import (
	"cmp"
	"fmt"
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
	Users int64 // accounts, with the ids 1 to Users
	Edges int64 // distinct follows among them
	Seed  uint64
}

// maxUsers bounds the generator's memory: it keeps 32 bytes per account.
const maxUsers = 50_000_000

// ParseSpec reads "users=N,edges=M,seed=S"; the seed is 1 unless given.
func ParseSpec(s string) (Spec, error) {
	v, err := parseSpec(s, "users", "edges")
	if err != nil {
		return Spec{}, err
	}
	spec := Spec{Users: int64(v["users"]), Edges: int64(v["edges"]), Seed: v["seed"]}
	return spec, spec.validate()
}

// parseSpec reads "FIRST=N,SECOND=M,seed=S".
func parseSpec(s, first, second string) (map[string]uint64, error) {
	values := map[string]uint64{first: 0, second: 0, "seed": 1}
	for _, part := range strings.Split(s, ",") {
		key, value, _ := strings.Cut(part, "=")
		n, err := strconv.ParseUint(value, 10, 63)
		if _, known := values[key]; err != nil || !known {
			return nil, fmt.Errorf("%q: want %s=N,%s=M,seed=S with numbers", part, first, second)
		}
		values[key] = n
	}
	return values, nil
}

func (s Spec) validate() error {
	if s.Users < 2 || s.Users > maxUsers {
		return fmt.Errorf("users is %d: want 2 to %d", s.Users, maxUsers)
	}
	if most := s.Users * (s.Users - 1); s.Edges < 1 || s.Edges > most {
		return fmt.Errorf("edges is %d: want 1 to %d, which is every user following every other", s.Edges, most)
	}
	return nil
}

// The weight of the account at place r is r^-skew, which makes degrees follow a power law with the exponent 1 + 1/skew: about
// 2.3 for followers and 2.8 for following, within what is reported of social networks (2 to 3; few are followed by very many,
// and following is less uneven).
const (
	followersSkew = 0.75
	followingSkew = 0.55
)

// dense is the share of all accounts that one account may follow before its followees are drawn by sorting instead of by
// rejecting what was drawn twice.
const dense = 8

// Generate yields the edges of spec, follower by follower: the same ones for the same spec, none twice, no account following
// itself. Who is followed by many and who follows many are drawn apart. spec must be one that ParseSpec would return.
// Memory is 32 bytes per account, whatever the number of edges.
func Generate(spec Spec) iter.Seq[Edge] {
	return func(yield func(Edge) bool) {
		rnd := rand.New(rand.NewPCG(spec.Seed, 0x7469_6469_6e67_7321))
		users := int(spec.Users)
		followees := rnd.Perm(users) // place by followers -> account
		followers := rnd.Perm(users) // place by following -> account
		cumulative := make([]float64, users)
		total := 0.0
		for i := range cumulative {
			total += math.Pow(float64(i+1), -followersSkew)
			cumulative[i] = total
		}
		degrees := outDegrees(users, spec.Edges)
		var targets []int
		for place, degree := range degrees {
			from := followers[place]
			if degree > int64(users/dense) {
				targets = heaviest(rnd, targets[:0], followees, from, int(degree))
			} else {
				seen := map[int]bool{from: true}
				for targets = targets[:0]; int64(len(targets)) < degree; {
					to := followees[min(sort.SearchFloat64s(cumulative, rnd.Float64()*total), users-1)]
					if !seen[to] {
						seen[to] = true
						targets = append(targets, to)
					}
				}
			}
			for _, to := range targets {
				if !yield(Edge{From: int64(from) + 1, To: int64(to) + 1}) {
					return
				}
			}
		}
	}
}

// outDegrees shares the edges among the places by weight: none above users-1, in all exactly edges.
func outDegrees(users int, edges int64) []int64 {
	weights, sum := make([]float64, users), 0.0
	for i := range weights {
		weights[i] = math.Pow(float64(i+1), -followingSkew)
		sum += weights[i]
	}
	degrees, limit := make([]int64, users), int64(users-1)
	left := edges
	for i, w := range weights { // weights fall, so what a full account cannot take goes to the ones after it
		share := int64(math.Round(float64(left) * w / sum))
		rest := int64(users-i-1) * limit // what the ones after it can take at most
		degrees[i] = min(max(share, left-rest), limit, left)
		left -= degrees[i]
		sum = max(sum-w, w*1e-9)
	}
	for i := 0; left > 0; i = (i + 1) % users { // rounding's remainder
		if degrees[i] < limit {
			degrees[i]++
			left--
		}
	}
	return degrees
}

// heaviest draws n accounts other than from without replacement, by weight: the n smallest of Exp(1)/weight (Efraimidis and
// Spirakis, "Weighted random sampling with a reservoir", 2006).
func heaviest(rnd *rand.Rand, targets, followees []int, from, n int) []int {
	type key struct {
		account int
		at      float64
	}
	keys := make([]key, 0, len(followees))
	for place, account := range followees {
		if account != from {
			keys = append(keys, key{account, rnd.ExpFloat64() * math.Pow(float64(place+1), followersSkew)})
		}
	}
	slices.SortFunc(keys, func(a, b key) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.account, b.account)) })
	for _, k := range keys[:n] {
		targets = append(targets, k.account)
	}
	return targets
}
