package kinds

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"

	"github.com/tidings/tidings/event"
)

// Set has all kinds of an installation. It is immutable and safe for concurrent use.
type Set struct {
	Objects  map[string]Object `yaml:"objects,omitempty" json:"objects,omitempty"`
	Edges    map[string]Edge   `yaml:"edges,omitempty" json:"edges,omitempty"`
	Children map[string]Child  `yaml:"children,omitempty" json:"children,omitempty"`
}

// Edge is a kind of edges. One pair of objects has at most one edge of a kind, which is ACTIVE or
// REMOVED.
type Edge struct {
	Name   string `yaml:"-" json:"-"` // also the aggregate type of its events
	Plural string `yaml:"plural,omitempty" json:"plural"`
	From   string `yaml:"from,omitempty" json:"from"` // an object; its id orders and pages the reverse list
	// an object or a kind of children; its id is the aggregate id of the events
	To      string    `yaml:"to,omitempty" json:"to"`
	ToChild bool      `yaml:"-" json:"-"` // To is a kind of children: Extend sets it
	Ends    [2]string `yaml:"ends,flow" json:"ends"`
	// the name of an origin's list: GET /v1/{from's plural}/{from_id}/{forward}
	Forward string `yaml:"forward,omitempty" json:"forward"`
	Reverse string `yaml:"reverse,omitempty" json:"reverse"` // the name of a target's list
	// whether an object may have an edge to itself; see NoSelf
	Self       bool                 `yaml:"self,omitempty" json:"self,omitempty"`
	Attributes map[string]Attribute `yaml:"attributes,omitempty" json:"attributes,omitempty"`
	// hash sub-partitions of the kind's table when it is created; 0 for none
	Partitions int `yaml:"partitions,omitempty" json:"partitions,omitempty"`

	FromIDs, ToIDs IDForm `yaml:"-" json:"-"` // of the objects at the ends
}

// Child is a kind of children: entities with an author and a body under a parent object.
type Child struct {
	Name   string `yaml:"-" json:"-"` // also the aggregate type of its events
	Plural string `yaml:"plural,omitempty" json:"plural"`
	// an object; its id is the aggregate id of the events
	Parent string `yaml:"parent,omitempty" json:"parent"`
	// children reply to children: paths, slugs and tombstones
	Threaded bool `yaml:"threaded,omitempty" json:"threaded,omitempty"`
	// moderators decide on children; parents have settings
	Moderated bool `yaml:"moderated,omitempty" json:"moderated,omitempty"`
	// an author has at most one child of a parent that is not deleted
	OnePerAuthor bool `yaml:"one_per_author,omitempty" json:"one_per_author,omitempty"`
	// a kind of edges to these children: the order top is by their score, see Score
	RankedBy   string               `yaml:"ranked_by,omitempty" json:"ranked_by,omitempty"`
	Attributes map[string]Attribute `yaml:"attributes,omitempty" json:"attributes,omitempty"`
	Partitions int                  `yaml:"partitions,omitempty" json:"partitions,omitempty"` // as in Edge

	ParentIDs, AuthorIDs IDForm `yaml:"-" json:"-"` // of the parent object and of Author
}

// Attribute is a typed value of an edge or a child, in addition to the members of its archetype.
type Attribute struct {
	Type     string `yaml:"type,omitempty" json:"type"`                   // String, Integer or Boolean; that of the enum if there is one
	Enum     []any  `yaml:"enum,omitempty" json:"enum,omitempty"`         // strings, or int64s
	Default  any    `yaml:"default,omitempty" json:"default,omitempty"`   // a string, an int64 or a bool
	Required bool   `yaml:"required,omitempty" json:"required,omitempty"` // in writes; an attribute with a default is never missing
	Minimum  *int64 `yaml:"minimum,omitempty" json:"minimum,omitempty"`
	Maximum  *int64 `yaml:"maximum,omitempty" json:"maximum,omitempty"`
	// maximum characters of a string; 0: only MaxAttributeBytes limits it
	MaxLength int `yaml:"max_length,omitempty" json:"max_length,omitempty"`
	// count and sum of an integer per target or parent; of an edge also the count of each value of
	// an enum
	Aggregate bool `yaml:"aggregate,omitempty" json:"aggregate,omitempty"`
	// only enums of edges: lists can be filtered by it, with an index
	Filter bool `yaml:"filter,omitempty" json:"filter,omitempty"`
}

// The types of attributes.
const (
	String  = "string"  // text
	Integer = "integer" // a whole number, of at most MaxInteger
	Boolean = "boolean" // true or false
)

// Limits of kinds and attributes.
const (
	MaxAttributeBytes = 4 << 10       // of all attributes of one entity, in PostgreSQL's form of jsonb
	MaxAttributes     = 32            // per kind
	MaxKinds          = 200           // per installation: each adds tables, routes and series of metrics
	MaxInteger        = 1<<53 - 1     // readers of JSON disagree on larger integers (RFC 8259, section 6)
	MaxAggregate      = 1_000_000_000 // of an attribute with aggregate: the sum of as many values fits in a bigint
	MaxPartitions     = 256           // hash sub-partitions of a kind's table
)

// Author is the object of authors. The ids of authors are ids of this object, and its lists include
// the children that an author wrote.
const Author = "user"

// End is one of the two ends of an edge.
type End string

// The ends of an edge.
const (
	From End = "from" // the origin
	To   End = "to"   // the target, whose aggregate has the events
)

// EndsAt returns the ends of the kind's edges that are this object: none, one or both.
func (e Edge) EndsAt(object string) (ends []End) {
	if e.From == object {
		ends = append(ends, From)
	}
	if e.To == object {
		ends = append(ends, To)
	}
	return ends
}

// Names returns the members that name the two ends in the JSON of an edge.
func (e Edge) Names() event.EdgeNames { return event.EdgeNames{From: e.Ends[0], To: e.Ends[1]} }

// NoSelf reports whether an edge from an id to the same id is refused. This needs both ends to be
// the same object.
func (e Edge) NoSelf() bool { return e.From == e.To && !e.Self }

// Filters returns the names of the attributes that lists can be filtered by.
func (e Edge) Filters() []string {
	return chosen(e.Attributes, func(a Attribute) bool { return a.Filter })
}

// Names returns the members that name the child and its parent object in the JSON of a child.
func (c Child) Names() event.ChildNames {
	return event.ChildNames{ID: c.Name + "_id", Parent: c.Parent + "_id"}
}

// Aggregates returns the names of the attributes that are counted and summed.
func (c Child) Aggregates() []string {
	return chosen(c.Attributes, func(a Attribute) bool { return a.Aggregate })
}

// Aggregates returns the names of the attributes that are counted.
func (e Edge) Aggregates() []string {
	return chosen(e.Attributes, func(a Attribute) bool { return a.Aggregate })
}

// Optional reports whether a writer may give no attributes.
func (e Edge) Optional() bool {
	return len(chosen(e.Attributes, func(a Attribute) bool { return a.Required })) == 0
}

// Score returns the name of the attribute whose sum is the score of a target: the only aggregated
// integer. Without one, ok is false and the score is the number of edges.
func (e Edge) Score() (name string, ok bool) {
	if all := e.scores(); len(all) > 0 {
		return all[0], true
	}
	return "", false
}

func (e Edge) scores() []string {
	return chosen(e.Attributes, func(a Attribute) bool { return a.Aggregate && a.Type == Integer })
}

// Filter returns the name of the attribute that lists can be filtered by, if there is one.
func (e Edge) Filter() (name string, ok bool) {
	if all := e.Filters(); len(all) > 0 {
		return all[0], true
	}
	return "", false
}

func chosen(all map[string]Attribute, is func(Attribute) bool) []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if is(all[name]) {
			names = append(names, name)
		}
	}
	return names
}

// Edge returns the kind of edges with this name.
func (s *Set) Edge(name string) (Edge, bool) {
	e, ok := s.Edges[name]
	return e, ok
}

// Child returns the kind of children with this name.
func (s *Set) Child(name string) (Child, bool) {
	c, ok := s.Children[name]
	return c, ok
}

// Ranks returns the kind of children that this kind of edges ranks.
func (s *Set) Ranks(edge Edge) (Child, bool) {
	c, ok := s.Children[edge.To]
	return c, ok && c.RankedBy == edge.Name
}

// Plural returns the name in paths of an object or of a kind of children: what edges lead to. It is
// "" if there is neither.
func (s *Set) Plural(target string) string {
	if c, ok := s.Children[target]; ok {
		return c.Plural
	}
	return s.Objects[target].Plural
}

// IDs returns the form of the ids of an object or of a kind of children.
func (s *Set) IDs(target string) IDForm {
	if _, child := s.Children[target]; child {
		return UUID
	}
	return s.Objects[target].ID
}

// EdgesTo returns the kinds of edges to an object or to a kind of children, in the order of names.
func (s *Set) EdgesTo(target string) []Edge {
	return slices.DeleteFunc(s.AllEdges(), func(e Edge) bool { return e.To != target })
}

// Ends returns the objects and kinds of children at the ends of edges, in the order of names.
func (s *Set) Ends() []string {
	all := make(map[string]bool)
	for _, e := range s.Edges {
		all[e.From], all[e.To] = true, true
	}
	return slices.Sorted(maps.Keys(all))
}

// Has reports whether the set has a kind, of edges or children, with this name.
func (s *Set) Has(name string) bool {
	_, edge := s.Edges[name]
	_, child := s.Children[name]
	return edge || child
}

// AllEdges returns the kinds of edges in the order of their names.
func (s *Set) AllEdges() []Edge {
	return slices.SortedFunc(maps.Values(s.Edges), func(a, b Edge) int { return cmp.Compare(a.Name, b.Name) })
}

// AllChildren returns the kinds of children in the order of their names.
func (s *Set) AllChildren() []Child {
	return slices.SortedFunc(maps.Values(s.Children), func(a, b Child) int { return cmp.Compare(a.Name, b.Name) })
}

// Without returns the kinds and objects of the set that other does not have, or has otherwise.
func (s *Set) Without(other *Set) *Set { return s.minus(other, same) }

// minus returns the kinds and objects of the set without those of other that are equal.
func (s *Set) minus(other *Set, equal func(a, b any) bool) *Set {
	return &Set{Objects: minus(s.Objects, other.Objects, equal), Edges: minus(s.Edges, other.Edges, equal),
		Children: minus(s.Children, other.Children, equal)}
}

func minus[V any](all, but map[string]V, equal func(a, b any) bool) map[string]V {
	rest := maps.Clone(all)
	maps.DeleteFunc(rest, func(name string, v V) bool { other, there := but[name]; return there && equal(v, other) })
	return rest
}

// same reports whether a and b have the same JSON.
func same(a, b any) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}
