package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/tokens"
)

// Comment is how a comment looks. One that is gone (hidden, removed, deleted, erased) is a tombstone: it has its place in the
// thread and says why, but neither author nor body.
type Comment struct {
	CommentID string     `json:"comment_id" format:"uuid"`
	PostID    event.ID   `json:"post_id"`
	ParentID  string     `json:"parent_id,omitempty" format:"uuid" doc:"Absent on a first comment."`
	AuthorID  event.ID   `json:"author_id,omitempty" doc:"Absent on a tombstone."`
	Slug      string     `json:"slug" doc:"Short and unique within the post: the permalink."`
	Depth     int        `json:"depth" doc:"1 for a first comment."`
	Body      string     `json:"body,omitempty" doc:"Absent on a tombstone."`
	State     string     `json:"state" enum:"visible,pending,hidden,removed,deleted,erased"`
	Version   int64      `json:"version" doc:"Rises by one with each change; also the ETag."`
	CreatedAt event.Time `json:"created_at" format:"date-time"`
	UpdatedAt event.Time `json:"updated_at" format:"date-time"`
}

// commentKind is the kind that the routes of this file are of.
var commentKind = kinds.Builtin().Children[event.AggregateComment]

func commentOf(c event.Comment) *Comment {
	v := &Comment{
		CommentID: c.CommentID, PostID: c.PostID, ParentID: c.ParentID, AuthorID: c.AuthorID, Slug: c.Slug, Depth: store.Depth(c.Path),
		Body: c.Body, State: c.State(), Version: c.Version, CreatedAt: c.CreatedAt, UpdatedAt: c.UpdatedAt,
	}
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		v.AuthorID, v.Body = 0, ""
	}
	return v
}

// userID is an id in a body.
type userID string

// Schema describes the id.
func (userID) Schema(huma.Registry) *huma.Schema { return idSchema() }

type createInput struct {
	PostID id     `path:"post_id"`
	Key    string `header:"Idempotency-Key" pattern:"^[!-~]{1,255}$" patternDescription:"1 to 255 visible ASCII characters" doc:"Makes the create safe to repeat: with the same author and key the first answer is given again."`
	Body   struct {
		AuthorID userID     `json:"author_id"`
		Body     string     `json:"body" doc:"1 to 16384 bytes of UTF-8 after trimming."`
		ParentID *commentID `json:"parent_id,omitempty" doc:"The comment of the same post that this one replies to."`
	}
}

// CommentPath names a comment.
type CommentPath struct {
	ID commentID `path:"id"`
}

type commentGetInput struct {
	CommentPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: 304 while it is still the one."`
}

type editInput struct {
	CommentPath
	IfMatch string `header:"If-Match" doc:"Required: the ETag that the edit is about, or *."`
	Body    struct {
		Body string `json:"body" doc:"1 to 16384 bytes of UTF-8 after trimming."`
	}
}

type deleteInput struct {
	CommentPath
	IfMatch string `header:"If-Match" doc:"Required: the ETag that the deletion is about, or *."`
}

type commentOutput struct {
	Status   int
	ETag     string `header:"ETag"`
	Location string `header:"Location"`
	Replayed string `header:"Idempotency-Replayed" doc:"true when an earlier request with this key had made the comment."`
	WriteToken
	Body *Comment
}

// written answers a write of a comment.
func (s *server) written(ctx context.Context, status int, c event.Comment) (*commentOutput, error) {
	token, err := s.tokenOf(ctx, c.Ref())
	return &commentOutput{Status: status, ETag: etag(c.Version), WriteToken: token, Body: commentOf(c)}, err
}

func (s *server) commentRoutes() {
	const post, comment, tag = "/v1/posts/{post_id}/comments", "/v1/comments/{id}", "Comments"
	body := []string{codeJSONInvalid, codeRequestTooLarge, codeRequestTimeout, codeMediaType, codeBodyEmpty, codeBodyTooLong, codeBodyInvalid}
	register(s, route{
		method: http.MethodPost, path: post, id: "create-comment", tag: tag, role: tokens.RoleWrite, status: http.StatusCreated,
		summary:     "Write a comment, or a reply",
		description: "In a premoderated thread the comment starts pending.",
		codes:       append(body[:len(body):len(body)], codeParentUnknown, codeParentGone, codeThreadLocked, codeTooDeep, codeKeyReused),
	}, s.createComment)
	register(s, route{
		method: http.MethodGet, path: comment, id: "get-comment", tag: tag, role: tokens.RoleRead, status: http.StatusOK,
		summary:     "Read a comment",
		description: "From the truth. A comment that is gone is a tombstone: its state, but neither author nor body.",
		codes:       []string{codeNotFound},
		also:        map[int]string{http.StatusNotModified: "If-None-Match names the version."},
	}, s.getComment)
	register(s, route{
		method: http.MethodPatch, path: comment, id: "edit-comment", tag: tag, role: tokens.RoleWrite, status: http.StatusOK,
		summary:     "Replace a comment's body",
		description: "An edit to the body that it has changes nothing: 200 with the same version, and no event.",
		codes:       append(body[:len(body):len(body)], codeNotFound, codeCommentGone, codeVersionStale, codeIfMatchMissing),
	}, s.editComment)
	register(s, route{
		method: http.MethodDelete, path: comment, id: "delete-comment", tag: tag, role: tokens.RoleWrite, status: http.StatusNoContent,
		summary:     "Withdraw a comment for its author",
		description: "Final. Replies stay.",
		codes:       []string{codeNotFound, codeCommentGone, codeVersionStale, codeIfMatchMissing},
	}, s.deleteComment)
}

func (s *server) createComment(ctx context.Context, in *createInput) (*commentOutput, error) {
	author, err := s.parseID("#/author_id", string(in.Body.AuthorID))
	if err != nil {
		return nil, err
	}
	if err := s.limitAuthor(ctx, author); err != nil {
		return nil, err
	}
	c := store.NewChild{Meta: callerOf(ctx).meta, Object: in.PostID.int64(), AuthorID: author, Body: in.Body.Body, Key: in.Key}
	if in.Body.ParentID != nil {
		c.ReplyTo = in.Body.ParentID.lower()
	}
	out, err := s.store.CreateChildren(ctx, callerOf(ctx).TenantID, commentKind, []store.NewChild{c})
	if err != nil {
		return nil, err
	}
	if out[0].Err != nil {
		return nil, out[0].Err
	}
	answer, err := s.written(ctx, http.StatusCreated, out[0].Child.Comment())
	answer.Location = "/v1/comments/" + out[0].Child.ID
	if out[0].Replayed {
		answer.Replayed = "true"
	}
	return answer, err
}

func (s *server) getComment(ctx context.Context, in *commentGetInput) (*commentOutput, error) {
	c, err := s.store.GetChild(ctx, callerOf(ctx).TenantID, commentKind, in.ID.lower())
	if err != nil {
		return nil, err
	}
	return &commentOutput{Status: okOr304(in.IfNoneMatch, c.Version), ETag: etag(c.Version), Body: commentOf(c.Comment())}, nil
}

// ifVersion reads the If-Match that a write needs.
func (s *server) ifVersion(ifMatch string) (int64, error) {
	if ifMatch == "" {
		return 0, s.problems.problem(codeIfMatchMissing, "")
	}
	v, ok := versionOf(ifMatch)
	if !ok {
		return 0, s.problems.problem(codeHeaderInvalid, "", FieldError{Detail: `want one ETag, such as "3", or *`, Header: "If-Match"})
	}
	return v, nil
}

func (s *server) editComment(ctx context.Context, in *editInput) (*commentOutput, error) {
	version, err := s.ifVersion(in.IfMatch)
	if err != nil {
		return nil, err
	}
	out, err := s.store.EditChildren(ctx, callerOf(ctx).TenantID, commentKind, []store.ChildEdit{
		{Meta: callerOf(ctx).meta, ID: in.ID.lower(), IfVersion: version, Body: &in.Body.Body},
	})
	if err != nil {
		return nil, err
	}
	if out[0].Err != nil {
		return nil, out[0].Err
	}
	return s.written(ctx, http.StatusOK, out[0].Child.Comment())
}

func (s *server) deleteComment(ctx context.Context, in *deleteInput) (*noContent, error) {
	version, err := s.ifVersion(in.IfMatch)
	if err != nil {
		return nil, err
	}
	out, err := s.store.DeleteChildren(ctx, callerOf(ctx).TenantID, commentKind, []store.ChildDelete{
		{Meta: callerOf(ctx).meta, ID: in.ID.lower(), IfVersion: version},
	})
	if err != nil {
		return nil, err
	}
	if out[0].Err != nil {
		return nil, out[0].Err
	}
	token, err := s.tokenOf(ctx, out[0].Child.Comment().Ref())
	return &noContent{token}, err
}
