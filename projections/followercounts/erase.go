package followercounts

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

// Redact does nothing, because this projection has no children.
func (Projection) Redact(context.Context, pgx.Tx, int64, []string, bool) (int64, error) {
	return 0, nil
}

// forgetSQL deletes edges, and returns for each whether it was active, and its attributes.
// Index: edge_lists_pkey. Locks: the edges; no other transaction writes them while the offsets are
// held.
const forgetSQL = `
DELETE /* followercounts.forget */ FROM edge_lists e
 USING unnest(@froms::text[], @tos::text[]) AS k(from_id, to_id)
 WHERE e.tenant_id = @tenant AND e.kind = @kind AND e.from_id = k.from_id AND e.to_id = k.to_id
RETURNING e.from_id, e.to_id, e.active, e.attributes`

// forgetCountsSQL deletes an object's row of counts if both are 0, and its aggregates of 0. If the
// object is a target without active edges, it also deletes the object's number of shards. It
// returns the number of deleted rows. Index: edge_counts_pkey, edge_aggregates_pkey,
// edge_shards_pkey, edge_lists_reverse_idx. Locks: the rows; no other transaction writes them while
// the offsets are held.
const forgetCountsSQL = `
WITH counts AS (
  DELETE FROM edge_counts WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object AND incoming = 0 AND outgoing = 0 RETURNING 1
), aggregates AS (
  DELETE FROM edge_aggregates
   WHERE tenant_id = @tenant AND object_id = @object AND kind = @kind AND @target AND count = 0 RETURNING 1
), shards AS (
  DELETE FROM edge_shards WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object AND @target
     AND NOT EXISTS (SELECT FROM edge_lists WHERE tenant_id = @tenant AND kind = @kind AND to_id = @object AND active) RETURNING 1
)
SELECT /* followercounts.forget_counts */ (SELECT count(*) FROM counts) + (SELECT count(*) FROM aggregates) + (SELECT count(*) FROM shards)`

// leftCountsSQL counts the rows that forgetCountsSQL would delete.
// Index: edge_counts_pkey, edge_shards_pkey, edge_lists_reverse_idx. Locks: none.
const leftCountsSQL = `
SELECT /* followercounts.left_counts */
       (SELECT count(*) FROM edge_counts
         WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object AND incoming = 0 AND outgoing = 0)
     + (SELECT count(*) FROM edge_aggregates
         WHERE tenant_id = @tenant AND object_id = @object AND kind = @kind AND @target AND count = 0)
     + (SELECT count(*) FROM edge_shards WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object AND @target
           AND NOT EXISTS (SELECT FROM edge_lists WHERE tenant_id = @tenant AND kind = @kind AND to_id = @object AND active))`

// edgeRowsOfKind selects a tenant's edges of a kind for EdgesOf.Pairs.
const edgeRowsOfKind = `(SELECT from_id, to_id FROM edge_lists WHERE tenant_id = @tenant AND kind = @kind) rows`

// Forget deletes an object's edges as Projection requires. It subtracts an edge that is still
// active because its removal is a dead letter. The last step also deletes the object's counts,
// which are 0 then, and its number of shards.
func (p Projection) Forget(ctx context.Context, tx pgx.Tx, of projections.EdgesOf, after projections.Pair,
	dryRun bool) (n int64, next *projections.Pair, err error) {
	all, next, err := of.Pairs(ctx, tx, edgeRowsOfKind, "from_id", "to_id", after)
	if err != nil {
		return 0, nil, err
	}
	n = int64(len(all))
	if n > 0 && !dryRun {
		froms, tos := projections.Columns(all)
		c, ranks := newChanges(of.Kind, len(all)), ranking{}
		var pair projections.Pair
		var active bool
		var attributes json.RawMessage
		rows, _ := tx.Query(ctx, forgetSQL, postgres.Args{"tenant": of.TenantID, "kind": of.Kind.Name, "froms": froms, "tos": tos})
		if _, err := pgx.ForEachRow(rows, []any{&pair.From, &pair.To, &active, &attributes}, func() error {
			if active {
				c.add(key{of.TenantID, pair.From, pair.To}, attributes, -1)
			}
			return nil
		}); err != nil {
			return 0, nil, fmt.Errorf("delete %d edges: %w", len(all), err)
		}
		if err := p.count(ctx, tx, p.kinds(), c, ranks); err != nil {
			return 0, nil, err
		}
		if err := writeRanks(ctx, tx, ranks); err != nil {
			return 0, nil, err
		}
	}
	if next == nil {
		sql := forgetCountsSQL
		if dryRun {
			sql = leftCountsSQL
		}
		if err := tx.QueryRow(ctx, sql, postgres.Args{"tenant": of.TenantID, "kind": of.Kind.Name, "object": of.Object,
			"target": of.End == kinds.To}).Scan(&n); err != nil {
			return 0, nil, fmt.Errorf("delete the counts of %s %s: %w", of.Kind.Name, of.Object, err)
		}
	}
	return n, next, nil
}

// RedactActor does nothing, because this projection has no actors.
func (Projection) RedactActor(context.Context, pgx.Tx, int64, string, any, bool) (int64, any, error) {
	return 0, nil, nil
}
