package history

import (
	"context"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/versioned"
)

// Tables returns none: the histories are records, which a replay only adds to.
func (*Projection) Tables() []string { return nil }

// Reached says yes: no read of a history waits for a write.
func (*Projection) Reached(context.Context, pgx.Tx, []event.Ref) (bool, error) { return true, nil }

// Window compares nothing: a history has no state of its own that could drift.
func (*Projection) Window(context.Context, *pgxpool.Pool, *pgxpool.Pool, any, int, func(projections.Difference)) (int64, any, error) {
	return 0, nil, nil
}

type commentRow struct {
	TenantID                     int64
	CommentID, ParentID          string
	PostID                       int64
	Slug, Path                   string
	AuthorID                     int64
	Body                         string
	AuthorState, ModerationState string
	Version                      int64
	CreatedAt, UpdatedAt         time.Time
}

// truthCommentPageSQL reads a page of the truth's comments, archived or not.
// Index: comments_pkey and comments_archive_pkey, one range each.   Locks: none.
const truthCommentPageSQL = `
SELECT /* history.truth */ tenant_id, comment_id::text, coalesce(parent_id::text, ''), post_id, slug, path, author_id, body, author_state,
       moderation_state, version, created_at, updated_at
  FROM all_comments WHERE (tenant_id, comment_id) > (@tenant::bigint, @comment::uuid) ORDER BY tenant_id, all_comments.comment_id LIMIT @limit`

type followRow struct {
	TenantID, FollowerID, FolloweeID   int64
	Status                             string
	Version                            int64
	CreatedAt, PositionedAt, UpdatedAt time.Time
}

// truthFollowPageSQL reads a page of the truth's pairs.
// Index: follows_pkey, one range.   Locks: none.
const truthFollowPageSQL = `
SELECT /* history.truth */ tenant_id, follower_id, followee_id, status, version, created_at, positioned_at, updated_at
  FROM follows WHERE (tenant_id, follower_id, followee_id) > (@tenant::bigint, @follower::bigint, @followee::bigint)
 ORDER BY tenant_id, follower_id, followee_id LIMIT @limit`

// Truth yields an event for each comment and each pair of the truth, with the version that it is at, by versioned.Unrecorded: versions
// before it, and who made it, are known to their events alone. Memory is bounded. The pool acts as the system role.
func (*Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		for row, err := range projections.Pages(ctx, truth, truthCommentPageSQL, func(last *commentRow) pgx.StrictNamedArgs {
			if last == nil {
				last = &commentRow{CommentID: "00000000-0000-0000-0000-000000000000"}
			}
			return pgx.StrictNamedArgs{"tenant": last.TenantID, "comment": last.CommentID}
		}) {
			var e event.Event
			if err == nil {
				e, err = row.event()
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
		for row, err := range projections.Pages(ctx, truth, truthFollowPageSQL, func(last *followRow) pgx.StrictNamedArgs {
			if last == nil {
				last = &followRow{}
			}
			return pgx.StrictNamedArgs{"tenant": last.TenantID, "follower": last.FollowerID, "followee": last.FolloweeID}
		}) {
			var e event.Event
			if err == nil {
				e, err = row.event()
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

func (r *commentRow) event() (event.Event, error) {
	c := event.Comment{
		CommentID: r.CommentID, PostID: event.ID(r.PostID), ParentID: r.ParentID, Slug: r.Slug, Path: r.Path, AuthorID: event.ID(r.AuthorID),
		AuthorState: r.AuthorState, ModerationState: r.ModerationState, Version: r.Version,
		CreatedAt: event.Time{Time: r.CreatedAt}, UpdatedAt: event.Time{Time: r.UpdatedAt}, Actor: versioned.Unrecorded,
	}
	if event.BodyTravels(r.AuthorState, r.ModerationState) {
		c.Body = r.Body
	}
	return projections.StateEvent(r.TenantID, event.AggregateComment, r.PostID, event.Edited, c)
}

func (r *followRow) event() (event.Event, error) {
	return projections.StateEvent(r.TenantID, event.AggregateFollow, r.FolloweeID, event.Created, event.Follow{
		FollowerID: event.ID(r.FollowerID), FolloweeID: event.ID(r.FolloweeID), Status: r.Status, Version: r.Version,
		CreatedAt: event.Time{Time: r.CreatedAt}, PositionedAt: event.Time{Time: r.PositionedAt}, UpdatedAt: event.Time{Time: r.UpdatedAt},
		Actor: versioned.Unrecorded,
	})
}
