package projections

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Window reads the truth's rows of a page and the projection's rows of the same range, and hands them to visit as Compare does. Both
// statements take the arguments of from, at most limit rows each, and return them as key orders them. The page ends at the last key that both
// can have reached. It returns the key to go on after, or nil at the end of the tables.
func Window[T any](ctx context.Context, truth, projection *pgxpool.Pool, truthSQL, projectionSQL string, from pgx.StrictNamedArgs, limit int,
	key func(a, b *T) int, visit func(want, got *T)) (last *T, err error) {
	from["limit"] = limit
	read := func(pool *pgxpool.Pool, sql string) ([]*T, error) {
		rows, _ := pool.Query(ctx, sql, from)
		all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[T])
		if err != nil {
			return nil, fmt.Errorf("read a window to compare: %w", err)
		}
		return all, nil
	}
	wants, err := read(truth, truthSQL)
	if err != nil {
		return nil, err
	}
	gots, err := read(projection, projectionSQL)
	if err != nil {
		return nil, err
	}
	for _, side := range [][]*T{wants, gots} {
		if len(side) == limit && (last == nil || key(side[limit-1], last) < 0) {
			last = side[limit-1]
		}
	}
	for len(wants) > 0 || len(gots) > 0 {
		var want, got *T
		order := 0
		switch {
		case len(wants) == 0:
			order = 1
		case len(gots) == 0:
			order = -1
		default:
			order = key(wants[0], gots[0])
		}
		if order <= 0 {
			want, wants = wants[0], wants[1:]
		}
		if order >= 0 {
			got, gots = gots[0], gots[1:]
		}
		present := want
		if want == nil {
			present = got
		}
		if last != nil && key(present, last) > 0 {
			break
		}
		visit(want, got)
	}
	return last, nil
}
