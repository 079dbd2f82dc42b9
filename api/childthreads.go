package api

import (
	"context"
	"fmt"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections/threadcache"
)

// The routes of threaded kinds, whose children reply to each other. Their list also has the order
// threaded.

// maxTree is the maximum number of children in one tree document.
const maxTree = 1000

// childTree is a whole thread. Its items are childBody values with their replies.
type childTree struct {
	Items  []any      `json:"items" nullable:"false"`
	Thread any        `json:"thread,omitempty"`
	AsOf   event.Time `json:"as_of" format:"date-time" doc:"The tree includes every write that had committed by this time, except parked and scheduled events."`
}

type repliesInput struct {
	ChildPath
	Page
	Counting
}

type treeInput struct {
	UnderPath
	Counting
}

type slugInput struct {
	UnderPath
	Slug string `path:"slug" pattern:"^[0-9a-z]{8}$" patternDescription:"8 digits and lower-case letters"`
	Counting
}

func (c *childRoutes) threadRoutes() {
	page := &huma.Schema{Ref: "#/components/schemas/" + c.schemaName("Page")}
	register(c.server, c.listing("replies", c.one()+"/replies", page,
		words{"list-" + c.dashed + "-replies", "List everything below {a child}",
			"Reads a projection, in the order of the thread: each {child}, then its replies, at any depth. An invisible {child} with a " +
				"visible reply is a tombstone."},
		codeCursorInvalid, codeNotFound), c.replies)

	replies := arrayOf(&huma.Schema{Ref: "#/components/schemas/" + c.schemaName("InTree")}, "Oldest first.")
	replies.Nullable = true
	node := c.schema("InTree", childBody{}, c.looks("replies"), property("replies", replies, false))
	register(c.server, c.listing("tree", c.under()+"/tree",
		c.schema("Tree", childTree{}, listItems(node, c.text("The top-level {children}, oldest first.")), c.threadOf),
		words{"get-" + c.dashed + "-tree", "Read a whole thread as one document",
			fmt.Sprintf("Reads a projection. Returns up to %d {children}, tombstones included; read a larger thread in pages.", maxTree)},
		codeThreadTooLarge), c.tree)

	linked := c.schema("BySlug", childBody{}, c.looks("thread", "as_of"), c.threadOf,
		func(s *huma.Schema) { s.Required = append(s.Required, "as_of") })
	register(c.server, c.listing("slug", c.under()+"/by-slug/{slug}", linked,
		words{"get-" + c.dashed + "-by-slug", "Read {a child} by its permalink",
			"Reads a projection. A " + c.gone() + " {child} is a tombstone. `around` of the list shows it in its context."},
		codeNotFound),
		c.bySlug)
}

// threaded returns a page in the order of the thread of the list's object. If below is the path of
// a child, it has only what is below that child.
func (c *childRoutes) threaded(ctx context.Context, l list, below string, in Page, counts []string) (*anyOutput, error) {
	var after threadCursor
	return c.page(ctx, l, in, counts, true, &after, func(tx pgx.Tx) (childWindow, error) {
		return in.window(threadcache.Threaded(ctx, tx, c.k.Name, l.of, below, string(after), in.Limit+1))
	})
}

func (c *childRoutes) replies(ctx context.Context, in *repliesInput) (*anyOutput, error) {
	tenant, id := callerOf(ctx).TenantID, in.ID.lower()
	var of event.Child
	if _, err := c.readProjection(ctx, tenant, threadcache.Name, func(tx pgx.Tx) error {
		child, found, err := threadcache.ByID(ctx, tx, c.k.Name, id)
		if err == nil && !found {
			err = c.notFound()
		}
		of = child
		return err
	}); err != nil {
		return nil, err
	}
	// A child never changes its place, so a second transaction may read its replies.
	return c.threaded(ctx, list{tenant: tenant, name: c.k.Name + " replies " + id, of: of.Parent}, of.Path, in.Page, in.Counts)
}

func (c *childRoutes) tree(ctx context.Context, in *treeInput) (*anyOutput, error) {
	object := in.Object.ID
	var rows []event.Child
	var counts []map[string]any
	var thread any
	read, err := c.readProjection(ctx, callerOf(ctx).TenantID, threadcache.Name, func(tx pgx.Tx) (err error) {
		if thread, err = c.readThread(ctx, tx, object); err == nil {
			rows, err = threadcache.Threaded(ctx, tx, c.k.Name, object, "", "", maxTree+1)
		}
		if err == nil {
			counts, err = c.countsOf(ctx, tx, rows, in.Counts)
		}
		return err
	}, counting(in.Counts)...)
	if err != nil {
		return nil, err
	}
	if len(rows) > maxTree {
		list := strings.Replace(c.under(), "{object_id}", fmt.Sprint(object), 1)
		return nil, c.problems.problem(codeThreadTooLarge,
			fmt.Sprintf("read %s?order=threaded in pages, or read %s/replies for the part below one %s", list, c.one(), c.k.Name))
	}
	items, _, _ := c.nest(rows, counts, "")
	return &anyOutput{Body: childTree{Items: items, Thread: thread, AsOf: read.asOf}}, nil
}

// nest makes a tree of the first rows, as far as they are below a path, and returns the other rows,
// and their counts if there are any. The rows are in the order of the thread. The parent of a child
// may be missing, for example because its event waits in the DLQ. Then the child is below its
// nearest ancestor.
func (c *childRoutes) nest(rows []event.Child, counts []map[string]any, below string) ([]any, []event.Child, []map[string]any) {
	nodes := []any{}
	for len(rows) > 0 && strings.HasPrefix(rows[0].Path, below) {
		node, inside := childBodyOf(rows[0]), rows[0].Path+"/"
		rows = rows[1:]
		if counts != nil {
			node.Counts, counts = counts[0], counts[1:]
		}
		node.Replies, rows, counts = c.nest(rows, counts, inside)
		nodes = append(nodes, c.value(node))
	}
	return nodes, rows, counts
}

func (c *childRoutes) bySlug(ctx context.Context, in *slugInput) (*anyOutput, error) {
	var child event.Child
	var counts []map[string]any
	var thread any
	read, err := c.readProjection(ctx, callerOf(ctx).TenantID, threadcache.Name, func(tx pgx.Tx) (err error) {
		if thread, err = c.readThread(ctx, tx, in.Object.ID); err != nil {
			return err
		}
		var found bool
		child, found, err = threadcache.BySlug(ctx, tx, c.k.Name, in.Object.ID, in.Slug)
		if err == nil && !found {
			err = c.notFound()
		}
		if err == nil {
			counts, err = c.countsOf(ctx, tx, []event.Child{child}, in.Counts)
		}
		return err
	}, counting(in.Counts)...)
	if err != nil {
		return nil, err
	}
	body := childBodyOf(child)
	body.Thread, body.AsOf = thread, &read.asOf
	if counts != nil {
		body.Counts = counts[0]
	}
	return &anyOutput{Body: c.value(body)}, nil // no ETag: the version covers neither the thread nor as_of
}
