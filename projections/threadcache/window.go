package threadcache

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Window compares limit children of the truth after the given place with the projection's children,
// kind by kind. It does not compare a child whose replies continue beyond the window; a larger
// window compares it. It reports differences, some of which may be events that are not applied yet.
// It returns the number of children that it read and the place to continue after, which is nil
// after the last child. Cost: two ranges for each kind that the window touches.
func (p Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int,
	report func(projections.Difference)) (checked int64, next any, err error) {
	return projections.Kinds(p.kinds().AllChildren(), func(k kinds.Child) string { return k.Name }, after, limit,
		func(k kinds.Child, after *childRow, limit int) (checked int64, last *childRow, err error) {
			if after == nil {
				after = &childRow{}
			}
			from := &store.State[event.Child]{TenantID: after.TenantID,
				Object: event.Child{ID: after.ChildID, Parent: after.ObjectID, Path: after.Path}}
			f := fold{kind: k, visit: func(b projections.Diff) { b.Report(report) }}
			last, err = projections.Window(scan(ctx, truth, k, from, limit), rows(ctx, projection, k, *after, &limit), limit, order(k),
				func(want, got *childRow) {
					checked++
					f.add(want, got)
				})
			if err == nil && (last == nil || !k.Threaded) {
				f.finish(nil)
			}
			return checked, last, err
		})
}
