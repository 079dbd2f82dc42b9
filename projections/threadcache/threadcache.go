package threadcache

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// Name is the name of the projection and of its consumer.
const Name = "threadcache"

// LevelLen is the number of characters of one level of a path; levels are joined by '/'.
const LevelLen = 22

// The sizes of the ranges that count visible children. A range is split when it has more than twice
// its size.
const (
	bucketSize = 100 // visible children
	groupSize  = 100 // buckets
)

// Projection applies the events of threads and of children of every current kind. It has no state
// of its own.
type Projection struct {
	kinds                 func() *kinds.Set
	bucketSize, groupSize int
	repairStep            int
}

// New returns a projection. It calls now for the current kinds whenever it needs them; now is
// usually catalog.Catalog.Now.
func New(now func() *kinds.Set) Projection { return Projection{now, bucketSize, groupSize, repairStep} }

// Name returns the projection's name.
func (Projection) Name() string { return Name }

// Wants reports whether the projection applies events of the aggregate type.
func (p Projection) Wants(aggregateType string) bool {
	_, ok := p.kinds().Child(aggregateType)
	return ok || aggregateType == event.AggregateThread
}

type childKey struct {
	tenant int64
	kind   string
	id     string
}

// object is the parent of children of a kind.
type object struct {
	tenant int64
	kind   string
	id     event.ID
}

type place struct {
	object
	path string
}

// change is the effect of a batch on one child that is new or whose visibility changed.
type change struct {
	place
	createdAt time.Time
	id        string
	fresh     bool  // new to the projection
	delta     int32 // visible(after) - visible(before)
}

// Apply applies the events to the objects in the caller's transaction. A payload that does not
// match its type is a permanent error. Cost: up to eight statements for any number of events, and
// for children of threaded kinds two short index ranges per new child.
func (p Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	set := p.kinds()
	children, settings, err := lastStates(set, events)
	if err != nil {
		return err
	}
	if err := writeSettings(ctx, tx, settings); err != nil {
		return err
	}
	if len(children) == 0 {
		return nil
	}
	changes, sums, err := writeChildren(ctx, tx, set, children)
	if err != nil {
		return err
	}
	if err := addDescendants(ctx, tx, changes); err != nil {
		return err
	}
	if err := addTotals(ctx, tx, changes); err != nil {
		return err
	}
	if err := addAggregates(ctx, tx, sums); err != nil {
		return err
	}
	return p.addCounts(ctx, tx, changes)
}

// lastStates returns the last state of each child and of each thread's settings in the events.
func lastStates(set *kinds.Set, events []event.Event) (children map[childKey]event.Child, settings map[object]event.Thread, err error) {
	children, settings = make(map[childKey]event.Child, len(events)), make(map[object]event.Thread)
	var kind kinds.Child
	var names event.ChildNames
	for i := range events {
		e := &events[i]
		if e.AggregateType == event.AggregateThread {
			var t event.Thread
			if err := e.DecodePayload(&t); err != nil {
				return nil, nil, err
			}
			if t.PostID != e.AggregateID || t.Version <= 0 {
				return nil, nil, event.Permanent(fmt.Errorf("event %s: thread of post %s (of %s) has version %d", e.ID, t.PostID,
					e.AggregateID, t.Version))
			}
			if o := (object{e.TenantID, t.Of(), e.AggregateID}); t.Version > settings[o].Version {
				settings[o] = t
			}
			continue
		}
		if e.AggregateType != kind.Name {
			var ok bool
			if kind, ok = set.Child(e.AggregateType); !ok {
				return nil, nil, event.Permanent(fmt.Errorf("event %s: there is no kind of children %s", e.ID, e.AggregateType))
			}
			names = kind.Names()
		}
		c, err := e.DecodeChild(names)
		if err != nil {
			return nil, nil, err
		}
		if kind.Threaded && !wellFormed(c.Path) {
			return nil, nil, event.Permanent(fmt.Errorf("event %s: %s %s has the path %.200q", e.ID, kind.Name, c.ID, c.Path))
		}
		if !kind.Threaded {
			c.ReplyTo, c.Slug, c.Path = "", "", ""
		}
		k := childKey{e.TenantID, kind.Name, c.ID}
		if c.Version > children[k].Version {
			children[k] = c
		}
	}
	return children, settings, nil
}

// wellFormed reports whether the path is a valid place in a thread.
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

// childrenSQL writes the children that are new or newer than the projection's, and returns them
// with their visibility before. Late parents: a new child counts the visible children below it as
// they were before the batch. That is a range of the path index ('0' follows '/'), nearly always
// empty. So a late parent gets the right count. Snapshot: one transaction at a time works on an
// object, because all its events are in one partition, whose offset the caller has locked. So the
// statement's snapshot has the thread as it was before the batch. Plan: both reads are fenced, so
// that no statistics, stale or missing, make them scan the thread for each child. LIMIT and OFFSET
// keep the planner from another join. The order of each read is that of its index: with an empty
// table all indexes of a tenant cost the same, and the first batch of a replay scanned everything
// for each child. FILTER keeps the second read off the partial indexes. Index: child_lists_pkey,
// child_lists_path_idx. Locks: the children's rows, in key order.
const childrenSQL = `
WITH incoming AS MATERIALIZED (
  SELECT * FROM unnest(@tenants::bigint[], @kinds::text[], @ids::uuid[], @objects::text[], @parents::uuid[], @slugs::text[],
                       @paths::text[], @authors::text[], @bodies::text[], @attributes::text[], @author_states::text[],
                       @moderation_states::text[], @versions::bigint[], @created_ats::timestamptz[],
                       @updated_ats::timestamptz[], @visibles::boolean[])
           WITH ORDINALITY AS i(tenant_id, kind, child_id, object_id, parent_id, slug, path, author_id, body, attributes,
                                author_state, moderation_state, version, created_at, updated_at, visible, ord)
), before AS MATERIALIZED (
  SELECT i.ord, t.visible, t.attributes
    FROM incoming i, LATERAL (SELECT visible, attributes FROM child_lists t
                               WHERE t.tenant_id = i.tenant_id AND t.kind = i.kind AND t.child_id >= i.child_id AND t.child_id <= i.child_id
                               ORDER BY t.child_id LIMIT 1) t
), written AS (
  INSERT /* threadcache.children */ INTO child_lists AS t
         (tenant_id, kind, child_id, object_id, parent_id, slug, path, author_id, body, attributes, author_state, moderation_state,
          version, created_at, updated_at, visible, visible_descendants, shown)
  SELECT i.tenant_id, i.kind, i.child_id, i.object_id, i.parent_id, i.slug, i.path, i.author_id, i.body, i.attributes::jsonb,
         i.author_state, i.moderation_state, i.version, i.created_at, i.updated_at, i.visible, below.n, i.visible OR below.n > 0
    FROM incoming i LEFT JOIN before b USING (ord),
         LATERAL (SELECT CASE WHEN b.ord IS NULL AND i.path IS NOT NULL THEN
                    (SELECT count(*) FILTER (WHERE d.visible)::int
                       FROM (SELECT d.visible FROM child_lists d
                              WHERE d.tenant_id = i.tenant_id AND d.kind = i.kind AND d.object_id = i.object_id
                                AND d.path > i.path || '/' COLLATE "C" AND d.path < i.path || '0' COLLATE "C"
                              ORDER BY d.path OFFSET 0) d)
                  ELSE 0 END AS n) below
   ORDER BY i.ord
      ON CONFLICT (tenant_id, kind, child_id) DO UPDATE
         SET author_id = excluded.author_id, body = excluded.body, attributes = excluded.attributes,
             author_state = excluded.author_state, moderation_state = excluded.moderation_state, version = excluded.version,
             updated_at = excluded.updated_at, visible = excluded.visible,
             shown = excluded.visible OR t.visible_descendants > 0
       WHERE excluded.version > t.version
  RETURNING t.tenant_id, t.kind, t.child_id
)
SELECT i.ord::int, b.ord IS NULL, coalesce(b.visible, false), b.attributes
  FROM written JOIN incoming i USING (tenant_id, kind, child_id) LEFT JOIN before b USING (ord)`

// childArgs returns the arguments of childrenSQL.
func childArgs(keys []childKey, last map[childKey]event.Child) pgx.StrictNamedArgs {
	n := len(keys)
	var (
		tenants, objects, authors, versions = make([]int64, n), make([]event.ID, n), make([]event.ID, n), make([]int64, n)
		names, ids, bodies                  = make([]string, n), make([]string, n), make([]string, n)
		parents, slugs, paths, attributes   = make([]*string, n), make([]*string, n), make([]*string, n), make([]*string, n)
		authorStates, moderationStates      = make([]string, n), make([]string, n)
		createdAts, updatedAts              = make([]time.Time, n), make([]time.Time, n)
		visibles                            = make([]bool, n)
	)
	for i, k := range keys {
		c := last[k]
		tenants[i], names[i], objects[i], authors[i], versions[i] = k.tenant, k.kind, c.Parent, c.AuthorID, c.Version
		ids[i], bodies[i] = c.ID, c.Body
		parents[i], slugs[i], paths[i] = orNull(c.ReplyTo), orNull(c.Slug), orNull(c.Path)
		attributes[i] = orNull(string(c.Attributes))
		authorStates[i], moderationStates[i] = c.AuthorState, c.ModerationState
		createdAts[i], updatedAts[i], visibles[i] = c.CreatedAt.Time, c.UpdatedAt.Time, c.Visible()
	}
	return pgx.StrictNamedArgs{
		"tenants": tenants, "kinds": names, "ids": ids, "objects": objects, "parents": parents, "slugs": slugs, "paths": paths,
		"authors": authors, "bodies": bodies, "attributes": attributes,
		"author_states": authorStates, "moderation_states": moderationStates, "versions": versions,
		"created_ats": createdAts, "updated_ats": updatedAts, "visibles": visibles,
	}
}

// writeChildren writes the children. It returns those that are new or whose visibility changed, in
// key order, and the changes of the aggregates.
func writeChildren(ctx context.Context, tx pgx.Tx, set *kinds.Set,
	last map[childKey]event.Child) ([]change, map[aggregate]Aggregate, error) {
	keys := slices.AppendSeq(make([]childKey, 0, len(last)), maps.Keys(last))
	slices.SortFunc(keys, func(a, b childKey) int {
		return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.kind, b.kind), cmp.Compare(a.id, b.id))
	})
	rows, _ := tx.Query(ctx, childrenSQL, childArgs(keys, last))
	var changes []change
	sums := make(map[aggregate]Aggregate)
	var aggregated []string // of the kind
	var kind string
	var ord int
	var fresh, before bool
	var was json.RawMessage
	if _, err := pgx.ForEachRow(rows, []any{&ord, &fresh, &before, &was}, func() error {
		k := keys[ord-1]
		child := last[k]
		o, visible := object{k.tenant, k.kind, child.Parent}, child.Visible()
		if o.kind != kind {
			kind, aggregated = o.kind, set.Children[o.kind].Aggregates()
		}
		if len(aggregated) > 0 {
			move(sums, o, aggregated, was, before, -1)
			move(sums, o, aggregated, child.Attributes, visible, 1)
		}
		if !fresh && visible == before {
			return nil
		}
		c := change{place: place{o, child.Path}, createdAt: child.CreatedAt.Time, id: child.ID, fresh: fresh}
		switch {
		case visible && !before:
			c.delta = 1
		case !visible && before:
			c.delta = -1
		}
		changes = append(changes, c)
		return nil
	}); err != nil {
		return nil, nil, fmt.Errorf("write %d children: %w", len(keys), err)
	}
	return changes, sums, nil
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// descendantsSQL changes the visible descendants of ancestors. An ancestor that comes later counts
// for itself. Plan: the path finds the ancestor in a read of its own, fenced as those of
// childrenSQL. As a condition of the UPDATE, it is not enough: with statistics of a smaller table
// PostgreSQL takes the primary key and reads all children of the tenant for each ancestor. The list
// of one tenant leaves no join but a probe per ancestor. Index: child_lists_path_idx,
// child_lists_pkey. Locks: the ancestors' rows.
const descendantsSQL = `
UPDATE /* threadcache.descendants */ child_lists t
   SET visible_descendants = t.visible_descendants + d.delta, shown = t.visible OR t.visible_descendants + d.delta > 0
  FROM (SELECT d.tenant_id, d.kind, a.child_id, d.delta
          FROM unnest(@tenants::bigint[], @kinds::text[], @objects::text[], @paths::text[], @deltas::int[])
                 AS d(tenant_id, kind, object_id, path, delta),
               LATERAL (SELECT a.child_id FROM child_lists a
                         WHERE a.tenant_id = d.tenant_id AND a.kind = d.kind AND a.object_id = d.object_id
                           AND a.path >= d.path COLLATE "C" AND a.path <= d.path COLLATE "C"
                         ORDER BY a.path LIMIT 1) a
        OFFSET 0) d
 WHERE t.tenant_id = ANY (ARRAY[d.tenant_id]) AND t.kind = d.kind AND t.child_id = d.child_id`

func addDescendants(ctx context.Context, tx pgx.Tx, changes []change) error {
	deltas := make(map[place]int32)
	for _, c := range changes {
		if c.delta != 0 {
			ancestors(c.path, func(path string) { deltas[place{c.object, path}] += c.delta })
		}
	}
	var objects columns
	var paths []string
	var moved []int32
	for p, d := range deltas {
		if d != 0 {
			objects.add(p.object)
			paths, moved = append(paths, p.path), append(moved, d)
		}
	}
	if len(moved) == 0 {
		return nil
	}
	if err := postgres.Later(ctx, tx, descendantsSQL, objects.args(pgx.StrictNamedArgs{"paths": paths, "deltas": moved})); err != nil {
		return fmt.Errorf("change the visible descendants of %d children: %w", len(moved), err)
	}
	return nil
}
