package threadcache

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// InspectMost is the largest number of children of a thread that an inspection counts in the truth.
const InspectMost = 10_000

const inspected = `
SELECT /* threadcache.inspect */ tenant_id, object_id, coalesce(path, ''), child_id::text AS id, coalesce(parent_id::text, ''),
       coalesce(slug, ''), author_id, body, attributes, author_state, moderation_state, version, created_at, updated_at,
       visible, visible_descendants, shown
  FROM child_lists WHERE tenant_id = @tenant::bigint AND kind = @kind`

// byIDsSQL reads children for a comparison, in the order of their ids. Index: child_lists_pkey.
// Locks: none.
const byIDsSQL = inspected + ` AND child_id = ANY(@ids::uuid[]) ORDER BY child_id`

// threadPageSQL reads a page of a thread for a comparison. It compares the object for equality
// instead of in a range with the path: a planner that knows one huge thread expects few rows after
// such a range. Index: child_lists_path_idx, one range. Locks: none.
const threadPageSQL = inspected + ` AND object_id = @object::text AND path IS NOT NULL AND path > @after ORDER BY path LIMIT @limit`

func inspectRows(ctx context.Context, projection *pgxpool.Pool, sql string, args pgx.StrictNamedArgs) ([]*childRow, error) {
	rows, _ := projection.Query(ctx, sql, args)
	return pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[childRow])
}

// InspectChild compares a child of the truth with the projection's. It counts up to InspectMost
// children below it; if there are more, it omits the fields that depend on them. Both pools act as
// the system role.
func InspectChild(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child, tenant int64,
	id string) (b projections.Diff, err error) {
	states, err := store.GetChildren(ctx, truth, tenant, k, []event.Ref{{Type: k.Name, Child: id}})
	if err != nil {
		return b, err
	}
	got, err := inspectRows(ctx, projection, byIDsSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "ids": []string{id}})
	if err != nil {
		return b, fmt.Errorf("inspect %s %s of tenant %d: %w", k.Name, id, tenant, err)
	}
	var want, has *childRow
	if len(got) > 0 {
		has = got[0]
	}
	if len(states) == 0 {
		if has == nil {
			return b, nil
		}
		return diffChild(k, nil, has), nil
	}
	want = wanted(&states[0])
	all := true
	if k.Threaded {
		if want.VisibleDescendants, all, err = visibleBelow(ctx, truth, k, tenant, want); err != nil {
			return b, err
		}
	}
	want.Shown = want.Visible || want.VisibleDescendants > 0
	b = diffChild(k, want, has)
	if !all {
		dropDerived(&b)
	}
	return b, nil
}

// visibleBelow counts the visible children below a child. all is false if there are more than
// InspectMost children.
func visibleBelow(ctx context.Context, truth *pgxpool.Pool, k kinds.Child, tenant int64, of *childRow) (visible int, all bool, err error) {
	const step = 500
	for after, n := of.Path, 0; n < InspectMost; {
		read := 0
		for s, err := range store.ScanObject(ctx, truth, k, tenant, of.ObjectID, after, step) {
			switch {
			case err != nil:
				return 0, false, err
			case !strings.HasPrefix(s.Object.Path, of.Path+"/"):
				return visible, true, nil
			case s.Object.Visible():
				visible++
			}
			after = s.Object.Path
			read++
		}
		if n += read; read < step {
			return visible, true, nil
		}
	}
	return visible, false, nil
}

// dropDerived omits the fields that depend on children below.
func dropDerived(b *projections.Diff) {
	b.Fields = slices.DeleteFunc(b.Fields, func(f projections.Field) bool { return f.Name == visibleDescendants || f.Name == shown })
}

// InspectPage compares up to limit children of a thread with the projection's, in the thread's
// order, after a place ("" is the first). It returns the place of the last one, or "" at the end.
// It omits fields that depend on children beyond the page. For a kind without threads it reads from
// the projection only the children that the truth has. Both pools act as the system role. Cost: one
// range on each side.
func InspectPage(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child, tenant int64, object event.ID, after string,
	limit int) (page []projections.Diff, next string, err error) {
	var rows []*childRow
	var ids []string
	for r, err := range projections.Of(store.ScanObject(ctx, truth, k, tenant, object, after, limit), wanted) {
		if err != nil {
			return nil, "", err
		}
		rows, ids = append(rows, r), append(ids, r.ChildID)
	}
	sql, args := threadPageSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "object": object, "after": after, "limit": limit}
	if !k.Threaded { // no index by object has the children that are not visible
		sql, args = byIDsSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "ids": ids}
	}
	have, err := inspectRows(ctx, projection, sql, args)
	if err != nil {
		return nil, "", fmt.Errorf("inspect a page of %s of %s of tenant %d: %w", k.Plural, object, tenant, err)
	}
	places := make(map[string]string) // by child
	f := fold{kind: k, visit: func(b projections.Diff) { page = append(page, b) }}
	last, err := projections.Window(each(rows), each(have), limit, order(k), func(want, got *childRow) {
		for _, r := range []*childRow{want, got} {
			if r != nil {
				places[r.ChildID] = placeOf(k, r)
			}
		}
		f.add(want, got)
	})
	if err != nil {
		return nil, "", err
	}
	if last == nil {
		f.finish(nil)
	} else {
		next = placeOf(k, last)
	}
	for _, o := range f.stack { // their replies continue beyond the page
		b := diffChild(k, o.want, o.got)
		dropDerived(&b)
		page = append(page, b)
	}
	slices.SortFunc(page, func(a, b projections.Diff) int { return strings.Compare(places[a.Key.Child], places[b.Key.Child]) })
	return page, next, nil
}

func placeOf(k kinds.Child, r *childRow) string {
	if k.Threaded {
		return r.Path
	}
	return r.ChildID
}

func each(all []*childRow) iter.Seq2[*childRow, error] {
	return func(yield func(*childRow, error) bool) {
		for _, r := range all {
			if !yield(r, nil) {
				return
			}
		}
	}
}

// InspectThread compares the settings of a thread and the numbers of its children with the
// projection's. exact is false if the truth has InspectMost children or more. Then it omits the
// numbers, unless the projection has fewer. Both pools act as the system role.
func InspectThread(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child,
	tenant int64, object event.ID) (settings, counts projections.Diff, exact bool, err error) {
	states, err := store.GetSettings(ctx, truth, tenant, []event.Ref{{Type: event.AggregateThread, Thread: object, Kind: k.Name}})
	if err != nil {
		return settings, counts, false, err
	}
	total, visible, err := store.CountChildren(ctx, truth, k, tenant, object, InspectMost)
	if err != nil {
		return settings, counts, false, err
	}
	var set Settings
	var has map[Object]Summary
	if err := postgres.InTenant(ctx, projection, tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		if set, err = ReadSettings(ctx, tx, k.Name, object); err == nil {
			has, err = ReadSummaries(ctx, tx, []string{k.Name}, []event.ID{object})
		}
		return err
	}); err != nil {
		return settings, counts, false, err
	}
	want := settingsRow{TenantID: tenant, ObjectID: object, Kind: k.Name}
	for _, s := range states {
		want.Locked, want.Premoderated, want.Title, want.Version = s.Object.Locked, s.Object.Premoderate, s.Object.Title, s.Object.Version
	}
	settings = diffSettings(k, &want, &settingsRow{tenant, object, k.Name, set.Locked, set.Premoderated, set.Title, set.Version})
	counts = projections.Diff{InTruth: true, InProjection: true,
		Difference: projections.Difference{Projection: Name, TenantID: tenant, Entity: fmt.Sprintf("thread of %s %s", k.Parent, object),
			Key: projections.Key{Type: k.Name, TenantID: tenant, Aggregate: object}}}
	exact = total < InspectMost
	sum := has[Object{k.Name, object}]
	for _, f := range []projections.Field{projections.Compared("total", total, sum.Total),
		projections.Compared("visible", visible, sum.Visible)} {
		if exact || f.Want.(int64) > f.Got.(int64) {
			counts.Fields = append(counts.Fields, f)
		}
	}
	return settings, counts, exact, nil
}
