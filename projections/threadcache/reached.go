package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// reachedSQL finds children and settings whose version is lower than required. Rows of gone
// children stay. Index: child_lists_pkey, child_settings_pkey, one probe per entity. Locks: none.
const reachedSQL = `
SELECT /* threadcache.reached */ NOT EXISTS (
  SELECT FROM unnest(@kinds::text[], @children::uuid[], @versions::bigint[]) AS w(kind, child_id, version)
    LEFT JOIN child_lists t ON t.tenant_id = current_setting('tidings.tenant')::bigint AND t.kind = w.kind AND t.child_id = w.child_id
   WHERE coalesce(t.version, 0) < w.version)
   AND NOT EXISTS (
  SELECT FROM unnest(@set_kinds::text[], @set_objects::text[], @set_versions::bigint[]) AS w(kind, object_id, version)
    LEFT JOIN child_settings t ON t.tenant_id = current_setting('tidings.tenant')::bigint AND t.kind = w.kind AND t.object_id = w.object_id
   WHERE coalesce(t.version, 0) < w.version)`

// Reached reports whether the projection has each of the entities at the version of the ref, or a
// later one. The transaction's tenant is set.
func (Projection) Reached(ctx context.Context, tx pgx.Tx, refs []event.Ref) (reached bool, err error) {
	var names, children, setKinds []string
	var versions, setVersions []int64
	var setObjects []event.ID
	for _, r := range refs {
		if r.Type == event.AggregateThread {
			t := event.Thread{Kind: r.Kind}
			setKinds, setObjects = append(setKinds, t.Of()), append(setObjects, r.Thread)
			setVersions = append(setVersions, r.Version)
		} else {
			names, children, versions = append(names, r.Type), append(children, r.Child), append(versions, r.Version)
		}
	}
	err = tx.QueryRow(ctx, reachedSQL, pgx.StrictNamedArgs{
		"kinds": names, "children": children, "versions": versions, "set_kinds": setKinds, "set_objects": setObjects,
		"set_versions": setVersions,
	}).Scan(&reached)
	if err != nil {
		return false, fmt.Errorf("compare the versions of %d children and threads: %w", len(refs), err)
	}
	return reached, nil
}
