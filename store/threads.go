package store

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
)

// ThreadSettings are the new settings of a thread: of the children of a kind under one object.
type ThreadSettings struct {
	Meta
	Object       event.ID
	IfVersion    *int64 // the version that the writer saw, 0 if never set; nil writes at any version
	Locked       bool   // the thread takes no new children; existing ones can be edited, deleted and moderated
	Premoderated bool   // new children wait for a moderator
	Title        string // trimmed before it is stored; see ValidTitle
}

// MaxTitleBytes bounds a thread's title.
const MaxTitleBytes = 300

// ValidTitle reports whether s can be a title: at most MaxTitleBytes of UTF-8 without control
// characters. It may be empty.
func ValidTitle(s string) bool { return len(s) <= MaxTitleBytes && plainText(s) }

func (w ThreadSettings) check(k *childKind) error {
	if err := checkMeta(w.Meta); err != nil {
		return err
	}
	if err := checkID(k.ParentIDs, w.Object); err != nil {
		return err
	}
	if !ValidTitle(w.Title) {
		return fmt.Errorf("%w: title of %d bytes", ErrInvalid, len(w.Title))
	}
	return nil
}

// ThreadOutcome is the result of one ThreadSettings.
type ThreadOutcome struct {
	Thread  event.Thread // the present settings
	Changed bool         // this write changed it and made an event
	Err     error        // ErrInvalid or a *StaleThreadError: the write changed nothing
}

// StaleThreadError reports that the thread's settings have another version than the write expects.
type StaleThreadError struct{ Current event.Thread }

func (e *StaleThreadError) Error() string {
	return fmt.Sprintf("store: thread %s is at version %d", e.Current.PostID, e.Current.Version)
}

// threads is the table of every version of every thread's settings. A thread without a row has the
// default settings at version 0.
func threads() *versioned.Table[event.Thread] {
	return versioned.New[event.Thread](versioned.Definition{
		Table: "threads", Sequence: "object_version_id", Key: []versioned.Column{{Name: "post_id", Type: "text"},
			{Name: "kind", Type: "text"}},
		Absent: map[string]string{"kind": event.AggregateComment}, Purged: "threads_purged",
	})
}

// SetThreads changes the settings of threads. Equal settings change nothing and make no event. By
// default a thread is not locked, not premoderated and has no title. Writers of one thread wait for
// each other: if several saw the same version, the first one that changes it succeeds and the
// others get a *StaleThreadError.
func (s *Store) SetThreads(ctx context.Context, tenant int64, k kinds.Child, settings []ThreadSettings) ([]ThreadOutcome, error) {
	return s.children(k).settings.do(ctx, tenant, settings)
}

func (k *childKind) writeSettings(ctx context.Context, settings []ThreadSettings, at place) ([]ThreadOutcome, error) {
	tenant := at.tenants[0] // the only one: settings are rare
	out, err := inTurns(ctx, k.store, at, settings, turns[ThreadSettings, event.ID, ThreadOutcome]{
		check: func(w *ThreadSettings, o *ThreadOutcome) (event.ID, any, bool) {
			o.Err = w.check(k)
			if !k.Moderated {
				o.Err = fmt.Errorf("%w: children of kind %s are not moderated", ErrInvalid, k.Kind)
			}
			return w.Object, nil, o.Err == nil
		},
		write: func(ctx context.Context, tx *unit, settings []ThreadSettings, turn []int, out []ThreadOutcome) error {
			return k.store.setTurn(ctx, tx, tenant, k, settings, turn, out)
		}})
	if err != nil {
		return nil, fmt.Errorf("set %d threads of tenant %d: %w", len(settings), tenant, err)
	}
	return out, nil
}

func (s *Store) setTurn(ctx context.Context, tx *unit, tenant int64, k *childKind, settings []ThreadSettings, turn []int,
	out []ThreadOutcome) error {
	objects, locks := make([]event.ID, len(turn)), make([]versioned.Change[event.Thread], len(turn))
	for n, i := range turn {
		objects[n] = settings[i].Object
		locks[n] = versioned.Change[event.Thread]{TenantID: tenant, Object: newThread(k.Kind, objects[n]), By: settings[i].Actor}
	}
	if err := s.threads.Lock(ctx, tx, locks); err != nil {
		return err
	}
	now, current, err := getThreads(ctx, tx, tenant, k.Kind, objects)
	if err != nil {
		return err
	}
	var changes []versioned.Change[event.Thread]
	var events []event.Event
	for n, i := range turn {
		w, t := settings[i], current[n]
		out[i] = ThreadOutcome{Thread: t} // reset by a retry of the transaction
		if w.IfVersion != nil && *w.IfVersion != t.Version {
			out[i].Err = &StaleThreadError{Current: t}
			continue
		}
		next := t
		next.Locked, next.Premoderate, next.Title = w.Locked, w.Premoderated, strings.TrimSpace(w.Title)
		if next == t {
			continue
		}
		next.Version++
		if now.After(next.UpdatedAt.Time) { // times never decrease between two versions
			next.UpdatedAt = wireTime(now)
		}
		out[i].Thread, out[i].Changed = next, true
		next.Actor = w.Actor
		payload, err := json.Marshal(next)
		if err != nil {
			return fmt.Errorf("encode thread %s: %w", w.Object, err)
		}
		changes = append(changes, versioned.Change[event.Thread]{TenantID: tenant, Object: next, By: w.Actor, At: next.UpdatedAt.Time})
		events = append(events, event.Event{
			TenantID: tenant, AggregateType: event.AggregateThread, AggregateID: w.Object, Type: event.Updated,
			OccurredAt: next.UpdatedAt.Time, TraceParent: w.TraceParent, Payload: payload,
		})
	}
	tx.events = append(tx.events, events...)
	_, err = s.threads.Upsert(ctx, tx, changes)
	return err
}

// newThread returns the default settings of a thread. For the kind comment the member Kind is
// empty, as in events from before there were other kinds.
func newThread(kind string, object event.ID) event.Thread {
	if kind == event.AggregateComment {
		kind = ""
	}
	return event.Thread{Kind: kind, PostID: object}
}

// threadsGetSQL reads the settings of threads, in the order of the argument, and the time. Threads
// that retention deleted or purged had the defaults; they keep the version that consumers know.
// Index: threads_head_idx, threads_purged_pkey. Locks: none.
const threadsGetSQL = `
SELECT /* store.threads_get */ now(), t.object, coalesce(p.version, 0)
  FROM unnest(@post_ids::text[]) WITH ORDINALITY AS w(post_id, ord)
  LEFT JOIN threads t ON t.tenant_id = @tenant::bigint AND t.post_id = w.post_id AND t.kind = @kind::text
                      AND t.version_state IN ('LATEST', 'DELETED')
  LEFT JOIN threads_purged p ON t.post_id IS NULL AND p.tenant_id = @tenant::bigint AND p.post_id = w.post_id AND p.kind = @kind::text
 ORDER BY w.ord`

// getThreads returns the settings of each object's thread, and the transaction's time. A thread
// that was never set has the defaults at version 0.
func getThreads(ctx context.Context, tx postgres.Querier, tenant int64, kind string,
	objects []event.ID) (now time.Time, all []event.Thread, err error) {
	var object *event.Thread
	var purged int64
	rows, _ := tx.Query(ctx, threadsGetSQL, pgx.StrictNamedArgs{"tenant": tenant, "kind": kind, "post_ids": objects})
	_, err = pgx.ForEachRow(rows, []any{&now, &object, &purged}, func() error {
		t := newThread(kind, objects[len(all)])
		t.Version = purged
		if object != nil {
			t = *object
			t.Actor = "" // as with children and edges, only the history has it
		}
		all = append(all, t)
		return nil
	})
	if err != nil {
		return time.Time{}, nil, fmt.Errorf("read %d threads: %w", len(objects), err)
	}
	return now, all, nil
}

// GetThread returns the settings of the object's thread of the kind. If they were never set, it
// returns the defaults at version 0 without a time.
func (s *Store) GetThread(ctx context.Context, tenant int64, k kinds.Child, object event.ID) (event.Thread, error) {
	var t event.Thread
	err := s.read(ctx, tenant, func(tx pgx.Tx) error {
		_, all, err := getThreads(ctx, tx, tenant, k.Name, []event.ID{object})
		if err != nil {
			return err
		}
		t = all[0]
		return nil
	})
	if err != nil {
		return event.Thread{}, fmt.Errorf("read the thread of %s under %s of tenant %d: %w", k.Plural, object, tenant, err)
	}
	return t, nil
}

// ThreadVersions returns up to limit versions of a thread's settings, newest first, from below the
// position before. before comes from an earlier result; start with math.MaxInt64.
func (s *Store) ThreadVersions(ctx context.Context, tenant int64, k kinds.Child, object event.ID, before int64,
	limit int) ([]versioned.Version[event.Thread], error) {
	var all []versioned.Version[event.Thread]
	err := s.read(ctx, tenant, func(tx pgx.Tx) (err error) {
		all, err = s.threads.Recent(ctx, tx, tenant, versioned.Key{object, k.Name}, before, limit)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the versions of the thread of %s under %s of tenant %d: %w", k.Plural, object, tenant, err)
	}
	return all, nil
}

// CheckThreads reports every version of a thread's settings that breaks a rule of package
// versioned. It returns the number of versions checked. The pool acts as the system role.
func CheckThreads(ctx context.Context, pool *pgxpool.Pool, report func(versioned.Flaw[event.Thread])) (versions int64, err error) {
	err = postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		versions, err = threads().Check(ctx, tx, report)
		return err
	})
	return versions, err
}

// RetainThreads applies retention to the settings of threads (versioned.Retain). It deletes
// settings logically if they equal the defaults and did not change for terms.After. It purges them
// after the same time again. The effective settings of a thread and its version do not change.
func RetainThreads(ctx context.Context, pool *pgxpool.Pool, terms versioned.Terms) error {
	return threads().Retain(ctx, pool, versioned.Retention[event.Thread]{Terms: terms,
		Invalid: func(_ context.Context, latest []versioned.Head[event.Thread]) ([]versioned.Head[event.Thread], error) {
			return slices.DeleteFunc(latest, func(h versioned.Head[event.Thread]) bool {
				return h.Object.Locked || h.Object.Premoderate || h.Object.Title != ""
			}), nil
		}})
}
