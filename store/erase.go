package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// tables returns the tables that have children of the kind, in the order in which to redact them. A
// child may move from the first to the second at any time, so the table that it leaves comes first.
func (s childShape) tables() []string { return []string{s.Shelf(), s.Table()} }

// AuthorChild is one child of an author, in any state.
type AuthorChild struct {
	ID     string
	Object event.ID
	Erased bool // the content of the row is erased
}

// eraseWindow is the number of a tenant's children that one statement reads in search of an
// author's.
const eraseWindow = 20_000

// authorChildrenSQL reads the author's children among the tenant's next children of the kind by id.
// It also returns the last child that it read, regardless of its author. An index by author would
// slow down every create, and this query is rare. Index: the primary key, one range. Locks: none.
const authorChildrenSQL = `
WITH next AS MATERIALIZED (
  SELECT child_id, object_id, author_id, author_state = 'ERASED' AND body = '' AND attributes IS NULL AS erased
    FROM {table} WHERE tenant_id = @tenant::bigint AND child_id > @after::uuid ORDER BY child_id LIMIT @window
)
SELECT /* store.author_children */ child_id::text, object_id, erased, author_id = @author::text
  FROM next WHERE author_id = @author::text OR child_id = (SELECT child_id FROM next ORDER BY child_id DESC LIMIT 1)
 ORDER BY child_id`

// AuthorChildren calls fn with every child of the kind by the author, in slices, in the order in
// which EraseChildren must get them. It may or may not include children that are created meanwhile.
// It reads all the tenant's children of the kind.
func (s *Store) AuthorChildren(ctx context.Context, tenant int64, k kinds.Child, author event.ID, fn func([]AuthorChild) error) error {
	for _, table := range shapeOf(k).tables() {
		after := "00000000-0000-0000-0000-000000000000"
		for more := true; more; {
			var mine []AuthorChild
			var last string
			err := s.read(ctx, tenant, func(tx pgx.Tx) error {
				mine, last, more = nil, after, false
				var c AuthorChild
				var his bool
				rows, _ := tx.Query(ctx, strings.ReplaceAll(authorChildrenSQL, "{table}", table),
					pgx.StrictNamedArgs{"tenant": tenant, "author": author, "after": after, "window": eraseWindow})
				_, err := pgx.ForEachRow(rows, []any{&c.ID, &c.Object, &c.Erased, &his}, func() error {
					if his {
						mine = append(mine, c)
					}
					last, more = c.ID, true
					return nil
				})
				return err
			})
			if err != nil {
				return fmt.Errorf("read the children of author %s of tenant %d in %s: %w", author, tenant, table, err)
			}
			after = last
			if len(mine) == 0 {
				continue
			}
			if err := fn(mine); err != nil {
				return err
			}
		}
	}
	return nil
}

// childEraseSQL removes the content of children in any state. A child that is already erased gets
// another version only with @again. Index: the primary key. Locks: the children, in key order,
// changed or not.
const childEraseSQL = `
WITH held AS (
  SELECT c.child_id FROM {table} c
   WHERE c.tenant_id = @tenant::bigint AND c.child_id = ANY(@child_ids::uuid[])
   ORDER BY c.child_id
     FOR NO KEY UPDATE OF c
)
UPDATE /* store.child_erase */ {table} c
   SET author_state = 'ERASED', body = '', attributes = NULL, version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = @tenant::bigint AND c.child_id = h.child_id
   AND (@again OR c.author_state <> 'ERASED' OR c.body <> '' OR c.attributes IS NOT NULL)
RETURNING ` + childColumns

// childEraseEndSQL is childEraseSQL for a kind that edges lead to. The lock also keeps out writers
// of such edges (lockTargetsSQL): those who came first have committed, so their edges are found,
// and the others find the child erased.
var childEraseEndSQL = strings.Replace(childEraseSQL, "FOR NO KEY UPDATE OF c", "FOR UPDATE OF c", 1)

// removeFromErasedSQL requests the removal of all edges to those of the children that are erased
// and have edges. If the same removal is unfinished and has begun, it runs once more. Index:
// children_KIND_pkey, children_archive_KIND_pkey, edges_KIND_to_idx of each kind of edges,
// edge_removals_unfinished_idx. Locks: the removals, in key order; waits while a slice of one runs.
const removeFromErasedSQL = `
INSERT /* store.remove_from_erased */ INTO edge_removals AS r (tenant_id, object, object_id, kinds, direction, actor, trace_parent)
SELECT @tenant::bigint, '{{.Kind}}', c.id, @kinds, 'to', @actor, @trace
  FROM (SELECT child_id::text AS id FROM {{.All}} c
         WHERE c.tenant_id = @tenant::bigint AND c.child_id = ANY(@child_ids::uuid[]) AND c.author_state = 'ERASED') c
 WHERE {ended}
 ORDER BY c.id COLLATE "C"
    ON CONFLICT (tenant_id, object, object_id, kinds, direction) WHERE finished_at IS NULL DO UPDATE SET again = r.worked_at IS NOT NULL`

// hasEdgesSQL finds an edge to a child. Without statistics the planner prefers this index to the
// primary key only for its order.
const hasEdgesSQL = `
       (SELECT true FROM {edges} e
         WHERE e.tenant_id = @tenant::bigint AND (e.to_id, e.from_id) > (c.id, '') AND e.to_id <= c.id
         ORDER BY e.to_id, e.from_id LIMIT 1)`

// removeFromErased requests the removal of all edges of these kinds to those of the children that
// are erased. The transaction has locked them against writers of edges.
func (s childShape) removeFromErased(ctx context.Context, tx pgx.Tx, tenant int64, edges []kinds.Edge, ids []string, meta Meta) error {
	var names, ended []string
	for _, k := range edges {
		names, ended = append(names, k.Name), append(ended, edgesOf(k.Name, hasEdgesSQL))
	}
	sql := strings.Replace(s.sql(removeFromErasedSQL), "{ended}", strings.Join(ended, " OR "), 1)
	if _, err := tx.Exec(ctx, sql, pgx.StrictNamedArgs{"tenant": tenant, "child_ids": ids, "kinds": names, "actor": meta.Actor,
		"trace": meta.TraceParent}); err != nil {
		return fmt.Errorf("request the removal of the edges to %d children: %w", len(ids), err)
	}
	return nil
}

// MaxErase bounds the children of one EraseChildren. Their rows stay locked until it commits.
const MaxErase = 500

// EraseChildren permanently removes the content of children, including deleted and moderated ones,
// and returns the number erased. Their events are KIND.erased. It skips a child that is already
// erased, unless again is set: then the child gets another version and event. edges are the kinds
// of edges that lead to the kind (kinds.Set.EdgesTo): a Remover removes all such edges to the
// children. The transaction calls fence first.
func (s *Store) EraseChildren(ctx context.Context, tenant int64, k kinds.Child, edges []kinds.Edge, ids []string, again bool, meta Meta,
	fence func(context.Context, pgx.Tx) error) (erased int, err error) {
	if err := checkMeta(meta); err != nil {
		return 0, err
	}
	if len(ids) > MaxErase {
		return 0, fmt.Errorf("%w: cannot erase %d children at once, at most %d", ErrInvalid, len(ids), MaxErase)
	}
	shape, sql := shapeOf(k), childEraseSQL
	if len(edges) > 0 {
		sql = childEraseEndSQL
	}
	err = s.write(ctx, of(tenant), func(tx *unit) error {
		erased = 0
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		for _, table := range shapeOf(k).tables() {
			rows, _ := tx.Query(ctx, strings.ReplaceAll(sql, "{table}", table),
				pgx.StrictNamedArgs{"tenant": tenant, "child_ids": ids, "again": again})
			changed, err := pgx.CollectRows(rows, pgx.RowToStructByPos[childRow])
			if err != nil {
				return fmt.Errorf("write %d children: %w", len(ids), err)
			}
			slices.SortFunc(changed, func(a, b childRow) int {
				return cmp.Or(strings.Compare(orEmpty(a.Path), orEmpty(b.Path)), strings.Compare(a.ID, b.ID))
			})
			for _, r := range changed {
				e, err := shape.event(tenant, r.wire(), event.Erased, meta)
				if err != nil {
					return err
				}
				tx.events = append(tx.events, e)
			}
			erased += len(changed)
		}
		if len(edges) == 0 {
			return nil
		}
		return shape.removeFromErased(ctx, tx, tenant, edges, ids, meta)
	})
	if err != nil {
		return 0, fmt.Errorf("erase %d children of the kind %s of tenant %d: %w", len(ids), k.Name, tenant, err)
	}
	return erased, nil
}

// authorKeysSQL reads the author's next idempotency keys that still have the hash of their request.
// Index: child_keys_pkey, one range. Locks: none.
const authorKeysSQL = `
SELECT /* store.author_keys */ idempotency_key, child_id::text
  FROM child_keys
 WHERE tenant_id = @tenant::bigint AND kind = @kind::text AND author_id = @author::text
   AND idempotency_key > @after::text COLLATE "C" AND request_hash <> ''
 ORDER BY idempotency_key LIMIT @limit`

// AuthorKeys calls fn with the author's idempotency keys that still have the hash of their request.
// byKey maps each key to the id of the child that it made.
func (s *Store) AuthorKeys(ctx context.Context, tenant int64, k kinds.Child, author event.ID,
	fn func(byKey map[string]string) error) error {
	const page = 1000
	after := ""
	for {
		found, last := make(map[string]string), after
		err := s.read(ctx, tenant, func(tx pgx.Tx) error {
			clear(found)
			var key, id string
			rows, _ := tx.Query(ctx, authorKeysSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "author": author,
				"after": after, "limit": page})
			_, err := pgx.ForEachRow(rows, []any{&key, &id}, func() error {
				found[key], last = id, key
				return nil
			})
			return err
		})
		if err != nil {
			return fmt.Errorf("read the idempotency keys of author %s of tenant %d: %w", author, tenant, err)
		}
		after = last
		if len(found) == 0 {
			return nil
		}
		if err := fn(found); err != nil {
			return err
		}
	}
}

// blankKeysSQL erases the hash of the request from keys, because a short body could be guessed from
// it. No request has an empty hash, so the key is refused from then on. Index: child_keys_pkey.
// Locks: the keys.
const blankKeysSQL = `
UPDATE /* store.blank_keys */ child_keys SET request_hash = ''
 WHERE tenant_id = @tenant::bigint AND kind = @kind::text AND author_id = @author::text AND idempotency_key = ANY(@keys::text[])
   AND request_hash <> ''`

// BlankKeys erases the request's hash from the author's keys. The keys remain, so a repeated create
// makes no child and gets ErrKeyReused. The transaction calls fence first.
func (s *Store) BlankKeys(ctx context.Context, tenant int64, k kinds.Child, author event.ID, keys []string,
	fence func(context.Context, pgx.Tx) error) (n int64, err error) {
	err = s.write(ctx, of(tenant), func(tx *unit) error {
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, blankKeysSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "author": author, "keys": keys})
		n = tag.RowsAffected()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("blank %d idempotency keys of author %s of tenant %d: %w", len(keys), author, tenant, err)
	}
	return n, nil
}
