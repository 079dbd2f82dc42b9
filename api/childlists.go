package api

import (
	"context"
	"net/http"
	"slices"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// childPage is one page of the children of an object.
type childPage struct {
	Items  []any      `json:"items" nullable:"false"`
	Next   string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
	Prev   string     `json:"prev,omitempty" doc:"The cursor of the previous page, in the orders oldest and newest; absent on the first page."`
	Thread any        `json:"thread,omitempty"`
	AsOf   event.Time `json:"as_of" format:"date-time" doc:"The page includes every write that had committed by this time, except parked and scheduled events."`
}

// childSummary has the counts of an object's children.
type childSummary struct {
	Object         event.ID    `json:"object_id"`
	Visible        int64       `json:"visible" example:"128" doc:"The number of visible {children}."`
	Total          int64       `json:"total" example:"131" doc:"The number of {children} ever written, deleted ones included."`
	LastActivityAt *event.Time `json:"last_activity_at,omitempty" format:"date-time" doc:"When the newest visible {child} was written; absent if none is visible."`
	Thread         any         `json:"thread,omitempty"`
	AsOf           event.Time  `json:"as_of" format:"date-time" doc:"The counts include every write that had committed by this time, except parked and scheduled events."`
}

// childVersion is a version of a child.
type childVersion struct {
	VersionInfo
	Reason string `json:"reason,omitempty" example:"spam" doc:"The moderator's reason; only with the role moderate."`
	Child  any    `json:"child"`
}

// Place is the place in the order of age at which a page begins.
type Place struct {
	Skip   int64   `query:"skip" minimum:"0" example:"200" doc:"Skip this many visible {children}, in the orders oldest and newest. Excludes cursor and around."`
	Around childID `query:"around" doc:"Return the page with this {child} in its middle, oldest first. If the {child} is not visible, the page is around its place. Excludes cursor and skip."`
	Page
}

// Counting selects the counts of each child of a list.
type Counting struct {
	Counts []string `query:"counts" maxItems:"20" doc:"Lists of edges to each {child}, separated by commas: each {child} has their counts, and what their attributes add up to."`
}

// flatOrders describes the order of a list of children without replies.
const flatOrders = "Visible {children} by age. top: those with the highest score first, and of one score the newest first."

type childListInput struct {
	UnderPath
	Order string `query:"order" default:"oldest" enum:"oldest,newest,threaded,top" example:"newest" doc:"oldest and newest: visible {children} by age. threaded: each {child}, then its replies; an invisible {child} with a visible reply is a tombstone. top: visible {children}, those with the highest score first, and of one score the newest first."`
	Place
	Counting
}

type authorInput struct {
	UserPath
	Page
	Counting
}

type childVersionsInput struct {
	ChildPath
	Page
}

// listing returns a route that reads the projection.
func (c *childRoutes) listing(operation, path string, answer *huma.Schema, w words, codes ...string) route {
	r := c.route(operation, http.MethodGet, path, tokens.RoleRead, http.StatusOK, w)
	r.projected, r.answer, r.codes = true, answer, codes
	return r
}

// listItems sets the items of a list's schema.
func listItems(of *huma.Schema, description string) func(*huma.Schema) {
	return func(s *huma.Schema) { s.Properties["items"] = arrayOf(of, description) }
}

// threadOf sets the thread's state in an answer's schema. It removes the member if the kind is not
// moderated.
func (c *childRoutes) threadOf(schema *huma.Schema) {
	if c.k.Moderated {
		property("thread", c.thread, true)(schema)
	} else {
		without("thread")(schema)
	}
}

func (c *childRoutes) listRoutes() {
	page := c.schema("Page", childPage{}, listItems(c.entity, ""), c.threadOf)
	r := c.listing("list", c.under(), page,
		words{"list-" + c.tagged, "List the {children} of {an object}", "Reads a projection. An unknown {object} has an empty list."},
		codeCursorInvalid, codeNotFound)
	register(c.server, r, c.list)
	register(c.server, c.listing("summary", c.under()+"/summary", c.schema("Summary", childSummary{}, c.threadOf),
		words{"get-" + c.dashed + "-summary", "Count the {children} of {an object}", "Reads a projection. An unknown {object} counts 0."}),
		c.summary)

	answer := c.schema("List", entityList{}, listItems(c.entity, ""))
	authored := c.listing("authored", "/v1/"+c.kinds.Objects[authors].Plural+"/{user_id}/"+c.k.Plural, answer,
		words{"list-" + authors + "-" + c.tagged, "List a " + authors + "'s visible {children}, newest first",
			"Reads a projection. An unknown " + authors + " has an empty list."}, codeCursorInvalid)
	authored.tag = "Users"
	register(c.server, authored, func(ctx context.Context, in *authorInput) (*anyOutput, error) {
		l := list{tenant: callerOf(ctx).TenantID, name: c.k.Plural + " of " + authors, of: in.ID.ID}
		var after ageCursor
		return c.page(ctx, l, in.Page, in.Counts, false, &after, func(tx pgx.Tx) (childWindow, error) {
			return in.window(threadcache.ByAuthor(ctx, tx, c.k.Name, l.of, after.key(), in.Limit+1))
		})
	})
	if c.k.Moderated {
		c.pendingRoute(answer)
	}
}

// values returns the children as answers show them. With counts they have those of these lists.
func (c *childRoutes) values(rows []event.Child, counts []map[string]any) []any {
	items := make([]any, len(rows))
	for i, row := range rows {
		body := childBodyOf(row)
		if counts != nil {
			body.Counts = counts[i]
		}
		items[i] = c.value(body)
	}
	return items
}

// counting returns the consumers that a read with these counts is of, besides that of the list.
func counting(lists []string) (also []string) {
	if len(lists) > 0 {
		also = append(also, followercounts.Name)
	}
	return also
}

// countsOf returns the counts of these lists for each child, or nil without lists.
func (c *childRoutes) countsOf(ctx context.Context, tx pgx.Tx, rows []event.Child, lists []string) ([]map[string]any, error) {
	if len(lists) == 0 {
		return nil, nil
	}
	ids := make([]event.ID, len(rows))
	for i, row := range rows {
		ids[i] = event.ID(row.ID)
	}
	ends := slices.DeleteFunc(slices.Clone(c.ends), func(e counted) bool { return !slices.Contains(lists, e.list) })
	return edgeCounts(ctx, tx, ends, ids)
}

// readThread reads the state of the object's thread. It returns nil if the kind is not moderated.
func (c *childRoutes) readThread(ctx context.Context, tx pgx.Tx, object event.ID) (any, error) {
	if !c.k.Moderated {
		return nil, nil
	}
	settings, err := threadcache.ReadSettings(ctx, tx, c.k.Name, object)
	return threadState(settings), err
}

func (s *server) notFound() error { return s.problems.problem(codeNotFound, "") }

// childCursor is the content of a cursor of children: a place in the list's order.
type childCursor interface {
	// at returns the place of a child. The page begins after it, or ends before it.
	at(c event.Child, before bool) any
}

// ageCursor is a place in the order of age.
type ageCursor struct {
	At     event.Time `json:"t"`
	ID     string     `json:"c"`
	Before bool       `json:"b,omitempty"`
}

func (ageCursor) at(c event.Child, before bool) any { return ageCursor{c.CreatedAt, c.ID, before} }

// key returns the place for the projection, or nil if the request has no cursor.
func (c ageCursor) key() *threadcache.Key {
	if c.ID == "" {
		return nil
	}
	return &threadcache.Key{CreatedAt: c.At.Time, ChildID: c.ID}
}

// rankCursor is a place in the order of ranks.
type rankCursor struct {
	Score int64      `json:"s"`
	At    event.Time `json:"t"`
	ID    string     `json:"c"`
}

func (c rankCursor) at(event.Child, bool) any { return c }

func (c rankCursor) after() *threadcache.Ranked {
	if c.ID == "" {
		return nil
	}
	return &threadcache.Ranked{ID: c.ID, Score: c.Score, CreatedAt: c.At.Time}
}

// threadCursor is a path: a place in the order of the thread.
type threadCursor string

func (threadCursor) at(c event.Child, _ bool) any { return c.Path }

// childWindow is the part of a list that a page shows.
type childWindow struct {
	rows           []event.Child
	earlier, later bool // whether the list has children before and after it
	end            any  // the cursor of the next page, if it is not the place of the last child
}

// window returns the first rows of a query for one row more than the limit.
func (p Page) window(rows []event.Child, err error) (childWindow, error) {
	return childWindow{rows: rows[:min(len(rows), p.Limit)], later: len(rows) > p.Limit}, err
}

// page answers with a page of a list in the projection. It reads the request's cursor into from,
// and then the window with query. If the list is of one object, the page has the state of its
// thread. Its children have the counts of these lists.
func (c *childRoutes) page(ctx context.Context, l list, in Page, counts []string, ofObject bool, from childCursor,
	query func(tx pgx.Tx) (childWindow, error), also ...string) (*anyOutput, error) {
	if in.Cursor != "" {
		if err := c.cursors.decode(l, in.Cursor, from); err != nil {
			return nil, err
		}
	}
	if len(also) == 0 {
		also = counting(counts)
	}
	var page childPage
	var w childWindow
	var counted []map[string]any
	read, err := c.readProjection(ctx, l.tenant, threadcache.Name, func(tx pgx.Tx) (err error) {
		if ofObject {
			if page.Thread, err = c.readThread(ctx, tx, l.of); err != nil {
				return err
			}
		}
		if w, err = query(tx); err == nil {
			counted, err = c.countsOf(ctx, tx, w.rows, counts)
		}
		return err
	}, also...)
	if err != nil {
		return nil, err
	}
	page.Items, page.AsOf = c.values(w.rows, counted), read.asOf
	switch n := len(w.rows); {
	case w.end != nil:
		page.Next, err = c.cursors.encode(l, w.end)
	case n > 0 && w.later:
		page.Next, err = c.cursors.encode(l, from.at(w.rows[n-1], false))
	}
	if err == nil && len(w.rows) > 0 && w.earlier {
		page.Prev, err = c.cursors.encode(l, from.at(w.rows[0], true))
	}
	return &anyOutput{Body: page}, err
}

// checkPlace refuses parameters that name two places.
func (s *server) checkPlace(order string, in Place) error {
	refuse := func(parameter, detail string) error {
		return s.problems.problem(codeValidation, "", FieldError{Detail: detail, Parameter: parameter})
	}
	switch {
	case in.Skip > 0 && order != "oldest" && order != "newest":
		return refuse("skip", "skip needs the order oldest or newest")
	case in.Skip > 0 && (in.Cursor != "" || in.Around != ""):
		return refuse("skip", "skip excludes cursor and around")
	case in.Around != "" && order != "oldest":
		return refuse("around", "around needs the order oldest")
	case in.Around != "" && in.Cursor != "":
		return refuse("around", "around excludes cursor and skip")
	}
	return nil
}

// list returns a page of the children of an object.
func (c *childRoutes) list(ctx context.Context, in *childListInput) (*anyOutput, error) {
	if err := c.checkPlace(in.Order, in.Place); err != nil {
		return nil, err
	}
	l := list{tenant: callerOf(ctx).TenantID, name: c.k.Plural + " " + in.Order, of: in.Object.ID}
	switch in.Order {
	case "threaded":
		return c.threaded(ctx, l, "", in.Page, in.Counts)
	case "top":
		var from rankCursor
		return c.page(ctx, l, in.Page, in.Counts, true, &from, func(tx pgx.Tx) (childWindow, error) {
			return c.byRank(ctx, tx, l.of, in.Limit, from)
		}, followercounts.Name)
	}
	var from ageCursor
	return c.page(ctx, l, in.Page, in.Counts, true, &from, func(tx pgx.Tx) (childWindow, error) {
		return c.byAge(ctx, tx, l.of, threadcache.Order(in.Order == "newest"), in.Place, from)
	})
}

// byRank reads a page in the order of ranks. The page leaves out children that the list of children
// does not show: one of the two projections may be ahead.
func (c *childRoutes) byRank(ctx context.Context, tx pgx.Tx, object event.ID, limit int, from rankCursor) (w childWindow, err error) {
	ranked, err := threadcache.Top(ctx, tx, c.k.Name, object, from.after(), limit+1)
	if err != nil {
		return w, err
	}
	if len(ranked) > limit {
		ranked = ranked[:limit]
		last := ranked[limit-1]
		w.end = rankCursor{last.Score, event.Time{Time: last.CreatedAt}, last.ID}
	}
	for _, r := range ranked {
		if r.Child != nil {
			w.rows = append(w.rows, *r.Child)
		}
	}
	return w, nil
}

// byAge reads a page in the order of age: around a child, before a cursor, after skipped children,
// or after a cursor, which may be zero.
func (c *childRoutes) byAge(ctx context.Context, tx pgx.Tx, object event.ID, order threadcache.Order, in Place,
	from ageCursor) (w childWindow, err error) {
	switch {
	case in.Around != "":
		child, found, err := threadcache.ByID(ctx, tx, c.k.Name, in.Around.lower())
		if err == nil && (!found || child.Parent != object) {
			err = c.notFound()
		}
		if err == nil {
			w.rows, w.earlier, w.later, err = threadcache.Around(ctx, tx, c.k.Name, child, in.Limit)
		}
		return w, err
	case from.Before:
		w, err = in.window(threadcache.Page(ctx, tx, c.k.Name, object, !order, from.key(), in.Limit+1))
		slices.Reverse(w.rows)
		return childWindow{rows: w.rows, earlier: w.later, later: true}, err
	case in.Skip > 0:
		w, err = in.window(threadcache.Skip(ctx, tx, c.k.Name, object, order, in.Skip, in.Limit+1))
	default:
		w, err = in.window(threadcache.Page(ctx, tx, c.k.Name, object, order, from.key(), in.Limit+1))
	}
	w.earlier = in.Skip > 0 || in.Cursor != ""
	return w, err
}

func (c *childRoutes) summary(ctx context.Context, in *UnderPath) (*anyOutput, error) {
	var sums map[threadcache.Object]threadcache.Summary
	var thread any
	read, err := c.readProjection(ctx, callerOf(ctx).TenantID, threadcache.Name, func(tx pgx.Tx) (err error) {
		if thread, err = c.readThread(ctx, tx, in.Object.ID); err == nil {
			sums, err = threadcache.ReadSummaries(ctx, tx, []string{c.k.Name}, []event.ID{in.Object.ID})
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	sum := sums[threadcache.Object{Kind: c.k.Name, ID: in.Object.ID}]
	out := childSummary{Object: in.Object.ID, Visible: sum.Visible, Total: sum.Total, Thread: thread, AsOf: read.asOf}
	if sum.LastAt != nil {
		out.LastActivityAt = &event.Time{Time: *sum.LastAt}
	}
	return &anyOutput{Body: c.value(&out)}, nil
}

func (c *childRoutes) versionRoute() {
	shows := "author, body and actor"
	if len(c.k.Attributes) > 0 {
		shows = "author, body, attributes and actor"
	}
	r := c.route("versions", http.MethodGet, c.one()+"/versions", tokens.RoleRead, http.StatusOK, words{"list-" + c.dashed + "-versions",
		"List the versions of {a child}, newest first",
		"Shows who changed the {child}, and when. While the {child} is " + c.gone() + ", its versions show " + shows + " only to tokens " +
			"with the role moderate. After an erasure they show them to no token." + fromTheHistory})
	entity := refer(c.entity,
		c.text("The {child} at this version. While the {child} is a tombstone, only the role moderate sees author and body."))
	version := c.schema("Version", childVersion{}, property(c.of("child"), entity, true))
	r.answer = c.schema("Versions", entityVersions{}, listItems(version, "Newest first."))
	r.codes = []string{codeCursorInvalid, codeNotFound}
	register(c.server, r, c.versions)
}

func (c *childRoutes) versions(ctx context.Context, in *childVersionsInput) (*anyOutput, error) {
	by, id := callerOf(ctx), in.ID.lower()
	l := list{tenant: by.TenantID, name: "versions of " + c.k.Name + " " + id}
	rows, next, asOf, err := past(ctx, c.server, l, in.Page, func(tx pgx.Tx, before int64) ([]versioned.Version[event.Child], error) {
		return history.Children(c.k).Recent(ctx, tx, by.TenantID, versioned.Key{id}, before, in.Limit+1)
	})
	if err != nil {
		return nil, err
	}
	// Read the state from the truth, after the history. Otherwise a child that was hidden just now
	// is shown because the history lags.
	now, err := c.store.GetChild(ctx, by.TenantID, c.k, id)
	if err != nil {
		return nil, err
	}
	gone, moderator := !event.BodyTravels(now.AuthorState, now.ModerationState), by.Has(tokens.RoleModerate)
	items := make([]any, len(rows))
	for i, v := range rows {
		item, child := childVersion{VersionInfo: infoOf(v, v.Object.Version)}, childBodyOf(v.Object)
		if moderator {
			item.Reason = v.Object.Reason
		}
		if now.AuthorState == event.AuthorErased || gone && !moderator {
			item.Actor, child.AuthorID, child.Body, child.Attributes = "", "", "", nil
		}
		item.Child = c.value(child)
		items[i] = c.value(&item)
	}
	return &anyOutput{Body: entityVersions{Items: items, Next: next, AsOf: asOf}}, nil
}
