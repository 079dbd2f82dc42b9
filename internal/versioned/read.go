package versioned

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Field is a column with the value to select.
type Field struct {
	Name  string
	Value any
}

// Get returns the LATEST version of an object, or ErrNotFound if it does not exist or is deleted.
func (t *Table[T]) Get(ctx context.Context, tx pgx.Tx, tenant int64, key Key) (Version[T], error) {
	args, err := t.keyArgs(tenant, key)
	if err != nil {
		return Version[T]{}, err
	}
	rows, _ := tx.Query(ctx, t.getSQL, args)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Version[T]])
	if errors.Is(err, pgx.ErrNoRows) {
		return v, ErrNotFound
	}
	if err != nil {
		return v, fmt.Errorf("get %v of %s: %w", key, t.def.Table, err)
	}
	return v, nil
}

// List returns up to limit LATEST versions of a tenant in the order of their keys. It begins after
// the key after; nil begins with the first.
func (t *Table[T]) List(ctx context.Context, tx pgx.Tx, tenant int64, after Key, limit int) ([]Version[T], error) {
	return t.page(ctx, tx, Latest, tenant, nil, nil, after, limit)
}

// ListDeleted is List for deleted objects.
func (t *Table[T]) ListDeleted(ctx context.Context, tx pgx.Tx, tenant int64, after Key, limit int) ([]Version[T], error) {
	return t.page(ctx, tx, Deleted, tenant, nil, nil, after, limit)
}

// Query is List for the objects whose fields have these values. The fields must be, in any order,
// those of one of Definition.Indexes or the first columns of the key. Other fields have no index
// and return an error.
func (t *Table[T]) Query(ctx context.Context, tx pgx.Tx, tenant int64, fields []Field, after Key, limit int) ([]Version[T], error) {
	columns, values, err := t.indexed(fields)
	if err != nil {
		return nil, err
	}
	return t.page(ctx, tx, Latest, tenant, columns, values, after, limit)
}

// indexed returns the fields and values in the order of the matching index.
func (t *Table[T]) indexed(fields []Field) ([]Column, []any, error) {
	indexes := slices.Clone(t.def.Indexes)
	if len(fields) <= len(t.def.Key) {
		indexes = append(indexes, t.def.Key[:len(fields)])
	}
next:
	for _, columns := range indexes {
		if len(columns) != len(fields) {
			continue
		}
		values := make([]any, len(columns))
		for i, c := range columns {
			at := slices.IndexFunc(fields, func(f Field) bool { return f.Name == c.Name })
			if at < 0 {
				continue next
			}
			values[i] = fields[at].Value
		}
		return columns, values, nil
	}
	return nil, nil, fmt.Errorf("query %s by %v: no index has these columns", t.def.Table, fields)
}

func (t *Table[T]) page(ctx context.Context, tx pgx.Tx, state State, tenant int64, columns []Column, values []any, after Key,
	limit int) ([]Version[T], error) {
	args := pgx.StrictNamedArgs{"tenant": tenant}
	if after != nil {
		var err error
		if args, err = t.keyArgs(tenant, after); err != nil {
			return nil, err
		}
	}
	for i, v := range values {
		args[fmt.Sprintf("field%d", i)] = v
	}
	args["limit"] = limit
	return t.versions(ctx, tx, t.selectSQL(columns, state, after != nil), "list", args)
}

// selectSQL returns the statement that lists the heads in a state, in the order of the key, whose
// columns have the values @field0, @field1 and so on. It has no optional condition, so even a
// generic plan is an index range. Index: the head index, or the one of Definition.Indexes that
// begins with the columns; one range. Locks: none.
func (t *Table[T]) selectSQL(columns []Column, state State, paged bool) string {
	var names, after []string
	for i, c := range t.def.Key {
		names, after = append(names, "t."+c.Name), append(after, fmt.Sprintf("@key%d::%s", i, c.Type))
	}
	keys := strings.Join(names, ", ")
	where := []string{"t.tenant_id = @tenant", fmt.Sprintf("t.version_state = '%s'", state)}
	for i, c := range columns {
		field := fmt.Sprintf("(t.object ->> '%s')::%s", c.Name, c.Type)
		if slices.Contains(t.def.Key, c) {
			field = "t." + c.Name
		}
		where = append(where, fmt.Sprintf("%s = @field%d::%s", field, i, c.Type))
	}
	if paged {
		where = append(where, fmt.Sprintf("(%s) > (%s)", keys, strings.Join(after, ", ")))
	}
	return fmt.Sprintf(`
SELECT /* versioned.select */ t.object, t.metadata, t.%s FROM %s t
 WHERE %s
 ORDER BY %s LIMIT @limit`, cmp.Or(t.def.Version, "version_id"), t.def.Table, strings.Join(where, " AND "), keys)
}

// History returns up to limit versions of an object, oldest first, from above the position after.
// after comes from an earlier result; start with 0. An unknown object has no versions.
func (t *Table[T]) History(ctx context.Context, tx pgx.Tx, tenant int64, key Key, after int64, limit int) ([]Version[T], error) {
	args, err := t.keyArgs(tenant, key)
	if err != nil {
		return nil, err
	}
	args["after"], args["limit"] = after, limit
	return t.versions(ctx, tx, t.historySQL, "read the history of", args)
}

// Recent is History backward: newest first, from below the position before. Start with
// math.MaxInt64.
func (t *Table[T]) Recent(ctx context.Context, tx pgx.Tx, tenant int64, key Key, before int64, limit int) ([]Version[T], error) {
	args, err := t.keyArgs(tenant, key)
	if err != nil {
		return nil, err
	}
	args["before"], args["limit"] = before, limit
	return t.versions(ctx, tx, t.recentSQL, "read the history of", args)
}

func (t *Table[T]) versions(ctx context.Context, tx pgx.Tx, sql, what string, args pgx.StrictNamedArgs) ([]Version[T], error) {
	rows, _ := tx.Query(ctx, sql, args)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Version[T]])
	if err != nil {
		return nil, fmt.Errorf("%s objects of %s: %w", what, t.def.Table, err)
	}
	return all, nil
}

func (t *Table[T]) keyArgs(tenant int64, key Key) (pgx.StrictNamedArgs, error) {
	if len(key) != len(t.def.Key) {
		return nil, fmt.Errorf("the key of %s has %d columns, not %d", t.def.Table, len(t.def.Key), len(key))
	}
	args := pgx.StrictNamedArgs{"tenant": tenant}
	for i, v := range key {
		args[fmt.Sprintf("key%d", i)] = v
	}
	return args, nil
}

// Flaw is a version that breaks a rule which no constraint of the table enforces.
type Flaw[T any] struct {
	TenantID int64
	Object   T
	Rule     string // "state of the last version", "state of an earlier version" or "last_update_time"
	Want     string
	Got      string
}

// Check reads the whole table and reports every version that breaks a rule. The last version of an
// object is LATEST or DELETED, each earlier one is ARCHIVED, and no version was made before its
// predecessor. Check returns the number of versions. Only manual SQL makes such rows, never this
// package. Memory does not grow with the table. Check turns off the transaction's statement
// timeout.
func (t *Table[T]) Check(ctx context.Context, tx pgx.Tx, report func(Flaw[T])) (versions int64, err error) {
	if _, err := tx.Exec(ctx, `SET LOCAL statement_timeout = 0`); err != nil {
		return 0, fmt.Errorf("turn off the statement timeout: %w", err)
	}
	if err := tx.QueryRow(ctx, t.countSQL).Scan(&versions); err != nil {
		return 0, fmt.Errorf("count the versions of %s: %w", t.def.Table, err)
	}
	var f Flaw[T]
	rows, _ := tx.Query(ctx, t.checkSQL)
	_, err = pgx.ForEachRow(rows, []any{&f.TenantID, &f.Object, &f.Rule, &f.Want, &f.Got}, func() error {
		report(f)
		var zero T
		f.Object = zero // the next object may lack fields that this one has
		return nil
	})
	if err != nil {
		return versions, fmt.Errorf("check the versions of %s: %w", t.def.Table, err)
	}
	return versions, nil
}
