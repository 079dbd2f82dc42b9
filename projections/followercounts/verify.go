package followercounts

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"reflect"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// edgeRow is an edge of one kind.
type edgeRow struct {
	TenantID        int64
	From, To        event.ID
	Active          bool
	Version         int64
	PositionedAt    time.Time
	Filter          *string
	Attributes      []byte
	ShardID, Shards int32 // the edge's shard, and the number of its target's shards; the truth has no shards
}

// wanted returns a function that turns an edge of the truth into the row that the projection should
// have.
func wanted(k kinds.Edge) func(*store.State[event.Edge]) *edgeRow {
	return func(s *store.State[event.Edge]) *edgeRow {
		e := &s.Object
		kept, _ := stateOf(k, e) // no error: attributes in the truth are valid JSON objects
		return &edgeRow{s.TenantID, e.From, e.To, kept.active, kept.version, kept.positionedAt,
			kept.filter, kept.attributes, 0, 1}
	}
}

func (r *edgeRow) compare(o *edgeRow) int {
	return cmp.Or(cmp.Compare(r.TenantID, o.TenantID), cmp.Compare(r.From, o.From), cmp.Compare(r.To, o.To))
}

// edgeRowsSQL reads a page of the projection's edges of a kind after one of them. It reads tenant
// by tenant and skips other kinds, because a key has the tenant before the kind. The rows come in
// the order of the loops, because no plan reverses a recursion and a limited LATERAL. Index:
// edge_lists_pkey, a probe for each tenant and one range for each that has edges of the kind;
// edge_shards, which is small. Locks: none.
const edgeRowsSQL = `
WITH RECURSIVE tenants AS (
  (SELECT tenant_id FROM edge_lists WHERE tenant_id >= @tenant::bigint ORDER BY tenant_id LIMIT 1)
  UNION ALL
  SELECT (SELECT e.tenant_id FROM edge_lists e WHERE e.tenant_id > t.tenant_id ORDER BY e.tenant_id LIMIT 1) FROM tenants t
  WHERE t.tenant_id IS NOT NULL
)
SELECT /* followercounts.verify */ t.tenant_id, page.*
  FROM tenants t
 CROSS JOIN LATERAL (
   SELECT e.from_id, e.to_id, e.active, e.version, e.positioned_at, e.filter, e.attributes,
          e.shard_id, coalesce((SELECT s.shards FROM edge_shards s
                                 WHERE s.tenant_id = e.tenant_id AND s.kind = e.kind AND s.object_id = e.to_id), 1)::int
     FROM edge_lists e
    WHERE e.tenant_id = t.tenant_id AND e.kind = @kind
      AND (e.from_id, e.to_id) > (CASE WHEN t.tenant_id = @tenant::bigint THEN @from::text ELSE '' END,
                                  CASE WHEN t.tenant_id = @tenant::bigint THEN @to::text ELSE '' END)
    ORDER BY e.from_id, e.to_id LIMIT @limit::bigint) page
 LIMIT @limit::bigint`

// pageRows is the number of edges in memory at a time.
const pageRows = 4000

// edges yields the projection's edges of a kind after one of them, at most limit (0: all).
func edges(ctx context.Context, projection *pgxpool.Pool, kind string, after edgeRow, limit int) iter.Seq2[*edgeRow, error] {
	return pages(ctx, projection, edgeRowsSQL, after, limit, func(after edgeRow) pgx.NamedArgs {
		return pgx.NamedArgs{"tenant": after.TenantID, "kind": kind, "from": after.From, "to": after.To}
	})
}

// pages yields the rows after one of them, at most limit (0: all), with a statement for each page.
func pages[T any](ctx context.Context, projection *pgxpool.Pool, sql string, after T, limit int,
	args func(after T) pgx.NamedArgs) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		for page := cmp.Or(limit, pageRows); ; {
			with := postgres.Args(args(after))
			with["limit"] = page
			rows, _ := projection.Query(ctx, sql, with)
			all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[T])
			if err != nil {
				yield(nil, fmt.Errorf("read a page of %d rows: %w", page, err))
				return
			}
			for _, row := range all {
				if after = *row; !yield(row, nil) {
					return
				}
			}
			if len(all) < page || limit != 0 {
				return
			}
		}
	}
}

// countRowsSQL reads every object of the projection that has edges of a kind. To a reader, a
// missing row means zero. Index: edge_counts_pkey, all of it. Locks: none.
const countRowsSQL = `
SELECT /* followercounts.verify */ tenant_id, object_id, incoming, outgoing
  FROM edge_counts WHERE kind = @kind AND (incoming <> 0 OR outgoing <> 0) ORDER BY tenant_id, object_id`

// Verify compares edges, counts, aggregates and ranks of all kinds with the truth, reports every
// difference, and returns the number of compared rows. An edge must be in an existing shard of its
// target, or no page would show it. The shard's number does not matter: after different batches of
// the same events two projections may differ in it. Verify computes the wanted counts from the
// truth, not from the edges. An event that is not applied yet causes a difference, so the caller
// waits for a consumer's lag of 0. Both pools act as the system role. Memory does not grow with the
// tables.
func (p Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool,
	report func(projections.Difference)) (checked int64, err error) {
	for _, k := range p.kinds().AllEdges() {
		c, named := comparison{k, report}, pgx.StrictNamedArgs{"kind": k.Name}
		err := projections.Compare(projections.Of(store.ScanEdges(ctx, truth, k, nil, 0), wanted(k)),
			edges(ctx, projection, k.Name, edgeRow{}, 0), (*edgeRow).compare, func(want, got *edgeRow) {
				checked++
				diffEdge(k, want, got).Report(report)
			})
		if err != nil {
			return checked, fmt.Errorf("verify edges of %s: %w", k.Name, err)
		}
		err = projections.Compare(projections.Rows[store.Counts](ctx, truth, store.CountEdgesSQL, named),
			projections.Rows[store.Counts](ctx, projection, countRowsSQL, named), func(a, b *store.Counts) int {
				return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.ID, b.ID))
			},
			func(want, got *store.Counts) {
				checked++
				c.counts(want, got)
			})
		if err != nil {
			return checked, fmt.Errorf("verify counts of %s: %w", k.Name, err)
		}
		n, err := c.verifySums(ctx, truth, projection)
		checked += n
		if child, ok := p.kinds().Ranks(k); ok && err == nil {
			n, err = c.verifyScores(ctx, child, truth, projection)
			checked += n
		}
		if err != nil {
			return checked, fmt.Errorf("verify aggregates of %s: %w", k.Name, err)
		}
	}
	for _, k := range ranked(p.kinds()) {
		n, err := p.verifyRanks(ctx, truth, projection, k, report)
		checked += n
		if err != nil {
			return checked, fmt.Errorf("verify the ranks of %s: %w", k.Plural, err)
		}
	}
	return checked, nil
}

// comparison reports differences in the counts of one kind.
type comparison struct {
	kind   kinds.Edge
	report func(projections.Difference)
}

// diffEdge compares an edge of both sides, either of which may be nil.
func diffEdge(k kinds.Edge, want, got *edgeRow) projections.Diff {
	of := cmp.Or(want, got)
	var none edgeRow
	return projections.NewDiff(projections.Difference{
		Projection: Name, TenantID: of.TenantID, Entity: fmt.Sprintf("%s %s/%s", k.Name, of.From, of.To),
		Key:         projections.Key{Type: k.Name, TenantID: of.TenantID, Aggregate: of.To, Other: of.From},
		WantVersion: cmp.Or(want, &none).Version, GotVersion: cmp.Or(got, &none).Version,
	}, want, got, fieldsOf)
}

func fieldsOf(want, got *edgeRow) []projections.Field {
	at := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
	all := []projections.Field{
		projections.Compared("version", want.Version, got.Version),
		projections.Compared("active", want.Active, got.Active),
		projections.Compared("positioned_at", at(want.PositionedAt), at(got.PositionedAt)),
		projections.Compared("filter", orNone(want.Filter), orNone(got.Filter)),
	}
	attributes := projections.Field{Name: "attributes", Want: string(want.Attributes), Got: string(got.Attributes)}
	if sameJSON(want.Attributes, got.Attributes) {
		attributes.Got = attributes.Want
	}
	shard := projections.Field{Name: "shard_id", Want: fmt.Sprint(got.ShardID), Got: fmt.Sprint(got.ShardID)}
	if got.ShardID < 0 || got.ShardID >= got.Shards {
		shard.Want = fmt.Sprintf("0 to %d", got.Shards-1)
	}
	return append(all, attributes, shard)
}

// counts reports differences in the counts, under the names that the kind gives them: followers and
// following.
func (c comparison) counts(want, got *store.Counts) {
	var zero store.Counts
	present := want
	if want == nil {
		want, present = &zero, got
	}
	if got == nil {
		got = &zero
	}
	o := object{present.TenantID, present.ID}
	c.differ(c.kind.To, o, c.kind.Reverse, want.Incoming, got.Incoming)
	c.differ(c.kind.From, o, c.kind.Forward, want.Outgoing, got.Outgoing)
}

// differ reports a difference in what edges say about an object of a type.
func (c comparison) differ(objectType string, o object, field string, want, got any) {
	projections.Difference{
		Projection: Name, TenantID: o.tenant, Entity: fmt.Sprintf("counts of %s %s", objectType, o.id),
		Key: projections.Key{Type: c.kind.Name, TenantID: o.tenant, Aggregate: o.id},
	}.Differ(c.report, field, want, got)
}

func orNone(s *string) string {
	if s == nil {
		return "absent"
	}
	return *s
}

// sameJSON reports whether two JSON texts have the same value.
func sameJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// Tables returns the projection's tables, which a replay rebuilds.
func (Projection) Tables() []string {
	return []string{"edge_lists", "edge_shards", "edge_counts", "edge_aggregates", "child_ranks"}
}

// Truth yields one event per edge and per ranked child of the truth, with its current state, in
// bounded memory. The pool acts as the system role.
func (p Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	var all []iter.Seq2[event.Event, error]
	for _, k := range p.kinds().AllEdges() {
		all = append(all, store.EdgeEvents(k, store.ScanEdges(ctx, truth, k, nil, 0)))
	}
	for _, k := range ranked(p.kinds()) {
		all = append(all, store.ChildEvents(k, store.ScanChildren(ctx, truth, k, nil, 0)))
	}
	return projections.Concat(all...)
}

// ranked returns the kinds of children that edges rank.
func ranked(set *kinds.Set) []kinds.Child {
	return slices.DeleteFunc(set.AllChildren(), func(k kinds.Child) bool { return k.RankedBy == "" })
}
