package store

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/catalog"
)

// A plan made while the table is empty remains until somebody analyzes the table. It must
// nevertheless find a child by its id.
func TestAPlanOfAnEmptyTableFindsAChildByItsId(t *testing.T) {
	t.Parallel()
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

// The same holds for the edges from an object, and for those to a child, which have an index.
func TestAPlanOfAnEmptyTableFindsEdgesByEitherEnd(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	set := testkit.Kinds(t, `edges: {cheer: {plural: cheers, from: user, to: comment, forward: cheered_comments, reverse: cheerers}}`)
	for _, made := range catalog.Truth.MakeTables(set) {
		if _, err := db.Pool(t, postgres.RoleSystem).Exec(t.Context(), made.SQL, made.Args...); err != nil {
			t.Fatal(made.What, err)
		}
	}
	conn, err := db.Pool(t, postgres.RoleOwner).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for _, sql := range []string{"TRUNCATE edges_cheer", "ANALYZE edges_cheer", "SET enable_seqscan = off", "SET enable_bitmapscan = off"} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	for sql, index := range map[string]string{edgesFromSQL: "edges_cheer_pkey", edgesToChildSQL: "edges_cheer_to_idx",
		"SELECT " + hasEdgesSQL: "edges_cheer_to_idx"} {
		constant := strings.NewReplacer("{edges}", "edges_cheer", "@tenant", "1", "@object", "'7'", "@from", "''", "@to", "''",
			"@limit", "500", "c.id", "'7'::text")
		rows, _ := conn.Query(t.Context(), "EXPLAIN "+constant.Replace(sql))
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if all := strings.Join(plan, "\n"); err != nil || !strings.Contains(all, "using "+index) {
			t.Errorf("%v, want %s:\n%s", err, index, all)
		}
	}
}
