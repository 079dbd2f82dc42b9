package kinds

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
)

//go:embed builtin.yaml
var builtin []byte

// Builtin returns the kinds that every installation has.
var Builtin = sync.OnceValue(func() *Set {
	s, err := Parse(builtin)
	if err != nil {
		panic(err) // the file is a part of this program
	}
	return s
})

// Parse reads a file of kinds that needs no other set, and sets the defaults. Its error joins all
// errors, each with its line.
func Parse(file []byte) (*Set, error) { return (&Set{}).Extend(file) }

// Extend returns the set with the kinds of a file added. The file may refer to kinds and objects of
// the set, and may repeat them unchanged. The error joins all errors, each with its line.
func (s *Set) Extend(file []byte) (*Set, error) {
	c := checking{base: s}
	added, err := c.decode(file)
	if err != nil {
		return nil, err
	}
	all := &Set{Objects: map[string]string{}, Edges: map[string]Edge{}, Children: map[string]Child{}}
	for _, from := range []*Set{added, s} { // the set wins; changed reports differences of the file
		maps.Copy(all.Objects, from.Objects)
		maps.Copy(all.Edges, from.Edges)
		maps.Copy(all.Children, from.Children)
	}
	c.changed(added)
	added = added.Without(s)
	c.objects(added)
	for _, e := range added.AllEdges() {
		all.Edges[e.Name] = c.edge(all, e)
	}
	for _, ch := range added.AllChildren() {
		all.Children[ch.Name] = c.child(all, ch)
	}
	c.collisions(all, added)
	if n := len(all.Edges) + len(all.Children); n > MaxKinds {
		c.fail(fmt.Sprintf("%d kinds: want at most %d", n, MaxKinds), "edges")
	}
	if err := c.err(); err != nil {
		return nil, err
	}
	return all, nil
}

// checking is the state of reading one file: its lines, and the errors found.
type checking struct {
	base     *Set
	root     *yaml.Node
	problems []problem
}

type problem struct {
	line int
	text string
}

// decode reads the file without checks and sets names and defaults.
func (c *checking) decode(file []byte) (*Set, error) {
	d := yaml.NewDecoder(bytes.NewReader(file))
	var doc, more yaml.Node
	err := d.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil, errors.New("the file is empty: `{}` is a file without kinds")
	}
	if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("line %d: this is a second document: want one", max(more.Line, 1))
	}
	c.root = doc.Content[0]

	var s Set
	d = yaml.NewDecoder(bytes.NewReader(file))
	d.KnownFields(true)
	if err := d.Decode(&s); err != nil {
		return nil, typeErrors(err)
	}
	for name, e := range s.Edges {
		e.Name = name
		if e.Ends == [2]string{} {
			e.Ends = [2]string{e.From + "_id", e.To + "_id"}
		}
		e.Attributes = withTypes(e.Attributes)
		s.Edges[name] = e
	}
	for name, ch := range s.Children {
		ch.Name = name
		ch.Attributes = withTypes(ch.Attributes)
		s.Children[name] = ch
	}
	return &s, nil
}

var goType = regexp.MustCompile(` (in|into) type kinds\.\w+| into kinds\.\w+`)

// typeErrors gives each of the decoder's errors its own line, without the names of Go types.
func typeErrors(err error) error {
	var types *yaml.TypeError
	if !errors.As(err, &types) {
		return errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	var all []error
	for _, text := range types.Errors {
		all = append(all, errors.New(goType.ReplaceAllString(text, "")))
	}
	return errors.Join(all...)
}

// withTypes returns the attributes with the types that follow from their enums and defaults.
func withTypes(all map[string]Attribute) map[string]Attribute {
	for name, a := range all {
		if a.Type == "" && len(a.Enum) > 0 {
			a.Type = String
		}
		switch n := a.Default.(type) {
		case int:
			a.Default = int64(n)
		case float64:
			if n == float64(int64(n)) { // another program may write JSON with floats
				a.Default = int64(n)
			}
		}
		all[name] = a
	}
	return all
}

// fail records an error at a place of the file: at the line of the longest part of the path that
// exists.
func (c *checking) fail(text string, path ...string) {
	node, line := c.root, c.root.Line
	for _, name := range path {
		for node.Kind == yaml.AliasNode {
			node = node.Alias
		}
		found := false
		for i := 0; node.Kind == yaml.MappingNode && i+1 < len(node.Content) && !found; i += 2 {
			if node.Content[i].Value == name {
				line, node, found = node.Content[i].Line, node.Content[i+1], true
			}
		}
		if !found {
			break
		}
	}
	c.problems = append(c.problems, problem{line, fmt.Sprintf("%s: %s", strings.Join(path, "."), text)})
}

func (c *checking) err() error {
	slices.SortStableFunc(c.problems, func(a, b problem) int { return a.line - b.line })
	var all []error
	for _, p := range slices.Compact(c.problems) {
		all = append(all, fmt.Errorf("line %d: %s", p.line, p.text))
	}
	return errors.Join(all...)
}

// changed reports kinds and objects of the file that differ from the set's.
func (c *checking) changed(added *Set) {
	const text = "is built in and cannot be changed; give the new one another name"
	for name, plural := range added.Objects {
		if have, ok := c.base.Objects[name]; ok && have != plural {
			c.fail(text, "objects", name)
		}
	}
	for name, e := range added.Edges {
		if have, ok := c.base.Edges[name]; ok && !same(have, e) {
			c.fail(text, "edges", name)
		}
	}
	for name, ch := range added.Children {
		if have, ok := c.base.Children[name]; ok && !same(have, ch) {
			c.fail(text, "children", name)
		}
	}
}
