package history

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// Decision is a version of a child whose moderation state differs from the version before: a
// moderator decided, or a rule reported the child.
type Decision struct {
	Child event.Child // the child at that version, with the reason
	Was   string      // the moderation state before
	By    string
	At    time.Time
	ID    int64 // the id of the version; decisions are in this order, in which they were recorded
}

// decisionColumns are the columns of a version v and the version p before it. The statements
// compute p's number first: below a row security policy PostgreSQL uses an index only for
// expressions that cannot fail.
const decisionColumns = `v.object, coalesce(p.object ->> 'moderation_state', 'NONE'), v.metadata ->> 'created_by', (v.metadata ->> ` +
	`'last_update_time')::timestamptz, v.version_id`

// decisionsSQL reads a page of decisions of a kind, newest first. It reads at most @walk versions
// of children with a moderation state, and skips versions that are no decisions. If it reads @walk
// versions without filling the page, the last row has the id of the last one and no child. Index:
// KIND_history_moderated_idx, one range backwards; KIND_history_version_idx, a probe for each.
// Locks: none.
const decisionsSQL = `
WITH walked AS MATERIALIZED (
  SELECT tenant_id, {id}, version, version - 1 AS previous, version_id, object, metadata FROM {kind}_history
   WHERE tenant_id = @tenant::bigint AND object ->> 'moderation_state' <> 'NONE' AND version_id < @before::bigint
   ORDER BY version_id DESC LIMIT @walk
), found AS (
  SELECT ` + decisionColumns + `
    FROM walked v JOIN {kind}_history p ON p.tenant_id = v.tenant_id AND p.{id} = v.{id} AND p.version = v.previous
   WHERE p.object ->> 'moderation_state' <> v.object ->> 'moderation_state' ORDER BY v.version_id DESC LIMIT @limit
)
SELECT /* history.decisions */ * FROM (
  SELECT * FROM found
   UNION ALL
  SELECT NULL, '', '', now(), version_id FROM (SELECT version_id FROM walked ORDER BY version_id LIMIT 1) w
   WHERE (SELECT count(*) FROM walked) = @walk AND (SELECT count(*) FROM found) < @limit
) d ORDER BY 5 DESC, 1 NULLS LAST`

// decisionsWalk is the largest number of versions that a page of decisions reads.
const decisionsWalk = 2000

// Decisions returns up to limit decisions about children of the kind, newest first, with version
// ids below before. The first page has before math.MaxInt64. next is the before of the next page,
// or 0 at the end. A page may be shorter if many versions are no decisions.
func Decisions(ctx context.Context, tx pgx.Tx, k kinds.Child, tenant, before int64, limit int) (page []Decision, next int64, err error) {
	all, err := decisions(ctx, tx, k, decisionsSQL, pgx.StrictNamedArgs{"tenant": tenant, "before": before,
		"limit": limit, "walk": decisionsWalk})
	if err != nil {
		return nil, 0, fmt.Errorf("read %d decisions about %s of tenant %d: %w", limit, k.Plural, tenant, err)
	}
	if n := len(all); n > 0 && all[n-1].Child.ID == "" {
		return all[:n-1], all[n-1].ID, nil
	}
	if len(all) == limit {
		next = all[limit-1].ID
	}
	return all, next, nil
}

// lastDecisionsSQL reads the last decision about each child, among the last 20 versions of each.
// Index: KIND_history_version_idx, one range backwards for each. Locks: none.
const lastDecisionsSQL = `
SELECT /* history.last_decisions */ d.* FROM unnest(@ids::uuid[]) AS w(id) CROSS JOIN LATERAL (
  SELECT ` + decisionColumns + `
    FROM (SELECT *, version - 1 AS previous FROM {kind}_history
           WHERE tenant_id = @tenant::bigint AND {id} = w.id ORDER BY version DESC LIMIT 20) v
    JOIN {kind}_history p ON p.tenant_id = v.tenant_id AND p.{id} = v.{id} AND p.version = v.previous
   WHERE p.object ->> 'moderation_state' <> v.object ->> 'moderation_state'
   ORDER BY v.version DESC LIMIT 1) d`

// LastDecisions returns the last decision about each of these children of the kind, by the child's
// id. The map has no entry for a child without a decision in its last 20 versions.
func LastDecisions(ctx context.Context, tx pgx.Tx, k kinds.Child, tenant int64, ids []string) (map[string]Decision, error) {
	all, err := decisions(ctx, tx, k, lastDecisionsSQL, pgx.StrictNamedArgs{"tenant": tenant, "ids": ids})
	if err != nil {
		return nil, fmt.Errorf("read the last decisions about %d %s of tenant %d: %w", len(ids), k.Plural, tenant, err)
	}
	byID := make(map[string]Decision, len(all))
	for _, d := range all {
		byID[d.Child.ID] = d
	}
	return byID, nil
}

// Record is what moderators decided about an author's newest children.
type Record struct {
	Of                int // children: at most recordOf
	Approved, Removed int
}

// recordOf bounds the children that a Record counts.
const recordOf = 100

// recordsSQL counts the states of the newest children of each author. The author is part of the
// order, so that the index has it. Index: KIND_history_author_idx, one range backwards for each.
// Locks: none.
const recordsSQL = `
SELECT /* history.records */ w.author, count(*), count(*) FILTER (WHERE l.state = 'APPROVED'), count(*) FILTER (WHERE l.state = 'REMOVED')
  FROM unnest(@authors::text[]) AS w(author) CROSS JOIN LATERAL (
  SELECT object ->> 'moderation_state' AS state FROM {kind}_history
   WHERE tenant_id = @tenant::bigint AND object ->> 'author_id' = w.author AND version_state = 'LATEST'
   ORDER BY object ->> 'author_id' DESC, {id} DESC LIMIT @most) l GROUP BY w.author`

// Records returns the record of each of these authors, from their newest children of the kind that
// they did not delete. The map has no entry for an author without any.
func Records(ctx context.Context, tx pgx.Tx, k kinds.Child, tenant int64, authors []event.ID) (map[event.ID]Record, error) {
	rows, _ := tx.Query(ctx, ofChildren(k, recordsSQL), pgx.StrictNamedArgs{"tenant": tenant, "authors": authors, "most": recordOf})
	all := make(map[event.ID]Record, len(authors))
	var author event.ID
	var r Record
	if _, err := pgx.ForEachRow(rows, []any{&author, &r.Of, &r.Approved, &r.Removed}, func() error {
		all[author] = r
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the records of %d authors of %s of tenant %d: %w", len(authors), k.Plural, tenant, err)
	}
	return all, nil
}

func decisions(ctx context.Context, tx pgx.Tx, k kinds.Child, sql string, args pgx.StrictNamedArgs) ([]Decision, error) {
	rows, _ := tx.Query(ctx, ofChildren(k, sql), args)
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d Decision, err error) {
		var object []byte
		if err := row.Scan(&object, &d.Was, &d.By, &d.At, &d.ID); err != nil || object == nil {
			return d, err
		}
		d.Child, err = k.Names().Parse(object)
		return d, err
	})
}
