package versioned

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

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
