package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
)

// truthPostSQL reads a page of the truth's comments of some posts in the order of their threads.
// Index: comments_path_key and comments_archive_path_key, one range per post.   Locks: none.
const truthPostSQL = `
SELECT /* threadcache.mend */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, false, 0, false
  FROM all_comments
 WHERE (tenant_id, post_id) IN (SELECT * FROM unnest(@tenants::bigint[], @posts::bigint[]))
   AND (tenant_id, post_id, path) > (@tenant::bigint, @post::bigint, @path::text COLLATE "C")
 ORDER BY tenant_id, post_id, path LIMIT @limit`

// truthPostSettingsSQL reads the truth's settings of some posts.
// Index: threads_head_idx, threads_purged_pkey, one probe per post.   Locks: none.
const truthPostSettingsSQL = `
SELECT /* threadcache.mend */ tenant_id, post_id, object
  FROM (` + settledSQL + `) t JOIN unnest(@tenants::bigint[], @posts::bigint[]) AS k(tenant_id, post_id) USING (tenant_id, post_id)`

// Mend drops all that the projection has of the posts of the keys and applies the truth's comments and settings of them. The caller holds the
// consumer's offsets in tx: an event that is on its way finds that its version is there. Cost: that of the posts' comments.
func (p Projection) Mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key, parked projections.Parked) error {
	var tenants, posts []int64
	for _, k := range keys {
		if !parked(k.TenantID, event.AggregateComment, k.Aggregate) && !parked(k.TenantID, event.AggregateThread, k.Aggregate) {
			tenants, posts = append(tenants, k.TenantID), append(posts, k.Aggregate)
		}
	}
	for _, table := range p.Tables() { // each by tenant and post
		if _, err := tx.Exec(ctx, `DELETE FROM `+pgx.Identifier{table}.Sanitize()+` WHERE (tenant_id, post_id) IN (SELECT * FROM unnest(@tenants::bigint[], @posts::bigint[]))`,
			pgx.StrictNamedArgs{"tenants": tenants, "posts": posts}); err != nil {
			return fmt.Errorf("drop %d threads from %s: %w", len(posts), table, err)
		}
	}
	var events []event.Event
	rows, _ := truth.Query(ctx, truthPostSettingsSQL, pgx.StrictNamedArgs{"tenants": tenants, "posts": posts})
	settings, err := pgx.CollectRows(rows, pgx.RowToStructByPos[settingsRow])
	if err != nil {
		return fmt.Errorf("read the settings of %d threads of the truth: %w", len(posts), err)
	}
	for _, s := range settings {
		e, err := projections.StateEvent(s.TenantID, event.AggregateThread, s.PostID, event.Updated, s.Object)
		if err != nil {
			return err
		}
		events = append(events, e)
	}
	for row, err := range projections.Pages(ctx, truth, truthPostSQL, func(last *commentRow) pgx.StrictNamedArgs {
		if last == nil {
			last = &commentRow{}
		}
		return pgx.StrictNamedArgs{"tenants": tenants, "posts": posts, "tenant": last.TenantID, "post": last.PostID, "path": last.Path}
	}) {
		if err != nil {
			return err
		}
		e, err := row.event()
		if err != nil {
			return err
		}
		if events = append(events, e); len(events) == 1000 {
			if err := p.Apply(ctx, tx, events); err != nil {
				return err
			}
			events = events[:0]
		}
	}
	return p.Apply(ctx, tx, events)
}
