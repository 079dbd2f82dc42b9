package threadcache

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
	return []string{"child_lists", "child_buckets", "child_totals", "child_aggregates", "child_settings"}
}

// Truth yields one event per thread with settings and per child of the truth, with its current
// state, in bounded memory. It yields kind by kind in the order of their objects, so children come
// before their replies. The pool acts as the system role.
func (p Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	all := []iter.Seq2[event.Event, error]{store.SettingsEvents(store.ScanSettings(ctx, truth, nil, 0))}
	for _, k := range p.kinds().AllChildren() {
		all = append(all, store.ChildEvents(k, store.ScanObjects(ctx, truth, k, nil, 0)))
	}
	return projections.Concat(all...)
}
