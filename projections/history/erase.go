package history

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/kinds"
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
