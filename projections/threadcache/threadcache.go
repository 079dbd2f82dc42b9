package threadcache

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// Name is the projection's name, and its consumer's.
const Name = "threadcache"

// LevelLen is the number of characters of one level of a path; levels are joined by '/'.
const LevelLen = 22

// The sizes of the ranges that visible comments are counted in: a range is split when it has twice as much.
const (
	bucketSize = 100 // visible comments
	groupSize  = 100 // buckets
)

// Projection applies comment and thread events. It has no state of its own.
type Projection struct{ bucketSize, groupSize int }

// New returns the projection.
func New() Projection { return Projection{bucketSize, groupSize} }

// Name returns the projection's name.
func (Projection) Name() string { return Name }

// Wants reports whether the projection applies events of the aggregate type.
func (Projection) Wants(aggregateType string) bool {
	return aggregateType == event.AggregateComment || aggregateType == event.AggregateThread
}

type commentKey struct {
	tenant int64
	id     string
}

type thread struct{ tenant, post int64 }

type place struct {
	thread
	path string
}

// change is what a batch did to one comment that is new or whose visibility moved.
type change struct {
	place
	createdAt time.Time
	id        string
	fresh     bool  // new to us
	delta     int32 // visible(after) - visible(before)
}

// Apply brings the threads up to the events, in the caller's transaction. A payload that is not what its type says is a
// permanent error. Cost: up to seven statements however many events, and two short index ranges per comment that is new.
func (p Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	comments := make(map[commentKey]event.Comment, len(events))
	settings := make(map[thread]event.Thread)
	for i := range events {
		e := &events[i]
		if e.AggregateType == event.AggregateThread {
			var t event.Thread
			if err := e.DecodePayload(&t); err != nil {
				return err
			}
			if int64(t.PostID) != e.AggregateID || t.Version <= 0 {
				return event.Permanent(fmt.Errorf("event %s: thread of post %d (of %d) has version %d", e.ID, t.PostID, e.AggregateID, t.Version))
			}
			if k := (thread{e.TenantID, e.AggregateID}); t.Version > settings[k].Version {
				settings[k] = t
			}
			continue
		}
		var c event.Comment
		if err := e.DecodePayload(&c); err != nil {
			return err
		}
		if c.Version <= 0 || !wellFormed(c.Path) {
			return event.Permanent(fmt.Errorf("event %s: comment %s has version %d and the path %.200q", e.ID, c.CommentID, c.Version, c.Path))
		}
		k := commentKey{e.TenantID, c.CommentID}
		if c.Version > comments[k].Version {
			comments[k] = c
		}
	}
	if err := writeSettings(ctx, tx, settings); err != nil {
		return err
	}
	if len(comments) == 0 {
		return nil
	}
	changes, err := writeComments(ctx, tx, comments)
	if err != nil {
		return err
	}
	if err := addDescendants(ctx, tx, changes); err != nil {
		return err
	}
	if err := addTotals(ctx, tx, changes); err != nil {
		return err
	}
	return p.addCounts(ctx, tx, changes)
}

// wellFormed reports whether the path could be placed in a thread.
func wellFormed(path string) bool {
	if len(path)%(LevelLen+1) != LevelLen {
		return false
	}
	for i := range len(path) {
		if c := path[i]; (c == '/') != (i%(LevelLen+1) == LevelLen) || c != '/' && (c < '0' || c > 'z') {
			return false
		}
	}
	return true
}

// ancestors calls yield with the path of each ancestor, the nearest last.
func ancestors(path string, yield func(string)) {
	for end := LevelLen; end < len(path); end += LevelLen + 1 {
		yield(path[:end])
	}
}

// commentsSQL writes the comments that are new or newer than ours and returns them with their visibility before. A comment
// that is new to us counts what is visible below it as it was before the batch (a range of the path index, nearly always empty: '0' follows '/'), which is
// how a late parent ends up right. One transaction at a time works on a post (all its events are in one partition, whose
// offset the caller has locked), so the statement's snapshot is what the thread was before the batch.
// Both reads are fenced in, so that no statistics, stale ones or none, make them walk the thread for each comment: LIMIT and OFFSET keep
// them from being joined otherwise, the order that each asks for is that of its index (with an empty table all indexes of a tenant
// cost the same, and the first batch of a replay walked everything for each comment), and FILTER keeps the second off the partial indexes.
// Index: thread_comments_pkey, thread_comments_path_idx.   Locks: the comments' rows, in key order.
const commentsSQL = `
WITH incoming AS MATERIALIZED (
  SELECT * FROM unnest(@tenants::bigint[], @ids::uuid[], @posts::bigint[], @parents::uuid[], @slugs::text[], @paths::text[], @authors::bigint[],
                       @bodies::text[], @author_states::text[], @moderation_states::text[], @versions::bigint[],
                       @created_ats::timestamptz[], @updated_ats::timestamptz[], @visibles::boolean[])
           WITH ORDINALITY AS i(tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version,
                                created_at, updated_at, visible, ord)
), before AS MATERIALIZED (
  SELECT i.ord, t.visible
    FROM incoming i, LATERAL (SELECT visible FROM thread_comments t
                               WHERE t.tenant_id = i.tenant_id AND t.comment_id >= i.comment_id AND t.comment_id <= i.comment_id
                               ORDER BY t.comment_id LIMIT 1) t
), written AS (
  INSERT /* threadcache.comments */ INTO thread_comments AS t
         (tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at,
          visible, visible_descendants, shown)
  SELECT i.tenant_id, i.comment_id, i.post_id, i.parent_id, i.slug, i.path, i.author_id, i.body, i.author_state, i.moderation_state, i.version,
         i.created_at, i.updated_at, i.visible, below.n, i.visible OR below.n > 0
    FROM incoming i LEFT JOIN before b USING (ord),
         LATERAL (SELECT CASE WHEN b.ord IS NULL THEN
                    (SELECT count(*) FILTER (WHERE d.visible)::int
                       FROM (SELECT d.visible FROM thread_comments d
                              WHERE d.tenant_id = i.tenant_id AND d.post_id = i.post_id
                                AND d.path > i.path || '/' COLLATE "C" AND d.path < i.path || '0' COLLATE "C"
                              ORDER BY d.path OFFSET 0) d)
                  ELSE 0 END AS n) below
   ORDER BY i.ord
      ON CONFLICT (tenant_id, comment_id) DO UPDATE
         SET author_id = excluded.author_id, body = excluded.body, author_state = excluded.author_state, moderation_state = excluded.moderation_state,
             version = excluded.version, updated_at = excluded.updated_at, visible = excluded.visible,
             shown = excluded.visible OR t.visible_descendants > 0
       WHERE excluded.version > t.version
  RETURNING t.tenant_id, t.comment_id
)
SELECT i.ord::int, b.ord IS NULL, coalesce(b.visible, false)
  FROM written JOIN incoming i USING (tenant_id, comment_id) LEFT JOIN before b USING (ord)`

// writeComments writes the comments and returns those that are new or whose visibility moved, in key order.
func writeComments(ctx context.Context, tx pgx.Tx, last map[commentKey]event.Comment) ([]change, error) {
	keys := make([]commentKey, 0, len(last))
	for k := range last {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b commentKey) int { return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.id, b.id)) })
	n := len(keys)
	var (
		tenants, posts, authors, versions = make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
		ids, slugs, paths, bodies         = make([]string, n), make([]string, n), make([]string, n), make([]string, n)
		parents                           = make([]*string, n)
		authorStates, moderationStates    = make([]string, n), make([]string, n)
		createdAts, updatedAts            = make([]time.Time, n), make([]time.Time, n)
		visibles                          = make([]bool, n)
	)
	for i, k := range keys {
		c := last[k]
		tenants[i], posts[i], authors[i], versions[i] = k.tenant, int64(c.PostID), int64(c.AuthorID), c.Version
		ids[i], slugs[i], paths[i], bodies[i] = c.CommentID, c.Slug, c.Path, c.Body
		if c.ParentID != "" {
			parents[i] = &c.ParentID
		}
		authorStates[i], moderationStates[i] = c.AuthorState, c.ModerationState
		createdAts[i], updatedAts[i], visibles[i] = c.CreatedAt.Time, c.UpdatedAt.Time, c.Visible()
	}
	rows, _ := tx.Query(ctx, commentsSQL, pgx.StrictNamedArgs{
		"tenants": tenants, "ids": ids, "posts": posts, "parents": parents, "slugs": slugs, "paths": paths, "authors": authors, "bodies": bodies,
		"author_states": authorStates, "moderation_states": moderationStates, "versions": versions,
		"created_ats": createdAts, "updated_ats": updatedAts, "visibles": visibles,
	})
	var changes []change
	var ord int
	var fresh, before bool
	if _, err := pgx.ForEachRow(rows, []any{&ord, &fresh, &before}, func() error {
		i := ord - 1
		if !fresh && visibles[i] == before {
			return nil
		}
		c := change{place: place{thread{tenants[i], posts[i]}, paths[i]}, createdAt: createdAts[i], id: ids[i], fresh: fresh}
		switch {
		case visibles[i] && !before:
			c.delta = 1
		case !visibles[i] && before:
			c.delta = -1
		}
		changes = append(changes, c)
		return nil
	}); err != nil {
		return nil, fmt.Errorf("write %d thread comments: %w", n, err)
	}
	return changes, nil
}

// descendantsSQL moves the visible descendants of ancestors; one that has not come yet will count for itself when it does.
// Index: thread_comments_path_idx.   Locks: the ancestors' rows.
const descendantsSQL = `
UPDATE /* threadcache.descendants */ thread_comments t
   SET visible_descendants = t.visible_descendants + d.delta, shown = t.visible OR t.visible_descendants + d.delta > 0
  FROM unnest(@tenants::bigint[], @posts::bigint[], @paths::text[], @deltas::int[]) AS d(tenant_id, post_id, path, delta)
 WHERE t.tenant_id = d.tenant_id AND t.post_id = d.post_id AND t.path = d.path COLLATE "C"`

func addDescendants(ctx context.Context, tx pgx.Tx, changes []change) error {
	deltas := make(map[place]int32)
	for _, c := range changes {
		if c.delta != 0 {
			ancestors(c.path, func(path string) { deltas[place{c.thread, path}] += c.delta })
		}
	}
	var tenants, posts []int64
	var paths []string
	var moved []int32
	for p, d := range deltas {
		if d != 0 {
			tenants, posts, paths, moved = append(tenants, p.tenant), append(posts, p.post), append(paths, p.path), append(moved, d)
		}
	}
	if len(moved) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, descendantsSQL, pgx.StrictNamedArgs{"tenants": tenants, "posts": posts, "paths": paths, "deltas": moved}); err != nil {
		return fmt.Errorf("move the visible descendants of %d comments: %w", len(moved), err)
	}
	return nil
}
