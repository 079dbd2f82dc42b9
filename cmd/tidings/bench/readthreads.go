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
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/load"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
)

const (
	post       = event.ID("1")
	pageLimit  = 50
	warmRounds = 50  // requests of each case before the first that counts
	places     = 200 // the number of different cursors, and of comments with replies, in the requests
	offsets    = 5   // the number of deep pages that are compared with SQL's OFFSET
)

// longThread is the thread of the post. A comment's place is its index in order of time, from 0.
type longThread struct {
	plan    *load.Children
	parent  []int32 // -1 for a comment that is no reply
	deleted []bool
	visible []int32 // the places of the comments that are not deleted
	points  []point
	top     []int32 // visible, those with the highest score first
}

// point is an edge to the comment at a place, which adds its value to the comment's score.
type point struct {
	place, user int32
	value       int64
}

func newLongThread(comments int, seed uint64) *longThread {
	t := &longThread{plan: load.GenerateChildren(load.ChildKind{Threaded: true, Moderated: true},
		load.ChildSpec{Objects: 1, Children: int64(comments), Seed: seed}),
		parent: make([]int32, comments), deleted: make([]bool, comments)}
	for _, n := range rand.New(rand.NewPCG(seed, 1)).Perm(comments)[:comments/100] {
		t.deleted[n] = true
	}
	for n, gone := range t.deleted {
		if !gone {
			t.visible = append(t.visible, int32(n))
		}
	}
	rnd, scores := rand.New(rand.NewPCG(seed, 3)), make([]int64, comments)
	for range comments / 4 {
		v := point{place: int32(rnd.IntN(comments)), user: int32(len(t.points) + 1), value: 1 - 2*int64(rnd.IntN(3)/2)}
		scores[v.place] += v.value
		t.points = append(t.points, v)
	}
	t.top = slices.Clone(t.visible)
	slices.SortFunc(t.top, func(a, b int32) int { return -cmp.Or(cmp.Compare(scores[a], scores[b]), cmp.Compare(a, b)) })
	return t
}

var threadBegan = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func writtenAt(n int) time.Time { return threadBegan.Add(time.Duration(n) * 500 * time.Microsecond) }

// commentID returns the id of the comment at place n. placeOf is its inverse.
func commentID(n int) string {
	ms := writtenAt(n).UnixMilli()
	return fmt.Sprintf("%08x-%04x-7000-8000-%012x", ms>>16, ms&0xffff, n)
}

// slug returns the slug of the comment at place n. The factor is odd, so all slugs differ.
func slug(n int) string { return fmt.Sprintf("%08x", uint32(n)*2_654_435_761) }

func placeOf(id string) (int, error) {
	n, err := strconv.ParseInt(id[max(len(id)-12, 0):], 16, 64)
	if err != nil || commentID(int(n)) != id {
		return 0, fmt.Errorf("comment %s was never written", id)
	}
	return int(n), nil
}

// path returns the path of the comment at place n, in the store's format.
func (t *longThread) path(n int) string {
	segment := fmt.Sprintf("%014x%s", writtenAt(n).UnixMicro(), slug(n))
	if p := t.parent[n]; p >= 0 {
		return t.path(int(p)) + "/" + segment
	}
	return segment
}

// fill applies the thread's events: the creation of every comment, then the deletions, and the
// points.
func (t *longThread) fill(ctx context.Context, s *servers) error {
	var gone []int
	for n, deleted := range t.deleted {
		if deleted {
			gone = append(gone, n)
		}
	}
	written := len(t.parent)
	of := func(n int) (event.Event, error) {
		switch {
		case n < written:
			return t.event(n, event.Created)
		case n < written+len(gone):
			return t.event(gone[n-written], event.Deleted)
		}
		return t.points[n-written-len(gone)].event()
	}
	if err := fill(ctx, s, threadcache.New(kinds.Builtin), written+len(gone), of); err != nil {
		return err
	}
	return fill(ctx, s, followercounts.New(kinds.Builtin), written+len(gone)+len(t.points), of)
}

// event returns the point's event.
func (v point) event() (event.Event, error) {
	comment, _ := kinds.Builtin().Child(event.AggregateComment)
	by, _ := kinds.Builtin().Edge(comment.RankedBy)
	score, _ := by.Score()
	at := event.Time{Time: threadBegan}
	e := event.Edge{From: event.IDOf(int64(v.user)), To: event.ID(commentID(int(v.place))), Status: event.StatusActive, Version: 1,
		CreatedAt: at, PositionedAt: at, UpdatedAt: at, Actor: "bench", Attributes: fmt.Appendf(nil, `{%q:%d}`, score, v.value)}
	payload, err := e.Encode(by.Names())
	return event.Event{ID: fmt.Sprint("point ", v.user), TenantID: tenant, AggregateType: by.Name, AggregateID: e.To,
		Type: event.Created, Version: 1, Payload: payload}, err
}

// event returns an event of the comment at place n, after those of all comments before it.
func (t *longThread) event(n int, typ string) (event.Event, error) {
	planned := t.plan.Child(n)
	t.parent[n] = int32(planned.Parent)
	c := event.Comment{CommentID: commentID(n), PostID: post, Slug: slug(n), Path: t.path(n),
		AuthorID: planned.AuthorID, Body: planned.Body,
		AuthorState: event.AuthorActive, ModerationState: event.ModerationNone, Version: 1, Actor: "bench",
		CreatedAt: event.Time{Time: writtenAt(n)}, UpdatedAt: event.Time{Time: writtenAt(n)}}
	if planned.Parent >= 0 {
		c.ParentID = commentID(planned.Parent)
	}
	if typ == event.Deleted {
		c.AuthorState, c.Version, c.Body = event.AuthorDeleted, 2, ""
	}
	payload, err := json.Marshal(c)
	return event.Event{ID: c.CommentID + typ, TenantID: tenant, AggregateType: event.AggregateComment, AggregateID: post,
		Type: typ, Version: 1, Payload: payload}, err
}

// repliesPages returns comments with at least pageLimit shown replies, and the first page below
// each.
func (t *longThread) repliesPages(rnd *rand.Rand) (of []int, pages [][]int32) {
	n := len(t.parent)
	first, next, below := make([]int32, n), make([]int32, n), make([]int32, n) // below: the number of shown replies
	for i := range first {
		first[i] = -1
	}
	shown := func(i int32) bool { return !t.deleted[i] || below[i] > 0 }
	for i := int32(n - 1); i >= 0; i-- { // a reply has a higher place than its parent
		if p := t.parent[i]; p >= 0 {
			next[i], first[p] = first[p], i
			if below[p] += below[i]; shown(i) {
				below[p]++
			}
		}
	}
	for i, b := range below {
		if b >= pageLimit {
			of = append(of, i)
		}
	}
	rnd.Shuffle(len(of), func(i, j int) { of[i], of[j] = of[j], of[i] })
	of = of[:min(len(of), places)]
	var walk func(page []int32, i int32) []int32
	walk = func(page []int32, i int32) []int32 {
		for c := first[i]; c >= 0 && len(page) < pageLimit; c = next[c] {
			if shown(c) {
				page = walk(append(page, c), c)
			}
		}
		return page[:min(len(page), pageLimit)]
	}
	for _, i := range of {
		pages = append(pages, walk(nil, int32(i)))
	}
	return of, pages
}

// threadPage has the members of an answer that the cases check.
type threadPage struct {
	Items []struct {
		CommentID string `json:"comment_id"`
		Body      string `json:"body"`
	} `json:"items"`
	Next string `json:"next"`
}

// check compares a page with the places of its expected comments.
func (t *longThread) check(page threadPage, want []int32) error {
	if len(page.Items) != len(want) {
		return fmt.Errorf("the page has %d comments, want %d", len(page.Items), len(want))
	}
	for i, item := range page.Items {
		n, err := placeOf(item.CommentID)
		if err != nil {
			return err
		}
		if n != int(want[i]) || (item.Body == "") != t.deleted[n] {
			return fmt.Errorf("comment %d of the page is %s with %d bytes, want %s", i+1, item.CommentID, len(item.Body),
				commentID(int(want[i])))
		}
	}
	return nil
}

// offsetSQL reads a deep page with OFFSET instead of the stored counts.
const offsetSQL = `
SELECT child_id::text FROM child_lists WHERE tenant_id = @tenant AND kind = 'comment' AND object_id = @post AND visible
 ORDER BY created_at, child_id LIMIT @limit OFFSET @skip`

// checkOffset compares the page that check expects behind skip comments with SQL's answer.
func (t *longThread) checkOffset(ctx context.Context, s *servers, skip int) error {
	rows, _ := s.pool.Query(ctx, offsetSQL, pgx.StrictNamedArgs{"tenant": tenant, "post": post, "limit": pageLimit, "skip": skip})
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("read behind %d by OFFSET: %w", skip, err)
	}
	want := make([]string, pageLimit)
	for i := range want {
		want[i] = commentID(int(t.visible[skip+i]))
	}
	if !slices.Equal(ids, want) {
		return fmt.Errorf("OFFSET %d has %v, want %v", skip, ids, want)
	}
	return nil
}

// threadCase is one of the cases with its results; ask sends one request and checks its answer.
type threadCase struct {
	name string
	than string // the case with which it is compared
	ask  func() (time.Duration, error)
	recorder
}

func (o readOptions) threads(ctx context.Context, s *servers) (results []readResult, err error) {
	s.say("writing %d comments", o.comments)
	start := time.Now()
	t := newLongThread(o.comments, o.seed)
	if err := t.fill(ctx, s); err != nil {
		return nil, err
	}
	t.plan = nil // frees its memory
	s.say("written in %s", time.Since(start).Round(time.Millisecond))
	if err := settle(ctx, s); err != nil {
		return nil, err
	}
	r, err := s.startReader(ctx, 1, "API_PAGE_CACHE_BYTES=0")
	if err != nil {
		return nil, err
	}
	cases, err := o.threadCases(ctx, s, r, t)
	if err != nil {
		return nil, err
	}
	s.say("%d requests of each case", o.requests)
	for round := range warmRounds + o.requests {
		for _, c := range cases {
			took, err := c.ask()
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if c.note(took, err) {
				s.say("%s: %v", c.name, err)
			}
		}
		if round == warmRounds-1 {
			for _, c := range cases {
				c.took = nil
			}
		}
	}
	_, peak, err := stop(r.child)
	if err != nil {
		return nil, err
	}
	for _, c := range cases {
		result := readResult{Case: c.name, Clients: 1, Comments: o.comments, PeakRSS: *peak}
		within := time.Duration(0)
		for _, took := range c.took {
			within += took
		}
		result.fill(&c.recorder, within)
		for _, before := range results {
			if before.Case == c.than && result.P50 != nil && before.P50 != nil {
				result.Than, result.Ratio = c.than, ptr(round(*result.P50 / *before.P50, 3))
			}
		}
		results = append(results, result)
	}
	return results, nil
}

// threadCases returns the cases, the first page first. It reads the cursors, and compares some deep
// pages with SQL's OFFSET.
func (o readOptions) threadCases(ctx context.Context, s *servers, r *reader, t *longThread) ([]*threadCase, error) {
	rnd := rand.New(rand.NewPCG(o.seed, 2))
	path := fmt.Sprintf("/v1/posts/%s/comments?limit=%d", post, pageLimit)
	deep := func() int { return o.comments*17/20 + rnd.IntN(o.comments/10) } // 85 to 95 %
	page := func(path string, want []int32) (p threadPage, took time.Duration, err error) {
		if took, err = r.ask(ctx, path, nil, &p); err == nil {
			if err = t.check(p, want); err != nil {
				err = fmt.Errorf("%s: %w", path, err)
			}
		}
		return p, took, err
	}
	timed := func(path string, want []int32) (time.Duration, error) {
		_, took, err := page(path, want)
		return took, err
	}
	skipTo := func(skip int) (string, []int32) {
		return path + "&skip=" + strconv.Itoa(skip), t.visible[skip : skip+pageLimit]
	}

	type cursor struct {
		path string
		want []int32
	}
	var cursors []cursor
	for i := range places {
		skip := deep()
		if i < offsets {
			if err := t.checkOffset(ctx, s, skip); err != nil {
				return nil, err
			}
		}
		p, _, err := page(skipTo(skip))
		if err != nil {
			return nil, err
		}
		cursors = append(cursors, cursor{path + "&cursor=" + url.QueryEscape(p.Next),
			t.visible[skip+pageLimit : min(skip+2*pageLimit, len(t.visible))]})
	}
	withReplies, replies := t.repliesPages(rnd)
	if len(withReplies) == 0 {
		return nil, errors.New("no comment has a page of replies")
	}
	newest := slices.Clone(t.visible[len(t.visible)-pageLimit:])
	slices.Reverse(newest)
	p, _, err := page(path+"&order=top", t.top[:pageLimit])
	if err != nil {
		return nil, err
	}
	topCursor := path + "&order=top&cursor=" + url.QueryEscape(p.Next)
	return []*threadCase{
		{name: "first-page", ask: func() (time.Duration, error) { return timed(path, t.visible[:pageLimit]) }},
		{name: "deep-page", than: "first-page", ask: func() (time.Duration, error) { return timed(skipTo(deep())) }},
		{name: "deep-cursor", ask: func() (time.Duration, error) {
			c := cursors[rnd.IntN(len(cursors))]
			return timed(c.path, c.want)
		}},
		{name: "around", ask: func() (time.Duration, error) {
			i := deep()
			return timed(path+"&around="+commentID(int(t.visible[i])), t.visible[i-pageLimit/2:i+pageLimit/2])
		}},
		{name: "summary", ask: func() (time.Duration, error) {
			var got struct{ Visible, Total int }
			took, err := r.ask(ctx, fmt.Sprintf("/v1/posts/%s/comments/summary", post), nil, &got)
			if err == nil && (got.Visible != len(t.visible) || got.Total != o.comments) {
				err = fmt.Errorf("the summary is %+v, want %d visible of %d", got, len(t.visible), o.comments)
			}
			return took, err
		}},
		{name: "replies", ask: func() (time.Duration, error) {
			i := rnd.IntN(len(replies))
			return timed(fmt.Sprintf("/v1/comments/%s/replies?limit=%d", commentID(withReplies[i]), pageLimit), replies[i])
		}},
		{name: "newest", ask: func() (time.Duration, error) { return timed(path+"&order=newest", newest) }},
		{name: "top", than: "newest", ask: func() (time.Duration, error) { return timed(path+"&order=top", t.top[:pageLimit]) }},
		{name: "top-cursor", than: "newest", ask: func() (time.Duration, error) {
			return timed(topCursor, t.top[pageLimit:2*pageLimit])
		}},
	}, nil
}
