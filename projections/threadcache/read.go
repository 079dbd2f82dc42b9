package threadcache

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/store"
)

// Key is a place in the chronological order, at a child or where one was.
type Key struct {
	CreatedAt time.Time
	ChildID   string
}

// KeyOf returns the child's place.
func KeyOf(c event.Child) Key { return Key{c.CreatedAt.Time, c.ID} }

// Order is a chronological order: Oldest or Newest first.
type Order bool

// The chronological orders.
const (
	Oldest Order = false
	Newest Order = true
)

const zeroID = "00000000-0000-0000-0000-000000000000"

// fields are the columns of a child for toChild. The id has another name than its column, or ORDER
// BY would sort by the text.
const fields = `child_id::text AS id, object_id, parent_id::text, slug, path, author_id, body, attributes, author_state, moderation_state,
       version, created_at, updated_at`

// oldestSQL reads one chronological page of visible children. Index: child_lists_oldest_idx, one
// range. Locks: none.
const oldestSQL = `
SELECT /* threadcache.oldest */ ` + fields + `
  FROM child_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND visible
   AND (created_at, child_id) > (@created_at::timestamptz, @child_id::uuid)
 ORDER BY created_at, child_id
 LIMIT @limit`

// newestSQL reads one page in the opposite order. Index: child_lists_oldest_idx, one range
// backwards. Locks: none.
const newestSQL = `
SELECT /* threadcache.newest */ ` + fields + `
  FROM child_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND visible
   AND (created_at, child_id) < (@created_at::timestamptz, @child_id::uuid)
 ORDER BY created_at DESC, child_id DESC
 LIMIT @limit`

// Page returns up to limit visible children of the object in the order, after the given one; a nil
// after means from the first. The transaction's tenant is set. Cost: one index range of limit rows.
func Page(ctx context.Context, tx pgx.Tx, kind string, object event.ID, order Order, after *Key, limit int) ([]event.Child, error) {
	sql, args := oldestSQL, pgx.StrictNamedArgs{"kind": kind, "object": object, "limit": limit,
		"created_at": any("-infinity"), "child_id": zeroID}
	if order == Newest {
		sql, args["created_at"] = newestSQL, "infinity"
	}
	if after != nil {
		args["created_at"], args["child_id"] = after.CreatedAt, after.ChildID
	}
	page, err := collect(ctx, tx, sql, args)
	if err != nil {
		return nil, fmt.Errorf("read %d children of object %s: %w", limit, object, err)
	}
	return page, nil
}

// skipOldestSQL reads the page after the first skip visible children. The counts of the groups lead
// to the group, and the counts of its buckets lead to the bucket. The statement then skips the rest
// in the bucket's rows. One statement reads counts and rows of one snapshot. The limit is a
// subquery so that the planner treats all numbers alike and keeps its plan: planning takes as long
// as the execution. Index: child_buckets_pkey: the object's groups, one group's buckets;
// child_lists_oldest_idx, from one bucket's first key. Locks: none.
const skipOldestSQL = `
WITH groups AS (
  SELECT first_at, first_id, visible, sum(visible) OVER w - visible AS before,
         lead(first_at) OVER w AS next_at, lead(first_id) OVER w AS next_id
    FROM child_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND level = 1
  WINDOW w AS (ORDER BY first_at, first_id)
), group_at AS MATERIALIZED (
  SELECT first_at, first_id, before, coalesce(next_at, 'infinity') AS next_at, coalesce(next_id, first_id) AS next_id
    FROM groups WHERE before <= @skip::bigint AND before + visible > @skip
), buckets AS (
  SELECT first_at, first_id, visible, (SELECT before FROM group_at) + sum(visible) OVER (ORDER BY first_at, first_id) - visible AS before
    FROM child_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND level = 0
     AND (first_at, first_id) >= ((SELECT first_at FROM group_at), (SELECT first_id FROM group_at))
     AND (first_at, first_id) < ((SELECT next_at FROM group_at), (SELECT next_id FROM group_at))
), bucket_at AS MATERIALIZED (
  SELECT first_at, first_id, before FROM buckets WHERE before <= @skip AND before + visible > @skip
)
SELECT /* threadcache.skip_oldest */ ` + fields + `
  FROM child_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND visible
   AND (created_at, child_id) >= ((SELECT first_at FROM bucket_at), (SELECT first_id FROM bucket_at))
 ORDER BY created_at, child_id
 LIMIT (SELECT @limit::bigint) OFFSET (SELECT @skip - before FROM bucket_at)`

// skipNewestSQL does the same from the other end: it counts ranges from the last, and a range ends
// where the later one begins. Index: as skipOldestSQL, the children backwards from the end of one
// bucket. Locks: none.
const skipNewestSQL = `
WITH groups AS (
  SELECT first_at, first_id, visible, sum(visible) OVER w - visible AS before,
         lag(first_at) OVER w AS next_at, lag(first_id) OVER w AS next_id
    FROM child_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND level = 1
  WINDOW w AS (ORDER BY first_at DESC, first_id DESC)
), group_at AS MATERIALIZED (
  SELECT first_at, first_id, before, coalesce(next_at, 'infinity') AS next_at, coalesce(next_id, first_id) AS next_id
    FROM groups WHERE before <= @skip::bigint AND before + visible > @skip
), buckets AS (
  SELECT visible, (SELECT before FROM group_at) + sum(visible) OVER w - visible AS before,
         lag(first_at, 1, (SELECT next_at FROM group_at)) OVER w AS next_at,
         lag(first_id, 1, (SELECT next_id FROM group_at)) OVER w AS next_id
    FROM child_buckets WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND level = 0
     AND (first_at, first_id) >= ((SELECT first_at FROM group_at), (SELECT first_id FROM group_at))
     AND (first_at, first_id) < ((SELECT next_at FROM group_at), (SELECT next_id FROM group_at))
  WINDOW w AS (ORDER BY first_at DESC, first_id DESC)
), bucket_at AS MATERIALIZED (
  SELECT next_at, next_id, before FROM buckets WHERE before <= @skip AND before + visible > @skip
)
SELECT /* threadcache.skip_newest */ ` + fields + `
  FROM child_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND visible
   AND (created_at, child_id) < ((SELECT next_at FROM bucket_at), (SELECT next_id FROM bucket_at))
 ORDER BY created_at DESC, child_id DESC
 LIMIT (SELECT @limit::bigint) OFFSET (SELECT @skip - before FROM bucket_at)`

// Skip returns up to limit visible children of the object in the order, after the first skip of
// them, as OFFSET would. The transaction's tenant is set. The cost is the same at any depth. It
// reads the counts of the object's groups (one row per 10,000 to 40,000 children) and of one
// group's buckets (100 to 200 rows). Then it reads an index range of limit rows and up to one
// bucket's rows.
func Skip(ctx context.Context, tx pgx.Tx, kind string, object event.ID, order Order, skip int64, limit int) ([]event.Child, error) {
	sql := skipOldestSQL
	if order == Newest {
		sql = skipNewestSQL
	}
	page, err := collect(ctx, tx, sql, pgx.StrictNamedArgs{"kind": kind, "object": object, "skip": skip, "limit": limit})
	if err != nil {
		return nil, fmt.Errorf("read %d children of object %s after the first %d: %w", limit, object, skip, err)
	}
	return page, nil
}

// Around returns up to limit visible children, oldest first, with c's place in their middle, or
// nearer to an end of the object's children. earlier and later report whether there are others on
// each side. If c is not visible, its place is between two children. The transaction's tenant is
// set. Cost: two index ranges of limit rows.
func Around(ctx context.Context, tx pgx.Tx, kind string, c event.Child, limit int) (page []event.Child, earlier, later bool, err error) {
	at := KeyOf(c)
	before, err := Page(ctx, tx, kind, c.Parent, Newest, &at, limit+1)
	if err != nil {
		return nil, false, false, err
	}
	after, err := Page(ctx, tx, kind, c.Parent, Oldest, &at, limit+1)
	if err != nil {
		return nil, false, false, err
	}
	if c.Visible() {
		after = slices.Insert(after, 0, c)
	}
	nBefore := min(len(before), max(limit/2, limit-len(after)))
	nAfter := min(len(after), limit-nBefore)
	earlier, later = len(before) > nBefore, len(after) > nAfter
	before = before[:nBefore]
	slices.Reverse(before)
	return append(before, after[:nAfter]...), earlier, later, nil
}

// threadedSQL reads one page in the order of the thread: visible children, and the tombstones above
// them. Index: child_lists_threaded_idx, one range. Locks: none.
const threadedSQL = `
SELECT /* threadcache.threaded */ child_id::text AS id, object_id, parent_id::text, slug, path,
       CASE WHEN visible THEN author_id ELSE '' END, CASE WHEN visible THEN body ELSE '' END,
       CASE WHEN visible THEN attributes END, author_state, moderation_state, version, created_at, updated_at
  FROM child_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object AND shown
   AND path > @after AND path < @end
 ORDER BY path
 LIMIT @limit`

// Threaded returns up to limit children of the object in the order of the thread (each child, then
// its replies), after the path after; an empty path means from the start. If below is the path of a
// child, it returns only what is below that child. A gone child with a visible descendant is a
// tombstone: it is not Visible, its Body and AuthorID are empty. The transaction's tenant is
// set. Cost: one index range of limit rows.
func Threaded(ctx context.Context, tx pgx.Tx, kind string, object event.ID, below, after string, limit int) ([]event.Child, error) {
	end := "~" // after every path: paths have only digits and lower-case letters
	if below != "" {
		after, end = max(after, below+"/"), below+"0" // '0' follows '/'
	}
	page, err := collect(ctx, tx, threadedSQL, pgx.StrictNamedArgs{"kind": kind, "object": object, "after": after,
		"end": end, "limit": limit})
	if err != nil {
		return nil, fmt.Errorf("read %d threaded children of object %s after %q: %w", limit, object, after, err)
	}
	return page, nil
}

// byIDSQL reads one child. Index: child_lists_pkey. Locks: none.
const byIDSQL = `
SELECT /* threadcache.by_id */ ` + fields + `
  FROM child_lists WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND child_id = @id::uuid`

// ByID returns the child in any state. The transaction's tenant is set.
func ByID(ctx context.Context, tx pgx.Tx, kind, id string) (c event.Child, found bool, err error) {
	return one(ctx, tx, byIDSQL, pgx.StrictNamedArgs{"kind": kind, "id": id})
}

// bySlugSQL reads one child by its permalink. Index: child_lists_slug_idx. Locks: none.
const bySlugSQL = `
SELECT /* threadcache.by_slug */ ` + fields + `
  FROM child_lists WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND slug = @slug AND object_id = @object`

// BySlug returns the child of the object that has the slug, in any state. The transaction's tenant
// is set.
func BySlug(ctx context.Context, tx pgx.Tx, kind string, object event.ID, slug string) (c event.Child, found bool, err error) {
	return one(ctx, tx, bySlugSQL, pgx.StrictNamedArgs{"kind": kind, "object": object, "slug": slug})
}

// byAuthorSQL reads one page of an author's children, year by year backwards, over the years in
// which the kind has children. ORDER BY begins with the order of the years, so PostgreSQL sorts
// only within each year. The statement ends with the year that fills the page. Index:
// child_lists_author_idx, one range backwards of each year. Locks: none.
const byAuthorSQL = `
WITH bounds AS MATERIALIZED (
  SELECT (SELECT created_year FROM child_lists WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND visible
           ORDER BY created_year LIMIT 1) AS first,
         (SELECT created_year FROM child_lists WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND visible
           ORDER BY created_year DESC LIMIT 1) AS last
)
SELECT /* threadcache.by_author */ ` + fields + `
  FROM (SELECT year FROM bounds, generate_series(first, LEAST(last, @year::int)) AS year ORDER BY year DESC) y,
       LATERAL (SELECT * FROM child_lists
                 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND created_year = y.year
                   AND author_id = @author AND visible
                   AND (created_at, child_id) < (@created_at::timestamptz, @child_id::uuid)
                 ORDER BY created_at DESC, child_id DESC
                 LIMIT @limit) c
 ORDER BY year DESC, created_at DESC, child_id DESC
 LIMIT @limit`

// ByAuthor returns up to limit visible children of the author in all objects, newest first, after
// the given one; a nil after means from the newest. The transaction's tenant is set. Cost: one
// index range per year, until there are limit rows or no more years.
func ByAuthor(ctx context.Context, tx pgx.Tx, kind string, author event.ID, after *Key, limit int) ([]event.Child, error) {
	args := pgx.StrictNamedArgs{"kind": kind, "author": author, "limit": limit, "year": math.MaxInt32,
		"created_at": any("infinity"), "child_id": zeroID}
	if after != nil {
		args["year"], args["created_at"], args["child_id"] = after.CreatedAt.UTC().Year(), after.CreatedAt, after.ChildID
	}
	page, err := collect(ctx, tx, byAuthorSQL, args)
	if err != nil {
		return nil, fmt.Errorf("read %d children of author %s: %w", limit, author, err)
	}
	return page, nil
}

// Object names the children of a kind under an object.
type Object struct {
	Kind string
	ID   event.ID
}

// Summary has the numbers of an object's children.
type Summary struct {
	Visible int64      // visible children
	Total   int64      // all children that ever existed
	LastAt  *time.Time // when the newest visible child was written; nil if there is none
}

// summariesSQL sums the counts of each object's groups. The subqueries depend on the object, so
// each is a probe for each object. Index: child_buckets_pkey, the groups; child_totals_pkey;
// child_lists_oldest_idx, one row. Locks: none.
const summariesSQL = `
SELECT /* threadcache.summaries */ k.kind, o.object_id,
       (SELECT coalesce(sum(b.visible), 0) FROM child_buckets b
         WHERE b.tenant_id = current_setting('tidings.tenant')::bigint AND b.kind = k.kind AND b.object_id = o.object_id AND b.level = 1),
       coalesce((SELECT t.total FROM child_totals t
                  WHERE t.tenant_id = current_setting('tidings.tenant')::bigint AND t.kind = k.kind AND t.object_id = o.object_id), 0),
       (SELECT c.created_at FROM child_lists c
         WHERE c.tenant_id = current_setting('tidings.tenant')::bigint AND c.kind = k.kind AND c.object_id = o.object_id AND c.visible
         ORDER BY c.created_at DESC, c.child_id DESC LIMIT 1)
  FROM unnest(@kinds::text[]) AS k(kind) CROSS JOIN unnest(@objects::text[]) AS o(object_id)`

// ReadSummaries returns the numbers of each object's children of each kind. Those of an unknown
// object are 0. The transaction's tenant is set. Cost: one statement; for each object and kind one
// row per 10,000 to 40,000 children.
func ReadSummaries(ctx context.Context, tx pgx.Tx, names []string, objects []event.ID) (map[Object]Summary, error) {
	all := make(map[Object]Summary, len(names)*len(objects))
	rows, _ := tx.Query(ctx, summariesSQL, pgx.StrictNamedArgs{"kinds": names, "objects": objects})
	var o Object
	var s Summary
	if _, err := pgx.ForEachRow(rows, []any{&o.Kind, &o.ID, &s.Visible, &s.Total, &s.LastAt}, func() error {
		all[o] = s
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the numbers of the children of %d objects: %w", len(objects), err)
	}
	return all, nil
}

// Aggregate is the count and sum of an attribute over an object's visible children.
type Aggregate struct {
	Attribute  string
	Count, Sum int64 // over the children that have the attribute
}

// readAggregatesSQL reads each object's aggregates. OFFSET keeps the lookup a probe for each
// object: without it the planner may join the objects with all aggregates of the tenant. Index:
// child_aggregates_pkey, one range for each object and kind. Locks: none.
const readAggregatesSQL = `
SELECT /* threadcache.read_aggregates */ k.kind, o.object_id, a.attribute, a.count, a.sum
  FROM unnest(@kinds::text[]) AS k(kind) CROSS JOIN unnest(@objects::text[]) AS o(object_id)
 CROSS JOIN LATERAL (SELECT attribute, count, sum FROM child_aggregates
                      WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = k.kind AND object_id = o.object_id
                     OFFSET 0) a`

// ReadAggregates returns the attributes that the kinds aggregate, by object, in no order. It omits
// an attribute that no child of the object ever had. The transaction's tenant is set. Cost: one
// statement with an index range for each object and kind.
func ReadAggregates(ctx context.Context, tx pgx.Tx, names []string, objects []event.ID) (map[Object][]Aggregate, error) {
	all := make(map[Object][]Aggregate)
	rows, _ := tx.Query(ctx, readAggregatesSQL, pgx.StrictNamedArgs{"kinds": names, "objects": objects})
	var o Object
	var a Aggregate
	if _, err := pgx.ForEachRow(rows, []any{&o.Kind, &o.ID, &a.Attribute, &a.Count, &a.Sum}, func() error {
		all[o] = append(all[o], a)
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the aggregates of %d objects: %w", len(objects), err)
	}
	return all, nil
}

func one(ctx context.Context, tx pgx.Tx, sql string, args pgx.StrictNamedArgs) (event.Child, bool, error) {
	found, err := collect(ctx, tx, sql, args)
	if err != nil {
		return event.Child{}, false, fmt.Errorf("read a child: %w", err)
	}
	if len(found) == 0 {
		return event.Child{}, false, nil
	}
	return found[0], true, nil
}

func collect(ctx context.Context, tx pgx.Tx, sql string, args pgx.StrictNamedArgs) ([]event.Child, error) {
	rows, _ := tx.Query(ctx, sql, args)
	return pgx.CollectRows(rows, toChild)
}

func toChild(row pgx.CollectableRow) (event.Child, error) {
	var c event.Child
	var object, author event.ID
	var replyTo, slug, path *string
	err := row.Scan(&c.ID, &object, &replyTo, &slug, &path, &author, &c.Body, &c.Attributes, &c.AuthorState, &c.ModerationState,
		&c.Version, &c.CreatedAt.Time, &c.UpdatedAt.Time)
	c.Parent, c.AuthorID = object, author
	c.ReplyTo, c.Slug, c.Path, c.Attributes = orEmpty(replyTo), orEmpty(slug), orEmpty(path), store.CanonicalAttributes(c.Attributes)
	return c, err
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
