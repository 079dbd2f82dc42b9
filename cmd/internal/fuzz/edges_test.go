package fuzz_test

import (
	"bytes"
	"fmt"
	"net/http"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// words returns the names that a kind of edges uses. Follows have names of their own, from before
// there were kinds.
func words(k kinds.Edge) (active, reversed, self string) {
	if k.Name == event.AggregateFollow {
		return "following", "followed_by", "self-follow"
	}
	return "active", "reversed", "self-edge"
}

func (l *lane) edgeKind() kinds.Edge { return pick(l, l.kinds.AllEdges()...) }

// ends returns a random pair of the kind.
func (l *lane) ends(k kinds.Edge) (from, to event.ID) {
	switch {
	case k.From == k.To:
		return l.user(), l.user()
	case k.ToChild:
		return l.user(), l.target(k.To)
	}
	return l.user(), l.object()
}

// target returns the id of a child of the kind, sometimes of one that nobody has written.
func (l *lane) target(kind string) event.ID {
	if r := l.child(func(k kinds.Child) bool { return k.Name == kind }); r != nil && !l.chance(10) {
		return event.ID(r.now().ID)
	}
	return "01890000-0000-7000-8000-000000000000"
}

// refusesEdges returns the refusal of a put whose target is a child that takes no edges.
func (l *lane) refusesEdges(row *edgeRow) (outcome, bool) {
	target := l.m.byID[string(row.to)]
	switch {
	case !row.k.ToChild:
	case target == nil:
		return refusal(http.StatusNotFound, "not-found"), true
	case bare(target.now()):
		return refusal(http.StatusConflict, "target-gone"), true
	}
	return outcome{}, false
}

// values returns valid attributes, some or all of them.
func (l *lane) values(all map[string]kinds.Attribute, change bool) map[string]any {
	out := map[string]any{}
	for name, a := range all {
		if (change || !a.Required) && l.chance(3) {
			if change && !a.Required && l.chance(4) {
				out[name] = nil
			}
			continue
		}
		switch {
		case len(a.Enum) > 0:
			out[name] = pick(l, a.Enum...)
		case a.Type == kinds.Integer:
			out[name] = *a.Minimum + l.rng.Int64N(*a.Maximum-*a.Minimum+1)
		case a.Type == kinds.Boolean:
			out[name] = l.chance(2)
		default:
			out[name] = l.text("attribute")
		}
	}
	return out
}

func (l *lane) writeEdge() error { return l.do(l.edgeWrite(l.edgeKind())) }

func (l *lane) edgeWrite(k kinds.Edge) write {
	from, to := l.ends(k)
	return l.edgeWriteOf(k, from, to)
}

// edgeWriteOf plans any write of the pair.
func (l *lane) edgeWriteOf(k kinds.Edge, from, to event.ID) write {
	row := l.m.edge(k, from, to)
	w := write{path: fmt.Sprintf("/v1/%s/%s/%s", k.Plural, from, to), noun: k.Name}
	op := map[string]any{k.Ends[0]: fmt.Sprint(from), k.Ends[1]: fmt.Sprint(to)}
	c := condition{}
	if len(k.Attributes) > 0 && l.chance(3) {
		c = l.condition(max(1, row.now().Version))
		w.headers = c.headers()
	}
	switch n := l.rng.IntN(10); {
	case n < 4:
		w.method = http.MethodDelete
		op["op"] = "remove"
		w.plan = func() outcome { return l.planRemove(l.m.edge(k, from, to), c) }
	case n < 6 && len(k.Attributes) > 0:
		change := l.values(k.Attributes, true)
		w.method, w.body, op = http.MethodPatch, change, nil
		w.plan = func() outcome { return l.planPut(l.m.edge(k, from, to), change, c, true) }
	default:
		w.method = http.MethodPut
		op["op"] = "put"
		var values map[string]any
		if len(k.Attributes) > 0 && l.chance(2) {
			values = l.values(k.Attributes, false)
			w.body, op["attributes"] = values, values
		}
		w.plan = func() outcome { return l.planPut(l.m.edge(k, from, to), values, c, false) }
	}
	if op != nil && c.batched() {
		w.op = op
		if c.header != "" {
			w.op = c.inBatch(op)
			if w.method == http.MethodPut {
				w.op = nil // a put in a batch has no condition
			}
		}
	}
	return w
}

// edgeOutcome returns the outcome of a successful write.
func (l *lane) edgeOutcome(row *edgeRow, status int, commit func(wish)) outcome {
	o := outcome{status: status, commit: commit, ref: func() given { return given{row: row, version: row.now().Version} }}
	if status != http.StatusNoContent {
		o.entity = func() any { return renderEdge(row.k, row.now()) }
	}
	return o
}

// guarded returns the refusal of a write of an edge, if its condition forbids the write.
func guarded(row *edgeRow, c condition) (outcome, bool) {
	_, _, self := words(row.k)
	e := row.now()
	switch {
	case c.refused != "":
		return refusal(http.StatusBadRequest, c.refused), false
	case row.from == row.to && row.k.NoSelf():
		return refusal(http.StatusUnprocessableEntity, self), false
	case c.version == 0:
	case !e.Active():
		return refusal(http.StatusNotFound, "not-found"), false
	case e.Version != c.version:
		return outcome{status: http.StatusPreconditionFailed, code: "version-stale",
			current: func() any { return renderEdge(row.k, e) }}, false
	}
	return outcome{}, true
}

// planPut plans a PUT with these values, or a PATCH; nil means no body.
func (l *lane) planPut(row *edgeRow, values map[string]any, c condition, patch bool) outcome {
	if patch && c.header == "" {
		return refusal(http.StatusPreconditionRequired, "if-match-missing")
	}
	switch o, gone := l.refusesEdges(row); {
	case c.refused != "":
	case !patch && values == nil && !fits(row.k.Attributes, form(row.k.Attributes, nil)):
		return refusal(http.StatusUnprocessableEntity, "validation-failed")
	case gone:
		return o
	}
	if o, ok := guarded(row, c); !ok {
		return o
	}
	e := row.now()
	next, status := form(row.k.Attributes, values), http.StatusOK
	switch {
	case patch && !e.Active():
		return refusal(http.StatusNotFound, "not-found")
	case patch:
		if next = merged(row.k.Attributes, e.Attributes, values); !fits(row.k.Attributes, next) {
			return refusal(http.StatusUnprocessableEntity, "validation-failed")
		}
	case values == nil && e.Active():
		next = e.Attributes
	}
	if e.Active() && bytes.Equal(next, e.Attributes) {
		return l.edgeOutcome(row, status, nil)
	}
	if !e.Active() {
		status = http.StatusCreated
	}
	actor := l.acting
	return l.edgeOutcome(row, status, func(w wish) {
		n := e
		n.Status, n.Version, n.Attributes, n.Actor, n.UpdatedAt = event.StatusActive, e.Version+1, next, actor,
			later(w.UpdatedAt, e.UpdatedAt)
		if n.Version == 1 {
			n.CreatedAt = n.UpdatedAt
		}
		if !e.Active() {
			n.PositionedAt = n.UpdatedAt
		}
		l.m.putEdge(row, n)
	})
}

// later returns told, or last if told is before it. In that case the model differs from the answer.
func later(told, last event.Time) event.Time {
	if told.Before(last.Time) {
		return last
	}
	return told
}

func (l *lane) planRemove(row *edgeRow, c condition) outcome {
	if o, ok := guarded(row, c); !ok {
		return o
	}
	if e := row.now(); !e.Active() {
		return l.edgeOutcome(row, http.StatusNoContent, nil)
	}
	actor := l.acting
	return l.edgeOutcome(row, http.StatusNoContent, func(wish) { row.remove(actor) })
}

// remove makes an edge REMOVED. The event tells the time later.
func (r *edgeRow) remove(actor string) {
	n := r.now()
	n.Status, n.Version, n.Actor, n.UpdatedAt = event.StatusRemoved, n.Version+1, actor, event.Time{}
	r.states = append(r.states, n)
}

func (l *lane) readEdge() error {
	k := l.edgeKind()
	from, to := l.ends(k)
	e := l.m.edge(k, from, to).now()
	a, err := l.call(http.MethodGet, fmt.Sprintf("/v1/%s/%s/%s", k.Plural, from, to), "", l.ifNoneMatch(e.Version)...)
	if err != nil {
		return err
	}
	if !e.Active() {
		return a.expect(http.StatusNotFound, "not-found")
	}
	return l.equalEntity(a, e.Version, renderEdge(k, e))
}

// ifNoneMatch returns a header with the version, with another version, or no header.
func (l *lane) ifNoneMatch(version int64) []string {
	switch l.rng.IntN(6) {
	case 0:
		return []string{"If-None-Match: " + etag(version)}
	case 1:
		return []string{"If-None-Match: " + etag(version+1)}
	case 2:
		return []string{`If-None-Match: "7777", W/` + etag(version)}
	}
	return nil
}

// equalEntity compares the answer to a GET of one entity. The answer may be 304.
func (l *lane) equalEntity(a answer, version int64, want any) error {
	if got := a.header.Get("ETag"); version > 0 && got != etag(version) || version == 0 && got != "" {
		return fmt.Errorf("%s: ETag %s, want version %d", a.request, got, version)
	}
	if version > 0 && asksFor(a.request, version) {
		return a.expect(http.StatusNotModified, "")
	}
	if err := a.expect(http.StatusOK, ""); err != nil {
		return err
	}
	return differ(a, want, any(a.json))
}

// removeEdges removes all edges of an object and waits for the end.
func (l *lane) removeEdges() error {
	object, id := pick(l, "user", "post", "group", "song", event.AggregateComment), l.object()
	switch object {
	case "user":
		id = l.user()
	case event.AggregateComment:
		id = l.target(object)
	}
	direction := pick(l, "", "from", "to", "both")
	if object != "user" && direction == "from" {
		direction = "to"
	}
	body := map[string]any{}
	if direction != "" {
		body["direction"] = direction
	}
	actor := l.actor()
	a, err := l.call(http.MethodPost, fmt.Sprintf("/v1/%s/%s:remove-edges", l.kinds.Plural(object), id), encode(body),
		"Tidings-Actor: "+actor)
	if err == nil {
		err = a.expect(http.StatusAccepted, "")
	}
	if err != nil {
		return err
	}
	removed, chosen := map[string]any{}, []any{}
	for _, k := range l.kinds.AllEdges() {
		from, to := k.From == object && direction != "to", k.To == object && direction != "from"
		if from || to {
			chosen = append(chosen, k.Name)
		}
		n := 0.0
		for _, r := range l.m.edges {
			if r.k.Name == k.Name && r.now().Active() && (from && r.from == id || to && r.to == id) {
				r.remove(actor)
				n++
			}
		}
		if n > 0 {
			removed[k.Name] = n
		}
	}
	for a.json["state"] != "DONE" {
		if a, err = l.get(a.header.Get("Location") + locationOf(a)); err != nil {
			return err
		}
		if err := l.pause(); err != nil {
			return err
		}
	}
	if direction == "" {
		direction = "both"
	}
	want := map[string]any{"object": object, "object_id": fmt.Sprint(id), "kinds": chosen, "direction": direction,
		"actor": actor, "removed": removed}
	got := map[string]any{}
	for name := range want {
		got[name] = a.json[name]
	}
	return differ(a, want, got)
}

func locationOf(a answer) string {
	if a.header.Get("Location") != "" {
		return ""
	}
	return fmt.Sprint("/v1/edge-removals/", a.json["id"])
}
