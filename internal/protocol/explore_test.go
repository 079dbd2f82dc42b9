package protocol

import (
	"fmt"
	"strings"
)

// Report is what an exploration found.
type Report struct {
	States, Steps int
	Violation     string   // the first broken invariant, or "" if there is none
	Trace         []string // the shortest way to it
}

func (r Report) String() string {
	return fmt.Sprintf("%d states, %d steps: %s\n  %s", r.States, r.Steps, r.Violation, strings.Join(r.Trace, "\n  "))
}

// Explore visits all states of the specification within the bounds, breadth first, so a violation
// has a shortest trace. Then it checks that every state still leads to one where all rows are
// published, marked and applied.
func Explore(b Bounds) Report {
	type origin struct {
		from uint32
		step string
	}
	first := b.first()
	number := map[state]uint32{first: 0}
	states, origins := []state{first}, []origin{{}}
	var edges [][2]uint32
	trace := func(n uint32, rest ...string) (steps []string) {
		for ; n != 0; n = origins[n].from {
			steps = append([]string{origins[n].step}, steps...)
		}
		return append(steps, rest...)
	}
	r := Report{}
	for at := 0; at < len(states) && r.Violation == ""; at++ {
		s, here := states[at], uint32(at)
		b.next(&s, func(step string, to state) {
			n, seen := number[to]
			if !seen {
				n = uint32(len(states))
				number[to] = n
				states, origins = append(states, to), append(origins, origin{here, step})
				if wrong := b.check(&to); wrong != "" && r.Violation == "" {
					r.Violation, r.Trace = wrong, trace(n)
				}
			}
			edges = append(edges, [2]uint32{here, n})
		})
	}
	r.States, r.Steps = len(states), len(edges)
	if r.Violation != "" {
		return r
	}
	if n, ok := b.stranded(states, edges); ok {
		r.Violation, r.Trace = "from here not all rows can be published and applied", trace(n, fmt.Sprintf("%+v", states[n]))
	}
	return r
}

// stranded returns the first state from which no final state can be reached.
func (b Bounds) stranded(states []state, edges [][2]uint32) (uint32, bool) {
	begin := make([]uint32, len(states)+1) // of each state's predecessors in from
	for _, e := range edges {
		begin[e[1]+1]++
	}
	for i := range states {
		begin[i+1] += begin[i]
	}
	from, filled := make([]uint32, len(edges)), make([]uint32, len(states))
	for _, e := range edges {
		from[begin[e[1]]+filled[e[1]]] = e[0]
		filled[e[1]]++
	}
	good := make([]bool, len(states))
	var todo []uint32
	for i := range states {
		if b.final(&states[i]) {
			good[i] = true
			todo = append(todo, uint32(i))
		}
	}
	for len(todo) > 0 {
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, f := range from[begin[n]:begin[n+1]] {
			if !good[f] {
				good[f] = true
				todo = append(todo, f)
			}
		}
	}
	for i := range good {
		if !good[i] {
			return uint32(i), true
		}
	}
	return 0, false
}
