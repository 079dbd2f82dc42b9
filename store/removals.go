package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/kinds"
)

// Direction says which edges of an object a Removal is of.
type Direction string

// The directions: edges that lead from the object, those that lead to it, and both.
const (
	DirectionFrom Direction = "from"
	DirectionTo   Direction = "to"
	DirectionBoth Direction = "both"
)

// Has reports whether edges with the object at this end are among them.
func (d Direction) Has(end kinds.End) bool { return d == DirectionBoth || string(d) == string(end) }

// RemovalRequest asks for all edges of an object to be removed.
type RemovalRequest struct {
	Meta
	Object    string   // as kinds name it, such as user
	ID        int64    // of the object
	Kinds     []string // of edges, each of which has the object at an end; in order
	Direction Direction
	Reason    string // kept with the removal
}

// RemovalKinds returns the kinds for a RemovalRequest: those that have edges in the direction of such an object, or, of names, these. It reports whether there are any, and all
// of the names are among them.
func RemovalKinds(set *kinds.Set, object string, d Direction, names []string) (chosen []string, ok bool) {
	for _, k := range set.AllEdges() {
		if slices.ContainsFunc(k.EndsAt(object), d.Has) && (names == nil || slices.Contains(names, k.Name)) {
			chosen = append(chosen, k.Name)
		}
	}
	return chosen, len(chosen) > 0 && !slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(chosen, name) })
}

// Removal is the removal of all edges of an object, as far as it has come.
type Removal struct {
	ID          string // a UUID
	Object      string
	ObjectID    int64
	Kinds       []string
	Direction   Direction
	Actor       string
	TraceParent string
	RequestedAt time.Time
	WorkedAt    *time.Time       // when edges were last looked for; nil before
	FinishedAt  *time.Time       // nil while it goes on
	Removed     map[string]int64 // edges by kind

	again bool
	step  int
	after EdgeKey
}

const removalColumns = `removal_id::text, object, object_id, kinds, direction, actor, trace_parent, requested_at, worked_at, finished_at, removed, again, step, after_from, after_to`

func (r *Removal) fields() []any {
	return []any{&r.ID, &r.Object, &r.ObjectID, &r.Kinds, &r.Direction, &r.Actor, &r.TraceParent, &r.RequestedAt, &r.WorkedAt, &r.FinishedAt, &r.Removed,
		&r.again, &r.step, &r.after.From, &r.after.To}
}

// requestRemovalSQL notes a removal, or that one that goes on was asked for again: what was there then is removed too.
// Index: edge_removals_unfinished_idx.   Locks: the removal, for which it waits while a slice of it is removed.
const requestRemovalSQL = `
INSERT /* store.request_removal */ INTO edge_removals AS r (tenant_id, object, object_id, kinds, direction, actor, trace_parent, reason)
VALUES (@tenant, @object, @id, @kinds, @direction, @actor, @trace, @reason)
    ON CONFLICT (tenant_id, object, object_id, kinds, direction) WHERE finished_at IS NULL DO UPDATE SET again = r.worked_at IS NOT NULL
RETURNING ` + removalColumns

// RequestRemoval has a Remover remove all edges of an object that are there when it returns, each with its own version and event. Edges that are made later may or may
// not be among them. While the same removal goes on it is returned, whoever asked for it, and goes over everything once more.
func (s *Store) RequestRemoval(ctx context.Context, tenant int64, r RemovalRequest) (out Removal, err error) {
	err = checkMeta(r.Meta)
	if err == nil && (r.ID <= 0 || len(r.Kinds) == 0 || !slices.IsSorted(r.Kinds)) {
		err = fmt.Errorf("%w: %s %d, kinds %q", ErrInvalid, r.Object, r.ID, r.Kinds)
	}
	if err == nil {
		err = s.write(ctx, tenant, place{}, func(tx *unit) error {
			out = Removal{}
			return tx.QueryRow(ctx, requestRemovalSQL, pgx.StrictNamedArgs{"tenant": tenant, "object": r.Object, "id": r.ID, "kinds": r.Kinds,
				"direction": string(r.Direction), "actor": r.Actor, "trace": r.TraceParent, "reason": r.Reason}).Scan(out.fields()...)
		})
	}
	if err != nil {
		return Removal{}, fmt.Errorf("ask for the edges of %s %d of tenant %d to be removed: %w", r.Object, r.ID, tenant, err)
	}
	return out, nil
}

// getRemovalSQL reads a removal.
// Index: edge_removals_pkey.   Locks: none.
const getRemovalSQL = `SELECT /* store.get_removal */ ` + removalColumns + ` FROM edge_removals WHERE tenant_id = @tenant AND removal_id = @id::uuid`

// GetRemoval returns a removal by its id, a UUID, or ErrNotFound.
func (s *Store) GetRemoval(ctx context.Context, tenant int64, id string) (out Removal, err error) {
	err = s.read(ctx, tenant, func(tx pgx.Tx) error {
		out = Removal{}
		return notFound(tx.QueryRow(ctx, getRemovalSQL, pgx.StrictNamedArgs{"tenant": tenant, "id": id}).Scan(out.fields()...))
	})
	if err != nil {
		return Removal{}, fmt.Errorf("read removal %s of tenant %d: %w", id, tenant, err)
	}
	return out, nil
}

// Remover works off removals, in slices of one transaction each. Tenants take turns, and so do the removals of a tenant. Any number of Removers may run at
// once. The row of a removal is its lease: a slice locks it, removes edges and moves the cursor, all or nothing, so a Remover that dies or is frozen leaves
// the next slice to any other, and can do nothing once it has lost its connection.
type Remover struct {
	store   *Store
	pool    *pgxpool.Pool
	kinds   func() *kinds.Set
	log     *slog.Logger
	removed prometheus.Counter

	tenant int64                   // whose turn was the last
	at     func(step string) error // a test's: an error ends the slice there
}

// NewRemover returns a Remover. The pool is one of the truth and acts as the system role; wake is that of New. It starts nothing.
func NewRemover(pool *pgxpool.Pool, wake func(slot int), now func() *kinds.Set, log *slog.Logger, reg prometheus.Registerer) (*Remover, error) {
	r := &Remover{store: New(pool, wake), pool: pool, kinds: now, log: log.With("component", "edge-removals"), at: func(string) error { return nil },
		removed: prometheus.NewCounter(prometheus.CounterOpts{Name: "edge_removals_removed_total", Help: "Edges removed by removals of all edges of an object."})}
	if err := reg.Register(r.removed); err != nil {
		return nil, fmt.Errorf("register the metrics of removals: %w", err)
	}
	return r, nil
}

const (
	// removalPoll is between two looks for removals while there are none, less a random quarter.
	removalPoll = time.Second
	// removalRetry is how long a Remover rests after an error.
	removalRetry = 5 * time.Second
)

// Run works off removals until ctx ends, and returns nil. Failures are logged and tried again. After each slice it rests for as long as that took: other writers get
// at least as much of the database.
func (r *Remover) Run(ctx context.Context) error {
	for {
		start := time.Now()
		worked, err := r.runOnce(ctx)
		rest := time.Since(start)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			r.log.WarnContext(ctx, "removing the edges of an object, trying again", "err", err)
			rest = removalRetry
		case !worked:
			rest = removalPoll - rand.N(removalPoll/4)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rest):
		}
	}
}

// nextRemovalSQL finds whose turn it is: the next tenant's, and of its removals the one that has waited for longest. What others work on is passed over.
// Index: edge_removals_unfinished_idx.   Locks: the removal, for as long as the statement takes.
const nextRemovalSQL = `
SELECT /* store.next_removal */ tenant_id, removal_id::text FROM edge_removals
 WHERE finished_at IS NULL ORDER BY tenant_id <= @tenant, tenant_id, worked_at NULLS FIRST, requested_at LIMIT 1 FOR UPDATE SKIP LOCKED`

// lockRemovalSQL takes a removal, unless another Remover has it or has finished it.
// Index: edge_removals_pkey.   Locks: the removal.
const lockRemovalSQL = `
SELECT /* store.lock_removal */ ` + removalColumns + ` FROM edge_removals
 WHERE tenant_id = @tenant AND removal_id = @id::uuid AND finished_at IS NULL FOR UPDATE SKIP LOCKED`

// moveRemovalSQL notes how far a removal has come.
// Index: edge_removals_pkey.   Locks: the removal, which the transaction has locked.
const moveRemovalSQL = `
UPDATE /* store.move_removal */ edge_removals
   SET worked_at = clock_timestamp(), finished_at = CASE WHEN @finished THEN clock_timestamp() END, again = @again, step = @step, after_from = @from, after_to = @to, removed = @removed
 WHERE tenant_id = @tenant AND removal_id = @id::uuid`

// kindTableSQL looks whether there is a table of a kind of edges.
// Index: none.   Locks: none.
const kindTableSQL = `SELECT /* store.kind_table */ to_regclass('edges_' || @kind::text) IS NOT NULL`

// runOnce removes a slice of one removal, and reports whether there was any.
func (r *Remover) runOnce(ctx context.Context) (worked bool, err error) {
	var tenant int64
	var id string
	err = r.pool.QueryRow(ctx, nextRemovalSQL, pgx.StrictNamedArgs{"tenant": r.tenant}).Scan(&tenant, &id)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for removals: %w", err)
	}
	r.tenant = tenant
	var n int64
	var m Removal
	err = r.store.write(ctx, tenant, place{}, func(tx *unit) error {
		n, m = 0, Removal{}
		err := tx.QueryRow(ctx, lockRemovalSQL, pgx.StrictNamedArgs{"tenant": tenant, "id": id}).Scan(m.fields()...)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err == nil {
			n, err = r.slice(ctx, tx, tenant, &m)
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("removal %s of tenant %d: %w", id, tenant, err)
	}
	r.removed.Add(float64(n))
	if m.FinishedAt != nil {
		r.log.InfoContext(ctx, "the edges of an object are removed", "removal", id, "tenant", tenant, "removed", m.Removed)
	}
	return true, nil
}

// slice removes the next edges of a removal, which is locked, and moves its cursor.
func (r *Remover) slice(ctx context.Context, tx *unit, tenant int64, m *Removal) (n int64, err error) {
	if err := r.at("locked"); err != nil {
		return 0, err
	}
	set := r.kinds()
	ends := [...]kinds.End{kinds.From, kinds.To}
	for ; m.step < len(m.Kinds)*len(ends); m.step, m.after = m.step+1, (EdgeKey{}) {
		name, end := m.Kinds[m.step/len(ends)], ends[m.step%len(ends)]
		kind, there := set.Edge(name)
		if !there {
			var young bool
			if err := tx.QueryRow(ctx, kindTableSQL, pgx.StrictNamedArgs{"kind": name}).Scan(&young); err != nil || young {
				return 0, errors.Join(err, fmt.Errorf("the kind %s is not known here yet", name))
			}
			continue // it was dropped, which takes one without edges
		}
		if !m.Direction.Has(end) || !slices.Contains(kind.EndsAt(m.Object), end) {
			continue
		}
		k := r.store.edgesOf(kind.Name)
		all, next, more, err := k.edgesOf(ctx, tx, tenant, m.ObjectID, end, m.after)
		if err != nil {
			return 0, fmt.Errorf("look for edges of kind %s %s %s %d: %w", kind.Name, end, m.Object, m.ObjectID, err)
		}
		if !more {
			continue
		}
		if n, err = k.removeOf(ctx, tx, tenant, kind, all, Meta{Actor: m.Actor, TraceParent: m.TraceParent}); err != nil {
			return 0, err
		}
		m.after = next
		if n > 0 {
			m.Removed[kind.Name] += n
		}
		break
	}
	finished := m.step == len(m.Kinds)*len(ends)
	if finished && m.again {
		finished, m.again, m.step = false, false, 0
	}
	if err := r.at("removed"); err != nil {
		return 0, err
	}
	if finished {
		m.FinishedAt = new(time.Now())
	}
	_, err = tx.Exec(ctx, moveRemovalSQL, pgx.StrictNamedArgs{"tenant": tenant, "id": m.ID, "finished": finished, "again": m.again, "step": m.step,
		"from": m.after.From, "to": m.after.To, "removed": m.Removed})
	if err == nil {
		err = r.at("moved")
	}
	return n, err
}
