package followercounts

import (
	"context"
	"iter"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Tables returns the projection's tables, which a replay rebuilds.
func (Projection) Tables() []string {
	return []string{"edge_lists", "edge_shards", "edge_counts", "edge_aggregates", "child_ranks"}
}

// Truth yields one event per edge and per ranked child of the truth, with its current state, in
// bounded memory. The pool acts as the system role.
func (p Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	var all []iter.Seq2[event.Event, error]
	for _, k := range p.kinds().AllEdges() {
		all = append(all, store.EdgeEvents(k, store.ScanEdges(ctx, truth, k, nil, 0)))
	}
	for _, k := range ranked(p.kinds()) {
		all = append(all, store.ChildEvents(k, store.ScanChildren(ctx, truth, k, nil, 0)))
	}
	return projections.Concat(all...)
}

// ranked returns the kinds of children that edges rank.
func ranked(set *kinds.Set) []kinds.Child {
	return slices.DeleteFunc(set.AllChildren(), func(k kinds.Child) bool { return k.RankedBy == "" })
}
