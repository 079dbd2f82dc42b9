package followercounts

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// dropEdgesSQL deletes edges that Repair writes again. Index: edge_lists_pkey. Locks: the rows; no
// other transaction writes them while the offsets are held.
const dropEdgesSQL = `
DELETE /* followercounts.drop_edges */ FROM edge_lists e
 USING unnest(@tenants::bigint[], @froms::text[], @tos::text[]) AS k(tenant_id, from_id, to_id)
 WHERE e.tenant_id = k.tenant_id AND e.kind = @kind AND e.from_id = k.from_id AND e.to_id = k.to_id`

// recountSQL sets objects' counts to the numbers of their edges.
// Index: edge_lists_forward_idx, edge_lists_reverse_idx: all edges of the objects.
// Locks: the objects' rows, in key order.
const recountSQL = `
INSERT /* followercounts.recount */ INTO edge_counts AS c (tenant_id, kind, object_id, incoming, outgoing)
SELECT o.tenant_id, @kind, o.object_id,
       (SELECT count(*) FROM edge_lists e WHERE e.tenant_id = o.tenant_id AND e.kind = @kind AND e.to_id = o.object_id AND e.active),
       (SELECT count(*) FROM edge_lists e WHERE e.tenant_id = o.tenant_id AND e.kind = @kind AND e.from_id = o.object_id AND e.active)
  FROM (SELECT DISTINCT * FROM unnest(@tenants::bigint[], @objects::text[]) AS u(tenant_id, object_id)) o
 ORDER BY o.tenant_id, o.object_id COLLATE "C"
    ON CONFLICT (tenant_id, kind, object_id) DO UPDATE SET incoming = excluded.incoming, outgoing = excluded.outgoing, updated_at = now()
 WHERE (c.incoming, c.outgoing) IS DISTINCT FROM (excluded.incoming, excluded.outgoing)`

// Repair sets the edges of the keys to the truth, and then the counts of all objects of the keys to
// the numbers of their edges. The caller holds the consumer's offsets in tx. A later event of a
// repaired version changes nothing.
func (p Projection) Repair(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key,
	parked projections.Parked) ([]projections.Key, error) {
	edges, counted := map[string][]key{}, map[string][]object{}
	type side struct {
		tenant int64
		kind   string
	}
	refs := make(map[side][]event.Ref)
	for _, k := range keys {
		counted[k.Type] = append(counted[k.Type], object{k.TenantID, k.Aggregate})
		if k.Other != "" && !parked(k.TenantID, k.Type, k.Aggregate) {
			edges[k.Type] = append(edges[k.Type], key{k.TenantID, k.Other, k.Aggregate})
			counted[k.Type] = append(counted[k.Type], object{k.TenantID, k.Other})
			s := side{k.TenantID, k.Type}
			refs[s] = append(refs[s], k.Ref())
		}
	}
	for kind, some := range edges {
		if err := drop(ctx, tx, kind, some); err != nil {
			return nil, err
		}
	}
	last := batch{}
	for s, some := range refs {
		kind, ok := p.kinds().Edge(s.kind)
		if !ok {
			return nil, fmt.Errorf("repair %d edges: there is no kind %s", len(some), s.kind)
		}
		states, err := store.GetEdges(ctx, truth, s.tenant, kind, some)
		if err != nil {
			return nil, err
		}
		for i := range states {
			if err := last.put(s.tenant, kind, &states[i].Object); err != nil {
				return nil, err
			}
		}
	}
	if err := p.apply(ctx, tx, last); err != nil {
		return nil, err
	}
	for _, kind := range slices.Sorted(maps.Keys(counted)) {
		if err := recount(ctx, tx, kind, counted[kind]); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func drop(ctx context.Context, tx pgx.Tx, kind string, edges []key) error {
	n := len(edges)
	tenants, froms, tos := make([]int64, n), make([]event.ID, n), make([]event.ID, n)
	for i, k := range edges {
		tenants[i], froms[i], tos[i] = k.tenant, k.from, k.to
	}
	if _, err := tx.Exec(ctx, dropEdgesSQL, postgres.Args{"kind": kind, "tenants": tenants, "froms": froms, "tos": tos}); err != nil {
		return fmt.Errorf("delete %d edges: %w", n, err)
	}
	return nil
}

func recount(ctx context.Context, tx pgx.Tx, kind string, counted []object) error {
	if _, err := tx.Exec(ctx, recountSQL, objectArgs(kind, counted)); err != nil {
		return fmt.Errorf("count the edges of %d objects: %w", len(counted), err)
	}
	return nil
}

func objectArgs(kind string, all []object) postgres.Args {
	n := len(all)
	tenants, objects := make([]int64, n), make([]event.ID, n)
	for i, o := range all {
		tenants[i], objects[i] = o.tenant, o.id
	}
	return postgres.Args{"kind": kind, "tenants": tenants, "objects": objects}
}
