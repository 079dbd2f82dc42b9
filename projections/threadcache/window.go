package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// windowEnd is where a window ended: behind a child of a kind.
type windowEnd struct {
	kind string
	row  childRow
}

// Window compares limit children of the truth from after on with the projection's, kind by kind. A child whose replies go on beyond the window is not
// compared; a larger window has them. It reports differences, which may be events on their way, and returns how many
// children it read and where to go on: nil after the last one. Cost: two ranges for each kind that the window touches.
func (p Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int, report func(projections.Difference)) (checked int64, next any, err error) {
	at, _ := after.(windowEnd)
	for _, k := range p.kinds().AllChildren() {
		switch {
		case k.Name < at.kind:
			continue
		case k.Name > at.kind:
			at = windowEnd{kind: k.Name}
		}
		left := limit - int(checked)
		if left <= 0 {
			return checked, at, nil
		}
		from := &store.State[event.Child]{TenantID: at.row.TenantID, Object: event.Child{ID: at.row.ChildID, Parent: event.ID(at.row.ObjectID), Path: at.row.Path}}
		f := fold{kind: k, report: report}
		last, err := projections.Window(scan(ctx, truth, k, from, left), rows(ctx, projection, k, at.row, &left), left, order(k), func(want, got *childRow) {
			checked++
			f.add(want, got)
		})
		if err != nil {
			return checked, nil, fmt.Errorf("compare a window of %s: %w", k.Plural, err)
		}
		if last == nil || !k.Threaded {
			f.finish(nil)
		}
		if last != nil {
			return checked, windowEnd{k.Name, *last}, nil
		}
	}
	return checked, nil, nil
}
