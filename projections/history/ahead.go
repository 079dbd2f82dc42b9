package history

import (
	"cmp"
	"context"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// aheadVersions is the number of versions of one entity that are read at a time.
const aheadVersions = 100

// Ahead yields, as events, the versions in the histories that are newer than the truth: a restore
// took the truth back but not the histories. The versions of an entity are in their order. Purged
// versions are missing. Both pools act as the system role; memory does not grow with the tables.
func (p *Projection) Ahead(ctx context.Context, truth, projection *pgxpool.Pool) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		for _, k := range p.kinds().AllChildren() {
			if !ahead(ctx, projection, projections.Of(store.ScanChildren(ctx, truth, k, nil, 0), childHead),
				ofChildren(k, childHeadsSQL), Children(k), func(h *headRow) versioned.Key { return versioned.Key{h.Child} },
				func(h *headRow, c event.Child, by string) (event.Event, bool, error) {
					c.Actor = by
					e, err := store.ChildEvent(k, &store.State[event.Child]{TenantID: h.TenantID, Object: c})
					e.Type = store.ChildEventType(c)
					return e, c.Version > h.Version, err
				}, yield) {
				return
			}
		}
		for _, k := range p.kinds().AllEdges() {
			if !ahead(ctx, projection, projections.Of(store.ScanEdges(ctx, truth, k, nil, 0), edgeHead), ofEdges(k, edgeHeadsSQL), Edges(k),
				func(h *headRow) versioned.Key { return versioned.Key{h.From, h.To} },
				func(h *headRow, c event.Edge, by string) (event.Event, bool, error) {
					c.Actor = by
					e, err := store.EdgeEvent(k, &store.State[event.Edge]{TenantID: h.TenantID, Object: c})
					return e, c.Version > h.Version, err
				}, yield) {
				return
			}
		}
	}
}

// ahead yields the newer versions of a kind, and reports whether to continue. toEvent reports
// whether a version is newer than the truth's version, which the row has.
func ahead[T any](ctx context.Context, projection *pgxpool.Pool, want iter.Seq2[*headRow, error], sql string, table *Table[T],
	keyOf func(*headRow) versioned.Key,
	toEvent func(truth *headRow, object T, by string) (event.Event, bool, error), yield func(event.Event, error) bool) bool {
	order := func(a, b *headRow) int {
		return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.Child, b.Child), cmp.Compare(a.From, b.From),
			cmp.Compare(a.To, b.To))
	}
	more := true
	err := projections.Compare(want, projections.Rows[headRow](ctx, projection, sql, nil), order, func(want, got *headRow) {
		if !more || got == nil || want != nil && got.Version <= want.Version {
			return
		}
		if want == nil {
			h := *got
			h.Version, want = 0, &h
		}
		for after := int64(0); more; {
			var page []versioned.Version[T]
			err := postgres.InTx(ctx, projection, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
				all, err := table.raw.History(ctx, tx, got.TenantID, keyOf(got), after, aheadVersions)
				page, err = table.versions(all, err)
				return err
			})
			for _, v := range page {
				after = v.Position
				if e, above, encodeErr := toEvent(want, v.Object, v.Metadata.CreatedBy); more && (above || encodeErr != nil) {
					more = yield(e, encodeErr) && encodeErr == nil
				}
			}
			if err != nil {
				yield(event.Event{}, err)
				more = false
			}
			if len(page) < aheadVersions {
				return
			}
		}
	})
	if err != nil && more {
		yield(event.Event{}, fmt.Errorf("compare the history with the truth: %w", err))
		return false
	}
	return more
}
