package testkit

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// budgetSQL makes the function that counts the rows of a statement. Its end is what a statement timeout is. Its cost tells the planner that rows are dear, as they are in a large table.
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
    RAISE query_canceled USING MESSAGE = format('canceling statement: it has read more than %s rows', most);
  END IF;
  RETURN true;
END $$`

// policySQL finds the policy by which the system role reads a table: its own, or that of the consumers.
const policySQL = `SELECT max(polname::text) FROM pg_policy WHERE polrelid = $1::regclass AND polname IN ('consumer', 'system')`

// RowsPerStatement has every statement of the system role fail that reads more than most rows of the tables, whatever it makes of them, as the statement timeout
// would with enough of them: what scans much goes by pages of keys. It analyzes them, for a small table without statistics is read as a whole.
func (db *DB) RowsPerStatement(t testing.TB, most int, tables ...string) {
	t.Helper()
	owner := db.Pool(t, postgres.RoleOwner)
	_, err := owner.Exec(context.Background(), budgetSQL)
	check(t, "bound the rows of a statement", err)
	for _, table := range tables {
		var policy string
		check(t, "bound the rows of a statement", owner.QueryRow(context.Background(), policySQL, table).Scan(&policy))
		_, err := owner.Exec(context.Background(), fmt.Sprintf(`ANALYZE %s; ALTER POLICY %s ON %[1]s USING (rows_in_a_statement(%[3]d))`, pgx.Identifier{table}.Sanitize(), policy, most))
		check(t, "bound the rows of a statement", err)
	}
}
