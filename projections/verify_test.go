package projections_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestRowsWaitForASlowReader: a comparison reads two tables, and one of them may take long.
func TestRowsWaitForASlowReader(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool, err := postgres.OpenWith(t.Context(), db.URL, postgres.Config{MaxConns: 2, ConnectTimeout: 5 * time.Second},
		postgres.RoleSystem, "test", map[string]string{"tcp_user_timeout": "500"})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	type row struct{ Text string }
	n := 0
	for _, err := range projections.Rows[row](t.Context(), pool, `SELECT repeat('x', 1000000) FROM generate_series(1, 30)`,
		pgx.StrictNamedArgs{}) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 1 {
			if _, err := db.Pool(t, postgres.RoleSystem).Exec(t.Context(), `SELECT pg_sleep(2)`); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n != 30 {
		t.Errorf("%d rows, want 30", n)
	}
}
