package store

import (
	"cmp"
	"context"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// childState is a row of children with its tenant.
type childState struct {
	TenantID int64
	childRow
}

func (r *childState) key() childKey { return childKey{r.TenantID, r.ID} }

func (r *childState) state() State[event.Child] {
	c := r.wire()
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		c.Body, c.Attributes = "", nil // the truth keeps them, but no event has them
	}
	return State[event.Child]{r.TenantID, c}
}

// scanChildrenSQL reads a page of the kind's children by id, shelved or not. It names no table
// partition, because the projections know a kind before the truth has a table for it. The condition
// on the kind is outside the union: PostgreSQL merges the parts in their order only if they have no
// condition. Index: children_KIND_pkey and children_archive_KIND_pkey, one range each, merged.
// Locks: none.
const scanChildrenSQL = `
SELECT /* store.scan_children */ c.tenant_id, ` + childColumns + `
  FROM (SELECT * FROM children UNION ALL SELECT * FROM children_archive) c
 WHERE c.kind = '{{.Kind}}' AND (c.tenant_id, c.child_id) > (@tenant::bigint, @child::uuid)
 ORDER BY c.tenant_id, c.child_id LIMIT @limit`

// scanObjectsSQL reads a page of the kind's children, shelved or not, by object, and within an
// object in the order of the kind's index. Index: the one of the kind's Order and its counterpart
// on the shelf, one range each, merged. Locks: none.
const scanObjectsSQL = `
SELECT /* store.scan_objects */ c.tenant_id, ` + childColumns + `
  FROM (SELECT * FROM children UNION ALL SELECT * FROM children_archive) c
 WHERE c.kind = '{{.Kind}}'
   AND (c.tenant_id, c.object_id, c.{{.Order}}) > (@tenant::bigint, @object::text, @place::{{.OrderType}})
 ORDER BY c.tenant_id, c.object_id, c.{{.Order}} LIMIT @limit`

// scanObjectSQL reads a page of the children of one object, in the same order. Index: as
// scanObjectsSQL. Locks: none.
const scanObjectSQL = `
SELECT /* store.scan_object */ c.tenant_id, ` + childColumns + `
  FROM (SELECT * FROM children UNION ALL SELECT * FROM children_archive) c
 WHERE c.kind = '{{.Kind}}' AND c.tenant_id = @tenant::bigint AND c.object_id = @object::text
   AND c.{{.Order}} > @place::{{.OrderType}}
 ORDER BY c.{{.Order}} LIMIT @limit`

// OrderType returns the type of the column Order, as a statement's argument.
func (s childShape) OrderType() string {
	if s.Threaded {
		return `text COLLATE "C"`
	}
	return "uuid"
}

// place returns the child's value of the column Order.
func (s childShape) place(c event.Child) string {
	if s.Threaded {
		return c.Path
	}
	return cmp.Or(c.ID, noChild)
}

const noChild = "00000000-0000-0000-0000-000000000000"

// ScanChildren yields the children of the kind of all tenants, shelved or not, by id. It continues
// from after (nil: with the first child) and yields at most limit children (0: all). Its memory is
// bounded. The pool acts as the system role.
func ScanChildren(ctx context.Context, pool *pgxpool.Pool, k kinds.Child, after *State[event.Child],
	limit int) iter.Seq2[*State[event.Child], error] {
	return scan(ctx, pool, shapeOf(k).sql(scanChildrenSQL), after, limit, func(s *State[event.Child]) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"tenant": s.TenantID, "child": cmp.Or(s.Object.ID, noChild)}
	}, (*childState).state)
}

// ScanObjects is ScanChildren in the order of objects. In a threaded kind the children of an object
// are in the order of their threads, so a child precedes its replies.
func ScanObjects(ctx context.Context, pool *pgxpool.Pool, k kinds.Child, after *State[event.Child],
	limit int) iter.Seq2[*State[event.Child], error] {
	s := shapeOf(k)
	return scan(ctx, pool, s.sql(scanObjectsSQL), after, limit, s.placeArgs, (*childState).state)
}

// ScanObject is ScanObjects for one object. It begins after a path or, in a kind without threads,
// after an id; "" begins with the first child.
func ScanObject(ctx context.Context, pool *pgxpool.Pool, k kinds.Child, tenant int64, object event.ID, after string,
	limit int) iter.Seq2[*State[event.Child], error] {
	s := shapeOf(k)
	return scan(ctx, pool, s.sql(scanObjectSQL), &State[event.Child]{tenant, event.Child{Parent: object, Path: after, ID: after}},
		limit, s.placeArgs, (*childState).state)
}

func (s childShape) placeArgs(after *State[event.Child]) pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{"tenant": after.TenantID, "object": after.Object.Parent, "place": s.place(after.Object)}
}

// GetChildren returns the children of the kind that refs name, regardless of the versions in refs.
// It omits children that the tenant does not have. It reads with the rights of q.
func GetChildren(ctx context.Context, q postgres.Querier, tenant int64, k kinds.Child,
	refs []event.Ref) (all []State[event.Child], err error) {
	var ids []string
	for _, r := range refs {
		if r.Type == k.Name {
			ids = append(ids, r.Child)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	got, err := shapeOf(k).get(ctx, q, tenant, ids)
	if err != nil {
		return nil, err
	}
	for _, r := range got {
		s := childState{tenant, r}
		all = append(all, s.state())
	}
	return all, nil
}

// ReadChildren returns the tenant's children of the kind with these ids, by id. Like Store.GetChild
// it includes the bodies of children that are not visible. It reads with the rights of q.
func ReadChildren(ctx context.Context, q postgres.Querier, tenant int64, k kinds.Child, ids []string) (map[string]event.Child, error) {
	rows, err := shapeOf(k).get(ctx, q, tenant, ids)
	if err != nil {
		return nil, err
	}
	all := make(map[string]event.Child, len(rows))
	for id, r := range rows {
		all[id] = r.wire()
	}
	return all, nil
}

// countChildrenSQL counts the children of one object, shelved or not, up to @most in each of the
// two tables. Index: as scanObjectSQL, one range each. Locks: none.
const countChildrenSQL = `
SELECT /* store.count_children */ count(*), count(*) FILTER (WHERE author_state = 'ACTIVE' AND moderation_state IN ('NONE', 'APPROVED'))
  FROM ((SELECT author_state, moderation_state FROM {{.Table}}
          WHERE tenant_id = @tenant::bigint AND object_id = @object::text LIMIT @most::bigint)
        UNION ALL
        (SELECT author_state, moderation_state FROM {{.Shelf}}
          WHERE tenant_id = @tenant::bigint AND object_id = @object::text LIMIT @most::bigint)) c`

// CountChildren counts the children of the kind that an object has, and how many of them are
// visible. It reads up to most rows of each of two tables, so total is at most twice most. If total
// is at least most, both counts may be too low. It reads with the rights of pool. Cost: two index
// ranges.
func CountChildren(ctx context.Context, pool *pgxpool.Pool, k kinds.Child, tenant int64, object event.ID,
	most int) (total, visible int64, err error) {
	if err = pool.QueryRow(ctx, shapeOf(k).sql(countChildrenSQL),
		pgx.StrictNamedArgs{"tenant": tenant, "object": object, "most": most}).Scan(&total, &visible); err != nil {
		return 0, 0, fmt.Errorf("count the %s of %s of tenant %d: %w", k.Plural, object, tenant, err)
	}
	return total, visible, nil
}

// ChildEvent returns the state as an event, as if it had just been written. The event is on no
// stream and has neither id nor sequence.
func ChildEvent(k kinds.Child, s *State[event.Child]) (event.Event, error) {
	payload, err := s.Object.Encode(k.Names())
	if err != nil {
		return event.Event{}, fmt.Errorf("encode the state of a %s of %s: %w", k.Name, s.Object.Parent, err)
	}
	return event.Event{TenantID: s.TenantID, AggregateType: k.Name, AggregateID: s.Object.Parent, Type: event.Edited,
		Version: 1, Payload: payload}, nil
}

// ChildEvents converts states of children of the kind to events.
func ChildEvents(k kinds.Child, states iter.Seq2[*State[event.Child], error]) iter.Seq2[event.Event, error] {
	return eventsOf(states, func(s *State[event.Child]) (event.Event, error) { return ChildEvent(k, s) })
}
