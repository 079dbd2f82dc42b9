// Command clientgen writes the part of the Go client that names the built-in kinds: their types,
// and the operations whose names or results depend on the kind. `go generate ./client` runs it.
package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"go/format"
	"log"
	"maps"
	"os"
	"slices"
	"strings"
	"text/template"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

func main() {
	source, err := generate(kinds.Builtin())
	if err == nil {
		err = os.WriteFile("builtin.go", source, 0o644)
	}
	if err != nil {
		log.Fatal(err)
	}
}

//go:embed client.tmpl
var clientTemplate string

// generate returns the source for the kinds of a set.
func generate(set *kinds.Set) ([]byte, error) {
	t, err := template.New("client").Funcs(template.FuncMap{
		"camel": camel, "a": a, "entry": entry, "about": about, "goType": goType,
		"plural": set.Plural, "lower": lower, "omitted": omitted,
		"counts": func(object string) []count { return countsOf(set, object) },
		"sorted": func(all map[string]kinds.Attribute) []string { return slices.Sorted(maps.Keys(all)) },
		// Follows are older than kinds, so they have names of their own.
		"active":   func(e kinds.Edge) string { return ofFollow(e, "following", "active") },
		"reversed": func(e kinds.Edge) string { return ofFollow(e, "followed_by", "reversed") },
		// the name of the method that lists an origin's edges
		"forward": func(e kinds.Edge) string {
			if e.Forward == e.Plural {
				return "By" + camel(e.From)
			}
			return camel(e.Forward)
		},
		"edged": func(object string) bool {
			return slices.ContainsFunc(set.AllEdges(), func(e kinds.Edge) bool { return len(e.EndsAt(object)) > 0 })
		},
		"aggregated": func(object string) []kinds.Edge {
			return slices.DeleteFunc(set.EdgesTo(object), func(e kinds.Edge) bool { return len(e.Aggregates()) == 0 })
		},
		"targets": func() []target { return targets(set) }, "aggregateType": aggregateType,
		"led":     func(object string) []kinds.Edge { return led(set, object) },
		"origins": func(object string) []string { return origins(led(set, object)) },
		"linkOf": func(e kinds.Edge) string {
			if e.From == e.To {
				return "MutualLink"
			}
			return "Link"
		},
		"listed": func() []string { return listed(set) },
	}).Parse(clientTemplate)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := t.Execute(&out, set); err != nil {
		return nil, err
	}
	return format.Source(out.Bytes())
}

// camel turns user_id into UserID.
func camel(name string) string {
	var b strings.Builder
	for part := range strings.SplitSeq(name, "_") {
		if part == "id" {
			part = "ID"
		}
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}

// a returns the word with its article.
func a(word string) string {
	if strings.ContainsRune("aeio", rune(word[0])) {
		return "an " + word
	}
	return "a " + word
}

// lower turns direct_message into directMessage.
func lower(name string) string { return strings.ToLower(name[:1]) + camel(name)[1:] }

// omitted describes the zero value of an attribute in a change.
func omitted(a kinds.Attribute) string {
	zero := map[string]string{kinds.String: `""`, kinds.Integer: "0", kinds.Boolean: "false"}[a.Type]
	if a.Required {
		return zero + ": no change in Patch"
	}
	return zero + ": the default in PutWith, no change in Patch"
}

func ofFollow(e kinds.Edge, follow, other string) string {
	if e.Name == event.AggregateFollow {
		return follow
	}
	return other
}

// entry returns the type of the items of a list. The items of a kind with attributes have a type of
// their own, which is named after the list.
func entry(e kinds.Edge, list, object string) string {
	if len(e.Attributes) > 0 {
		return camel(strings.TrimSuffix(list, "s")) + "Entry"
	}
	return camel(object) + "Entry"
}

// listed returns the objects in the lists of kinds without attributes.
func listed(set *kinds.Set) []string {
	all := make(map[string]bool)
	for _, e := range set.AllEdges() {
		if len(e.Attributes) == 0 {
			all[e.From], all[e.To] = true, true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// led returns the kinds whose edges lead to the object.
func led(set *kinds.Set, object string) []kinds.Edge {
	return slices.DeleteFunc(set.AllEdges(), func(e kinds.Edge) bool { return e.To != object })
}

// target is an object, or a kind of children that edges lead to.
type target struct {
	Name, Plural string
	Child        bool
}

func targets(set *kinds.Set) (all []target) {
	for _, name := range slices.Sorted(maps.Keys(set.Objects)) {
		all = append(all, target{name, set.Plural(name), false})
	}
	for _, c := range set.AllChildren() {
		if len(set.EdgesTo(c.Name)) > 0 {
			all = append(all, target{c.Name, c.Plural, true})
		}
	}
	return all
}

// aggregateType returns the type of what edges add up to by an attribute.
func aggregateType(e kinds.Edge, attribute string) string {
	switch a := e.Attributes[attribute]; {
	case len(a.Enum) == 0:
		return "EdgeSum"
	case a.Type == kinds.Integer:
		return "EdgeVotes"
	}
	return "EdgeValues"
}

// origins returns the objects that edges lead from.
func origins(all []kinds.Edge) (names []string) {
	for _, e := range all {
		names = append(names, e.From)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// about describes the values of an attribute.
func about(a kinds.Attribute) string {
	switch n := len(a.Enum); {
	case n > 1:
		words := make([]string, n)
		for i, v := range a.Enum {
			words[i] = fmt.Sprint(v)
		}
		return strings.Join(words[:n-1], ", ") + " or " + words[n-1]
	case a.Minimum != nil && a.Maximum != nil:
		return fmt.Sprintf("%d to %d", *a.Minimum, *a.Maximum)
	}
	return "any " + a.Type
}

func goType(a kinds.Attribute) string {
	return map[string]string{kinds.String: "string", kinds.Integer: "int64", kinds.Boolean: "bool"}[a.Type]
}

// count is a member of the counts of an object.
type count struct{ Name, Type string }

func countsOf(set *kinds.Set, object string) (all []count) {
	for _, e := range set.AllEdges() {
		if e.From == object {
			all = append(all, count{e.Forward, "int64"})
		}
		if e.To == object {
			all = append(all, count{e.Reverse, "int64"})
		}
	}
	slices.SortFunc(all, func(a, b count) int { return strings.Compare(a.Name, b.Name) })
	for _, c := range set.AllChildren() {
		if c.Parent != object {
			continue
		}
		of := "ChildCounts"
		if len(c.Aggregates()) > 0 {
			of = camel(c.Name) + "Counts"
		}
		all = append(all, count{c.Plural, of})
	}
	return all
}
