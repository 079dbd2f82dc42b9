package deadletter

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	pageWindow  = 20_000 // letters per statement
	pageWindows = 10     // statements per page
)

// Place is where a page ends.
type Place struct {
	At time.Time // when its last letter died, in a group's pages
	ID int64     // of its last letter
}

// listGroupSQL reads a page of a group in the order in which its letters died.
//
// Index: that of the groups, one range.   Locks: none.
const listGroupSQL = `
SELECT /* deadletter.list_group */ ` + letterColumns + `
  FROM {table} d
 WHERE {tenant} AND d.group_id = @group AND (d.dead_at, d.id) > (@at, @last) AND ` + filterSQL + `
 ORDER BY d.dead_at, d.id LIMIT @limit`

const (
	// idsOfGroupsSQL finds letters of groups. Index: that of the groups, up to @most entries.
	// Locks: none.
	idsOfGroupsSQL = `SELECT /* deadletter.ids_of_groups */ id FROM {table} WHERE {tenant} AND group_id = ANY(@groups::uuid[]) LIMIT @most`
	// idsOfAggregateSQL finds letters of an aggregate. Index: that of the aggregates, up to @most
	// entries. Locks: none.
	idsOfAggregateSQL = `
SELECT /* deadletter.ids_of_aggregate */ d.id FROM {table} d
 WHERE {any} AND d.tenant_id = @tenant AND d.aggregate_type = @aggregate_type AND d.aggregate_id = @aggregate_id LIMIT @most`
	// windowSQL finds the last id of a window. Index: the primary key, one range. Locks: none.
	windowSQL = `
SELECT /* deadletter.window */ coalesce(max(id), 0) FROM (SELECT id FROM {table} WHERE id > @after ORDER BY id LIMIT @window) w`
)

// Page returns up to limit letters that the filter selects, without the fields that only Get reads:
// of a group in the order in which they died, else by id. They follow after, the end of the page
// before; the zero Place begins. next is the end of this page, and zero if no letter follows. The
// pool of r acts as the system role.
//
// However many letters there are, Page reads a group's page, or up to MaxCount letters that an
// index finds, or up to 200,000 from after. So a page may have fewer letters, or none, and a next.
func Page(ctx context.Context, r *Reader, f Filter, after Place, limit int) (all []Letter, next Place, err error) {
	if f.Group != "" {
		all, err = r.pageOfGroup(ctx, f, after, limit+1)
	} else {
		all, next, err = r.page(ctx, f, after, limit+1)
	}
	if len(all) > limit {
		all = all[:limit]
		next = Place{all[limit-1].DeadAt, all[limit-1].ID}
	}
	return all, next, err
}

func (r *Reader) pageOfGroup(ctx context.Context, f Filter, after Place, limit int) (all []Letter, err error) {
	args := f.Args()
	args["at"], args["last"], args["limit"] = after.At, after.ID, limit
	err = r.read(ctx, f.TenantID, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, walkSQL); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, r.table.ofTenant(listGroupSQL, f.TenantID), planned, args)
		all, err = r.collect(rows)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the dead letters of group %s: %w", f.Group, err)
	}
	return all, nil
}

// page is Page outside a group. next is zero unless the page ended before all letters were read.
func (r *Reader) page(ctx context.Context, f Filter, after Place, limit int) (all []Letter, next Place, err error) {
	ids, few, err := r.few(ctx, f)
	if err != nil {
		return nil, next, err
	}
	f.After = after.ID
	if few {
		i, _ := slices.BinarySearch(ids, after.ID+1)
		for f.IDs = range slices.Chunk(ids[i:], MaxBatch) {
			some, err := r.list(ctx, f, f.IDs[len(f.IDs)-1], limit-len(all))
			if all = append(all, some...); err != nil || len(all) == limit {
				return all, next, err
			}
		}
		return all, next, nil
	}
	for range r.windows {
		var upto int64
		if err := r.read(ctx, 0, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, r.table.sql(windowSQL), pgx.StrictNamedArgs{"after": f.After, "window": r.window}).Scan(&upto)
		}); err != nil {
			return nil, next, fmt.Errorf("find the dead letters of the %s after %d: %w", r.table.Source, f.After, err)
		}
		if upto == 0 {
			return all, Place{}, nil
		}
		some, err := r.list(ctx, f, upto, limit-len(all))
		if all = append(all, some...); err != nil || len(all) == limit {
			return all, next, err
		}
		f.After, next.ID = upto, upto
	}
	return all, next, nil
}

// few returns the ids of letters in ascending order, among which are all that the filter selects.
// It is false if they are more than MaxCount, or if no index finds them.
func (r *Reader) few(ctx context.Context, f Filter) (ids []int64, few bool, err error) {
	sql, args := idsOfGroupsSQL, pgx.NamedArgs(f.Args())
	args["most"] = r.most + 1
	switch {
	case len(f.IDs) > 0:
		return slices.Sorted(slices.Values(f.IDs)), true, nil
	case f.TenantID != 0 && f.AggregateType != "" && f.AggregateID != "":
		sql = idsOfAggregateSQL
	case f.Group != "":
		args["groups"] = []string{f.Group}
	default:
		all, more, err := r.Groups(ctx, f.TenantID)
		if err != nil || more {
			return nil, false, err
		}
		groups := []string{}
		for _, g := range all {
			if (f.Consumer == "" || f.Consumer == g.Consumer) && (f.EventType == "" || f.EventType == g.EventType) &&
				(f.DeadBefore.IsZero() || g.First.Before(f.DeadBefore)) && !g.Last.Before(f.DeadAfter) {
				groups = append(groups, g.ID)
			}
		}
		args["groups"] = groups
	}
	err = r.read(ctx, f.TenantID, func(tx pgx.Tx) (err error) {
		if _, err := tx.Exec(ctx, walkSQL); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, r.table.ofTenant(sql, f.TenantID), planned, args)
		ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		return err
	})
	if err != nil {
		return nil, false, fmt.Errorf("find the dead letters of the %s: %w", r.table.Source, err)
	}
	slices.Sort(ids)
	return ids, len(ids) <= r.most, nil
}

// CountFew is r.Count, except that it counts nothing and returns false if it had to read more than
// MaxCount letters.
func CountFew(ctx context.Context, r *Reader, f Filter) (n int64, few bool, err error) {
	ids, few, err := r.few(ctx, f)
	if err != nil || !few {
		return 0, false, err
	}
	for f.IDs = range slices.Chunk(ids, MaxBatch) {
		some, err := r.Count(ctx, f)
		if err != nil {
			return 0, false, err
		}
		n += some
	}
	return n, true, nil
}
