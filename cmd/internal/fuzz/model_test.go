package fuzz_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// edgeRow is an edge with all its versions, and the number of them that the projections have
// applied.
type edgeRow struct {
	k         kinds.Edge
	from, to  event.ID
	states    []event.Edge
	projected int
}

// childRow is the same for a child, and threadRow for the settings of an object's children.
type childRow struct {
	k         kinds.Child
	states    []event.Child
	projected int
}

type threadRow struct {
	k         kinds.Child
	object    event.ID
	states    []event.Thread
	projected int
}

func (r *edgeRow) now() event.Edge {
	if len(r.states) == 0 {
		return event.Edge{From: r.from, To: r.to}
	}
	return r.states[len(r.states)-1]
}

func (r *childRow) now() event.Child { return r.states[len(r.states)-1] }

func (r *threadRow) now() event.Thread {
	if len(r.states) == 0 {
		return event.Thread{PostID: r.object}
	}
	return r.states[len(r.states)-1]
}

type edgeKey struct {
	kind     string
	from, to event.ID
}

type objectKey struct {
	kind   string
	object event.ID
}

// authorKey is the idempotency key of an author.
type authorKey struct {
	kind   string
	author event.ID
	key    string
}

// keyed is the child that a key created, and the request.
type keyed struct {
	request string
	first   event.Child
}

// model holds the rows of a tenant, in the order in which the lane created them.
type model struct {
	edges    map[edgeKey]*edgeRow
	children []*childRow
	byID     map[string]*childRow
	threads  map[objectKey]*threadRow
	keys     map[authorKey]keyed
}

func newModel() *model {
	return &model{edges: map[edgeKey]*edgeRow{}, byID: map[string]*childRow{}, threads: map[objectKey]*threadRow{},
		keys: map[authorKey]keyed{}}
}

// edge returns the row of a pair. The model keeps it only from the first state on.
func (m *model) edge(k kinds.Edge, from, to event.ID) *edgeRow {
	if r := m.edges[edgeKey{k.Name, from, to}]; r != nil {
		return r
	}
	return &edgeRow{k: k, from: from, to: to}
}

func (m *model) thread(k kinds.Child, object event.ID) *threadRow {
	if r := m.threads[objectKey{k.Name, object}]; r != nil {
		return r
	}
	return &threadRow{k: k, object: object}
}

func (m *model) putEdge(r *edgeRow, e event.Edge) {
	m.edges[edgeKey{r.k.Name, r.from, r.to}] = r
	r.states = append(r.states, e)
}

func (m *model) putThread(r *threadRow, t event.Thread) {
	m.threads[objectKey{r.k.Name, r.object}] = r
	r.states = append(r.states, t)
}

func (m *model) addChild(k kinds.Child, c event.Child) *childRow {
	r := &childRow{k: k, states: []event.Child{c}}
	m.children = append(m.children, r)
	m.byID[c.ID] = r
	return r
}

// placeOf returns the child that keeps an author from writing another one, or nil.
func (m *model) placeOf(k kinds.Child, object, author event.ID) *childRow {
	for _, r := range m.children {
		if c := r.now(); r.k.Name == k.Name && c.Parent == object && c.AuthorID == author &&
			c.AuthorState == event.AuthorActive {
			return r
		}
	}
	return nil
}

// view is the content that a read sees: the projected version of each row, and the newest version
// of the rows in ahead.
type view struct {
	m     *model
	ahead map[any]bool
}

// at returns the number of versions of a row in the view.
func (v view) at(row any, projected, all int) int {
	if v.ahead[row] {
		return all
	}
	return projected
}

func (v view) edge(r *edgeRow) (event.Edge, bool) {
	n := v.at(r, r.projected, len(r.states))
	if n == 0 {
		return event.Edge{}, false
	}
	return r.states[n-1], true
}

func (v view) child(r *childRow) (event.Child, bool) {
	n := v.at(r, r.projected, len(r.states))
	if n == 0 {
		return event.Child{}, false
	}
	return r.states[n-1], true
}

func (v view) thread(k kinds.Child, object event.ID) event.Thread {
	r := v.m.thread(k, object)
	n := v.at(r, r.projected, len(r.states))
	if n == 0 {
		return event.Thread{PostID: object}
	}
	return r.states[n-1]
}

// list returns the active edges to or from an object, newest first.
func (v view) list(k kinds.Edge, object event.ID, reverse bool, filter string) []event.Edge {
	var all []event.Edge
	for _, r := range v.m.edges {
		e, ok := v.edge(r)
		if r.k.Name != k.Name || !ok || !e.Active() || reverse && r.to != object || !reverse && r.from != object {
			continue
		}
		if name, has := k.Filter(); filter != "" && has && fmt.Sprint(object0(e.Attributes)[name]) != filter {
			continue
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b event.Edge) int {
		return cmp.Or(b.PositionedAt.Compare(a.PositionedAt.Time), cmp.Compare(other(b, reverse), other(a, reverse)))
	})
	return all
}

// other returns the end of an edge that a list shows.
func other(e event.Edge, reverse bool) event.ID {
	if reverse {
		return e.From
	}
	return e.To
}

func (v view) active(k kinds.Edge, from, to event.ID) (event.Edge, bool) {
	r := v.m.edges[edgeKey{k.Name, from, to}]
	if r == nil {
		return event.Edge{}, false
	}
	e, ok := v.edge(r)
	return e, ok && e.Active()
}

// childrenOf returns the children of a kind in the view that fulfill want, oldest first.
func (v view) childrenOf(k kinds.Child, want func(event.Child) bool) []event.Child {
	var all []event.Child
	for _, r := range v.m.children {
		if c, ok := v.child(r); ok && r.k.Name == k.Name && want(c) {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, byAge)
	return all
}

func byAge(a, b event.Child) int {
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt.Time), cmp.Compare(a.ID, b.ID))
}

func under(object event.ID) func(event.Child) bool {
	return func(c event.Child) bool { return c.Parent == object && visible(c) }
}

// threaded returns the children of an object in thread order: the visible ones, and those with a
// visible reply below them.
func (v view) threaded(k kinds.Child, object event.ID) []event.Child {
	all := v.childrenOf(k, func(c event.Child) bool { return c.Parent == object })
	slices.SortFunc(all, func(a, b event.Child) int { return strings.Compare(a.Path, b.Path) })
	return slices.DeleteFunc(slices.Clone(all), func(c event.Child) bool {
		return !slices.ContainsFunc(all, func(d event.Child) bool {
			return visible(d) && (d.Path == c.Path || strings.HasPrefix(d.Path, c.Path+"/"))
		})
	})
}

// object0 parses attributes; no attributes are an empty map.
func object0(raw json.RawMessage) map[string]any {
	out := map[string]any{}
	_ = json.Unmarshal(raw, &out)
	return out
}

// form returns attributes with the kind's defaults, or nil for a kind without attributes.
func form(all map[string]kinds.Attribute, values map[string]any) json.RawMessage {
	if len(all) == 0 {
		return nil
	}
	out := map[string]any{}
	for name, a := range all {
		if a.Default != nil {
			out[name] = a.Default
		}
	}
	maps.Copy(out, values)
	raw, _ := json.Marshal(out)
	return raw
}

// merged merges a change into attributes as RFC 7396 says.
func merged(all map[string]kinds.Attribute, present json.RawMessage, change map[string]any) json.RawMessage {
	values := object0(present)
	maps.Copy(values, change)
	maps.DeleteFunc(values, func(_ string, v any) bool { return v == nil })
	return form(all, values)
}

// fits reports whether the attributes have all that the kind requires.
func fits(all map[string]kinds.Attribute, raw json.RawMessage) bool {
	values := object0(raw)
	for name, a := range all {
		if _, ok := values[name]; a.Required && !ok {
			return false
		}
	}
	return true
}

func wire(t event.Time) string { return t.UTC().Format(event.TimeFormat) }

func etag(version int64) string { return fmt.Sprintf("%q", fmt.Sprint(version)) }

// generic returns a value as decoded JSON.
func generic(v any) any {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	var out any
	_ = json.Unmarshal(raw, &out)
	return out
}

func renderEdge(k kinds.Edge, e event.Edge) map[string]any {
	out := map[string]any{k.Ends[0]: e.From.String(), k.Ends[1]: e.To.String(), "status": e.Status, "version": float64(e.Version),
		"created_at": wire(e.CreatedAt), "positioned_at": wire(e.PositionedAt), "updated_at": wire(e.UpdatedAt)}
	if len(k.Attributes) > 0 {
		out["attributes"] = generic(e.Attributes)
	}
	return out
}

// bare reports whether readers see neither author nor body of the child.
func bare(c event.Child) bool { return stateWord(c) != "VISIBLE" && stateWord(c) != "PENDING" }

func visible(c event.Child) bool { return stateWord(c) == "VISIBLE" }

// stateWord returns the state of a child in one word. The model has this rule of its own.
func stateWord(c event.Child) string {
	switch {
	case c.AuthorState != event.AuthorActive:
		return c.AuthorState
	case c.ModerationState == event.ModerationNone, c.ModerationState == event.ModerationApproved:
		return "VISIBLE"
	}
	return c.ModerationState
}

// renderChild renders a child; hidden omits author and body.
func renderChild(k kinds.Child, c event.Child, hidden bool) map[string]any {
	n := k.Names()
	out := map[string]any{n.ID: c.ID, n.Parent: c.Parent.String(), "state": stateWord(c), "version": float64(c.Version),
		"created_at": wire(c.CreatedAt), "updated_at": wire(c.UpdatedAt)}
	if k.Threaded {
		out["slug"], out["depth"] = c.Slug, float64(strings.Count(c.Path, "/")+1)
		if c.ReplyTo != "" {
			out["parent_id"] = c.ReplyTo
		}
	}
	if !hidden && !bare(c) {
		out["author_id"], out["body"] = c.AuthorID.String(), c.Body
		if len(k.Attributes) > 0 {
			out["attributes"] = generic(c.Attributes)
		}
	}
	return out
}

func renderSettings(k kinds.Child, t event.Thread) map[string]any {
	out := renderState(t)
	out[k.Names().Parent] = t.PostID.String()
	if t.Version > 0 {
		out["updated_at"] = wire(t.UpdatedAt)
	}
	return out
}

// renderState renders the settings that pages show.
func renderState(t event.Thread) map[string]any {
	out := map[string]any{"locked": t.Locked, "premoderated": t.Premoderate, "version": float64(t.Version)}
	if t.Title != "" {
		out["title"] = t.Title
	}
	return out
}
