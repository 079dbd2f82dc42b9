package store

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// commentTables are all the tables that have comments, in the order in which they are to be redacted: where a comment may go from
// one to another at any time, the one that it comes from is first.
var commentTables = []string{"comments_archive", "comments"}

// AuthorComment is one comment of an author, whatever its state.
type AuthorComment struct {
	CommentID string
	PostID    int64
	Erased    bool // and nothing of it is left in the row
}

// eraseWindow is how many comments of a tenant one look for an author's walks over.
const eraseWindow = 20_000

// authorCommentsSQL reads the author's among the tenant's next comments by id, and the last one of these whoever wrote it. There is no
// index by author: the append path would pay for what is asked once in a while.
// Index: the primary key, one range.   Locks: none.
const authorCommentsSQL = `
WITH next AS MATERIALIZED (
  SELECT comment_id, post_id, author_id, author_state = 'ERASED' AND body = '' AS erased
    FROM {comments} WHERE tenant_id = @tenant::bigint AND comment_id > @after::uuid ORDER BY comment_id LIMIT @window
)
SELECT /* store.author_comments */ comment_id::text, post_id, erased, author_id = @author::bigint
  FROM next WHERE author_id = @author::bigint OR comment_id = (SELECT comment_id FROM next ORDER BY comment_id DESC LIMIT 1)
 ORDER BY comment_id`

// AuthorComments calls fn with every comment of the author, in slices, in the order in which Erase is to see them. Comments that are made
// meanwhile may or may not be among them. It walks over all comments of the tenant.
func (s *Store) AuthorComments(ctx context.Context, tenant, author int64, fn func([]AuthorComment) error) error {
	for _, table := range commentTables {
		after := "00000000-0000-0000-0000-000000000000"
		for more := true; more; {
			var mine []AuthorComment
			err := s.read(ctx, tenant, func(tx pgx.Tx) error {
				mine, more = nil, false
				var c AuthorComment
				var his bool
				rows, _ := tx.Query(ctx, strings.ReplaceAll(authorCommentsSQL, "{comments}", table),
					pgx.StrictNamedArgs{"tenant": tenant, "author": author, "after": after, "window": eraseWindow})
				_, err := pgx.ForEachRow(rows, []any{&c.CommentID, &c.PostID, &c.Erased, &his}, func() error {
					if his {
						mine = append(mine, c)
					}
					after, more = c.CommentID, true
					return nil
				})
				return err
			})
			if err != nil {
				return fmt.Errorf("look for the comments of author %d of tenant %d in %s: %w", author, tenant, table, err)
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

// commentEraseSQL takes the content out of comments, whatever state they are in. One that is erased already gets another version only when
// that is asked for.
// Index: the primary key.   Locks: the comments, in key order, whether or not they change.
const commentEraseSQL = `
WITH held AS (
  SELECT c.comment_id FROM {comments} c
   WHERE c.tenant_id = @tenant::bigint AND c.comment_id = ANY(@comment_ids::uuid[])
   ORDER BY c.comment_id
     FOR NO KEY UPDATE OF c
)
UPDATE /* store.comment_erase */ {comments} c
   SET author_state = 'ERASED', body = '', version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = @tenant::bigint AND c.comment_id = h.comment_id AND (@again OR c.author_state <> 'ERASED' OR c.body <> '')
RETURNING ` + commentColumns

// MaxErase bounds the comments of one Erase: their rows stay locked until it commits.
const MaxErase = 500

// Erase takes the content out of comments for good, those that were deleted or moderated too, and returns how many it erased. Their events
// are comment.erased. A comment that is erased already is left alone, unless again is set: then it gets another version and another event.
// fence is called first in the transaction.
func (s *Store) Erase(ctx context.Context, tenant int64, ids []string, again bool, meta Meta, fence func(context.Context, pgx.Tx) error) (erased int, err error) {
	if err := checkMeta(meta); err != nil {
		return 0, err
	}
	if len(ids) > MaxErase {
		return 0, fmt.Errorf("%w: %d comments to erase at once: want at most %d", ErrInvalid, len(ids), MaxErase)
	}
	err = s.write(ctx, tenant, 0, func(tx *unit) error {
		erased = 0
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		for _, table := range commentTables {
			rows, _ := tx.Query(ctx, strings.ReplaceAll(commentEraseSQL, "{comments}", table), pgx.StrictNamedArgs{"tenant": tenant, "comment_ids": ids, "again": again})
			changed, err := pgx.CollectRows(rows, pgx.RowToStructByPos[commentRow])
			if err != nil {
				return fmt.Errorf("write %d comments: %w", len(ids), err)
			}
			slices.SortFunc(changed, func(a, b commentRow) int { return strings.Compare(a.Path, b.Path) })
			for _, r := range changed {
				e, err := commentEvent(tenant, r.wire(), event.Erased, meta)
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
		return 0, fmt.Errorf("erase %d comments of tenant %d: %w", len(ids), tenant, err)
	}
	return erased, nil
}

// authorKeysSQL reads the author's next idempotency keys that still know their request.
// Index: comment_keys_pkey, one range.   Locks: none.
const authorKeysSQL = `
SELECT /* store.author_keys */ idempotency_key, comment_id::text
  FROM comment_keys
 WHERE tenant_id = @tenant::bigint AND author_id = @author::bigint AND idempotency_key > @after::text COLLATE "C" AND request_hash <> ''
 ORDER BY idempotency_key LIMIT @limit`

// AuthorKeys calls fn with the author's idempotency keys whose request is still known by its hash, as keys of the comments they made.
func (s *Store) AuthorKeys(ctx context.Context, tenant, author int64, fn func(byKey map[string]string) error) error {
	const page = 1000
	after := ""
	for {
		found := make(map[string]string)
		err := s.read(ctx, tenant, func(tx pgx.Tx) error {
			clear(found)
			var key, id string
			rows, _ := tx.Query(ctx, authorKeysSQL, pgx.StrictNamedArgs{"tenant": tenant, "author": author, "after": after, "limit": page})
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
// Index: comment_keys_pkey.   Locks: the keys.
const blankKeysSQL = `
UPDATE /* store.blank_keys */ comment_keys SET request_hash = ''
 WHERE tenant_id = @tenant::bigint AND author_id = @author::bigint AND idempotency_key = ANY(@keys::text[]) AND request_hash <> ''`

// BlankKeys makes the author's keys forget the request that they were used for. The keys stay, so that none of them makes a comment again:
// a repeated create is ErrKeyReused.
func (s *Store) BlankKeys(ctx context.Context, tenant, author int64, keys []string, fence func(context.Context, pgx.Tx) error) (n int64, err error) {
	err = s.write(ctx, tenant, 0, func(tx *unit) error {
		if err := fence(ctx, tx.Tx); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, blankKeysSQL, pgx.StrictNamedArgs{"tenant": tenant, "author": author, "keys": keys})
		n = tag.RowsAffected()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("blank %d idempotency keys of author %d of tenant %d: %w", len(keys), author, tenant, err)
	}
	return n, nil
}
