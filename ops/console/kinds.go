package console

import (
	"context"
	"slices"
	"strings"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/upstreams"
)

type kindsPage struct {
	Edges     []kindRow
	Children  []kindRow
	Upstreams []upstreams.Upstream // only for operators, like the next
	History   []catalog.Version    // newest first
}

type kindRow struct {
	Name, Plural, From, To, Lists string
	Has                           []string // capabilities
	Attributes                    []string
	Source                        string
}

func (c *Console) kindsData(ctx context.Context, v *view) (any, error) {
	set := c.deps.Kinds.Now()
	stated := set.Without(kinds.Builtin())
	source := func(name string) string {
		switch {
		case !kinds.Builtin().Has(name):
			return "applied"
		case stated.Has(name):
			return "built in, changed"
		}
		return "built in"
	}
	var p kindsPage
	for _, e := range set.AllEdges() {
		row := kindRow{Name: e.Name, Plural: e.Plural, From: e.From, To: e.To, Lists: e.Forward + ", " + e.Reverse,
			Attributes: attributes(e.Attributes), Source: source(e.Name)}
		if e.Self {
			row.Has = append(row.Has, "to itself")
		}
		p.Edges = append(p.Edges, row)
	}
	for _, k := range set.AllChildren() {
		row := kindRow{Name: k.Name, Plural: k.Plural, To: k.Parent, Attributes: attributes(k.Attributes), Source: source(k.Name)}
		for _, can := range []struct {
			is   bool
			says string
		}{{k.Threaded, "threaded"}, {k.Moderated, "moderated"}, {k.OnePerAuthor, "one per author"}} {
			if can.is {
				row.Has = append(row.Has, can.says)
			}
		}
		p.Children = append(p.Children, row)
	}
	if !v.who.System() {
		return p, nil
	}
	var err error
	if p.Upstreams, err = declared.List(ctx, c.deps.Truth); err != nil {
		return nil, err
	}
	p.History, err = catalog.History(ctx, c.deps.Truth)
	slices.Reverse(p.History)
	return p, err
}

func attributes(of map[string]kinds.Attribute) (all []string) {
	for name, a := range of {
		all = append(all, strings.TrimSpace(name+" "+a.Type))
	}
	slices.Sort(all)
	return all
}
