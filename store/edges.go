package store

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// ErrSelf reports an edge from an object to itself, of a kind that forbids such edges.
var ErrSelf = errors.New("store: an edge of this kind cannot lead from an object to itself")

// StaleEdgeError reports that the edge has another version than the write expects.
type StaleEdgeError struct {
	Kind    kinds.Edge
	Current event.Edge
}

func (e *StaleEdgeError) Error() string {
	return fmt.Sprintf("store: the %s %s, %s is at version %d", e.Kind.Name, e.Current.From, e.Current.To, e.Current.Version)
}

// EdgeWrite is one edge to put or to remove.
type EdgeWrite struct {
	Meta
	From, To   event.ID
	Attributes json.RawMessage // for a put: all of them. nil keeps those of an ACTIVE edge; another edge gets the defaults
	Merge      bool            // for a put: Attributes change those of an ACTIVE edge (RFC 7396); another edge is ErrNotFound
	IfVersion  int64           // the version of the ACTIVE edge that the writer saw, or AnyVersion

	kind     *kinds.Edge
	defaults json.RawMessage // the attributes of a new edge; for a merge, the merged ones
}

// EdgeOutcome is the result of one EdgeWrite.
type EdgeOutcome struct {
	Edge    event.Edge // the present state, without its actor; zero if RemoveEdges got a pair that never had an edge
	Changed bool       // this write changed it and made an event
	Created bool       // the change made it ACTIVE
	// ErrSelf, ErrInvalid, *kinds.AttributeError, *StaleEdgeError, ErrNotFound, ErrTargetUnknown or
	// *TargetGoneError: the write changed nothing
	Err error
}

// edgeKey names an edge of a kind.
type edgeKey struct {
	tenant   int64
	from, to event.ID
}

// errNotOfGroup reports a row that a statement returned for a tenant that did not write it. Within
// a group, row-level security separates nobody: this check does.
var errNotOfGroup = errors.New("store: a statement returned a row that nobody of its group asked for")

func (w EdgeWrite) key() edgeKey { return edgeKey{w.tenant, w.From, w.To} }

// check validates the write and brings its attributes into their one form.
func (w *EdgeWrite) check(put bool) error {
	if err := checkMeta(w.Meta); err != nil {
		return err
	}
	if err := cmp.Or(checkID(w.kind.FromIDs, w.From), checkID(w.kind.ToIDs, w.To)); err != nil {
		return err
	}
	switch {
	case w.From == w.To && w.kind.NoSelf():
		return ErrSelf
	case !put || len(w.kind.Attributes) == 0:
		w.Attributes, w.Merge = nil, false
		return nil
	case w.Merge:
		return nil // merge checks the attributes
	}
	var err error
	if w.Attributes != nil {
		w.Attributes, err = w.kind.Check(w.Attributes)
		w.defaults = w.Attributes
	} else {
		w.defaults, err = w.kind.Check(nil)
	}
	return err
}

// edgeKind is a kind with its lanes for single writes.
type edgeKind struct {
	name        string
	put, remove *lanes[EdgeWrite, EdgeOutcome]
}

// edgeKinds are the kinds that this process has written or read, by name.
type edgeKinds struct {
	mu  sync.Mutex
	all map[string]*edgeKind
}

// edgesOf returns the kind. Its first use makes the kind's lanes.
func (s *Store) edgesOf(name string) *edgeKind {
	s.edges.mu.Lock()
	defer s.edges.mu.Unlock()
	k, ok := s.edges.all[name]
	if !ok {
		k = &edgeKind{name: name}
		entity := func(w EdgeWrite) any { return w.key() }
		k.put = newLanes(s.slots, entity, k.writer(s, true, k.putTurn))
		k.remove = newLanes(s.slots, entity, k.writer(s, false, k.removeTurn))
		k.put.shared, k.remove.shared = true, true
		if s.edges.all == nil {
			s.edges.all = make(map[string]*edgeKind)
		}
		s.edges.all[name] = k
	}
	return k
}

// edgesOf returns the statement for the table of the kind.
func edgesOf(name, sql string) string {
	return strings.ReplaceAll(sql, "{edges}", pgx.Identifier{"edges_" + name}.Sanitize())
}

type edgeRow struct {
	Tenant       int64
	From         event.ID
	To           event.ID
	Status       string
	Version      int64
	CreatedAt    time.Time
	PositionedAt time.Time
	UpdatedAt    time.Time
	Attributes   []byte
}

func (r edgeRow) key() edgeKey { return edgeKey{r.Tenant, r.From, r.To} }

func (r edgeRow) wire() event.Edge {
	return event.Edge{
		From: r.From, To: r.To, Status: r.Status, Version: r.Version,
		CreatedAt: wireTime(r.CreatedAt), PositionedAt: wireTime(r.PositionedAt), UpdatedAt: wireTime(r.UpdatedAt),
		Attributes: CanonicalAttributes(r.Attributes),
	}
}

// putEdgesSQL makes edges ACTIVE that are not, and returns them. Each such change moves
// positioned_at, which orders pages. Times never decrease between two versions, even if a
// transaction waits for a lock of one that began later. Index: edges_KIND_pkey. Locks: the edges,
// in key order.
const putEdgesSQL = `
INSERT /* store.put_edges */ INTO {edges} AS e (tenant_id, from_id, to_id)
SELECT w.*
  FROM unnest(@tenants::bigint[], @froms::text[], @tos::text[]) AS w(tenant_id, from_id, to_id)
 ORDER BY w.tenant_id, w.from_id COLLATE "C", w.to_id COLLATE "C"
ON CONFLICT (tenant_id, from_id, to_id) DO UPDATE
   SET status = 'ACTIVE', version = e.version + 1,
       positioned_at = GREATEST(now(), e.updated_at), updated_at = GREATEST(now(), e.updated_at)
 WHERE e.status <> 'ACTIVE'
RETURNING e.tenant_id, e.from_id, e.to_id, e.status, e.version, e.created_at, e.positioned_at, e.updated_at, e.attributes`

// PutEdges makes each edge ACTIVE with these attributes. An edge that already equals the write does
// not change and makes no event. An edge to a child needs the child: a write to one that is missing
// or gone is refused, even if the edge exists and the write would not change it. RemoveEdges does
// not look at the child.
func (s *Store) PutEdges(ctx context.Context, tenant int64, k kinds.Edge, writes []EdgeWrite) ([]EdgeOutcome, error) {
	return s.edgesOf(k.Name).put.do(ctx, tenant, ofKind(tenant, k, writes))
}

func ofKind(tenant int64, k kinds.Edge, writes []EdgeWrite) []EdgeWrite {
	all := slices.Clone(writes)
	for i := range all {
		all[i].tenant, all[i].kind = tenant, &k
	}
	return all
}

// removeEdgesSQL makes ACTIVE edges REMOVED, and returns them. It locks them in key order first: an
// UPDATE alone would lock in the order of its plan. Plan: as heldSQL. Index: edges_KIND_pkey.
// Locks: the edges, in key order.
const removeEdgesSQL = `
WITH wanted AS (
  SELECT * FROM unnest((SELECT @tenants::bigint[]), @froms::text[], @tos::text[], @versions::bigint[])
    AS w(tenant_id, from_id, to_id, version)
), held AS (
  SELECT e.tenant_id, e.from_id, e.to_id, w.version
    FROM {edges} e JOIN wanted w ON e.tenant_id = ANY (ARRAY[w.tenant_id]) AND e.from_id = w.from_id AND e.to_id = w.to_id
   ORDER BY w.tenant_id, w.from_id COLLATE "C", w.to_id COLLATE "C"
     FOR NO KEY UPDATE OF e
)
UPDATE /* store.remove_edges */ {edges} e
   SET status = 'REMOVED', version = e.version + 1, updated_at = GREATEST(now(), e.updated_at)
  FROM held h
 WHERE e.tenant_id = ANY (ARRAY[h.tenant_id]) AND e.from_id = h.from_id AND e.to_id = h.to_id
   AND e.status = 'ACTIVE' AND h.version IN (0, e.version)
RETURNING e.tenant_id, e.from_id, e.to_id, e.status, e.version, e.created_at, e.positioned_at, e.updated_at, e.attributes`

// removeAgainSQL is removeEdgesSQL for the second removal of an edge in one batch. The batch has
// locked the edge, unless the edge appeared since. It does not wait for such an edge, because it
// already holds locks of higher keys.
var removeAgainSQL = strings.Replace(removeEdgesSQL, "FOR NO KEY UPDATE OF e", "FOR NO KEY UPDATE OF e SKIP LOCKED", 1)

// RemoveEdges makes each edge REMOVED. An edge that is REMOVED already, or never existed, makes no
// event.
func (s *Store) RemoveEdges(ctx context.Context, tenant int64, k kinds.Edge, writes []EdgeWrite) ([]EdgeOutcome, error) {
	return s.edgesOf(k.Name).remove.do(ctx, tenant, ofKind(tenant, k, writes))
}

// writer returns the function that writes edges in one transaction, turn by turn.
func (k *edgeKind) writer(s *Store, put bool, turn writeTurn[EdgeWrite, EdgeOutcome]) writeFunc[EdgeWrite, EdgeOutcome] {
	all := turns[EdgeWrite, edgeKey, EdgeOutcome]{write: turn, check: func(w *EdgeWrite, o *EdgeOutcome) (edgeKey, any, bool) {
		o.Err = w.check(put)
		return w.key(), nil, o.Err == nil
	}}
	return func(ctx context.Context, writes []EdgeWrite, at place) ([]EdgeOutcome, error) {
		out, err := inTurns(ctx, s, at, writes, all)
		if err != nil {
			return nil, fmt.Errorf("write %d edges of kind %s, tenants %d: %w", len(writes), k.name, at.tenants, err)
		}
		return out, nil
	}
}

// putTurn writes a turn of puts. Without attributes and guards, one statement decides.
func (k *edgeKind) putTurn(ctx context.Context, tx *unit, writes []EdgeWrite, turn []int, out []EdgeOutcome) error {
	if writes[turn[0]].kind.ToChild {
		var err error
		if turn, err = lockTargets(ctx, tx, writes, turn, out); err != nil || len(turn) == 0 {
			return err
		}
	}
	for _, i := range turn {
		if writes[i].defaults != nil || writes[i].Merge || writes[i].IfVersion != AnyVersion {
			return k.putGuarded(ctx, tx, writes, turn, out)
		}
	}
	left, err := k.change(ctx, tx, writes, turn, putEdges, out)
	if err != nil || len(left) == 0 {
		return err
	}
	return k.current(ctx, tx, writes, left, getEdgesSQL, out)
}

// removeTurn writes a turn of removals.
func (k *edgeKind) removeTurn(ctx context.Context, tx *unit, writes []EdgeWrite, turn []int, out []EdgeOutcome) error {
	change := removeEdges
	if tx.turn > 0 {
		change = removeEdgesAgain
	}
	left, err := k.change(ctx, tx, writes, turn, change, out)
	if err != nil || len(left) == 0 {
		return err
	}
	if err := k.current(ctx, tx, writes, left, getEdgesSQL, out); err != nil {
		return err
	}
	for _, i := range left {
		writes[i].guard(&out[i])
	}
	return nil
}

// guard refuses a write if the edge is not ACTIVE at the version that the writer saw.
func (w EdgeWrite) guard(out *EdgeOutcome) bool {
	switch {
	case w.IfVersion == AnyVersion:
	case !out.Edge.Active():
		out.Err = ErrNotFound
	case out.Edge.Version != w.IfVersion:
		out.Err = &StaleEdgeError{Kind: *w.kind, Current: out.Edge}
	}
	return out.Err == nil
}

// merge merges the changed attributes into the edge's present ones, or sets the outcome's error.
func (w *EdgeWrite) merge(out *EdgeOutcome) bool {
	if out.Err = ErrNotFound; out.Edge.Active() {
		w.defaults, out.Err = w.kind.Patch(out.Edge.Attributes, w.Attributes)
	}
	return out.Err == nil
}

// lockEdgesSQL locks edges and reads them. Plan: as heldSQL. Index: edges_KIND_pkey. Locks: the
// edges, in key order.
const lockEdgesSQL = `
SELECT /* store.lock_edges */ e.tenant_id, e.from_id, e.to_id, e.status, e.version, e.created_at, e.positioned_at, e.updated_at,
       e.attributes
  FROM unnest((SELECT @tenants::bigint[]), @froms::text[], @tos::text[]) AS w(tenant_id, from_id, to_id)
  JOIN {edges} e ON e.tenant_id = ANY (ARRAY[w.tenant_id]) AND e.from_id = w.from_id AND e.to_id = w.to_id
 ORDER BY w.tenant_id, w.from_id COLLATE "C", w.to_id COLLATE "C"
   FOR NO KEY UPDATE OF e`

// insertEdgesSQL creates missing edges and returns them. It locks the others without a change.
// Index: edges_KIND_pkey. Locks: the edges, in key order.
const insertEdgesSQL = `
INSERT /* store.insert_edges */ INTO {edges} AS e (tenant_id, from_id, to_id, attributes)
SELECT w.*
  FROM unnest(@tenants::bigint[], @froms::text[], @tos::text[], @attributes::text[]::jsonb[]) AS w(tenant_id, from_id, to_id, attributes)
 ORDER BY w.tenant_id, w.from_id COLLATE "C", w.to_id COLLATE "C"
ON CONFLICT (tenant_id, from_id, to_id) DO UPDATE SET status = e.status WHERE false
RETURNING e.tenant_id, e.from_id, e.to_id, e.status, e.version, e.created_at, e.positioned_at, e.updated_at, e.attributes`

// updateEdgesSQL makes edges ACTIVE with these attributes. The transaction has locked them. Plan:
// as heldSQL. Index: edges_KIND_pkey. Locks: the edges, which the transaction has locked.
const updateEdgesSQL = `
UPDATE /* store.update_edges */ {edges} e
   SET status = 'ACTIVE', attributes = w.attributes, version = e.version + 1, updated_at = GREATEST(now(), e.updated_at),
       positioned_at = CASE WHEN e.status = 'ACTIVE' THEN e.positioned_at ELSE GREATEST(now(), e.updated_at) END
  FROM unnest((SELECT @tenants::bigint[]), @froms::text[], @tos::text[], @attributes::text[]::jsonb[])
    AS w(tenant_id, from_id, to_id, attributes)
 WHERE e.tenant_id = ANY (ARRAY[w.tenant_id]) AND e.from_id = w.from_id AND e.to_id = w.to_id
RETURNING e.tenant_id, e.from_id, e.to_id, e.status, e.version, e.created_at, e.positioned_at, e.updated_at, e.attributes`

// putGuarded writes a turn of puts with attributes or guards. It first creates missing edges and
// then locks the others, so that a batch without guards waits for locks in key order.
func (k *edgeKind) putGuarded(ctx context.Context, tx *unit, writes []EdgeWrite, turn []int, out []EdgeOutcome) error {
	var creating, existing []int
	for _, i := range turn {
		if writes[i].IfVersion == AnyVersion && !writes[i].Merge {
			creating = append(creating, i)
		} else {
			existing = append(existing, i)
		}
	}
	left, err := k.change(ctx, tx, writes, creating, insertEdges, out)
	if err != nil {
		return err
	}
	existing = append(existing, left...)
	if len(existing) == 0 {
		return nil
	}
	if err := k.current(ctx, tx, writes, existing, lockEdgesSQL, out); err != nil {
		return err
	}
	var revived, updated []int
	for _, i := range existing {
		w, e := &writes[i], out[i].Edge
		if !w.guard(&out[i]) || w.Merge && !w.merge(&out[i]) {
			continue
		}
		switch {
		case !e.Active():
			revived = append(revived, i)
		case w.Attributes != nil && !bytes.Equal(w.defaults, e.Attributes):
			updated = append(updated, i)
		}
	}
	for _, step := range []struct {
		items  []int
		change edgeChange
	}{{revived, reviveEdges}, {updated, updateEdges}} {
		if left, err := k.change(ctx, tx, writes, step.items, step.change, out); err != nil || len(left) > 0 {
			return cmp.Or(err, fmt.Errorf("%d locked edges no longer exist", len(left)))
		}
	}
	return nil
}

// edgeChange is a statement that changes edges and returns them, with the type of their events and
// the name of its argument beside both ends.
type edgeChange struct{ event, sql, takes string }

var (
	putEdges         = edgeChange{event.Created, putEdgesSQL, ""}
	insertEdges      = edgeChange{event.Created, insertEdgesSQL, "attributes"}
	reviveEdges      = edgeChange{event.Created, updateEdgesSQL, "attributes"}
	updateEdges      = edgeChange{event.Updated, updateEdgesSQL, "attributes"}
	removeEdges      = edgeChange{event.Removed, removeEdgesSQL, "versions"}
	removeEdgesAgain = edgeChange{event.Removed, removeAgainSQL, "versions"}
)

// change changes edges and appends their events. It returns the items that it did not change.
func (k *edgeKind) change(ctx context.Context, tx *unit, writes []EdgeWrite, turn []int, to edgeChange,
	out []EdgeOutcome) (left []int, err error) {
	if len(turn) == 0 {
		return nil, nil
	}
	args, index := endsOf(writes, turn)
	switch to.takes {
	case "versions":
		args[to.takes] = column(turn, func(i int) int64 { return writes[i].IfVersion })
	case "attributes":
		args[to.takes] = column(turn, func(i int) *string { return text(writes[i].defaults) })
	}
	rows, _ := tx.Query(ctx, edgesOf(k.name, to.sql), args)
	changed, err := pgx.AppendRows(make([]edgeRow, 0, len(turn)), rows, pgx.RowToStructByPos[edgeRow])
	if err != nil {
		return nil, fmt.Errorf("write %d rows: %w", len(turn), err)
	}
	slices.SortFunc(changed, func(a, b edgeRow) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
	tx.events = slices.Grow(tx.events, len(changed))
	for _, r := range changed {
		i, ok := index[r.key()]
		if !ok {
			return nil, fmt.Errorf("edge %s, %s of tenant %d: %w", r.From, r.To, r.Tenant, errNotOfGroup)
		}
		w, o := &writes[i], &out[i]
		*o = EdgeOutcome{Edge: r.wire(), Changed: true, Created: to.event == event.Created}
		state := o.Edge
		state.Actor = w.Actor
		payload, err := state.Encode(w.kind.Names())
		if err != nil {
			return nil, err
		}
		tx.events = append(tx.events, event.Event{
			TenantID: w.tenant, AggregateType: w.kind.Name, AggregateID: r.To, Type: to.event,
			OccurredAt: r.UpdatedAt, TraceParent: w.TraceParent, Payload: payload,
		})
	}
	if len(changed) < len(turn) {
		left = slices.DeleteFunc(slices.Clone(turn), func(i int) bool { return out[i].Changed })
	}
	return left, nil
}

// endsOf returns the arguments of every statement about the edges of a turn, and the index of each
// edge.
func endsOf(writes []EdgeWrite, turn []int) (postgres.Args, map[edgeKey]int) {
	index := make(map[edgeKey]int, len(turn))
	for _, i := range turn {
		index[writes[i].key()] = i
	}
	tenants := column(turn, func(i int) int64 { return writes[i].tenant })
	return postgres.Args{"tenants": tenants, "froms": column(turn, func(i int) string { return string(writes[i].From) }),
		"tos": column(turn, func(i int) string { return string(writes[i].To) })}, index
}

// sameTenant returns n times the tenant, for a statement that takes a tenant per row.
func sameTenant(tenant int64, n int) []int64 { return slices.Repeat([]int64{tenant}, n) }

// column returns the values of the items of a turn.
func column[T any](turn []int, value func(i int) T) []T {
	values := make([]T, len(turn))
	for n, i := range turn {
		values[n] = value(i)
	}
	return values
}

// current fills in the present states of the edges of a turn.
func (k *edgeKind) current(ctx context.Context, tx pgx.Tx, writes []EdgeWrite, turn []int, sql string,
	out []EdgeOutcome) error {
	args, index := endsOf(writes, turn)
	rows, _ := tx.Query(ctx, edgesOf(k.name, sql), args)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[edgeRow])
	if err != nil {
		return fmt.Errorf("read %d rows: %w", len(turn), err)
	}
	for _, r := range got {
		i, ok := index[r.key()]
		if !ok {
			return fmt.Errorf("edge %s, %s of tenant %d: %w", r.From, r.To, r.Tenant, errNotOfGroup)
		}
		out[i].Edge = r.wire()
	}
	return nil
}

// getEdgesSQL reads edges. Plan: as childCreateSQL. Index: edges_KIND_pkey. Locks: none.
const getEdgesSQL = `
SELECT /* store.get_edges */ e.tenant_id, e.from_id, e.to_id, e.status, e.version, e.created_at, e.positioned_at, e.updated_at, e.attributes
  FROM unnest((SELECT @tenants::bigint[]), @froms::text[], @tos::text[]) AS w(tenant_id, from_id, to_id)
 CROSS JOIN LATERAL (SELECT * FROM {edges}
                      WHERE tenant_id = w.tenant_id AND from_id = w.from_id AND to_id = w.to_id OFFSET 0) e`

// GetEdge returns the edge, ACTIVE or REMOVED, or ErrNotFound if it never existed. It has no Actor,
// which the truth does not keep.
func (s *Store) GetEdge(ctx context.Context, tenant int64, k kinds.Edge, from, to event.ID) (event.Edge, error) {
	var row edgeRow
	err := s.read(ctx, tenant, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, edgesOf(k.Name, getEdgesSQL),
			pgx.StrictNamedArgs{"tenants": []int64{tenant}, "froms": []event.ID{from}, "tos": []event.ID{to}})
		var err error
		row, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[edgeRow])
		return notFound(err)
	})
	if err != nil {
		return event.Edge{}, fmt.Errorf("read %s %s, %s of tenant %d: %w", k.Name, from, to, tenant, err)
	}
	return row.wire(), nil
}
