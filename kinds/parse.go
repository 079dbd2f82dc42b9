package kinds

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
)

//go:embed builtin.json
var builtin []byte

// Builtin returns the kinds that every installation has.
var Builtin = sync.OnceValue(func() *Set {
	s, err := (&Set{}).ExtendJSON(builtin)
	if err != nil {
		panic(err) // the file is a part of this program
	}
	return s
})

// ExtendJSON is Extend with the JSON of a set, such as the one that a database keeps.
func (s *Set) ExtendJSON(text []byte) (*Set, error) {
	var added Set
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&added); err != nil {
		if name, unknown := strings.CutPrefix(err.Error(), "json: unknown field "); unknown { // it has no type
			return nil, fmt.Errorf("line 1: there is no member %s", name) // as in a file
		}
		return nil, err
	}
	return s.Extend(&added, func([]string) int { return 1 })
}

// Extend returns the set with kinds added, and with their names and defaults. They may refer to
// kinds and objects of the set. They may also state those again: members that they leave out remain
// as they are, attributes are merged by name, and the names that clients have compiled in cannot
// change. The error joins all errors, each with the line of its path. Package kindfile reads a file
// with them.
func (s *Set) Extend(added *Set, line func(path []string) int) (*Set, error) {
	c := checking{base: s, line: line}
	added = added.completed(s).named()
	c.fixed(added)
	added = added.Without(s)
	all := &Set{Objects: map[string]Object{}, Edges: map[string]Edge{}, Children: map[string]Child{}}
	for _, from := range []*Set{s, added} {
		maps.Copy(all.Objects, from.Objects)
		maps.Copy(all.Edges, from.Edges)
		maps.Copy(all.Children, from.Children)
	}
	c.objects(added)
	for _, e := range added.AllEdges() {
		all.Edges[e.Name] = c.edge(all, e)
	}
	for _, ch := range added.AllChildren() {
		all.Children[ch.Name] = c.child(all, ch)
	}
	c.collisions(added)
	if n := len(all.Edges) + len(all.Children); n > MaxKinds {
		c.fail(fmt.Sprintf("%d kinds: want at most %d", n, MaxKinds), "edges")
	}
	if err := c.err(); err != nil {
		return nil, err
	}
	all.giveForms()
	return all, nil
}

// giveForms tells the kinds the forms of the ids of their objects.
func (s *Set) giveForms() {
	for name, e := range s.Edges {
		e.FromIDs, e.ToIDs = s.IDs(e.From), s.IDs(e.To)
		s.Edges[name] = e
	}
	for name, ch := range s.Children {
		ch.ParentIDs, ch.AuthorIDs = s.Objects[ch.Parent].ID, s.Objects[Author].ID
		s.Children[name] = ch
	}
}

// checking is the state of checking kinds: the lines, and the errors found.
type checking struct {
	base     *Set
	line     func(path []string) int
	problems []problem
}

type problem struct {
	line int
	text string
}

// named returns the set with names and defaults.
func (s *Set) named() *Set {
	named := &Set{Objects: maps.Clone(s.Objects), Edges: maps.Clone(s.Edges), Children: maps.Clone(s.Children)}
	for name, o := range s.Objects {
		o.ID = cmp.Or(o.ID, String)
		named.Objects[name] = o
	}
	for name, e := range s.Edges {
		e.Name = name
		if e.Ends == [2]string{} {
			e.Ends = [2]string{e.From + "_id", e.To + "_id"}
		}
		e.Attributes = withTypes(e.Attributes)
		named.Edges[name] = e
	}
	for name, ch := range s.Children {
		ch.Name = name
		ch.Attributes = withTypes(ch.Attributes)
		named.Children[name] = ch
	}
	return named
}

// withTypes returns the attributes with the types that follow from their enums and defaults.
func withTypes(all map[string]Attribute) map[string]Attribute {
	for name, a := range all {
		a.Default = scalar(a.Default)
		a.Enum = slices.Clone(a.Enum)
		for i, v := range a.Enum {
			a.Enum[i] = scalar(v)
		}
		if a.Type == "" && len(a.Enum) > 0 {
			a.Type = String
			if _, number := a.Enum[0].(int64); number {
				a.Type = Integer
			}
		}
		all[name] = a
	}
	return all
}

// scalar returns a value of YAML or JSON with the one type that integers have here.
func scalar(v any) any {
	switch n := v.(type) {
	case int:
		return int64(n)
	case float64:
		if n == float64(int64(n)) { // another program may write JSON with floats
			return int64(n)
		}
	}
	return v
}

// fail records an error at a place.
func (c *checking) fail(text string, path ...string) {
	c.problems = append(c.problems, problem{c.line(path), fmt.Sprintf("%s: %s", strings.Join(path, "."), text)})
}

func (c *checking) err() error {
	slices.SortStableFunc(c.problems, func(a, b problem) int { return a.line - b.line })
	var all []error
	for _, p := range slices.Compact(c.problems) {
		all = append(all, fmt.Errorf("line %d: %s", p.line, p.text))
	}
	return errors.Join(all...)
}

// completed returns the set with the members that its kinds and objects leave to those of base.
func (s *Set) completed(base *Set) *Set {
	all := &Set{Objects: maps.Clone(s.Objects), Edges: maps.Clone(s.Edges), Children: maps.Clone(s.Children)}
	for name, o := range s.Objects {
		all.Objects[name] = over(base.Objects[name], o)
	}
	for name, e := range s.Edges {
		is := over(base.Edges[name], e)
		is.Attributes = merged(base.Edges[name].Attributes, e.Attributes)
		all.Edges[name] = is
	}
	for name, ch := range s.Children {
		is := over(base.Children[name], ch)
		is.Attributes = merged(base.Children[name].Attributes, ch.Attributes)
		all.Children[name] = is
	}
	return all
}

// over returns the struct v with the members of base where v has the zero value.
func over[T any](base, v T) T {
	to, from := reflect.ValueOf(&v).Elem(), reflect.ValueOf(base)
	for i := range to.NumField() {
		if to.Field(i).IsZero() {
			to.Field(i).Set(from.Field(i))
		}
	}
	return v
}

// merged returns a copy of base with the attributes of changes, which replace those of their names.
func merged(base, changes map[string]Attribute) map[string]Attribute {
	if len(base)+len(changes) == 0 {
		return nil
	}
	all := make(map[string]Attribute)
	maps.Copy(all, base)
	maps.Copy(all, changes)
	return all
}

// fixed reports changed names and structures of built-in kinds and objects.
func (c *checking) fixed(added *Set) {
	for name, o := range added.Objects {
		if have, ok := c.base.Objects[name]; ok {
			stays(c, have.Plural, o.Plural, "objects", name, "plural")
		}
	}
	for name, e := range added.Edges {
		have, ok := c.base.Edges[name]
		if !ok {
			continue
		}
		for member, v := range map[string][2]string{"plural": {have.Plural, e.Plural}, "from": {have.From, e.From}, "to": {have.To, e.To},
			"forward": {have.Forward, e.Forward}, "reverse": {have.Reverse, e.Reverse}} {
			stays(c, v[0], v[1], "edges", name, member)
		}
		stays(c, have.Ends, e.Ends, "edges", name, "ends")
		stays(c, have.Self, e.Self, "edges", name, "self")
	}
	for name, ch := range added.Children {
		have, ok := c.base.Children[name]
		if !ok {
			continue
		}
		stays(c, have.Plural, ch.Plural, "children", name, "plural")
		stays(c, have.Parent, ch.Parent, "children", name, "parent")
		stays(c, have.Threaded, ch.Threaded, "children", name, "threaded")
		stays(c, have.OnePerAuthor, ch.OnePerAuthor, "children", name, "one_per_author")
	}
}

func stays[V comparable](c *checking, was, is V, path ...string) {
	if was != is {
		c.fail(fmt.Sprintf("%v is built in and cannot be changed to %v, because clients have it compiled in", was, is), path...)
	}
}
