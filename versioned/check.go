package versioned

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Flaw is a version that breaks a rule which no constraint of the table holds.
type Flaw[T any] struct {
	TenantID int64
	Object   T
	Rule     string // "state of the last version", "state of an earlier version" or "last_update_time"
	Want     string
	Got      string
}

// Check reads the whole table and reports every version that breaks a rule: the last version of an object is LATEST or DELETED, each
// earlier one is ARCHIVED, and no version was made before its predecessor. It returns how many versions there are. Such rows come from
// hands, never from this package. Memory does not grow with the table; the statement timeout of the transaction is lifted.
func (t *Table[T]) Check(ctx context.Context, tx pgx.Tx, report func(Flaw[T])) (versions int64, err error) {
	if _, err := tx.Exec(ctx, `SET LOCAL statement_timeout = 0`); err != nil {
		return 0, fmt.Errorf("lift the statement timeout: %w", err)
	}
	if err := tx.QueryRow(ctx, t.countSQL).Scan(&versions); err != nil {
		return 0, fmt.Errorf("count the versions of %s: %w", t.def.Table, err)
	}
	var f Flaw[T]
	rows, _ := tx.Query(ctx, t.checkSQL)
	_, err = pgx.ForEachRow(rows, []any{&f.TenantID, &f.Object, &f.Rule, &f.Want, &f.Got}, func() error {
		report(f)
		var zero T
		f.Object = zero // what one object lacks is not to be the last one's
		return nil
	})
	if err != nil {
		return versions, fmt.Errorf("check the versions of %s: %w", t.def.Table, err)
	}
	return versions, nil
}
