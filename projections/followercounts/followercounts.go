package followercounts

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
const Name = "followercounts"

// Projection applies the events of edges of every current kind. It has no state of its own.
type Projection struct {
	kinds   func() *kinds.Set
	splitAt int64 // see the constant
}

// New returns a projection. It calls now for the current kinds whenever it needs them; now is
// usually catalog.Catalog.Now.
func New(now func() *kinds.Set) Projection { return Projection{kinds: now, splitAt: splitAt} }

// Name returns the projection's name.
func (Projection) Name() string { return Name }

// Wants reports whether the projection applies events of the aggregate type: edges, and children
// that edges rank.
func (p Projection) Wants(aggregateType string) bool {
	set := p.kinds()
	_, edge := set.Edge(aggregateType)
	return edge || set.Children[aggregateType].RankedBy != ""
}

// key names an edge of a kind.
type key struct {
	tenant   int64
	from, to event.ID
}

func (k key) compare(o key) int {
	return cmp.Or(cmp.Compare(k.tenant, o.tenant), cmp.Compare(k.from, o.from), cmp.Compare(k.to, o.to))
}

// batch has the last state of each edge, by kind.
type batch map[string]map[key]state

// state has the fields of an edge that the projection keeps.
type state struct {
	active       bool
	version      int64
	positionedAt time.Time
	filter       *string
	attributes   json.RawMessage
}

// stateOf returns the fields of an edge that the projection keeps.
func stateOf(k kinds.Edge, e *event.Edge) (state, error) {
	s := state{active: e.Active(), version: e.Version, positionedAt: e.PositionedAt.Time, attributes: e.Attributes}
	name, ok := k.Filter()
	if !ok || e.Attributes == nil {
		return s, nil
	}
	var values map[string]any
	if err := json.Unmarshal(e.Attributes, &values); err != nil {
		return s, fmt.Errorf("the attributes of the edge %s, %s: %w", e.From, e.To, err)
	}
	if v, ok := values[name].(string); ok {
		s.filter = &v
	}
	return s, nil
}

// object is one side of edges of a kind.
type object struct {
	tenant int64
	id     event.ID
}

// Apply applies the events to edges, counts and ranks in the caller's transaction. A count changes
// by the difference between an edge's states before and after the batch. A payload that does not
// decode is a permanent error. Cost: two to five statements for each kind, for any number of
// events.
func (p Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	set := p.kinds()
	last, ranks := batch{}, ranking{}
	var kind kinds.Edge
	ranked := false
	for i := range events {
		e := &events[i]
		if e.AggregateType != kind.Name {
			var ok bool
			if kind, ok = set.Edge(e.AggregateType); !ok {
				if err := ranks.put(set, e); err != nil {
					return err
				}
				continue
			}
			_, ranked = set.Ranks(kind)
		}
		edge, err := e.DecodeEdge(kind.Names())
		if err != nil {
			return err
		}
		if ranked && !event.IsUUID(edge.To.String()) {
			return event.Permanent(fmt.Errorf("event %s: the %s %s, %s does not lead to a %s", e.ID,
				kind.Name, edge.From, edge.To, kind.To))
		}
		if edge.From == edge.To && kind.NoSelf() {
			return event.Permanent(fmt.Errorf("event %s: the %s %s, %s leads from an object to itself", e.ID,
				kind.Name, edge.From, edge.To))
		}
		if err := last.put(e.TenantID, kind, &edge); err != nil {
			return event.Permanent(fmt.Errorf("event %s: %w", e.ID, err))
		}
	}
	return p.apply(ctx, tx, set, last, ranks)
}

// put stores the edge unless the batch has a newer version of it.
func (b batch) put(tenant int64, kind kinds.Edge, e *event.Edge) error {
	k := key{tenant, e.From, e.To}
	if e.Version <= b[kind.Name][k].version {
		return nil
	}
	if b[kind.Name] == nil {
		b[kind.Name] = map[key]state{}
	}
	s, err := stateOf(kind, e)
	b[kind.Name][k] = s
	return err
}

// apply writes the batch kind by kind, in the order of names, and then the ranks. Most batches have
// one kind.
func (p Projection) apply(ctx context.Context, tx pgx.Tx, set *kinds.Set, b batch, ranks ranking) error {
	for _, name := range slices.Sorted(maps.Keys(b)) {
		k := set.Edges[name]
		c := newChanges(k)
		if err := c.write(ctx, tx, b[name]); err != nil {
			return err
		}
		if err := p.count(ctx, tx, set, c, ranks); err != nil {
			return err
		}
	}
	return writeRanks(ctx, tx, ranks)
}

// count writes the changes of counts and aggregates, and collects those of scores in ranks.
func (p Projection) count(ctx context.Context, tx pgx.Tx, set *kinds.Set, c *changes, ranks ranking) error {
	if child, ok := set.Ranks(c.kind); ok {
		ranks.score(child.Name, c)
	}
	if err := p.addCounts(ctx, tx, c.kind.Name, c.counts); err != nil {
		return err
	}
	return addAggregates(ctx, tx, c.kind.Name, c.aggregates)
}

// changes collects the changes of one kind's counts and aggregates.
type changes struct {
	kind       kinds.Edge
	counts     map[object]Counts
	aggregates map[aggregate]Sum
	integers   []string // the attributes that are counted and summed
	enums      []string // the attributes whose values are counted
}

func newChanges(k kinds.Edge) *changes {
	c := &changes{kind: k, counts: make(map[object]Counts), aggregates: make(map[aggregate]Sum)}
	c.integers, c.enums = aggregated(k)
	return c
}

// add adds an active edge, or subtracts it with a sign of -1.
func (c *changes) add(k key, attributes json.RawMessage, sign int64) {
	from, to := object{k.tenant, k.from}, object{k.tenant, k.to}
	if from == to {
		c.counts[to] = c.counts[to].plus(Counts{sign, sign})
	} else {
		c.counts[to] = c.counts[to].plus(Counts{Incoming: sign})
		c.counts[from] = c.counts[from].plus(Counts{Outgoing: sign})
	}
	c.sum(to, attributes, sign)
}

// freshSQL writes edges at their first version. An edge that is there already is as new or newer.
// It returns the others, whose objects gain an edge. A new edge goes to a shard of its target
// (shards.go). Index: edge_lists_pkey, edge_shards_pkey. Locks: the new rows, in key order.
const freshSQL = `
INSERT /* followercounts.fresh */ INTO edge_lists
       (tenant_id, kind, from_id, to_id, active, version, positioned_at, shard_id, filter, attributes)
SELECT i.tenant_id, @kind, i.from_id, i.to_id, i.active, i.version, i.positioned_at, i.hash & (coalesce(s.shards, 1) - 1), i.filter,
       i.attributes::jsonb
  FROM ` + edgesArg + `
  LEFT JOIN edge_shards s ON s.tenant_id = i.tenant_id AND s.kind = @kind AND s.object_id = i.to_id
 ORDER BY i.ord
    ON CONFLICT DO NOTHING
RETURNING tenant_id, from_id, to_id`

// edgesArg has the arguments of the statements that write edges, as rows.
const edgesArg = `unnest(@tenants::bigint[], @froms::text[], @tos::text[], @actives::boolean[], @versions::bigint[],
              @positions::timestamptz[], @hashes::int[], @filters::text[], @attributes::text[])
         WITH ORDINALITY AS i(tenant_id, from_id, to_id, active, version, positioned_at, hash, filter, attributes, ord)`

// edgesSQL writes the edges that are newer than the projection's and returns their state before.
// Snapshot: one transaction at a time works on an edge, because all its events are in one
// partition, whose offset the caller has locked. So the statement's snapshot has the edge as it was
// before the batch. Values: filters and attributes may be NULL. A new edge goes to a shard of its
// target, any other stays in its shard. Plan: LIMIT keeps the lookup a probe for each edge. Without
// it, the planner assumes that the keys' columns are independent, expects almost no edge to exist,
// and chooses another join. Index: edge_lists_pkey, edge_shards_pkey. Locks: the edges' rows, in
// key order.
const edgesSQL = `
WITH newer AS MATERIALIZED (
  SELECT i.*, i.hash & (coalesce(s.shards, 1) - 1) AS shard_id, coalesce(e.active, false) AS before, e.attributes AS was
    FROM ` + edgesArg + `
    LEFT JOIN edge_shards s ON s.tenant_id = i.tenant_id AND s.kind = @kind AND s.object_id = i.to_id
    LEFT JOIN LATERAL (SELECT active, version, attributes FROM edge_lists
                        WHERE tenant_id = i.tenant_id AND kind = @kind AND from_id = i.from_id AND to_id = i.to_id LIMIT 1) e ON true
   WHERE i.version > coalesce(e.version, 0)
), written AS (
  INSERT /* followercounts.edges */ INTO edge_lists
         (tenant_id, kind, from_id, to_id, active, version, positioned_at, shard_id, filter, attributes)
  SELECT tenant_id, @kind, from_id, to_id, active, version, positioned_at, shard_id, filter, attributes::jsonb FROM newer ORDER BY ord
      ON CONFLICT (tenant_id, kind, from_id, to_id) DO UPDATE
         SET active = excluded.active, version = excluded.version, positioned_at = excluded.positioned_at,
             filter = excluded.filter, attributes = excluded.attributes
)
SELECT ord::int, before, CASE WHEN before AND @aggregated THEN was END FROM newer`

// write writes the edges and adds the changes of their objects.
func (c *changes) write(ctx context.Context, tx pgx.Tx, last map[key]state) error {
	fresh, known := make([]key, 0, len(last)), make([]key, 0, len(last))
	for k, s := range last {
		if s.version == 1 {
			fresh = append(fresh, k)
		} else {
			known = append(known, k)
		}
	}
	if err := c.writeFresh(ctx, tx, fresh, last); err != nil {
		return fmt.Errorf("write %d new edges: %w", len(fresh), err)
	}
	if err := c.writeKnown(ctx, tx, known, last); err != nil {
		return fmt.Errorf("write %d edges: %w", len(known), err)
	}
	return nil
}

func (c *changes) writeFresh(ctx context.Context, tx pgx.Tx, keys []key, last map[key]state) error {
	if len(keys) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, freshSQL, c.edgeArgs(keys, last))
	var k key
	_, err := pgx.ForEachRow(rows, []any{&k.tenant, &k.from, &k.to}, func() error {
		if s := last[k]; s.active {
			c.add(k, s.attributes, 1)
		}
		return nil
	})
	return err
}

func (c *changes) writeKnown(ctx context.Context, tx pgx.Tx, keys []key, last map[key]state) error {
	if len(keys) == 0 {
		return nil
	}
	args := c.edgeArgs(keys, last)
	args["aggregated"] = len(c.integers)+len(c.enums) > 0
	rows, _ := tx.Query(ctx, edgesSQL, args)
	var ord int
	var before bool
	var was json.RawMessage
	_, err := pgx.ForEachRow(rows, []any{&ord, &before, &was}, func() error {
		k := keys[ord-1]
		s := last[k]
		switch {
		case before && s.active:
			to := object{k.tenant, k.to}
			c.sum(to, was, -1)
			c.sum(to, s.attributes, 1)
		case before:
			c.add(k, was, -1)
		case s.active:
			c.add(k, s.attributes, 1)
		}
		return nil
	})
	return err
}

// edgeArgs sorts the keys and returns the arguments of the statements that write their edges.
func (c *changes) edgeArgs(keys []key, last map[key]state) postgres.Args {
	slices.SortFunc(keys, key.compare)
	n := len(keys)
	tenants, froms, tos := make([]int64, n), make([]event.ID, n), make([]event.ID, n)
	actives, versions, positions, hashes := make([]bool, n), make([]int64, n), make([]time.Time, n), make([]int32, n)
	var filters, attributes []*string // nil if no edge has attributes
	for i, k := range keys {
		s := last[k]
		tenants[i], froms[i], tos[i] = k.tenant, k.from, k.to
		actives[i], versions[i], positions[i], hashes[i] = s.active, s.version, s.positionedAt, shardHash(k.from)
		if s.attributes == nil {
			continue
		}
		if attributes == nil {
			filters, attributes = make([]*string, n), make([]*string, n)
		}
		text := string(s.attributes)
		filters[i], attributes[i] = s.filter, &text
	}
	return postgres.Args{
		"kind": c.kind.Name, "tenants": tenants, "froms": froms, "tos": tos, "actives": actives, "versions": versions,
		"positions": positions, "hashes": hashes, "filters": filters, "attributes": attributes,
	}
}

// deltasSQL has the arguments of the statements that change counts, as rows.
const deltasSQL = `unnest(@tenants::bigint[], @objects::text[], @incoming::bigint[], @outgoing::bigint[]) AS d(tenant_id, ` +
	`object_id, incoming, outgoing)`

// holdCountsSQL creates the new objects with their counts, and locks the others, all in key order.
// It returns the new ones. WHERE false locks a row without writing it. An object that loses an edge
// already has a row. So a new one never gets less than 0. greatest satisfies the CHECK on the
// proposed row, which PostgreSQL evaluates before it notices the conflict. Index: edge_counts_pkey.
// Locks: the objects' rows, in key order.
const holdCountsSQL = `
INSERT /* followercounts.hold */ INTO edge_counts AS c (tenant_id, kind, object_id, incoming, outgoing)
SELECT tenant_id, @kind, object_id, greatest(incoming, 0), greatest(outgoing, 0)
  FROM ` + deltasSQL + `
 ORDER BY tenant_id, object_id COLLATE "C"
    ON CONFLICT (tenant_id, kind, object_id) DO UPDATE SET updated_at = c.updated_at WHERE false
RETURNING tenant_id, object_id`

// addCountsSQL changes the counts of objects that this transaction has locked. Index:
// edge_counts_pkey, edge_shards_pkey. Locks: no further rows of counts; the shards of its own
// objects.
const addCountsSQL = `
WITH counted AS (
UPDATE /* followercounts.add */ edge_counts c
   SET incoming = c.incoming + d.incoming, outgoing = c.outgoing + d.outgoing, updated_at = now()
  FROM ` + deltasSQL + `
 WHERE c.tenant_id = d.tenant_id AND c.kind = @kind AND c.object_id = d.object_id
RETURNING c.tenant_id, c.object_id, c.incoming
), split AS (` + splitSQL + `)
SELECT count(*) FROM counted`

// gainCountsSQL is the usual case, in which no object loses an edge: it creates or changes the rows
// in one pass. Index: edge_counts_pkey, edge_shards_pkey. Locks: the objects' rows, in key order;
// the shards of its own objects.
const gainCountsSQL = `
WITH counted AS (
INSERT /* followercounts.gain */ INTO edge_counts AS c (tenant_id, kind, object_id, incoming, outgoing)
SELECT tenant_id, @kind, object_id, incoming, outgoing
  FROM ` + deltasSQL + `
 ORDER BY tenant_id, object_id COLLATE "C"
    ON CONFLICT (tenant_id, kind, object_id) DO UPDATE
       SET incoming = c.incoming + excluded.incoming, outgoing = c.outgoing + excluded.outgoing, updated_at = now()
RETURNING c.tenant_id, c.object_id, c.incoming
)` + splitSQL

// addCounts changes the counts, after all other writes of the kind. Its first statement locks all
// rows, in key order.
func (p Projection) addCounts(ctx context.Context, tx pgx.Tx, kind string, deltas map[object]Counts) error {
	losses := false
	for o, d := range deltas {
		if d == (Counts{}) {
			delete(deltas, o)
		}
		losses = losses || d.Incoming < 0 || d.Outgoing < 0
	}
	if len(deltas) == 0 {
		return nil
	}
	if !losses {
		if _, err := tx.Exec(ctx, gainCountsSQL, p.splitArgs(countArgs(kind, deltas))); err != nil {
			return fmt.Errorf("add to the counts of %d objects: %w", len(deltas), err)
		}
		return nil
	}
	rows, _ := tx.Query(ctx, holdCountsSQL, countArgs(kind, deltas))
	var o object
	if _, err := pgx.ForEachRow(rows, []any{&o.tenant, &o.id}, func() error {
		delete(deltas, o)
		return nil
	}); err != nil {
		return fmt.Errorf("lock the counts of %d objects: %w", len(deltas), err)
	}
	if len(deltas) == 0 {
		return nil
	}
	counted, _ := tx.Query(ctx, addCountsSQL, p.splitArgs(countArgs(kind, deltas)))
	got, err := pgx.CollectExactlyOneRow(counted, pgx.RowTo[int])
	if err != nil {
		return fmt.Errorf("add to the counts of %d objects: %w", len(deltas), err)
	}
	if got != len(deltas) {
		return fmt.Errorf("add to the counts of %d objects: the statement changed %d rows", len(deltas), got)
	}
	return nil
}

func countArgs(kind string, deltas map[object]Counts) postgres.Args {
	var tenants, incoming, outgoing []int64
	var objects []event.ID
	for o, d := range deltas {
		tenants, objects = append(tenants, o.tenant), append(objects, o.id)
		incoming, outgoing = append(incoming, d.Incoming), append(outgoing, d.Outgoing)
	}
	return postgres.Args{"kind": kind, "tenants": tenants, "objects": objects, "incoming": incoming, "outgoing": outgoing}
}
