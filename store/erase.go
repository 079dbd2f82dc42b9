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

// tables are all the tables that have children of the kind, in the order in which they are to be redacted: where a child may go from
// one to another at any time, the one that it comes from is first.
func (s childShape) tables() []string { return []string{s.Archive(), s.Table()} }

// AuthorChild is one child of an author, whatever its state.
type AuthorChild struct {
	ID     string
	Object int64
	Erased bool // and nothing of it is left in the row
}

// eraseWindow is how many children of a tenant one look for an author's walks over.
const eraseWindow = 20_000

// authorChildrenSQL reads the author's among the tenant's next children of the kind by id, and the last one of these whoever wrote it. There is no
// index by author: the append path would pay for what is asked once in a while.
// Index: the primary key, one range.   Locks: none.
const authorChildrenSQL = `
WITH next AS MATERIALIZED (
  SELECT child_id, object_id, author_id, author_state = 'ERASED' AND body = '' AND attributes IS NULL AS erased
    FROM {table} WHERE tenant_id = @tenant::bigint AND child_id > @after::uuid ORDER BY child_id LIMIT @window
)
SELECT /* store.author_children */ child_id::text, object_id, erased, author_id = @author::bigint
  FROM next WHERE author_id = @author::bigint OR child_id = (SELECT child_id FROM next ORDER BY child_id DESC LIMIT 1)
 ORDER BY child_id`

// AuthorChildren calls fn with every child of the kind by the author, in slices, in the order in which EraseChildren is to see them. Children that are
// made meanwhile may or may not be among them. It walks over all children of the kind that the tenant has.
func (s *Store) AuthorChildren(ctx context.Context, tenant int64, k kinds.Child, author int64, fn func([]AuthorChild) error) error {
	for _, table := range shapeOf(k).tables() {
		after := "00000000-0000-0000-0000-000000000000"
		for more := true; more; {
			var mine []AuthorChild
			err := s.read(ctx, tenant, func(tx pgx.Tx) error {
				mine, more = nil, false
				var c AuthorChild
				var his bool
				rows, _ := tx.Query(ctx, strings.ReplaceAll(authorChildrenSQL, "{table}", table),
					pgx.StrictNamedArgs{"tenant": tenant, "author": author, "after": after, "window": eraseWindow})
				_, err := pgx.ForEachRow(rows, []any{&c.ID, &c.Object, &c.Erased, &his}, func() error {
					if his {
						mine = append(mine, c)
					}
					after, more = c.ID, true
					return nil
				})
				return err
			})
			if err != nil {
				return fmt.Errorf("look for the children of author %d of tenant %d in %s: %w", author, tenant, table, err)
			}
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

// childEraseSQL takes the content out of children, whatever state they are in. One that is erased already gets another version only when
// that is asked for.
// Index: the primary key.   Locks: the children, in key order, whether or not they change.
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
 WHERE c.tenant_id = @tenant::bigint AND c.child_id = h.child_id AND (@again OR c.author_state <> 'ERASED' OR c.body <> '' OR c.attributes IS NOT NULL)
RETURNING ` + childColumns

// MaxErase bounds the children of one EraseChildren: their rows stay locked until it commits.
const MaxErase = 500

// EraseChildren takes the content out of children for good, those that were deleted or moderated too, and returns how many it erased. Their events
// are KIND.erased. A child that is erased already is left alone, unless again is set: then it gets another version and another event.
// fence is called first in the transaction.
func (s *Store) EraseChildren(ctx context.Context, tenant int64, k kinds.Child, ids []string, again bool, meta Meta, fence func(context.Context, pgx.Tx) error) (erased int, err error) {
	if err := checkMeta(meta); err != nil {
		return 0, err
	}
	if len(ids) > MaxErase {
		return 0, fmt.Errorf("%w: %d children to erase at once: want at most %d", ErrInvalid, len(ids), MaxErase)
	}
	shape := shapeOf(k)
	err = s.write(ctx, tenant, place{}, func(tx *unit) error {
		erased = 0
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		for _, table := range shapeOf(k).tables() {
			rows, _ := tx.Query(ctx, strings.ReplaceAll(childEraseSQL, "{table}", table), pgx.StrictNamedArgs{"tenant": tenant, "child_ids": ids, "again": again})
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
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("erase %d children of the kind %s of tenant %d: %w", len(ids), k.Name, tenant, err)
	}
	return erased, nil
}

// authorKeysSQL reads the author's next idempotency keys that still know their request.
// Index: child_keys_pkey, one range.   Locks: none.
const authorKeysSQL = `
SELECT /* store.author_keys */ idempotency_key, child_id::text
  FROM child_keys
 WHERE tenant_id = @tenant::bigint AND kind = @kind::text AND author_id = @author::bigint AND idempotency_key > @after::text COLLATE "C" AND request_hash <> ''
 ORDER BY idempotency_key LIMIT @limit`

// AuthorKeys calls fn with the author's idempotency keys whose request is still known by its hash, as keys of the children of the kind that they made.
func (s *Store) AuthorKeys(ctx context.Context, tenant int64, k kinds.Child, author int64, fn func(byKey map[string]string) error) error {
	const page = 1000
	after := ""
	for {
		found := make(map[string]string)
		err := s.read(ctx, tenant, func(tx pgx.Tx) error {
			clear(found)
			var key, id string
			rows, _ := tx.Query(ctx, authorKeysSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "author": author, "after": after, "limit": page})
			_, err := pgx.ForEachRow(rows, []any{&key, &id}, func() error {
				found[key] = id
				after = key
				return nil
			})
			return err
		})
		if err != nil {
			return fmt.Errorf("read the idempotency keys of author %d of tenant %d: %w", author, tenant, err)
		}
		if len(found) == 0 {
			return nil
		}
		if err := fn(found); err != nil {
			return err
		}
	}
}

// blankKeysSQL forgets what keys were used for: a short body could be guessed from the hash. No request has an empty hash, so the key is
// refused from then on.
// Index: child_keys_pkey.   Locks: the keys.
const blankKeysSQL = `
UPDATE /* store.blank_keys */ child_keys SET request_hash = ''
 WHERE tenant_id = @tenant::bigint AND kind = @kind::text AND author_id = @author::bigint AND idempotency_key = ANY(@keys::text[]) AND request_hash <> ''`

// BlankKeys makes the author's keys forget the request that they were used for. The keys stay, so that none of them makes a child again:
// a repeated create is ErrKeyReused.
func (s *Store) BlankKeys(ctx context.Context, tenant int64, k kinds.Child, author int64, keys []string, fence func(context.Context, pgx.Tx) error) (n int64, err error) {
	err = s.write(ctx, tenant, place{}, func(tx *unit) error {
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, blankKeysSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": k.Name, "author": author, "keys": keys})
		n = tag.RowsAffected()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("blank %d idempotency keys of author %d of tenant %d: %w", len(keys), author, tenant, err)
	}
	return n, nil
}
