package threadcache

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// countsSQL changes the counts of the ranges that contain the children, and creates the first
// ranges of an object. It returns the buckets that count more than @full. A group's range consists
// of whole buckets, so a bucket's first key finds its group. ON CONFLICT is for readers that apply
// the events of their token beside the consumer. If the consumer has created a range after their
// snapshot, their transaction must run again; it must not fail with a violated key. The list of one
// tenant keeps PostgreSQL from a join with all ranges, which a kept plan of a small table would do.
// Index: child_buckets_pkey, one probe per child and per bucket. Locks: the ranges' rows.
const countsSQL = `
WITH buckets AS MATERIALIZED (
  SELECT d.tenant_id, d.kind, d.object_id, b.first_at IS NULL AS fresh, coalesce(b.first_at, '-infinity') AS first_at,
         coalesce(b.first_id, '00000000-0000-0000-0000-000000000000') AS first_id, sum(d.delta)::int AS delta
    FROM unnest(@tenants::bigint[], @kinds::text[], @objects::text[], @created_ats::timestamptz[], @ids::uuid[], @deltas::int[])
           AS d(tenant_id, kind, object_id, created_at, child_id, delta)
    LEFT JOIN LATERAL (SELECT b.first_at, b.first_id FROM child_buckets b
                        WHERE b.tenant_id = d.tenant_id AND b.kind = d.kind AND b.object_id = d.object_id AND b.level = 0
                          AND (b.first_at, b.first_id) <= (d.created_at, d.child_id)
                        ORDER BY b.first_at DESC, b.first_id DESC LIMIT 1) b ON true
   GROUP BY 1, 2, 3, 4, 5, 6
), groups AS MATERIALIZED (
  SELECT d.tenant_id, d.kind, d.object_id, g.first_at IS NULL AS fresh, coalesce(g.first_at, '-infinity') AS first_at,
         coalesce(g.first_id, '00000000-0000-0000-0000-000000000000') AS first_id, sum(d.delta)::int AS delta
    FROM buckets d
    LEFT JOIN LATERAL (SELECT g.first_at, g.first_id FROM child_buckets g
                        WHERE g.tenant_id = d.tenant_id AND g.kind = d.kind AND g.object_id = d.object_id AND g.level = 1
                          AND (g.first_at, g.first_id) <= (d.first_at, d.first_id)
                        ORDER BY g.first_at DESC, g.first_id DESC LIMIT 1) g ON true
   GROUP BY 1, 2, 3, 4, 5, 6
), moved AS MATERIALIZED (
  SELECT 0::smallint AS level, * FROM buckets UNION ALL SELECT 1, * FROM groups
), begun AS (
  INSERT /* threadcache.counts */ INTO child_buckets AS b (tenant_id, kind, object_id, level, first_at, first_id, visible)
  SELECT tenant_id, kind, object_id, level, first_at, first_id, delta FROM moved WHERE fresh
      ON CONFLICT (tenant_id, kind, object_id, level, first_at, first_id) DO UPDATE SET visible = b.visible + excluded.visible
  RETURNING b.tenant_id, b.kind, b.object_id, b.level, b.first_at, b.first_id, b.visible
), counted AS (
  UPDATE child_buckets b SET visible = b.visible + m.delta FROM moved m
   WHERE NOT m.fresh AND m.delta <> 0
     AND b.tenant_id = ANY (ARRAY[m.tenant_id]) AND b.kind = m.kind AND b.object_id = m.object_id AND b.level = m.level
     AND b.first_at = m.first_at AND b.first_id = m.first_id
  RETURNING b.tenant_id, b.kind, b.object_id, b.level, b.first_at, b.first_id, b.visible
)
SELECT tenant_id, kind, object_id, first_at, first_id FROM (TABLE begun UNION ALL TABLE counted) r WHERE level = 0 AND visible > @full::int`

// addCounts changes the counts of visible children, splits the buckets that have become too large,
// and then their groups. A child affects only its bucket and its group, at any place in the order,
// because rows have no numbers.
func (p Projection) addCounts(ctx context.Context, tx pgx.Tx, changes []change) error {
	var objects columns
	var createdAts []time.Time
	var ids []string
	var deltas []int32
	for _, c := range changes {
		if c.delta != 0 {
			objects.add(c.object)
			createdAts, ids, deltas = append(createdAts, c.createdAt), append(ids, c.id), append(deltas, c.delta)
		}
	}
	if len(deltas) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, countsSQL, objects.args(pgx.StrictNamedArgs{"created_ats": createdAts, "ids": ids, "deltas": deltas,
		"full": 2 * p.bucketSize}))
	var full ranges
	var o object
	var at pgtype.Timestamptz
	var id string
	if _, err := pgx.ForEachRow(rows, []any{&o.tenant, &o.kind, &o.id, &at, &id}, func() error {
		full.add(o)
		full.firstAts, full.firstIDs = append(full.firstAts, at), append(full.firstIDs, id)
		return nil
	}); err != nil {
		return fmt.Errorf("count %d children: %w", len(deltas), err)
	}
	if len(full.tenants) == 0 {
		return nil
	}
	return p.split(ctx, tx, full)
}

// ranges has the keys of buckets as columns.
type ranges struct {
	columns
	firstAts []pgtype.Timestamptz // -infinity for the first bucket of an object
	firstIDs []string
}

// splitBucketsSQL splits buckets into pieces of size visible children. The last piece has the rest,
// less than twice as many. Index: child_buckets_pkey, child_lists_oldest_idx: one range per bucket.
// Locks: the buckets' rows.
const splitBucketsSQL = `
WITH full_buckets AS MATERIALIZED (
  SELECT f.*, coalesce(n.first_at, 'infinity') AS next_at, coalesce(n.first_id, f.first_id) AS next_id
    FROM unnest(@tenants::bigint[], @kinds::text[], @objects::text[], @first_ats::timestamptz[], @first_ids::uuid[])
           AS f(tenant_id, kind, object_id, first_at, first_id)
    LEFT JOIN LATERAL (SELECT n.first_at, n.first_id FROM child_buckets n
                        WHERE n.tenant_id = f.tenant_id AND n.kind = f.kind AND n.object_id = f.object_id AND n.level = 0
                          AND (n.first_at, n.first_id) > (f.first_at, f.first_id)
                        ORDER BY n.first_at, n.first_id LIMIT 1) n ON true
), placed AS (
  SELECT f.tenant_id, f.kind, f.object_id, f.first_at, f.first_id, c.created_at, c.child_id,
         row_number() OVER (w ORDER BY c.created_at, c.child_id) - 1 AS n, count(*) OVER w AS n_all
    FROM full_buckets f, LATERAL (SELECT c.created_at, c.child_id FROM child_lists c
                                   WHERE c.tenant_id = f.tenant_id AND c.kind = f.kind AND c.object_id = f.object_id AND c.visible
                                     AND (c.created_at, c.child_id) >= (f.first_at, f.first_id)
                                     AND (c.created_at, c.child_id) < (f.next_at, f.next_id)
                                   ORDER BY c.created_at, c.child_id OFFSET 0) c
  WINDOW w AS (PARTITION BY f.tenant_id, f.kind, f.object_id, f.first_at, f.first_id)
)
INSERT /* threadcache.split_buckets */ INTO child_buckets (tenant_id, kind, object_id, level, first_at, first_id, visible)
SELECT tenant_id, kind, object_id, 0, CASE WHEN n = 0 THEN first_at ELSE created_at END, CASE WHEN n = 0 THEN first_id ELSE child_id END,
       CASE WHEN n / @size::int = n_all / @size - 1 THEN n_all - n ELSE @size END
  FROM placed WHERE n % @size = 0 AND n / @size < n_all / @size
    ON CONFLICT (tenant_id, kind, object_id, level, first_at, first_id) DO UPDATE SET visible = excluded.visible`

// splitGroupsSQL splits the groups of these buckets in the same way if they have more than twice
// size buckets. Index: child_buckets_pkey, one range per group. Locks: the groups' rows.
const splitGroupsSQL = `
WITH touched AS MATERIALIZED (
  SELECT DISTINCT f.tenant_id, f.kind, f.object_id, g.first_at, g.first_id
    FROM unnest(@tenants::bigint[], @kinds::text[], @objects::text[], @first_ats::timestamptz[], @first_ids::uuid[])
           AS f(tenant_id, kind, object_id, first_at, first_id),
         LATERAL (SELECT g.first_at, g.first_id FROM child_buckets g
                   WHERE g.tenant_id = f.tenant_id AND g.kind = f.kind AND g.object_id = f.object_id AND g.level = 1
                     AND (g.first_at, g.first_id) <= (f.first_at, f.first_id)
                   ORDER BY g.first_at DESC, g.first_id DESC LIMIT 1) g
), placed AS (
  SELECT t.tenant_id, t.kind, t.object_id, t.first_at AS group_at, t.first_id AS group_id, b.first_at, b.first_id, b.visible,
         row_number() OVER (w ORDER BY b.first_at, b.first_id) - 1 AS n, count(*) OVER w AS n_all
    FROM touched t
    LEFT JOIN LATERAL (SELECT n.first_at, n.first_id FROM child_buckets n
                        WHERE n.tenant_id = t.tenant_id AND n.kind = t.kind AND n.object_id = t.object_id AND n.level = 1
                          AND (n.first_at, n.first_id) > (t.first_at, t.first_id)
                        ORDER BY n.first_at, n.first_id LIMIT 1) n ON true,
         LATERAL (SELECT b.first_at, b.first_id, b.visible FROM child_buckets b
                   WHERE b.tenant_id = t.tenant_id AND b.kind = t.kind AND b.object_id = t.object_id AND b.level = 0
                     AND (b.first_at, b.first_id) >= (t.first_at, t.first_id)
                     AND (b.first_at, b.first_id) < (coalesce(n.first_at, 'infinity'), coalesce(n.first_id, t.first_id))
                   ORDER BY b.first_at, b.first_id OFFSET 0) b
  WINDOW w AS (PARTITION BY t.tenant_id, t.kind, t.object_id, t.first_at, t.first_id)
)
INSERT /* threadcache.split_groups */ INTO child_buckets (tenant_id, kind, object_id, level, first_at, first_id, visible)
SELECT tenant_id, kind, object_id, 1, (array_agg(first_at ORDER BY n))[1], (array_agg(first_id ORDER BY n))[1], sum(visible)
  FROM placed WHERE n_all > 2 * @size::int GROUP BY tenant_id, kind, object_id, group_at, group_id, LEAST(n / @size, n_all / @size - 1)
    ON CONFLICT (tenant_id, kind, object_id, level, first_at, first_id) DO UPDATE SET visible = excluded.visible`

// split splits buckets of more than twice the size, and then their groups if those have become too
// large.
func (p Projection) split(ctx context.Context, tx pgx.Tx, full ranges) error {
	for _, level := range []struct {
		sql  string
		size int
	}{{splitBucketsSQL, p.bucketSize}, {splitGroupsSQL, p.groupSize}} {
		if err := postgres.Later(ctx, tx, level.sql, full.args(pgx.StrictNamedArgs{"first_ats": full.firstAts, "first_ids": full.firstIDs,
			"size": level.size})); err != nil {
			return fmt.Errorf("split %d buckets or their groups: %w", len(full.tenants), err)
		}
	}
	return nil
}

// totalsSQL adds new children to the totals of their objects. Index: child_totals_pkey. Locks: the
// objects' rows.
const totalsSQL = `
INSERT /* threadcache.totals */ INTO child_totals AS t (tenant_id, kind, object_id, total)
SELECT * FROM unnest(@tenants::bigint[], @kinds::text[], @objects::text[], @totals::bigint[])
    ON CONFLICT (tenant_id, kind, object_id) DO UPDATE SET total = t.total + excluded.total`

func addTotals(ctx context.Context, tx pgx.Tx, changes []change) error {
	fresh := make(map[object]int64)
	for _, c := range changes {
		if c.fresh {
			fresh[c.object]++
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	var objects columns
	var totals []int64
	for o, n := range fresh {
		objects.add(o)
		totals = append(totals, n)
	}
	if err := postgres.Later(ctx, tx, totalsSQL, objects.args(pgx.StrictNamedArgs{"totals": totals})); err != nil {
		return fmt.Errorf("add to the totals of %d objects: %w", len(fresh), err)
	}
	return nil
}

// columns has the keys of objects as columns of arguments.
type columns struct {
	tenants []int64
	kinds   []string
	ids     []event.ID
}

func (c *columns) add(o object) {
	c.tenants, c.kinds, c.ids = append(c.tenants, o.tenant), append(c.kinds, o.kind), append(c.ids, o.id)
}

// args adds the objects to the other arguments.
func (c *columns) args(others pgx.StrictNamedArgs) pgx.StrictNamedArgs {
	others["tenants"], others["kinds"], others["objects"] = c.tenants, c.kinds, c.ids
	return others
}
