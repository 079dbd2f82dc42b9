package threadcache

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
	return []string{"thread_comments", "thread_buckets", "thread_totals", "thread_settings"}
}

// Truth yields an event for each thread with settings, and for each comment of the truth, with the state that it is in, in bounded memory:
// comments in the order of their threads, so that parents come first. The pool acts as the system role.
func (Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	return projections.Concat(store.Events(store.ScanSettings(ctx, truth, nil, 0)), store.Events(store.ScanThreads(ctx, truth, nil, 0)))
}
