package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/tidings/tidings/kinds"
)

// makeKinds makes the missing tables of every kind in force. In a new database these are the
// built-in kinds.
func makeKinds(ctx context.Context, db *sql.DB, set Set) error {
	in := kinds.Truth
	if set == Projections {
		in = kinds.Projections
	}
	all := kinds.Builtin()
	var added []byte
	err := db.QueryRowContext(ctx, in.StoredSQL()).Scan(&added)
	if err == nil {
		if all, err = all.Extend(added); err != nil {
			return fmt.Errorf("this release cannot use the kinds in force: %w", err)
		}
	} else if !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("read the kinds in force: %w", err)
	}
	for _, s := range in.MakeTables(all) {
		if _, err := db.ExecContext(ctx, s.SQL, s.Args...); err != nil {
			return fmt.Errorf("%s: %w", s.What, err)
		}
	}
	return nil
}
