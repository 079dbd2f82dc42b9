package history

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// heldCommentsSQL counts versions that have content.
// Index: comment_history_pkey.   Locks: none.
const heldCommentsSQL = `
SELECT /* history.held */ count(*) FROM comment_history
 WHERE tenant_id = @tenant AND comment_id = ANY(@ids::uuid[]) AND (object ->> 'body' <> '' OR object ? 'reason')`

// redactCommentsSQL takes the content out of versions: who did it and when stays. The version of the erasure itself never had any.
// Index: comment_history_pkey.   Locks: the versions, in key order.
const redactCommentsSQL = `
WITH held AS MATERIALIZED (
  SELECT comment_id, version_id FROM comment_history
   WHERE tenant_id = @tenant AND comment_id = ANY(@ids::uuid[]) AND (object ->> 'body' <> '' OR object ? 'reason')
   ORDER BY comment_id, version_id FOR NO KEY UPDATE
)
UPDATE /* history.redact */ comment_history h SET object = (h.object - 'reason') || '{"body": "", "erased": true}'
  FROM held WHERE h.tenant_id = @tenant AND h.comment_id = held.comment_id AND h.version_id = held.version_id`

// Redact takes the content out of every version of these comments, in the caller's transaction, and returns of how many. With look it only
// counts them.
func (*Projection) Redact(ctx context.Context, tx pgx.Tx, tenant int64, ids []string, look bool) (n int64, err error) {
	args := pgx.StrictNamedArgs{"tenant": tenant, "ids": ids}
	if look {
		err = tx.QueryRow(ctx, heldCommentsSQL, args).Scan(&n)
	} else {
		tag, e := tx.Exec(ctx, redactCommentsSQL, args)
		n, err = tag.RowsAffected(), e
	}
	if err != nil {
		return 0, fmt.Errorf("redact the histories of %d comments: %w", len(ids), err)
	}
	return n, nil
}
