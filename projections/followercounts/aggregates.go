package followercounts

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// aggregate names a row of edge_aggregates of a kind. The value is empty for an integer's count and
// sum.
type aggregate struct {
	object
	attribute, value string
}

func (a aggregate) compare(o aggregate) int {
	return cmp.Or(cmp.Compare(a.tenant, o.tenant), cmp.Compare(a.id, o.id), cmp.Compare(a.attribute, o.attribute),
		cmp.Compare(a.value, o.value))
}

// Sum is the number of an object's active incoming edges with an attribute, or with one value of
// it, and the sum of the values of an integer.
type Sum struct{ Count, Sum int64 }

// aggregated returns the attributes of the kind that are counted and summed, and those whose values
// are counted. An integer with an enum is in both.
func aggregated(k kinds.Edge) (integers, enums []string) {
	integers, enums = []string{}, []string{} // not NULL in SQL
	for _, name := range k.Aggregates() {
		if k.Attributes[name].Type == kinds.Integer {
			integers = append(integers, name)
		}
		if len(k.Attributes[name].Enum) > 0 {
			enums = append(enums, name)
		}
	}
	return integers, enums
}

// sum adds an edge's attributes to the aggregates of its target, or subtracts them with a sign of
// -1. It ignores a value of another type, which an earlier version of the kind may have had, and
// what store.SumEdgesSQL leaves out.
func (c *changes) sum(to object, attributes json.RawMessage, sign int64) {
	if len(attributes) == 0 || len(c.integers)+len(c.enums) == 0 {
		return
	}
	values := make(map[string]json.RawMessage)
	if json.Unmarshal(attributes, &values) != nil {
		return
	}
	add := func(attribute, value string, count, sum int64) {
		k := aggregate{to, attribute, value}
		s := c.aggregates[k]
		c.aggregates[k] = Sum{s.Count + count, s.Sum + sum}
	}
	for _, name := range c.integers {
		var v int64
		if raw, ok := values[name]; ok && string(raw) != "null" && json.Unmarshal(raw, &v) == nil &&
			-kinds.MaxAggregate <= v && v <= kinds.MaxAggregate {
			add(name, "", sign, sign*v)
		}
	}
	for _, name := range c.enums {
		raw, ok := values[name]
		text := string(raw)
		switch {
		case !ok:
			continue
		case raw[0] == '"':
			if json.Unmarshal(raw, &text) != nil {
				continue
			}
		case !strings.ContainsRune("-0123456789", rune(raw[0])):
			continue
		}
		if len(text) <= store.MaxValueBytes {
			add(name, text, sign, 0)
		}
	}
}

// aggregatesSQL changes aggregates. It first reads the current row, because the proposed row must
// satisfy the table's checks. One transaction at a time changes the rows of a target, because all
// events of edges to it are in one partition. Index: edge_aggregates_pkey. Locks: the rows, in key
// order.
const aggregatesSQL = `
INSERT /* followercounts.aggregates */ INTO edge_aggregates (tenant_id, kind, object_id, attribute, value, count, sum)
SELECT d.tenant_id, @kind, d.object_id, d.attribute, d.value, coalesce(a.count, 0) + d.count, coalesce(a.sum, 0) + d.sum
  FROM unnest(@tenants::bigint[], @objects::text[], @attributes::text[], @values::text[], @counts::bigint[], @sums::bigint[])
         WITH ORDINALITY AS d(tenant_id, object_id, attribute, value, count, sum, ord)
  LEFT JOIN LATERAL (SELECT count, sum FROM edge_aggregates
                      WHERE tenant_id = d.tenant_id AND object_id = d.object_id AND kind = @kind AND attribute = d.attribute
                        AND value = d.value LIMIT 1) a ON true
 ORDER BY d.ord
    ON CONFLICT (tenant_id, object_id, kind, attribute, value) DO UPDATE SET count = excluded.count, sum = excluded.sum`

func addAggregates(ctx context.Context, tx pgx.Tx, kind string, moved map[aggregate]Sum) error {
	maps.DeleteFunc(moved, func(_ aggregate, s Sum) bool { return s == Sum{} })
	n := len(moved)
	if n == 0 {
		return nil
	}
	tenants, objects, attributes, values := make([]int64, n), make([]event.ID, n), make([]string, n), make([]string, n)
	counts, sums := make([]int64, n), make([]int64, n)
	for i, a := range slices.SortedFunc(maps.Keys(moved), aggregate.compare) {
		tenants[i], objects[i], attributes[i], values[i] = a.tenant, a.id, a.attribute, a.value
		counts[i], sums[i] = moved[a].Count, moved[a].Sum
	}
	if err := postgres.Later(ctx, tx, aggregatesSQL, postgres.Args{"kind": kind, "tenants": tenants, "objects": objects,
		"attributes": attributes, "values": values, "counts": counts, "sums": sums}); err != nil {
		return fmt.Errorf("change %d aggregates: %w", n, err)
	}
	return nil
}

// Aggregate is a Sum of edges of a kind to an object.
type Aggregate struct {
	Attribute, Value string // the value is empty for an integer's count and sum
	Sum
}

// readAggregatesSQL reads the aggregates of objects. OFFSET makes the planner read one range for
// each. Index: edge_aggregates_pkey, a range for each object and kind. Locks: none.
const readAggregatesSQL = `
SELECT /* followercounts.read_aggregates */ k.kind, o.object_id, a.attribute, a.value, a.count, a.sum
  FROM (SELECT DISTINCT unnest(@ids::text[]) AS object_id) o CROSS JOIN unnest(@kinds::text[]) AS k(kind)
 CROSS JOIN LATERAL (SELECT attribute, value, count, sum FROM edge_aggregates
                      WHERE tenant_id = current_setting('tidings.tenant')::bigint AND object_id = o.object_id AND kind = k.kind
                     OFFSET 0) a`

// ReadAggregates returns the aggregates of edges of these kinds to the objects, in no order. It
// omits what no edge ever had. The transaction's tenant is set.
func ReadAggregates(ctx context.Context, tx pgx.Tx, names []string, ids []event.ID) (map[Object][]Aggregate, error) {
	all := make(map[Object][]Aggregate)
	rows, _ := tx.Query(ctx, readAggregatesSQL, postgres.Args{"kinds": names, "ids": ids})
	var o Object
	var a Aggregate
	if _, err := pgx.ForEachRow(rows, []any{&o.Kind, &o.ID, &a.Attribute, &a.Value, &a.Count, &a.Sum.Sum}, func() error {
		all[o] = append(all[o], a)
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the aggregates of %d objects: %w", len(ids), err)
	}
	return all, nil
}
