package threadcache

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// OldestCursor is where a chronological page ended: the next one starts above it.
type OldestCursor struct {
	CreatedAt time.Time
	CommentID string
}

// oldestSQL is one chronological page: visible comments only.
// Index: thread_comments_oldest_idx, one range.   Locks: none.
const oldestSQL = `
SELECT /* threadcache.oldest */ comment_id::text, post_id, parent_id::text, slug, path, author_id, body, author_state, moderation_state,
       version, created_at, updated_at
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND visible
   AND (created_at, comment_id) > (@created_at, @comment_id::uuid)
 ORDER BY created_at, comment_id
 LIMIT @limit`

// Oldest returns up to limit visible comments of post, oldest first, above after; from the oldest when after is nil.
// The transaction's tenant is set. Cost: one index range of limit rows.
func Oldest(ctx context.Context, tx pgx.Tx, post int64, after *OldestCursor, limit int) ([]event.Comment, error) {
	args := pgx.StrictNamedArgs{"post": post, "limit": limit, "created_at": any("-infinity"), "comment_id": "00000000-0000-0000-0000-000000000000"}
	if after != nil {
		args["created_at"], args["comment_id"] = after.CreatedAt, after.CommentID
	}
	rows, _ := tx.Query(ctx, oldestSQL, args)
	page, err := pgx.CollectRows(rows, toComment)
	if err != nil {
		return nil, fmt.Errorf("read %d oldest comments of post %d: %w", limit, post, err)
	}
	return page, nil
}

// threadedSQL is one page in the order of the thread: what is visible, and the tombstones above it.
// Index: thread_comments_threaded_idx, one range.   Locks: none.
const threadedSQL = `
SELECT /* threadcache.threaded */ comment_id::text, post_id, parent_id::text, slug, path,
       CASE WHEN visible THEN author_id ELSE 0 END, CASE WHEN visible THEN body ELSE '' END,
       author_state, moderation_state, version, created_at, updated_at
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND shown AND path > @after
 ORDER BY path
 LIMIT @limit`

// Threaded returns up to limit comments of post in the order of the thread (each comment, then its replies), after the path
// afterPath; from the start when it is empty. A comment that is gone and has something visible below it is a tombstone: it is
// not Visible, its Body is empty and its AuthorID 0. The transaction's tenant is set. Cost: one index range of limit rows.
func Threaded(ctx context.Context, tx pgx.Tx, post int64, afterPath string, limit int) ([]event.Comment, error) {
	rows, _ := tx.Query(ctx, threadedSQL, pgx.StrictNamedArgs{"post": post, "after": afterPath, "limit": limit})
	page, err := pgx.CollectRows(rows, toComment)
	if err != nil {
		return nil, fmt.Errorf("read %d threaded comments of post %d after %q: %w", limit, post, afterPath, err)
	}
	return page, nil
}

func toComment(row pgx.CollectableRow) (event.Comment, error) {
	var c event.Comment
	var post, author int64
	var parent *string
	err := row.Scan(&c.CommentID, &post, &parent, &c.Slug, &c.Path, &author, &c.Body, &c.AuthorState, &c.ModerationState,
		&c.Version, &c.CreatedAt.Time, &c.UpdatedAt.Time)
	c.PostID, c.AuthorID = event.ID(post), event.ID(author)
	if parent != nil {
		c.ParentID = *parent
	}
	return c, err
}
