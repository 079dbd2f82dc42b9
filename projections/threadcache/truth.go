package threadcache

import (
	"context"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
)

// Tables are the projection's tables: what is built anew by a replay.
func (Projection) Tables() []string {
	return []string{"thread_comments", "thread_buckets", "thread_totals", "thread_settings"}
}

// truthPageSQL reads a page of the truth's comments, archived or not, in the order of their threads, so that parents come first.
// Index: comments_path_key and comments_archive_path_key, one range each.   Locks: none.
const truthPageSQL = `
SELECT /* threadcache.truth */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, false, 0, false
  FROM all_comments WHERE (tenant_id, post_id, path) > (@tenant::bigint, @post::bigint, @path::text COLLATE "C")
 ORDER BY tenant_id, post_id, path LIMIT @limit`

// settledSQL is what the truth says is set for threads. What retention deleted or purged were the defaults, at a version that stays.
const settledSQL = `
SELECT tenant_id, post_id, object FROM threads WHERE version_state IN ('LATEST', 'DELETED')
 UNION ALL
SELECT tenant_id, post_id, jsonb_build_object('post_id', post_id::text, 'version', version) FROM threads_purged p
 WHERE NOT EXISTS (SELECT FROM threads t WHERE t.tenant_id = p.tenant_id AND t.post_id = p.post_id)`

// truthSettingsSQL reads a page of the truth's thread settings.
// Index: threads_head_idx, threads_purged_pkey, one range.   Locks: none.
const truthSettingsSQL = `
SELECT /* threadcache.truth_settings */ tenant_id, post_id, object
  FROM (` + settledSQL + `) t WHERE (tenant_id, post_id) > (@tenant::bigint, @post::bigint)
 ORDER BY tenant_id, post_id LIMIT @limit`

type settingsRow struct {
	TenantID, PostID int64
	Object           event.Thread
}

// Truth yields an event for each comment of the truth, with the state that it is in, and for each thread with settings, in
// bounded memory. The pool acts as the system role.
func (Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		for row, err := range projections.Pages(ctx, truth, truthSettingsSQL, func(last *settingsRow) pgx.StrictNamedArgs {
			if last == nil {
				last = &settingsRow{}
			}
			return pgx.StrictNamedArgs{"tenant": last.TenantID, "post": last.PostID}
		}) {
			var e event.Event
			if err == nil {
				e, err = projections.StateEvent(row.TenantID, event.AggregateThread, row.PostID, event.Updated, row.Object)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
		for row, err := range projections.Pages(ctx, truth, truthPageSQL, func(last *commentRow) pgx.StrictNamedArgs {
			if last == nil {
				last = &commentRow{}
			}
			return pgx.StrictNamedArgs{"tenant": last.TenantID, "post": last.PostID, "path": last.Path}
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
		CreatedAt: event.Time{Time: r.CreatedAt}, UpdatedAt: event.Time{Time: r.UpdatedAt},
	}
	if event.BodyTravels(r.AuthorState, r.ModerationState) {
		c.Body = r.Body
	}
	return projections.StateEvent(r.TenantID, event.AggregateComment, r.PostID, event.Edited, c)
}
