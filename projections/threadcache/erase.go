package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// heldBodiesSQL counts comments that have a body.
// Index: thread_comments_pkey.   Locks: none.
const heldBodiesSQL = `
SELECT /* threadcache.held */ count(*) FROM thread_comments WHERE tenant_id = @tenant AND comment_id = ANY(@ids::uuid[]) AND body <> ''`

// redactBodiesSQL takes bodies out and leaves the rest, which the counts rest on.
// Index: thread_comments_pkey.   Locks: the comments, in key order.
const redactBodiesSQL = `
WITH held AS MATERIALIZED (
  SELECT comment_id FROM thread_comments WHERE tenant_id = @tenant AND comment_id = ANY(@ids::uuid[]) AND body <> '' ORDER BY comment_id FOR NO KEY UPDATE
)
UPDATE /* threadcache.redact */ thread_comments t SET body = '' FROM held WHERE t.tenant_id = @tenant AND t.comment_id = held.comment_id`

// Redact takes the bodies of these comments out, in the caller's transaction, and returns of how many. It is for comments whose
// comment.erased is parked behind a dead letter: everywhere else the event has done it. They become tombstones when that is retried. With
// look it only counts them.
func (Projection) Redact(ctx context.Context, tx pgx.Tx, tenant int64, ids []string, look bool) (n int64, err error) {
	args := pgx.StrictNamedArgs{"tenant": tenant, "ids": ids}
	if look {
		err = tx.QueryRow(ctx, heldBodiesSQL, args).Scan(&n)
	} else {
		tag, e := tx.Exec(ctx, redactBodiesSQL, args)
		n, err = tag.RowsAffected(), e
	}
	if err != nil {
		return 0, fmt.Errorf("redact %d thread comments: %w", len(ids), err)
	}
	return n, nil
}
