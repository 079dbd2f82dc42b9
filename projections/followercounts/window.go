package followercounts

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// windowCountsSQL counts the edges of objects whose counts are small. One statement sees edges and
// counts of one moment. Index: edge_counts_pkey; edge_lists_forward_idx, edge_lists_reverse_idx, at
// most as many edges as are counted. Locks: none.
const windowCountsSQL = `
SELECT /* followercounts.window_counts */ c.tenant_id, c.object_id, c.incoming, c.outgoing,
       (SELECT count(*) FROM edge_lists e WHERE e.tenant_id = c.tenant_id AND e.kind = @kind AND e.to_id = c.object_id AND e.active),
       (SELECT count(*) FROM edge_lists e WHERE e.tenant_id = c.tenant_id AND e.kind = @kind AND e.from_id = c.object_id AND e.active)
  FROM (SELECT DISTINCT * FROM unnest(@tenants::bigint[], @objects::text[]) AS u(tenant_id, object_id)) o
  JOIN edge_counts c ON c.tenant_id = o.tenant_id AND c.kind = @kind AND c.object_id = o.object_id
 WHERE c.incoming + c.outgoing < @few`

// fewEdges bounds the number of an object's edges that a window counts.
const fewEdges = 2000

// Window compares limit edges of the truth after the given place with the projection's edges, kind
// by kind. It also compares the counts of their objects with the objects' edges. It reports
// differences, some of which may be events that are not applied yet. It returns the number of
// compared edges and the place to continue after, which is nil after the last edge. Cost: two
// ranges for each kind that the window touches, and at most fewEdges edges per object.
func (p Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int,
	report func(projections.Difference)) (checked int64, next any, err error) {
	return projections.Kinds(p.kinds().AllEdges(), nameOf, after, limit,
		func(k kinds.Edge, after *edgeRow, limit int) (checked int64, last *edgeRow, err error) {
			if after == nil {
				after = &edgeRow{}
			}
			c := comparison{k, report}
			from := &store.State[event.Edge]{TenantID: after.TenantID,
				Object: event.Edge{From: after.From, To: after.To}}
			var seen []object
			last, err = projections.Window(projections.Of(store.ScanEdges(ctx, truth, k, from, limit), wanted(k)),
				edges(ctx, projection, k.Name, *after, limit), limit, (*edgeRow).compare, func(want, got *edgeRow) {
					checked++
					diffEdge(k, want, got).Report(report)
					if got != nil {
						seen = append(seen, object{got.TenantID, got.From}, object{got.TenantID, got.To})
					}
				})
			if err == nil {
				err = c.windowCounts(ctx, projection, seen)
			}
			return checked, last, err
		})
}

func nameOf(k kinds.Edge) string { return k.Name }

func (c comparison) windowCounts(ctx context.Context, projection *pgxpool.Pool, seen []object) error {
	args := objectArgs(c.kind.Name, seen)
	args["few"] = fewEdges
	rows, _ := projection.Query(ctx, windowCountsSQL, args)
	var got, want store.Counts
	if _, err := pgx.ForEachRow(rows, []any{&got.TenantID, &got.ID, &got.Incoming, &got.Outgoing, &want.Incoming, &want.Outgoing},
		func() error {
			want.TenantID, want.ID = got.TenantID, got.ID
			c.counts(&want, &got)
			return nil
		}); err != nil {
		return fmt.Errorf("compare the counts of a window: %w", err)
	}
	return nil
}
