package migrations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
)

// makeKinds makes the missing tables of every kind in force. In a new database these are the
// built-in kinds.
func makeKinds(ctx context.Context, conn *pgx.Conn, set Set) error {
	in := catalog.Truth
	if set == Projections {
		in = catalog.Projections
	}
	all := kinds.Builtin()
	var added []byte
	err := conn.QueryRow(ctx, in.StoredSQL()).Scan(&added)
	if err == nil {
		if all, err = all.ExtendJSON(added); err != nil {
			return fmt.Errorf("this release cannot use the kinds in force: %w", err)
		}
	} else if !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("read the kinds in force: %w", err)
	}
	for _, s := range in.MakeTables(all) {
		if _, err := conn.Exec(ctx, s.SQL, s.Args...); err != nil {
			return fmt.Errorf("%s: %w", s.What, err)
		}
	}
	return nil
}
