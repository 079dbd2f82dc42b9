package load

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"github.com/tidings/tidings/client"
)

// Kinds are the kinds of the API.
type Kinds struct {
	Objects  []struct{ Name, Plural, ID string } // ID is the form of the object's ids
	Edges    []EdgeKind
	Children []ChildKind
}

// EdgeKind is a kind of edges.
type EdgeKind struct {
	Name, Plural, From, To string
	Ends                   [2]string // the members that name both ends
	Self                   bool
	Attributes             Schema

	FromIDs, ToIDs string `json:"-"` // the forms of the ids of From and To
}

// ChildKind is a kind of children.
type ChildKind struct {
	Name, Plural, Parent string
	Threaded, Moderated  bool
	OnePerAuthor         bool `json:"one_per_author"`
	Attributes           Schema

	Parents              string `json:"-"` // the plural of Parent
	ParentIDs, AuthorIDs string `json:"-"` // the forms of the ids of Parent and of authors
}

// ID returns the n-th id that a generator uses, from 1, of this form.
func ID(form string, n int64) client.ID {
	if form == "uuid" {
		return client.ID(fmt.Sprintf("00000000-0000-4000-8000-%012d", n))
	}
	return client.IDOf(n)
}

// NoSelf reports whether edges of the kind cannot lead from an id to the same id.
func (k EdgeKind) NoSelf() bool { return k.From == k.To && !k.Self }

// Schema is the JSON Schema of a kind's attributes. The zero value means no attributes.
type Schema struct {
	Properties map[string]Property
	Required   []string
}

// Property is one attribute.
type Property struct {
	Type             string
	Enum             []any // as JSON has them
	Minimum, Maximum *int64
	MaxLength        int `json:"maxLength"`
}

// spread is how many integers a generator uses between wide bounds.
const spread = 1000

// Generate makes values that the schema allows: for every required attribute, and for most others.
// Equal states of rnd make equal values. It returns nil for a kind without attributes.
func (s Schema) Generate(rnd *rand.Rand) map[string]any {
	if len(s.Properties) == 0 {
		return nil
	}
	all := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		v := s.Properties[name].generate(rnd)
		if rnd.Float64() < 0.8 || slices.Contains(s.Required, name) {
			all[name] = v
		}
	}
	return all
}

func (p Property) generate(rnd *rand.Rand) any {
	switch {
	case len(p.Enum) > 0:
		u := rnd.Float64()
		return p.Enum[int(u*u*float64(len(p.Enum)))] // the first ones more often
	case p.Type == "boolean":
		return rnd.IntN(2) == 0
	case p.Type == "integer":
		least, most := int64(math.MinInt32), int64(math.MaxInt32)
		if p.Minimum != nil {
			least = *p.Minimum
		}
		if p.Maximum != nil {
			most = *p.Maximum
		}
		if least < 0 && most > 0 && most-least >= spread { // around zero
			least = max(least, -spread/2)
		}
		return least + rnd.Int64N(min(most-least+1, spread))
	}
	text := words(rnd, 1+rnd.IntN(3))
	if p.MaxLength > 0 {
		text = text[:min(len(text), p.MaxLength)]
	}
	return text
}

// Edge returns the kind of edges with this name.
func (k *Kinds) Edge(name string) (EdgeKind, bool) {
	i := slices.IndexFunc(k.Edges, func(e EdgeKind) bool { return e.Name == name })
	if i < 0 {
		return EdgeKind{}, false
	}
	e := k.Edges[i]
	_, e.FromIDs = k.object(e.From)
	_, e.ToIDs = k.object(e.To)
	return e, true
}

// Child returns the kind of children with this name.
func (k *Kinds) Child(name string) (ChildKind, bool) {
	i := slices.IndexFunc(k.Children, func(c ChildKind) bool { return c.Name == name })
	if i < 0 {
		return ChildKind{}, false
	}
	c := k.Children[i]
	c.Parents, c.ParentIDs = k.object(c.Parent)
	_, c.AuthorIDs = k.object("user")
	return c, true
}

// object returns the plural of an object, and the form of its ids.
func (k *Kinds) object(name string) (plural, ids string) {
	for _, o := range k.Objects {
		if o.Name == name {
			return o.Plural, o.ID
		}
	}
	return "", ""
}

// Kinds reads the kinds from the API, and retries as Run does. It needs the role read.
func (l *Loader) Kinds(ctx context.Context) (*Kinds, error) {
	var kinds Kinds
	ask := job{do: func(ctx context.Context) (time.Duration, error) {
		const path = "/v1/kinds"
		resp, refused, after, err := l.request(ctx, http.MethodGet, path, nil, &kinds)
		if refused != nil {
			return 0, &RefusedError{What: "GET " + path, Status: resp.Status, Reason: reason(refused)}
		}
		return after, err
	}}
	if err := l.run(ctx, func(yield func(job, error) bool) { yield(ask, nil) }); err != nil {
		return nil, fmt.Errorf("read the kinds: %w", err)
	}
	return &kinds, nil
}
