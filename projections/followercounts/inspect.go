package followercounts

import (
	"context"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// InspectMost is the largest number of an object's edges that an inspection counts.
const InspectMost = 10_000

// InspectEdges compares up to limit edges of the kind from an object with the projection's edges,
// by target, after the target after ("": from the first). It returns the last target, or "" at the
// end. Both pools act as the system role. Cost: one range on each side.
func InspectEdges(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Edge, tenant int64, from, after event.ID,
	limit int) (page []projections.Diff, next event.ID, err error) {
	behind := &store.State[event.Edge]{TenantID: tenant, Object: event.Edge{From: from, To: after}}
	last, err := projections.Window(ofObject(projections.Of(store.ScanEdges(ctx, truth, k, behind, limit), wanted(k)), tenant, from),
		ofObject(edges(ctx, projection, k.Name, edgeRow{TenantID: tenant, From: from, To: after}, limit), tenant, from),
		limit, (*edgeRow).compare, func(want, got *edgeRow) { page = append(page, diffEdge(k, want, got)) })
	if err != nil {
		return nil, "", fmt.Errorf("inspect %s from %s of tenant %d: %w", k.Plural, from, tenant, err)
	}
	if last != nil {
		next = last.To
	}
	return page, next, nil
}

// InspectEdge compares one edge like InspectEdges. It returns an empty Diff if neither side has the
// edge.
func InspectEdge(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Edge, tenant int64, from,
	to event.ID) (projections.Diff, error) {
	page, _, err := InspectEdges(ctx, truth, projection, k, tenant, from, before(to), 1)
	if err != nil || len(page) == 0 || page[0].Key.Aggregate != to {
		return projections.Diff{}, err
	}
	return page[0], nil
}

// before returns a text that is behind every id below the given one. Ids have no characters above
// ~.
func before(id event.ID) event.ID {
	n := len(id) - 1
	return id[:n] + event.ID([]byte{id[n] - 1, 0x7f})
}

// ofObject yields the edges of one object and ends behind them.
func ofObject(all iter.Seq2[*edgeRow, error], tenant int64, from event.ID) iter.Seq2[*edgeRow, error] {
	return func(yield func(*edgeRow, error) bool) {
		for r, err := range all {
			if err == nil && (r.TenantID != tenant || r.From != from) || !yield(r, err) {
				return
			}
		}
	}
}

// inspectCountsSQL reads an object's counts, and counts its incoming edges in the projection's own
// list, up to @most. Index: edge_counts_pkey; edge_lists_reverse_idx, one range. Locks: none.
const inspectCountsSQL = `
SELECT /* followercounts.inspect_counts */
       coalesce((SELECT incoming FROM edge_counts WHERE tenant_id = @tenant::bigint AND kind = @kind AND object_id = @object::text), 0),
       coalesce((SELECT outgoing FROM edge_counts WHERE tenant_id = @tenant::bigint AND kind = @kind AND object_id = @object::text), 0),
       (SELECT count(*) FROM (SELECT FROM edge_lists e
         WHERE e.tenant_id = @tenant::bigint AND e.kind = @kind AND e.to_id = @object::text AND e.active LIMIT @most::bigint) l)`

// InspectCounts compares the counts of an object of a type ("user") with its edges. It counts the
// edges from the object in the truth. It counts the edges to the object in the projection's own
// list, because the truth has no index by target. exact is false if an object has InspectMost edges
// or more, of which it did not count all. It omits such a number unless the projection's count is
// lower. Both pools act as the system role.
func InspectCounts(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Edge, objectType string,
	tenant int64, object event.ID) (b projections.Diff, exact bool, err error) {
	b = projections.Diff{InTruth: true, InProjection: true,
		Difference: projections.Difference{Projection: Name, TenantID: tenant, Entity: fmt.Sprintf("counts of %s %s", objectType, object),
			Key: projections.Key{Type: k.Name, TenantID: tenant, Aggregate: object}}}
	var got store.Counts
	var incoming int64
	args := postgres.Args{"tenant": tenant, "kind": k.Name, "object": object, "most": InspectMost}
	if err := projection.QueryRow(ctx, inspectCountsSQL, args).Scan(&got.Incoming, &got.Outgoing, &incoming); err != nil {
		return b, false, fmt.Errorf("inspect the counts of %s %s of tenant %d: %w", objectType, object, tenant, err)
	}
	exact = true
	add := func(name string, want, got int64, all bool) {
		exact = exact && all
		if all || got < want {
			b.Fields = append(b.Fields, projections.Compared(name, want, got))
		}
	}
	if k.From == objectType {
		outgoing, all, err := store.CountEdgesFrom(ctx, truth, k, tenant, object, InspectMost)
		if err != nil {
			return b, false, err
		}
		add(k.Forward, outgoing, got.Outgoing, all)
	}
	if k.To == objectType {
		add(k.Reverse, incoming, got.Incoming, incoming < InspectMost)
	}
	return b, exact, nil
}
