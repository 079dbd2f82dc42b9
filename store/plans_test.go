package store_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// A plan made while the table is empty remains until somebody analyzes the table. It must
// nevertheless find a child by its id.
func TestAPlanOfAnEmptyTableFindsAChildByItsId(t *testing.T) {
	conn, err := testkit.Postgres(t).Pool(t, postgres.RoleOwner).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for _, table := range []string{"children_comment", "children_archive_comment", "children_review"} {
		for _, sql := range []string{"TRUNCATE " + table, "ANALYZE " + table, "SET enable_seqscan = off", "SET enable_bitmapscan = off"} {
			if _, err := conn.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		rows, _ := conn.Query(t.Context(), "EXPLAIN SELECT * FROM "+table+
			" WHERE tenant_id = 1 AND child_id = '0196b2d4-7c00-4000-8000-000000000001'")
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		if all := strings.Join(plan, "\n"); !strings.Contains(all, "using "+table+"_pkey") {
			t.Errorf("%s", all)
		}
	}
}
