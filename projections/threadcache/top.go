package threadcache

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/store"
)

// Ranked is a place in the order of ranks. Child is nil if the list of children does not have the
// child, or not visible: the projection that ranks may be ahead.
type Ranked struct {
	ID        string
	Score     int64
	CreatedAt time.Time
	Child     *event.Child
}

// topSQL reads one page of the visible children of an object, those with the highest score first,
// and of one score the newest first. child_ranks is a table of the projection followercounts: one
// statement reads both, because a page takes no more round trips than one of the newest. LIMIT
// makes the planner use one probe for each child. Index: child_ranks_top_idx, one range;
// child_lists_pkey, a probe for each child. Locks: none.
func topSQL(behind string) string {
	return `
SELECT /* threadcache.top */ r.child_id::text, r.score, r.created_at, c.*
  FROM (SELECT child_id, score, created_at FROM child_ranks
         WHERE tenant_id = current_setting('tidings.tenant')::bigint AND object_id = @object AND kind = @kind AND visible` + behind + `
         ORDER BY score DESC, created_at DESC, child_id DESC
         LIMIT @limit) r
  LEFT JOIN LATERAL (SELECT ` + fields + `
                       FROM child_lists
                      WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND child_id = r.child_id
                        AND visible LIMIT 1) c ON true
 ORDER BY r.score DESC, r.created_at DESC, r.child_id DESC`
}

var (
	topFirstSQL = topSQL("")
	topAfterSQL = topSQL(`
           AND (score, created_at, child_id) < (@score::bigint, @created_at::timestamptz, @child::uuid)`)
)

// Top returns up to limit visible children of the object, those with the highest score first and of
// one score the newest first, below after; a nil after means from the top. A child whose score
// changes between two pages may be on both or on neither; every other one is on exactly one. The
// transaction's tenant is set. Cost: limit index rows, and a probe for each.
func Top(ctx context.Context, tx pgx.Tx, kind string, of event.ID, after *Ranked, limit int) ([]Ranked, error) {
	sql, args := topFirstSQL, pgx.StrictNamedArgs{"kind": kind, "object": of, "limit": limit}
	if after != nil {
		sql, args["score"], args["created_at"], args["child"] = topAfterSQL, after.Score, after.CreatedAt, after.ID
	}
	rows, _ := tx.Query(ctx, sql, args)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Ranked, error) {
		var r Ranked
		var c nullable
		err := row.Scan(append([]any{&r.ID, &r.Score, &r.CreatedAt}, c.columns()...)...)
		r.Child = c.child()
		return r, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the %d highest %s of %s: %w", limit, kind, of, err)
	}
	return all, nil
}

// nullable has the fields of a child that may be missing.
type nullable struct {
	id, replyTo, slug, path, body, authorState, moderationState *string
	object, author                                              *event.ID
	attributes                                                  []byte
	version                                                     *int64
	createdAt, updatedAt                                        *time.Time
}

func (n *nullable) columns() []any {
	return []any{&n.id, &n.object, &n.replyTo, &n.slug, &n.path, &n.author, &n.body, &n.attributes, &n.authorState, &n.moderationState,
		&n.version, &n.createdAt, &n.updatedAt}
}

func (n *nullable) child() *event.Child {
	if n.id == nil {
		return nil
	}
	return &event.Child{ID: *n.id, Parent: *n.object, ReplyTo: orEmpty(n.replyTo), Slug: orEmpty(n.slug), Path: orEmpty(n.path),
		AuthorID: *n.author, Body: *n.body, Attributes: store.CanonicalAttributes(n.attributes), AuthorState: *n.authorState,
		ModerationState: *n.moderationState, Version: *n.version, CreatedAt: event.Time{Time: *n.createdAt},
		UpdatedAt: event.Time{Time: *n.updatedAt}}
}
