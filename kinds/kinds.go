package kinds

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"

	"github.com/tidings/tidings/event"
)

// Set is all kinds of an installation. It is immutable and safe for concurrent use.
type Set struct {
	Objects  map[string]string `yaml:"objects,omitempty" json:"objects,omitempty"` // plural by name
	Edges    map[string]Edge   `yaml:"edges,omitempty" json:"edges,omitempty"`
	Children map[string]Child  `yaml:"children,omitempty" json:"children,omitempty"`
}

// Edge is a kind of edges. One pair of objects has at most one edge of a kind, which is ACTIVE or REMOVED.
type Edge struct {
	Name       string               `yaml:"-" json:"-"` // also the aggregate type of its events
	Plural     string               `yaml:"plural,omitempty" json:"plural"`
	From       string               `yaml:"from,omitempty" json:"from"` // an object; its id orders and pages the reverse list
	To         string               `yaml:"to,omitempty" json:"to"`     // an object; its id is the aggregate id of the events
	Ends       [2]string            `yaml:"ends,flow" json:"ends"`
	Forward    string               `yaml:"forward,omitempty" json:"forward"`     // the list of an origin: GET /v1/{from's plural}/{id}/{forward}
	Reverse    string               `yaml:"reverse,omitempty" json:"reverse"`     // the list of a target
	Self       bool                 `yaml:"self,omitempty" json:"self,omitempty"` // whether an object may have an edge to itself; see NoSelf
	Attributes map[string]Attribute `yaml:"attributes,omitempty" json:"attributes,omitempty"`
	Partitions int                  `yaml:"partitions,omitempty" json:"partitions,omitempty"` // hash sub-partitions of its table, from when it is made; 0 for none

	checker *checker
}

// Child is a kind of children: entities with an author and a body under a parent object.
type Child struct {
	Name         string               `yaml:"-" json:"-"` // also the aggregate type of its events
	Plural       string               `yaml:"plural,omitempty" json:"plural"`
	Parent       string               `yaml:"parent,omitempty" json:"parent"`                           // an object; its id is the aggregate id of the events
	Threaded     bool                 `yaml:"threaded,omitempty" json:"threaded,omitempty"`             // children reply to children: paths, slugs and tombstones
	Moderated    bool                 `yaml:"moderated,omitempty" json:"moderated,omitempty"`           // moderators decide on children; parents have settings
	OnePerAuthor bool                 `yaml:"one_per_author,omitempty" json:"one_per_author,omitempty"` // an author has at most one child of a parent that is not deleted
	Attributes   map[string]Attribute `yaml:"attributes,omitempty" json:"attributes,omitempty"`
	Partitions   int                  `yaml:"partitions,omitempty" json:"partitions,omitempty"` // as of Edge

	checker *checker
}

// Attribute is a typed value of an edge or a child, beside what all of its archetype have.
type Attribute struct {
	Type      string   `yaml:"type,omitempty" json:"type"` // String, Integer or Boolean; String where there is an enum
	Enum      []string `yaml:"enum,omitempty" json:"enum,omitempty"`
	Default   any      `yaml:"default,omitempty" json:"default,omitempty"`   // a string, an int64 or a bool
	Required  bool     `yaml:"required,omitempty" json:"required,omitempty"` // of writes; an attribute with a default is never missing
	Minimum   *int64   `yaml:"minimum,omitempty" json:"minimum,omitempty"`
	Maximum   *int64   `yaml:"maximum,omitempty" json:"maximum,omitempty"`
	MaxLength int      `yaml:"max_length,omitempty" json:"max_length,omitempty"` // characters of a string; 0 for the limit of all attributes together
	Aggregate bool     `yaml:"aggregate,omitempty" json:"aggregate,omitempty"`   // of an integer of children: count and sum per parent
	Filter    bool     `yaml:"filter,omitempty" json:"filter,omitempty"`         // of an enum of edges: lists can be filtered by it, with an index
}

// The types of attributes.
const (
	String  = "string"
	Integer = "integer"
	Boolean = "boolean"
)

// Limits of kinds and attributes.
const (
	MaxAttributeBytes = 4 << 10       // of the attributes of one entity, as PostgreSQL writes jsonb
	MaxAttributes     = 32            // of a kind
	MaxKinds          = 200           // of an installation: each is tables, routes and series of metrics
	MaxInteger        = 1<<53 - 1     // an integer of more is not the same in every reader of JSON (RFC 8259, section 6)
	MaxAggregate      = 1_000_000_000 // of an aggregate: the sum of as many of them is a bigint
	MaxPartitions     = 256
)

// Author is the object that writes: the ids of authors are its ids, and its lists include those of what they wrote.
const Author = "user"

// End is one of the two ends of an edge.
type End string

// The ends of an edge.
const (
	From End = "from"
	To   End = "to"
)

// EndsAt returns the ends of the kind's edges at which there is such an object: none, one or both.
func (e Edge) EndsAt(object string) (ends []End) {
	if e.From == object {
		ends = append(ends, From)
	}
	if e.To == object {
		ends = append(ends, To)
	}
	return ends
}

// Names are the members of the JSON of its edges that name their ends.
func (e Edge) Names() event.EdgeNames { return event.EdgeNames{From: e.Ends[0], To: e.Ends[1]} }

// NoSelf reports whether an edge from an id to the same id is refused: both are then of one object.
func (e Edge) NoSelf() bool { return e.From == e.To && !e.Self }

// Filters returns the names of the attributes that lists can be filtered by.
func (e Edge) Filters() []string {
	return chosen(e.Attributes, func(a Attribute) bool { return a.Filter })
}

// Names are the members of the JSON of its children that name them and their parent object.
func (c Child) Names() event.ChildNames {
	return event.ChildNames{ID: c.Name + "_id", Parent: c.Parent + "_id"}
}

// Aggregates returns the names of the attributes that are counted and summed.
func (c Child) Aggregates() []string {
	return chosen(c.Attributes, func(a Attribute) bool { return a.Aggregate })
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

// Without returns what the set has and other has not.
func (s *Set) Without(other *Set) *Set {
	return &Set{Objects: without(s.Objects, other.Objects), Edges: without(s.Edges, other.Edges), Children: without(s.Children, other.Children)}
}

func without[V any](all, but map[string]V) map[string]V {
	rest := maps.Clone(all)
	maps.DeleteFunc(rest, func(name string, _ V) bool { _, there := but[name]; return there })
	return rest
}

// same reports whether the two are the same for all that read them.
func same(a, b any) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}
