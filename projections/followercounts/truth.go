package followercounts

import (
	"context"
	"iter"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Tables returns the projection's tables, which a replay rebuilds.
func (Projection) Tables() []string {
	return []string{"edge_lists", "edge_shards", "edge_counts"}
}

// Truth yields one event per edge of the truth, with the edge's current state, in bounded memory.
// The pool acts as the system role.
func (p Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	var all []iter.Seq2[event.Event, error]
	for _, k := range p.kinds().AllEdges() {
		all = append(all, store.EdgeEvents(k, store.ScanEdges(ctx, truth, k, nil, 0)))
	}
	return projections.Concat(all...)
}
