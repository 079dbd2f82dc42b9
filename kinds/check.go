package kinds

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/tidings/tidings/event"
)

var (
	word      = regexp.MustCompile(`^[a-z][a-z0-9_]{0,30}$`) // also safe in a name in SQL and in a URL
	endName   = regexp.MustCompile(`^[a-z][a-z0-9_]{0,33}$`) // a word and "_id"
	enumValue = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
)

// Reserved words. A kind is an aggregate type. Its plural is a part of paths and a view in the
// database.
var (
	reservedKinds = []string{event.AggregateThread, event.AggregatePerson, event.AggregateHeartbeat}
	// children_archive_KIND and edges_KIND_7 are tables of KIND
	partName        = regexp.MustCompile(`^archive(_|$)|_[0-9]+$`)
	reservedPaths   = []string{"asyncapi", "kinds", "moderation", "openapi", "outbox", "schemas", "threads"} // below /v1/
	reservedFilters = []string{"around", "cursor", "filter", "limit", "order", "skip"}                       // parameters of lists
	// below /v1/{objects}/{id}/, or among an object's counts
	reservedLists   = []string{"aggregates", "counts", "mutuals", "summary", "thread", "versions"}
	reservedOfChild = []string{"moderation", "replies"} // below a child
	reservedViews   = regexp.MustCompile(`^(edges|children)(_|$)|^all_`)
	reservedEdges   = append(members[event.Edge](), "tenant_id", "kind")
	reservedChild   = append(members[event.Child](), "tenant_id", "kind")
)

// members returns the names in the JSON of T that no kind renames.
func members[T any]() []string {
	var names []string
	for _, f := range reflect.VisibleFields(reflect.TypeFor[T]())[2:] {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

// want reports w if it is missing, invalid or reserved.
func (c *checking) want(w string, reserved []string, path ...string) {
	switch {
	case w == "":
		c.fail("is missing", path...)
	case !word.MatchString(w):
		c.fail(fmt.Sprintf("%q is not a valid name: want a lower-case letter, then up to 30 lower-case letters, digits and "+
			"underscores", w), path...)
	case slices.Contains(reserved, w):
		c.fail(fmt.Sprintf("%q is reserved", w), path...)
	}
}

func (c *checking) plural(w string, path ...string) {
	c.want(w, reservedPaths, path...)
	if reservedViews.MatchString(w) {
		c.fail(fmt.Sprintf("%q is reserved: tables have names like it", w), path...)
	}
}

func (c *checking) kind(name string, path ...string) {
	c.want(name, reservedKinds, path...)
	if partName.MatchString(name) {
		c.fail(fmt.Sprintf("%q is reserved: tables have names like it", name), path...)
	}
}

func (c *checking) object(all *Set, name string, path ...string) {
	if name == "" {
		c.fail("is missing", path...)
	} else if _, ok := all.Objects[name]; !ok {
		c.fail(fmt.Sprintf("the object %q does not exist: add it to objects", name), path...)
	}
}

func (c *checking) objects(added *Set) {
	for name, o := range added.Objects {
		c.want(name, nil, "objects", name)
		c.plural(o.Plural, "objects", name)
		if o.ID != String && o.ID != Integer && o.ID != UUID {
			c.fail(fmt.Sprintf("%q: want string, integer or uuid", o.ID), "objects", name, "id")
		}
	}
}

func (c *checking) edge(all *Set, e Edge) Edge {
	at := func(rest ...string) []string { return append([]string{"edges", e.Name}, rest...) }
	c.kind(e.Name, at()...)
	c.plural(e.Plural, at("plural")...)
	c.object(all, e.From, at("from")...)
	if _, e.ToChild = all.Children[e.To]; !e.ToChild {
		c.object(all, e.To, at("to")...)
	}
	c.want(e.Forward, reservedLists, at("forward")...)
	reserved := reservedLists
	if e.ToChild {
		reserved = slices.Concat(reservedLists, reservedOfChild)
	}
	c.want(e.Reverse, reserved, at("reverse")...)
	if e.From != "" && e.To != "" {
		for _, end := range e.Ends {
			if !endName.MatchString(end) || slices.Contains(reservedEdges, end) {
				c.fail(fmt.Sprintf("%q cannot name an end: it is not a valid name, or all edges have a member of this name", end),
					at("ends")...)
			}
		}
		if e.Ends[0] == e.Ends[1] {
			c.fail(fmt.Sprintf("both ends are %q: give two names, as in `ends: [%s_id, %s_id]`", e.Ends[0], e.Name+"er", e.Name+"ed"),
				at("ends")...)
		}
		if e.Self && e.From != e.To {
			c.fail("the ends are different objects, so no edge leads to its own origin", at("self")...)
		}
	}
	c.partitions(e.Partitions, at("partitions")...)
	c.attributes(e.Attributes, true, at("attributes")...)
	return e
}

func (c *checking) child(all *Set, ch Child) Child {
	at := func(rest ...string) []string { return append([]string{"children", ch.Name}, rest...) }
	c.kind(ch.Name, at()...)
	c.plural(ch.Plural, at("plural")...)
	c.object(all, ch.Parent, at("parent")...)
	names := ch.Names()
	if slices.Contains(reservedChild, names.ID) {
		c.fail(fmt.Sprintf("%q is the name of another member of children", names.ID), at()...)
	}
	if ch.Parent != "" && slices.Contains(reservedChild, names.Parent) {
		c.fail(fmt.Sprintf("%q is the name of another member of children", names.Parent), at("parent")...)
	}
	if by, ok := all.Edges[ch.RankedBy]; ch.RankedBy == "" {
	} else if !ok || by.To != ch.Name {
		c.fail(fmt.Sprintf("there are no edges %q to %s", ch.RankedBy, ch.Plural), at("ranked_by")...)
	} else if len(by.scores()) > 1 {
		c.fail(fmt.Sprintf("%s aggregates %s: want one integer at most, which is the score", by.Name, strings.Join(by.scores(), " and ")),
			at("ranked_by")...)
	}
	c.partitions(ch.Partitions, at("partitions")...)
	c.attributes(ch.Attributes, false, at("attributes")...)
	return ch
}

func (c *checking) partitions(n int, path ...string) {
	if n < 0 || n > MaxPartitions {
		c.fail(fmt.Sprintf("%d: want 0 to %d", n, MaxPartitions), path...)
	}
}

// attributes checks attributes one by one, and then their defaults.
func (c *checking) attributes(all map[string]Attribute, edges bool, path ...string) {
	before, filter := len(c.problems), ""
	if len(all) > MaxAttributes {
		c.fail(fmt.Sprintf("%d attributes: want at most %d", len(all), MaxAttributes), path...)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a, at := all[name], func(rest ...string) []string { return slices.Concat(path, []string{name}, rest) }
		c.want(name, nil, at()...)
		switch a.Type {
		case String, Integer, Boolean:
		case "":
			c.fail("is missing: want string, integer or boolean", at("type")...)
		default:
			c.fail(fmt.Sprintf("%q: want string, integer or boolean", a.Type), at("type")...)
		}
		c.enum(a, at)
		c.bounds(a, at)
		if a.Required && a.Default != nil {
			c.fail("an attribute with a default is never missing: remove one of the two", at("required")...)
		}
		switch {
		case !a.Aggregate || a.Type == Integer || edges && len(a.Enum) > 0:
		case edges:
			c.fail("only integers and enums of edges have aggregates", at("aggregate")...)
		default:
			c.fail("only integers of children have aggregates", at("aggregate")...)
		}
		if a.Filter && slices.Contains(reservedFilters, name) {
			c.fail(fmt.Sprintf("%q is reserved: lists have a parameter of this name", name), at()...)
		}
		if a.Filter && (!edges || len(a.Enum) == 0 || a.Type != String) {
			c.fail("only enums of edges are filters", at("filter")...)
		}
		if a.Filter && filter != "" {
			c.fail("a kind has at most one filter, and it has "+filter, at("filter")...)
		}
		if a.Filter {
			filter = name
		}
	}
	if len(c.problems) > before {
		return
	}
	for name, a := range all {
		if a.Default == nil {
			continue
		}
		if err := attributes(all).fits(name, a.Default); err != nil {
			c.fail(err.Error(), slices.Concat(path, []string{name, "default"})...)
		}
	}
}

func (c *checking) enum(a Attribute, at func(...string) []string) {
	if a.Enum == nil {
		return
	}
	switch {
	case len(a.Enum) == 0:
		c.fail("has no values", at("enum")...)
	case a.Type != String && a.Type != Integer:
		c.fail("only strings and integers have an enum", at("enum")...)
	}
	for i, v := range a.Enum {
		switch text, isText := v.(string); {
		case a.Type == Integer:
			if n, ok := v.(int64); !ok || n < -a.limit() || n > a.limit() {
				c.fail(fmt.Sprintf("%v: want integers from %d to %d", v, -a.limit(), a.limit()), at("enum")...)
			}
		case !isText:
			c.fail(fmt.Sprintf("%v: want strings: put it in quotes", v), at("enum")...)
		case !enumValue.MatchString(text):
			c.fail(fmt.Sprintf("%q: want letters, digits, and `_`, `.`, `-` inside, at most 64 characters", text), at("enum")...)
		}
		if slices.Contains(a.Enum[:i], v) {
			c.fail(fmt.Sprintf("%q is repeated", fmt.Sprint(v)), at("enum")...)
		}
	}
}

func (c *checking) bounds(a Attribute, at func(...string) []string) {
	limit := a.limit()
	for name, bound := range map[string]*int64{"minimum": a.Minimum, "maximum": a.Maximum} {
		switch {
		case bound == nil:
		case a.Type != Integer:
			c.fail("only integers have bounds", at(name)...)
		case *bound < -limit || *bound > limit:
			c.fail(fmt.Sprintf("%d: want %d to %d", *bound, -limit, limit), at(name)...)
		}
	}
	if a.Minimum != nil && a.Maximum != nil && *a.Minimum > *a.Maximum {
		c.fail(fmt.Sprintf("%d is above the maximum, %d", *a.Minimum, *a.Maximum), at("minimum")...)
	}
	if a.MaxLength != 0 && (a.Type != String || a.Enum != nil) {
		c.fail("only strings without an enum have a length", at("max_length")...)
	} else if a.MaxLength < 0 || a.MaxLength > MaxAttributeBytes {
		c.fail(fmt.Sprintf("%d: want 1 to %d", a.MaxLength, MaxAttributeBytes), at("max_length")...)
	}
}

// collisions reports words with two meanings: names of objects and kinds, plurals (the first part
// of a path), and lists of one object (the third part).
func (c *checking) collisions(added *Set) {
	taken := map[string]string{} // the owner, by space and word
	claim := func(ours bool, space, w, who string, path ...string) {
		if w == "" {
			return
		}
		key := space + " " + w
		if by, ok := taken[key]; ok && ours {
			c.fail(fmt.Sprintf("%q is taken by %s", w, by), path...)
		} else if !ok {
			taken[key] = who
		}
	}
	for _, ours := range []bool{false, true} {
		s := c.base
		if ours {
			s = added.minus(c.base, func(any, any) bool { return true }) // built-in kinds keep their words
		}
		for _, name := range slices.Sorted(maps.Keys(s.Objects)) {
			claim(ours, "name", name, "the object "+name, "objects", name)
			claim(ours, "path", s.Objects[name].Plural, "the object "+name, "objects", name)
		}
		for _, e := range s.AllEdges() {
			who := "the edges " + e.Name
			claim(ours, "name", e.Name, who, "edges", e.Name)
			claim(ours, "path", e.Plural, who, "edges", e.Name, "plural")
			claim(ours, "list of "+e.From, e.Forward, who, "edges", e.Name, "forward")
			claim(ours, "list of "+e.To, e.Reverse, who, "edges", e.Name, "reverse")
		}
		for _, ch := range s.AllChildren() {
			who := "the children " + ch.Name
			claim(ours, "name", ch.Name, who, "children", ch.Name)
			claim(ours, "path", ch.Plural, who, "children", ch.Name, "plural")
			claim(ours, "list of "+ch.Parent, ch.Plural, who, "children", ch.Name, "plural")
			if ch.Parent != Author {
				claim(ours, "list of "+Author, ch.Plural, who, "children", ch.Name, "plural")
			}
			if slices.Contains(reservedLists, ch.Plural) {
				c.fail(fmt.Sprintf("%q is reserved", ch.Plural), "children", ch.Name, "plural")
			}
		}
	}
}
