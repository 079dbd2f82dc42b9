package history

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

// heldSQL counts versions that have content.
// Index: KIND_history_pkey.   Locks: none.
const heldSQL = `
SELECT /* history.held */ count(*) FROM {kind}_history
 WHERE tenant_id = @tenant AND {id} = ANY(@ids::uuid[]) AND (object ->> 'body' <> '' OR object ?| '{reason,attributes}')`

// redactSQL takes the content out of versions: who did it and when stays. The version of the erasure itself never had any.
// Index: KIND_history_pkey.   Locks: the versions, in key order.
const redactSQL = `
WITH held AS MATERIALIZED (
  SELECT {id}, version_id FROM {kind}_history
   WHERE tenant_id = @tenant AND {id} = ANY(@ids::uuid[]) AND (object ->> 'body' <> '' OR object ?| '{reason,attributes}')
   ORDER BY {id}, version_id FOR NO KEY UPDATE
)
UPDATE /* history.redact */ {kind}_history h SET object = (h.object - '{reason,attributes}'::text[]) || '{"body": "", "erased": true}'
  FROM held WHERE h.tenant_id = @tenant AND h.{id} = held.{id} AND h.version_id = held.version_id`

func ofChildren(k kinds.Child, sql string) string {
	return strings.NewReplacer("{kind}", k.Name, "{id}", k.Names().ID).Replace(sql)
}

// Redact takes the content out of every version of these children, in the caller's transaction, and returns of how many. With look it only
// counts them.
func (p *Projection) Redact(ctx context.Context, tx pgx.Tx, tenant int64, ids []string, look bool) (n int64, err error) {
	args := pgx.StrictNamedArgs{"tenant": tenant, "ids": ids}
	for _, k := range p.kinds().AllChildren() {
		var some int64
		if look {
			err = tx.QueryRow(ctx, ofChildren(k, heldSQL), args).Scan(&some)
		} else {
			tag, e := tx.Exec(ctx, ofChildren(k, redactSQL), args)
			some, err = tag.RowsAffected(), e
		}
		if err != nil {
			return 0, fmt.Errorf("redact the histories of %d children: %w", len(ids), err)
		}
		n += some
	}
	return n, nil
}

// forgetEdgesSQL deletes the histories of pairs, and forgetPurgedSQL what is noted of histories that were purged.
// Index: KIND_history_pkey.   Locks: the versions; nobody else writes them while the offsets are held.
const forgetEdgesSQL = `
DELETE /* history.forget */ FROM {kind}_history h
 USING unnest(@froms::bigint[], @tos::bigint[]) AS k(a, b) WHERE h.tenant_id = @tenant AND h.{from} = k.a AND h.{to} = k.b`

// Index: KIND_history_purged_pkey.   Locks: likewise.
const forgetPurgedSQL = `
DELETE /* history.forget_purged */ FROM {kind}_history_purged h
 USING unnest(@froms::bigint[], @tos::bigint[]) AS k(a, b) WHERE h.tenant_id = @tenant AND h.{from} = k.a AND h.{to} = k.b`

const edgeRows = `(SELECT {from}, {to} FROM {kind}_history WHERE tenant_id = @tenant UNION ALL SELECT {from}, {to} FROM {kind}_history_purged WHERE tenant_id = @tenant) rows`

// Forget deletes the histories of an object's edges, as Projection says: all versions, and what is noted of those that were purged. With look it counts pairs.
func (p *Projection) Forget(ctx context.Context, tx pgx.Tx, of projections.EdgesOf, after projections.Pair, look bool) (n int64, next *projections.Pair, err error) {
	all, next, err := of.Pairs(ctx, tx, ofEdges(of.Kind, edgeRows), of.Kind.Ends[0], of.Kind.Ends[1], after)
	if err != nil || look || len(all) == 0 {
		return int64(len(all)), next, err
	}
	froms, tos := projections.Columns(all)
	for _, sql := range []string{forgetEdgesSQL, forgetPurgedSQL} {
		tag, err := tx.Exec(ctx, ofEdges(of.Kind, sql), pgx.StrictNamedArgs{"tenant": of.TenantID, "froms": froms, "tos": tos})
		if err != nil {
			return 0, nil, fmt.Errorf("forget the histories of %d edges: %w", len(all), err)
		}
		n += tag.RowsAffected()
	}
	return n, next, nil
}
