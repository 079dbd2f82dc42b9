package projections

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/kinds"
)

// EdgesOf are the edges of a kind that have an object at one of their ends.
type EdgesOf struct {
	TenantID int64
	Kind     kinds.Edge
	Object   int64
	End      kinds.End
}

// Pair names an edge of a kind within its tenant. The zero Pair is before all others.
type Pair struct{ From, To int64 }

const (
	pairsLimit  = 500    // that one step finds
	pairsWindow = 20_000 // rows that one step walks over for those to an object: there is no index of what is removed by target
)

// pairsFromSQL reads the next pairs from an object.
// Index: the table's key, one range.   Locks: none.
const pairsFromSQL = `
SELECT /* projections.pairs */ DISTINCT {from}, {to}, true FROM {rows} WHERE {from} = @object::bigint AND {to} > @to::bigint ORDER BY {from}, {to} LIMIT @limit`

// pairsToSQL reads the pairs to an object among the next rows, and the last of these.
// Index: the table's key, one range.   Locks: none.
const pairsToSQL = `
WITH next AS MATERIALIZED (
  SELECT {from} AS a, {to} AS b FROM {rows} WHERE ({from}, {to}) > (@from::bigint, @to::bigint) ORDER BY {from}, {to} LIMIT @window
), mine AS MATERIALIZED (
  SELECT DISTINCT a, b FROM next WHERE b = @object::bigint ORDER BY a LIMIT @limit
)
SELECT /* projections.pairs */ a, b, true AS hit FROM mine
UNION ALL
(SELECT a, b, false FROM next WHERE (SELECT count(*) FROM mine) < @limit ORDER BY a DESC, b DESC LIMIT 1)
ORDER BY a, b, hit`

// Pairs reads the next pairs of a projection's table behind after. rows are the tenant's of the kind, as a FROM has them: a table with a condition of @tenant and
// @kind; from and to are its columns. next is nil at the end.
func (of EdgesOf) Pairs(ctx context.Context, tx pgx.Tx, rows, from, to string, after Pair) (all []Pair, next *Pair, err error) {
	sql := pairsFromSQL
	if of.End == kinds.To {
		sql = pairsToSQL
	}
	sql = strings.NewReplacer("{rows}", rows, "{from}", from, "{to}", to).Replace(sql)
	var p Pair
	var is bool
	found, _ := tx.Query(ctx, sql, pgx.NamedArgs{"tenant": of.TenantID, "kind": of.Kind.Name, "object": of.Object, "from": after.From, "to": after.To,
		"limit": pairsLimit, "window": pairsWindow})
	if _, err := pgx.ForEachRow(found, []any{&p.From, &p.To, &is}, func() error {
		next = new(p)
		if is {
			all = append(all, p)
		}
		return nil
	}); err != nil {
		return nil, nil, fmt.Errorf("look for pairs of %s %s %d: %w", of.Kind.Name, of.End, of.Object, err)
	}
	return all, next, nil
}

// Columns are the pairs as two arrays.
func Columns(all []Pair) (froms, tos []int64) {
	froms, tos = make([]int64, len(all)), make([]int64, len(all))
	for i, p := range all {
		froms[i], tos[i] = p.From, p.To
	}
	return froms, tos
}
