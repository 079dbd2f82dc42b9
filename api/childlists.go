package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/tokens"
	"github.com/tidings/tidings/versioned"
)

// childPage is one page of the children of an object.
type childPage struct {
	Items  []any        `json:"items" nullable:"false"`
	Next   string       `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	Prev   string       `json:"prev,omitempty" doc:"The cursor of the page before, in the orders oldest and newest; absent on the first. What it leads to may be gone by then."`
	Thread *ThreadState `json:"thread,omitempty"`
	AsOf   event.Time   `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the page."`
}

// childList is one page of children of any objects.
type childList struct {
	Items []any      `json:"items" nullable:"false"`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the list."`
}

// childVersion is a version of a child.
type childVersion struct {
	VersionInfo
	Reason string `json:"reason,omitempty" example:"spam" doc:"The moderator's; only with the role moderate."`
	Child  any    `json:"child"`
}

// childVersions is one page of a child's versions.
type childVersions struct {
	Items []any      `json:"items" nullable:"false" doc:"The newest first."`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the history."`
}

// Place is where a page in the order of age begins.
type Place struct {
	Skip   int64     `query:"skip" minimum:"0" example:"200" doc:"Begin behind this many visible ones, in the orders oldest and newest. Not together with cursor or around."`
	Around commentID `query:"around" doc:"The page with this one in its middle, the oldest first. Of one that is gone it is the page around its place. Not together with cursor or skip."`
	Page
}

type flatListInput struct {
	UnderPath
	Order string `query:"order" default:"oldest" enum:"oldest,newest" example:"newest" doc:"The visible ones by age."`
	Place
}

type threadListInput struct {
	UnderPath
	Order string `query:"order" default:"oldest" enum:"oldest,newest,threaded" example:"newest" doc:"oldest and newest: the visible ones by age. threaded: each, then its replies; one that is gone with a visible one below it is a tombstone."`
	Place
}

type pendingListInput struct {
	Object id `query:"object_id" doc:"Only under this object."`
	Page
}

func (c *childRoutes) listRoutes() {
	item := arrayOf(c.entity, "")
	items := func(s *huma.Schema) { s.Properties["items"] = item }
	r := c.route(http.MethodGet, c.under(), tokens.RoleRead, http.StatusOK, words{"list-" + strings.ReplaceAll(c.k.Plural, "_", "-"),
		"List the " + c.k.Plural + " of " + a(c.k.Parent), fmt.Sprintf("From a projection. A %s that nobody knows has none.", c.k.Parent)})
	r.projected, r.codes = true, []string{codeCursorInvalid, codeNotFound}
	r.answer = c.schema(c.title+"Page", nil, childPage{}, items, func(s *huma.Schema) {
		if c.k.Moderated {
			property("thread", s.Properties["thread"], true)(s)
		} else {
			without("thread")(s)
		}
	})
	if c.k.Threaded {
		register(c.server, r, func(ctx context.Context, in *threadListInput) (*anyOutput, error) {
			return c.list(ctx, in.Object.int64(), in.Order, in.Place)
		})
	} else {
		register(c.server, r, func(ctx context.Context, in *flatListInput) (*anyOutput, error) {
			return c.list(ctx, in.Object.int64(), in.Order, in.Place)
		})
	}

	answer := c.schema(c.title+"List", nil, childList{}, items)
	authored := c.route(http.MethodGet, "/v1/"+c.kinds.Objects[authors]+"/{id}/"+c.k.Plural, tokens.RoleRead, http.StatusOK, words{"list-" + authors + "-" + strings.ReplaceAll(c.k.Plural, "_", "-"),
		"List a " + authors + "'s visible " + c.k.Plural + ", newest first", "From a projection. A " + authors + " that nobody knows has none."})
	authored.tag, authored.projected, authored.answer, authored.codes = "Users", true, answer, []string{codeCursorInvalid}
	authored.naming = &naming{texts: map[string]string{"id": "The " + authors + "."}}
	register(c.server, authored, func(ctx context.Context, in *authorInput) (*anyOutput, error) {
		author := in.ID.int64()
		return c.page(ctx, list{tenant: callerOf(ctx).TenantID, name: c.k.Plural + " of " + authors, of: author}, in.Page, func(tx pgx.Tx, after *threadcache.Key) ([]event.Child, error) {
			return threadcache.ByAuthor(ctx, tx, c.k.Name, author, after, in.Limit+1)
		})
	})
	if !c.k.Moderated {
		return
	}
	pending := c.route(http.MethodGet, "/v1/moderation/"+c.k.Plural+"/pending", tokens.RoleModerate, http.StatusOK, words{"list-pending-" + strings.ReplaceAll(c.k.Plural, "_", "-"),
		"List the " + c.k.Plural + " that wait for a moderator, oldest first", "From a projection, with their bodies."})
	pending.tag, pending.projected, pending.answer, pending.codes = "Moderation", true, answer, []string{codeCursorInvalid}
	register(c.server, pending, func(ctx context.Context, in *pendingListInput) (*anyOutput, error) {
		object := in.Object.int64() // 0 when absent
		return c.page(ctx, list{tenant: callerOf(ctx).TenantID, name: "pending " + c.k.Plural, of: object}, in.Page, func(tx pgx.Tx, after *threadcache.Key) ([]event.Child, error) {
			return threadcache.Pending(ctx, tx, c.k.Name, object, after, in.Limit+1)
		})
	})
}

func (c *childRoutes) values(rows []event.Child) []any {
	items := make([]any, len(rows))
	for i, row := range rows {
		items[i] = c.value(childBodyOf(row))
	}
	return items
}

// list is a page of the children of an object.
func (c *childRoutes) list(ctx context.Context, object int64, order string, in Place) (*anyOutput, error) {
	if err := c.checkPlace(order, in); err != nil {
		return nil, err
	}
	l := list{tenant: callerOf(ctx).TenantID, name: c.k.Plural + " " + order, of: object}
	var path string
	var cursor placeCursor
	if in.Cursor != "" {
		to := any(&cursor)
		if order == "threaded" {
			to = &path
		}
		if err := c.cursors.decode(l, in.Cursor, to); err != nil {
			return nil, err
		}
	}
	var rows []event.Child
	var settings threadcache.Settings
	var earlier, later bool // whether there are pages before and behind this one
	asOf, err := c.project(ctx, l.tenant, threadcache.Name, func(tx pgx.Tx) (err error) {
		if c.k.Moderated {
			if settings, err = threadcache.ReadSettings(ctx, tx, c.k.Name, object); err != nil {
				return err
			}
		}
		switch {
		case order == "threaded":
			rows, err = threadcache.Threaded(ctx, tx, c.k.Name, object, path, in.Limit+1)
			later = len(rows) > in.Limit
			rows = rows[:min(len(rows), in.Limit)]
		case in.Around != "":
			child, found, err := threadcache.ByID(ctx, tx, c.k.Name, in.Around.lower())
			if err == nil && (!found || int64(child.Parent) != object) {
				err = c.notFound()
			}
			if err != nil {
				return err
			}
			rows, earlier, later, err = threadcache.Around(ctx, tx, c.k.Name, child, in.Limit)
			return err
		default:
			rows, earlier, later, err = chronological(ctx, tx, c.k.Name, object, threadcache.Order(order == "newest"), in, cursor)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	page := childPage{Items: c.values(rows), AsOf: asOf}
	if c.k.Moderated {
		page.Thread = (*ThreadState)(&settings)
	}
	if later && len(rows) > 0 {
		last := rows[len(rows)-1]
		next := any(cursorAt(last))
		if order == "threaded" {
			next = last.Path
		}
		if page.Next, err = c.cursors.encode(l, next); err != nil {
			return nil, err
		}
	}
	if earlier && len(rows) > 0 {
		before := cursorAt(rows[0])
		before.Before = true
		if page.Prev, err = c.cursors.encode(l, before); err != nil {
			return nil, err
		}
	}
	return &anyOutput{Body: page}, nil
}

// page is a page of children of any objects; read reads one more than the limit.
func (c *childRoutes) page(ctx context.Context, l list, p Page, read func(tx pgx.Tx, after *threadcache.Key) ([]event.Child, error)) (*anyOutput, error) {
	rows, next, asOf, err := c.childPage(ctx, l, p, read)
	if err != nil {
		return nil, err
	}
	return &anyOutput{Body: childList{Items: c.values(rows), Next: next, AsOf: asOf}}, nil
}

func (c *childRoutes) versionRoutes() {
	r := c.route(http.MethodGet, c.one()+"/versions", tokens.RoleRead, http.StatusOK, words{"list-" + c.dashed + "-versions",
		"List the versions of " + a(c.k.Name) + ", newest first", "Who did what, when. While it is gone no version of it shows author, body, attributes and actor, " +
			"but to tokens that have the role moderate too; of an erased one to nobody." + fromTheHistory})
	version := c.schema(c.title+"Version", c.naming, childVersion{}, property(c.k.Name, c.entity, true))
	r.answer = c.schema(c.title+"Versions", nil, childVersions{}, func(s *huma.Schema) { s.Properties["items"].Items = version })
	r.codes = []string{codeCursorInvalid, codeNotFound}
	register(c.server, r, c.versions)
}

func (c *childRoutes) versions(ctx context.Context, in *commentVersionsInput) (*anyOutput, error) {
	by, id := callerOf(ctx), in.ID.lower()
	l := list{tenant: by.TenantID, name: "versions of " + c.k.Name + " " + id}
	before, err := c.before(l, in.Cursor)
	if err != nil {
		return nil, err
	}
	var rows []versioned.Version[event.Child]
	asOf, err := c.readHistory(ctx, by.TenantID, func(tx pgx.Tx) (err error) {
		rows, err = history.Children(c.k).Recent(ctx, tx, by.TenantID, versioned.Key{id}, before, in.Limit+1)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Whether it is gone the truth says, read after the history: what was hidden just now is not shown because the history is behind.
	now, err := c.store.GetChild(ctx, by.TenantID, c.k, id)
	if err != nil {
		return nil, err
	}
	gone, moderator := !event.BodyTravels(now.AuthorState, now.ModerationState), by.Has(tokens.RoleModerate)
	rows, next, err := newPage(c.server, l, in.Limit, rows, position)
	if err != nil {
		return nil, err
	}
	items := make([]any, len(rows))
	for i, v := range rows {
		item, child := childVersion{VersionInfo: infoOf(v, v.Object.Version)}, childBodyOf(v.Object)
		if moderator {
			item.Reason = v.Object.Reason
		}
		if now.AuthorState == event.AuthorErased || gone && !moderator {
			item.Actor, child.AuthorID, child.Body, child.Attributes = "", 0, "", nil
		}
		item.Child = c.value(child)
		items[i] = c.value(item)
	}
	return &anyOutput{Body: childVersions{Items: items, Next: next, AsOf: asOf}}, nil
}

// childSettings are what holds for the children of one object.
type childSettings struct {
	Object       event.ID    `json:"object_id"`
	Locked       bool        `json:"locked" doc:"It takes no more."`
	Premoderated bool        `json:"premoderated" doc:"New ones start pending."`
	Title        string      `json:"title,omitempty"`
	Version      int64       `json:"version" doc:"Rises by one with each change; also the ETag. 0 while nothing was set."`
	UpdatedAt    *event.Time `json:"updated_at,omitempty" format:"date-time" doc:"Absent while nothing was set."`
}

func childSettingsOf(t event.Thread) childSettings {
	v := threadSettingsOf(t)
	return childSettings{Object: v.PostID, Locked: v.Locked, Premoderated: v.Premoderated, Title: v.Title, Version: v.Version, UpdatedAt: v.UpdatedAt}
}

// settingsVersion is a version of the settings.
type settingsVersion struct {
	VersionInfo
	Settings any `json:"settings"`
}

// settingsVersions is one page of the versions of the settings.
type settingsVersions struct {
	Items []any  `json:"items" nullable:"false" doc:"The newest first."`
	Next  string `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
}

type underGetInput struct {
	UnderPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: 304 while it is still the one."`
}

type underPutInput struct {
	UnderPath
	SettingsChange
}

type underVersionsInput struct {
	UnderPath
	Page
}

type childSettingsOutput struct {
	Status int
	ETag   string `header:"ETag" doc:"Absent while nothing was set."`
	WriteToken
	Body any
}

func (c *childRoutes) settingsOutput(out *settingsOutput, t event.Thread) *childSettingsOutput {
	return &childSettingsOutput{Status: out.Status, ETag: out.ETag, WriteToken: out.WriteToken, Body: c.value(childSettingsOf(t))}
}

func (c *childRoutes) moderationRoutes() {
	body := []string{codeJSONInvalid, codeRequestTooLarge, codeRequestTimeout, codeMediaType, codeVersionStale, codeIfMatchMissing}
	of := "for the " + c.k.Plural + " of " + a(c.k.Parent)
	path := c.under() + "/settings"
	schema := c.schema(c.title+"Settings", c.naming, childSettings{})
	c.settings = append(c.settings, schema)

	get := c.route(http.MethodGet, path, tokens.RoleRead, http.StatusOK, words{"get-" + c.dashed + "-settings",
		"Read the settings " + of, "From the truth. Where nothing was set they are the defaults, at version 0."})
	get.tag, get.answer, get.also = "Moderation", schema, map[int]string{http.StatusNotModified: "If-None-Match names the version."}
	register(c.server, get, func(ctx context.Context, in *underGetInput) (*childSettingsOutput, error) {
		out, t, err := c.readSettings(ctx, c.k, in.Object.int64(), in.IfNoneMatch)
		if err != nil {
			return nil, err
		}
		return c.settingsOutput(out, t), nil
	})

	put := c.route(http.MethodPut, path, tokens.RoleModerate, http.StatusOK, words{"put-" + c.dashed + "-settings", "Set the settings " + of,
		"All of them: what is absent becomes false, or no title. Where it is locked there are no new " + c.k.Plural + "; those that are there may still be edited, deleted and " +
			"moderated. Settings that hold already change nothing: 200 with the same version, and no event."})
	put.tag, put.answer, put.codes = "Moderation", schema, body
	register(c.server, put, func(ctx context.Context, in *underPutInput) (*childSettingsOutput, error) {
		out, t, err := c.writeSettings(ctx, c.k, in.Object.int64(), in.SettingsChange)
		var stale *store.StaleThreadError
		if errors.As(err, &stale) {
			p := c.problems.problem(codeVersionStale, fmt.Sprintf("the settings are at version %d", stale.Current.Version))
			p.Current = &Current{c.value(childSettingsOf(stale.Current))}
			return nil, p
		}
		if err != nil {
			return nil, err
		}
		return c.settingsOutput(out, t), nil
	})

	versions := c.route(http.MethodGet, path+"/versions", tokens.RoleRead, http.StatusOK, words{"list-" + c.dashed + "-settings-versions",
		"List the versions of the settings " + of + ", newest first", "Who set what, when. From the truth. Where nothing was set there are none."})
	version := c.schema(c.title+"SettingsVersion", nil, settingsVersion{}, property("settings", schema, true))
	versions.tag, versions.codes = "Moderation", []string{codeCursorInvalid}
	versions.answer = c.schema(c.title+"SettingsVersions", nil, settingsVersions{}, func(s *huma.Schema) { s.Properties["items"].Items = version })
	register(c.server, versions, func(ctx context.Context, in *underVersionsInput) (*anyOutput, error) {
		rows, next, err := c.settingsPage(ctx, c.k, list{name: "versions of settings of " + c.k.Plural, of: in.Object.int64()}, in.Page)
		if err != nil {
			return nil, err
		}
		items := make([]any, len(rows))
		for i, v := range rows {
			items[i] = settingsVersion{infoOf(v, v.Object.Version), c.value(childSettingsOf(v.Object))}
		}
		return &anyOutput{Body: settingsVersions{Items: items, Next: next}}, nil
	})

	moderate := c.route(http.MethodPut, c.one()+"/moderation", tokens.RoleModerate, http.StatusOK, words{"moderate-" + c.dashed, "Approve, hide or remove " + a(c.k.Name),
		"Approving undoes what moderation did. The state that it has changes nothing: 200 with the same version, and no event. What its author deleted stays deleted."})
	moderate.tag, moderate.answer, moderate.codes = "Moderation", c.entity, append(slices.Clone(body), codeNotFound, codeChildGone)
	register(c.server, moderate, func(ctx context.Context, in *moderateInput) (*childOutput, error) {
		w, err := c.moderation(ctx, in)
		if err != nil {
			return nil, err
		}
		out, err := c.store.ModerateChildren(ctx, callerOf(ctx).TenantID, c.k, []store.ChildModeration{w})
		return c.answer(ctx, http.StatusOK, out, err)
	})
}

// aggregateCount is an attribute of the visible children of an object in numbers; sum by count is its average.
type aggregateCount struct {
	Count int64 `json:"count"`
	Sum   int64 `json:"sum"`
}

// childCountSchema describes the count of a kind.
func (s *server) childCountSchema(k kinds.Child) *huma.Schema {
	number := func(text string) *huma.Schema {
		return &huma.Schema{Type: huma.TypeInteger, Format: "int64", Description: text}
	}
	object := func(members map[string]*huma.Schema) *huma.Schema {
		o := &huma.Schema{Type: huma.TypeObject, Properties: members, Required: slices.Sorted(maps.Keys(members)), AdditionalProperties: false}
		o.PrecomputeMessages()
		return o
	}
	members := map[string]*huma.Schema{"total": number("Those that were ever written, whatever became of them."), "visible": number("Those that are visible.")}
	if names := k.Aggregates(); len(names) > 0 {
		each := make(map[string]*huma.Schema)
		for _, name := range names {
			each[name] = object(map[string]*huma.Schema{"count": number("Visible ones that have it."), "sum": number("Of their values: by count it is the average.")})
		}
		members["aggregates"] = object(each)
	}
	return object(members)
}

// childCounts counts the children of an object, by the plurals of their kinds.
func (s *server) childCounts(ctx context.Context, under []kinds.Child, object int64, counts map[string]any) (event.Time, error) {
	return s.project(ctx, callerOf(ctx).TenantID, threadcache.Name, func(tx pgx.Tx) error {
		for _, k := range under {
			sum, err := threadcache.ReadSummary(ctx, tx, k.Name, object)
			if err != nil {
				return err
			}
			count := map[string]any{"total": sum.Total, "visible": sum.Visible}
			if names := k.Aggregates(); len(names) > 0 {
				each := make(map[string]aggregateCount)
				for _, name := range names {
					each[name] = aggregateCount{}
				}
				all, err := threadcache.ReadAggregates(ctx, tx, k.Name, object)
				if err != nil {
					return err
				}
				for _, a := range all {
					if _, ok := each[a.Attribute]; ok { // a former release of the kind may have had others
						each[a.Attribute] = aggregateCount{a.Count, a.Sum}
					}
				}
				count["aggregates"] = each
			}
			counts[k.Plural] = count
		}
		return nil
	})
}
