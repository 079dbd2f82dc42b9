package followercounts

import (
	"context"
	"iter"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Tables are the projection's tables: what is built anew by a replay.
func (Projection) Tables() []string {
	return []string{"edge_lists", "edge_shards", "edge_counts"}
}

// Truth yields an event for each edge of the truth, with the state that it is in, in bounded memory. The pool acts as the
// system role.
func (p Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	var all []iter.Seq2[event.Event, error]
	for _, k := range p.kinds().AllEdges() {
		all = append(all, store.EdgeEvents(k, store.ScanEdges(ctx, truth, k, nil, 0)))
	}
	return projections.Concat(all...)
}
