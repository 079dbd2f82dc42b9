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

func (k *key) compare(o *key) int {
	if k.tenant != o.tenant {
		return cmp.Compare(k.tenant, o.tenant)
	}
	if k.from != o.from {
		return cmp.Compare(k.from, o.from)
	}
	return cmp.Compare(k.to, o.to)
}

// edge is a state of an edge.
type edge struct {
	key
	state
}

// batch has states of edges, by kind.
type batch map[string][]*edge

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

func (o object) compare(other object) int {
	return cmp.Or(cmp.Compare(o.tenant, other.tenant), cmp.Compare(o.id, other.id))
}

// Apply applies the events to edges, counts and ranks in the caller's transaction. A count changes
// by the difference between an edge's states before and after the batch. A payload that does not
// decode is a permanent error. Cost: two to five statements for each kind, for any number of
// events.
func (p Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	set := p.kinds()
	states, ranks := batch{}, ranking{}
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
		if err := states.put(e.TenantID, kind, &edge); err != nil {
			return event.Permanent(fmt.Errorf("event %s: %w", e.ID, err))
		}
	}
	return p.apply(ctx, tx, set, states, ranks)
}

// put stores a state of an edge.
func (b batch) put(tenant int64, kind kinds.Edge, e *event.Edge) error {
	s, err := stateOf(kind, e)
	b[kind.Name] = append(b[kind.Name], &edge{key{tenant, e.From, e.To}, s})
	return err
}

// last sorts edges by their keys, and drops all but the newest state of each.
func last(edges []*edge) []*edge {
	slices.SortFunc(edges, func(a, b *edge) int {
		if c := a.key.compare(&b.key); c != 0 {
			return c
		}
		return cmp.Compare(b.version, a.version)
	})
	return slices.CompactFunc(edges, func(a, b *edge) bool { return a.key == b.key })
}

// apply writes the batch kind by kind, in the order of names, and then the ranks. Most batches have
// one kind.
func (p Projection) apply(ctx context.Context, tx pgx.Tx, set *kinds.Set, b batch, ranks ranking) error {
	for _, name := range slices.Sorted(maps.Keys(b)) {
		k := set.Edges[name]
		c := newChanges(k, len(b[name]))
		if err := c.write(ctx, tx, last(b[name])); err != nil {
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

// newChanges returns those of a number of edges.
func newChanges(k kinds.Edge, edges int) *changes {
	c := &changes{kind: k, counts: make(map[object]Counts, edges), aggregates: make(map[aggregate]Sum)}
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

// newSQL writes edges at their first version if the projection has none of them. A new edge goes to
// a shard of its target (shards.go). Index: edge_lists_pkey, edge_shards_pkey. Locks: the new rows,
// in key order.
const newSQL = `
INSERT /* followercounts.new */ INTO edge_lists
       (tenant_id, kind, from_id, to_id, active, version, positioned_at, shard_id, filter, attributes)` + freshRows

const freshRows = `
SELECT i.tenant_id, @kind, i.from_id, i.to_id, i.active, i.version, i.positioned_at, i.hash & (coalesce(s.shards, 1) - 1), i.filter,
       i.attributes::jsonb
  FROM ` + edgesArg + `
  LEFT JOIN edge_shards s ON s.tenant_id = i.tenant_id AND s.kind = @kind AND s.object_id = i.to_id
 ORDER BY i.ord`

// freshSQL is newSQL for edges of which the projection may have some. These are as new or newer. It
// returns the others, whose objects gain an edge.
const freshSQL = `
INSERT /* followercounts.fresh */ INTO edge_lists
       (tenant_id, kind, from_id, to_id, active, version, positioned_at, shard_id, filter, attributes)` + freshRows + `
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

// write writes the edges, which are in key order, and adds the changes of their objects.
func (c *changes) write(ctx context.Context, tx pgx.Tx, edges []*edge) error {
	fresh, known := make([]*edge, 0, len(edges)), make([]*edge, 0, len(edges))
	for _, e := range edges {
		if e.version == 1 {
			fresh = append(fresh, e)
		} else {
			known = append(known, e)
		}
	}
	if err := c.writeFresh(ctx, tx, fresh); err != nil {
		return fmt.Errorf("write %d new edges: %w", len(fresh), err)
	}
	if err := c.writeKnown(ctx, tx, known); err != nil {
		return fmt.Errorf("write %d edges: %w", len(known), err)
	}
	return nil
}

// manyEdges is the number of edges from which newSQL pays for its savepoint.
const manyEdges = 100

// writeFresh writes edges at their first version. The projection has some of them only after a
// consumer went back, or after a repair. To look for each of many takes a quarter of the time of
// writing it. So writeFresh first takes all for new, and looks once one is not.
func (c *changes) writeFresh(ctx context.Context, tx pgx.Tx, edges []*edge) error {
	if len(edges) == 0 {
		return nil
	}
	args := c.edgeArgs(edges)
	if len(edges) >= manyEdges {
		var q pgx.Batch
		q.Queue("SAVEPOINT fresh")
		q.Queue(newSQL, args)
		q.Queue("RELEASE fresh")
		err := tx.SendBatch(ctx, &q).Close()
		if err == nil {
			for _, e := range edges {
				c.gain(e)
			}
			return nil
		}
		if !postgres.IsUnique(err, "") {
			return err
		}
		if _, err := tx.Exec(ctx, "ROLLBACK TO fresh"); err != nil {
			return err
		}
	}
	rows, _ := tx.Query(ctx, freshSQL, args)
	var k key
	_, err := pgx.ForEachRow(rows, []any{&k.tenant, (*string)(&k.from), (*string)(&k.to)}, func() error {
		at, _ := slices.BinarySearchFunc(edges, &k, func(e *edge, k *key) int { return e.key.compare(k) })
		c.gain(edges[at])
		return nil
	})
	return err
}

// gain adds an edge that the projection did not have.
func (c *changes) gain(e *edge) {
	if e.active {
		c.add(e.key, e.attributes, 1)
	}
}

func (c *changes) writeKnown(ctx context.Context, tx pgx.Tx, edges []*edge) error {
	if len(edges) == 0 {
		return nil
	}
	args := c.edgeArgs(edges)
	args["aggregated"] = len(c.integers)+len(c.enums) > 0
	rows, _ := tx.Query(ctx, edgesSQL, args)
	var ord int
	var before bool
	var was json.RawMessage
	_, err := pgx.ForEachRow(rows, []any{&ord, &before, &was}, func() error {
		e := edges[ord-1]
		switch {
		case before && e.active:
			to := object{e.tenant, e.to}
			c.sum(to, was, -1)
			c.sum(to, e.attributes, 1)
		case before:
			c.add(e.key, was, -1)
		case e.active:
			c.add(e.key, e.attributes, 1)
		}
		return nil
	})
	return err
}

// edgeArgs returns the arguments of the statements that write edges.
func (c *changes) edgeArgs(edges []*edge) postgres.Args {
	n := len(edges)
	tenants, froms, tos := make([]int64, n), make([]string, n), make([]string, n)
	actives, versions, positions, hashes := make([]bool, n), make([]int64, n), make([]time.Time, n), make([]int32, n)
	var filters, attributes []*string // nil if no edge has attributes
	for i, e := range edges {
		tenants[i], froms[i], tos[i] = e.tenant, string(e.from), string(e.to)
		actives[i], versions[i], positions[i], hashes[i] = e.active, e.version, e.positionedAt, shardHash(e.from)
		if e.attributes == nil {
			continue
		}
		if attributes == nil {
			filters, attributes = make([]*string, n), make([]*string, n)
		}
		text := string(e.attributes)
		filters[i], attributes[i] = e.filter, &text
	}
	return postgres.Args{
		"kind": c.kind.Name, "tenants": tenants, "froms": froms, "tos": tos, "actives": actives, "versions": versions,
		"positions": positions, "hashes": hashes, "filters": filters, "attributes": attributes,
	}
}

// deltasSQL has the arguments of the statements that change counts, as rows, in key order.
const deltasSQL = `unnest(@tenants::bigint[], @objects::text[], @incoming::bigint[], @outgoing::bigint[])
         WITH ORDINALITY AS d(tenant_id, object_id, incoming, outgoing, ord)`

// holdCountsSQL creates the new objects with their counts, and locks the others, all in key order.
// It returns the new ones. WHERE false locks a row without writing it. An object that loses an edge
// already has a row. So a new one never gets less than 0. greatest satisfies the CHECK on the
// proposed row, which PostgreSQL evaluates before it notices the conflict. Index: edge_counts_pkey.
// Locks: the objects' rows, in key order.
const holdCountsSQL = `
INSERT /* followercounts.hold */ INTO edge_counts AS c (tenant_id, kind, object_id, incoming, outgoing)
SELECT tenant_id, @kind, object_id, greatest(incoming, 0), greatest(outgoing, 0)
  FROM ` + deltasSQL + `
 ORDER BY ord
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
 ORDER BY ord
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
		if err := postgres.Later(ctx, tx, gainCountsSQL, p.splitArgs(countArgs(kind, deltas))); err != nil {
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
	n := len(deltas)
	tenants, objects := make([]int64, 0, n), make([]string, 0, n)
	incoming, outgoing := make([]int64, 0, n), make([]int64, 0, n)
	for _, o := range slices.SortedFunc(maps.Keys(deltas), object.compare) { // much cheaper here than in the database
		d := deltas[o]
		tenants, objects = append(tenants, o.tenant), append(objects, string(o.id))
		incoming, outgoing = append(incoming, d.Incoming), append(outgoing, d.Outgoing)
	}
	return postgres.Args{"kind": kind, "tenants": tenants, "objects": objects, "incoming": incoming, "outgoing": outgoing}
}
