package followercounts

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// Pair names an edge of a kind.
type Pair struct{ From, To event.ID }

// Relation is the relation of the two objects of a pair by edges of a kind.
type Relation struct {
	There        bool            // an active edge leads from the pair's From to its To
	Back         bool            // an active edge leads from its To to its From, which are of one object type
	PositionedAt time.Time       // when There last became true; zero unless it is
	Attributes   json.RawMessage // of There's edge; nil if it has none
}

// relationsSQL finds the edges of each pair and kind, in both directions if both ends are of one
// object type. LIMIT makes the planner use one probe for each. Index: edge_lists_pkey, one or two
// probes for each pair and kind. Locks: none.
const relationsSQL = `
SELECT /* followercounts.relations */ p.ord::int, k.ord::int, there.positioned_at, CASE WHEN k.attributed THEN there.attributes END,
       back.active IS NOT NULL
  FROM unnest(@froms::text[], @tos::text[]) WITH ORDINALITY AS p(from_id, to_id, ord)
 CROSS JOIN unnest(@kinds::text[], @mutual::boolean[], @attributed::boolean[]) WITH ORDINALITY AS k(kind, mutual, attributed, ord)
  LEFT JOIN LATERAL (SELECT positioned_at, attributes FROM edge_lists e
                      WHERE e.tenant_id = current_setting('tidings.tenant')::bigint AND e.kind = k.kind
                        AND e.from_id = p.from_id AND e.to_id = p.to_id AND e.active LIMIT 1) there ON true
  LEFT JOIN LATERAL (SELECT active FROM edge_lists e
                      WHERE k.mutual AND e.tenant_id = current_setting('tidings.tenant')::bigint AND e.kind = k.kind
                        AND e.from_id = p.to_id AND e.to_id = p.from_id AND e.active LIMIT 1) back ON true`

// Relations returns the relations of each pair, in the order of pairs, by edges of each kind, in
// the order of all. A relation has attributes if the kind has. The relation of an unknown object is
// empty. The transaction's tenant is set. Cost: one statement with one or two index probes for each
// pair and kind.
func Relations(ctx context.Context, tx pgx.Tx, all []kinds.Edge, pairs []Pair) ([][]Relation, error) {
	froms, tos := make([]event.ID, len(pairs)), make([]event.ID, len(pairs))
	relations := make([][]Relation, len(pairs))
	for i, p := range pairs {
		froms[i], tos[i], relations[i] = p.From, p.To, make([]Relation, len(all))
	}
	names, mutual, attributed := make([]string, len(all)), make([]bool, len(all)), make([]bool, len(all))
	for i, k := range all {
		names[i], mutual[i], attributed[i] = k.Name, k.From == k.To, len(k.Attributes) > 0
	}
	rows, _ := tx.Query(ctx, relationsSQL, postgres.Args{"kinds": names, "mutual": mutual, "attributed": attributed, "froms": froms,
		"tos": tos})
	var pair, kind int
	var since *time.Time
	var r Relation
	if _, err := pgx.ForEachRow(rows, []any{&pair, &kind, &since, &r.Attributes, &r.Back}, func() error {
		if since != nil {
			r.There, r.PositionedAt = true, *since
		}
		relations[pair-1][kind-1] = r
		r = Relation{} // the attributes of the next row need a buffer of their own
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the relations of %d pairs: %w", len(pairs), err)
	}
	return relations, nil
}

// MutualsCap is the largest number of edges that Mutuals reads, either from one object or to the
// other.
const MutualsCap = 5000

// mutualsOfOutgoingSQL reads the objects to which @id leads, newest first, and keeps those that
// lead to @other. Index: edge_lists_forward_idx, one range of at most cap rows; edge_lists_pkey, a
// probe for each. Locks: none.
const mutualsOfOutgoingSQL = `
SELECT /* followercounts.mutuals_of_outgoing */ known.id, known.positioned_at
  FROM (SELECT to_id AS id, positioned_at FROM edge_lists
         WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND from_id = @id AND active
         ORDER BY positioned_at DESC, to_id DESC LIMIT @cap) known
 CROSS JOIN LATERAL (SELECT FROM edge_lists e
                      WHERE e.tenant_id = current_setting('tidings.tenant')::bigint AND e.kind = @kind
                        AND e.from_id = known.id AND e.to_id = @other AND e.active LIMIT 1) leads
 ORDER BY known.positioned_at DESC, known.id DESC
 LIMIT @limit`

// mutualsOfIncomingSQL reads the objects that lead to @other, and keeps those to which @id leads.
// Index: edge_lists_reverse_idx, one range of at most cap rows; edge_lists_pkey, a probe for each.
// Locks: none.
const mutualsOfIncomingSQL = `
SELECT /* followercounts.mutuals_of_incoming */ origins.id, known.positioned_at
  FROM (SELECT from_id AS id FROM edge_lists
         WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND to_id = @other AND active LIMIT @cap) origins
 CROSS JOIN LATERAL (SELECT positioned_at FROM edge_lists e
                      WHERE e.tenant_id = current_setting('tidings.tenant')::bigint AND e.kind = @kind
                        AND e.from_id = @id AND e.to_id = origins.id AND e.active LIMIT 1) known
 ORDER BY known.positioned_at DESC, origins.id DESC
 LIMIT @limit`

// Mutuals returns up to limit objects to which id leads and which lead to other, by edges of the
// kind. They have the order of id's outgoing list: the newest comes first. truncated reports that
// there are more, or may be. Mutuals may miss some if id has more than MutualsCap outgoing edges
// and other has more than MutualsCap incoming ones. Then it reads only the newest MutualsCap of
// id's edges, and returns the beginning of the whole answer. The transaction's tenant is set; it
// reads one snapshot. Cost: at most MutualsCap index rows, in one range, and a probe for each.
func Mutuals(ctx context.Context, tx pgx.Tx, kind string, id, other event.ID, limit int) (edges []Edge, truncated bool, err error) {
	counts, err := ReadCounts(ctx, tx, []string{kind}, []event.ID{id, other})
	if err != nil {
		return nil, false, err
	}
	outgoing, incoming := counts[Object{kind, id}].Outgoing, counts[Object{kind, other}].Incoming
	sql, capped := mutualsOfOutgoingSQL, outgoing > MutualsCap
	if incoming < outgoing && incoming <= MutualsCap {
		sql, capped = mutualsOfIncomingSQL, false
	}
	rows, _ := tx.Query(ctx, sql, postgres.Args{"kind": kind, "id": id, "other": other, "cap": MutualsCap, "limit": limit + 1})
	edges, err = pgx.CollectRows(rows, pgx.RowToStructByNameLax[Edge])
	if err != nil {
		return nil, false, fmt.Errorf("read the mutual %ss of %s and %s: %w", kind, id, other, err)
	}
	if len(edges) > limit {
		return edges[:limit], true, nil
	}
	return edges, capped, nil
}
