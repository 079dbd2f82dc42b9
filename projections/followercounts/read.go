package followercounts

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// Edge is one entry of a page: the object at the other end, the time when the edge last became
// active, and its attributes.
type Edge struct {
	ID           event.ID
	PositionedAt time.Time
	Attributes   json.RawMessage
}

// EdgeCursor is the end of a page; the next page starts below it. The id breaks ties, so no edge is
// lost between two pages.
type EdgeCursor struct {
	PositionedAt time.Time
	ID           event.ID
}

// Counts are the numbers of an object's active incoming and outgoing edges of a kind.
type Counts struct {
	Incoming, Outgoing int64
}

func (c Counts) plus(d Counts) Counts {
	return Counts{c.Incoming + d.Incoming, c.Outgoing + d.Outgoing}
}

// listSQL has the statements of a list. A list without attributes is an index-only scan.
type listSQL struct{ plain, attributes, filtered string }

func newListSQL(template string) listSQL {
	render := func(attributes, filter string) string {
		return strings.NewReplacer("{attributes}", attributes, "{filter}", filter).Replace(template)
	}
	return listSQL{render("NULL::jsonb", ""), render("attributes", ""), render("attributes", "AND filter = @filter")}
}

// incomingSQL reads one page of an object's incoming edges, newest first. It merges a page of each
// shard. Index: edge_lists_reverse_idx or edge_lists_filter_idx, one range of limit rows for each
// shard; edge_shards_pkey. Locks: none.
var incomingSQL = newListSQL(`
SELECT /* followercounts.incoming */ page.id, page.positioned_at, page.attributes
  FROM generate_series(0, coalesce((SELECT shards FROM edge_shards
                                     WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind
                                       AND object_id = @id), 1) - 1) AS shard(id)
 CROSS JOIN LATERAL (
   SELECT from_id AS id, positioned_at, {attributes} AS attributes
     FROM edge_lists
    WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND to_id = @id AND shard_id = shard.id AND active {filter}
      AND (positioned_at, from_id) < (@positioned_at, @after)
    ORDER BY positioned_at DESC, from_id DESC
    LIMIT @limit) page
 ORDER BY page.positioned_at DESC, page.id DESC
 LIMIT @limit`)

// Incoming returns up to limit edges of the kind that lead to the object, newest first, below
// after; a nil after means from the newest. With a filter it returns the edges whose filter
// attribute has this value. The transaction's tenant is set. Cost: limit index rows for each of the
// object's shards; almost every object has one shard.
func Incoming(ctx context.Context, tx pgx.Tx, k kinds.Edge, id event.ID, filter string, after *EdgeCursor, limit int) ([]Edge, error) {
	return page(ctx, tx, incomingSQL, k, id, filter, after, limit)
}

// outgoingSQL reads one page of an object's outgoing edges, newest first. No caller filters these.
// Index: edge_lists_forward_idx, one range. Locks: none.
var outgoingSQL = newListSQL(`
SELECT /* followercounts.outgoing */ to_id AS id, positioned_at, {attributes} AS attributes
  FROM edge_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND from_id = @id AND active
   AND (positioned_at, to_id) < (@positioned_at, @after)
 ORDER BY positioned_at DESC, to_id DESC
 LIMIT @limit`)

// Outgoing is like Incoming for the edges that begin at the object, without a filter. Cost: limit
// index rows.
func Outgoing(ctx context.Context, tx pgx.Tx, k kinds.Edge, id event.ID, after *EdgeCursor, limit int) ([]Edge, error) {
	return page(ctx, tx, outgoingSQL, k, id, "", after, limit)
}

func page(ctx context.Context, tx pgx.Tx, list listSQL, k kinds.Edge, id event.ID, filter string, after *EdgeCursor,
	limit int) ([]Edge, error) {
	args := postgres.Args{"kind": k.Name, "id": id, "limit": limit, "positioned_at": any("infinity"), "after": event.ID("")}
	if after != nil {
		args["positioned_at"], args["after"] = after.PositionedAt, after.ID
	}
	sql := list.plain
	switch {
	case filter != "":
		sql, args["filter"] = list.filtered, filter
	case len(k.Attributes) > 0:
		sql = list.attributes
	}
	rows, _ := tx.Query(ctx, sql, args)
	edges, err := pgx.CollectRows(rows, pgx.RowToStructByName[Edge])
	if err != nil {
		return nil, fmt.Errorf("read a page of %d %s of %s: %w", limit, k.Plural, id, err)
	}
	return edges, nil
}

// Object is one end of edges of a kind.
type Object struct {
	Kind string
	ID   event.ID
}

// countsSQL reads the counts of objects. LIMIT makes the planner use one probe for each. Index:
// edge_counts_pkey, a probe for each object and kind. Locks: none.
const countsSQL = `
SELECT /* followercounts.counts */ k.kind, o.object_id, c.incoming, c.outgoing
  FROM unnest(@ids::text[]) AS o(object_id) CROSS JOIN unnest(@kinds::text[]) AS k(kind)
 CROSS JOIN LATERAL (SELECT incoming, outgoing FROM edge_counts
                      WHERE tenant_id = current_setting('tidings.tenant')::bigint AND object_id = o.object_id AND kind = k.kind
                      LIMIT 1) c`

// ReadCounts returns the counts of the objects by kind. An object without a row is not in the map.
// The transaction's tenant is set.
func ReadCounts(ctx context.Context, tx pgx.Tx, names []string, ids []event.ID) (map[Object]Counts, error) {
	all := make(map[Object]Counts, len(names)*len(ids))
	rows, _ := tx.Query(ctx, countsSQL, postgres.Args{"kinds": names, "ids": ids})
	var o Object
	var c Counts
	if _, err := pgx.ForEachRow(rows, []any{&o.Kind, &o.ID, &c.Incoming, &c.Outgoing}, func() error {
		all[o] = c
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the counts of %d objects: %w", len(ids), err)
	}
	return all, nil
}

// reachedSQL finds edges and ranked children whose version is lower than required.
// Index: edge_lists_pkey, child_ranks_pkey, one probe for each. Locks: none.
const reachedSQL = `
SELECT /* followercounts.reached */ NOT EXISTS (
  SELECT FROM unnest(@kinds::text[], @froms::text[], @tos::text[], @versions::bigint[]) AS w(kind, from_id, to_id, version)
    LEFT JOIN edge_lists e ON e.tenant_id = current_setting('tidings.tenant')::bigint AND e.kind = w.kind
                          AND e.from_id = w.from_id AND e.to_id = w.to_id
   WHERE coalesce(e.version, 0) < w.version)
   AND NOT EXISTS (
  SELECT FROM unnest(@child_kinds::text[], @children::uuid[], @child_versions::bigint[]) AS w(kind, child_id, version)
    LEFT JOIN child_ranks r ON r.tenant_id = current_setting('tidings.tenant')::bigint AND r.kind = w.kind AND r.child_id = w.child_id
   WHERE coalesce(r.version, 0) < w.version)`

// Reached reports whether the projection has each of the edges and children at the version of the
// ref, or a later one. The transaction's tenant is set.
func (Projection) Reached(ctx context.Context, tx pgx.Tx, refs []event.Ref) (reached bool, err error) {
	var names, childKinds, children []string
	var froms, tos []event.ID
	var versions, childVersions []int64
	for _, r := range refs {
		if r.Child != "" {
			childKinds, children, childVersions = append(childKinds, r.Type), append(children, r.Child), append(childVersions, r.Version)
		} else {
			names, froms, tos, versions = append(names, r.Type), append(froms, r.From), append(tos, r.To), append(versions, r.Version)
		}
	}
	err = tx.QueryRow(ctx, reachedSQL, postgres.Args{"kinds": names, "froms": froms, "tos": tos, "versions": versions,
		"child_kinds": childKinds, "children": children, "child_versions": childVersions}).Scan(&reached)
	if err != nil {
		return false, fmt.Errorf("compare the versions of %d edges and children: %w", len(refs), err)
	}
	return reached, nil
}
