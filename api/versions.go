package api

import (
	"context"
	"math"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/tokens"
	"github.com/tidings/tidings/versioned"
)

// VersionInfo says of a version who made it and when.
type VersionInfo struct {
	Version      int64      `json:"version" example:"3" doc:"Of the object; rises by one with each change."`
	VersionID    event.ID   `json:"version_id" example:"100000000023" doc:"Of this record, unique among all of its kind."`
	VersionState string     `json:"version_state" enum:"LATEST,ARCHIVED,DELETED" example:"LATEST" doc:"LATEST is how it is now, DELETED that it is gone; ARCHIVED is followed by a later version."`
	Actor        string     `json:"actor,omitempty" example:"alice@example.com" doc:"Who made it; unrecorded when only the result is known. Absent where the comment's author is."`
	At           event.Time `json:"at" format:"date-time" doc:"When it was made."`
}

func infoOf[T any](v versioned.Version[T], version int64) VersionInfo {
	return VersionInfo{Version: version, VersionID: event.ID(v.Metadata.VersionID), VersionState: string(v.Metadata.VersionState),
		Actor: v.Metadata.CreatedBy, At: event.Time{Time: v.Metadata.LastUpdateTime}}
}

// CommentVersion is a version of a comment.
type CommentVersion struct {
	VersionInfo
	Reason  string   `json:"reason,omitempty" example:"spam" doc:"The moderator's; only with the role moderate."`
	Comment *Comment `json:"comment" doc:"As it was. Without author and body while the comment is gone, but with the role moderate."`
}

// CommentVersions is one page of a comment's versions.
type CommentVersions struct {
	Items []CommentVersion `json:"items" nullable:"false" doc:"The newest first."`
	Next  string           `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time       `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the history."`
}

// ThreadVersion is a version of a thread's settings.
type ThreadVersion struct {
	VersionInfo
	Thread *ThreadSettings `json:"thread"`
}

// ThreadVersions is one page of the versions of a thread's settings.
type ThreadVersions struct {
	Items []ThreadVersion `json:"items" nullable:"false" doc:"The newest first."`
	Next  string          `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
}

type commentVersionsInput struct {
	CommentPath
	Page
}

type threadVersionsInput struct {
	PostPath
	Page
}

type commentVersionsOutput struct{ Body CommentVersions }

type threadVersionsOutput struct{ Body ThreadVersions }

func (s *server) versionRoutes() {
	register(s, route{
		method: http.MethodGet, path: "/v1/comments/{id}/versions", id: "list-comment-versions", tag: "Comments", role: tokens.RoleRead, status: http.StatusOK,
		summary: "List the versions of a comment, newest first",
		description: "Who did what, when. While the comment is gone (hidden, removed, deleted, erased) no version of it shows author, body and actor, " +
			"but to tokens that have the role moderate too; of an erased one to nobody." + fromTheHistory,
		codes: []string{codeCursorInvalid, codeNotFound},
	}, s.commentVersions)
	register(s, route{
		method: http.MethodGet, path: "/v1/posts/{post_id}/thread/versions", id: "list-thread-versions", tag: "Moderation", role: tokens.RoleRead, status: http.StatusOK,
		summary:     "List the versions of the settings of a post's thread, newest first",
		description: "Who set what, when. From the truth. Where nothing was set there are none.",
		codes:       []string{codeCursorInvalid},
	}, s.threadVersions)
}

// before reads where a page of versions begins.
func (s *server) before(l list, cursor string) (int64, error) {
	before := int64(math.MaxInt64)
	if cursor == "" {
		return before, nil
	}
	err := s.cursors.decode(l, cursor, &before)
	return before, err
}

// readHistory reads the archiver's histories in one transaction of the tenant, on one snapshot, and says of when that is.
func (s *server) readHistory(ctx context.Context, tenant int64, fn func(tx pgx.Tx) error) (event.Time, error) {
	var progress consumers.Progress
	err := postgres.InTenant(ctx, s.projections, tenant, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		if progress, err = consumers.ReadProgress(ctx, tx, history.Name); err != nil {
			return err
		}
		return fn(tx)
	})
	return event.Time{Time: progress.AsOf}, err
}

func position[T any](v versioned.Version[T]) any { return v.Position }

func (s *server) commentVersions(ctx context.Context, in *commentVersionsInput) (*commentVersionsOutput, error) {
	c, id := callerOf(ctx), in.ID.lower()
	l := list{tenant: c.TenantID, name: "versions of comment " + id}
	before, err := s.before(l, in.Cursor)
	if err != nil {
		return nil, err
	}
	var rows []versioned.Version[event.Child]
	asOf, err := s.readHistory(ctx, c.TenantID, func(tx pgx.Tx) (err error) {
		rows, err = history.Children(commentKind).Recent(ctx, tx, c.TenantID, versioned.Key{id}, before, in.Limit+1)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Whether it is gone the truth says, read after the history: what was hidden just now is not shown because the history is behind.
	now, err := s.store.GetChild(ctx, c.TenantID, commentKind, id)
	if err != nil {
		return nil, err
	}
	gone, moderator := !event.BodyTravels(now.AuthorState, now.ModerationState), c.Has(tokens.RoleModerate)
	rows, next, err := newPage(s, l, in.Limit, rows, position)
	if err != nil {
		return nil, err
	}
	items := make([]CommentVersion, len(rows))
	for i, v := range rows {
		item := CommentVersion{VersionInfo: infoOf(v, v.Object.Version), Comment: commentOf(v.Object.Comment())}
		if moderator {
			item.Reason = v.Object.Reason
		}
		if now.AuthorState == event.AuthorErased || gone && !moderator {
			item.Actor, item.Comment.AuthorID, item.Comment.Body = "", 0, ""
		}
		items[i] = item
	}
	return &commentVersionsOutput{Body: CommentVersions{Items: items, Next: next, AsOf: asOf}}, nil
}

func (s *server) threadVersions(ctx context.Context, in *threadVersionsInput) (*threadVersionsOutput, error) {
	rows, next, err := s.settingsPage(ctx, commentKind, list{name: "versions of thread", of: in.PostID.int64()}, in.Page)
	if err != nil {
		return nil, err
	}
	items := make([]ThreadVersion, len(rows))
	for i, v := range rows {
		items[i] = ThreadVersion{infoOf(v, v.Object.Version), threadSettingsOf(v.Object)}
	}
	return &threadVersionsOutput{Body: ThreadVersions{Items: items, Next: next}}, nil
}

// settingsPage reads a page of the versions of the settings of the object that the list is of.
func (s *server) settingsPage(ctx context.Context, k kinds.Child, l list, p Page) ([]versioned.Version[event.Thread], string, error) {
	l.tenant = callerOf(ctx).TenantID
	before, err := s.before(l, p.Cursor)
	if err != nil {
		return nil, "", err
	}
	rows, err := s.store.ThreadVersions(ctx, l.tenant, k, l.of, before, p.Limit+1)
	if err != nil {
		return nil, "", err
	}
	return newPage(s, l, p.Limit, rows, position)
}
