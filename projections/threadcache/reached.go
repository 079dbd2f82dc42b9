package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// reachedSQL looks for comments and settings whose row here is older than asked for. Rows of gone comments stay.
// Index: thread_comments_pkey, thread_settings_pkey, one probe per entity.   Locks: none.
const reachedSQL = `
SELECT /* threadcache.reached */ NOT EXISTS (
  SELECT FROM unnest(@comments::uuid[], @comment_versions::bigint[]) AS w(comment_id, version)
    LEFT JOIN thread_comments t ON t.tenant_id = current_setting('tidings.tenant')::bigint AND t.comment_id = w.comment_id
   WHERE coalesce(t.version, 0) < w.version)
   AND NOT EXISTS (
  SELECT FROM unnest(@posts::bigint[], @post_versions::bigint[]) AS w(post_id, version)
    LEFT JOIN thread_settings t ON t.tenant_id = current_setting('tidings.tenant')::bigint AND t.post_id = w.post_id
   WHERE coalesce(t.version, 0) < w.version)`

// Reached reports whether the projection has each of the entities at the version that the ref names, or a later one. The
// transaction's tenant is set.
func (Projection) Reached(ctx context.Context, tx pgx.Tx, refs []event.Ref) (reached bool, err error) {
	var comments []string
	var commentVersions, posts, postVersions []int64
	for _, r := range refs {
		if r.Type == event.AggregateComment {
			comments, commentVersions = append(comments, r.Comment), append(commentVersions, r.Version)
		} else {
			posts, postVersions = append(posts, int64(r.Thread)), append(postVersions, r.Version)
		}
	}
	err = tx.QueryRow(ctx, reachedSQL, pgx.StrictNamedArgs{
		"comments": comments, "comment_versions": commentVersions, "posts": posts, "post_versions": postVersions,
	}).Scan(&reached)
	if err != nil {
		return false, fmt.Errorf("look whether %d comments and threads are there: %w", len(refs), err)
	}
	return reached, nil
}
