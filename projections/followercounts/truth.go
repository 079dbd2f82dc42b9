package followercounts

import (
	"context"
	"iter"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/store"
)

// Tables are the projection's tables: what is built anew by a replay.
func (Projection) Tables() []string {
	return []string{"follow_edges", "follower_shards", "follower_counts"}
}

// Truth yields an event for each pair of the truth, with the state that it is in, in bounded memory. The pool acts as the
// system role.
func (Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	return store.Events(store.ScanFollows(ctx, truth, nil, 0))
}
