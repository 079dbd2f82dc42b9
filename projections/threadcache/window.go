package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Window compares limit comments of the truth from after on with the projection's. A comment whose replies go on beyond the window is not
// compared; a larger window has them. It reports differences, which may be events on their way, and returns how many
// comments it read and where to go on: nil after the last one. Cost: two ranges.
func (Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int, report func(projections.Difference)) (checked int64, next any, err error) {
	var from *store.State[event.Comment]
	var behind commentRow
	if last, ok := after.(*commentRow); ok {
		from, behind = &store.State[event.Comment]{TenantID: last.TenantID, Object: event.Comment{PostID: event.ID(last.PostID), Path: last.Path}}, *last
	}
	f := fold{report: report}
	last, err := projections.Window(projections.Of(store.ScanThreads(ctx, truth, from, limit), wanted), rows(ctx, projection, behind, &limit), limit, (*commentRow).compare,
		func(want, got *commentRow) {
			checked++
			f.add(want, got)
		})
	if err != nil {
		return checked, nil, fmt.Errorf("compare a window of threads: %w", err)
	}
	if last == nil {
		f.finish(nil)
		return checked, nil, nil
	}
	return checked, last, nil
}
