package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
)

// redo writes lost changes of a restored truth again, in the order of their events. Each event sets
// its entity to the event's state and version. If the truth already has another write at that
// version or a later one, the truth's state remains and gets a version above both. That version
// gets an event by actor, so readers of the lost write follow it. In a kind with one child per
// author, a lost child loses to another one that its author has now: it becomes DELETED, by an
// event of the next version. overtaken counts the events by actor. An event whose kind is not in
// set changes no state.
//
// redo calls insert first in the transaction. insert puts the lost events into the outbox and
// returns them, or fewer of them if others were written again before. The store's pool acts as the
// system role.
func (s *Store) redo(ctx context.Context, set *kinds.Set, actor string,
	insert func(ctx context.Context, tx pgx.Tx) (lost []event.Event, err error)) (overtaken int, err error) {
	n := 0
	for attempt := 1; ; attempt++ {
		var back *redoShelvedError
		err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			r := &redoing{threads: s.threads, tx: tx, set: set, actor: actor}
			events, err := insert(ctx, tx)
			if n = len(events); err != nil {
				return err
			}
			if err := r.run(ctx, events); err != nil {
				return err
			}
			overtaken = len(r.added)
			return outbox.Append(ctx, tx, r.added)
		})
		if postgres.IsUnique(err, "") && attempt < maxInserts {
			continue // an author has just written another child in the place of a lost one: the next attempt sees it
		}
		if !errors.As(err, &back) {
			if err != nil {
				err = fmt.Errorf("write %d lost events again: %w", n, err)
			}
			return overtaken, err
		}
		err = s.bringBack(ctx, back.tenant, s.children(back.kind), back.objects, time.Now().Add(s.returnBudget))
		if err != nil && !errors.Is(err, ErrThreadReturning) {
			return 0, err
		}
	}
}

// redoShelvedError lists threads that must return from the shelf first.
type redoShelvedError struct {
	shelvedError
	tenant int64
	kind   kinds.Child
}

// redoing is one transaction of redo.
type redoing struct {
	threads *versioned.Table[event.Thread]
	tx      pgx.Tx
	set     *kinds.Set
	actor   string
	added   []event.Event
	targets []target // children whose edges may have to be removed
}

// target names a child that edges may lead to.
type target struct {
	tenant   int64
	kind, id string
}

// run applies the events by tenant and kind. Entities of different tenants and kinds have no order.
func (r *redoing) run(ctx context.Context, events []event.Event) error {
	type group struct {
		tenant int64
		kind   string
	}
	var order []group
	of := make(map[group][]event.Event)
	for _, e := range events {
		g := group{e.TenantID, e.AggregateType}
		if of[g] == nil {
			order = append(order, g)
		}
		of[g] = append(of[g], e)
	}
	for _, g := range order {
		var err error
		if k, ok := r.set.Edge(g.kind); ok {
			err = r.edges(ctx, g.tenant, k, of[g])
		} else if k, ok := r.set.Child(g.kind); ok {
			err = r.children(ctx, g.tenant, k, of[g])
		} else if g.kind == event.AggregateThread {
			err = r.settings(ctx, g.tenant, of[g])
		}
		if err != nil {
			return err
		}
	}
	return r.removeFromErased(ctx)
}

// lockErasedSQL locks children that are erased. Index: children_KIND_pkey. Locks: the children, in
// key order.
const lockErasedSQL = `
SELECT /* store.lock_erased */ FROM {{.Table}} c
 WHERE c.tenant_id = @tenant::bigint AND c.child_id = ANY(@child_ids::uuid[]) AND c.author_state = 'ERASED'
 ORDER BY c.child_id
   FOR UPDATE OF c`

// removeFromErased requests the removal of the edges to erased children, as their erasure did: the
// request may be lost, and a lost edge is back.
func (r *redoing) removeFromErased(ctx context.Context) error {
	type group struct {
		tenant int64
		kind   string
	}
	ids := make(map[group][]string)
	for _, t := range r.targets {
		g := group{t.tenant, t.kind}
		ids[g] = append(ids[g], t.id)
	}
	for _, g := range slices.SortedFunc(maps.Keys(ids), func(a, b group) int {
		return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.kind, b.kind))
	}) {
		s := childShape{Kind: g.kind}
		if _, err := r.tx.Exec(ctx, s.sql(lockErasedSQL), pgx.StrictNamedArgs{"tenant": g.tenant, "child_ids": ids[g]}); err != nil {
			return fmt.Errorf("lock erased children of the kind %s: %w", g.kind, err)
		}
		if err := s.removeFromErased(ctx, r.tx, g.tenant, r.set.EdgesTo(g.kind), ids[g], Meta{Actor: r.actor}); err != nil {
			return err
		}
	}
	return nil
}

// follow adds the events of entities for which the truth had a later state.
func (r *redoing) follow(ctx context.Context, tenant int64, refs []event.Ref) error {
	if len(refs) == 0 {
		return nil
	}
	states, err := StatesBy(ctx, r.tx, tenant, r.set, refs, r.actor)
	r.added = append(r.added, states...)
	return err
}

// redoEdgesSQL sets edges to lost versions, or raises their own version if it is not below the lost
// one. Index: edges_KIND_pkey. Locks: the edges, in the order of the events.
const redoEdgesSQL = `
INSERT /* store.redo_edges */ INTO {edges} AS e
       (tenant_id, from_id, to_id, status, version, created_at, positioned_at, updated_at, attributes)
SELECT @tenant::bigint, w.from_id, w.to_id, w.status, w.version, w.created_at, w.positioned_at, w.updated_at, w.attributes::jsonb
  FROM unnest(@froms::text[], @tos::text[], @statuses::text[], @versions::bigint[], @created_ats::timestamptz[],
              @positioned_ats::timestamptz[], @updated_ats::timestamptz[], @attributes::text[]) WITH ORDINALITY
    AS w(from_id, to_id, status, version, created_at, positioned_at, updated_at, attributes, ord)
 ORDER BY w.ord
ON CONFLICT (tenant_id, from_id, to_id) DO UPDATE
   SET (status, version, created_at, positioned_at, updated_at, attributes) =
       (SELECT n.* FROM (VALUES (excluded.status, excluded.version, excluded.created_at, excluded.positioned_at,
                                 excluded.updated_at, excluded.attributes)) n
         WHERE e.version < excluded.version
         UNION ALL
        SELECT e.status, e.version + 1, e.created_at, e.positioned_at, e.updated_at, e.attributes WHERE e.version >= excluded.version)
RETURNING e.from_id, e.to_id, e.version`

func (r *redoing) edges(ctx context.Context, tenant int64, k kinds.Edge, events []event.Event) error {
	all := make([]event.Edge, 0, len(events))
	for i := range events {
		edge, err := events[i].DecodeEdge(k.Names())
		if err != nil {
			return err
		}
		if k.ToChild {
			if checkUUID(k.To, string(edge.To)) != nil {
				continue // a writer with SQL wrote the event, without a state
			}
			r.targets = append(r.targets, target{tenant, k.To, string(edge.To)})
		}
		all = append(all, edge)
	}
	for _, round := range rounds(len(all), func(i int) (edgeKey, any, bool) { return edgeKey{tenant, all[i].From, all[i].To}, nil, true }) {
		n := len(round)
		froms, tos, versions, wanted := make([]event.ID, n), make([]event.ID, n), make([]int64, n), make(map[edgeKey]int64, n)
		statuses, attributes := make([]string, n), make([]*string, n)
		created, positioned, updated := make([]time.Time, n), make([]time.Time, n), make([]time.Time, n)
		for m, i := range round {
			e := all[i]
			froms[m], tos[m], statuses[m], versions[m], attributes[m] = e.From, e.To, e.Status, e.Version, text(e.Attributes)
			created[m], positioned[m], updated[m] = e.CreatedAt.Time, e.PositionedAt.Time, e.UpdatedAt.Time
			wanted[edgeKey{tenant, froms[m], tos[m]}] = e.Version
		}
		p := edgeKey{tenant: tenant}
		var version int64
		var later []event.Ref
		rows, _ := r.tx.Query(ctx, edgesOf(k.Name, redoEdgesSQL),
			postgres.Args{"tenant": tenant, "froms": froms, "tos": tos, "statuses": statuses, "versions": versions,
				"created_ats": created, "positioned_ats": positioned, "updated_ats": updated, "attributes": attributes})
		if _, err := pgx.ForEachRow(rows, []any{&p.from, &p.to, &version}, func() error {
			if version != wanted[p] {
				later = append(later, event.Ref{Type: k.Name, From: p.from, To: p.to})
			}
			return nil
		}); err != nil {
			return fmt.Errorf("write %d edges of %s: %w", n, k.Name, err)
		}
		if err := r.follow(ctx, tenant, later); err != nil {
			return err
		}
	}
	return nil
}

// redoChildrenSQL does the same for children. The event of a child that is not visible has no body,
// so a body that the truth has remains. ON CONFLICT needs one unique key of all children, and a
// kind with hash partitions has one for each. Index: children_KIND_pkey. Locks: the children, in
// the order of the events.
const redoChildrenSQL = `
WITH w AS MATERIALIZED (
  SELECT * FROM unnest(@child_ids::uuid[], @object_ids::text[], @reply_tos::uuid[], @slugs::text[], @paths::text[],
                       @author_ids::text[], @bodies::text[], @attributes::text[], @author_states::text[], @moderation_states::text[],
                       @versions::bigint[], @created_ats::timestamptz[], @updated_ats::timestamptz[]) WITH ORDINALITY
    AS w(child_id, object_id, reply_to, slug, path, author_id, body, attributes, author_state, moderation_state, version,
         created_at, updated_at, ord)
), held AS MATERIALIZED (
  SELECT w.*, w.author_state <> 'ERASED' AND w.body = '' AS kept
    FROM w JOIN {{.Table}} c ON c.tenant_id = @tenant::bigint AND c.child_id = w.child_id
   ORDER BY w.ord
     FOR UPDATE OF c
), changed AS (
  UPDATE {{.Table}} c
     SET (body, attributes, author_state, moderation_state, version, updated_at) =
         (SELECT CASE WHEN n.kept THEN c.body ELSE n.body END, CASE WHEN n.kept THEN c.attributes ELSE n.attributes::jsonb END,
                 n.author_state, n.moderation_state, n.version, n.updated_at
           WHERE c.version < n.version
           UNION ALL
          SELECT c.body, c.attributes, c.author_state, c.moderation_state, c.version + 1, c.updated_at WHERE c.version >= n.version)
    FROM held n
   WHERE c.tenant_id = @tenant::bigint AND c.child_id = n.child_id
  RETURNING c.child_id, c.version
), made AS (
  INSERT /* store.redo_children */ INTO {{.Table}}
         (tenant_id, child_id, object_id, {{if .Threaded}}parent_id, slug, path, {{end}}author_id, body, attributes, author_state,
         moderation_state, version, created_at, updated_at)
  SELECT @tenant::bigint, w.child_id, w.object_id, {{if .Threaded}}w.reply_to, w.slug, w.path, {{end}}w.author_id, w.body,
         w.attributes::jsonb, w.author_state, w.moderation_state, w.version, w.created_at, w.updated_at
    FROM w WHERE NOT EXISTS (SELECT FROM held h WHERE h.child_id = w.child_id)
   ORDER BY w.ord
  RETURNING child_id, version
)
SELECT child_id::text, version FROM changed UNION ALL SELECT child_id::text, version FROM made`

func (r *redoing) children(ctx context.Context, tenant int64, k kinds.Child, events []event.Event) error {
	shape := shapeOf(k)
	all, objects := make([]event.Child, len(events)), make([]event.ID, len(events))
	for i := range events {
		var err error
		if all[i], err = events[i].DecodeChild(k.Names()); err != nil {
			return err
		}
		objects[i] = all[i].Parent
		if all[i].AuthorState == event.AuthorErased && len(r.set.EdgesTo(k.Name)) > 0 {
			r.targets = append(r.targets, target{tenant, k.Name, all[i].ID})
		}
	}
	shelved, err := shape.shelved(ctx, r.tx, sameTenant(tenant, len(objects)), objects)
	if err != nil {
		return err
	}
	if len(shelved) > 0 {
		objects = slices.DeleteFunc(objects, func(o event.ID) bool { return !shelved[objectKey{tenant, o}] })
		return &redoShelvedError{shelvedError{objects}, tenant, k}
	}
	for _, round := range rounds(len(all), func(i int) (any, any, bool) {
		if shape.OnePerAuthor { // an event may free the place that a later one takes
			return authorPlace{tenant, all[i].AuthorID, all[i].Parent}, nil, true
		}
		return all[i].ID, nil, true
	}) {
		var some []event.Child
		for _, i := range round {
			some = append(some, all[i])
		}
		displaced, err := r.displace(ctx, tenant, shape, some)
		if err != nil {
			return err
		}
		later, err := r.someChildren(ctx, tenant, shape, some)
		if err != nil {
			return err
		}
		for _, ref := range later { // the truth's state remains, so nothing was displaced
			displaced = slices.DeleteFunc(displaced, func(c event.Child) bool { return c.ID == ref.Child })
		}
		if len(displaced) > 0 { // they are DELETED at the lost version: a second write gives them the next one
			raised, err := r.someChildren(ctx, tenant, shape, displaced)
			if err != nil {
				return err
			}
			later = append(later, raised...)
		}
		if err := r.follow(ctx, tenant, later); err != nil {
			return err
		}
	}
	return nil
}

// displace makes those children DELETED whose author has another child in their place now, and
// returns them. The places of some are distinct.
func (r *redoing) displace(ctx context.Context, tenant int64, shape childShape, some []event.Child) (displaced []event.Child, err error) {
	objects, authors := make([]event.ID, len(some)), make([]event.ID, len(some))
	for i, c := range some {
		objects[i], authors[i] = c.Parent, c.AuthorID
	}
	taken, err := shape.taken(ctx, r.tx, sameTenant(tenant, len(some)), objects, authors)
	if err != nil || len(taken) == 0 {
		return nil, err
	}
	var now time.Time // not the time of the lost event: later lost events follow, and times of versions do not go back
	if err := r.tx.QueryRow(ctx, `SELECT now()`).Scan(&now); err != nil {
		return nil, fmt.Errorf("read the clock of the database: %w", err)
	}
	for i := range some {
		c := &some[i]
		first, ok := taken[authorPlace{tenant, authors[i], objects[i]}]
		if ok && first.ID != c.ID && c.AuthorState == event.AuthorActive {
			c.AuthorState, c.UpdatedAt = event.AuthorDeleted, wireTime(now)
			displaced = append(displaced, *c)
		}
	}
	return displaced, nil
}

// someChildren writes distinct children, and returns those for which the truth had a later state.
func (r *redoing) someChildren(ctx context.Context, tenant int64, shape childShape, some []event.Child) (later []event.Ref, err error) {
	n := len(some)
	ids, slugs, paths, bodies := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	authorStates, moderation := make([]string, n), make([]string, n)
	replyTos, attributes := make([]*string, n), make([]*string, n)
	objects, authors, versions, wanted := make([]event.ID, n), make([]event.ID, n), make([]int64, n), make(map[string]int64, n)
	created, updated := make([]time.Time, n), make([]time.Time, n)
	for i, c := range some {
		ids[i], slugs[i], paths[i], bodies[i] = c.ID, c.Slug, c.Path, c.Body
		authorStates[i], moderation[i] = c.AuthorState, c.ModerationState
		objects[i], authors[i], versions[i], attributes[i] = c.Parent, c.AuthorID, c.Version, text(c.Attributes)
		created[i], updated[i] = c.CreatedAt.Time, c.UpdatedAt.Time
		if c.ReplyTo != "" {
			replyTos[i] = &c.ReplyTo
		}
		wanted[c.ID] = c.Version
	}
	var id string
	var version int64
	rows, _ := r.tx.Query(ctx, shape.sql(redoChildrenSQL),
		pgx.StrictNamedArgs{"tenant": tenant, "child_ids": ids, "object_ids": objects, "reply_tos": replyTos, "slugs": slugs,
			"paths": paths, "author_ids": authors, "bodies": bodies, "attributes": attributes, "author_states": authorStates,
			"moderation_states": moderation, "versions": versions, "created_ats": created, "updated_ats": updated})
	if _, err := pgx.ForEachRow(rows, []any{&id, &version}, func() error {
		if version != wanted[id] {
			later = append(later, event.Ref{Type: shape.Kind, Child: id})
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("write %d children of the kind %s: %w", n, shape.Kind, err)
	}
	return later, nil
}

// settings does the same for the settings of threads, one by one: there are few.
func (r *redoing) settings(ctx context.Context, tenant int64, events []event.Event) error {
	for i := range events {
		var next event.Thread
		if err := events[i].DecodePayload(&next); err != nil {
			return err
		}
		lock := []versioned.Change[event.Thread]{{TenantID: tenant, Object: newThread(next.Of(), next.PostID), By: next.Actor}}
		if err := r.threads.Lock(ctx, r.tx, lock); err != nil {
			return err
		}
		_, now, err := getThreads(ctx, r.tx, tenant, next.Of(), []event.ID{next.PostID})
		if err != nil {
			return err
		}
		if now[0].Version >= next.Version {
			next = now[0]
			next.Version, next.Actor = next.Version+1, r.actor
			payload, err := json.Marshal(next)
			if err != nil {
				return fmt.Errorf("encode thread %s: %w", next.PostID, err)
			}
			r.added = append(r.added, event.Event{TenantID: tenant, AggregateType: event.AggregateThread, AggregateID: next.PostID,
				Type: event.Updated, Payload: payload})
		}
		change := versioned.Change[event.Thread]{TenantID: tenant, Object: next, By: cmp.Or(next.Actor, r.actor), At: next.UpdatedAt.Time}
		if _, err := r.threads.Upsert(ctx, r.tx, []versioned.Change[event.Thread]{change}); err != nil {
			return err
		}
	}
	return nil
}

// RedoFromStream applies redo to messages of a stream whose rows are lost. moved are the events
// that got new ids (outbox.Redo).
func (s *Store) RedoFromStream(ctx context.Context, set *kinds.Set, events []event.Event,
	actor string) (moved []string, overtaken int, err error) {
	overtaken, err = s.redo(ctx, set, actor, func(ctx context.Context, tx pgx.Tx) (lost []event.Event, err error) {
		moved, lost, err = outbox.Redo(ctx, tx, events)
		return lost, err
	})
	return moved, overtaken, err
}

// RedoFromHistory applies redo to states that a history has and the truth lacks. Each state gets an
// event of its own.
func (s *Store) RedoFromHistory(ctx context.Context, set *kinds.Set, events []event.Event, actor string) (overtaken int, err error) {
	return s.redo(ctx, set, actor, func(ctx context.Context, tx pgx.Tx) ([]event.Event, error) {
		return events, outbox.Append(ctx, tx, events)
	})
}
