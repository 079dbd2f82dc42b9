package threadcache

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// Key is a place in the chronological order, at a comment or where one was.
type Key struct {
	CreatedAt time.Time
	CommentID string
}

// KeyOf is the comment's place.
func KeyOf(c event.Comment) Key { return Key{c.CreatedAt.Time, c.CommentID} }

// Order is a chronological order: Oldest or Newest first.
type Order bool

// The chronological orders.
const (
	Oldest Order = false
	Newest Order = true
)

const zeroID = "00000000-0000-0000-0000-000000000000"

// columns are a comment's, for toComment. The id's name is another than its column's: else ORDER BY would take the text.
const columns = `comment_id::text AS id, post_id, parent_id::text, slug, path, author_id, body, author_state, moderation_state,
       version, created_at, updated_at`

// oldestSQL is one chronological page: visible comments only.
// Index: thread_comments_oldest_idx, one range.   Locks: none.
const oldestSQL = `
SELECT /* threadcache.oldest */ ` + columns + `
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND visible
   AND (created_at, comment_id) > (@created_at::timestamptz, @comment_id::uuid)
 ORDER BY created_at, comment_id
 LIMIT @limit`

// newestSQL is one page the other way.
// Index: thread_comments_oldest_idx, one range backwards.   Locks: none.
const newestSQL = `
SELECT /* threadcache.newest */ ` + columns + `
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND visible
   AND (created_at, comment_id) < (@created_at::timestamptz, @comment_id::uuid)
 ORDER BY created_at DESC, comment_id DESC
 LIMIT @limit`

// Page returns up to limit visible comments of post in the order, behind after; from the first when after is nil.
// The transaction's tenant is set. Cost: one index range of limit rows.
func Page(ctx context.Context, tx pgx.Tx, post int64, order Order, after *Key, limit int) ([]event.Comment, error) {
	sql, args := oldestSQL, pgx.StrictNamedArgs{"post": post, "limit": limit, "created_at": any("-infinity"), "comment_id": zeroID}
	if order == Newest {
		sql, args["created_at"] = newestSQL, "infinity"
	}
	if after != nil {
		args["created_at"], args["comment_id"] = after.CreatedAt, after.CommentID
	}
	page, err := collect(ctx, tx, sql, args)
	if err != nil {
		return nil, fmt.Errorf("read %d comments of post %d: %w", limit, post, err)
	}
	return page, nil
}

// skipOldestSQL is the page behind the first skip visible comments. The counts of the groups lead to the group, those of its
// buckets to the bucket, and what is left to skip are rows of the bucket. It is one statement, so that counts and rows are of
// one snapshot. The limit is a subquery so that the planner makes no more of one number than of another, and keeps its plan:
// to plan this takes as long as to run it.
// Index: thread_buckets_pkey: the post's groups, one group's buckets; thread_comments_oldest_idx, from one bucket's first key.
// Locks: none.
const skipOldestSQL = `
WITH groups AS (
  SELECT first_at, first_id, visible, sum(visible) OVER w - visible AS before, lead(first_at) OVER w AS next_at, lead(first_id) OVER w AS next_id
    FROM thread_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND level = 1
  WINDOW w AS (ORDER BY first_at, first_id)
), group_at AS MATERIALIZED (
  SELECT first_at, first_id, before, coalesce(next_at, 'infinity') AS next_at, coalesce(next_id, first_id) AS next_id
    FROM groups WHERE before <= @skip::bigint AND before + visible > @skip
), buckets AS (
  SELECT first_at, first_id, visible, (SELECT before FROM group_at) + sum(visible) OVER (ORDER BY first_at, first_id) - visible AS before
    FROM thread_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND level = 0
     AND (first_at, first_id) >= ((SELECT first_at FROM group_at), (SELECT first_id FROM group_at))
     AND (first_at, first_id) < ((SELECT next_at FROM group_at), (SELECT next_id FROM group_at))
), bucket_at AS MATERIALIZED (
  SELECT first_at, first_id, before FROM buckets WHERE before <= @skip AND before + visible > @skip
)
SELECT /* threadcache.skip_oldest */ ` + columns + `
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND visible
   AND (created_at, comment_id) >= ((SELECT first_at FROM bucket_at), (SELECT first_id FROM bucket_at))
 ORDER BY created_at, comment_id
 LIMIT (SELECT @limit::bigint) OFFSET (SELECT @skip - before FROM bucket_at)`

// skipNewestSQL is the same from the other end: ranges are counted from the last, and end where the later one begins.
// Index: as skipOldestSQL, the comments backwards from where one bucket ends.   Locks: none.
const skipNewestSQL = `
WITH groups AS (
  SELECT first_at, first_id, visible, sum(visible) OVER w - visible AS before, lag(first_at) OVER w AS next_at, lag(first_id) OVER w AS next_id
    FROM thread_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND level = 1
  WINDOW w AS (ORDER BY first_at DESC, first_id DESC)
), group_at AS MATERIALIZED (
  SELECT first_at, first_id, before, coalesce(next_at, 'infinity') AS next_at, coalesce(next_id, first_id) AS next_id
    FROM groups WHERE before <= @skip::bigint AND before + visible > @skip
), buckets AS (
  SELECT visible, (SELECT before FROM group_at) + sum(visible) OVER w - visible AS before,
         lag(first_at, 1, (SELECT next_at FROM group_at)) OVER w AS next_at, lag(first_id, 1, (SELECT next_id FROM group_at)) OVER w AS next_id
    FROM thread_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND level = 0
     AND (first_at, first_id) >= ((SELECT first_at FROM group_at), (SELECT first_id FROM group_at))
     AND (first_at, first_id) < ((SELECT next_at FROM group_at), (SELECT next_id FROM group_at))
  WINDOW w AS (ORDER BY first_at DESC, first_id DESC)
), bucket_at AS MATERIALIZED (
  SELECT next_at, next_id, before FROM buckets WHERE before <= @skip AND before + visible > @skip
)
SELECT /* threadcache.skip_newest */ ` + columns + `
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND visible
   AND (created_at, comment_id) < ((SELECT next_at FROM bucket_at), (SELECT next_id FROM bucket_at))
 ORDER BY created_at DESC, comment_id DESC
 LIMIT (SELECT @limit::bigint) OFFSET (SELECT @skip - before FROM bucket_at)`

// Skip returns up to limit visible comments of post in the order, behind the first skip of them: what OFFSET would. The
// transaction's tenant is set. Cost at any depth: the counts of the post's groups (one row per 10,000 to 40,000 comments) and of one
// group's buckets (100 to 200 rows), then an index range of limit rows and up to one bucket's.
func Skip(ctx context.Context, tx pgx.Tx, post int64, order Order, skip int64, limit int) ([]event.Comment, error) {
	sql := skipOldestSQL
	if order == Newest {
		sql = skipNewestSQL
	}
	page, err := collect(ctx, tx, sql, pgx.StrictNamedArgs{"post": post, "skip": skip, "limit": limit})
	if err != nil {
		return nil, fmt.Errorf("read %d comments of post %d behind %d: %w", limit, post, skip, err)
	}
	return page, nil
}

// Around returns up to limit visible comments, oldest first, with c's place in their middle, or nearer to an end where the post
// ends; earlier and later say whether there are others on each side. c need not be visible: then its place is between two
// comments. The transaction's tenant is set. Cost: two index ranges of limit rows.
func Around(ctx context.Context, tx pgx.Tx, c event.Comment, limit int) (page []event.Comment, earlier, later bool, err error) {
	at := KeyOf(c)
	before, err := Page(ctx, tx, int64(c.PostID), Newest, &at, limit+1)
	if err != nil {
		return nil, false, false, err
	}
	after, err := Page(ctx, tx, int64(c.PostID), Oldest, &at, limit+1)
	if err != nil {
		return nil, false, false, err
	}
	if c.Visible() {
		after = slices.Insert(after, 0, c)
	}
	nBefore := min(len(before), max(limit/2, limit-len(after)))
	nAfter := min(len(after), limit-nBefore)
	earlier, later = len(before) > nBefore, len(after) > nAfter
	before = before[:nBefore]
	slices.Reverse(before)
	return append(before, after[:nAfter]...), earlier, later, nil
}

// threadedSQL is one page in the order of the thread: what is visible, and the tombstones above it.
// Index: thread_comments_threaded_idx, one range.   Locks: none.
const threadedSQL = `
SELECT /* threadcache.threaded */ comment_id::text AS id, post_id, parent_id::text, slug, path,
       CASE WHEN visible THEN author_id ELSE 0 END, CASE WHEN visible THEN body ELSE '' END,
       author_state, moderation_state, version, created_at, updated_at
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND shown AND path > @after AND path < @end
 ORDER BY path
 LIMIT @limit`

// Threaded returns up to limit comments of post in the order of the thread (each comment, then its replies), after the path
// afterPath; from the start when it is empty. A comment that is gone and has something visible below it is a tombstone: it is
// not Visible, its Body is empty and its AuthorID 0. The transaction's tenant is set. Cost: one index range of limit rows.
func Threaded(ctx context.Context, tx pgx.Tx, post int64, afterPath string, limit int) ([]event.Comment, error) {
	return threaded(ctx, tx, post, afterPath, "~", limit) // no path goes beyond: they are of digits and lower-case letters
}

// Replies returns up to limit comments below the one at path, in the order of the thread, after afterPath; from the first when
// it is empty. Else it is as Threaded.
func Replies(ctx context.Context, tx pgx.Tx, post int64, path, afterPath string, limit int) ([]event.Comment, error) {
	return threaded(ctx, tx, post, max(afterPath, path+"/"), path+"0", limit) // '0' follows '/'
}

func threaded(ctx context.Context, tx pgx.Tx, post int64, after, end string, limit int) ([]event.Comment, error) {
	page, err := collect(ctx, tx, threadedSQL, pgx.StrictNamedArgs{"post": post, "after": after, "end": end, "limit": limit})
	if err != nil {
		return nil, fmt.Errorf("read %d threaded comments of post %d after %q: %w", limit, post, after, err)
	}
	return page, nil
}

// byIDSQL reads one comment.
// Index: thread_comments_pkey.   Locks: none.
const byIDSQL = `
SELECT /* threadcache.by_id */ ` + columns + `
  FROM thread_comments WHERE tenant_id = current_setting('tidings.tenant')::bigint AND comment_id = @id::uuid`

// ByID returns the comment, whatever its state. The transaction's tenant is set.
func ByID(ctx context.Context, tx pgx.Tx, id string) (c event.Comment, found bool, err error) {
	return one(ctx, tx, byIDSQL, pgx.StrictNamedArgs{"id": id})
}

// bySlugSQL reads one comment by its permalink.
// Index: thread_comments_slug_idx.   Locks: none.
const bySlugSQL = `
SELECT /* threadcache.by_slug */ ` + columns + `
  FROM thread_comments WHERE tenant_id = current_setting('tidings.tenant')::bigint AND slug = @slug AND post_id = @post`

// BySlug returns the comment of post that has the slug, whatever its state. The transaction's tenant is set.
func BySlug(ctx context.Context, tx pgx.Tx, post int64, slug string) (c event.Comment, found bool, err error) {
	return one(ctx, tx, bySlugSQL, pgx.StrictNamedArgs{"post": post, "slug": slug})
}

// byAuthorSQL is one page of an author's comments.
// Index: thread_comments_author_idx, one range backwards.   Locks: none.
const byAuthorSQL = `
SELECT /* threadcache.by_author */ ` + columns + `
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND author_id = @author AND visible
   AND (created_at, comment_id) < (@created_at::timestamptz, @comment_id::uuid)
 ORDER BY created_at DESC, comment_id DESC
 LIMIT @limit`

// ByAuthor returns up to limit visible comments of the author in all posts, newest first, behind after; from the newest when it
// is nil. The transaction's tenant is set. Cost: one index range of limit rows.
func ByAuthor(ctx context.Context, tx pgx.Tx, author int64, after *Key, limit int) ([]event.Comment, error) {
	args := pgx.StrictNamedArgs{"author": author, "limit": limit, "created_at": any("infinity"), "comment_id": zeroID}
	if after != nil {
		args["created_at"], args["comment_id"] = after.CreatedAt, after.CommentID
	}
	page, err := collect(ctx, tx, byAuthorSQL, args)
	if err != nil {
		return nil, fmt.Errorf("read %d comments of author %d: %w", limit, author, err)
	}
	return page, nil
}

// pendingSQL is one page of what waits for a moderator.
// Index: thread_comments_pending_idx, one range.   Locks: none.
const pendingSQL = `
SELECT /* threadcache.pending */ ` + columns + `
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND moderation_state = 'PENDING' AND author_state = 'ACTIVE'
   AND (created_at, comment_id) > (@created_at::timestamptz, @comment_id::uuid)
 ORDER BY created_at, comment_id
 LIMIT @limit`

// pendingOfPostSQL is the same of one post.
// Index: thread_comments_pending_post_idx, one range.   Locks: none.
const pendingOfPostSQL = `
SELECT /* threadcache.pending_of_post */ ` + columns + `
  FROM thread_comments
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND moderation_state = 'PENDING' AND author_state = 'ACTIVE'
   AND (created_at, comment_id) > (@created_at::timestamptz, @comment_id::uuid)
 ORDER BY created_at, comment_id
 LIMIT @limit`

// Pending returns up to limit comments that wait for a moderator, the one that has waited longest first, behind after; from the
// first when it is nil. post is 0 for those of all posts. The transaction's tenant is set. Cost: one index range of limit rows.
func Pending(ctx context.Context, tx pgx.Tx, post int64, after *Key, limit int) ([]event.Comment, error) {
	sql, args := pendingSQL, pgx.StrictNamedArgs{"limit": limit, "created_at": any("-infinity"), "comment_id": zeroID}
	if post != 0 {
		sql, args["post"] = pendingOfPostSQL, post
	}
	if after != nil {
		args["created_at"], args["comment_id"] = after.CreatedAt, after.CommentID
	}
	page, err := collect(ctx, tx, sql, args)
	if err != nil {
		return nil, fmt.Errorf("read %d pending comments: %w", limit, err)
	}
	return page, nil
}

// Summary is a thread in numbers.
type Summary struct {
	Visible int64      // comments that everybody sees
	Total   int64      // comments that there ever were
	LastAt  *time.Time // when the newest visible one was written; nil without any
}

// summarySQL sums the counts of a post's groups.
// Index: thread_buckets_pkey, the groups; thread_totals_pkey; thread_comments_oldest_idx, one row.   Locks: none.
const summarySQL = `
SELECT /* threadcache.summary */
       (SELECT coalesce(sum(visible), 0) FROM thread_buckets
         WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND level = 1),
       coalesce((SELECT total FROM thread_totals WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post), 0),
       (SELECT created_at FROM thread_comments
         WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post AND visible
         ORDER BY created_at DESC, comment_id DESC LIMIT 1)`

// ReadSummary returns the thread of post in numbers. The transaction's tenant is set. Cost: one row per 10,000 to 40,000 comments.
func ReadSummary(ctx context.Context, tx pgx.Tx, post int64) (Summary, error) {
	rows, _ := tx.Query(ctx, summarySQL, pgx.StrictNamedArgs{"post": post})
	s, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Summary])
	if err != nil {
		return Summary{}, fmt.Errorf("sum up the thread of post %d: %w", post, err)
	}
	return s, nil
}

func one(ctx context.Context, tx pgx.Tx, sql string, args pgx.StrictNamedArgs) (event.Comment, bool, error) {
	found, err := collect(ctx, tx, sql, args)
	if err != nil {
		return event.Comment{}, false, fmt.Errorf("read a comment: %w", err)
	}
	if len(found) == 0 {
		return event.Comment{}, false, nil
	}
	return found[0], true, nil
}

func collect(ctx context.Context, tx pgx.Tx, sql string, args pgx.StrictNamedArgs) ([]event.Comment, error) {
	rows, _ := tx.Query(ctx, sql, args)
	return pgx.CollectRows(rows, toComment)
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
