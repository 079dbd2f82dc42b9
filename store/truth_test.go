package store

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

// TestPagesOfTheTruthAreRangesOfItsIndexes checks that comments and shelved ones are merged in the
// order of the page, without a sort.
func TestPagesOfTheTruthAreRangesOfItsIndexes(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx := t.Context()
	for _, sql := range []string{
		`INSERT INTO children_comment (tenant_id, child_id, object_id, slug, path, author_id, body)
		   SELECT 1, gen_random_uuid(), g / 100 + 1, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 1, 'x'
		     FROM generate_series(1, 20000) g`,
		`INSERT INTO children_archive_comment (tenant_id, child_id, object_id, slug, path, author_id, body, author_state, moderation_state,
			version, created_at, updated_at)
		   SELECT 1, gen_random_uuid(), g / 100 + 100, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 1, 'x', 'ACTIVE', 'NONE', 1, now(),
		   now() FROM generate_series(1, 20000) g`,
		`ANALYZE children_comment, children_archive_comment`,
	} {
		if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	pool := db.Pool(t, postgres.RoleSystem)
	threaded := kinds.Builtin().Children["comment"]
	for _, c := range []struct {
		sql  string
		args pgx.StrictNamedArgs
	}{
		{shapeOf(threaded).sql(scanChildrenSQL), pgx.StrictNamedArgs{"tenant": int64(1),
			"child": "40000000-0000-0000-0000-000000000000", "limit": 100}},
		{shapeOf(threaded).sql(scanObjectsSQL), pgx.StrictNamedArgs{"tenant": int64(1), "object": int64(120), "place": "0", "limit": 100}},
		{shapeOf(threaded).sql(scanObjectSQL), pgx.StrictNamedArgs{"tenant": int64(1), "object": int64(120), "place": "0", "limit": 100}},
	} {
		rows, _ := pool.Query(ctx, "EXPLAIN "+c.sql, pgx.QueryExecModeSimpleProtocol, c.args)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		plan := strings.Join(lines, "\n")
		if err != nil || !strings.Contains(plan, "Merge Append") || strings.Contains(plan, "Sort  ") || strings.Contains(plan, "Seq Scan") {
			t.Errorf("%v:\n%s", err, plan)
		}
	}
}
