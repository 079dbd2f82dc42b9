package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Mend drops all that the projection has of the posts of the keys and applies the truth's comments and settings of them. The caller holds the
// consumer's offsets in tx: an event that is on its way finds that its version is there. Cost: that of the posts' comments.
func (p Projection) Mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key, parked projections.Parked) error {
	var tenants, posts []int64
	seen := make(map[thread]bool)
	for _, k := range keys {
		post := thread{k.TenantID, k.Aggregate}
		if seen[post] {
			continue
		}
		seen[post] = true
		if !parked(k.TenantID, event.AggregateComment, k.Aggregate) && !parked(k.TenantID, event.AggregateThread, k.Aggregate) {
			tenants, posts = append(tenants, k.TenantID), append(posts, k.Aggregate)
		}
	}
	for _, table := range p.Tables() { // each by tenant and post
		if _, err := tx.Exec(ctx, `DELETE FROM `+pgx.Identifier{table}.Sanitize()+` WHERE (tenant_id, post_id) IN (SELECT * FROM unnest(@tenants::bigint[], @posts::bigint[]))`,
			pgx.StrictNamedArgs{"tenants": tenants, "posts": posts}); err != nil {
			return fmt.Errorf("drop %d threads from %s: %w", len(posts), table, err)
		}
	}
	var events []event.Event
	for i, post := range posts {
		settings, err := store.GetEvents(ctx, truth, tenants[i], []event.Ref{{Type: event.AggregateThread, Thread: event.ID(post)}})
		if err != nil {
			return err
		}
		events = append(events, settings...)
		for e, err := range store.Events(store.ScanThread(ctx, truth, tenants[i], post)) {
			if err != nil {
				return err
			}
			if events = append(events, e); len(events) == 1000 {
				if err := p.Apply(ctx, tx, events); err != nil {
					return err
				}
				events = events[:0]
			}
		}
	}
	return p.Apply(ctx, tx, events)
}
