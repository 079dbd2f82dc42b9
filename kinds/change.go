package kinds

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Change is one difference between two sets.
type Change struct {
	Path string `json:"path"` // as in a file: edges.like.attributes.mood
	What string `json:"what"` // in words

	// Kind is the kind whose rows the change would reinterpret: it is refused if there are any. "" for one that is always possible.
	Kind    string `json:"kind,omitempty"`
	Instead string `json:"instead,omitempty"` // what is possible if there are rows

	edges   bool
	gone    []string // enum values that are not there any more: of Attribute; the change is refused if they are in use
	attr    string
	rebuilt bool // the tables of the kind have to be made anew
}

// Changes returns how to comes out of from, in the order of their paths.
func Changes(from, to *Set) []Change {
	d := &diff{}
	each(from.Objects, to.Objects, func(name string, was, is *string) {
		at := "objects." + name
		switch {
		case was == nil:
			d.free(at, "added")
		case is == nil:
			d.free(at, "removed")
		case *was != *is:
			d.free(at, fmt.Sprintf("%s → %s: its paths change", *was, *is))
		}
	})
	each(from.Edges, to.Edges, func(name string, was, is *Edge) {
		k := kindDiff{d, "edges." + name, name, true}
		if k.thereOrNot(was != nil, is != nil) {
			k.edge(*was, *is)
		}
	})
	each(from.Children, to.Children, func(name string, was, is *Child) {
		k := kindDiff{d, "children." + name, name, false}
		if k.thereOrNot(was != nil, is != nil) {
			k.child(*was, *is)
		}
	})
	slices.SortStableFunc(d.all, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return d.all
}

// each calls fn for every name of either map, with nil for what is not there.
func each[V any](from, to map[string]V, fn func(name string, was, is *V)) {
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

// bound notes a change that no row may be there for; rebuilt that the kind's tables have to be made anew.
func (k kindDiff) bound(path, what, instead string, rebuilt bool) {
	k.all = append(k.all, Change{Path: path, What: what, Kind: k.name, Instead: instead, edges: k.edges, rebuilt: rebuilt})
}

// thereOrNot reports whether the kind is in both.
func (k kindDiff) thereOrNot(was, is bool) bool {
	switch {
	case !was:
		k.free(k.path, "added")
	case !is:
		k.bound(k.path, "removed", "keep the kind: one that nobody writes costs nothing", true)
	}
	return was && is
}

const anotherKind = "add a kind of another name, and write there"

// structural notes a change of what the tables are made from.
func structural[V comparable](k kindDiff, name string, was, is V) {
	if was != is {
		k.bound(k.path+"."+name, fmt.Sprintf("%v → %v", was, is), anotherKind, true)
	}
}

func (k kindDiff) edge(was, is Edge) {
	structural(k, "plural", was.Plural, is.Plural)
	structural(k, "from", was.From, is.From)
	structural(k, "to", was.To, is.To)
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
	switch {
	case is.Moderated && !was.Moderated:
		k.free(k.path+".moderated", "added")
	case was.Moderated && !is.Moderated:
		k.bound(k.path+".moderated", "taken away", "keep it: moderators need not use it", false)
	}
	k.attributes(was.Attributes, is.Attributes)
}

func (k kindDiff) attributes(from, to map[string]Attribute) {
	each(from, to, func(name string, was, is *Attribute) {
		at := k.path + ".attributes." + name
		switch {
		case was == nil && is.Required:
			k.bound(at, "added, required", "add it with a default, or not required", false)
		case was == nil && is.Filter:
			k.bound(at, "added, a filter", "add it without filter: a list by it would not have what is there", false)
		case was == nil:
			k.free(at, "added")
		case is == nil:
			k.bound(at, "removed", "keep it: writers need not give it", false)
		default:
			k.attribute(at, name, *was, *is)
		}
	})
}

func (k kindDiff) attribute(at, name string, was, is Attribute) {
	if was.Type != is.Type || (was.Enum == nil) != (is.Enum == nil) {
		k.bound(at, fmt.Sprintf("another type: %s → %s", typeOf(was), typeOf(is)), "add an attribute of another name", false)
		return
	}
	gone := slices.DeleteFunc(slices.Clone(was.Enum), func(v string) bool { return slices.Contains(is.Enum, v) })
	if len(gone) > 0 {
		k.all = append(k.all, Change{Path: at + ".enum", What: "without " + strings.Join(gone, ", "), Kind: k.name, edges: k.edges, attr: name, gone: gone,
			Instead: "change what has these values first, or keep them"})
	}
	if more := slices.DeleteFunc(slices.Clone(is.Enum), func(v string) bool { return slices.Contains(was.Enum, v) }); len(more) > 0 {
		k.free(at+".enum", "with "+strings.Join(more, ", "))
	}
	if was.Default != is.Default {
		k.free(at+".default", fmt.Sprintf("%v → %v, for what is written from now on", orNone(was.Default), orNone(is.Default)))
	}
	k.flag(at+".required", was.Required, is.Required, true, "keep it optional, or give it a default")
	for _, flag := range []struct {
		name    string
		was, is bool
	}{{"aggregate", was.Aggregate, is.Aggregate}, {"filter", was.Filter, is.Filter}} {
		k.flag(at+"."+flag.name, flag.was, flag.is, true, "add an attribute of another name")
		k.flag(at+"."+flag.name, flag.was, flag.is, false, "keep it")
	}
	k.bounds(at+".minimum", was.Minimum, is.Minimum, func(was, is int64) bool { return is > was })
	k.bounds(at+".maximum", was.Maximum, is.Maximum, func(was, is int64) bool { return is < was })
	k.bounds(at+".max_length", length(was), length(is), func(was, is int64) bool { return is < was })
}

// flag notes that one was given (to is true) or taken away, which no row may be there for; required may always be taken away.
func (k kindDiff) flag(at string, was, is, to bool, instead string) {
	switch {
	case was == is || is != to && !strings.HasSuffix(at, ".required"):
	case is:
		k.bound(at, "added", instead, false)
	case strings.HasSuffix(at, ".required"):
		k.free(at, "taken away")
	default:
		k.bound(at, "taken away", instead, false)
	}
}

// bounds notes a bound that moved: no row may be there for a narrower one.
func (k kindDiff) bounds(at string, was, is *int64, narrower func(was, is int64) bool) {
	switch {
	case was == nil && is == nil, was != nil && is != nil && *was == *is:
	case is == nil:
		k.free(at, fmt.Sprintf("%d taken away", *was))
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
	if v == nil {
		return "none"
	}
	return v
}
