package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
)

// Direction selects the edges of an object that a Removal removes.
type Direction string

// The directions: edges from the object, edges to it, and both.
const (
	DirectionFrom Direction = "from"
	DirectionTo   Direction = "to"
	DirectionBoth Direction = "both"
)

// Has reports whether d includes the edges with the object at this end.
func (d Direction) Has(end kinds.End) bool { return d == DirectionBoth || string(d) == string(end) }

// RemovalRequest requests the removal of all edges of an object.
type RemovalRequest struct {
	Meta
	Object    string   // type of the object in the kinds, for example user
	ID        event.ID // id of the object
	IDs       kinds.IDForm
	Kinds     []string // of edges, sorted; the object is an end of each
	Direction Direction
	Reason    string // stored with the removal
}

// RemovalKinds returns the kinds for a RemovalRequest: the kinds with edges in the direction of
// such an object, limited to names unless it is nil. ok is false if there are none, or if one of
// names is not among them.
func RemovalKinds(set *kinds.Set, object string, d Direction, names []string) (chosen []string, ok bool) {
	for _, k := range set.AllEdges() {
		if slices.ContainsFunc(k.EndsAt(object), d.Has) && (names == nil || slices.Contains(names, k.Name)) {
			chosen = append(chosen, k.Name)
		}
	}
	return chosen, len(chosen) > 0 && !slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(chosen, name) })
}

// Removal is the removal of all edges of an object, with its progress.
type Removal struct {
	ID          string // a UUID
	Object      string
	ObjectID    event.ID
	Kinds       []string
	Direction   Direction
	Actor       string
	TraceParent string
	RequestedAt time.Time
	WorkedAt    *time.Time       // last slice; nil before the first
	FinishedAt  *time.Time       // nil while unfinished
	Removed     map[string]int64 // edges by kind

	again bool
	step  int
	after EdgeKey
}

const removalColumns = `removal_id::text, object, object_id, kinds, direction, actor, trace_parent, requested_at, worked_at, ` +
	`finished_at, removed, again, step, after_from, after_to`

func (r *Removal) fields() []any {
	return []any{&r.ID, &r.Object, &r.ObjectID, &r.Kinds, &r.Direction, &r.Actor, &r.TraceParent, &r.RequestedAt, &r.WorkedAt,
		&r.FinishedAt, &r.Removed, &r.again, &r.step, &r.after.From, &r.after.To}
}

// requestRemovalSQL inserts a removal. If the same one is unfinished and has begun, it makes that
// one run once more over all edges. Index: edge_removals_unfinished_idx. Locks: the removal; waits
// while a slice of it runs.
const requestRemovalSQL = `
INSERT /* store.request_removal */ INTO edge_removals AS r (tenant_id, object, object_id, kinds, direction, actor, trace_parent, reason)
VALUES (@tenant, @object, @id, @kinds, @direction, @actor, @trace, @reason)
    ON CONFLICT (tenant_id, object, object_id, kinds, direction) WHERE finished_at IS NULL DO UPDATE SET again = r.worked_at IS NOT NULL
RETURNING ` + removalColumns

// RequestRemoval makes a Remover remove all edges of an object that exist when it returns, each
// with a version and an event of its own. Edges made later may or may not be included. If the same
// removal is unfinished, RequestRemoval returns that one, even if somebody else requested it. If it
// has begun, it runs once more over all edges.
func (s *Store) RequestRemoval(ctx context.Context, tenant int64, r RemovalRequest) (out Removal, err error) {
	if err = checkMeta(r.Meta); err == nil {
		err = checkID(r.IDs, r.ID)
	}
	if err == nil && (len(r.Kinds) == 0 || !slices.IsSorted(r.Kinds)) {
		err = fmt.Errorf("%w: %s %s, kinds %q", ErrInvalid, r.Object, r.ID, r.Kinds)
	}
	if err == nil {
		err = s.write(ctx, of(tenant), func(tx *unit) error {
			out = Removal{}
			return tx.QueryRow(ctx, requestRemovalSQL, pgx.StrictNamedArgs{
				"tenant": tenant, "object": r.Object, "id": r.ID, "kinds": r.Kinds, "direction": string(r.Direction),
				"actor": r.Actor, "trace": r.TraceParent, "reason": r.Reason,
			}).Scan(out.fields()...)
		})
	}
	if err != nil {
		return Removal{}, fmt.Errorf("request the removal of the edges of %s %s of tenant %d: %w", r.Object, r.ID, tenant, err)
	}
	return out, nil
}

// getRemovalSQL reads a removal. Index: edge_removals_pkey. Locks: none.
const getRemovalSQL = `SELECT /* store.get_removal */ ` + removalColumns +
	` FROM edge_removals WHERE tenant_id = @tenant AND removal_id = @id::uuid`

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

// Remover works on removals, in slices of one transaction each. Tenants take turns, and so do the
// removals of a tenant. Any number of Removers may run at once. The row of a removal is its lease:
// a slice locks it, removes edges and moves the cursor, all or nothing. If a Remover dies or
// freezes, any other continues with the next slice; without its connection the first one can change
// nothing.
type Remover struct {
	store   *Store
	pool    *pgxpool.Pool
	kinds   func() *kinds.Set
	log     *slog.Logger
	removed prometheus.Counter

	tenant int64                   // the tenant of the last slice
	failed map[string]time.Time    // removals whose last slice failed, and when
	at     func(step string) error // a test's hook: an error ends the slice there
}

// NewRemover returns a Remover. The pool is a pool of the truth and acts as the system role; wake
// is the argument of New. It starts nothing.
func NewRemover(pool *pgxpool.Pool, wake func(slot int), now func() *kinds.Set, log *slog.Logger,
	reg prometheus.Registerer) (*Remover, error) {
	r := &Remover{store: New(pool, wake), pool: pool, kinds: now, log: log.With("component", "edge-removals"),
		failed: make(map[string]time.Time), at: func(string) error { return nil },
		removed: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_edge_removals_edges_total",
			Help: "Edges removed by removals of all edges of an object."})}
	if err := reg.Register(r.removed); err != nil {
		return nil, fmt.Errorf("register the metrics of removals: %w", err)
	}
	return r, nil
}

const (
	// removalPoll is the time between two queries for removals while there are none, less a random
	// quarter.
	removalPoll = time.Second
	// removalRetry is how long a Remover waits after an error.
	removalRetry = 5 * time.Second
	// removalBehind is how long a removal that failed is behind all others. Otherwise the others of
	// its tenant would wait for as long as it fails, and those of other tenants removalRetry for
	// each slice.
	removalBehind = time.Minute
)

// Run works on removals until ctx ends, and returns nil. It logs and retries failures. After each
// slice it waits for as long as the slice took, so other writers get at least half of the
// database's time.
func (r *Remover) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		start := time.Now()
		worked, err := r.runOnce(ctx)
		rest := time.Since(start)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			r.log.WarnContext(ctx, "removal of an object's edges failed, retrying", "err", err)
			rest = removalRetry
		case !worked:
			rest = removalPoll - rand.N(removalPoll/4)
		}
		work.Sleep(ctx, rest)
	}
	return nil
}

// nextRemovalSQL selects the next tenant's removal that has waited the longest, and a failed one
// only if there is no other. It skips removals on which other Removers work. Index:
// edge_removals_unfinished_idx. Locks: the removal, for the duration of the statement.
const nextRemovalSQL = `
SELECT /* store.next_removal */ tenant_id, removal_id::text FROM edge_removals
 WHERE finished_at IS NULL
 ORDER BY removal_id = ANY(@failed::uuid[]), tenant_id <= @tenant, tenant_id, worked_at NULLS FIRST, requested_at LIMIT 1
   FOR UPDATE SKIP LOCKED`

// lockRemovalSQL locks a removal, unless another Remover holds it or has finished it.
// Index: edge_removals_pkey. Locks: the removal.
const lockRemovalSQL = `
SELECT /* store.lock_removal */ ` + removalColumns + ` FROM edge_removals
 WHERE tenant_id = @tenant AND removal_id = @id::uuid AND finished_at IS NULL FOR UPDATE SKIP LOCKED`

// moveRemovalSQL records the progress of a removal.
// Index: edge_removals_pkey. Locks: the removal, which the transaction has locked.
const moveRemovalSQL = `
UPDATE /* store.move_removal */ edge_removals
   SET worked_at = clock_timestamp(), finished_at = CASE WHEN @finished THEN clock_timestamp() END, again = @again, step = @step,
       after_from = @from, after_to = @to, removed = @removed
 WHERE tenant_id = @tenant AND removal_id = @id::uuid`

// kindTableSQL checks whether a kind of edges has a table. Index: none. Locks: none.
const kindTableSQL = `SELECT /* store.kind_table */ to_regclass('edges_' || @kind::text) IS NOT NULL`

// runOnce runs one slice of one removal, and reports whether there was a removal to work on.
func (r *Remover) runOnce(ctx context.Context) (worked bool, err error) {
	var tenant int64
	var id string
	maps.DeleteFunc(r.failed, func(_ string, at time.Time) bool { return time.Since(at) > removalBehind })
	err = r.pool.QueryRow(ctx, nextRemovalSQL, pgx.StrictNamedArgs{"tenant": r.tenant,
		"failed": slices.Collect(maps.Keys(r.failed))}).Scan(&tenant, &id)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the next removal: %w", err)
	}
	r.tenant = tenant
	var n int64
	var m Removal
	err = r.store.write(ctx, of(tenant), func(tx *unit) error {
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
		r.failed[id] = time.Now()
		return false, fmt.Errorf("removal %s of tenant %d: %w", id, tenant, err)
	}
	delete(r.failed, id)
	r.removed.Add(float64(n))
	if m.FinishedAt != nil {
		r.log.InfoContext(ctx, "removed all edges of an object", "removal", id, "tenant", tenant, "removed", m.Removed)
	}
	return true, nil
}

// slice removes the next edges of a removal and moves its cursor. The caller has locked the
// removal.
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
			var hasTable bool
			if err := tx.QueryRow(ctx, kindTableSQL, pgx.StrictNamedArgs{"kind": name}).Scan(&hasTable); err != nil || hasTable {
				return 0, errors.Join(err, fmt.Errorf("this process does not know the kind %s yet", name))
			}
			continue // the kind was dropped, so it had no edges
		}
		if !m.Direction.Has(end) || !slices.Contains(kind.EndsAt(m.Object), end) {
			continue
		}
		all, next, more, err := nextEdgesOf(ctx, tx, tenant, kind, m.ObjectID, end, m.after)
		if err != nil {
			return 0, fmt.Errorf("read the edges of kind %s %s %s %s: %w", kind.Name, end, m.Object, m.ObjectID, err)
		}
		if !more {
			continue
		}
		meta := Meta{Actor: m.Actor, TraceParent: m.TraceParent}
		if n, err = r.store.edgesOf(kind.Name).removeOf(ctx, tx, tenant, kind, all, meta); err != nil {
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
	_, err = tx.Exec(ctx, moveRemovalSQL, pgx.StrictNamedArgs{"tenant": tenant, "id": m.ID, "finished": finished,
		"again": m.again, "step": m.step, "from": m.after.From, "to": m.after.To, "removed": m.Removed})
	if err == nil {
		err = r.at("moved")
	}
	return n, err
}
