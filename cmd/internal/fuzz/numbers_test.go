package fuzz_test

import (
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

func (l *lane) readNumbers() error { return l.numbers(l.view(), "") }

// numbers reads counts, a summary, relations of pairs, or mutuals.
func (l *lane) numbers(v view, fresh string) error {
	headers := page{fresh: fresh}.headers()
	switch l.rng.IntN(7) {
	case 0:
		return l.check(v, headers)
	case 3:
		return l.checkObjects(v, headers)
	case 1:
		return l.mutuals(v, headers)
	case 2:
		return l.summary(v, headers)
	}
	return l.counts(v, headers)
}

// plain compares a document without as_of.
func (l *lane) plain(a answer, want map[string]any) error {
	if err := a.expect(http.StatusOK, ""); err != nil {
		return err
	}
	want["as_of"] = a.json["as_of"]
	return differ(a, any(want), any(a.json))
}

// counts compares the counts of an object, or of several in one answer.
func (l *lane) counts(v view, headers []string) error {
	object := pick(l, "user", "user", "post", "group", "product", "conversation", "song", event.AggregateComment)
	// the API reads edges and children one after the other, and the projections may catch up
	// between
	if l.record != nil && (object == "post" || object == "song") {
		object = "group"
	}
	id := func() event.ID {
		if _, child := l.kinds.Child(object); child {
			if r := l.child(func(k kinds.Child) bool { return k.Name == object }); r != nil {
				return event.ID(r.now().ID)
			}
			return "0197a2b4-5f0e-4d3a-9a51-000000000007" // of no child
		}
		if object == "user" {
			return l.user()
		}
		return l.object()
	}
	plural := l.kinds.Plural(object)
	if l.rng.IntN(2) == 0 {
		of := id()
		a, err := l.call(http.MethodGet, fmt.Sprintf("/v1/%s/%s/counts", plural, of), "", headers...)
		if err != nil {
			return err
		}
		return l.plain(a, l.countsOf(v, object, of))
	}
	var ids, items []any
	for range 1 + l.rng.IntN(8) {
		of := id()
		ids, items = append(ids, of.String()), append(items, map[string]any{"id": of.String(), "counts": any(l.countsOf(v, object, of))})
	}
	a, err := l.call(http.MethodPost, "/v1/"+plural+":counts", encode(map[string]any{"ids": ids}), headers...)
	if err != nil {
		return err
	}
	return l.plain(a, map[string]any{"items": items})
}

// countsOf returns the counts of an object.
func (l *lane) countsOf(v view, object string, id event.ID) map[string]any {
	want, added := map[string]any{}, map[string]any{}
	for _, k := range l.kinds.AllEdges() {
		if k.To == object {
			all := v.list(k, id, true, "")
			want[k.Reverse] = float64(len(all))
			if len(k.Aggregates()) > 0 {
				added[k.Reverse] = aggregatesOf(k, all)
			}
		}
		if k.From == object {
			want[k.Forward] = float64(len(v.list(k, id, false, "")))
		}
	}
	if len(added) > 0 {
		want["aggregates"] = added
	}
	for _, k := range l.kinds.AllChildren() {
		if k.Parent == object {
			want[k.Plural] = childCounts(v, k, id)
		}
	}
	return want
}

// aggregatesOf returns what edges add up to.
func aggregatesOf(k kinds.Edge, all []event.Edge) map[string]any {
	each := map[string]any{}
	for _, name := range k.Aggregates() {
		count, sum, values := 0.0, 0.0, map[string]any{}
		for _, v := range k.Attributes[name].Enum {
			values[fmt.Sprint(v)] = 0.0
		}
		for _, e := range all {
			v, ok := object0(e.Attributes)[name]
			if !ok {
				continue
			}
			count++
			if n, ok := v.(float64); ok {
				sum += n
			}
			if n, ok := values[fmt.Sprint(v)].(float64); ok {
				values[fmt.Sprint(v)] = n + 1
			}
		}
		one := map[string]any{"count": count}
		if k.Attributes[name].Type == kinds.Integer {
			one["sum"] = sum
		}
		if len(values) > 0 {
			one["values"] = values
		}
		each[name] = one
	}
	return each
}

func childCounts(v view, k kinds.Child, object event.ID) map[string]any {
	seen := v.childrenOf(k, under(object))
	all := v.childrenOf(k, func(c event.Child) bool { return c.Parent == object })
	want := map[string]any{"total": float64(len(all)), "visible": float64(len(seen))}
	if names := k.Aggregates(); len(names) > 0 {
		each := map[string]any{}
		for _, name := range names {
			count, sum := 0.0, 0.0
			for _, c := range seen {
				if n, ok := object0(c.Attributes)[name].(float64); ok {
					count, sum = count+1, sum+n
				}
			}
			each[name] = map[string]any{"count": count, "sum": sum}
		}
		want["aggregates"] = each
	}
	return want
}

func (l *lane) summary(v view, headers []string) error {
	k, object := l.childKind(anyKind), l.object()
	want := map[string]any{k.Names().Parent: fmt.Sprint(object)}
	seen := v.childrenOf(k, under(object))
	want["visible"] = float64(len(seen))
	want["total"] = float64(len(v.childrenOf(k, func(c event.Child) bool { return c.Parent == object })))
	if len(seen) > 0 {
		want["last_activity_at"] = wire(seen[len(seen)-1].CreatedAt)
	}
	for name, value := range l.threadOf(k, object)(v) {
		want[name] = value
	}
	a, err := l.call(http.MethodGet, l.summaryPath(k, object), "", headers...)
	if err != nil {
		return err
	}
	return l.plain(a, want)
}

func (l *lane) check(v view, headers []string) error {
	k := l.edgeKind()
	active, reversed, _ := words(k)
	var pairs, items []any
	for range 1 + l.rng.IntN(8) {
		from, to := l.ends(k)
		pair := map[string]any{k.Ends[0]: fmt.Sprint(from), k.Ends[1]: fmt.Sprint(to)}
		pairs = append(pairs, pair)
		e, ok := v.active(k, from, to)
		item := map[string]any{k.Ends[0]: fmt.Sprint(from), k.Ends[1]: fmt.Sprint(to), active: ok}
		if ok {
			item["positioned_at"] = wire(e.PositionedAt)
		}
		if k.From == k.To {
			_, item[reversed] = v.active(k, to, from)
		}
		items = append(items, item)
	}
	a, err := l.call(http.MethodPost, "/v1/"+k.Plural+":check", encode(map[string]any{"pairs": pairs}), headers...)
	if err != nil {
		return err
	}
	return l.plain(a, map[string]any{"items": items})
}

// checkObjects compares which edges of all or some kinds lead from a user to several objects.
func (l *lane) checkObjects(v view, headers []string) error {
	to := l.edgeKind().To
	kindsTo := slices.DeleteFunc(l.kinds.AllEdges(), func(k kinds.Edge) bool { return k.To != to || k.From != kinds.Author })
	body := map[string]any{}
	if l.rng.IntN(2) == 0 {
		kindsTo = kindsTo[:1]
		body["edges"] = []any{kindsTo[0].Name}
	}
	from := l.user()
	var ids, items []any
	for range 1 + l.rng.IntN(8) {
		_, id := l.ends(kindsTo[0])
		edges := map[string]any{}
		for _, k := range kindsTo {
			e, ok := v.active(k, from, id)
			link := map[string]any{"active": ok}
			if ok {
				link["positioned_at"] = wire(e.PositionedAt)
				if len(k.Attributes) > 0 {
					link["attributes"] = any(object0(e.Attributes))
				}
			}
			if k.From == k.To {
				_, link["reversed"] = v.active(k, id, from)
			}
			edges[k.Name] = link
		}
		ids, items = append(ids, id.String()), append(items, map[string]any{"id": id.String(), "edges": edges})
	}
	body["user_id"], body["ids"] = from.String(), ids
	a, err := l.call(http.MethodPost, "/v1/"+l.kinds.Plural(to)+":check", encode(body), headers...)
	if err != nil {
		return err
	}
	return l.plain(a, map[string]any{"items": items})
}

func (l *lane) mutuals(v view, headers []string) error {
	k := l.kinds.Edges[event.AggregateFollow]
	user, whose, limit := l.user(), l.user(), 1+l.rng.IntN(5)
	all := slices.DeleteFunc(v.list(k, user, false, ""), func(e event.Edge) bool { _, ok := v.active(k, e.To, whose); return !ok })
	items := []any{}
	for _, e := range all[:min(len(all), limit)] {
		items = append(items, map[string]any{"user_id": e.To.String(), "positioned_at": wire(e.PositionedAt)})
	}
	a, err := l.call(http.MethodGet, fmt.Sprintf("/v1/users/%s/mutuals/%s?limit=%d", user, whose, limit), "", headers...)
	if err != nil {
		return err
	}
	return l.plain(a, map[string]any{"items": items, "truncated": len(all) > limit})
}

// version is one version of a history as JSON, without its version_id.
type version struct {
	at   int64
	item map[string]any
}

// readVersions reads a page of the history of an edge, a child or settings.
func (l *lane) readVersions() error {
	switch l.rng.IntN(3) {
	case 0:
		k := l.edgeKind()
		from, to := l.ends(k)
		r := l.m.edge(k, from, to)
		return l.askVersions(fmt.Sprintf("/v1/%s/%s/%s/versions", k.Plural, from, to), l.all, true,
			func(view) []version { return edgeVersions(r) })
	case 1:
		k, object := l.childKind(moderated), l.object()
		r := l.m.thread(k, object)
		return l.askVersions(l.settingsPath(k, object)+"/versions", l.all, false, func(view) []version { return threadVersions(r) })
	}
	r := l.child(anyKind)
	if r == nil {
		return nil
	}
	token := pick(l, l.all, l.reader)
	return l.askVersions(onePath(r.k, r.now().ID)+"/versions", token, true,
		func(view) []version { return childVersions(r, token == l.all) })
}

func (l *lane) askVersions(path, token string, projected bool, all func(view) []version) error {
	p := page{path: path, limit: 1 + l.rng.IntN(pick(l, 2, 10))}
	var from *cursor
	for {
		a, err := l.get(p.url(from), "Authorization: Bearer "+token)
		if err != nil {
			return err
		}
		last, behind := int64(1<<62), all(l.view())
		if from != nil {
			last = from.at.item.(int64)
		}
		behind = slices.DeleteFunc(behind, func(v version) bool { return v.at >= last })
		want := []any{}
		for _, v := range behind[:min(len(behind), p.limit)] {
			want, last = append(want, v.item), v.at
		}
		got, _ := a.json["items"].([]any)
		for _, item := range got {
			delete(item.(map[string]any), "version_id")
		}
		text, _ := a.json["next"].(string)
		if err := errors.Join(differ(a, want, got), differ(a, len(behind) > p.limit, text != ""),
			differ(a, projected, a.json["as_of"] != nil)); err != nil || text == "" {
			return err
		}
		from = &cursor{page: p, at: place{item: last}, text: text}
		l.board.put(l.tenant, shared{cursor: text, path: path})
		if l.chance(3) {
			return nil
		}
	}
}

// stateOf returns the version_state of version n of a history with of versions.
func stateOf(n, of int, deleted bool) string {
	switch {
	case n < of:
		return "ARCHIVED"
	case deleted:
		return "DELETED"
	}
	return "LATEST"
}

func edgeVersions(r *edgeRow) (all []version) {
	for n := r.projected; n > 0; n-- {
		e := r.states[n-1]
		all = append(all, version{e.Version, map[string]any{"version": float64(n), "version_state": stateOf(n, r.projected, !e.Active()),
			"actor": e.Actor, "at": wire(e.UpdatedAt), r.k.Name: renderEdge(r.k, e)}})
	}
	return all
}

func childVersions(r *childRow, moderator bool) (all []version) {
	hidden := bare(r.now()) && !moderator
	for n := r.projected; n > 0; n-- {
		c := r.states[n-1]
		item := map[string]any{"version": float64(n), "version_state": stateOf(n, r.projected, c.AuthorState != event.AuthorActive),
			"at": wire(c.UpdatedAt), r.k.Name: renderChild(r.k, c, hidden)}
		if !hidden {
			item["actor"] = c.Actor
		}
		if moderator && c.Reason != "" {
			item["reason"] = c.Reason
		}
		all = append(all, version{c.Version, item})
	}
	return all
}

func threadVersions(r *threadRow) (all []version) {
	name := "settings"
	if r.k.Name == event.AggregateComment {
		name = "thread"
	}
	for n := len(r.states); n > 0; n-- {
		t := r.states[n-1]
		all = append(all, version{t.Version, map[string]any{"version": float64(n), "version_state": stateOf(n, len(r.states), false),
			"actor": t.Actor, "at": wire(t.UpdatedAt), name: renderSettings(r.k, t)}})
	}
	return all
}
