package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// ErrThreadReturning reports a write in a shelved thread that has more comments than one call can
// bring back. The write did nothing. Each retry, and the shelver's next run, bring back more of
// the thread.
var ErrThreadReturning = errors.New("store: the thread is returning from the shelf")

// shelvedError lists the objects whose threads must return before a write. As an item's error it
// holds back that item; as a transaction's error, the transaction wrote nothing.
type shelvedError struct{ objects []event.ID }

func (e *shelvedError) Error() string {
	return fmt.Sprintf("store: the threads of objects %v are shelved", e.objects)
}

const (
	// returnBudget is how long one call brings threads back before it gives up. At about 20,000
	// comments a second most threads are back by then, and HTTP clients still wait.
	returnBudget = 2 * time.Second

	// moveRows is the number of comments that one transaction moves in either direction. It takes
	// about 50 ms, during which writers of that thread wait.
	moveRows = 1000

	// returnLockTimeout is how long a return waits for a lock of the shelver or another return, or
	// for a slot.
	returnLockTimeout = 500 * time.Millisecond

	// returnTxTimeout bounds one transaction that brings comments back.
	returnTxTimeout = 5 * time.Second
)

// The values of archived_threads.returned_by.
const (
	returnedByWrite = "write" // a writer of that thread
	returnedByUndo  = "undo"  // an operator
	returnedByJob   = "job"   // the shelver, which found that the thread was not quiet
)

// withReturns runs writes. If the thread of a write is shelved, withReturns brings the thread
// back, and then runs the write a second time. It brings threads back outside the transactions of
// all writes.
func withReturns[W any](ctx context.Context, s *Store, tenant int64, k *childKind, writes []W,
	run func(context.Context, int64, []W) ([]ChildOutcome, error)) ([]ChildOutcome, error) {
	out, err := run(ctx, tenant, writes)
	objects, left := shelvedOf(out, err)
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
		more, which := shelvedOf(again, err)
		switch {
		case more != nil && which == nil: // all items
			objects = more
		case err != nil && len(left) == len(writes): // nothing was written
			return nil, err
		case err != nil: // earlier writes have committed
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

// shelvedOf returns the objects whose threads must return, nil for none, and the affected items,
// nil for all.
func shelvedOf(out []ChildOutcome, err error) (objects []event.ID, items []int) {
	var shelved *shelvedError
	if errors.As(err, &shelved) {
		return shelved.objects, nil
	}
	for i, o := range out {
		if errors.As(o.Err, &shelved) {
			objects, items = append(objects, shelved.objects...), append(items, i)
		}
	}
	return objects, items
}

// inOrder refuses a transaction that would write later items of an entity but not the earlier ones,
// whose thread is shelved. An entity may occur twice, and a thread may return between two
// statements.
func inOrder(turns [][]int, out []ChildOutcome) error {
	if objects, _ := shelvedOf(out, nil); len(turns) > 1 && objects != nil {
		return &shelvedError{objects: objects}
	}
	return nil
}

// bringBack brings back the shelved threads of the objects. It returns ErrThreadReturning if that
// takes until deadline.
func (s *Store) bringBack(ctx context.Context, tenant int64, k *childKind, objects []event.ID, deadline time.Time) error {
	slices.Sort(objects)
	for _, object := range slices.Compact(objects) {
		for back := false; !back; {
			if err := ctx.Err(); err != nil {
				return err
			}
			if !time.Now().Before(deadline) {
				return ErrThreadReturning
			}
			// One return per thread at a time: otherwise its writers would take every connection
			// and wait for each other. The shared return does not end with the request of one of
			// them.
			v, err, _ := s.returns.Do(fmt.Sprint(tenant, "/", k.Kind, "/", object), func() (any, error) {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), returnTxTimeout)
				defer cancel()
				select { // like writes that run alone, so that returns do not take the pool from reads
				case s.slots.alone <- struct{}{}:
					defer func() { <-s.slots.alone }()
					return s.returnSome(ctx, tenant, k, object)
				case <-time.After(returnLockTimeout):
					return false, nil
				}
			})
			if err != nil && !postgres.IsLockTimeout(err) {
				return fmt.Errorf("bring back the thread of %s under %s: %w", k.Kind, object, err)
			}
			back = err == nil && v.(bool)
		}
	}
	return nil
}

func (s *Store) returnSome(ctx context.Context, tenant int64, k *childKind, object event.ID) (back bool, err error) {
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

// ThreadsReturned returns the number of threads that this Store's writes have brought back from the
// shelf.
func (s *Store) ThreadsReturned() int64 { return s.returned.Load() }

// returnLockSQL locks the stub of a thread. Index: archived_threads_stub_idx. Locks: the stub.
const returnLockSQL = `
SELECT /* store.return_lock */ archive_id FROM archived_threads
 WHERE tenant_id = @tenant::bigint AND kind = '{{.Kind}}' AND object_id = @object::text AND state <> 'RETURNED'
   FOR NO KEY UPDATE`

// returnMoveSQL moves children of a thread back unchanged. Nobody inserts in a thread that has a
// stub, so no slug and no place is taken. It locks the children in key order, as writers of edges
// to them do. Index: children_archive_KIND_path_key or children_archive_KIND_object_idx,
// children_archive_KIND_pkey. Locks: the shelved rows, in key order.
const returnMoveSQL = `
WITH page AS (
  SELECT child_id FROM {{.Shelf}} WHERE tenant_id = @tenant::bigint AND object_id = @object::text ORDER BY {{.Order}} LIMIT @limit
), held AS (
  SELECT a.child_id FROM {{.Shelf}} a JOIN page p ON a.tenant_id = @tenant::bigint AND a.child_id = p.child_id
   ORDER BY a.child_id FOR UPDATE OF a
), gone AS (
  DELETE FROM {{.Shelf}} a USING held h WHERE a.tenant_id = @tenant::bigint AND a.child_id = h.child_id RETURNING a.*
)
INSERT /* store.return_move */ INTO {{.Table}} (` + movedColumns + `) SELECT ` + movedColumns + ` FROM gone`

// movedColumns are all columns of a child except its kind, which its table implies.
const movedColumns = `tenant_id, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, ` +
	`created_at, updated_at, attributes`

// returnStateSQL records how far the return has come. Index: archived_threads_pkey. Locks: the
// stub.
const returnStateSQL = `
UPDATE /* store.return_state */ archived_threads
   SET state = CASE WHEN @back::boolean THEN 'RETURNED' ELSE 'RETURNING' END, returned_at = now(),
       returned_by = coalesce(returned_by, @by::text)
 WHERE tenant_id = @tenant::bigint AND kind = '{{.Kind}}' AND object_id = @object::text AND archive_id = @archive::bigint`

// returnChunk brings back up to limit children of a thread. It returns their number, and whether
// the thread is back. A thread without a stub is back, with n = -1. The transaction sees the
// tenant's rows.
func (s childShape) returnChunk(ctx context.Context, tx pgx.Tx, tenant int64, object event.ID, by string,
	limit int) (n int64, back bool, err error) {
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
	_, err = tx.Exec(ctx, s.sql(returnStateSQL), pgx.StrictNamedArgs{"tenant": tenant, "object": object, "archive": archive,
		"back": back, "by": by})
	if err != nil {
		return 0, false, fmt.Errorf("record the state of the return: %w", err)
	}
	return n, back, nil
}

// shelvedSQL reads the objects whose thread is shelved, or moving to or from the shelf.
// Index: archived_threads_stub_idx. Locks: none.
const shelvedSQL = `
SELECT /* store.archived */ a.tenant_id, a.object_id
  FROM unnest(@tenants::bigint[], @object_ids::text[]) AS w(tenant_id, object_id)
  JOIN archived_threads a ON a.tenant_id = w.tenant_id AND a.kind = '{{.Kind}}' AND a.object_id = w.object_id AND a.state <> 'RETURNED'`

type objectKey struct {
	tenant int64
	object event.ID
}

func (s childShape) shelved(ctx context.Context, tx pgx.Tx, tenants []int64, objects []event.ID) (map[objectKey]bool, error) {
	shelved := make(map[objectKey]bool)
	var k objectKey
	rows, _ := tx.Query(ctx, s.sql(shelvedSQL), pgx.StrictNamedArgs{"tenants": tenants, "object_ids": objects})
	if _, err := pgx.ForEachRow(rows, []any{&k.tenant, &k.object}, func() error { shelved[k] = true; return nil }); err != nil {
		return nil, fmt.Errorf("read the stubs of %d threads: %w", len(objects), err)
	}
	return shelved, nil
}
