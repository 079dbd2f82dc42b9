package api

import (
	"context"
	"fmt"
	"math"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
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

// PastFollow is a follow as it was.
type PastFollow struct {
	FollowerID   event.ID   `json:"follower_id" example:"7"`
	FolloweeID   event.ID   `json:"followee_id" example:"42"`
	Status       string     `json:"status" enum:"ACTIVE,REMOVED" example:"ACTIVE"`
	Version      int64      `json:"version" example:"3"`
	CreatedAt    event.Time `json:"created_at" format:"date-time"`
	PositionedAt event.Time `json:"positioned_at" format:"date-time" doc:"When the pair last became active."`
	UpdatedAt    event.Time `json:"updated_at" format:"date-time"`
}

// FollowVersion is a version of a pair.
type FollowVersion struct {
	VersionInfo
	Follow PastFollow `json:"follow"`
}

// FollowVersions is one page of a pair's versions.
type FollowVersions struct {
	Items []FollowVersion `json:"items" nullable:"false" doc:"The newest first."`
	Next  string          `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time      `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the history."`
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

type followVersionsInput struct {
	PairPath
	Page
}

type threadVersionsInput struct {
	PostPath
	Page
}

type commentVersionsOutput struct{ Body CommentVersions }

type followVersionsOutput struct{ Body FollowVersions }

type threadVersionsOutput struct{ Body ThreadVersions }

func (s *server) versionRoutes() {
	const late = " From the history, which is a record and takes no Tidings-Token: `as_of` says how current it is."
	register(s, route{
		method: http.MethodGet, path: "/v1/comments/{id}/versions", id: "list-comment-versions", tag: "Comments", role: tokens.RoleRead, status: http.StatusOK,
		summary: "List the versions of a comment, newest first",
		description: "Who did what, when. While the comment is gone (hidden, removed, deleted, erased) no version of it shows author, body and actor, " +
			"but to tokens that have the role moderate too; of an erased one to nobody." + late,
		codes: []string{codeCursorInvalid, codeNotFound},
	}, s.commentVersions)
	register(s, route{
		method: http.MethodGet, path: "/v1/follows/{follower_id}/{followee_id}/versions", id: "list-follow-versions", tag: "Follows", role: tokens.RoleRead,
		status: http.StatusOK, summary: "List the versions of a follow, newest first",
		description: "Who did what, when: each follow and each unfollow of the pair. A pair that never was has none." + late,
		codes:       []string{codeCursorInvalid},
	}, s.followVersions)
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
	var rows []versioned.Version[event.Comment]
	asOf, err := s.readHistory(ctx, c.TenantID, func(tx pgx.Tx) (err error) {
		rows, err = history.Comments().Recent(ctx, tx, c.TenantID, versioned.Key{id}, before, in.Limit+1)
		return err
	})
	if err != nil {
		return nil, err
	}
	// Whether it is gone the truth says, read after the history: what was hidden just now is not shown because the history is behind.
	now, err := s.store.GetComment(ctx, c.TenantID, id)
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
		item := CommentVersion{VersionInfo: infoOf(v, v.Object.Version), Comment: commentOf(v.Object)}
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

func (s *server) followVersions(ctx context.Context, in *followVersionsInput) (*followVersionsOutput, error) {
	tenant, follower, followee := callerOf(ctx).TenantID, in.FollowerID.int64(), in.FolloweeID.int64()
	l := list{tenant: tenant, name: fmt.Sprint("versions of follow ", follower), of: followee}
	before, err := s.before(l, in.Cursor)
	if err != nil {
		return nil, err
	}
	var rows []versioned.Version[event.Follow]
	asOf, err := s.readHistory(ctx, tenant, func(tx pgx.Tx) (err error) {
		rows, err = history.Follows().Recent(ctx, tx, tenant, versioned.Key{follower, followee}, before, in.Limit+1)
		return err
	})
	if err != nil {
		return nil, err
	}
	rows, next, err := newPage(s, l, in.Limit, rows, position)
	if err != nil {
		return nil, err
	}
	items := make([]FollowVersion, len(rows))
	for i, v := range rows {
		items[i] = FollowVersion{infoOf(v, v.Object.Version), PastFollow(followOf(v.Object))}
	}
	return &followVersionsOutput{Body: FollowVersions{Items: items, Next: next, AsOf: asOf}}, nil
}

func (s *server) threadVersions(ctx context.Context, in *threadVersionsInput) (*threadVersionsOutput, error) {
	tenant, post := callerOf(ctx).TenantID, in.PostID.int64()
	l := list{tenant: tenant, name: "versions of thread", of: post}
	before, err := s.before(l, in.Cursor)
	if err != nil {
		return nil, err
	}
	rows, err := s.store.ThreadVersions(ctx, tenant, post, before, in.Limit+1)
	if err != nil {
		return nil, err
	}
	rows, next, err := newPage(s, l, in.Limit, rows, position)
	if err != nil {
		return nil, err
	}
	items := make([]ThreadVersion, len(rows))
	for i, v := range rows {
		items[i] = ThreadVersion{infoOf(v, v.Object.Version), threadSettingsOf(v.Object)}
	}
	return &threadVersionsOutput{Body: ThreadVersions{Items: items, Next: next}}, nil
}
