package threadcache

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/projections"
)

// rowsPageSQL reads a page of the projection's comments in the order of their threads.
// Index: thread_comments_path_idx, one range.   Locks: none.
const rowsPageSQL = `
SELECT /* threadcache.window */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, visible, visible_descendants, shown
  FROM thread_comments WHERE (tenant_id, post_id, path) > (@tenant::bigint, @post::bigint, @path::text COLLATE "C")
 ORDER BY tenant_id, post_id, path LIMIT @limit`

// Window compares limit comments of the truth from after on with the projection's. A comment whose replies go on beyond the window is not
// compared; a larger window has them. It reports differences, which may be events on their way, and returns how many
// comments it read and where to go on: nil after the last one. Cost: two ranges.
func (Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int, report func(projections.Difference)) (checked int64, next any, err error) {
	from, _ := after.(*commentRow)
	if from == nil {
		from = &commentRow{}
	}
	f := fold{report: report}
	last, err := projections.Window(ctx, truth, projection, truthPageSQL, rowsPageSQL,
		pgx.StrictNamedArgs{"tenant": from.TenantID, "post": from.PostID, "path": from.Path}, limit,
		func(a, b *commentRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.PostID, b.PostID), cmp.Compare(a.Path, b.Path))
		},
		func(want, got *commentRow) {
			checked++
			f.add(want, got)
		})
	if err != nil {
		return checked, nil, fmt.Errorf("compare a window of threads: %w", err)
	}
	if last == nil {
		f.finish(nil)
		return checked, nil, nil
	}
	return checked, last, nil
}
