package postgres_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestSizesShowTablesAndWhatHoldsTheHorizon: a session holds a snapshot while other transactions
// begin. The size of a table includes its partitions.
func TestSizesShowTablesAndWhatHoldsTheHorizon(t *testing.T) {
	db := testkit.Postgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	reg := prometheus.NewRegistry()
	reg.MustRegister(postgres.NewSizesCollector(db.Pool(t, postgres.RoleSystem), testkit.Logger(t)))
	read := func() map[string]float64 { t.Helper(); return testkit.Series(t, reg) }
	before := read()
	if before["tidings_postgres_database_bytes"] < 1<<20 || before["tidings_postgres_table_bytes outbox_messages"] < 8192 {
		t.Errorf("sizes: %v", before)
	}
	for name := range before {
		if strings.HasPrefix(name, "tidings_postgres_table_bytes outbox_messages_1") {
			t.Errorf("a partition has its own row: %s", name)
		}
	}
	// A session of another database holds nothing here.
	hold(t, testkit.Postgres(t).Pool(t, postgres.RoleOwner))
	pass := func(n int) {
		t.Helper()
		for range n {
			if _, err := owner.Exec(t.Context(), `SELECT pg_current_xact_id()`); err != nil {
				t.Fatal(err)
			}
		}
	}
	pass(200)
	if held := read()["tidings_postgres_horizon_transactions session"]; held >= 200 {
		t.Errorf("a session of another database began 200 transactions ago, and the horizon is %v behind", held)
	}
	wrote, err := owner.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := wrote.Exec(t.Context(), `SELECT pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	pass(20)
	if held := read()["tidings_postgres_horizon_transactions session"]; held < 20 {
		t.Errorf("20 transactions began since one that has written and stays open, but the horizon is %v behind", held)
	}
	if err := wrote.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	hold(t, owner)
	pass(20)
	if held := read()["tidings_postgres_horizon_transactions session"]; held < 20 {
		t.Errorf("20 transactions began since a session's snapshot, but the horizon is %v behind", held)
	}
}

// hold takes a snapshot and keeps it until the test ends.
func hold(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if _, err := tx.Exec(t.Context(), `SELECT 1`); err != nil {
		t.Fatal(err)
	}
}
