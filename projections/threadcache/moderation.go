package threadcache

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// Moderated selects the children that a moderator sees, among those that their authors did not
// delete.
type Moderated struct {
	State  string   // event.ModerationPending, event.ModerationHidden or event.ModerationRemoved
	Object event.ID // "": of all objects
	Author event.ID // "": of all authors
}

// moderatedSQL returns the statement that reads one page of children that are not visible, with one
// value of a column ("" for all). The column is part of the order and of the range, instead of a
// condition of equality. Then only the index that begins with it has the order, so the planner uses
// it without knowing the table. Index: child_lists_moderated_idx, or that of objects, or of
// authors: one range. Locks: none.
func moderatedSQL(name, column, filter string) string {
	by, value := "", ""
	if column != "" {
		by, value = column+", ", "@"+column+"::text, "
		filter += " AND " + column + " <= @" + column + "::text"
	}
	return `
SELECT /* threadcache.` + name + ` */ ` + fields + `
  FROM child_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND moderation_state = @state
   AND author_state = 'ACTIVE' AND NOT visible
   AND (` + by + `created_at, child_id) > (` + value + `@created_at::timestamptz, @child_id::uuid)` + filter + `
 ORDER BY ` + by + `created_at, child_id
 LIMIT @limit`
}

var (
	moderatedAllSQL    = moderatedSQL("moderated", "", "")
	moderatedObjectSQL = moderatedSQL("moderated_object", "object_id", "")
	moderatedAuthorSQL = moderatedSQL("moderated_author", "author_id", "")
	// the author's children of one object
	moderatedAuthorInSQL = moderatedSQL("moderated_author_in", "author_id", " AND object_id = @object_id::text")
)

func (m Moderated) sql(kind string) (string, pgx.StrictNamedArgs) {
	args := pgx.StrictNamedArgs{"kind": kind, "state": m.State}
	if m.Object != "" {
		args["object_id"] = m.Object
	}
	if m.Author != "" {
		args["author_id"] = m.Author
	}
	switch {
	case m.Object != "" && m.Author != "":
		return moderatedAuthorInSQL, args
	case m.Object != "":
		return moderatedObjectSQL, args
	case m.Author != "":
		return moderatedAuthorSQL, args
	}
	return moderatedAllSQL, args
}

// Page returns up to limit of these children of the kind, oldest first, after the given one; a nil
// after means from the first. The transaction's tenant is set. Cost: one index range of limit rows.
func (m Moderated) Page(ctx context.Context, tx pgx.Tx, kind string, after *Key, limit int) ([]event.Child, error) {
	sql, args := m.sql(kind)
	args["limit"], args["created_at"], args["child_id"] = limit, any("-infinity"), zeroID
	if after != nil {
		args["created_at"], args["child_id"] = after.CreatedAt, after.ChildID
	}
	page, err := collect(ctx, tx, sql, args)
	if err != nil {
		return nil, fmt.Errorf("read %d %s children: %w", limit, m.State, err)
	}
	return page, nil
}

// Count returns the number of these children, up to most. The transaction's tenant is set. Cost:
// one index range of most rows.
func (m Moderated) Count(ctx context.Context, tx pgx.Tx, kind string, most int) (n int, err error) {
	sql, args := m.sql(kind)
	args["limit"], args["created_at"], args["child_id"] = most, "-infinity", zeroID
	counted := "SELECT count(*) FROM (" + strings.Replace(sql, fields, "1", 1) + ") c"
	if err := tx.QueryRow(ctx, counted, args).Scan(&n); err != nil {
		return 0, fmt.Errorf("count %s children: %w", m.State, err)
	}
	return n, nil
}

// Waiting is a thread with children that wait for a moderator.
type Waiting struct {
	Object   event.ID
	Children int       // at most maxWaiting
	Since    time.Time // when the child that has waited longest was written
	Settings
}

// maxWaiting bounds the count of waiting children in one thread.
const maxWaiting = 1000

// waitingSQL steps from one thread with pending children to the next. Index:
// child_lists_moderated_object_idx, a probe and a range for each thread; child_settings_pkey.
// Locks: none.
const waitingSQL = `
WITH RECURSIVE next AS (
  (SELECT object_id FROM child_lists
    WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND moderation_state = 'PENDING'
      AND author_state = 'ACTIVE' AND NOT visible AND object_id > @after::text ORDER BY object_id LIMIT 1)
  UNION ALL
  SELECT (SELECT c.object_id FROM child_lists c
           WHERE c.tenant_id = current_setting('tidings.tenant')::bigint AND c.kind = @kind AND c.moderation_state = 'PENDING'
             AND c.author_state = 'ACTIVE' AND NOT c.visible AND c.object_id > n.object_id ORDER BY c.object_id LIMIT 1)
    FROM next n WHERE n.object_id IS NOT NULL
)
SELECT /* threadcache.waiting */ n.object_id, w.children, w.since, coalesce(s.locked, false), coalesce(s.premoderated, false),
       coalesce(s.title, ''), coalesce(s.version, 0)
  FROM (SELECT object_id FROM next WHERE object_id IS NOT NULL LIMIT @limit) n
 CROSS JOIN LATERAL (SELECT count(*) AS children, min(created_at) AS since
                       FROM (SELECT created_at FROM child_lists c
                              WHERE c.tenant_id = current_setting('tidings.tenant')::bigint AND c.kind = @kind
                                AND c.moderation_state = 'PENDING' AND c.object_id BETWEEN n.object_id AND n.object_id
                                AND c.author_state = 'ACTIVE' AND NOT c.visible
                              ORDER BY c.object_id, c.created_at LIMIT @most) p) w
  LEFT JOIN child_settings s ON s.tenant_id = current_setting('tidings.tenant')::bigint AND s.kind = @kind AND s.object_id = n.object_id
 ORDER BY n.object_id`

// WaitingThreads returns up to limit threads of the kind with children that wait for a moderator,
// by object, after the object after ("": from the first). The transaction's tenant is set.
func WaitingThreads(ctx context.Context, tx pgx.Tx, kind string, after event.ID, limit int) (all []Waiting, err error) {
	rows, _ := tx.Query(ctx, waitingSQL, pgx.StrictNamedArgs{"kind": kind, "after": after, "limit": limit, "most": maxWaiting})
	all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (w Waiting, err error) {
		err = row.Scan(&w.Object, &w.Children, &w.Since, &w.Locked, &w.Premoderated, &w.Title, &w.Version)
		return w, err
	})
	if err != nil {
		return nil, fmt.Errorf("read %d threads that wait for a moderator: %w", limit, err)
	}
	return all, nil
}
