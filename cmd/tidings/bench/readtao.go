package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/load"
	"github.com/tidings/tidings/projections/followercounts"
)

// graph is the follow graph: all edges, and the counts of each account.
type graph struct {
	edges                []load.Edge // sorted
	followers, following map[event.ID]int
}

func newGraph(spec load.Spec) *graph {
	g := &graph{make([]load.Edge, 0, spec.Edges), make(map[event.ID]int), make(map[event.ID]int)}
	for e := range load.Generate(spec) {
		g.edges = append(g.edges, e)
		g.followers[e.To]++
		g.following[e.From]++
	}
	slices.SortFunc(g.edges, compareEdges)
	return g
}

func compareEdges(a, b load.Edge) int {
	return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
}

func (g *graph) has(from, to event.ID) bool {
	_, found := slices.BinarySearchFunc(g.edges, load.Edge{From: from, To: to}, compareEdges)
	return found
}

// followsSQL writes the follows of the projection to the truth.
const followsSQL = `
INSERT INTO follows (tenant_id, follower_id, followee_id, positioned_at)
SELECT tenant_id, from_id, to_id, positioned_at FROM edge_lists`

// fill applies the events of the follows in a random order, which is the order of the lists, and
// writes the follows to the truth.
func (g *graph) fill(ctx context.Context, s *servers, seed uint64) error {
	order := rand.New(rand.NewPCG(seed, 3)).Perm(len(g.edges))
	began := time.Now().Add(-time.Duration(len(order)) * time.Millisecond)
	if err := fill(ctx, s, followercounts.New(kinds.Builtin), len(order), func(n int) (event.Event, error) {
		edge := g.edges[order[n]]
		e, err := followed(edge.From, edge.To, began.Add(time.Duration(n)*time.Millisecond))
		e.ID, e.Version = fmt.Sprint(edge.From, "-", edge.To), 1
		return e, err
	}); err != nil {
		return err
	}
	return s.exec(ctx, followsSQL)
}

// edgePage has the members of an answer that the mix checks.
type edgePage struct {
	Items []struct {
		UserID       event.ID  `json:"user_id"`
		PositionedAt time.Time `json:"positioned_at"`
	} `json:"items"`
	Next string `json:"next"`
}

// edgeList is a list of an account: its followers, or its followings.
type edgeList struct {
	of        event.ID
	followers bool
}

func (l edgeList) path(limit int) string {
	name := "following"
	if l.followers {
		name = "followers"
	}
	return fmt.Sprintf("/v1/users/%s/%s?limit=%d", l.of, name, limit)
}

func (g *graph) length(l edgeList) int {
	if l.followers {
		return g.followers[l.of]
	}
	return g.following[l.of]
}

// check compares a page behind skip entries with the graph. It must have the right length, the
// newest first, and only follows.
func (g *graph) check(l edgeList, skip, limit int, page edgePage) error {
	if want := min(limit, g.length(l)-skip); len(page.Items) != want {
		return fmt.Errorf("%s has %d entries behind the first %d, want %d", l.path(limit), len(page.Items), skip, want)
	}
	for i, e := range page.Items {
		from, to := l.of, e.UserID
		if l.followers {
			from, to = to, from
		}
		if !g.has(from, to) || i > 0 && !e.PositionedAt.Before(page.Items[i-1].PositionedAt) {
			return fmt.Errorf("%s has account %s at place %d: out of order, or not a follow", l.path(limit), e.UserID, i+1)
		}
	}
	return nil
}

// middle is a page in the middle of a list, with the number of entries before it.
type middle struct {
	list edgeList
	path string
	skip int
}

// middles pages to the middle of lists that are longer than two pages, but through at most twenty
// long pages.
func (g *graph) middles(ctx context.Context, r *reader, rnd *rand.Rand) ([]middle, error) {
	const walk, longest = 20, 200 // pages, their length
	var all []middle
	for tries := 0; len(all) < places && tries < 100*places; tries++ {
		l := g.pick(rnd)
		half := min(g.length(l)/2, walk*longest)
		if half < pageLimit && tries < 50*places || half < 1 { // a small graph may have only short lists
			continue
		}
		m := middle{list: l}
		for cursor := ""; m.skip < half; {
			limit := min(longest, half-m.skip)
			path := l.path(limit)
			if cursor != "" {
				path += "&cursor=" + url.QueryEscape(cursor)
			}
			var page edgePage
			if _, err := r.ask(ctx, path, nil, &page); err != nil {
				return nil, err
			}
			if err := g.check(l, m.skip, limit, page); err != nil {
				return nil, err
			}
			m.skip, cursor = m.skip+limit, page.Next
			m.path = l.path(pageLimit) + "&cursor=" + url.QueryEscape(cursor)
		}
		all = append(all, m)
	}
	if len(all) == 0 {
		return nil, errors.New("no list has a middle")
	}
	return all, nil
}

// pick returns a random list. An account with twice as many followers or followings comes twice as
// often.
func (g *graph) pick(rnd *rand.Rand) edgeList {
	e := g.edges[rnd.IntN(len(g.edges))]
	if rnd.IntN(2) == 0 {
		return edgeList{e.To, true}
	}
	return edgeList{e.From, false}
}

// taoPart is one type of request of the mix.
type taoPart struct {
	name  string
	share int // in 1,000
	ask   func(ctx context.Context, rnd *rand.Rand) (time.Duration, error)
}

// taoParts are the shares of reads in table 3 of "TAO: Facebook's Distributed Data Store for the
// Social Graph" (USENIX ATC 2013).
func (g *graph) taoParts(r *reader, middles []middle) []taoPart {
	const pairs = 10
	type pair struct {
		FollowerID event.ID `json:"follower_id"`
		FolloweeID event.ID `json:"followee_id"`
	}
	return []taoPart{
		{"tao-range", 409, func(ctx context.Context, rnd *rand.Rand) (time.Duration, error) {
			l := g.pick(rnd)
			var page edgePage
			took, err := r.ask(ctx, l.path(pageLimit), nil, &page)
			if err == nil {
				err = g.check(l, 0, pageLimit, page)
			}
			return took, err
		}},
		{"tao-object", 289, func(ctx context.Context, rnd *rand.Rand) (time.Duration, error) {
			e := g.edges[rnd.IntN(len(g.edges))]
			var got pair
			took, err := r.ask(ctx, fmt.Sprintf("/v1/follows/%s/%s", e.From, e.To), nil, &got)
			if want := (pair{e.From, e.To}); err == nil && got != want {
				err = fmt.Errorf("the follow is %v, want %v", got, want)
			}
			return took, err
		}},
		{"tao-point", 157, func(ctx context.Context, rnd *rand.Rand) (time.Duration, error) {
			var body struct {
				Pairs []pair `json:"pairs"`
			}
			for i := range pairs { // every second pair is certainly a follow
				e := g.edges[rnd.IntN(len(g.edges))]
				if i%2 == 1 {
					e.To = g.edges[rnd.IntN(len(g.edges))].To
				}
				body.Pairs = append(body.Pairs, pair{e.From, e.To})
			}
			var got struct {
				Items []struct {
					pair
					Following  bool `json:"following"`
					FollowedBy bool `json:"followed_by"`
				} `json:"items"`
			}
			took, err := r.ask(ctx, "/v1/follows:check", body, &got)
			if err == nil && len(got.Items) != pairs {
				err = fmt.Errorf("the answer to %d pairs has %d", pairs, len(got.Items))
			}
			for i, item := range got.Items {
				from, to := item.FollowerID, item.FolloweeID
				if err == nil && (item.pair != body.Pairs[i] || item.Following != g.has(from, to) || item.FollowedBy != g.has(to, from)) {
					err = fmt.Errorf("the answer to %v is %+v", body.Pairs[i], item)
				}
			}
			return took, err
		}},
		{"tao-count", 117, func(ctx context.Context, rnd *rand.Rand) (time.Duration, error) {
			user := g.pick(rnd).of
			var got struct{ Followers, Following int }
			took, err := r.ask(ctx, fmt.Sprintf("/v1/users/%s/counts", user), nil, &got)
			if err == nil && (got.Followers != g.followers[user] || got.Following != g.following[user]) {
				err = fmt.Errorf("the counts of %s are %+v, want %d and %d", user, got, g.followers[user], g.following[user])
			}
			return took, err
		}},
		{"tao-time-range", 28, func(ctx context.Context, rnd *rand.Rand) (time.Duration, error) {
			m := middles[rnd.IntN(len(middles))]
			var page edgePage
			took, err := r.ask(ctx, m.path, nil, &page)
			if err == nil {
				err = g.check(m.list, m.skip, pageLimit, page)
			}
			return took, err
		}},
	}
}

func (o readOptions) tao(ctx context.Context, s *servers) (results []readResult, err error) {
	s.say("writing %d follows of %d accounts", o.edges, o.users)
	start := time.Now()
	g := newGraph(load.Spec{Origins: int64(o.users), Targets: int64(o.users), NoSelf: true, Edges: int64(o.edges), Seed: o.seed})
	if err := g.fill(ctx, s, o.seed); err != nil {
		return nil, err
	}
	s.say("written in %s", time.Since(start).Round(time.Millisecond))
	if err := settle(ctx, s); err != nil {
		return nil, err
	}
	r, err := s.startReader(ctx, o.clients)
	if err != nil {
		return nil, err
	}
	middles, err := g.middles(ctx, r, rand.New(rand.NewPCG(o.seed, 4)))
	if err != nil {
		return nil, err
	}
	parts := g.taoParts(r, middles)
	s.say("%d clients for %s", o.clients, o.duration)
	// The first run warms caches and plans; the second one would meet the same errors.
	if _, err := o.ask(ctx, s, parts, o.duration/10, o.seed+1); err != nil {
		return nil, err
	}
	start = time.Now()
	asked, err := o.ask(ctx, s, parts, o.duration, o.seed)
	if err != nil {
		return nil, err
	}
	within := time.Since(start)
	_, peak, err := stop(r.child)
	if err != nil {
		return nil, err
	}
	total := &recorder{}
	for i := range parts {
		total.took, total.failed = append(total.took, asked[i].took...), total.failed+asked[i].failed
	}
	for i, c := range append(asked, total) {
		result := readResult{Case: "tao-total", Clients: o.clients, Users: o.users, Edges: o.edges, PeakRSS: *peak}
		if i < len(parts) {
			result.Case = parts[i].name
		}
		result.fill(c, within)
		results = append(results, result)
	}
	return results, nil
}

// ask runs the clients for the duration d, and returns the results of each part.
func (o readOptions) ask(ctx context.Context, s *servers, parts []taoPart, d time.Duration, seed uint64) ([]*recorder, error) {
	all, rnds := make([]*recorder, len(parts)), make([]*rand.Rand, o.clients)
	for i := range all {
		all[i] = &recorder{}
	}
	for c := range rnds {
		rnds[c] = rand.New(rand.NewPCG(seed, uint64(c)<<8|5))
	}
	_, err := workload{workers: o.clients, duration: d}.run(ctx, func(client, _ int, _ time.Time) error {
		rnd := rnds[client]
		share, i := rnd.IntN(1000), 0
		for share >= parts[i].share {
			share -= parts[i].share
			i++
		}
		took, err := parts[i].ask(ctx, rnd)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if all[i].note(took, err) {
			s.say("%s: %v", parts[i].name, err)
		}
		return nil
	})
	return all, err
}
