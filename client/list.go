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
	Next   string       `json:"next,omitempty"`   // the Cursor of the next page; "" on the last page
	Prev   string       `json:"prev,omitempty"`   // the Cursor of the previous page, in lists of children; "" if there is none
	AsOf   time.Time    `json:"as_of,omitzero"`   // the page includes every write committed by then; zero if it comes from the truth
	Thread *ThreadState `json:"thread,omitempty"` // only for children of a moderated kind
}

func (p *Page[T]) asOf() time.Time { return p.AsOf }

// List is a list that the API returns page by page. Making a List sends nothing. It is not safe for
// concurrent use.
type List[T any] struct {
	core   *core
	make   func(ctx context.Context) (*call, error)
	begun  string // the Cursor in the options
	cursor string
	asOf   time.Time
}

// listOf returns the list at a path.
func listOf[T any](c *core, path string, session bool, opts []Option) *List[T] {
	return lazily[T](c, func(context.Context) (string, names, error) { return path, nil, nil }, session, opts)
}

// lazily returns a list whose path is determined when it is read.
func lazily[T any](c *core, where func(context.Context) (string, names, error), session bool, opts []Option) *List[T] {
	l := &List[T]{core: c}
	l.make = func(ctx context.Context) (*call, error) {
		path, n, err := where(ctx)
		k := newCall(http.MethodGet, path, opts).named(n)
		k.session = session
		return k, err
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

// Cursor returns where to resume: a list of the same kind with this Cursor begins after the last
// page whose items All or Pages has yielded completely. If you stop within a page, the resumed list
// repeats items of that page, and misses none. "" is the beginning.
func (l *List[T]) Cursor() string { return l.cursor }

// AsOf returns the as_of of the page that was read last.
func (l *List[T]) AsOf() time.Time { return l.asOf }

// First reads one page, beginning at the cursor.
func (l *List[T]) First(ctx context.Context) (Page[T], error) {
	k, err := l.make(ctx)
	if err != nil {
		return Page[T]{}, err
	}
	return fetch[Page[T]](ctx, l.core, k)
}

// Pages reads the list page by page. After an error it yields nothing more.
func (l *List[T]) Pages(ctx context.Context) iter.Seq2[Page[T], error] {
	return func(yield func(Page[T], error) bool) {
		for {
			k, err := l.make(ctx)
			var page Page[T]
			if err == nil {
				if l.cursor != l.begun { // skip and around are for the first page only
					k.query.Del("skip")
					k.query.Del("around")
				}
				Query("cursor", l.cursor)(k)
				page, err = fetch[Page[T]](ctx, l.core, k)
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

// All reads the list item by item. After an error it yields nothing more.
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
