package kinds

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Change is one difference between two sets.
type Change struct {
	Path string `json:"path"` // as in a file: edges.like.attributes.mood
	What string `json:"what"` // in words

	// Kind is the kind whose rows the change would give another meaning: Apply refuses it if rows
	// exist. "" if the change is always possible.
	Kind    string `json:"kind,omitempty"`
	Instead string `json:"instead,omitempty"` // the alternative if rows exist

	// For package catalog.
	Edges     bool     `json:"-"` // the kind is one of edges
	Gone      []string `json:"-"` // values that the enum loses; the change is refused if a row has one
	Attribute string   `json:"-"` // the attribute with that enum
	Rebuilt   bool     `json:"-"` // the kind's tables must be recreated
}

// Changes returns the differences between from and to, ordered by path.
func Changes(from, to *Set) []Change {
	d := &diff{}
	eachName(from.Objects, to.Objects, func(name string, was, is *Object) {
		at := "objects." + name
		switch {
		case was == nil:
			d.free(at, "added")
			return
		case is == nil:
			d.free(at, "removed")
			return
		case was.Plural != is.Plural:
			d.free(at, fmt.Sprintf("%s → %s: its paths change", was.Plural, is.Plural))
		}
		d.ids(at+".id", was.ID, is.ID, from.naming(name))
	})
	eachName(from.Edges, to.Edges, func(name string, was, is *Edge) {
		k := kindDiff{d, "edges." + name, name, true}
		if !k.presence(was != nil, is != nil) {
			return
		}
		k.edge(*was, *is)
		before, _ := was.Score()
		after, _ := is.Score()
		if child, ok := to.Ranks(*is); ok && before != after {
			k.free("children."+child.Name+".ranked_by",
				fmt.Sprintf("the score is %s: %s", cmp.Or(after, "the number of edges"), afterReplay))
		}
	})
	eachName(from.Children, to.Children, func(name string, was, is *Child) {
		k := kindDiff{d, "children." + name, name, false}
		if k.presence(was != nil, is != nil) {
			k.child(*was, *is)
		}
	})
	slices.SortStableFunc(d.all, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return d.all
}

// ids records another form of the ids of an object. named are the kinds whose rows have such ids.
func (d *diff) ids(at string, was, is IDForm, named []kindDiff) {
	what := fmt.Sprintf("%s → %s", was, is)
	switch {
	case was == is:
	case is == String || len(named) == 0:
		d.free(at, what)
	default:
		for _, k := range named {
			k.diff = d
			k.bound(at, what+" in "+k.name, "keep the form of the ids, or add an object with another name", false)
		}
	}
}

// naming returns the kinds whose rows have ids of the object, ordered by archetype and name.
func (s *Set) naming(object string) (all []kindDiff) {
	for _, e := range s.AllEdges() {
		if len(e.EndsAt(object)) > 0 {
			all = append(all, kindDiff{name: e.Name, edges: true})
		}
	}
	for _, ch := range s.AllChildren() {
		if ch.Parent == object || object == Author {
			all = append(all, kindDiff{name: ch.Name})
		}
	}
	return all
}

// eachName calls fn for every name of either map, with nil for a missing value.
func eachName[V any](from, to map[string]V, fn func(name string, was, is *V)) {
	names := slices.Concat(slices.Collect(maps.Keys(from)), slices.Collect(maps.Keys(to)))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		var was, is *V
		if v, ok := from[name]; ok {
			was = &v
		}
		if v, ok := to[name]; ok {
			is = &v
		}
		fn(name, was, is)
	}
}

type diff struct{ all []Change }

func (d *diff) free(path, what string) { d.all = append(d.all, Change{Path: path, What: what}) }

// kindDiff collects the changes of one kind.
type kindDiff struct {
	*diff
	path, name string
	edges      bool
}

// bound records a change that is possible only without rows. rebuilt means that Apply must recreate
// the kind's tables.
func (k kindDiff) bound(path, what, instead string, rebuilt bool) {
	k.all = append(k.all, Change{Path: path, What: what, Kind: k.name, Instead: instead, Edges: k.edges, Rebuilt: rebuilt})
}

// presence reports whether both sets have the kind.
func (k kindDiff) presence(was, is bool) bool {
	switch {
	case !was:
		k.free(k.path, "added")
	case !is:
		k.bound(k.path, "removed", "leave the kind in the file", true)
	}
	return was && is
}

const anotherKind = "add a kind with another name, and write there"

// structural records a change to a property on which the kind's tables depend.
func structural[V comparable](k kindDiff, name string, was, is V) {
	if was != is {
		k.bound(k.path+"."+name, fmt.Sprintf("%v → %v", was, is), anotherKind, true)
	}
}

// afterReplay says how children that exist come into an order.
const afterReplay = "the order top is so after `tidings replay --consumer followercounts`"

// target names what edges lead to: an object may become a kind of children of its name.
func target(e Edge) string {
	if e.ToChild {
		return "the children " + e.To
	}
	return e.To
}

func (k kindDiff) edge(was, is Edge) {
	structural(k, "plural", was.Plural, is.Plural)
	structural(k, "from", was.From, is.From)
	structural(k, "to", target(was), target(is))
	structural(k, "ends", was.Ends, is.Ends)
	structural(k, "self", was.Self, is.Self)
	structural(k, "partitions", was.Partitions, is.Partitions)
	for name, v := range map[string][2]string{"forward": {was.Forward, is.Forward}, "reverse": {was.Reverse, is.Reverse}} {
		if v[0] != v[1] {
			k.free(k.path+"."+name, fmt.Sprintf("%s → %s: its path and its member of counts change", v[0], v[1]))
		}
	}
	k.attributes(was.Attributes, is.Attributes)
}

func (k kindDiff) child(was, is Child) {
	structural(k, "plural", was.Plural, is.Plural)
	structural(k, "parent", was.Parent, is.Parent)
	structural(k, "threaded", was.Threaded, is.Threaded)
	structural(k, "one_per_author", was.OnePerAuthor, is.OnePerAuthor)
	structural(k, "partitions", was.Partitions, is.Partitions)
	if was.RankedBy != is.RankedBy {
		k.free(k.path+".ranked_by", fmt.Sprintf("%v → %v: %s", orNone(was.RankedBy), orNone(is.RankedBy), afterReplay))
	}
	switch {
	case is.Moderated && !was.Moderated:
		k.free(k.path+".moderated", "added")
	case was.Moderated && !is.Moderated:
		k.bound(k.path+".moderated", "removed", "keep it: moderators need not use it", false)
	}
	k.attributes(was.Attributes, is.Attributes)
}

func (k kindDiff) attributes(from, to map[string]Attribute) {
	eachName(from, to, func(name string, was, is *Attribute) {
		at := k.path + ".attributes." + name
		switch {
		case was == nil && is.Required:
			k.bound(at, "added, required", "give it a default, or make it optional", false)
		case was == nil && is.Filter:
			k.bound(at, "added with filter", "add it without filter: a filtered list would not have the existing rows", false)
		case was == nil:
			k.free(at, "added")
		case is == nil:
			k.bound(at, "removed", "keep it: writers may omit it", false)
		default:
			k.attribute(at, name, *was, *is)
		}
	})
}

func (k kindDiff) attribute(at, name string, was, is Attribute) {
	if was.Type != is.Type || (was.Enum == nil) != (is.Enum == nil) {
		k.bound(at, fmt.Sprintf("another type: %s → %s", typeOf(was), typeOf(is)), "add an attribute with another name", false)
		return
	}
	before, now := words(was.Enum), words(is.Enum)
	gone := slices.DeleteFunc(slices.Clone(before), func(v string) bool { return slices.Contains(now, v) })
	if len(gone) > 0 {
		k.all = append(k.all, Change{Path: at + ".enum", What: "without " + strings.Join(gone, ", "), Kind: k.name,
			Edges: k.edges, Attribute: name, Gone: gone, Instead: "change the rows with these values first, or keep the values"})
	}
	if more := slices.DeleteFunc(now, func(v string) bool { return slices.Contains(before, v) }); len(more) > 0 {
		k.free(at+".enum", "with "+strings.Join(more, ", "))
	}
	if was.Default != is.Default {
		k.free(at+".default", fmt.Sprintf("%v → %v, for writes from now on", orNone(was.Default), orNone(is.Default)))
	}
	k.flag(at+".required", was.Required, is.Required, true, "keep it optional, or give it a default")
	for _, flag := range []struct {
		name    string
		was, is bool
	}{{"aggregate", was.Aggregate, is.Aggregate}, {"filter", was.Filter, is.Filter}} {
		k.flag(at+"."+flag.name, flag.was, flag.is, true, "add an attribute with another name")
		k.flag(at+"."+flag.name, flag.was, flag.is, false, "keep it")
	}
	k.bounds(at+".minimum", was.Minimum, is.Minimum, func(was, is int64) bool { return is > was })
	k.bounds(at+".maximum", was.Maximum, is.Maximum, func(was, is int64) bool { return is < was })
	k.bounds(at+".max_length", length(was), length(is), func(was, is int64) bool { return is < was })
}

// flag records that a flag was added (to is true) or removed, which is possible only without rows.
// required may always be removed.
func (k kindDiff) flag(at string, was, is, to bool, instead string) {
	switch {
	case was == is || is != to && !strings.HasSuffix(at, ".required"):
	case is:
		k.bound(at, "added", instead, false)
	case strings.HasSuffix(at, ".required"):
		k.free(at, "removed")
	default:
		k.bound(at, "removed", instead, false)
	}
}

// bounds records a changed bound. A narrower bound is possible only without rows.
func (k kindDiff) bounds(at string, was, is *int64, narrower func(was, is int64) bool) {
	switch {
	case was == nil && is == nil, was != nil && is != nil && *was == *is:
	case is == nil:
		k.free(at, fmt.Sprintf("%d removed", *was))
	case was == nil:
		k.bound(at, fmt.Sprintf("%d added", *is), "keep the wider bound", false)
	case narrower(*was, *is):
		k.bound(at, fmt.Sprintf("%d → %d: narrower", *was, *is), "keep the wider bound", false)
	default:
		k.free(at, fmt.Sprintf("%d → %d", *was, *is))
	}
}

func length(a Attribute) *int64 {
	if a.MaxLength == 0 {
		return nil
	}
	n := int64(a.MaxLength)
	return &n
}

func typeOf(a Attribute) string {
	if a.Enum != nil {
		return "enum"
	}
	return a.Type
}

func orNone(v any) any {
	if v == nil || v == "" {
		return "none"
	}
	return v
}
