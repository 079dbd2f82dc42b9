package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// The routes of moderated kinds: moderators decide on their children, and their objects have
// settings.

// threadState is the state of the thread that an answer belongs to.
type threadState struct {
	Locked       bool   `json:"locked" example:"false" doc:"True if the thread takes no new {children}."`
	Premoderated bool   `json:"premoderated" example:"false" doc:"True if new {children} start pending."`
	Title        string `json:"title,omitempty" example:"Questions to the author" doc:"Absent if there is none."`
	Version      int64  `json:"version" example:"2" doc:"The version of the settings; 0 before the first change."`
}

// childSettings are the settings for the children of one object.
type childSettings struct {
	Object       event.ID    `json:"object_id"`
	Locked       bool        `json:"locked" doc:"True if the thread takes no new {children}."`
	Premoderated bool        `json:"premoderated" doc:"True if new {children} start pending."`
	Title        string      `json:"title,omitempty"`
	Version      int64       `json:"version" doc:"Rises by one with each change; also the ETag. 0 before the first change."`
	UpdatedAt    *event.Time `json:"updated_at,omitempty" format:"date-time" doc:"Absent before the first change."`
}

// settings returns the settings of an object as answers show them.
func (c *childRoutes) settings(t event.Thread) any {
	v := &childSettings{Object: t.PostID, Locked: t.Locked, Premoderated: t.Premoderate, Title: t.Title, Version: t.Version}
	if t.Version > 0 {
		v.UpdatedAt = &t.UpdatedAt
	}
	return c.value(v)
}

// settingsVersion is a version of the settings.
type settingsVersion struct {
	VersionInfo
	Settings any `json:"settings"`
}

// settingsVersions is one page of the versions of the settings.
type settingsVersions struct {
	Items []any  `json:"items" nullable:"false" doc:"Newest first."`
	Next  string `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
}

type settingsGetInput struct {
	UnderPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: the answer is 304 if it is still current."`
}

type settingsPutInput struct {
	UnderPath
	IfMatch     string `header:"If-Match" doc:"The ETag of the version to change, or *. Required after the first change."`
	IfNoneMatch string `header:"If-None-Match" example:"*" doc:"*: only if the settings were never changed, otherwise 412."`
	Body        struct {
		Locked       bool   `json:"locked,omitempty" example:"false"`
		Premoderated bool   `json:"premoderated,omitempty" example:"true"`
		Title        string `json:"title,omitempty" example:"Questions to the author" doc:"At most 300 bytes of UTF-8 without control characters, after trimming. No title if absent."`
	}
}

type settingsVersionsInput struct {
	UnderPath
	Page
}

type settingsOutput struct {
	Status int
	ETag   string `header:"ETag" doc:"Absent before the first change."`
	WriteToken
	Body any
}

type moderateInput struct {
	ChildPath
	IfMatch string `header:"If-Match" doc:"Required: the ETag of the version to decide on, or *."`
	Body    struct {
		State  string `json:"state" enum:"APPROVED,HIDDEN,REMOVED,PENDING" example:"HIDDEN"`
		Reason string `json:"reason,omitempty" example:"spam" doc:"The reason, for the event and the history: at most 1000 bytes of UTF-8 without control characters."`
	}
}

type pendingInput struct {
	Object id `query:"object_id" doc:"Only of this {object}."`
	Page
}

// moderating returns a route that the document lists under Moderation.
func (c *childRoutes) moderating(operation, method, path, role string, answer *huma.Schema, w words, codes ...string) route {
	r := c.route(operation, method, path, role, http.StatusOK, w)
	r.tag, r.answer, r.codes = "Moderation", answer, codes
	return r
}

// moderationRoutes registers the routes of moderation and of settings, except the list of pending
// children.
func (c *childRoutes) moderationRoutes() {
	c.thread = c.schema("ThreadState", threadState{})
	settings := c.schema("Settings", childSettings{})
	c.current = append(c.current, settings)
	path := c.under() + "/settings"
	get := c.moderating("settings", http.MethodGet, path, tokens.RoleRead, settings,
		words{"get-" + c.dashed + "-settings", "Read the settings for the {children} of {an object}",
			"Reads the truth. Before the first change the settings are the defaults, at version 0."})
	get.extraStatuses = map[int]string{http.StatusNotModified: "If-None-Match names the current version."}
	register(c.server, get, c.getSettings)

	register(c.server, c.moderating("put settings", http.MethodPut, path, tokens.RoleModerate, settings,
		words{"put-" + c.dashed + "-settings", "Set the settings for the {children} of {an object}",
			"Replaces all settings: a missing one becomes false, or no title. A locked thread takes no new {children}; existing ones can " +
				"be edited, deleted and moderated. A request with the current settings changes nothing: 200 with the same version, and " +
				"no event."},
		writing(codeVersionStale, codeIfMatchMissing)...), c.putSettings)

	version := c.schema("SettingsVersion", settingsVersion{}, property(c.of("settings"), settings, true))
	register(c.server, c.moderating("settings versions", http.MethodGet, path+"/versions", tokens.RoleRead,
		c.schema("SettingsVersions", settingsVersions{}, listItems(version, "Newest first.")),
		words{"list-" + c.dashed + "-settings-versions",
			"List the versions of the settings for the {children} of {an object}, newest first",
			"Shows who changed the settings, and when. Reads the truth. Empty before the first change."}, codeCursorInvalid, codeNotFound),
		c.settingsVersions)

	register(c.server, c.moderating("moderate", http.MethodPut, c.one()+"/moderation", tokens.RoleModerate, c.entity,
		words{"moderate-" + c.dashed, "Approve, hide or remove {a child}, or hold it for a moderator",
			"`APPROVED` undoes earlier decisions. `PENDING` adds the {child} to the list that waits for a moderator; a rule that reports " +
				"{children} uses it. A repeated state changes nothing: 200 with the same version, and no event. A {child} that its " +
				"author deleted remains deleted."},
		writing(codeVersionStale, codeIfMatchMissing, codeNotFound, c.code(codeChildGone), codeThreadReturning)...), c.moderate)
}

func (c *childRoutes) pendingRoute(answer *huma.Schema) {
	r := c.moderating("pending", http.MethodGet, "/v1/moderation/"+c.k.Plural+"/pending", tokens.RoleModerate, answer,
		words{"list-pending-" + c.tagged, "List the {children} that wait for a moderator, oldest first",
			"Reads a projection. Includes the bodies."}, codeCursorInvalid)
	r.projected = true
	register(c.server, r, func(ctx context.Context, in *pendingInput) (*anyOutput, error) {
		l := list{tenant: callerOf(ctx).TenantID, name: "pending " + c.k.Plural, of: in.Object.ID} // 0 if absent
		var after ageCursor
		return c.page(ctx, l, in.Page, nil, false, &after, func(tx pgx.Tx) (childWindow, error) {
			some := threadcache.Moderated{State: event.ModerationPending, Object: l.of}
			return in.window(some.Page(ctx, tx, c.k.Name, after.key(), in.Limit+1))
		})
	})
}

func (c *childRoutes) settingsAnswer(t event.Thread) *settingsOutput {
	out := &settingsOutput{Status: http.StatusOK, Body: c.settings(t)}
	if t.Version > 0 {
		out.ETag = etag(t.Version)
	}
	return out
}

func (c *childRoutes) getSettings(ctx context.Context, in *settingsGetInput) (*settingsOutput, error) {
	t, err := c.store.GetThread(ctx, callerOf(ctx).TenantID, c.k, in.Object.ID)
	if err != nil {
		return nil, err
	}
	out := c.settingsAnswer(t)
	if t.Version > 0 {
		out.Status = okOr304(in.IfNoneMatch, t.Version)
	}
	return out, nil
}

func (c *childRoutes) putSettings(ctx context.Context, in *settingsPutInput) (*settingsOutput, error) {
	w := store.ThreadSettings{
		Meta: callerOf(ctx).meta, Object: in.Object.ID, Locked: in.Body.Locked, Premoderated: in.Body.Premoderated,
		Title: strings.TrimSpace(in.Body.Title),
	}
	if !store.ValidTitle(w.Title) {
		return nil, c.problems.problem(codeValidation, "",
			FieldError{Detail: "expected at most 300 bytes without control characters", Pointer: "#/title"})
	}
	switch {
	case in.IfNoneMatch != "" && (in.IfNoneMatch != "*" || in.IfMatch != ""):
		return nil, c.problems.problem(codeHeaderInvalid, "",
			FieldError{Detail: "expected * and no If-Match", Header: "If-None-Match"})
	case in.IfMatch == "":
		w.IfVersion = new(int64)
	default:
		version, err := c.ifVersion(in.IfMatch)
		if err != nil {
			return nil, err
		}
		if version != store.AnyVersion {
			w.IfVersion = &version
		}
	}
	out, err := c.store.SetThreads(ctx, callerOf(ctx).TenantID, c.k, []store.ThreadSettings{w})
	if err != nil {
		return nil, err
	}
	var stale *store.StaleThreadError
	switch {
	case errors.As(out[0].Err, &stale) && in.IfMatch == "" && in.IfNoneMatch == "":
		return nil, c.problems.problem(codeIfMatchMissing, "the thread already has settings")
	case stale != nil:
		p := c.problems.problem(codeVersionStale, fmt.Sprintf("the thread's settings are at version %d", stale.Current.Version))
		p.Current = &Current{c.settings(stale.Current)}
		return nil, p
	case out[0].Err != nil:
		return nil, out[0].Err
	}
	answer := c.settingsAnswer(out[0].Thread)
	answer.WriteToken, err = c.tokenOf(ctx, out[0].Thread.Ref())
	return answer, err
}

func (c *childRoutes) settingsVersions(ctx context.Context, in *settingsVersionsInput) (*anyOutput, error) {
	l := list{tenant: callerOf(ctx).TenantID, name: "versions of settings of " + c.k.Plural, of: in.Object.ID}
	before, err := c.before(l, in.Cursor)
	if err != nil {
		return nil, err
	}
	rows, err := c.store.ThreadVersions(ctx, l.tenant, c.k, l.of, before, in.Limit+1)
	if err != nil {
		return nil, err
	}
	rows, next, err := newPage(c.server, l, in.Limit, rows, position[event.Thread])
	if err != nil {
		return nil, err
	}
	items := make([]any, len(rows))
	for i, v := range rows {
		items[i] = c.value(&settingsVersion{infoOf(v, v.Object.Version), c.settings(v.Object)})
	}
	return &anyOutput{Body: settingsVersions{Items: items, Next: next}}, nil
}

func (c *childRoutes) moderate(ctx context.Context, in *moderateInput) (*childOutput, error) {
	version, err := c.ifVersion(in.IfMatch)
	if err == nil && !store.ValidReason(in.Body.Reason) {
		err = c.problems.problem(codeValidation, "",
			FieldError{Detail: "expected at most 1000 bytes without control characters", Pointer: "#/reason"})
	}
	if err != nil {
		return nil, err
	}
	out, err := c.store.ModerateChildren(ctx, callerOf(ctx).TenantID, c.k, []store.ChildModeration{
		{Meta: callerOf(ctx).meta, ID: in.ID.lower(), IfVersion: version, State: in.Body.State, Reason: in.Body.Reason},
	})
	return c.answer(ctx, http.StatusOK, out, err)
}
