package threadcache

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// repairBatch is the number of children that are applied together.
const repairBatch = 1000

// repairStep bounds the children of threads that one step deletes and writes while the consumer
// waits.
const repairStep = 4 * repairBatch

// dropObjectSQL deletes the rows of an object in a table.
const dropObjectSQL = `DELETE /* threadcache.drop */ FROM %s WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object`

// dropThreadSQL deletes the next children of an object of a threaded kind.
// Index: child_lists_path_idx, child_lists_pkey. Locks: the children.
const dropThreadSQL = `
DELETE /* threadcache.drop_thread */ FROM child_lists WHERE tenant_id = @tenant AND kind = @kind AND child_id = ANY(ARRAY(
  SELECT child_id FROM child_lists WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object AND path IS NOT NULL ORDER BY path
  LIMIT @limit))`

// dropVisibleSQL deletes the next visible children of an object of a kind that is not threaded.
// Index: child_lists_oldest_idx, child_lists_pkey. Locks: the children.
const dropVisibleSQL = `
DELETE /* threadcache.drop_visible */ FROM child_lists WHERE tenant_id = @tenant AND kind = @kind AND child_id = ANY(ARRAY(
  SELECT child_id FROM child_lists WHERE tenant_id = @tenant AND kind = @kind AND object_id = @object AND visible
  ORDER BY created_at, child_id LIMIT @limit))`

// dropChildrenSQL deletes children by their ids. Index: child_lists_pkey. Locks: the children.
const dropChildrenSQL = `DELETE /* threadcache.drop_children */ FROM child_lists WHERE tenant_id = @tenant AND kind = @kind
	AND child_id = ANY(@ids::uuid[])`

// The steps of a thread that is too large for one step. Repair first deletes its children. When
// none is left, it writes them again; stepMake is followed by the path of the last one.
const (
	stepDrop = "drop"
	stepMake = "make "
)

// objectRepair is an object that Repair repairs.
type objectRepair struct {
	object
	keys  []projections.Key // the keys of this object
	kind  kinds.Child
	left  int // children that this step may still delete and write; only for threaded kinds
	named []string
}

// Repair deletes all rows of the objects of the keys, and applies the truth's children and settings
// of these objects. The caller holds the consumer's offsets in tx. A later event of a repaired
// version changes nothing. Cost: that of the objects' children.
//
// A step deletes and writes at most twice repairStep children of threads. A larger thread takes
// several steps. Between these readers see an incomplete thread, and the consumer works on it. Its
// counts fit the children that it has, or it is being deleted. If an event of the thread is parked
// meanwhile, Repair nevertheless completes the thread. Children of a kind that is not threaded have
// no index by object if they are not visible. Repair deletes these by the ids of the truth and of
// the keys, so such an object takes one step.
func (p Projection) Repair(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key,
	parked projections.Parked) (rest []projections.Key, err error) {
	objects, left := p.objectRepairs(keys, parked), p.repairStep
	for i, m := range objects {
		if left <= 0 {
			for _, m := range objects[i:] {
				rest = append(rest, m.keys...)
			}
			return rest, nil
		}
		if m.kind, err = p.kindOf(m.object); err != nil {
			return nil, err
		}
		m.left = p.repairStep
		step, err := p.repairObject(ctx, tx, truth, m)
		if err != nil {
			return nil, err
		}
		if left -= p.repairStep - m.left; step != "" {
			rest = append(rest, projections.Key{Type: m.object.kind, TenantID: m.tenant, Aggregate: m.id, Step: step})
		}
	}
	return rest, nil
}

func (p Projection) kindOf(o object) (kinds.Child, error) {
	kind, ok := p.kinds().Child(o.kind)
	if !ok {
		return kind, fmt.Errorf("repair the children of %[2]s: there is no kind %[1]s", o.kind, o.id)
	}
	return kind, nil
}

// objectRepairs returns the objects of the keys in their order, except parked objects whose repair
// has not begun.
func (p Projection) objectRepairs(keys []projections.Key, parked projections.Parked) (all []*objectRepair) {
	byObject := make(map[object]*objectRepair)
	for _, k := range keys {
		o := object{k.TenantID, cmp.Or(k.Kind, k.Type), k.Aggregate}
		if k.Step == "" && (parked(o.tenant, o.kind, o.id) || parked(o.tenant, event.AggregateThread, o.id)) {
			continue
		}
		m := byObject[o]
		if m == nil {
			m = &objectRepair{object: o}
			byObject[o], all = m, append(all, m)
		}
		if m.keys = append(m.keys, k); k.Child != "" {
			m.named = append(m.named, k.Child)
		}
	}
	return all
}

// repairObject takes the next step of an object, and returns the step that follows, or "" at the
// end.
func (p Projection) repairObject(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, m *objectRepair) (step string, err error) {
	after, making := strings.CutPrefix(m.keys[0].Step, stepMake)
	if !making {
		if err := m.dropIDs(ctx, tx, m.named); err != nil {
			return "", err
		}
		if done, err := m.drop(ctx, tx); err != nil || !done {
			return stepDrop, err
		}
		for _, table := range p.Tables()[1:] {
			if _, err := tx.Exec(ctx, fmt.Sprintf(dropObjectSQL, pgx.Identifier{table}.Sanitize()), m.args()); err != nil {
				return "", fmt.Errorf("delete object %s from %s: %w", m.id, table, err)
			}
		}
		if err := p.applySettings(ctx, tx, truth, m.object); err != nil {
			return "", err
		}
		after = ""
	}
	return p.make(ctx, tx, truth, m, after)
}

func (m *objectRepair) args() pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{"tenant": m.tenant, "kind": m.object.kind, "object": m.id}
}

func (m *objectRepair) dropIDs(ctx context.Context, tx pgx.Tx, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, dropChildrenSQL, pgx.StrictNamedArgs{"tenant": m.tenant, "kind": m.object.kind, "ids": ids}); err != nil {
		return fmt.Errorf("delete %d children of %s: %w", len(ids), m.id, err)
	}
	return nil
}

// drop deletes children, and reports whether the object's indexes have none left.
func (m *objectRepair) drop(ctx context.Context, tx pgx.Tx) (done bool, err error) {
	sql, args := dropVisibleSQL, m.args()
	for {
		limit := repairBatch
		if m.kind.Threaded {
			sql, limit = dropThreadSQL, min(repairBatch, m.left)
		}
		args["limit"] = limit
		tag, err := tx.Exec(ctx, sql, args)
		if err != nil {
			return false, fmt.Errorf("delete children of %s: %w", m.id, err)
		}
		n := int(tag.RowsAffected())
		if m.kind.Threaded {
			m.left -= n
		}
		switch {
		case n < limit:
			return true, nil
		case m.left == 0:
			return false, nil
		}
	}
}

func (p Projection) applySettings(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, o object) error {
	settings, err := store.GetSettings(ctx, truth, o.tenant,
		[]event.Ref{{Type: event.AggregateThread, Thread: o.id, Kind: o.kind}})
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
	return p.Apply(ctx, tx, events)
}

// make applies the truth's children after a place, and returns the step that follows.
func (p Projection) make(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, m *objectRepair, after string) (step string, err error) {
	var events []event.Event
	var ids []string
	flush := func() error {
		if !m.kind.Threaded {
			if err := m.dropIDs(ctx, tx, ids); err != nil {
				return err
			}
		}
		err := p.Apply(ctx, tx, events)
		events, ids = events[:0], ids[:0]
		return err
	}
	for s, err := range store.ScanObject(ctx, truth, m.kind, m.tenant, m.id, after, 0) {
		if err != nil {
			return "", err
		}
		if m.kind.Threaded && m.left == 0 {
			return stepMake + after, flush()
		}
		e, err := store.ChildEvent(m.kind, s)
		if err != nil {
			return "", err
		}
		after, events, ids = s.Object.Path, append(events, e), append(ids, s.Object.ID)
		if m.kind.Threaded {
			m.left--
		}
		if len(events) == repairBatch {
			if err := flush(); err != nil {
				return "", err
			}
		}
	}
	return "", flush()
}
