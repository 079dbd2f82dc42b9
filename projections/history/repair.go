package history

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Repair adds the current version of the truth to the histories of the keys that lack it, with the
// actor versioned.Unrecorded. It does not correct a record: versions that the truth does not know
// remain, and Verify continues to report them. The caller holds the consumer's offsets in tx.
func (p *Projection) Repair(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key,
	parked projections.Parked) ([]projections.Key, error) {
	refs := make(map[int64][]event.Ref) // by tenant
	for _, k := range keys {
		refs[k.TenantID] = append(refs[k.TenantID], k.Ref())
	}
	var events []event.Event
	for tenant, some := range refs {
		states, err := store.StatesBy(ctx, truth, tenant, p.kinds(), some, versioned.Unrecorded)
		if err != nil {
			return nil, err
		}
		events = append(events, slices.DeleteFunc(states,
			func(e event.Event) bool { return parked(e.TenantID, e.AggregateType, e.AggregateID) })...)
	}
	return nil, p.Apply(ctx, tx, events)
}
