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
	refs := make(map[int64][]event.Ref) // by tenant
	for _, k := range keys {
		refs[k.TenantID] = append(refs[k.TenantID], event.Ref{Type: k.Type, Comment: k.Comment, Follower: event.ID(k.Other), Followee: event.ID(k.Aggregate)})
	}
	var events []event.Event
	for tenant, some := range refs {
		comments, err := store.GetComments(ctx, truth, tenant, some)
		if err != nil {
			return err
		}
		follows, err := store.GetFollows(ctx, truth, tenant, some)
		if err != nil {
			return err
		}
		for _, c := range comments {
			if err := appendState(&events, unrecordedComment(&c), parked); err != nil {
				return err
			}
		}
		for _, f := range follows {
			if err := appendState(&events, unrecordedFollow(&f), parked); err != nil {
				return err
			}
		}
	}
	return p.Apply(ctx, tx, events)
}

func appendState[T any](to *[]event.Event, s *store.State[T], parked projections.Parked) error {
	e, err := s.Event()
	if err == nil && !parked(e.TenantID, e.AggregateType, e.AggregateID) {
		*to = append(*to, e)
	}
	return err
}
