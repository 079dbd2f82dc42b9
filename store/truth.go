package store

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// State is the present state of an entity: the content of an event about it, without the actor.
type State[T any] struct {
	TenantID int64
	Object   T
}

// SettingsEvent returns the state as an event, as if it had just been written. The event is on no
// stream and has neither id nor sequence.
func SettingsEvent(s *State[event.Thread]) (event.Event, error) {
	payload, err := json.Marshal(s.Object)
	if err != nil {
		return event.Event{}, fmt.Errorf("encode the settings of thread %s: %w", s.Object.PostID, err)
	}
	return event.Event{TenantID: s.TenantID, AggregateType: event.AggregateThread, AggregateID: s.Object.PostID, Type: event.Updated,
		Version: 1, Payload: payload}, nil
}

// SettingsEvents converts states of settings to events.
func SettingsEvents(states iter.Seq2[*State[event.Thread], error]) iter.Seq2[event.Event, error] {
	return eventsOf(states, SettingsEvent)
}

func eventsOf[T any](states iter.Seq2[*State[T], error], of func(*State[T]) (event.Event, error)) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		for s, err := range states {
			var e event.Event
			if err == nil {
				e, err = of(s)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// scanRows is the number of rows of the truth that are in memory at a time.
const scanRows = 4000

// scan yields the rows of sql, page by page. Each page is a statement of its own, so no snapshot of
// the truth stays open. A row that changes meanwhile appears in its old or its new state. args
// makes the arguments with which sql continues after the last row; scan adds the argument limit. If
// limit is not 0, scan reads one page of that size.
func scan[R, T any](ctx context.Context, pool *pgxpool.Pool, sql string, after *State[T], limit int,
	args func(*State[T]) pgx.StrictNamedArgs, state func(*R) State[T]) iter.Seq2[*State[T], error] {
	return func(yield func(*State[T], error) bool) {
		if after == nil {
			after = new(State[T])
		}
		for page := max(limit, 0); ; {
			if page == 0 {
				page = scanRows
			}
			named := args(after)
			named["limit"] = page
			rows, _ := pool.Query(ctx, sql, named)
			all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[R])
			if err != nil {
				yield(nil, fmt.Errorf("read a page of the truth: %w", err))
				return
			}
			for _, row := range all {
				s := state(row)
				if after = &s; !yield(after, nil) {
					return
				}
			}
			if len(all) < page || limit != 0 {
				return
			}
		}
	}
}

type settingsState struct {
	TenantID int64
	Object   event.Thread
}

// scanSettingsSQL reads a page of the settings of threads. Threads that retention deleted or purged
// had the defaults; they keep their version. Index: threads_head_idx, threads_purged_pkey, one
// range each. Locks: none.
const scanSettingsSQL = `
SELECT /* store.scan_settings */ tenant_id, object
  FROM (SELECT tenant_id, post_id, kind, object FROM threads WHERE version_state IN ('LATEST', 'DELETED')
         UNION ALL
        SELECT tenant_id, post_id, kind, jsonb_build_object('kind', kind, 'post_id', post_id, 'version', version)
          FROM threads_purged p
         WHERE NOT EXISTS (SELECT FROM threads t WHERE t.tenant_id = p.tenant_id AND t.post_id = p.post_id AND t.kind = p.kind)) t
 WHERE (tenant_id, post_id, kind) > (@tenant::bigint, @post::text, @kind::text COLLATE "C")
 ORDER BY tenant_id, post_id, kind LIMIT @limit`

// ScanSettings is ScanChildren for the settings of threads of every kind, in the order of object
// and kind.
func ScanSettings(ctx context.Context, pool *pgxpool.Pool, after *State[event.Thread], limit int) iter.Seq2[*State[event.Thread], error] {
	return scan(ctx, pool, scanSettingsSQL, after, limit, func(s *State[event.Thread]) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"tenant": s.TenantID, "post": s.Object.PostID, "kind": s.Object.Of()}
	}, func(r *settingsState) State[event.Thread] { return settingsOf(r.TenantID, r.Object) })
}

// settingsOf converts settings as the table has them.
func settingsOf(tenant int64, t event.Thread) State[event.Thread] {
	t.Actor = "" // as with children and edges, only the history has it
	if t.Kind == event.AggregateComment {
		t.Kind = "" // as in its events
	}
	return State[event.Thread]{tenant, t}
}

// GetSettings is GetChildren for the settings of threads, of every kind.
func GetSettings(ctx context.Context, q postgres.Querier, tenant int64, refs []event.Ref) (all []State[event.Thread], err error) {
	objects := make(map[string][]event.ID) // by kind
	for _, r := range refs {
		if r.Type == event.AggregateThread {
			kind := cmp.Or(r.Kind, event.AggregateComment)
			objects[kind] = append(objects[kind], r.Thread)
		}
	}
	for kind, some := range objects {
		_, got, err := getThreads(ctx, q, tenant, kind, some)
		if err != nil {
			return nil, err
		}
		for _, t := range got {
			if t.Version > 0 {
				all = append(all, State[event.Thread]{tenant, t})
			}
		}
	}
	return all, nil
}

// States is the function States under the row-level security of the tenant.
func (s *Store) States(ctx context.Context, tenant int64, set *kinds.Set, refs []event.Ref) (events []event.Event, err error) {
	err = s.read(ctx, tenant, func(tx pgx.Tx) (err error) {
		events, err = States(ctx, tx, tenant, set, refs)
		return err
	})
	return events, err
}

// States returns the present states of the entities as events, regardless of the versions in refs.
// It omits entities that the tenant does not have or whose kind is not in set. It reads with the
// rights of q.
func States(ctx context.Context, q postgres.Querier, tenant int64, set *kinds.Set, refs []event.Ref) ([]event.Event, error) {
	return StatesBy(ctx, q, tenant, set, refs, "")
}

// StatesBy is States with an actor for the children and edges.
func StatesBy(ctx context.Context, q postgres.Querier, tenant int64, set *kinds.Set, refs []event.Ref,
	actor string) (events []event.Event, err error) {
	settings, err := GetSettings(ctx, q, tenant, refs)
	if events, err = appendEvents(nil, settings, SettingsEvent, err); err != nil {
		return nil, err
	}
	seen := make(map[string]bool)
	for _, r := range refs {
		if seen[r.Type] {
			continue
		}
		seen[r.Type] = true
		if k, ok := set.Edge(r.Type); ok {
			states, err := GetEdges(ctx, q, tenant, k, refs)
			events, err = appendEvents(events, states, func(s *State[event.Edge]) (event.Event, error) {
				s.Object.Actor = actor
				return EdgeEvent(k, s)
			}, err)
			if err != nil {
				return nil, err
			}
		} else if k, ok := set.Child(r.Type); ok {
			states, err := GetChildren(ctx, q, tenant, k, refs)
			events, err = appendEvents(events, states, func(s *State[event.Child]) (event.Event, error) {
				s.Object.Actor = actor
				return ChildEvent(k, s)
			}, err)
			if err != nil {
				return nil, err
			}
		}
	}
	return events, nil
}

// appendEvents appends the events of states, or returns err, the error of reading them.
func appendEvents[T any](events []event.Event, states []State[T], of func(*State[T]) (event.Event, error),
	err error) ([]event.Event, error) {
	for i := range states {
		e, err := of(&states[i])
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	return events, err
}
