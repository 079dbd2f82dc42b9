package testkit

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// budgetSQL creates the function that counts the rows of a statement. When there are too many it
// fails like a statement timeout. Its cost tells the planner that rows are expensive, as they are
// in a large table.
const budgetSQL = `
CREATE OR REPLACE FUNCTION rows_in_a_statement(most int) RETURNS boolean LANGUAGE plpgsql COST 10000 AS $$
DECLARE
  n int := 1;
BEGIN
  IF current_setting('testkit.statement', true) = statement_timestamp()::text THEN
    n := current_setting('testkit.rows')::int + 1;
  END IF;
  PERFORM set_config('testkit.statement', statement_timestamp()::text, false), set_config('testkit.rows', n::text, false);
  IF n > most THEN
    RAISE query_canceled USING MESSAGE = format('canceling statement: it read more than %s rows', most);
  END IF;
  RETURN true;
END $$`

// policySQL finds the policy under which the system role reads a table: its own, or that of the
// consumers.
const policySQL = `SELECT max(polname::text) FROM pg_policy WHERE polrelid = $1::regclass AND polname IN ('consumer', 'system')`

// RowsPerStatement makes a statement of the system role fail if it reads more than most rows of the
// tables. In production a statement timeout would end it, with enough rows. So a scan must read
// pages of keys. RowsPerStatement also analyzes the tables, because PostgreSQL reads a small table
// without statistics as a whole.
func (db *DB) RowsPerStatement(t testing.TB, most int, tables ...string) {
	t.Helper()
	owner := db.Pool(t, postgres.RoleOwner)
	_, err := owner.Exec(context.Background(), budgetSQL)
	check(t, "limit the rows of a statement", err)
	for _, table := range tables {
		var policy string
		check(t, "limit the rows of a statement", owner.QueryRow(context.Background(), policySQL, table).Scan(&policy))
		_, err := owner.Exec(context.Background(), fmt.Sprintf(`ANALYZE %s; ALTER POLICY %s ON %[1]s USING (rows_in_a_statement(%[3]d))`,
			pgx.Identifier{table}.Sanitize(), policy, most))
		check(t, "limit the rows of a statement", err)
	}
}
