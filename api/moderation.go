package api

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/tokens"
)

// ThreadSettings is what holds for a post's thread.
type ThreadSettings struct {
	PostID       event.ID    `json:"post_id"`
	Locked       bool        `json:"locked" doc:"It takes no more comments."`
	Premoderated bool        `json:"premoderated" doc:"New comments start pending."`
	Title        string      `json:"title,omitempty"`
	Version      int64       `json:"version" doc:"Rises by one with each change; also the ETag. 0 while nothing was set."`
	UpdatedAt    *event.Time `json:"updated_at,omitempty" format:"date-time" doc:"Absent while nothing was set."`
}

func threadSettingsOf(t event.Thread) *ThreadSettings {
	v := &ThreadSettings{PostID: t.PostID, Locked: t.Locked, Premoderated: t.Premoderate, Title: t.Title, Version: t.Version}
	if t.Version > 0 {
		v.UpdatedAt = &t.UpdatedAt
	}
	return v
}

// PostPath names a post.
type PostPath struct {
	PostID id `path:"post_id"`
}

type settingsGetInput struct {
	PostPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: 304 while it is still the one."`
}

type settingsPutInput struct {
	PostPath
	SettingsChange
}

// SettingsChange is what a change of settings has beside its path.
type SettingsChange struct {
	IfMatch     string `header:"If-Match" doc:"The ETag that the change is about, or *. Required once something was set."`
	IfNoneMatch string `header:"If-None-Match" example:"*" doc:"*: only while nothing was set."`
	Body        struct {
		Locked       bool   `json:"locked,omitempty" example:"false"`
		Premoderated bool   `json:"premoderated,omitempty" example:"true"`
		Title        string `json:"title,omitempty" example:"Questions to the author" doc:"Trimmed, then at most 300 bytes of UTF-8 without control characters. None when absent."`
	}
}

type settingsOutput struct {
	Status int
	ETag   string `header:"ETag" doc:"Absent while nothing was set."`
	WriteToken
	Body *ThreadSettings
}

type moderateInput struct {
	CommentPath
	IfMatch string `header:"If-Match" doc:"Required: the ETag that the decision is about, or *."`
	Body    struct {
		State  string `json:"state" enum:"approved,hidden,removed" example:"hidden"`
		Reason string `json:"reason,omitempty" example:"spam" doc:"Why, for the event and the history: at most 1000 bytes of UTF-8 without control characters."`
	}
}

func (s *server) moderationRoutes() {
	const thread, tag = "/v1/posts/{post_id}/thread", "Moderation"
	body := []string{codeJSONInvalid, codeRequestTooLarge, codeRequestTimeout, codeMediaType, codeVersionStale, codeIfMatchMissing}
	register(s, route{
		method: http.MethodGet, path: thread, id: "get-thread", tag: tag, role: tokens.RoleRead, status: http.StatusOK,
		summary: "Read the settings of a post's thread", description: "From the truth. Where nothing was set they are the defaults, at version 0.",
		also: map[int]string{http.StatusNotModified: "If-None-Match names the version."},
	}, s.getSettings)
	register(s, route{
		method: http.MethodPut, path: thread, id: "put-thread", tag: tag, role: tokens.RoleModerate, status: http.StatusOK,
		summary: "Set the settings of a post's thread",
		description: "All of them: what is absent becomes false, or no title. A locked thread takes no new comments; its comments may still be edited, deleted and " +
			"moderated. Settings that hold already change nothing: 200 with the same version, and no event.",
		codes: body,
	}, s.putSettings)
	register(s, route{
		method: http.MethodPut, path: "/v1/comments/{id}/moderation", id: "moderate-comment", tag: tag, role: tokens.RoleModerate, status: http.StatusOK,
		summary: "Approve, hide or remove a comment",
		description: "Approving undoes what moderation did. The state that the comment has changes nothing: 200 with the same version, and no event. What its author " +
			"deleted stays deleted.",
		codes: append(body[:len(body):len(body)], codeNotFound, codeCommentGone),
	}, s.moderate)
}

func (s *server) getSettings(ctx context.Context, in *settingsGetInput) (*settingsOutput, error) {
	out, _, err := s.readSettings(ctx, commentKind, in.PostID.int64(), in.IfNoneMatch)
	return out, err
}

func (s *server) readSettings(ctx context.Context, k kinds.Child, object int64, ifNoneMatch string) (*settingsOutput, event.Thread, error) {
	t, err := s.store.GetThread(ctx, callerOf(ctx).TenantID, k, object)
	if err != nil {
		return nil, t, err
	}
	out := settingsAnswer(t)
	if t.Version > 0 {
		out.Status = okOr304(ifNoneMatch, t.Version)
	}
	return out, t, nil
}

func settingsAnswer(t event.Thread) *settingsOutput {
	out := &settingsOutput{Status: http.StatusOK, Body: threadSettingsOf(t)}
	if t.Version > 0 {
		out.ETag = etag(t.Version)
	}
	return out
}

func (s *server) putSettings(ctx context.Context, in *settingsPutInput) (*settingsOutput, error) {
	out, _, err := s.writeSettings(ctx, commentKind, in.PostID.int64(), in.SettingsChange)
	return out, err
}

func (s *server) writeSettings(ctx context.Context, k kinds.Child, object int64, in SettingsChange) (answer *settingsOutput, t event.Thread, err error) {
	w := store.ThreadSettings{
		Meta: callerOf(ctx).meta, Object: object, Locked: in.Body.Locked, Premoderated: in.Body.Premoderated, Title: strings.TrimSpace(in.Body.Title),
	}
	if !store.ValidTitle(w.Title) {
		return nil, t, s.problems.problem(codeValidation, "", FieldError{Detail: "want at most 300 bytes without control characters", Pointer: "#/title"})
	}
	switch {
	case in.IfNoneMatch != "" && (in.IfNoneMatch != "*" || in.IfMatch != ""):
		return nil, t, s.problems.problem(codeHeaderInvalid, "", FieldError{Detail: "want * and no If-Match, or If-Match alone", Header: "If-None-Match"})
	case in.IfMatch == "":
		w.IfVersion = new(int64)
	default:
		version, err := s.ifVersion(in.IfMatch)
		if err != nil {
			return nil, t, err
		}
		if version != store.AnyVersion {
			w.IfVersion = &version
		}
	}
	out, err := s.store.SetThreads(ctx, callerOf(ctx).TenantID, k, []store.ThreadSettings{w})
	if err != nil {
		return nil, t, err
	}
	var stale *store.StaleThreadError
	if errors.As(out[0].Err, &stale) && in.IfMatch == "" && in.IfNoneMatch == "" {
		return nil, t, s.problems.problem(codeIfMatchMissing, "the thread has settings")
	}
	if out[0].Err != nil {
		return nil, t, out[0].Err
	}
	answer = settingsAnswer(out[0].Thread)
	answer.WriteToken, err = s.tokenOf(ctx, out[0].Thread.Ref())
	return answer, out[0].Thread, err
}

func (s *server) moderate(ctx context.Context, in *moderateInput) (*commentOutput, error) {
	w, err := s.moderation(ctx, in)
	if err != nil {
		return nil, err
	}
	out, err := s.store.ModerateChildren(ctx, callerOf(ctx).TenantID, commentKind, []store.ChildModeration{w})
	if err != nil {
		return nil, err
	}
	if out[0].Err != nil {
		return nil, out[0].Err
	}
	return s.written(ctx, http.StatusOK, out[0].Child.Comment())
}

// moderation is what the store writes for a decision.
func (s *server) moderation(ctx context.Context, in *moderateInput) (store.ChildModeration, error) {
	version, err := s.ifVersion(in.IfMatch)
	if err == nil && !store.ValidReason(in.Body.Reason) {
		err = s.problems.problem(codeValidation, "", FieldError{Detail: "want at most 1000 bytes without control characters", Pointer: "#/reason"})
	}
	return store.ChildModeration{Meta: callerOf(ctx).meta, ID: in.ID.lower(), IfVersion: version, State: strings.ToUpper(in.Body.State), Reason: in.Body.Reason}, err
}
