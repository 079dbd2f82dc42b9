package testkit

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Prepare makes the server parse and plan sql, which may have @named arguments, and fails the test
// if it cannot.
func Prepare(t testing.TB, pool *pgxpool.Pool, sql string) {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	rewritten, _, err := pgx.NamedArgs{}.RewriteQuery(t.Context(), conn.Conn(), sql, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Conn().Prepare(t.Context(), "", rewritten); err != nil {
		t.Errorf("prepare: %v\n%s", err, rewritten)
	}
}
