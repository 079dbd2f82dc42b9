package console

import (
	"context"
	"net/url"

	"github.com/tidings/tidings/internal/tokens"
)

// AddAct adds an act for a test. Call it before the first request.
func (c *Console) AddAct(name string, do func(ctx context.Context, progress func(done, total int64)) (string, error)) {
	c.acts[name] = &act{name: name, label: "Do", role: tokens.RoleAdmin,
		prepare: func(context.Context, *view, url.Values) (subject, error) { return subject{Target: "it"}, nil },
		do:      func(ctx context.Context, d *doing) (string, error) { return do(ctx, d.progress) }}
}

// Acts returns the names of all acts in order.
func (c *Console) Acts() (names []string) {
	for _, a := range c.allActs() {
		names = append(names, a.name)
	}
	return names
}

// Page is an entry of the registry of pages.
type Page struct{ Path, Title, Key, Group string }

// Pages returns all pages in order.
func (c *Console) Pages() (all []Page) {
	for _, p := range c.pages {
		all = append(all, Page{root + p.path, p.title, p.key, p.group})
	}
	return all
}

// Relative is the rule of every time on a page.
var Relative = relative
