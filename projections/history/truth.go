package history

import (
	"context"
	"iter"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Tables returns no table, because the histories are records, to which a replay only adds.
func (*Projection) Tables() []string { return nil }

// Reached returns true, because no read of a history waits for a write.
func (*Projection) Reached(context.Context, pgx.Tx, []event.Ref) (bool, error) { return true, nil }

// Window compares nothing, because the histories derive no state that could drift.
func (*Projection) Window(context.Context, *pgxpool.Pool, *pgxpool.Pool, any, int, func(projections.Difference)) (int64, any, error) {
	return 0, nil, nil
}

// Truth yields one event per child and edge of the truth, with its current version and the actor
// versioned.Unrecorded. Only the events themselves have earlier versions and the actors. Memory is
// bounded. The pool acts as the system role.
func (p *Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	var all []iter.Seq2[event.Event, error]
	for _, k := range p.kinds().AllChildren() {
		all = append(all, store.ChildEvents(k, projections.Of(store.ScanChildren(ctx, truth, k, nil, 0), unrecordedChild)))
	}
	for _, k := range p.kinds().AllEdges() {
		all = append(all, store.EdgeEvents(k, projections.Of(store.ScanEdges(ctx, truth, k, nil, 0), unrecordedEdge)))
	}
	return projections.Concat(all...)
}

func unrecordedChild(s *store.State[event.Child]) *store.State[event.Child] {
	s.Object.Actor = versioned.Unrecorded
	return s
}

func unrecordedEdge(s *store.State[event.Edge]) *store.State[event.Edge] {
	s.Object.Actor = versioned.Unrecorded
	return s
}

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
