package deadletter

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// MaxGroups is the limit of Groups.
	MaxGroups = 1000
	// MaxCount is the limit of Count: a group with more letters has the count MaxCount+1.
	MaxCount = 10_000
)

// Group is the set of letters of one consumer, event type and cause. Consumer is "" for the outbox.
type Group struct {
	ID          string // a UUID, derived from the three
	Consumer    string
	EventType   string
	Cause       string
	Error       string // of the latest letter
	First, Last time.Time
	Count       int64 // Count sets it and Again
	Again       int64 // of these, letters that failed again after a retry
}

// Table names a table of dead letters, and has the SQL expressions of two of its columns.
type Table struct{ Name, Consumer, Error string }

// groupsSQL finds the groups by a skip from one to the next, and the first and last letter of each.
//
// Index: that of the groups, three probes per group for any number of letters.   Locks: none.
const groupsSQL = `
WITH RECURSIVE g(id) AS (
  (SELECT group_id FROM {table} WHERE {tenant} ORDER BY group_id LIMIT 1)
  UNION ALL
  SELECT (SELECT n.group_id FROM {table} n WHERE {tenant} AND n.group_id > g.id ORDER BY n.group_id LIMIT 1) FROM g WHERE g.id IS NOT NULL)
` + describeSQL + `
  FROM (SELECT id FROM g WHERE id IS NOT NULL LIMIT @limit) g
` + endsSQL + `
 ORDER BY last.dead_at DESC, g.id`

const describeSQL = `
SELECT /* deadletter.groups */ g.id::text, last.consumer, last.event_type, last.cause, last.error, first.dead_at, last.dead_at`

// endsSQL finds the first and the last letter of a group g.
const endsSQL = `
 CROSS JOIN LATERAL (SELECT dead_at FROM {table} WHERE {tenant} AND group_id = g.id ORDER BY dead_at, id LIMIT 1) first
 CROSS JOIN LATERAL (SELECT {consumer} AS consumer, event_type, cause, {error} AS error, dead_at FROM {table}
                      WHERE {tenant} AND group_id = g.id ORDER BY dead_at DESC, id DESC LIMIT 1) last`

// groupSQL reads one group. Index: that of the groups, two probes. Locks: none.
const groupSQL = describeSQL + ` FROM (SELECT @group::uuid AS id) g` + endsSQL

// countSQL counts the letters of groups, latest first.
//
// Index: that of the groups, as many entries of each as it counts.   Locks: none.
const countSQL = `
SELECT /* deadletter.count */ g.n, c.letters, c.again
  FROM unnest(@groups::uuid[]) WITH ORDINALITY AS g(id, n)
 CROSS JOIN LATERAL (SELECT count(*) AS letters, count(*) FILTER (WHERE retries > 0) AS again FROM (
   SELECT retries FROM {table} WHERE {tenant} AND group_id = g.id AND dead_at >= @since ORDER BY dead_at DESC LIMIT @most) l) c
 ORDER BY g.n`

// sql returns a statement of this package for the table, for one tenant or all.
func (t Table) sql(sql string, tenant int64) string {
	where := "true"
	if tenant != 0 {
		where = "tenant_id = @tenant"
	}
	return strings.NewReplacer("{table}", t.Name, "{consumer}", t.Consumer, "{error}", t.Error, "{tenant}", where).Replace(sql)
}

// Statements returns the statements on the table. Tests prepare them.
func (t Table) Statements() []string {
	return []string{t.sql(groupsSQL, 0), t.sql(groupsSQL, 1), t.sql(countSQL, 0), t.sql(countSQL, 1),
		t.sql(groupSQL, 0), t.sql(groupSQL, 1)}
}

// Groups returns the groups without their counts. The group with the latest letter comes first.
// Tenant 0 means all tenants. If more than MaxGroups exist, it returns any MaxGroups of them and
// more is true. The cost grows with the number of groups, not with that of letters.
func Groups(ctx context.Context, tx pgx.Tx, t Table, tenant int64) (all []Group, more bool, err error) {
	rows, _ := tx.Query(ctx, t.sql(groupsSQL, tenant), pgx.NamedArgs{"tenant": tenant, "limit": MaxGroups + 1})
	all, err = pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, false, fmt.Errorf("group %s: %w", t.Name, err)
	}
	if more = len(all) > MaxGroups; more {
		all = all[:MaxGroups]
	}
	return all, more, nil
}

func scan(row pgx.CollectableRow) (g Group, err error) {
	return g, row.Scan(&g.ID, &g.Consumer, &g.EventType, &g.Cause, &g.Error, &g.First, &g.Last)
}

// One returns a group without its count, or nil if it has no letters.
func One(ctx context.Context, tx pgx.Tx, t Table, tenant int64, id string) (*Group, error) {
	rows, _ := tx.Query(ctx, t.sql(groupSQL, tenant), pgx.NamedArgs{"tenant": tenant, "group": id})
	all, err := pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, fmt.Errorf("read group %s of %s: %w", id, t.Name, err)
	}
	if len(all) == 0 {
		return nil, nil
	}
	return &all[0], nil
}

// Count sets the counts of the groups: letters that died at since or later. A zero since means all.
func Count(ctx context.Context, tx pgx.Tx, t Table, tenant int64, groups []Group, since time.Time) error {
	ids := make([]string, len(groups))
	for i, g := range groups {
		ids[i] = g.ID
	}
	rows, _ := tx.Query(ctx, t.sql(countSQL, tenant), pgx.NamedArgs{"tenant": tenant, "groups": ids, "since": since, "most": MaxCount + 1})
	var n int
	var letters, again int64
	if _, err := pgx.ForEachRow(rows, []any{&n, &letters, &again}, func() error {
		groups[n-1].Count, groups[n-1].Again = letters, again
		return nil
	}); err != nil {
		return fmt.Errorf("count the letters of %d groups of %s: %w", len(groups), t.Name, err)
	}
	return nil
}
