package fuzz_test

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// page is a request for a page of a list, with the model's content of the list.
type page struct {
	path  string // with the query, without limit and cursor
	limit int
	read  func(v view, at *place, limit int) found
	fresh string          // the header with the tokens, or empty
	known func(view) bool // nil: the list always exists
}

// place is a position at which a page begins: after the item, or before it.
type place struct {
	item   any // an event.Edge, an event.Child or a version
	before bool
}

// found is the expected content of a page.
type found struct {
	items       []any // as JSON
	first, last any   // items for the cursors
	prev, next  bool
	rest        map[string]any // other members
}

// cursor is a cursor of an earlier page.
type cursor struct {
	page
	at   place
	text string
}

// ask reads a page, compares it, and keeps its cursors.
func (l *lane) ask(p page, v view, from *cursor) error {
	if p.limit == 0 {
		p.limit = 1 + l.rng.IntN(pick(l, 3, 3, 10, 10, 10, 200))
	}
	a, err := l.call(http.MethodGet, p.url(from), "", p.headers()...)
	if err != nil {
		return err
	}
	if p.known != nil && !p.known(v) {
		return a.expect(http.StatusNotFound, "not-found")
	}
	if err := a.expect(http.StatusOK, ""); err != nil {
		return err
	}
	var at *place
	if from != nil {
		at = &from.at
	}
	return l.equalPage(a, p, p.read(v, at, p.limit))
}

func (p page) headers() []string {
	if p.fresh == "" {
		return nil
	}
	return []string{"Tidings-Token: " + p.fresh}
}

func (p page) url(from *cursor) string {
	sep := "?"
	if strings.Contains(p.path, "?") {
		sep = "&"
	}
	text := fmt.Sprint(p.path, sep, "limit=", p.limit)
	if from != nil {
		text += "&cursor=" + url.QueryEscape(from.text)
	}
	return text
}

func (l *lane) equalPage(a answer, p page, f found) error {
	want := map[string]any{"items": f.items}
	for name, value := range f.rest {
		want[name] = value
	}
	got := map[string]any{}
	for name, value := range a.json {
		if name != "next" && name != "prev" && name != "as_of" {
			got[name] = value
		}
	}
	if len(f.items) == 0 {
		want["items"] = []any{}
	}
	if err := differ(a, any(want), any(got)); err != nil {
		return err
	}
	for name, want := range map[string]bool{"next": f.next, "prev": f.prev} {
		text, _ := a.json[name].(string)
		if (text != "") != want {
			return fmt.Errorf("%s: %s is %q, want one: %t", a.request, name, text, want)
		}
		if want {
			c := cursor{page: p, at: place{f.last, false}, text: text}
			if name == "prev" {
				c.at = place{f.first, true}
			}
			l.keep(c)
		}
	}
	return nil
}

func (l *lane) keep(c cursor) {
	c.path = withoutSkip(c.path)
	l.board.put(l.tenant, shared{path: c.path, cursor: c.text})
	if l.cursors = append(l.cursors, c); len(l.cursors) > 80 {
		l.cursors = l.cursors[30:]
	}
}

func (l *lane) listEdges() error { return l.ask(l.edgeList(), l.view(), nil) }

// readOften reads one list until each API process caches its page, changes it, and reads it again.
func (l *lane) readOften() error {
	k, user := l.kinds.Edges[event.AggregateFollow], l.user()
	p := page{path: fmt.Sprintf("/v1/users/%s/followers", user), limit: 7}
	p.read = edgesOf(k, user, true, "")
	read := func(times int) (err error) {
		for i := 0; i < times && err == nil; i++ {
			err = l.ask(p, l.view(), nil)
		}
		return err
	}
	if err := read(4 * len(l.urls)); err != nil {
		return err
	}
	from := l.user()
	w := write{method: http.MethodPut, path: fmt.Sprintf("/v1/follows/%s/%s", from, user),
		plan: func() outcome { return l.planPut(l.m.edge(k, from, user), nil, condition{}, false) }}
	if l.m.edge(k, from, user).now().Active() {
		w.method, w.plan = http.MethodDelete, func() outcome { return l.planRemove(l.m.edge(k, from, user), condition{}) }
	}
	if err := errors.Join(l.do(w), l.catchUp()); err != nil {
		return err
	}
	return read(len(l.urls))
}

// view returns the view of reads without a token.
func (l *lane) view() view { return view{m: l.m} }

// edgeList returns a random list of edges, in one of the directions.
func (l *lane) edgeList() page {
	k, reverse, filter := l.edgeKind(), l.chance(2), ""
	of, name := k.From, k.Forward
	if reverse {
		of, name = k.To, k.Reverse
	}
	object := l.object()
	switch {
	case of == kinds.Author:
		object = l.user()
	case reverse && k.ToChild:
		object = l.target(of)
	}
	path := fmt.Sprintf("/v1/%s/%s/%s", l.kinds.Plural(of), object, name)
	if attribute, ok := k.Filter(); ok && reverse && l.chance(2) {
		filter = pick(l, k.Attributes[attribute].Enum...).(string)
		path += "?" + attribute + "=" + filter
	}
	return page{path: path, read: edgesOf(k, object, reverse, filter)}
}

// edgesOf returns the model of a list of edges.
func edgesOf(k kinds.Edge, object event.ID, reverse bool, filter string) func(v view, at *place, limit int) found {
	to := k.To
	if reverse {
		to = k.From
	}
	return func(v view, at *place, limit int) found {
		all := v.list(k, object, reverse, filter)
		if at != nil {
			e := at.item.(event.Edge)
			all = slices.DeleteFunc(all, func(x event.Edge) bool {
				return cmp.Or(e.PositionedAt.Compare(x.PositionedAt.Time), cmp.Compare(other(e, reverse), other(x, reverse))) <= 0
			})
		}
		f := found{next: len(all) > limit}
		all = all[:min(len(all), limit)]
		for _, e := range all {
			item := map[string]any{to + "_id": other(e, reverse).String(), "positioned_at": wire(e.PositionedAt)}
			if len(k.Attributes) > 0 {
				item["attributes"] = generic(e.Attributes)
			}
			f.items, f.last = append(f.items, item), e
		}
		return f
	}
}

func (l *lane) listChildren() error {
	p, err := l.childList()
	if err != nil || p.read == nil {
		return err
	}
	return l.ask(p, l.view(), nil)
}

// childList returns a random list of children. For a list that is one document it makes the request
// itself.
func (l *lane) childList() (page, error) {
	switch n := l.rng.IntN(12); {
	case n < 5:
		return l.chronological(), nil
	case n < 7:
		return l.inThread(), nil
	case n < 8:
		k, author := l.childKind(anyKind), l.user()
		return l.aged(fmt.Sprintf("/v1/users/%s/%s", author, k.Plural), k,
			func(c event.Child) bool { return c.AuthorID == author && visible(c) }, true, nil), nil
	case n < 10:
		return l.pending(), nil
	case n < 11:
		return page{}, l.around(l.view(), "")
	}
	return page{}, l.document(l.view(), "")
}

func (l *lane) pending() page {
	k, object := l.childKind(moderated), event.ID("")
	path := "/v1/moderation/" + k.Plural + "/pending"
	if k.Name == event.AggregateComment {
		path = "/v1/moderation/pending"
	}
	if l.chance(2) {
		object = l.object()
		path += fmt.Sprintf("?%s=%s", k.Names().Parent, object)
	}
	return l.aged(path, k, func(c event.Child) bool {
		return stateWord(c) == "PENDING" && (object == "" || c.Parent == object)
	}, false, nil)
}

// chronological returns a list of the children of an object by age, from the beginning or after
// some of them.
func (l *lane) chronological() page {
	k, object, newest := l.childKind(anyKind), l.object(), l.chance(2)
	order := "oldest"
	if newest {
		order = "newest"
	}
	p := l.aged(fmt.Sprintf("%s?order=%s", l.underPath(k, object), order), k, under(object), newest, l.threadOf(k, object))
	if !l.chance(3) {
		return p
	}
	skip, plain := 1+l.rng.IntN(pick(l, 5, 40)), p.read
	p.path += fmt.Sprint("&skip=", skip)
	p.read = func(v view, at *place, limit int) found {
		if at != nil {
			return plain(v, at, limit)
		}
		f := plain(v, nil, 1<<30)
		all := v.childrenOf(k, under(object))
		if newest {
			slices.Reverse(all)
		}
		return l.slice(k, all, min(skip, len(all)), limit, f.rest, true)
	}
	return p
}

// threadOf returns the settings that a page of an object's children shows.
func (l *lane) threadOf(k kinds.Child, object event.ID) func(view) map[string]any {
	if !k.Moderated {
		return func(view) map[string]any { return nil }
	}
	return func(v view) map[string]any { return map[string]any{"thread": renderState(v.thread(k, object))} }
}

// aged returns a list of children by age. A list with rest is one object's, and has pages in both
// directions.
func (l *lane) aged(path string, k kinds.Child, want func(event.Child) bool, newest bool, rest func(view) map[string]any) page {
	return page{path: path, read: func(v view, at *place, limit int) found {
		all := v.childrenOf(k, want)
		if newest {
			slices.Reverse(all)
		}
		var members map[string]any
		if rest != nil {
			members = rest(v)
		}
		first := 0
		if at != nil {
			of := at.item.(event.Child)
			first = len(all)
			if i := slices.IndexFunc(all, func(c event.Child) bool { return !ordered(c, of, newest, at.before) }); i >= 0 {
				first = i
			}
			if at.before {
				last := first
				first = max(0, last-limit)
				f := l.slice(k, all[:last], first, limit, members, true)
				f.prev, f.next = first > 0, last > first
				return f
			}
		}
		return l.slice(k, all, first, limit, members, rest != nil && at != nil)
	}}
}

// ordered reports whether c is before the place of a cursor, or at it if strictly is false.
func ordered(c, of event.Child, newest, strictly bool) bool {
	d := byAge(c, of)
	if newest {
		d = -d
	}
	return d < 0 || d == 0 && !strictly
}

func (l *lane) slice(k kinds.Child, all []event.Child, first, limit int, rest map[string]any, prev bool) found {
	f := found{rest: rest, next: len(all) > first+limit}
	all = all[first:min(len(all), first+limit)]
	for _, c := range all {
		f.items = append(f.items, renderChild(k, c, false))
	}
	if len(all) > 0 {
		f.first, f.last, f.prev = all[0], all[len(all)-1], prev
	}
	return f
}

// inThread returns a list in thread order: of an object, or of the replies below a child.
func (l *lane) inThread() page {
	k, object, below := l.childKind(threaded), l.object(), ""
	path := l.underPath(k, object) + "?order=threaded"
	var known func(view) bool
	if r := l.child(threaded); r != nil && l.chance(2) {
		k, object, below = r.k, r.now().Parent, r.now().Path+"/"
		path = onePath(k, r.now().ID) + "/replies"
		known = func(v view) bool { _, ok := v.child(r); return ok }
	}
	rest := l.threadOf(k, object)
	return page{path: path, known: known, read: func(v view, at *place, limit int) found {
		all := slices.DeleteFunc(v.threaded(k, object), func(c event.Child) bool {
			return !strings.HasPrefix(c.Path, below) || at != nil && c.Path <= at.item.(event.Child).Path
		})
		f := found{rest: rest(v), next: len(all) > limit}
		for _, c := range all[:min(len(all), limit)] {
			f.items, f.last = append(f.items, renderChild(k, c, !visible(c))), c
		}
		return f
	}}
}

// around reads the page with a child in its middle.
func (l *lane) around(v view, fresh string) error {
	r := l.child(anyKind)
	if r == nil {
		return nil
	}
	c, known := v.child(r)
	object := r.now().Parent
	if l.chance(10) {
		object = l.object()
	}
	limit := 1 + l.rng.IntN(12)
	p := l.aged(l.underPath(r.k, object)+"?order=oldest", r.k, under(object), false, l.threadOf(r.k, object))
	p.fresh = fresh
	a, err := l.call(http.MethodGet, fmt.Sprintf("%s?limit=%d&around=%s", l.underPath(r.k, object), limit, r.now().ID), "", p.headers()...)
	if err != nil {
		return err
	}
	if !known || c.Parent != object {
		return a.expect(http.StatusNotFound, "not-found")
	}
	all := v.childrenOf(r.k, under(object))
	at, _ := slices.BinarySearchFunc(all, c, byAge)
	before := min(at, max(limit/2, limit-(len(all)-at)))
	f := l.slice(r.k, all, at-before, limit, l.threadOf(r.k, object)(v), at > before)
	return errors.Join(a.expect(http.StatusOK, ""), l.equalPage(a, p, f))
}

// document reads a thread as a tree, or a child by its permalink.
func (l *lane) document(v view, fresh string) error {
	r := l.child(threaded)
	if r == nil {
		return nil
	}
	object := r.now().Parent
	headers := page{fresh: fresh}.headers()
	if l.chance(2) {
		a, err := l.call(http.MethodGet, fmt.Sprintf("%s/by-slug/%s", l.underPath(r.k, object), r.now().Slug), "", headers...)
		if err != nil {
			return err
		}
		c, known := v.child(r)
		if !known {
			return a.expect(http.StatusNotFound, "not-found")
		}
		want := renderChild(r.k, c, false)
		for name, value := range l.threadOf(r.k, object)(v) {
			want[name] = value
		}
		want["as_of"] = a.json["as_of"]
		return errors.Join(a.expect(http.StatusOK, ""), differ(a, any(want), any(a.json)))
	}
	all := v.threaded(r.k, object)
	a, err := l.call(http.MethodGet, l.underPath(r.k, object)+"/tree", "", headers...)
	if err != nil {
		return err
	}
	if len(all) > 1000 {
		return a.expect(http.StatusUnprocessableEntity, "thread-too-large")
	}
	want := map[string]any{"items": nest(r.k, all, ""), "as_of": a.json["as_of"]}
	for name, value := range l.threadOf(r.k, object)(v) {
		want[name] = value
	}
	return errors.Join(a.expect(http.StatusOK, ""), differ(a, any(want), any(a.json)))
}

// nest makes a tree of children in thread order. A child whose parent is missing is below its
// nearest ancestor.
func nest(k kinds.Child, all []event.Child, below string) []any {
	out := []any{}
	for i := 0; i < len(all); {
		c, end := all[i], i+1
		for end < len(all) && strings.HasPrefix(all[end].Path, c.Path+"/") {
			end++
		}
		item := renderChild(k, c, !visible(c))
		if replies := nest(k, all[i+1:end], c.Path); len(replies) > 0 {
			item["replies"] = replies
		}
		out = append(out, item)
		i = end
	}
	return out
}

// withoutSkip removes the parameter skip from a path, for a request with a cursor.
func withoutSkip(path string) string {
	path, query, _ := strings.Cut(path, "?")
	q, _ := url.ParseQuery(query)
	if q.Del("skip"); len(q) > 0 {
		path += "?" + q.Encode()
	}
	return path
}

// continueCursor reads the next page of a kept cursor, after any changes since.
func (l *lane) continueCursor() error {
	if len(l.cursors) == 0 {
		return nil
	}
	c := l.cursors[l.rng.IntN(len(l.cursors))]
	c.limit, c.fresh = 0, ""
	return l.ask(c.page, l.view(), &c)
}

// sweep compares everything that the API serves for the tenant, and walks each list to its end.
func (l *lane) sweep() error {
	if err := errors.Join(l.catchUp(), l.equalRows()); err != nil {
		return err
	}
	for range 40 {
		pages := []page{l.edgeList(), l.chronological(), l.inThread(), l.pending()}
		for _, p := range pages {
			if err := l.walk(p); err != nil {
				return err
			}
		}
		for _, read := range []func(*lane) error{(*lane).readEdge, (*lane).readChild, (*lane).readSettings,
			(*lane).readVersions, (*lane).readNumbers} {
			if err := read(l); err != nil {
				return err
			}
		}
	}
	return nil
}

// walk reads a list page by page. Each page begins where the last one ended.
func (l *lane) walk(p page) error {
	p.limit = 20 + l.rng.IntN(180)
	l.cursors = nil
	var from *cursor
	for {
		if err := l.ask(p, l.view(), from); err != nil {
			return err
		}
		at := slices.IndexFunc(l.cursors, func(c cursor) bool { return !c.at.before })
		if at < 0 {
			return nil
		}
		next := l.cursors[at]
		l.cursors, from, p = nil, &next, next.page
	}
}
