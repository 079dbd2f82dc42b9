package versioned

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// RetentionCreator is who a version is by that retention made.
const RetentionCreator = "retention"

// Head is the last version of an object, LATEST or DELETED. TenantID and Key are its place among those of all tenants.
type Head[T any] struct {
	TenantID int64
	Key      []string // the values of the key's columns, as text
	Version[T]
}

// Heads returns up to limit heads in the order of tenant and key, from above the place after; from the first when it has no key.
func (t *Table[T]) Heads(ctx context.Context, tx pgx.Tx, after Head[T], limit int) ([]Head[T], error) {
	sql, args := t.headsSQL, pgx.StrictNamedArgs{"limit": limit}
	if len(after.Key) > 0 {
		if len(after.Key) != len(t.def.Key) {
			return nil, fmt.Errorf("the key of %s has %d columns, not %d", t.def.Table, len(t.def.Key), len(after.Key))
		}
		sql, args["tenant"] = t.headsAfterSQL, after.TenantID
		for i, v := range after.Key {
			args[fmt.Sprintf("key%d", i)] = v
		}
	}
	rows, _ := tx.Query(ctx, sql, args)
	heads, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Head[T]])
	if err != nil {
		return nil, fmt.Errorf("read heads of %s: %w", t.def.Table, err)
	}
	return heads, nil
}

// Expire logically deletes the objects whose head is still the one given, LATEST and the same version, and was made before a time: a writer
// that came first wins. It returns how many. The DELETED version is by RetentionCreator, keeps the object as it was and, where objects
// have a version of their own, takes the next one.
func (t *Table[T]) Expire(ctx context.Context, tx pgx.Tx, heads []Head[T], before time.Time) (int64, error) {
	args, err := t.lockHeads(ctx, tx, heads, before)
	if err != nil || len(heads) == 0 {
		return 0, err
	}
	ids, err := t.write(ctx, tx, t.expireSQL, "expire", args, len(heads))
	return int64(len(ids)), err
}

// Purge physically deletes all versions of the objects whose head is still the one given, DELETED and the same version, and was made
// before a time. It returns how many objects and versions these were. What an event tells of once more, Record does not bring back where
// Definition.Purged is.
func (t *Table[T]) Purge(ctx context.Context, tx pgx.Tx, heads []Head[T], before time.Time) (objects, versions int64, err error) {
	args, err := t.lockHeads(ctx, tx, heads, before)
	if err != nil || len(heads) == 0 {
		return 0, 0, err
	}
	rows, _ := tx.Query(ctx, t.purgeSQL, args)
	gone, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		return 0, 0, fmt.Errorf("purge %d objects of %s: %w", len(heads), t.def.Table, err)
	}
	for _, head := range gone {
		if versions++; head {
			objects++
		}
	}
	return objects, versions, nil
}

// lockHeads is lock for objects that are known by their heads.
func (t *Table[T]) lockHeads(ctx context.Context, tx pgx.Tx, heads []Head[T], before time.Time) (pgx.StrictNamedArgs, error) {
	n := len(heads)
	if n == 0 {
		return nil, nil
	}
	tenants, objects, ids := make([]int64, n), make([]string, n), make([]int64, n)
	for i, h := range heads {
		if len(h.Key) != len(t.def.Key) {
			return nil, fmt.Errorf("the key of %s has %d columns, not %d", t.def.Table, len(t.def.Key), len(h.Key))
		}
		fields := make(map[string]string, len(h.Key))
		for k, c := range t.def.Key {
			fields[c.Name] = h.Key[k]
		}
		b, err := json.Marshal(fields)
		if err != nil {
			return nil, fmt.Errorf("encode a key of %s: %w", t.def.Table, err)
		}
		tenants[i], objects[i], ids[i] = h.TenantID, string(b), h.Metadata.VersionID
	}
	args := pgx.StrictNamedArgs{"tenants": tenants, "objects": objects, "bys": slices.Repeat([]string{RetentionCreator}, n),
		"ats": slices.Repeat([]time.Time{before}, n), "deleteds": make([]bool, n)}
	if err := t.lockArguments(ctx, tx, args, n); err != nil {
		return nil, err
	}
	args["ids"] = ids
	return args, nil
}

// Terms are what every retention has, whatever its objects are.
type Terms struct {
	After  time.Duration                              // since the head was made; nothing goes earlier. 0 keeps everything for ever
	Fence  func(ctx context.Context, tx pgx.Tx) error // the first statement of every transaction that writes; nil for none
	Done   func(expired, purged, versions int64)      // after each slice, what it did; nil for none
	DryRun bool                                       // nothing is changed: Done is told what would be, the versions uncounted
}

// Retention says which objects of a table have had their time. The functions get heads that are old enough and return those that it is
// to happen to; they are called outside of transactions and may ask other databases.
type Retention[T any] struct {
	Terms
	Invalid func(ctx context.Context, latest []Head[T]) ([]Head[T], error)  // of LATEST heads, which are to be deleted logically; nil for all
	Ended   func(ctx context.Context, deleted []Head[T]) ([]Head[T], error) // of DELETED heads, whose objects are to be purged; nil for all
	Slice   int                                                             // heads read, and at most changed, per transaction

	at func(step string) // a test's; called within a slice
}

// Retain goes through the table in two steps: first LATEST objects that are no longer valid are deleted logically, then DELETED objects
// that are past their time are deleted physically, with all their versions. Each walks the heads of all tenants in slices, each one short
// transaction, which also moves the table's cursor: what ctx or a crash interrupts, the next call goes on with. Any number may run at
// once. A head that was changed after it was looked at stays, by the statement's own guard. The pool acts as the system role. Cost per
// slice: one range of the head index.
func (t *Table[T]) Retain(ctx context.Context, pool *pgxpool.Pool, r Retention[T]) error {
	if r.After <= 0 {
		return nil
	}
	if r.Slice == 0 {
		r.Slice = 200
	}
	if r.DryRun {
		return t.plan(ctx, pool, r)
	}
	for {
		if end, err := t.retainSlice(ctx, pool, r); err != nil || end {
			return err
		}
	}
}

// cursorSQL reads how far retention of a table has come, and the time. The heads come in the order of their index whatever the
// statistics say: sorted, each slice would read all that is left.
// Index: retention_cursors_pkey.   Locks: none.
const cursorSQL = `
SELECT /* versioned.cursor */ now(), coalesce(c.step, 'delete'), coalesce(c.after_tenant, 0), coalesce(c.after_key, '{}'), set_config('enable_sort', 'off', true)
  FROM (SELECT) one LEFT JOIN retention_cursors c ON c.table_name = @table`

// moveSQL notes how far it has come.
// Index: retention_cursors_pkey.   Locks: its row.
const moveSQL = `
INSERT /* versioned.move */ INTO retention_cursors (table_name, step, after_tenant, after_key) VALUES (@table, @step, @tenant, @key)
    ON CONFLICT (table_name) DO UPDATE SET step = excluded.step, after_tenant = excluded.after_tenant, after_key = excluded.after_key, moved_at = excluded.moved_at`

// restSQL notes that it is through.
// Index: retention_cursors_pkey.   Locks: its row.
const restSQL = `DELETE /* versioned.rest */ FROM retention_cursors WHERE table_name = @table`

// plan walks all heads, wherever the cursor is, and changes nothing.
func (t *Table[T]) plan(ctx context.Context, pool *pgxpool.Pool, r Retention[T]) error {
	var after Head[T]
	for {
		var now time.Time
		var heads []Head[T]
		err := postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
			if err := tx.QueryRow(ctx, nowSQL).Scan(&now, nil); err != nil {
				return fmt.Errorf("read the time: %w", err)
			}
			heads, err = t.Heads(ctx, tx, after, r.Slice)
			return err
		})
		if err != nil {
			return err
		}
		expire, err := r.due(ctx, heads, stepDelete, now)
		if err != nil {
			return err
		}
		purge, err := r.due(ctx, heads, stepPurge, now)
		if err != nil {
			return err
		}
		if r.Done != nil {
			r.Done(int64(len(expire)), int64(len(purge)), 0)
		}
		if len(heads) < r.Slice {
			return nil
		}
		after = heads[len(heads)-1]
	}
}

// nowSQL reads the time, for heads in the order of their index (see cursorSQL).
const nowSQL = `SELECT /* versioned.now */ now(), set_config('enable_sort', 'off', true)`

// due returns those of the heads that a step is to take.
func (r Retention[T]) due(ctx context.Context, heads []Head[T], step string, now time.Time) ([]Head[T], error) {
	of, choose := Latest, r.Invalid
	if step == stepPurge {
		of, choose = Deleted, r.Ended
	}
	due := slices.DeleteFunc(slices.Clone(heads), func(h Head[T]) bool {
		return h.Metadata.VersionState != of || !h.Metadata.LastUpdateTime.Before(now.Add(-r.After))
	})
	if len(due) == 0 || choose == nil {
		return due, nil
	}
	n := len(due)
	due, err := choose(ctx, due)
	if err != nil {
		return nil, fmt.Errorf("choose what to %s of %d objects: %w", step, n, err)
	}
	return due, nil
}

// The steps of retention, as its cursor knows them.
const (
	stepDelete = "delete"
	stepPurge  = "purge"
)

// retainSlice takes retention one slice on and reports whether it is through with the table.
func (t *Table[T]) retainSlice(ctx context.Context, pool *pgxpool.Pool, r Retention[T]) (end bool, err error) {
	var heads []Head[T]
	var now time.Time
	var step, set string
	err = postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		var after Head[T]
		if err := tx.QueryRow(ctx, cursorSQL, pgx.StrictNamedArgs{"table": t.def.Table}).Scan(&now, &step, &after.TenantID, &after.Key, &set); err != nil {
			return fmt.Errorf("read the cursor of %s: %w", t.def.Table, err)
		}
		heads, err = t.Heads(ctx, tx, after, r.Slice)
		return err
	})
	if err != nil {
		return false, err
	}
	due, err := r.due(ctx, heads, step, now)
	if err != nil {
		return false, fmt.Errorf("retain objects of %s: %w", t.def.Table, err)
	}
	before := now.Add(-r.After)
	r.reached("chosen")
	var expired, purged, versions int64
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
		if r.Fence != nil {
			if err := r.Fence(ctx, tx); err != nil {
				return err
			}
		}
		if step == stepPurge {
			purged, versions, err = t.Purge(ctx, tx, due, before)
		} else {
			expired, err = t.Expire(ctx, tx, due, before)
		}
		if err != nil {
			return err
		}
		r.reached("changed")
		sql, args := moveSQL, pgx.StrictNamedArgs{"table": t.def.Table}
		switch {
		case len(heads) == r.Slice:
			last := heads[len(heads)-1]
			args["step"], args["tenant"], args["key"] = step, last.TenantID, last.Key
		case step == stepDelete:
			args["step"], args["tenant"], args["key"] = stepPurge, int64(0), []string{}
		default:
			sql, end = restSQL, true
		}
		if _, err := tx.Exec(ctx, sql, args); err != nil {
			return fmt.Errorf("move the cursor of %s: %w", t.def.Table, err)
		}
		return nil
	})
	if err != nil {
		return false, err
	}
	if r.Done != nil {
		r.Done(expired, purged, versions)
	}
	r.reached("committed")
	return end, nil
}

func (r Retention[T]) reached(step string) {
	if r.at != nil {
		r.at(step)
	}
}
