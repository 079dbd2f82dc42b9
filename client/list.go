package client

import (
	"context"
	"iter"
	"net/http"
	"time"
)

// Page is one page of a list.
type Page[T any] struct {
	Items  []T          `json:"items"`
	Next   string       `json:"next,omitempty"`   // the Cursor of the next page; "" on the last
	Prev   string       `json:"prev,omitempty"`   // of the page before, of lists of children that have one
	AsOf   time.Time    `json:"as_of,omitzero"`   // everything published until then is in the page; zero of what comes from the truth
	Thread *ThreadState `json:"thread,omitempty"` // of the children of a moderated kind
}

func (p *Page[T]) asOf() time.Time { return p.AsOf }

// List is a list that the API gives page by page. Making one sends nothing. It is not safe for concurrent use.
type List[T any] struct {
	core   *core
	make   func(ctx context.Context) (*call, names, error)
	begun  string // the Cursor of the options
	cursor string
	asOf   time.Time
}

// listOf is the list at a path.
func listOf[T any](c *core, path string, fresh bool, opts []Option) *List[T] {
	return lazily[T](c, func(context.Context) (string, names, error) { return path, nil, nil }, fresh, opts)
}

// lazily is a list whose path is asked for when it is read.
func lazily[T any](c *core, where func(context.Context) (string, names, error), fresh bool, opts []Option) *List[T] {
	l := &List[T]{core: c}
	l.make = func(ctx context.Context) (*call, names, error) {
		path, n, err := where(ctx)
		if err != nil {
			return nil, nil, err
		}
		k := newCall(http.MethodGet, path, opts)
		k.fresh = fresh
		return k, n, nil
	}
	if len(opts) == 0 {
		return l
	}
	if k := newCall("", "", opts); k.query != nil {
		l.begun = k.query.Get("cursor")
		l.cursor = l.begun
	}
	return l
}

// Cursor is where to resume: a list of the same kind with this Cursor begins behind the last page whose items All, or Pages, has handed out to the end. So
// a list that ended within a page repeats items of that page, and misses none. "" is the beginning.
func (l *List[T]) Cursor() string { return l.cursor }

// AsOf is when the page that was read last was current.
func (l *List[T]) AsOf() time.Time { return l.asOf }

// First reads one page, from the cursor on.
func (l *List[T]) First(ctx context.Context) (Page[T], error) {
	k, n, err := l.make(ctx)
	if err != nil {
		return Page[T]{}, err
	}
	return fetch[Page[T]](ctx, l.core, k, n)
}

// Pages reads the list page by page. An error is the last that it yields.
func (l *List[T]) Pages(ctx context.Context) iter.Seq2[Page[T], error] {
	return func(yield func(Page[T], error) bool) {
		for {
			k, n, err := l.make(ctx)
			var page Page[T]
			if err == nil {
				if l.cursor != l.begun { // what says where to begin was for the first page
					k.query.Del("skip")
					k.query.Del("around")
				}
				Query("cursor", l.cursor)(k)
				page, err = fetch[Page[T]](ctx, l.core, k, n)
			}
			if err != nil {
				yield(Page[T]{}, err)
				return
			}
			l.asOf = page.AsOf
			if !yield(page, nil) || page.Next == "" {
				return
			}
			l.cursor = page.Next
		}
	}
}

// All reads the list item by item. An error is the last that it yields.
func (l *List[T]) All(ctx context.Context) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		for page, err := range l.Pages(ctx) {
			if err != nil {
				yield(none, err)
				return
			}
			for _, item := range page.Items {
				if !yield(item, nil) {
					return
				}
			}
		}
	}
}
