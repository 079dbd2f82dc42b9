package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/projections"
)

// heldSQL counts children that have content. Index: child_lists_pkey. Locks: none.
const heldSQL = `
SELECT /* threadcache.held */ count(*) FROM child_lists
 WHERE tenant_id = @tenant AND kind = @kind AND child_id = ANY(@ids::uuid[]) AND (body <> '' OR attributes - @aggregated::text[] <> '{}')`

// redactSQL removes bodies and attributes. It keeps everything that counts and aggregates depend
// on. Index: child_lists_pkey. Locks: the children, in key order.
const redactSQL = `
WITH held AS MATERIALIZED (
  SELECT child_id FROM child_lists
   WHERE tenant_id = @tenant AND kind = @kind AND child_id = ANY(@ids::uuid[]) AND (body <> '' OR attributes - @aggregated::text[] <> '{}')
   ORDER BY child_id FOR NO KEY UPDATE
)
UPDATE /* threadcache.redact */ child_lists t
   SET body = '', attributes = (SELECT jsonb_object_agg(key, value) FROM jsonb_each(t.attributes) WHERE key = ANY(@aggregated::text[]))
  FROM held WHERE t.tenant_id = @tenant AND t.kind = @kind AND t.child_id = held.child_id`

// Redact removes the content of these children in the caller's transaction, and returns the number
// of changed rows. It matters only for children whose event of the erasure is parked behind a dead
// letter, because otherwise that event has removed the content. A retry of the dead letter turns
// them into tombstones. With dryRun Redact only counts them. Attributes that are aggregated stay
// until the retry.
func (p Projection) Redact(ctx context.Context, tx pgx.Tx, tenant int64, ids []string, dryRun bool) (n int64, err error) {
	for _, k := range p.kinds().AllChildren() {
		args := pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "ids": ids, "aggregated": append([]string{}, k.Aggregates()...)}
		var some int64
		if dryRun {
			err = tx.QueryRow(ctx, heldSQL, args).Scan(&some)
		} else {
			tag, e := tx.Exec(ctx, redactSQL, args)
			some, err = tag.RowsAffected(), e
		}
		if err != nil {
			return 0, fmt.Errorf("redact %d children: %w", len(ids), err)
		}
		n += some
	}
	return n, nil
}

// RedactActor does nothing, because this projection has no actors.
func (Projection) RedactActor(context.Context, pgx.Tx, int64, string, any, bool) (int64, any, error) {
	return 0, nil, nil
}

// Forget does nothing, because this projection has no edges.
func (Projection) Forget(context.Context, pgx.Tx, projections.EdgesOf, projections.Pair, bool) (int64, *projections.Pair, error) {
	return 0, nil, nil
}
