package threadcache

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// mendBatch is how many children are applied together.
const mendBatch = 1000

// dropObjectSQL drops what a table has of an object.
const dropObjectSQL = `DELETE /* threadcache.drop */ FROM %s WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object`

// dropChildrenSQL drops children by their ids.
// Index: child_lists_pkey.   Locks: the children.
const dropChildrenSQL = `DELETE /* threadcache.drop_children */ FROM child_lists WHERE tenant_id = @tenant AND kind = @kind AND child_id = ANY(@ids::uuid[])`

// Mend drops all that the projection has of the objects of the keys and applies the truth's children and settings of them. The caller holds the
// consumer's offsets in tx: an event that is on its way finds that its version is there. Cost: that of the objects' children. What is not visible of a
// kind that is not threaded has no index by its object: it is dropped by the ids of the truth and of the keys.
func (p Projection) Mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key, parked projections.Parked) error {
	objects := make(map[object][]string) // children that the keys name
	for _, k := range keys {
		o := object{k.TenantID, cmp.Or(k.Kind, k.Type), k.Aggregate}
		if parked(o.tenant, o.kind, o.id) || parked(o.tenant, event.AggregateThread, o.id) {
			continue
		}
		if objects[o] = append(objects[o], []string{}...); k.Child != "" {
			objects[o] = append(objects[o], k.Child)
		}
	}
	for o, children := range objects {
		if err := p.mend(ctx, tx, truth, o, children); err != nil {
			return err
		}
	}
	return nil
}

func (p Projection) mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, o object, named []string) error {
	kind, ok := p.kinds().Child(o.kind)
	if !ok {
		return fmt.Errorf("mend the children %s of %d: there is no such kind", o.kind, o.id)
	}
	args := pgx.StrictNamedArgs{"tenant": o.tenant, "kind": o.kind, "object": o.id}
	for _, table := range p.Tables() {
		sql := fmt.Sprintf(dropObjectSQL, pgx.Identifier{table}.Sanitize())
		if table == "child_lists" && kind.Threaded {
			sql += ` AND path IS NOT NULL` // Index: child_lists_path_idx
		} else if table == "child_lists" {
			sql += ` AND visible` // Index: child_lists_oldest_idx
		}
		if _, err := tx.Exec(ctx, sql, args); err != nil {
			return fmt.Errorf("drop object %d from %s: %w", o.id, table, err)
		}
	}
	drop := func(ids []string) error {
		if _, err := tx.Exec(ctx, dropChildrenSQL, pgx.StrictNamedArgs{"tenant": o.tenant, "kind": o.kind, "ids": ids}); err != nil {
			return fmt.Errorf("drop %d children of %d: %w", len(ids), o.id, err)
		}
		return nil
	}
	if err := drop(named); err != nil {
		return err
	}
	settings, err := store.GetSettings(ctx, truth, o.tenant, []event.Ref{{Type: event.AggregateThread, Thread: event.ID(o.id), Kind: o.kind}})
	if err != nil {
		return err
	}
	var events []event.Event
	for i := range settings {
		e, err := store.SettingsEvent(&settings[i])
		if err != nil {
			return err
		}
		events = append(events, e)
	}
	var ids []string
	flush := func() error {
		if !kind.Threaded {
			if err := drop(ids); err != nil {
				return err
			}
		}
		err := p.Apply(ctx, tx, events)
		events, ids = events[:0], ids[:0]
		return err
	}
	for s, err := range store.ScanObject(ctx, truth, kind, o.tenant, o.id) {
		if err != nil {
			return err
		}
		e, err := store.ChildEvent(kind, s)
		if err != nil {
			return err
		}
		if events, ids = append(events, e), append(ids, s.Object.ID); len(events) == mendBatch {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}
