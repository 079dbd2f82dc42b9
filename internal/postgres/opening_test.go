package postgres_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAWriteBeginsTogetherWithItsFirstStatement: the first statement sees the settings of its
// transaction, whichever call runs it. An error of it leaves the connection as it was.
func TestAWriteBeginsTogetherWithItsFirstStatement(t *testing.T) {
	url := testkit.Postgres(t).URL
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			cfg, err := pgxpool.ParseConfig(url)
			if err != nil {
				t.Fatal(err)
			}
			cfg.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			testFirstStatements(t, pool)
		})
	}
}

// TestAShortTransactionBeginsTogetherWithItsFirstBatch looks at the connection: it has no
// transaction until the batch is sent. An error of the batch leaves the connection usable.
func TestAShortTransactionBeginsTogetherWithItsFirstBatch(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	before, after := byte(0), byte(0)
	var first, second int
	batch := func(sql string, tx pgx.Tx) error {
		var b pgx.Batch
		b.Queue(sql, 1).QueryRow(func(row pgx.Row) error { return row.Scan(&first) })
		b.Queue(`SELECT 2`).QueryRow(func(row pgx.Row) error { return row.Scan(&second) })
		return tx.SendBatch(t.Context(), &b).Close()
	}
	for range 2 {
		if err := postgres.InShortTx(t.Context(), pool, func(tx pgx.Tx) error {
			before = tx.Conn().PgConn().TxStatus()
			err := batch(`SELECT set_config('tidings.seen', $1::int::text, true)::int`, tx)
			after = tx.Conn().PgConn().TxStatus()
			if err != nil {
				return err
			}
			return batch(`SELECT current_setting('tidings.seen')::int * $1`, tx)
		}); err != nil || before != 'I' || after != 'T' || first != 1 || second != 2 {
			t.Errorf("in %c, then in %c, the batches return %d and %d: %v", before, after, first, second, err)
		}
	}
	if err := postgres.InShortTx(t.Context(), pool, func(tx pgx.Tx) error { return batch(`SELECT $1::int / 0`, tx) }); err == nil {
		t.Error("the error of the first batch is lost")
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were opened: a first batch that failed cost one", n)
	}
}

// TestLaterStatementsCostNoRoundTrip counts how often the connection writes after it has read.
func TestLaterStatementsCostNoRoundTrip(t *testing.T) {
	pool, trips := testkit.RoundTrips(t, testkit.Postgres(t).Pool(t, postgres.RoleOwner))
	if _, err := pool.Exec(t.Context(), `CREATE TABLE seen (n int)`); err != nil {
		t.Fatal(err)
	}
	later := func(tx pgx.Tx, sql string, read func(row pgx.Row) error) {
		t.Helper()
		var b pgx.Batch
		if q := b.Queue(sql); read != nil {
			q.QueryRow(read)
		}
		if err := postgres.LaterBatch(t.Context(), tx, &b); err != nil {
			t.Fatal(err)
		}
	}
	insert := func(tx pgx.Tx) {
		t.Helper()
		if err := postgres.Later(t.Context(), tx, `INSERT INTO seen VALUES ($1)`, 1); err != nil {
			t.Fatal(err)
		}
	}
	count := func(tx pgx.Tx) (n int, err error) {
		return n, tx.QueryRow(t.Context(), `SELECT count(*) FROM seen`).Scan(&n)
	}
	refuse := errors.New("the function refuses")
	short := func(fn func(tx pgx.Tx) error) error { return postgres.InShortTx(t.Context(), pool, fn) }
	for name, c := range map[string]struct {
		fn    func(tx pgx.Tx) error
		trips int64 // 0: the copied rows decide
		rows  int   // that the transaction leaves
		err   error
	}{
		"with the next statement, and with COMMIT": {trips: 2, rows: 2, fn: func(tx pgx.Tx) error {
			insert(tx)
			n, err := count(tx)
			if insert(tx); n != 1 {
				t.Errorf("the statement sees %d rows, want 1", n)
			}
			return err
		}},
		"without another statement": {trips: 2, rows: 2, fn: func(tx pgx.Tx) error { insert(tx); insert(tx); return nil }},
		"before COMMIT, if somebody reads a result": {trips: 3, err: refuse, fn: func(tx pgx.Tx) error {
			if _, err := count(tx); err != nil {
				return err
			}
			insert(tx)
			later(tx, `SELECT 1`, func(pgx.Row) error { return refuse })
			return nil
		}},
		"a refusal is the transaction's error, whatever its function returns": {trips: 2, err: refuse, fn: func(tx pgx.Tx) error {
			insert(tx)
			later(tx, `SELECT 1`, func(pgx.Row) error { return refuse })
			if _, err := count(tx); !errors.Is(err, refuse) {
				t.Errorf("the statement after it returns %v", err)
			}
			return nil
		}},
		"before a savepoint": {trips: 4, rows: 1, fn: func(tx pgx.Tx) error {
			insert(tx)
			savepoint, err := tx.Begin(t.Context())
			if err != nil {
				return err
			}
			return savepoint.Rollback(t.Context())
		}},
		"before the connection is used": {trips: 3, rows: 1, fn: func(tx pgx.Tx) error {
			insert(tx)
			_, err := tx.Conn().Exec(t.Context(), `SELECT 1`)
			return err
		}},
		"before rows are copied": {rows: 2, fn: func(tx pgx.Tx) error {
			insert(tx)
			_, err := tx.CopyFrom(t.Context(), pgx.Identifier{"seen"}, []string{"n"}, pgx.CopyFromRows([][]any{{2}}))
			return err
		}},
		"before a statement is prepared": {trips: 2, rows: 1, fn: func(tx pgx.Tx) error {
			insert(tx)
			_, err := tx.Prepare(t.Context(), "counted", `SELECT count(*) FROM seen`)
			return err
		}},
		"before large objects": {trips: 3, rows: 1, fn: func(tx pgx.Tx) error {
			insert(tx)
			objects := tx.LargeObjects()
			_, err := objects.Create(t.Context(), 0)
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range 3 { // the first time the connection prepares the statements
				if _, err := pool.Exec(t.Context(), `DELETE FROM seen`); err != nil {
					t.Fatal(err)
				}
				before := trips()
				if err := short(c.fn); !errors.Is(err, c.err) {
					t.Errorf("the transaction returns %v, want %v", err, c.err)
				}
				if n := trips() - before; i > 0 && c.trips > 0 && n != c.trips {
					t.Errorf("it takes %d round trips, want %d", n, c.trips)
				}
				if n, err := pool.Exec(t.Context(), `DELETE FROM seen`); err != nil || int(n.RowsAffected()) != c.rows {
					t.Errorf("it leaves %d rows, want %d: %v", n.RowsAffected(), c.rows, err)
				}
			}
		})
	}
	if err := short(func(tx pgx.Tx) error {
		insert(tx)
		later(tx, `SELECT 1/0`, nil)
		return nil
	}); err == nil || !strings.Contains(err.Error(), "22012") {
		t.Errorf("the error of a statement with COMMIT is lost: %v", err)
	}
	if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		insert(tx)
		n, err := count(tx)
		if n != 1 {
			t.Errorf("another transaction sees %d rows after it, want 1", n)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if err := postgres.WriteInTenants(t.Context(), pool, []int64{1}, 0, func(tx pgx.Tx) (postgres.Landed, error) {
		insert(tx)
		return nil, nil // then other statements run with COMMIT
	}); err != nil {
		t.Errorf("a write that is repeated: %v", err)
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were opened: an error cost one", n)
	}
}

func testFirstStatements(t *testing.T, pool *pgxpool.Pool) {
	const settings = `current_setting('tidings.tenant') || ' ' || current_setting('lock_timeout') || ' ' ||
		CASE WHEN pg_current_xact_id_if_assigned() IS NOT NULL THEN 'id ' ELSE '' END || $1::text`
	write := func(wait time.Duration, fn func(tx pgx.Tx) error) error {
		return postgres.WriteInTenants(t.Context(), pool, []int64{7, 8}, wait, func(tx pgx.Tx) (postgres.Landed, error) {
			return nil, fn(tx)
		})
	}
	var got string
	for name, first := range map[string]func(tx pgx.Tx) error{
		"Query": func(tx pgx.Tx) (err error) {
			rows, _ := tx.Query(t.Context(), `SELECT `+settings, "x")
			got, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
			return err
		},
		"QueryRow": func(tx pgx.Tx) error { return tx.QueryRow(t.Context(), `SELECT `+settings, "x").Scan(&got) },
		"Exec": func(tx pgx.Tx) error {
			tag, err := tx.Exec(t.Context(), `SELECT set_config('tidings.seen', `+settings+`, true)`, "x")
			if err != nil || tag.RowsAffected() != 1 {
				return errors.Join(err, errors.New(tag.String()))
			}
			if _, err := tx.Exec(t.Context(), `SET LOCAL tidings.a = 1; SET LOCAL tidings.b = 2`); err != nil {
				return err // pgx allows several statements without parameters, and a projection may use that
			}
			return tx.QueryRow(t.Context(), `SELECT current_setting('tidings.seen')`).Scan(&got)
		},
	} {
		for range 2 { // the second time the connection knows the statement
			if err := write(2*time.Second, first); err != nil || got != "7,8 2s id x" {
				t.Errorf("%s sees %q: %v", name, got, err)
			}
		}
	}
	if err := write(0, func(pgx.Tx) error { return nil }); err != nil {
		t.Errorf("a transaction without a statement: %v", err)
	}
	var n int
	none := func(tx pgx.Tx) error { return tx.QueryRow(t.Context(), `SELECT 1 WHERE false`).Scan(&n) }
	if err := write(0, none); !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("a first statement without rows: %v", err)
	}
	for what, sql := range map[string]string{"its parser": `SELECT nothing`, "its run": `SELECT 1/0`} {
		if err := write(0, func(tx pgx.Tx) error { return tx.QueryRow(t.Context(), sql).Scan(&n) }); err == nil {
			t.Errorf("the error of %s is lost", what)
		}
	}
	var after string
	if err := pool.QueryRow(t.Context(), `SELECT current_setting('tidings.tenant', true)`).Scan(&after); err != nil || after != "" {
		t.Errorf("after its transactions the connection has the tenants %q: %v", after, err)
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were opened: a first statement that failed cost one", n)
	}
}
