package store

import (
	"context"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// EdgeEvent returns the state of an edge as an event, like ChildEvent.
func EdgeEvent(k kinds.Edge, s *State[event.Edge]) (event.Event, error) {
	e := event.Event{TenantID: s.TenantID, AggregateType: k.Name, AggregateID: s.Object.To, Type: event.Created, Version: 1}
	if !s.Object.Active() {
		e.Type = event.Removed
	}
	var err error
	e.Payload, err = s.Object.Encode(k.Names())
	return e, err
}

// EdgeEvents converts states of edges to events.
func EdgeEvents(k kinds.Edge, states iter.Seq2[*State[event.Edge], error]) iter.Seq2[event.Event, error] {
	return eventsOf(states, func(s *State[event.Edge]) (event.Event, error) { return EdgeEvent(k, s) })
}

// scanEdgesSQL reads a page of the edges of a kind. It names no table partition, because the
// projections know a kind before the truth has a table for it. Index: edges_KIND_pkey, one range.
// Locks: none.
const scanEdgesSQL = `
SELECT /* store.scan_edges */ tenant_id, from_id, to_id, status, version, created_at, positioned_at, updated_at, attributes
  FROM edges WHERE kind = @kind AND (tenant_id, from_id, to_id) > (@tenant::bigint, @from::text, @to::text)
 ORDER BY tenant_id, from_id, to_id LIMIT @limit`

// ScanEdges yields the edges of a kind of all tenants, in the order of tenant, origin and target.
// It continues from after (nil: with the first edge) and yields at most limit edges (0: all). Its
// memory is bounded. The pool acts as the system role.
func ScanEdges(ctx context.Context, pool *pgxpool.Pool, k kinds.Edge, after *State[event.Edge],
	limit int) iter.Seq2[*State[event.Edge], error] {
	return scan(ctx, pool, scanEdgesSQL, after, limit, func(s *State[event.Edge]) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"kind": k.Name, "tenant": s.TenantID, "from": s.Object.From, "to": s.Object.To}
	}, func(r *edgeRow) State[event.Edge] { return State[event.Edge]{r.Tenant, r.wire()} })
}

// GetEdges returns the edges of the kind that refs name, regardless of the versions in refs. It
// omits edges that the tenant does not have. It reads with the rights of q.
func GetEdges(ctx context.Context, q postgres.Querier, tenant int64, k kinds.Edge, refs []event.Ref) (all []State[event.Edge], err error) {
	var froms, tos []event.ID
	for _, r := range refs {
		if r.Type == k.Name {
			froms, tos = append(froms, r.From), append(tos, r.To)
		}
	}
	if len(froms) == 0 {
		return nil, nil
	}
	rows, _ := q.Query(ctx, edgesOf(k.Name, getEdgesSQL),
		postgres.Args{"tenants": sameTenant(tenant, len(froms)), "froms": froms, "tos": tos})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[edgeRow])
	if err != nil {
		return nil, fmt.Errorf("read %d edges of %s: %w", len(froms), k.Name, err)
	}
	for _, r := range got {
		all = append(all, State[event.Edge]{tenant, r.wire()})
	}
	return all, nil
}

// countEdgesFromSQL counts an object's first @most edges, and the active ones among them.
// Index: edges_KIND_pkey, one range. Locks: none.
const countEdgesFromSQL = `
SELECT /* store.count_edges_from */ count(*), count(*) FILTER (WHERE status = 'ACTIVE')
  FROM (SELECT status FROM {edges} WHERE tenant_id = @tenant::bigint AND from_id = @object::text LIMIT @most::bigint) e`

// CountEdgesFrom counts the active edges among the first most edges of the kind that lead from an
// object. exact is false if the object may have more edges. It reads with the rights of pool.
func CountEdgesFrom(ctx context.Context, pool *pgxpool.Pool, k kinds.Edge, tenant int64, object event.ID,
	most int) (active int64, exact bool, err error) {
	var walked int
	if err = pool.QueryRow(ctx, edgesOf(k.Name, countEdgesFromSQL),
		pgx.StrictNamedArgs{"tenant": tenant, "object": object, "most": most}).Scan(&walked, &active); err != nil {
		return 0, false, fmt.Errorf("count the %s from %s of tenant %d: %w", k.Plural, object, tenant, err)
	}
	return active, walked < most, nil
}

// Counts are the numbers of active edges of a kind that lead to an object and from it.
type Counts struct {
	TenantID           int64
	ID                 event.ID
	Incoming, Outgoing int64
}

// CountEdgesSQL counts both ends of every active edge of a kind, in the order of tenant and id. The
// server sorts them, on disk if they do not fit in memory.
const CountEdgesSQL = `
SELECT /* store.count_edges */ tenant_id, id, sum(incoming)::bigint, sum(outgoing)::bigint
  FROM (SELECT tenant_id, to_id AS id, 1 AS incoming, 0 AS outgoing FROM edges WHERE kind = @kind AND status = 'ACTIVE'
        UNION ALL
        SELECT tenant_id, from_id, 0, 1 FROM edges WHERE kind = @kind AND status = 'ACTIVE') ends
 GROUP BY tenant_id, id ORDER BY tenant_id, id`

// MaxValueBytes is the longest value of an enum. SQL writers may give longer ones.
const MaxValueBytes = 64

// SumEdgesSQL returns a query of the aggregates of edges of the kind @kind, in a table with their
// columns: for each target and each of @integers the number of edges with the attribute and the sum
// of its values, with an empty value; for each of @enums the number of edges with each value. It
// leaves out what only SQL writers can give: fractions, integers above kinds.MaxAggregate, and
// values above MaxValueBytes.
func SumEdgesSQL(table, where string) string {
	return `
SELECT e.tenant_id, e.to_id AS object_id, a.key AS attribute, v.value, count(*) AS count, sum(v.n)::bigint AS sum
  FROM ` + table + ` e
 CROSS JOIN LATERAL jsonb_each(e.attributes) a
 CROSS JOIN LATERAL (SELECT '' AS value, CASE WHEN a.value #>> '{}' ~ '^-?[0-9]{1,10}$' THEN (a.value #>> '{}')::bigint END AS n
                      WHERE a.key = ANY(@integers::text[]) AND jsonb_typeof(a.value) = 'number'
                      UNION ALL
                     SELECT a.value #>> '{}', 0
                      WHERE a.key = ANY(@enums::text[]) AND jsonb_typeof(a.value) IN ('string', 'number')
                        AND octet_length(a.value #>> '{}') <= ` + fmt.Sprint(MaxValueBytes) + `) v
 WHERE e.kind = @kind AND abs(v.n) <= ` + fmt.Sprint(kinds.MaxAggregate) + ` AND ` + where + `
 GROUP BY e.tenant_id, e.to_id, a.key, v.value`
}
