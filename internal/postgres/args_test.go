package postgres_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

func TestArgsAreThoseOfPgx(t *testing.T) {
	const sql = `SELECT /* it's @no */ @b::int, '@c', @a::text, @b`
	for range 2 { // the second round uses the kept result
		for name, args := range map[string]map[string]any{
			"all that are named":      {"a": "x", "b": 1},
			"other values":            {"a": "y", "b": nil},
			"one is missing":          {"a": "x"},
			"one more than are named": {"a": "x", "b": 1, "c": 2},
			"another name":            {"a": "x", "c": 1},
		} {
			wantSQL, want, wantErr := pgx.StrictNamedArgs(args).RewriteQuery(t.Context(), nil, sql, nil)
			gotSQL, got, err := postgres.Args(args).RewriteQuery(t.Context(), nil, sql, nil)
			if gotSQL != wantSQL || !cmp.Equal(got, want) || (err == nil) != (wantErr == nil) {
				t.Errorf("%s: got %q, %v, %v; want %q, %v, %v", name, gotSQL, got, err, wantSQL, want, wantErr)
			}
		}
	}
}
