package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// EdgeKey names an edge of a kind within its tenant. The zero key is before all others.
type EdgeKey struct{ From, To event.ID }

// EdgeOf is one edge of an object.
type EdgeOf struct {
	EdgeKey
	Version int64
	Active  bool
}

const (
	// MaxEdgesOf is the most edges of an object that one statement returns, and that one slice
	// removes. Their rows stay locked until the slice commits.
	MaxEdgesOf = 500
	// edgesWindow is the number of a tenant's edges that one statement reads in search of edges to
	// an object.
	edgesWindow = 20_000
)

// edgesFromSQL reads the next edges from an object. Index: edges_KIND_pkey, one range. Locks: none.
const edgesFromSQL = `
SELECT /* store.edges_from */ from_id, to_id, version, status = 'ACTIVE', true
  FROM {edges} WHERE tenant_id = @tenant::bigint AND from_id = @object::text AND to_id > @to::text
 ORDER BY to_id LIMIT @limit`

// edgesToChildSQL reads the next edges to a child. Its order makes the planner use the index also
// while the table has no statistics. Index: edges_KIND_to_idx, one range. Locks: none.
const edgesToChildSQL = `
SELECT /* store.edges_to_child */ from_id, to_id, version, status = 'ACTIVE', true
  FROM {edges} WHERE tenant_id = @tenant::bigint AND (to_id, from_id) > (@object::text, @from::text) AND to_id <= @object::text
 ORDER BY to_id, from_id LIMIT @limit`

// edgesToSQL reads the edges to an object among the tenant's next edges of the kind. It also
// returns the last edge that it read, regardless of its target. An index by target would slow down
// every write; only edges to children have one. Index: edges_KIND_pkey, one range, index-only where
// the table was vacuumed, and one probe per edge found. Locks: none.
const edgesToSQL = `
WITH next AS MATERIALIZED (
  SELECT from_id, to_id FROM {edges}
   WHERE tenant_id = @tenant::bigint AND (from_id, to_id) > (@from::text, @to::text) ORDER BY from_id, to_id LIMIT @window
), mine AS MATERIALIZED (
  SELECT from_id, to_id FROM next WHERE to_id = @object::text ORDER BY from_id LIMIT @limit
), found AS (
  SELECT from_id, to_id, true AS hit FROM mine
  UNION ALL
  (SELECT from_id, to_id, false FROM next WHERE (SELECT count(*) FROM mine) < @limit ORDER BY from_id DESC, to_id DESC LIMIT 1)
)
SELECT /* store.edges_to */ f.from_id, f.to_id, coalesce(e.version, 0), coalesce(e.status = 'ACTIVE', false), f.hit
  FROM found f
  LEFT JOIN LATERAL (SELECT version, status FROM {edges}
                      WHERE tenant_id = @tenant::bigint AND from_id = f.from_id AND to_id = f.to_id LIMIT 1) e ON f.hit
 ORDER BY f.from_id, f.to_id, f.hit`

// nextEdgesOf reads the next edges of the kind that have the object at this end, from the key
// after. more is false at the end.
func nextEdgesOf(ctx context.Context, tx pgx.Tx, tenant int64, k kinds.Edge, object event.ID, end kinds.End,
	after EdgeKey) (all []EdgeOf, next EdgeKey, more bool, err error) {
	sql, args := edgesFromSQL, pgx.StrictNamedArgs{"tenant": tenant, "object": object, "limit": MaxEdgesOf}
	switch {
	case end == kinds.From:
		args["to"] = after.To
	case k.ToChild:
		sql, args["from"] = edgesToChildSQL, after.From
	default:
		sql, args["from"], args["to"], args["window"] = edgesToSQL, after.From, after.To, edgesWindow
	}
	next = after
	var e EdgeOf
	var is bool
	rows, _ := tx.Query(ctx, edgesOf(k.Name, sql), args)
	_, err = pgx.ForEachRow(rows, []any{&e.From, &e.To, &e.Version, &e.Active, &is}, func() error {
		next, more = e.EdgeKey, true
		if is {
			all = append(all, e)
		}
		return nil
	})
	return all, next, more, err
}

// EdgesOf calls fn with every edge of the kind that has the object at this end, ACTIVE or REMOVED,
// in slices of at most MaxEdgesOf. It includes every edge that existed before the call. For edges
// to an object, except to a child, it reads all the tenant's edges of the kind.
func (s *Store) EdgesOf(ctx context.Context, tenant int64, k kinds.Edge, object event.ID, end kinds.End, fn func([]EdgeOf) error) error {
	var after EdgeKey
	for more := true; more; {
		var all []EdgeOf
		var next EdgeKey
		err := s.read(ctx, tenant, func(tx pgx.Tx) (err error) {
			all, next, more, err = nextEdgesOf(ctx, tx, tenant, k, object, end, after)
			return err
		})
		if err != nil {
			return fmt.Errorf("read the edges of kind %s %s %s of tenant %d: %w", k.Name, end, object, tenant, err)
		}
		after = next
		if len(all) == 0 {
			continue
		}
		if err := fn(all); err != nil {
			return err
		}
	}
	return nil
}

// removeOf removes the edges of all that are ACTIVE and returns their number. Their events are
// ordinary removals.
func (k *edgeKind) removeOf(ctx context.Context, tx *unit, tenant int64, kind kinds.Edge, all []EdgeOf,
	meta Meta) (removed int64, err error) {
	var writes []EdgeWrite
	var turn []int
	meta.tenant = tenant
	for _, e := range all {
		if e.Active {
			turn = append(turn, len(writes))
			writes = append(writes, EdgeWrite{Meta: meta, From: e.From, To: e.To, kind: &kind})
		}
	}
	if len(writes) == 0 {
		return 0, nil
	}
	out := make([]EdgeOutcome, len(writes))
	if _, err := k.change(ctx, tx, writes, turn, removeEdges, out); err != nil {
		return 0, err
	}
	for _, o := range out {
		if o.Changed {
			removed++
		}
	}
	return removed, nil
}

// RemoveEdgesOf removes the edges of all that are still ACTIVE and returns their number. all has at
// most MaxEdgesOf edges. It uses one transaction, which calls fence first.
func (s *Store) RemoveEdgesOf(ctx context.Context, tenant int64, k kinds.Edge, all []EdgeOf, meta Meta,
	fence func(context.Context, pgx.Tx) error) (removed int64, err error) {
	if err := checkMeta(meta); err != nil {
		return 0, err
	}
	err = s.write(ctx, of(tenant), func(tx *unit) error {
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		var err error
		removed, err = s.edgesOf(k.Name).removeOf(ctx, tx, tenant, k, all, meta)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("remove %d edges of kind %s of tenant %d: %w", len(all), k.Name, tenant, err)
	}
	return removed, nil
}

// forgetEdgesSQL deletes edges that are REMOVED and still have the given version. It locks them in
// key order first. Index: edges_KIND_pkey. Locks: the edges, in key order.
const forgetEdgesSQL = `
WITH held AS MATERIALIZED (
  SELECT e.from_id, e.to_id
    FROM unnest(@froms::text[], @tos::text[], @versions::bigint[]) AS w(from_id, to_id, version)
    JOIN {edges} e ON e.tenant_id = @tenant::bigint AND e.from_id = w.from_id AND e.to_id = w.to_id AND e.version = w.version
     AND e.status = 'REMOVED'
   ORDER BY e.from_id, e.to_id
     FOR UPDATE OF e
)
DELETE /* store.forget_edges */ FROM {edges} e USING held h
 WHERE e.tenant_id = @tenant::bigint AND e.from_id = h.from_id AND e.to_id = h.to_id`

// ForgetEdges deletes the rows of the edges of all that are still REMOVED at the given version, and
// returns their number. It makes no event. Delete everything else about these edges first, because
// the next edge of the pair begins at version 1. The pool acts as the system role. The transaction
// calls fence first.
func (s *Store) ForgetEdges(ctx context.Context, tenant int64, k kinds.Edge, all []EdgeOf,
	fence func(context.Context, pgx.Tx) error) (n int64, err error) {
	froms, tos, versions := make([]event.ID, len(all)), make([]event.ID, len(all)), make([]int64, len(all))
	for i, e := range all {
		froms[i], tos[i], versions[i] = e.From, e.To, e.Version
	}
	err = s.write(ctx, of(tenant), func(tx *unit) error {
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, edgesOf(k.Name, forgetEdgesSQL),
			pgx.StrictNamedArgs{"tenant": tenant, "froms": froms, "tos": tos, "versions": versions})
		n = tag.RowsAffected()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("forget %d edges of kind %s of tenant %d: %w", len(all), k.Name, tenant, err)
	}
	return n, nil
}
