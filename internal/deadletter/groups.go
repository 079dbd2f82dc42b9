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
	// MaxCount is the limit of CountGroups: a group with more letters has the count MaxCount+1.
	MaxCount = 10_000
)

// Group is the set of letters of one consumer, event type and cause. Consumer is "" for the outbox.
type Group struct {
	Source      string // Outbox or Consumers
	ID          string // a UUID, derived from the three
	Consumer    string
	EventType   string
	Cause       string
	Error       string // of the latest letter
	First, Last time.Time
	Count       int64 // CountGroups sets it and Again
	Again       int64 // of these, letters that failed again after a retry
}

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

// walkSQL makes countSQL walk its index until the transaction ends. The planner expects groups of
// one size, so it would read and sort all letters of a large one.
//
// Index: none.   Locks: none.
const walkSQL = `
SELECT /* deadletter.walk */ set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true)`

// countSQL counts the letters of groups, latest first.
//
// Index: that of the groups, as many entries of each as it counts.   Locks: none.
const countSQL = `
SELECT /* deadletter.count */ g.n, c.letters, c.again
  FROM unnest(@groups::uuid[]) WITH ORDINALITY AS g(id, n)
 CROSS JOIN LATERAL (SELECT count(*) AS letters, count(*) FILTER (WHERE retries > 0) AS again FROM (
   SELECT retries FROM {table} WHERE {tenant} AND group_id = g.id AND dead_at >= @since ORDER BY dead_at DESC LIMIT @most) l) c
 ORDER BY g.n`

// ofTenant fills in the names of the table, for one tenant or all.
func (t Table) ofTenant(sql string, tenant int64) string {
	where := "true"
	if tenant != 0 {
		where = "tenant_id = @tenant"
	}
	return t.sql(strings.ReplaceAll(sql, "{tenant}", where))
}

func (r *Reader) groups(ctx context.Context, sql string, tenant int64, args pgx.NamedArgs) (all []*Group, err error) {
	args["tenant"] = tenant
	err = r.read(ctx, tenant, func(tx pgx.Tx) (err error) {
		rows, _ := tx.Query(ctx, r.table.ofTenant(sql, tenant), args)
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Group, error) {
			g := Group{Source: r.table.Source}
			return &g, row.Scan(&g.ID, &g.Consumer, &g.EventType, &g.Cause, &g.Error, &g.First, &g.Last)
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("group %s: %w", r.table.Name, err)
	}
	return all, nil
}

// Groups returns the groups of the tenant's letters by consumer, event type and cause, without
// their counts. The group with the latest letter comes first. Tenant 0 means all tenants. If more
// than MaxGroups exist, it returns any MaxGroups of them and more is true. The cost grows with the
// number of groups, not with that of letters.
func (r *Reader) Groups(ctx context.Context, tenant int64) (all []*Group, more bool, err error) {
	all, err = r.groups(ctx, groupsSQL, tenant, pgx.NamedArgs{"limit": MaxGroups + 1})
	if more = len(all) > MaxGroups; more {
		all = all[:MaxGroups]
	}
	return all, more, err
}

// Group returns a group by its id, without its count, or nil if the tenant has no letter in it.
func (r *Reader) Group(ctx context.Context, tenant int64, id string) (*Group, error) {
	all, err := r.groups(ctx, groupSQL, tenant, pgx.NamedArgs{"group": id})
	if err != nil || len(all) == 0 {
		return nil, err
	}
	return all[0], nil
}

// CountGroups sets the counts of the groups: the tenant's letters that died at since or later. A
// zero since means all.
func (r *Reader) CountGroups(ctx context.Context, tenant int64, groups []*Group, since time.Time) error {
	if len(groups) == 0 {
		return nil
	}
	ids := make([]string, len(groups))
	for i, g := range groups {
		ids[i] = g.ID
	}
	if err := r.read(ctx, tenant, func(tx pgx.Tx) error {
		var b pgx.Batch
		b.Queue(walkSQL)
		args := pgx.NamedArgs{"tenant": tenant, "groups": ids, "since": since, "most": MaxCount + 1}
		b.Queue(r.table.ofTenant(countSQL, tenant), args).Query(func(rows pgx.Rows) error {
			var n int
			var letters, again int64
			_, err := pgx.ForEachRow(rows, []any{&n, &letters, &again}, func() error {
				groups[n-1].Count, groups[n-1].Again = letters, again
				return nil
			})
			return err
		})
		return tx.SendBatch(ctx, &b).Close()
	}); err != nil {
		return fmt.Errorf("count the letters of %d groups of %s: %w", len(groups), r.table.Name, err)
	}
	return nil
}
