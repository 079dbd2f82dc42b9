package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// ErrThreadReturning reports a write in an archived thread that has more comments than can be brought back at once. Nothing was
// written. Each further attempt, and the archiver's next run, bring back more of it.
var ErrThreadReturning = errors.New("store: the thread is on its way back from the archive")

// archivedError says which objects' threads have to be brought back before a write can be done: of an item, or of all when nothing was
// written.
type archivedError struct{ objects []int64 }

func (e *archivedError) Error() string {
	return fmt.Sprintf("store: the threads of objects %v are archived", e.objects)
}

const (
	// returnBudget is how long one call brings threads back before it gives up: at some 20,000 comments a second most threads are back
	// by then, and clients of HTTP still wait.
	returnBudget = 2 * time.Second

	// moveRows is how many comments one transaction moves, there or back: some 50 ms, for which writers of that thread wait.
	moveRows = 1000

	// returnLockTimeout is how long a return waits for another one's transaction, or the archiver's, or for others' to end.
	returnLockTimeout = 500 * time.Millisecond

	// returnTxTimeout bounds one transaction that brings comments back.
	returnTxTimeout = 5 * time.Second
)

// Who brought a thread back, as archived_threads keeps it.
const (
	returnedByWrite = "write" // a writer of that thread
	returnedByUndo  = "undo"  // an operator
	returnedByJob   = "job"   // the archiver, which found that it was not quiet after all
)

// bringingBack runs writes. Those whose thread is archived are run again once it is back, which happens outside of every transaction of
// theirs, and of everybody else's.
func bringingBack[W any](ctx context.Context, s *Store, tenant int64, k *childKind, writes []W, run func(context.Context, int64, []W) ([]ChildOutcome, error)) ([]ChildOutcome, error) {
	out, err := run(ctx, tenant, writes)
	objects, left := archivedOf(out, err)
	if objects == nil {
		return out, err
	}
	if left == nil {
		left = make([]int, len(writes))
		for i := range left {
			left[i] = i
		}
		out = make([]ChildOutcome, len(writes))
	}
	for deadline := time.Now().Add(s.returnBudget); objects != nil; {
		var again []ChildOutcome
		if err = s.bringBack(ctx, tenant, k, objects, deadline); err == nil {
			some := make([]W, len(left))
			for n, i := range left {
				some[n] = writes[i]
			}
			again, err = run(ctx, tenant, some)
		}
		objects = nil
		more, which := archivedOf(again, err)
		switch {
		case more != nil && which == nil: // all of them
			objects = more
		case err != nil && len(left) == len(writes): // nothing was written
			return nil, err
		case err != nil: // what was written, was
			for _, i := range left {
				out[i] = ChildOutcome{Err: err}
			}
		default:
			var still []int
			for n, i := range left {
				out[i] = again[n]
				if slices.Contains(which, n) {
					still = append(still, i)
				}
			}
			objects, left = more, still
		}
	}
	return out, nil
}

// archivedOf returns the objects whose threads have to be brought back, nil for none, and of which items: nil for all.
func archivedOf(out []ChildOutcome, err error) (objects []int64, items []int) {
	var archived *archivedError
	if errors.As(err, &archived) {
		return archived.objects, nil
	}
	for i, o := range out {
		if errors.As(o.Err, &archived) {
			objects, items = append(objects, archived.objects...), append(items, i)
		}
	}
	return objects, items
}

// inOrder is the error of a transaction that would write later items of an entity and not the earlier ones, whose thread is archived:
// some entity comes twice, and a thread may come back between two statements.
func inOrder(turns [][]int, out []ChildOutcome) error {
	if objects, _ := archivedOf(out, nil); len(turns) > 1 && objects != nil {
		return &archivedError{objects: objects}
	}
	return nil
}

// bringBack returns when the threads of the objects are none of the archive's, or ErrThreadReturning.
func (s *Store) bringBack(ctx context.Context, tenant int64, k *childKind, objects []int64, deadline time.Time) error {
	slices.Sort(objects)
	for _, object := range slices.Compact(objects) {
		for back := false; !back; {
			if err := ctx.Err(); err != nil {
				return err
			}
			if !time.Now().Before(deadline) {
				return ErrThreadReturning
			}
			// One at a time for each thread, or its writers would take every connection to wait for each other. What they share does
			// not end with the request of one of them.
			v, err, _ := s.returns.Do(fmt.Sprint(tenant, "/", k.Kind, "/", object), func() (any, error) {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), returnTxTimeout)
				defer cancel()
				select { // as writes that run alone, so that they do not keep reads from the pool
				case s.slots.alone <- struct{}{}:
					defer func() { <-s.slots.alone }()
					return s.returnSome(ctx, tenant, k, object)
				case <-time.After(returnLockTimeout):
					return false, nil
				}
			})
			if err != nil && !postgres.IsLockTimeout(err) {
				return fmt.Errorf("bring back the thread of %s under %d: %w", k.Kind, object, err)
			}
			back = err == nil && v.(bool)
		}
	}
	return nil
}

func (s *Store) returnSome(ctx context.Context, tenant int64, k *childKind, object int64) (back bool, err error) {
	var ended bool
	err = postgres.InTenant(ctx, s.pool, tenant, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
		if _, err = tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", returnLockTimeout.Milliseconds())); err != nil {
			return err
		}
		var n int64
		n, back, err = k.returnChunk(ctx, tx, tenant, object, returnedByWrite, s.moveRows)
		ended = back && n >= 0
		return err
	})
	if err == nil && ended {
		s.returned.Add(1)
	}
	return back, err
}

// ThreadsReturned is how many threads this Store's writes have brought back from the archive.
func (s *Store) ThreadsReturned() int64 { return s.returned.Load() }

// returnLockSQL locks the stub of a thread.
// Index: archived_threads_stub_idx.   Locks: the stub.
const returnLockSQL = `
SELECT /* store.return_lock */ archive_id FROM archived_threads
 WHERE tenant_id = @tenant::bigint AND kind = '{{.Kind}}' AND object_id = @object::bigint AND state <> 'RETURNED'
   FOR NO KEY UPDATE`

// returnMoveSQL moves some children of a thread back, as they are. Nobody else inserts in a thread that has a stub, so no slug and no place is taken.
// Index: children_archive_KIND_path_key or children_archive_KIND_object_idx, children_archive_KIND_pkey.   Locks: the archived rows.
const returnMoveSQL = `
WITH page AS (
  SELECT child_id FROM {{.Archive}} WHERE tenant_id = @tenant::bigint AND object_id = @object::bigint ORDER BY {{.Order}} LIMIT @limit
), gone AS (
  DELETE FROM {{.Archive}} a USING page p WHERE a.tenant_id = @tenant::bigint AND a.child_id = p.child_id RETURNING a.*
)
INSERT /* store.return_move */ INTO {{.Table}} (` + movedColumns + `) SELECT ` + movedColumns + ` FROM gone`

// movedColumns are all columns of a child but its kind, which its table knows.
const movedColumns = `tenant_id, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at, attributes`

// returnStateSQL keeps how far the return has come.
// Index: archived_threads_pkey.   Locks: the stub.
const returnStateSQL = `
UPDATE /* store.return_state */ archived_threads
   SET state = CASE WHEN @back::boolean THEN 'RETURNED' ELSE 'RETURNING' END, returned_at = now(), returned_by = coalesce(returned_by, @by::text)
 WHERE tenant_id = @tenant::bigint AND kind = '{{.Kind}}' AND object_id = @object::bigint AND archive_id = @archive::bigint`

// returnChunk brings back up to limit children of a thread, says how many, and whether that was the last of them. A thread that has no
// stub is back, with -1. The transaction sees the tenant's rows.
func (s childShape) returnChunk(ctx context.Context, tx pgx.Tx, tenant, object int64, by string, limit int) (n int64, back bool, err error) {
	var archive int64
	args := pgx.StrictNamedArgs{"tenant": tenant, "object": object}
	err = tx.QueryRow(ctx, s.sql(returnLockSQL), args).Scan(&archive)
	if errors.Is(err, pgx.ErrNoRows) {
		return -1, true, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("lock the stub of the thread: %w", err)
	}
	tag, err := tx.Exec(ctx, s.sql(returnMoveSQL), pgx.StrictNamedArgs{"tenant": tenant, "object": object, "limit": limit})
	if err != nil {
		return 0, false, fmt.Errorf("move up to %d children back: %w", limit, err)
	}
	n = tag.RowsAffected()
	back = n < int64(limit)
	_, err = tx.Exec(ctx, s.sql(returnStateSQL), pgx.StrictNamedArgs{"tenant": tenant, "object": object, "archive": archive, "back": back, "by": by})
	if err != nil {
		return 0, false, fmt.Errorf("keep the state of the return: %w", err)
	}
	return n, back, nil
}

// archivedSQL names those objects whose thread is archived, or on its way there or back.
// Index: archived_threads_stub_idx.   Locks: none.
const archivedSQL = `
SELECT /* store.archived */ object_id FROM archived_threads
 WHERE tenant_id = @tenant::bigint AND kind = '{{.Kind}}' AND object_id = ANY(@object_ids::bigint[]) AND state <> 'RETURNED'`

func (s childShape) archived(ctx context.Context, tx pgx.Tx, tenant int64, objects []int64) ([]int64, error) {
	rows, _ := tx.Query(ctx, s.sql(archivedSQL), pgx.StrictNamedArgs{"tenant": tenant, "object_ids": objects})
	archived, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("look for %d threads in the archive: %w", len(objects), err)
	}
	return archived, nil
}
