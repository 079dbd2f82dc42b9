package threadcache

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// aggregate names a row of child_aggregates.
type aggregate struct {
	object
	attribute string
}

// move adds a child's attributes to the sums of its object, or with a sign of -1 subtracts them. It
// ignores a child that is not visible, and an attribute that is not an integer: an earlier version
// of the kind may have had another type.
func move(sums map[aggregate]Aggregate, o object, aggregated []string, attributes json.RawMessage, visible bool, sign int64) {
	if !visible || len(attributes) == 0 {
		return
	}
	values := make(map[string]json.RawMessage)
	if json.Unmarshal(attributes, &values) != nil {
		return
	}
	for _, name := range aggregated {
		var v int64
		if raw, ok := values[name]; !ok || string(raw) == "null" || json.Unmarshal(raw, &v) != nil {
			continue
		}
		k := aggregate{o, name}
		s := sums[k]
		sums[k] = Aggregate{name, s.Count + sign, s.Sum + sign*v}
	}
}

// aggregatesSQL changes aggregates. It first reads the current row, because the proposed row must
// satisfy the table's checks. Index: child_aggregates_pkey. Locks: the objects' rows.
const aggregatesSQL = `
INSERT /* threadcache.aggregates */ INTO child_aggregates (tenant_id, kind, object_id, attribute, count, sum)
SELECT d.tenant_id, d.kind, d.object_id, d.attribute, coalesce(a.count, 0) + d.count, coalesce(a.sum, 0) + d.sum
  FROM unnest(@tenants::bigint[], @kinds::text[], @objects::text[], @attributes::text[], @counts::bigint[], @sums::bigint[])
         AS d(tenant_id, kind, object_id, attribute, count, sum)
  LEFT JOIN child_aggregates a ON a.tenant_id = d.tenant_id AND a.kind = d.kind AND a.object_id = d.object_id AND a.attribute = d.attribute
    ON CONFLICT (tenant_id, kind, object_id, attribute) DO UPDATE SET count = excluded.count, sum = excluded.sum`

func addAggregates(ctx context.Context, tx pgx.Tx, moved map[aggregate]Aggregate) error {
	var objects columns
	var attributes []string
	var counts, sums []int64
	for k, d := range moved {
		if d.Count != 0 || d.Sum != 0 {
			objects.add(k.object)
			attributes, counts, sums = append(attributes, k.attribute), append(counts, d.Count), append(sums, d.Sum)
		}
	}
	if len(counts) == 0 {
		return nil
	}
	if err := postgres.Later(ctx, tx, aggregatesSQL, objects.args(pgx.StrictNamedArgs{"attributes": attributes, "counts": counts,
		"sums": sums})); err != nil {
		return fmt.Errorf("change %d aggregates: %w", len(counts), err)
	}
	return nil
}
