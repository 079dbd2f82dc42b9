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
	"github.com/tidings/tidings/kinds"
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

// clearRanksSQL takes the children from ranks that Repair writes again, and leaves their scores.
// Index: child_ranks_pkey. Locks: the rows, in key order.
const clearRanksSQL = `
WITH held AS (
  SELECT r.tenant_id, r.child_id, r.kind
    FROM child_ranks r JOIN unnest(@tenants::bigint[], @kinds::text[], @children::uuid[]) AS k(tenant_id, kind, child_id)
      ON r.tenant_id = k.tenant_id AND r.child_id = k.child_id AND r.kind = k.kind
   ORDER BY r.tenant_id, r.child_id, r.kind
     FOR NO KEY UPDATE OF r
)
UPDATE /* followercounts.clear_ranks */ child_ranks r SET version = 0, object_id = NULL, created_at = NULL, visible = false
  FROM held h
 WHERE r.tenant_id = h.tenant_id AND r.child_id = h.child_id AND r.kind = h.kind`

// recountAggregatesSQL sets the aggregates of objects to those of their edges. Rows without
// an edge remain, with 0. Index: edge_lists_reverse_idx, all edges of the objects;
// edge_aggregates_pkey. Locks: the rows; no other transaction writes them while the offsets are
// held.
var recountAggregatesSQL = `
WITH o AS (
  SELECT DISTINCT * FROM unnest(@tenants::bigint[], @objects::text[]) AS u(tenant_id, object_id)
), want AS (` + store.SumEdgesSQL("edge_lists", `e.active AND (e.tenant_id, e.to_id) IN (SELECT tenant_id, object_id FROM o)`) + `
), gone AS (
  UPDATE edge_aggregates a SET count = 0, sum = 0
    FROM o
   WHERE a.tenant_id = o.tenant_id AND a.object_id = o.object_id AND a.kind = @kind
     AND NOT EXISTS (SELECT FROM want w WHERE w.tenant_id = a.tenant_id AND w.object_id = a.object_id AND w.attribute = a.attribute
                                          AND w.value = a.value)
)
INSERT /* followercounts.recount_aggregates */ INTO edge_aggregates (tenant_id, kind, object_id, attribute, value, count, sum)
SELECT tenant_id, @kind, object_id, attribute, value, count, sum FROM want
    ON CONFLICT (tenant_id, object_id, kind, attribute, value) DO UPDATE SET count = excluded.count, sum = excluded.sum`

// scoresSQL has what the scores of objects should be, from their aggregates and counts.
const scoresSQL = `
  SELECT o.tenant_id, o.object_id::uuid AS child_id,
         coalesce(CASE WHEN @attribute <> ''
                       THEN (SELECT a.sum FROM edge_aggregates a
                              WHERE a.tenant_id = o.tenant_id AND a.object_id = o.object_id AND a.kind = @kind
                                AND a.attribute = @attribute AND a.value = '')
                       ELSE (SELECT c.incoming FROM edge_counts c
                              WHERE c.tenant_id = o.tenant_id AND c.object_id = o.object_id AND c.kind = @kind) END, 0) AS score
    FROM (SELECT DISTINCT * FROM unnest(@tenants::bigint[], @objects::text[]) AS u(tenant_id, object_id)) o`

// rescoreSQL sets scores. Index: child_ranks_pkey, edge_aggregates_pkey, edge_counts_pkey. Locks:
// the rows, in key order.
const rescoreSQL = `
INSERT /* followercounts.rescore */ INTO child_ranks AS r (tenant_id, kind, child_id, score)
SELECT s.tenant_id, @child, s.child_id, s.score FROM (` + scoresSQL + `) s
 WHERE s.score <> 0 OR EXISTS (SELECT FROM child_ranks x WHERE x.tenant_id = s.tenant_id AND x.child_id = s.child_id AND x.kind = @child)
 ORDER BY s.tenant_id, s.child_id
    ON CONFLICT (tenant_id, child_id, kind) DO UPDATE SET score = excluded.score WHERE r.score <> excluded.score`

// side is the entities of a kind in a tenant.
type side struct {
	tenant int64
	kind   string
}

// Repair sets the edges and the ranked children of the keys to the truth, and then the counts, the
// aggregates and the scores of all objects of the keys to those of their edges. The caller holds
// the consumer's offsets in tx. A later event of a repaired version changes nothing.
func (p Projection) Repair(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key,
	parked projections.Parked) ([]projections.Key, error) {
	set := p.kinds()
	edges, counted := map[string][]key{}, map[string][]object{}
	refs := make(map[side][]event.Ref)
	var cleared []childKey
	for _, k := range keys {
		if k.Child == "" {
			counted[k.Type] = append(counted[k.Type], object{k.TenantID, k.Aggregate})
		}
		if k.Other == "" && k.Child == "" || parked(k.TenantID, k.Type, k.Aggregate) {
			continue
		}
		if k.Child != "" {
			cleared = append(cleared, childKey{k.TenantID, k.Child, k.Type})
		} else {
			edges[k.Type] = append(edges[k.Type], key{k.TenantID, k.Other, k.Aggregate})
			counted[k.Type] = append(counted[k.Type], object{k.TenantID, k.Other})
		}
		s := side{k.TenantID, k.Type}
		refs[s] = append(refs[s], k.Ref())
	}
	for kind, some := range edges {
		if err := drop(ctx, tx, kind, some); err != nil {
			return nil, err
		}
	}
	if err := clearRanks(ctx, tx, cleared); err != nil {
		return nil, err
	}
	last, ranks, err := fromTruth(ctx, truth, set, refs)
	if err != nil {
		return nil, err
	}
	if err := p.apply(ctx, tx, set, last, ranks); err != nil {
		return nil, err
	}
	for _, kind := range slices.Sorted(maps.Keys(counted)) {
		if err := recount(ctx, tx, set, kind, counted[kind]); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// fromTruth reads the present states of edges and of ranked children.
func fromTruth(ctx context.Context, truth *pgxpool.Pool, set *kinds.Set, refs map[side][]event.Ref) (batch, ranking, error) {
	all, ranks := batch{}, ranking{}
	for s, some := range refs {
		if k, ok := set.Child(s.kind); ok {
			states, err := store.GetChildren(ctx, truth, s.tenant, k, some)
			if err != nil {
				return nil, nil, err
			}
			for _, c := range states {
				ranks[childKey{s.tenant, c.Object.ID, k.Name}] = rank{child: c.Object}
			}
			continue
		}
		kind, ok := set.Edge(s.kind)
		if !ok {
			return nil, nil, fmt.Errorf("repair %d edges: there is no kind %s", len(some), s.kind)
		}
		states, err := store.GetEdges(ctx, truth, s.tenant, kind, some)
		if err != nil {
			return nil, nil, err
		}
		for i := range states {
			if err := all.put(s.tenant, kind, &states[i].Object); err != nil {
				return nil, nil, err
			}
		}
	}
	return all, ranks, nil
}

func clearRanks(ctx context.Context, tx pgx.Tx, all []childKey) error {
	if len(all) == 0 {
		return nil
	}
	n := len(all)
	tenants, names, children := make([]int64, n), make([]string, n), make([]string, n)
	for i, k := range all {
		tenants[i], names[i], children[i] = k.tenant, k.kind, k.child
	}
	if _, err := tx.Exec(ctx, clearRanksSQL, postgres.Args{"tenants": tenants, "kinds": names, "children": children}); err != nil {
		return fmt.Errorf("clear the ranks of %d children: %w", n, err)
	}
	return nil
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

func recount(ctx context.Context, tx pgx.Tx, set *kinds.Set, kind string, counted []object) error {
	args := objectArgs(kind, counted)
	if _, err := tx.Exec(ctx, recountSQL, args); err != nil {
		return fmt.Errorf("count the edges of %d objects: %w", len(counted), err)
	}
	k := set.Edges[kind]
	if len(k.Aggregates()) > 0 {
		args["integers"], args["enums"] = aggregated(k)
		if _, err := tx.Exec(ctx, recountAggregatesSQL, args); err != nil {
			return fmt.Errorf("add up the edges of %d objects: %w", len(counted), err)
		}
	}
	child, ok := set.Ranks(k)
	if !ok {
		return nil
	}
	args = scoreArgs(k, child.Name, counted)
	if _, err := tx.Exec(ctx, rescoreSQL, args); err != nil {
		return fmt.Errorf("set the scores of %d children: %w", len(counted), err)
	}
	return nil
}

// scoreArgs returns the arguments of statements about the scores of those objects that can be
// children: an object at the other end of an edge may have an id of another form.
func scoreArgs(k kinds.Edge, child string, all []object) postgres.Args {
	args := objectArgs(k.Name, slices.DeleteFunc(slices.Clone(all), func(o object) bool { return !event.IsUUID(o.id.String()) }))
	args["child"] = child
	args["attribute"], _ = k.Score()
	return args
}

func objectArgs(kind string, all []object) postgres.Args {
	n := len(all)
	tenants, objects := make([]int64, n), make([]event.ID, n)
	for i, o := range all {
		tenants[i], objects[i] = o.tenant, o.id
	}
	return postgres.Args{"kind": kind, "tenants": tenants, "objects": objects}
}
