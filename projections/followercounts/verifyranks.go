package followercounts

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// sumRow is an aggregate of a kind.
type sumRow struct {
	TenantID         int64
	Object           event.ID
	Attribute, Value string
	Count, Sum       int64
}

func (r *sumRow) compare(o *sumRow) int {
	return cmp.Or(cmp.Compare(r.TenantID, o.TenantID), cmp.Compare(r.Object, o.Object), cmp.Compare(r.Attribute, o.Attribute),
		cmp.Compare(r.Value, o.Value))
}

const sumOrder = ` ORDER BY tenant_id, object_id, attribute COLLATE "C", value COLLATE "C"`

// sumRowsSQL reads the projection's aggregates of a kind. To a reader, a missing row means zero.
// Index: none, all rows. Locks: none.
const sumRowsSQL = `
SELECT /* followercounts.verify */ tenant_id, object_id, attribute, value, count, sum
  FROM edge_aggregates WHERE kind = @kind AND (count <> 0 OR sum <> 0)` + sumOrder

// truthSumsSQL adds up all active edges of a kind of the truth. The server sorts them, on disk if
// they do not fit in memory. Index: none. Locks: none.
var truthSumsSQL = `SELECT * FROM (` + store.SumEdgesSQL("edges", "e.status = 'ACTIVE'") + `) sums` + sumOrder

// verifySums compares the aggregates of a kind with those of the truth's edges.
func (c comparison) verifySums(ctx context.Context, truth, projection *pgxpool.Pool) (checked int64, err error) {
	integers, enums := aggregated(c.kind)
	if len(integers)+len(enums) == 0 {
		return 0, nil
	}
	err = projections.Compare(
		projections.Rows[sumRow](ctx, truth, truthSumsSQL,
			pgx.StrictNamedArgs{"kind": c.kind.Name, "integers": integers, "enums": enums}),
		projections.Rows[sumRow](ctx, projection, sumRowsSQL, pgx.StrictNamedArgs{"kind": c.kind.Name}),
		(*sumRow).compare, func(want, got *sumRow) {
			checked++
			of := cmp.Or(want, got)
			c.differ(c.kind.To, object{of.TenantID, of.Object}, sumField(of.Attribute, of.Value), sumOf(of.Value, want),
				sumOf(of.Value, got))
		})
	return checked, err
}

func sumField(attribute, value string) string {
	if value == "" {
		return "aggregate of " + attribute
	}
	return "count of " + attribute + " " + strconv.Quote(value)
}

// sumOf describes an aggregate, of one value if value is not empty.
func sumOf(value string, r *sumRow) string {
	if r == nil {
		r = &sumRow{}
	}
	if value != "" {
		return fmt.Sprint(r.Count)
	}
	return fmt.Sprintf("%d with a sum of %d", r.Count, r.Sum)
}

// windowSumsSQL compares the aggregates of objects that have few edges with the edges. One
// statement sees both of one moment. Index: edge_counts_pkey, edge_lists_reverse_idx,
// edge_aggregates_pkey. Locks: none.
var windowSumsSQL = `
WITH o AS MATERIALIZED (
  SELECT c.tenant_id, c.object_id
    FROM (SELECT DISTINCT * FROM unnest(@tenants::bigint[], @objects::text[]) AS u(tenant_id, object_id)) u
    JOIN edge_counts c ON c.tenant_id = u.tenant_id AND c.kind = @kind AND c.object_id = u.object_id AND c.incoming < @few
), want AS (` + store.SumEdgesSQL("edge_lists", `e.active AND (e.tenant_id, e.to_id) IN (SELECT tenant_id, object_id FROM o)`) + `
), got AS (
  SELECT a.tenant_id, a.object_id, a.attribute, a.value, a.count, a.sum
    FROM o JOIN edge_aggregates a ON a.tenant_id = o.tenant_id AND a.object_id = o.object_id AND a.kind = @kind
   WHERE a.count <> 0 OR a.sum <> 0
)
SELECT /* followercounts.window_sums */ tenant_id, object_id, attribute, value, coalesce(w.count, 0), coalesce(w.sum, 0),
       coalesce(g.count, 0), coalesce(g.sum, 0)
  FROM want w FULL JOIN got g USING (tenant_id, object_id, attribute, value)
 WHERE (w.count, w.sum) IS DISTINCT FROM (g.count, g.sum)`

func (c comparison) windowSums(ctx context.Context, projection *pgxpool.Pool, seen []object) error {
	integers, enums := aggregated(c.kind)
	if len(integers)+len(enums) == 0 {
		return nil
	}
	args := objectArgs(c.kind.Name, seen)
	args["few"], args["integers"], args["enums"] = fewEdges, integers, enums
	rows, _ := projection.Query(ctx, windowSumsSQL, args)
	var want, got sumRow
	if _, err := pgx.ForEachRow(rows, []any{&want.TenantID, &want.Object, &want.Attribute, &want.Value, &want.Count, &want.Sum,
		&got.Count, &got.Sum}, func() error {
		c.differ(c.kind.To, object{want.TenantID, want.Object}, sumField(want.Attribute, want.Value), sumOf(want.Value, &want),
			sumOf(want.Value, &got))
		return nil
	}); err != nil {
		return fmt.Errorf("compare the aggregates of a window: %w", err)
	}
	return nil
}

// scoreRow is the score of a child.
type scoreRow struct {
	TenantID int64
	Child    string
	Score    int64
}

// scoreRowsSQL reads the scores of a kind of children. Index: none, all rows. Locks: none.
const scoreRowsSQL = `
SELECT /* followercounts.verify */ tenant_id, child_id::text, score
  FROM child_ranks WHERE kind = @kind AND score <> 0 ORDER BY tenant_id, child_id`

// truthScoresSQL computes the scores from the truth's edges. Index: none, a sort. Locks: none.
const truthScoresSQL = `
SELECT /* followercounts.verify */ tenant_id, to_id, score
  FROM (SELECT tenant_id, to_id,
               CASE WHEN @attribute = '' THEN count(*)
                    ELSE coalesce(sum(value) FILTER (WHERE abs(value) <= @most), 0)::bigint
               END AS score
          FROM (SELECT tenant_id, to_id, CASE WHEN attributes ->> @attribute ~ '^-?[0-9]{1,10}$'
                                               AND jsonb_typeof(attributes -> @attribute) = 'number'
                                              THEN (attributes ->> @attribute)::bigint END AS value
                  FROM edges WHERE kind = @kind AND status = 'ACTIVE') e
         GROUP BY tenant_id, to_id) s
 WHERE score <> 0 ORDER BY tenant_id, to_id`

// verifyScores compares the scores of the children that the kind ranks with the truth's edges.
func (c comparison) verifyScores(ctx context.Context, child kinds.Child, truth, projection *pgxpool.Pool) (checked int64, err error) {
	attribute, _ := c.kind.Score()
	var none scoreRow
	err = projections.Compare(
		projections.Rows[scoreRow](ctx, truth, truthScoresSQL, pgx.StrictNamedArgs{"kind": c.kind.Name, "attribute": attribute,
			"most": kinds.MaxAggregate}),
		projections.Rows[scoreRow](ctx, projection, scoreRowsSQL, pgx.StrictNamedArgs{"kind": child.Name}),
		func(a, b *scoreRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.Child, b.Child))
		},
		func(want, got *scoreRow) {
			checked++
			of := cmp.Or(want, got)
			c.differ(c.kind.To, object{of.TenantID, event.ID(of.Child)}, "score", cmp.Or(want, &none).Score, cmp.Or(got, &none).Score)
		})
	return checked, err
}

// windowScoresSQL compares the scores of objects with their counts and aggregates.
// Index: child_ranks_pkey, edge_aggregates_pkey, edge_counts_pkey. Locks: none.
const windowScoresSQL = `
SELECT /* followercounts.window_scores */ s.tenant_id, s.child_id::text, s.score, coalesce(r.score, 0)
  FROM (` + scoresSQL + `) s
  LEFT JOIN child_ranks r ON r.tenant_id = s.tenant_id AND r.child_id = s.child_id AND r.kind = @child
 WHERE s.score <> coalesce(r.score, 0)`

func (c comparison) windowScores(ctx context.Context, child kinds.Child, projection *pgxpool.Pool, seen []object) error {
	rows, _ := projection.Query(ctx, windowScoresSQL, scoreArgs(c.kind, child.Name, seen))
	var row scoreRow
	var got int64
	if _, err := pgx.ForEachRow(rows, []any{&row.TenantID, &row.Child, &row.Score, &got}, func() error {
		c.differ(c.kind.To, object{row.TenantID, event.ID(row.Child)}, "score", row.Score, got)
		return nil
	}); err != nil {
		return fmt.Errorf("compare the scores of a window: %w", err)
	}
	return nil
}

// rankRow is a ranked child, without its score.
type rankRow struct {
	TenantID  int64
	Child     string
	Object    event.ID
	CreatedAt time.Time
	Visible   bool
	Version   int64
}

func (r *rankRow) compare(o *rankRow) int {
	return cmp.Or(cmp.Compare(r.TenantID, o.TenantID), cmp.Compare(r.Child, o.Child))
}

func wantedRank(s *store.State[event.Child]) *rankRow {
	c := &s.Object
	return &rankRow{s.TenantID, c.ID, c.Parent, c.CreatedAt.Time, c.Visible(), c.Version}
}

// rankRowsSQL reads a page of the ranked children of a kind after one of them. Index:
// child_ranks_pkey, one range; few rows are of another kind, or of a child without an event.
// Locks: none.
const rankRowsSQL = `
SELECT /* followercounts.verify */ tenant_id, child_id::text AS child, object_id, created_at, visible, version
  FROM child_ranks
 WHERE (tenant_id, child_id) > (@tenant::bigint, @child::uuid) AND kind = @kind AND version > 0
 ORDER BY tenant_id, child_id LIMIT @limit`

const noChild = "00000000-0000-0000-0000-000000000000"

// rankRows yields the ranked children of a kind after one of them, at most limit (0: all), with a
// statement for each page.
func rankRows(ctx context.Context, projection *pgxpool.Pool, kind string, after rankRow, limit int) iter.Seq2[*rankRow, error] {
	return pages(ctx, projection, rankRowsSQL, after, limit, func(after rankRow) pgx.NamedArgs {
		return pgx.NamedArgs{"kind": kind, "tenant": after.TenantID, "child": cmp.Or(after.Child, noChild)}
	})
}

// verifyRanks compares the ranked children of a kind with the truth's.
func (p Projection) verifyRanks(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child,
	report func(projections.Difference)) (checked int64, err error) {
	err = projections.Compare(projections.Of(store.ScanChildren(ctx, truth, k, nil, 0), wantedRank),
		rankRows(ctx, projection, k.Name, rankRow{}, 0), (*rankRow).compare, func(want, got *rankRow) {
			checked++
			diffRank(k, want, got).Report(report)
		})
	return checked, err
}

// windowRanks compares a window of the ranked children of a kind.
func windowRanks(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child, after rankRow, limit int,
	report func(projections.Difference)) (checked int64, last *rankRow, err error) {
	from := &store.State[event.Child]{TenantID: after.TenantID, Object: event.Child{ID: after.Child}}
	last, err = projections.Window(projections.Of(store.ScanChildren(ctx, truth, k, from, limit), wantedRank),
		rankRows(ctx, projection, k.Name, after, limit), limit, (*rankRow).compare, func(want, got *rankRow) {
			checked++
			diffRank(k, want, got).Report(report)
		})
	return checked, last, err
}

func diffRank(k kinds.Child, want, got *rankRow) projections.Diff {
	of := cmp.Or(want, got)
	var none rankRow
	return projections.NewDiff(projections.Difference{
		Projection: Name, TenantID: of.TenantID, Entity: fmt.Sprintf("rank of %s %s", k.Name, of.Child),
		Key:         projections.Key{Type: k.Name, TenantID: of.TenantID, Aggregate: of.Object, Child: of.Child},
		WantVersion: cmp.Or(want, &none).Version, GotVersion: cmp.Or(got, &none).Version,
	}, want, got, func(want, got *rankRow) []projections.Field {
		at := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
		return []projections.Field{
			projections.Compared("version", want.Version, got.Version),
			projections.Compared(k.Parent, want.Object, got.Object),
			projections.Compared("created_at", at(want.CreatedAt), at(got.CreatedAt)),
			projections.Compared("visible", want.Visible, got.Visible),
		}
	})
}
