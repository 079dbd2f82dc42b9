package followercounts

import (
	"context"
	"fmt"
	"slices"

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

// Window compares limit edges and ranked children of the truth after the given place with the
// projection's, kind by kind. It also compares the counts, aggregates and scores of their objects
// with the objects' edges. It reports differences, some of which may be events that are not applied
// yet. It returns the number of compared rows and the place to continue after, which is nil after
// the last. Cost: two ranges for each kind that the window touches, and at most fewEdges edges per
// object.
func (p Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int,
	report func(projections.Difference)) (checked int64, next any, err error) {
	set := p.kinds()
	return projections.Kinds(windowed(set), func(name string) string { return name }, after, limit,
		func(name string, after *windowRow, limit int) (int64, *windowRow, error) {
			if after == nil {
				after = &windowRow{}
			}
			if k, ok := set.Edge(name); ok {
				checked, last, err := windowEdges(ctx, truth, projection, set, k, after.edge, limit, report)
				if last == nil {
					return checked, nil, err
				}
				return checked, &windowRow{edge: *last}, err
			}
			checked, last, err := windowRanks(ctx, truth, projection, set.Children[name], after.rank, limit, report)
			if last == nil {
				return checked, nil, err
			}
			return checked, &windowRow{rank: *last}, err
		})
}

// windowRow is the last row of a window.
type windowRow struct {
	edge edgeRow
	rank rankRow
}

// windowed returns the names of the kinds that have rows, in order.
func windowed(set *kinds.Set) (names []string) {
	for _, k := range set.AllEdges() {
		names = append(names, k.Name)
	}
	for _, k := range ranked(set) {
		names = append(names, k.Name)
	}
	slices.Sort(names)
	return names
}

func windowEdges(ctx context.Context, truth, projection *pgxpool.Pool, set *kinds.Set, k kinds.Edge, after edgeRow, limit int,
	report func(projections.Difference)) (checked int64, last *edgeRow, err error) {
	c := comparison{k, report}
	from := &store.State[event.Edge]{TenantID: after.TenantID, Object: event.Edge{From: after.From, To: after.To}}
	var seen, targets []object
	last, err = projections.Window(projections.Of(store.ScanEdges(ctx, truth, k, from, limit), wanted(k)),
		edges(ctx, projection, k.Name, after, limit), limit, (*edgeRow).compare, func(want, got *edgeRow) {
			checked++
			diffEdge(k, want, got).Report(report)
			if got != nil {
				to := object{got.TenantID, got.To}
				seen, targets = append(seen, object{got.TenantID, got.From}, to), append(targets, to)
			}
		})
	if err == nil {
		err = c.windowCounts(ctx, projection, seen)
	}
	if err == nil {
		err = c.windowSums(ctx, projection, targets)
	}
	if child, ok := set.Ranks(k); ok && err == nil {
		err = c.windowScores(ctx, child, projection, targets)
	}
	return checked, last, err
}

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
