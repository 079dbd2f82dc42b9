package projections

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// EdgesOf selects the edges of a kind that have an object at one end.
type EdgesOf struct {
	TenantID int64
	Kind     kinds.Edge
	Object   event.ID
	End      kinds.End
}

// Pair names an edge of a kind within its tenant. The zero Pair is before all others.
type Pair struct{ From, To event.ID }

const (
	pairsLimit  = 500    // pairs that one step returns
	pairsWindow = 20_000 // rows that one step scans for edges to an object: no index by target has removed edges
)

// pairsFromSQL reads the next pairs that begin at an object. Index: the table's key, one range.
// Locks: none.
const pairsFromSQL = `
SELECT /* projections.pairs */ DISTINCT {from}, {to}, true FROM {rows} WHERE {from} = @object::text AND {to} > @to::text
 ORDER BY {from}, {to} LIMIT @limit`

// pairsToSQL scans the next rows, and returns the pairs that end at an object and the last row.
// Index: the table's key, one range. Locks: none.
const pairsToSQL = `
WITH next AS MATERIALIZED (
  SELECT {from} AS a, {to} AS b FROM {rows} WHERE ({from}, {to}) > (@from::text, @to::text) ORDER BY {from}, {to} LIMIT @window
), mine AS MATERIALIZED (
  SELECT DISTINCT a, b FROM next WHERE b = @object::text ORDER BY a LIMIT @limit
)
SELECT /* projections.pairs */ a, b, true AS hit FROM mine
UNION ALL
(SELECT a, b, false FROM next WHERE (SELECT count(*) FROM mine) < @limit ORDER BY a DESC, b DESC LIMIT 1)
ORDER BY a, b, hit`

// Pairs returns the next pairs in a projection's table after the given one. rows is the FROM item
// that selects the tenant's rows of the kind: a table with a condition of @tenant and @kind. from
// and to are its columns. next is nil at the end.
func (of EdgesOf) Pairs(ctx context.Context, tx pgx.Tx, rows, from, to string, after Pair) (all []Pair, next *Pair, err error) {
	sql := pairsFromSQL
	if of.End == kinds.To {
		sql = pairsToSQL
	}
	sql = strings.NewReplacer("{rows}", rows, "{from}", from, "{to}", to).Replace(sql)
	var p Pair
	var is bool
	found, _ := tx.Query(ctx, sql, pgx.NamedArgs{"tenant": of.TenantID, "kind": of.Kind.Name, "object": of.Object,
		"from": after.From, "to": after.To, "limit": pairsLimit, "window": pairsWindow})
	if _, err := pgx.ForEachRow(found, []any{&p.From, &p.To, &is}, func() error {
		next = new(p)
		if is {
			all = append(all, p)
		}
		return nil
	}); err != nil {
		return nil, nil, fmt.Errorf("read the pairs of %s %s %s: %w", of.Kind.Name, of.End, of.Object, err)
	}
	return all, next, nil
}

// Columns returns the pairs as two arrays.
func Columns(all []Pair) (froms, tos []event.ID) {
	froms, tos = make([]event.ID, len(all)), make([]event.ID, len(all))
	for i, p := range all {
		froms[i], tos[i] = p.From, p.To
	}
	return froms, tos
}
