package history

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Mend adds the versions that the truth is at where the histories of the keys lack them, by versioned.Unrecorded. A record is not corrected:
// versions that the truth does not know stay, and stay named by Verify. The caller holds the consumer's offsets in tx.
func (p *Projection) Mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key, parked projections.Parked) error {
	type of struct {
		tenant int64
		kind   string
	}
	refs := make(map[of][]event.Ref)
	for _, k := range keys {
		o := of{k.TenantID, k.Type}
		refs[o] = append(refs[o], k.Ref())
	}
	set := p.kinds()
	var events []event.Event
	add := func(e event.Event, err error) error {
		if err == nil && !parked(e.TenantID, e.AggregateType, e.AggregateID) {
			events = append(events, e)
		}
		return err
	}
	for o, some := range refs {
		if k, ok := set.Child(o.kind); ok {
			states, err := store.GetChildren(ctx, truth, o.tenant, k, some)
			if err != nil {
				return err
			}
			for i := range states {
				if err := add(store.ChildEvent(k, unrecordedChild(&states[i]))); err != nil {
					return err
				}
			}
		} else if k, ok := set.Edge(o.kind); ok {
			states, err := store.GetEdges(ctx, truth, o.tenant, k, some)
			if err != nil {
				return err
			}
			for i := range states {
				if err := add(store.EdgeEvent(k, *unrecordedEdge(&states[i]))); err != nil {
					return err
				}
			}
		}
	}
	return p.Apply(ctx, tx, events)
}
