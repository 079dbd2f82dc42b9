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

// RetentionCreator is the creator of versions that retention made.
const RetentionCreator = "retention"

// Head is the last version of an object, LATEST or DELETED. TenantID and Key are its position among
// the heads of all tenants.
type Head[T any] struct {
	TenantID int64
	Key      []string // the values of the key's columns, as text
	Version[T]
}

// Heads returns up to limit heads in the order of tenant and key, after the head after. An after
// without a key begins with the first.
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

// Expire deletes objects logically if their head is still the given LATEST version and was made
// before the given time, so an earlier writer wins. It returns their number. The DELETED version is
// by RetentionCreator and keeps the object's content. If objects have a version of their own, it
// takes the next one.
func (t *Table[T]) Expire(ctx context.Context, tx pgx.Tx, heads []Head[T], before time.Time) (int64, error) {
	args, err := t.lockHeads(ctx, tx, heads, before)
	if err != nil || len(heads) == 0 {
		return 0, err
	}
	ids, err := t.write(ctx, tx, t.expireSQL, "expire", args, len(heads))
	return int64(len(ids)), err
}

// Purge physically deletes all versions of the objects whose head is still the given DELETED
// version and was made before the given time. It returns the numbers of objects and versions. If
// the table has Definition.Purged, Record does not bring them back when their events repeat.
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

// lockHeads is lock for objects given by their heads.
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

// Terms are the parts of a retention that do not depend on the type of its objects.
type Terms struct {
	After  time.Duration                              // minimum age of the head; 0 keeps everything forever
	Fence  func(ctx context.Context, tx pgx.Tx) error // first statement of every writing transaction; may be nil
	Done   func(expired, purged, versions int64)      // called after each slice with its counts; may be nil
	DryRun bool                                       // changes nothing: Done gets the counts that a run would have, with 0 versions
}

// Retention decides which objects of a table expire. The functions get heads that are old enough,
// and return those to delete or purge. They are called outside of transactions and may query other
// databases.
type Retention[T any] struct {
	Terms
	// Invalid gets LATEST heads and returns those to delete logically. nil: all.
	Invalid func(ctx context.Context, latest []Head[T]) ([]Head[T], error)
	// Ended gets DELETED heads and returns those whose objects to purge. nil: all.
	Ended func(ctx context.Context, deleted []Head[T]) ([]Head[T], error)
	Slice int // heads read, and at most changed, per transaction

	at func(step string) // a test's hook within a slice
}

// Retain runs over the table in two steps. First it deletes LATEST objects logically that are no
// longer valid. Then it deletes DELETED objects physically that are past their time, with all their
// versions. Each step reads the heads of all tenants in slices. A slice is one short transaction,
// which also moves the table's cursor; if ctx or a crash interrupts a call, the next one resumes.
// Any number of calls may run at once. A guard in the statement keeps a head that changed since it
// was read. The pool acts as the system role. Cost per slice: one range of the head index.
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

// cursorSQL reads how far retention of a table has come, and the time. It turns sorting off: with a
// sort, each slice would read the whole rest of the table, whatever the statistics. Index:
// retention_cursors_pkey. Locks: none.
const cursorSQL = `
SELECT /* versioned.cursor */ now(), coalesce(c.step, 'delete'), coalesce(c.after_tenant, 0), coalesce(c.after_key, '{}'),
	set_config('enable_sort', 'off', true)
  FROM (SELECT) one LEFT JOIN retention_cursors c ON c.table_name = @table`

// moveSQL records how far retention has come. Index: retention_cursors_pkey. Locks: its row.
const moveSQL = `
INSERT /* versioned.move */ INTO retention_cursors (table_name, step, after_tenant, after_key) VALUES (@table, @step, @tenant, @key)
    ON CONFLICT (table_name) DO UPDATE SET step = excluded.step, after_tenant = excluded.after_tenant, after_key = excluded.after_key,
       moved_at = excluded.moved_at`

// restSQL records that retention of the table is complete. Index: retention_cursors_pkey. Locks:
// its row.
const restSQL = `DELETE /* versioned.rest */ FROM retention_cursors WHERE table_name = @table`

// plan reads all heads, regardless of the cursor, and changes nothing.
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

// nowSQL reads the time, and turns sorting off like cursorSQL.
const nowSQL = `SELECT /* versioned.now */ now(), set_config('enable_sort', 'off', true)`

// due returns the heads that a step must take.
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
		return nil, fmt.Errorf("choose which of %d objects to %s: %w", n, step, err)
	}
	return due, nil
}

// The steps of retention, as stored in its cursor.
const (
	stepDelete = "delete"
	stepPurge  = "purge"
)

// retainSlice runs one slice, and reports whether the table is complete.
func (t *Table[T]) retainSlice(ctx context.Context, pool *pgxpool.Pool, r Retention[T]) (end bool, err error) {
	var heads []Head[T]
	var now time.Time
	var step, set string
	err = postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		var after Head[T]
		if err := tx.QueryRow(ctx, cursorSQL, pgx.StrictNamedArgs{"table": t.def.Table}).Scan(&now, &step, &after.TenantID,
			&after.Key, &set); err != nil {
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
		end, err = t.moveCursor(ctx, tx, step, heads, r.Slice)
		return err
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

// moveCursor stores where the next slice begins, and reports whether there is none.
func (t *Table[T]) moveCursor(ctx context.Context, tx pgx.Tx, step string, heads []Head[T], slice int) (end bool, err error) {
	sql, args := moveSQL, pgx.StrictNamedArgs{"table": t.def.Table}
	switch {
	case len(heads) == slice:
		last := heads[len(heads)-1]
		args["step"], args["tenant"], args["key"] = step, last.TenantID, last.Key
	case step == stepDelete:
		args["step"], args["tenant"], args["key"] = stepPurge, int64(0), []string{}
	default:
		sql, end = restSQL, true
	}
	if _, err := tx.Exec(ctx, sql, args); err != nil {
		return false, fmt.Errorf("move the cursor of %s: %w", t.def.Table, err)
	}
	return end, nil
}

func (r Retention[T]) reached(step string) {
	if r.at != nil {
		r.at(step)
	}
}
