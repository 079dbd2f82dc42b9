package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/load"
	"github.com/tidings/tidings/projections/followercounts"
)

// graph is the follow graph: all edges, and the counts of each account.
type graph struct {
	edges                []load.Edge // sorted
	followers, following []int       // by account
}

func newGraph(spec load.Spec) *graph {
	g := &graph{edges: make([]load.Edge, 0, spec.Edges), followers: make([]int, spec.Targets+1), following: make([]int, spec.Origins+1)}
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

func (g *graph) has(from, to int64) bool {
	_, found := slices.BinarySearchFunc(g.edges, load.Edge{From: from, To: to}, compareEdges)
	return found
}

// followsSQL writes follows to the truth.
const followsSQL = `
INSERT INTO follows (tenant_id, follower_id, followee_id, positioned_at)
SELECT @tenant, * FROM unnest(@followers::bigint[], @followees::bigint[], @positioned_ats::timestamptz[])`

// fill writes the follows to the truth and applies their events in a random order, which is the
// order of the lists.
func (g *graph) fill(ctx context.Context, s *servers, seed uint64) error {
	order := rand.New(rand.NewPCG(seed, 3)).Perm(len(g.edges))
	batches := make(chan []event.Event, 1)
	eg, ctx := errgroup.WithContext(ctx)
	eg.Go(func() error {
		defer close(batches)
		began := time.Now().Add(-time.Duration(len(order)) * time.Millisecond)
		for n := 0; n < len(order); n += fillBatch {
			part := order[n:min(n+fillBatch, len(order))]
			events, ats := make([]event.Event, len(part)), make([]time.Time, len(part))
			followers, followees := make([]int64, len(part)), make([]int64, len(part))
			for i, place := range part {
				e, at := g.edges[place], event.Time{Time: began.Add(time.Duration(n+i) * time.Millisecond)}
				payload, err := json.Marshal(event.Follow{FollowerID: event.ID(e.From), FolloweeID: event.ID(e.To),
					Status: event.StatusActive, Version: 1, CreatedAt: at, PositionedAt: at, UpdatedAt: at, Actor: "bench"})
				if err != nil {
					return err
				}
				events[i] = event.Event{ID: fmt.Sprint(e.From, "-", e.To), TenantID: tenant,
					AggregateType: event.AggregateFollow, AggregateID: e.To, Type: event.Created, Version: 1, Payload: payload}
				followers[i], followees[i], ats[i] = e.From, e.To, at.Time
			}
			select {
			case batches <- events:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, followsSQL, pgx.StrictNamedArgs{"tenant": tenant, "followers": followers,
					"followees": followees, "positioned_ats": ats})
				return err
			}); err != nil {
				return fmt.Errorf("write %d follows: %w", len(part), err)
			}
		}
		return nil
	})
	eg.Go(func() error { return fill(ctx, s, followercounts.New(kinds.Builtin), batches) })
	return eg.Wait()
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
	of        int64
	followers bool
}

func (l edgeList) path(limit int) string {
	name := "following"
	if l.followers {
		name = "followers"
	}
	return fmt.Sprintf("/v1/users/%d/%s?limit=%d", l.of, name, limit)
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
		from, to := l.of, int64(e.UserID)
		if l.followers {
			from, to = to, from
		}
		if !g.has(from, to) || i > 0 && !e.PositionedAt.Before(page.Items[i-1].PositionedAt) {
			return fmt.Errorf("%s has account %d at place %d: out of order, or not a follow", l.path(limit), e.UserID, i+1)
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
			took, err := r.ask(ctx, fmt.Sprintf("/v1/follows/%d/%d", e.From, e.To), nil, &got)
			if want := (pair{event.ID(e.From), event.ID(e.To)}); err == nil && got != want {
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
				body.Pairs = append(body.Pairs, pair{event.ID(e.From), event.ID(e.To)})
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
				from, to := int64(item.FollowerID), int64(item.FolloweeID)
				if err == nil && (item.pair != body.Pairs[i] || item.Following != g.has(from, to) || item.FollowedBy != g.has(to, from)) {
					err = fmt.Errorf("the answer to %v is %+v", body.Pairs[i], item)
				}
			}
			return took, err
		}},
		{"tao-count", 117, func(ctx context.Context, rnd *rand.Rand) (time.Duration, error) {
			user := g.pick(rnd).of
			var got struct{ Followers, Following int }
			took, err := r.ask(ctx, fmt.Sprintf("/v1/users/%d/counts", user), nil, &got)
			if err == nil && (got.Followers != g.followers[user] || got.Following != g.following[user]) {
				err = fmt.Errorf("the counts of %d are %+v, want %d and %d", user, got, g.followers[user], g.following[user])
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

// asked has the results of the requests of a part.
type asked struct {
	took []time.Duration
	errs int
}

func (o readOptions) tao(ctx context.Context, s *servers, say func(string, ...any)) (_ []readResult, err error) {
	say("tao: writing %d follows of %d accounts", o.edges, o.users)
	start := time.Now()
	g := newGraph(load.Spec{Origins: int64(o.users), Targets: int64(o.users), NoSelf: true, Edges: int64(o.edges), Seed: o.seed})
	if err := g.fill(ctx, s, o.seed); err != nil {
		return nil, err
	}
	say("tao: written in %s", time.Since(start).Round(time.Millisecond))
	if err := settle(ctx, s); err != nil {
		return nil, err
	}
	r, err := startReader(ctx, s, o.clients, logTo(say))
	if err != nil {
		return nil, err
	}
	defer r.close()
	middles, err := g.middles(ctx, r, rand.New(rand.NewPCG(o.seed, 4)))
	if err != nil {
		return nil, err
	}
	parts := g.taoParts(r, middles)
	say("tao: %d clients for %s", o.clients, o.duration)
	o.ask(ctx, parts, o.duration/10, o.seed+1, say) // warms caches and plans; the measured run would meet the same errors
	start = time.Now()
	all := o.ask(ctx, parts, o.duration, o.seed, say)
	within := time.Since(start)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	peak, err := r.stop()
	if err != nil {
		return nil, err
	}
	var results []readResult
	add := func(name string, a asked) {
		result := readResult{Case: name, Errors: a.errs, Clients: o.clients, Users: o.users, Edges: o.edges, PeakRSS: peak}
		result.times(a.took, within)
		results = append(results, result)
	}
	var total asked
	for i, p := range parts {
		add(p.name, all[i])
		total.took, total.errs = append(total.took, all[i].took...), total.errs+all[i].errs
	}
	add("tao-total", total)
	return results, nil
}

// ask runs the clients for the duration d, and returns the results of each part.
func (o readOptions) ask(ctx context.Context, parts []taoPart, d time.Duration, seed uint64, say func(string, ...any)) []asked {
	all := make([]asked, len(parts))
	var mu sync.Mutex // of all
	end := time.Now().Add(d)
	var clients sync.WaitGroup
	for c := range o.clients {
		clients.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(c)<<8|5))
			for time.Now().Before(end) && ctx.Err() == nil {
				share, i := rnd.IntN(1000), 0
				for share >= parts[i].share {
					share -= parts[i].share
					i++
				}
				took, err := parts[i].ask(ctx, rnd)
				if ctx.Err() != nil {
					return
				}
				mu.Lock()
				if err == nil {
					all[i].took = append(all[i].took, took)
				} else if all[i].errs++; all[i].errs == 1 {
					say("tao: %s: %v", parts[i].name, err)
				}
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	return all
}
