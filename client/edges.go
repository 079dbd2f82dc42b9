package client

import (
	"context"
	"net/http"
	"time"
)

// edgeKind is the API's description of a kind of edges.
type edgeKind struct {
	name, plural     string
	ends             [2]string // the members that name both ends
	from, to         string    // objects; they name the members of lists
	fromPath, toPath string    // their plurals
	forward, reverse string    // lists
	names            names     // of a kind without types in this package
	self             bool      // both ends are the same object
}

func (k edgeKind) path(from, to ID) string {
	return "/v1/" + k.plural + "/" + segment(from) + "/" + segment(to)
}

// EdgeState has the members that every edge has beside its ends.
type EdgeState struct {
	Status       string    `json:"status"`        // ACTIVE; an earlier version may also be REMOVED
	Version      int64     `json:"version"`       // rises by one with each change
	CreatedAt    time.Time `json:"created_at"`    // when the edge was first created
	PositionedAt time.Time `json:"positioned_at"` // when the edge last became active; lists are ordered by it
	UpdatedAt    time.Time `json:"updated_at"`
}

// EdgeOf is an edge of any kind, with attributes A.
type EdgeOf[A any] struct {
	From ID `json:"from_id"`
	To   ID `json:"to_id"`
	EdgeState
	Attributes A `json:"attributes,omitempty"`
}

// Edge is an edge of any kind.
type Edge = EdgeOf[map[string]any]

// VersionedEdge is an edge with attributes. Ends returns its ends, and the version on which a
// change of it is conditional.
type VersionedEdge interface {
	Ends() (from, to ID, version int64)
}

// Ends implements VersionedEdge.
func (e EdgeOf[A]) Ends() (from, to ID, version int64) { return e.From, e.To, e.Version }

// VersionInfo has the metadata of a version: who made it, and when.
type VersionInfo struct {
	Version      int64     `json:"version"`           // of the object
	VersionID    int64     `json:"version_id,string"` // of this record
	VersionState string    `json:"version_state"`     // LATEST, ARCHIVED (a later one follows) or DELETED
	Actor        string    `json:"actor,omitempty"`   // "" if the author is hidden
	At           time.Time `json:"at"`
}

// EdgeVersionOf is an edge of any kind at one version.
type EdgeVersionOf[A any] struct {
	VersionInfo
	Edge EdgeOf[A] `json:"edge"`
}

// EdgeVersion is an edge of any kind at one version.
type EdgeVersion = EdgeVersionOf[map[string]any]

// Relation says whether an edge of any kind exists.
type Relation struct {
	From         ID        `json:"from_id"`
	To           ID        `json:"to_id"`
	Active       bool      `json:"active"`
	Reversed     bool      `json:"reversed,omitempty"`     // the edge from To to From exists; only if both ends are the same object
	PositionedAt time.Time `json:"positioned_at,omitzero"` // when Active last became true
}

// EntryOf is an object in a list of edges of any kind, with the attributes of its edge.
type EntryOf[A any] struct {
	Object       ID        `json:"object_id"`
	PositionedAt time.Time `json:"positioned_at"` // the list's order, newest first
	Attributes   A         `json:"attributes,omitempty"`
}

// Entry is an object in a list of edges of any kind.
type Entry = EntryOf[map[string]any]

// Edges has the operations on a kind of edges. E is an edge, R a result of Check and V a version of
// its history.
type Edges[E, R, V any] struct {
	core *core
	find func(context.Context) (edgeKind, error)
}

func (e Edges[E, R, V]) kind(ctx context.Context) (edgeKind, error) {
	if e.find == nil {
		return edgeKind{}, ErrNoClient
	}
	return e.find(ctx)
}

func edges[E, R, V any](c *core, k edgeKind) Edges[E, R, V] {
	return Edges[E, R, V]{c, func(context.Context) (edgeKind, error) { return k, nil }}
}

// Put puts an edge. Response.Status is 201 if the edge is new and 200 if it existed. An existing
// edge keeps its attributes, and a new one gets the defaults.
func (e Edges[E, R, V]) Put(ctx context.Context, from, to ID, opts ...Option) (E, error) {
	return e.send(ctx, http.MethodPut, from, to, nil, opts)
}

func (e Edges[E, R, V]) send(ctx context.Context, method string, from, to ID, body any, opts []Option, change ...func(*call)) (E, error) {
	kind, err := e.kind(ctx)
	if err != nil {
		var none E
		return none, err
	}
	k := newCall(method, kind.path(from, to), opts).named(kind.names)
	if body != nil {
		k.json(body)
	}
	for _, f := range change {
		f(k)
	}
	return fetch[E](ctx, e.core, k)
}

// Get reads an edge from the truth. If it does not exist, IsNotFound reports true for the error.
func (e Edges[E, R, V]) Get(ctx context.Context, from, to ID, opts ...Option) (E, error) {
	return e.send(ctx, http.MethodGet, from, to, nil, opts)
}

// Remove removes an edge. It succeeds also if the edge does not exist.
func (e Edges[E, R, V]) Remove(ctx context.Context, from, to ID, opts ...Option) error {
	kind, err := e.kind(ctx)
	if err != nil {
		return err
	}
	_, _, err = e.core.do(ctx, newCall(http.MethodDelete, kind.path(from, to), opts).named(kind.names))
	return err
}

// Versions lists the versions of an edge, newest first. They come from the recorded history, which
// does not wait for a session's writes.
func (e Edges[E, R, V]) Versions(from, to ID, opts ...Option) *List[V] {
	return lazily[V](e.core, func(ctx context.Context) (string, names, error) {
		kind, err := e.kind(ctx)
		return kind.path(from, to) + "/versions", kind.names, err
	}, false, opts)
}

// Pair names an edge by its ends.
type Pair struct{ From, To ID }

// Check checks for up to 500 pairs whether the edge exists. The results are in the order of the
// pairs.
func (e Edges[E, R, V]) Check(ctx context.Context, pairs []Pair, opts ...Option) ([]R, error) {
	kind, err := e.kind(ctx)
	if err != nil {
		return nil, err
	}
	body := struct {
		Pairs []map[string]ID `json:"pairs"`
	}{make([]map[string]ID, len(pairs))}
	for i, p := range pairs {
		body.Pairs[i] = map[string]ID{kind.ends[0]: p.From, kind.ends[1]: p.To}
	}
	k := newCall(http.MethodPost, "/v1/"+kind.plural+":check", opts).json(body).projected().repeatable()
	all, err := fetch[several[R]](ctx, e.core, k.named(kind.names))
	return all.Items, err
}

// several is a list without pages.
type several[T any] struct {
	Items []T       `json:"items"`
	AsOf  time.Time `json:"as_of"`
}

func (s *several[T]) asOf() time.Time { return s.AsOf }

func (e Edges[E, R, V]) forward(of ID) func(context.Context) (string, names, error) {
	return func(ctx context.Context) (string, names, error) {
		k, err := e.kind(ctx)
		return "/v1/" + k.fromPath + "/" + segment(of) + "/" + k.forward, k.listNames(k.to), err
	}
}

func (e Edges[E, R, V]) reverse(of ID) func(context.Context) (string, names, error) {
	return func(ctx context.Context) (string, names, error) {
		k, err := e.kind(ctx)
		return "/v1/" + k.toPath + "/" + segment(of) + "/" + k.reverse, k.listNames(k.from), err
	}
}

func (k edgeKind) listNames(object string) names {
	if k.names == nil {
		return nil
	}
	return names{object + "_id": "object_id"}
}

// AttributedEdges has the operations on a kind of edges with attributes A.
type AttributedEdges[E VersionedEdge, R, V, A any] struct{ Edges[E, R, V] }

// PutWith puts an edge with these attributes. A missing attribute gets its default.
func (e AttributedEdges[E, R, V, A]) PutWith(ctx context.Context, from, to ID, attributes A, opts ...Option) (E, error) {
	return e.send(ctx, http.MethodPut, from, to, attributes, opts)
}

// Patch changes the given attributes of an edge, on the condition that its version is still edge's
// (If-Match).
func (e AttributedEdges[E, R, V, A]) Patch(ctx context.Context, edge E, changes A, opts ...Option) (E, error) {
	from, to, version := edge.Ends()
	return e.send(ctx, http.MethodPatch, from, to, changes, opts, func(k *call) { k.matching(version) })
}

// NamedEdges has the operations on a kind of edges by its name. A is the type of its attributes.
type NamedEdges[A any] struct {
	AttributedEdges[EdgeOf[A], Relation, EdgeVersionOf[A], A]
}

// AnyEdges has the operations on a kind of edges by its name.
type AnyEdges = NamedEdges[map[string]any]

// Edges is EdgesOf with a map for the attributes.
func (c *Calls) Edges(kind string) AnyEdges { return EdgesOf[map[string]any](c, kind) }

// EdgesOf returns the operations on the kind of edges of this name, whose attributes a program
// reads and writes as an A. JSON encodes and decodes A, which is a struct or a map. PutWith and
// Patch write the members that A encodes: give them omitempty, or Patch changes all.
//
// It sends nothing. The first operation reads the names of the kind's members from the API. It
// returns an *UnknownKindError if the API has no such kind.
func EdgesOf[A any](by Caller, kind string) NamedEdges[A] {
	c := by.calls()
	find := func(ctx context.Context) (edgeKind, error) {
		list, e, err := kindNamed(ctx, c.core, kind, func(l *KindList) []EdgeKind { return l.Edges })
		if err == nil && len(e.Ends) != 2 {
			err = &UnknownKindError{Kind: kind}
		}
		if err != nil {
			return edgeKind{}, err
		}
		k := edgeKind{name: e.Name, plural: e.Plural, ends: [2]string(e.Ends), from: e.From, to: e.To,
			fromPath: list.plural(e.From), toPath: list.plural(e.To), forward: e.Forward, reverse: e.Reverse, self: e.From == e.To,
			names: names{e.Ends[0]: "from_id", e.Ends[1]: "to_id", e.Name: "edge"}}
		if k.name == followKind.name {
			k.names["following"], k.names["followed_by"] = "active", "reversed"
		}
		return k, nil
	}
	all := Edges[EdgeOf[A], Relation, EdgeVersionOf[A]]{c.core, find}
	return NamedEdges[A]{AttributedEdges[EdgeOf[A], Relation, EdgeVersionOf[A], A]{all}}
}

// Forward lists the edges that lead from an object, newest first.
func (a NamedEdges[A]) Forward(of ID, opts ...Option) *List[EntryOf[A]] {
	return lazily[EntryOf[A]](a.core, a.forward(of), true, opts)
}

// Reverse lists the edges that lead to an object, newest first. With the option Filter it lists
// those with one value of an attribute.
func (a NamedEdges[A]) Reverse(of ID, opts ...Option) *List[EntryOf[A]] {
	return lazily[EntryOf[A]](a.core, a.reverse(of), true, opts)
}

// plural returns the plural of an object or a kind of children, which is its name in paths.
func (l *KindList) plural(object string) string {
	for _, o := range l.Objects {
		if o.Name == object {
			return o.Plural
		}
	}
	for _, c := range l.Children {
		if c.Name == object {
			return c.Plural
		}
	}
	return object + "s"
}
