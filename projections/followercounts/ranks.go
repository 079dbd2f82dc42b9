package followercounts

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// childKey names a child of a kind.
type childKey struct {
	tenant int64
	child  string
	kind   string
}

func (k childKey) compare(o childKey) int {
	return cmp.Or(cmp.Compare(k.tenant, o.tenant), cmp.Compare(k.child, o.child), cmp.Compare(k.kind, o.kind))
}

// rank is what a batch changes of a child's rank: the child, if it has an event of it, and the
// score.
type rank struct {
	child event.Child // version 0: not in the batch
	score int64
}

// ranking has the changes of a batch.
type ranking map[childKey]rank

// put takes a child that edges rank, unless the batch has a newer version of it.
func (r ranking) put(set *kinds.Set, e *event.Event) error {
	k, ok := set.Child(e.AggregateType)
	if !ok || k.RankedBy == "" {
		return event.Permanent(fmt.Errorf("event %s: there is no kind of edges or of ranked children %s", e.ID, e.AggregateType))
	}
	c, err := e.DecodeChild(k.Names())
	if err != nil {
		return err
	}
	at := childKey{e.TenantID, c.ID, k.Name}
	if now := r[at]; c.Version > now.child.Version {
		now.child = c
		r[at] = now
	}
	return nil
}

// score adds the changes of scores: of the sum of the score's attribute, or of the number of edges.
func (r ranking) score(child string, c *changes) {
	add := func(o object, by int64) {
		if by != 0 {
			at := childKey{o.tenant, o.id.String(), child}
			now := r[at]
			now.score += by
			r[at] = now
		}
	}
	if attribute, ok := c.kind.Score(); ok {
		for a, s := range c.aggregates {
			if a.attribute == attribute && a.value == "" {
				add(a.object, s.Sum)
			}
		}
		return
	}
	for o, d := range c.counts {
		add(o, d.Incoming)
	}
}

// ranksSQL changes ranks. The events of a child and those of the edges to it are in different
// partitions, whose transactions may write one row at the same time: each adds to the row that it
// then finds. Index: child_ranks_pkey. Locks: the rows, in key order; a transaction locks no other
// row after them.
const ranksSQL = `
INSERT /* followercounts.ranks */ INTO child_ranks AS r (tenant_id, kind, child_id, score, version, object_id, created_at, visible)
SELECT i.tenant_id, i.kind, i.child_id, i.score, i.version, i.object_id, i.created_at, i.visible
  FROM unnest(@tenants::bigint[], @kinds::text[], @children::uuid[], @scores::bigint[], @versions::bigint[], @objects::text[],
              @created_ats::timestamptz[], @visibles::boolean[])
         WITH ORDINALITY AS i(tenant_id, kind, child_id, score, version, object_id, created_at, visible, ord)
 ORDER BY i.ord
    ON CONFLICT (tenant_id, child_id, kind) DO UPDATE
   SET score = r.score + excluded.score, version = greatest(r.version, excluded.version),
       object_id = CASE WHEN excluded.version > r.version THEN excluded.object_id ELSE r.object_id END,
       created_at = CASE WHEN excluded.version > r.version THEN excluded.created_at ELSE r.created_at END,
       visible = CASE WHEN excluded.version > r.version THEN excluded.visible ELSE r.visible END
 WHERE excluded.score <> 0 OR excluded.version > r.version`

func writeRanks(ctx context.Context, tx pgx.Tx, ranks ranking) error {
	n := len(ranks)
	if n == 0 {
		return nil
	}
	tenants, names, children, scores := make([]int64, n), make([]string, n), make([]string, n), make([]int64, n)
	versions, objects, createdAts, visibles := make([]int64, n), make([]*event.ID, n), make([]*time.Time, n), make([]bool, n)
	for i, k := range slices.SortedFunc(maps.Keys(ranks), childKey.compare) {
		c := ranks[k].child
		tenants[i], names[i], children[i], scores[i] = k.tenant, k.kind, k.child, ranks[k].score
		if c.Version > 0 {
			versions[i], objects[i], createdAts[i], visibles[i] = c.Version, &c.Parent, &c.CreatedAt.Time, c.Visible()
		}
	}
	if err := postgres.Later(ctx, tx, ranksSQL, postgres.Args{"tenants": tenants, "kinds": names, "children": children, "scores": scores,
		"versions": versions, "objects": objects, "created_ats": createdAts, "visibles": visibles}); err != nil {
		return fmt.Errorf("write the ranks of %d children: %w", n, err)
	}
	return nil
}
