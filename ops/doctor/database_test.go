package doctor

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// login returns a pool of the owner's login, changed by change.
func login(t *testing.T, db *testkit.DB, change func(cfg *pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func found(t *testing.T, pool *pgxpool.Pool, old float64) map[string]Finding {
	t.Helper()
	all, err := probe(t.Context(), pool, "here", old)
	if err != nil {
		t.Fatal(err)
	}
	m := make(map[string]Finding)
	for _, f := range all {
		m[f.Check] = f
		if f.Severity == "" || f.Where != "here" || f.What == "" || f.Action() == "" {
			t.Errorf("%+v", f)
		}
	}
	return m
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	for one := range strings.SplitSeq(sql, ";;") {
		if _, err := pool.Exec(t.Context(), one); err != nil {
			t.Fatalf("%s: %v", one, err)
		}
	}
}

// TestEveryCheckFindsItsIllness harms a healthy server in one way after the other, and heals it
// again.
func TestEveryCheckFindsItsIllness(t *testing.T) {
	server := testkit.PostgresProcess(t, "fsync=on", "full_page_writes=on", "max_prepared_transactions=5", "wal_level=replica",
		"max_wal_senders=5", "max_connections=60")
	db := server.DB(t)
	pool := login(t, db, nil)
	if all := found(t, pool, oldTransaction); len(all) > 0 {
		t.Fatalf("a new database: %v", all)
	}
	tested := map[string]bool{}
	ill := func(name, says string, old float64, who *pgxpool.Pool) {
		t.Helper()
		tested[name] = true
		if f, ok := found(t, who, old)[name]; !ok || !strings.Contains(f.What+" "+f.Action(), says) {
			t.Errorf("%s: found %+v", name, f)
		}
	}
	for _, c := range []struct{ name, says, harm, heal string }{
		{"table-autovacuum", "ALTER TABLE edges_follow RESET", `ALTER TABLE edges_follow SET (autovacuum_enabled = off)`,
			`ALTER TABLE edges_follow RESET (autovacuum_enabled)`},
		{"prepared-transaction", "ROLLBACK PREPARED 'forgotten'", `BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'forgotten'`,
			`ROLLBACK PREPARED 'forgotten'`},
		{"replication-slot", "pg_drop_replication_slot('left')", `SELECT pg_create_physical_replication_slot('left', true)`,
			`SELECT pg_drop_replication_slot('left')`},
		{"invalid-index", "REINDEX INDEX CONCURRENTLY edges_follow_pkey",
			`UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'edges_follow_pkey'::regclass`,
			`UPDATE pg_index SET indisvalid = true WHERE indexrelid = 'edges_follow_pkey'::regclass`},
		{"role-bypasses-row-security", "tidings_api bypasses row security", `ALTER ROLE tidings_api BYPASSRLS`,
			`ALTER ROLE tidings_api NOBYPASSRLS`},
		{"row-security", "ALTER TABLE edges ENABLE", `ALTER TABLE edges DISABLE ROW LEVEL SECURITY`,
			`ALTER TABLE edges ENABLE ROW LEVEL SECURITY`},
		{"dead-rows", "VACUUM dead", `CREATE TABLE dead (a int) WITH (autovacuum_enabled = off);;INSERT INTO dead
			SELECT generate_series(1, 20001);;DELETE FROM dead;;
			SELECT pg_stat_force_next_flush();;SELECT 1`, `DROP TABLE dead`},
	} {
		exec(t, pool, c.harm)
		ill(c.name, c.says, 0, pool)
		exec(t, pool, c.heal)
		if f, ok := found(t, pool, oldTransaction)[c.name]; ok {
			t.Errorf("%s: healed, and found %+v", c.name, f)
		}
	}

	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT 1`); err != nil {
		t.Fatal(err)
	}
	ill("old-transaction", "pg_terminate_backend(", 0, pool)
	if f, ok := found(t, pool, oldTransaction)["old-transaction"]; ok {
		t.Errorf("a young transaction: %+v", f)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	elsewhere := login(t, server.DB(t), nil)
	if tx, err = elsewhere.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT 1`); err != nil {
		t.Fatal(err)
	}
	if f, ok := found(t, pool, 0)["old-transaction"]; ok {
		t.Errorf("a transaction of another database that has written nothing: %+v", f)
	}
	if _, err := tx.Exec(t.Context(), `SELECT pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	ill("old-transaction", "idle in transaction) has had", 0, pool)
	ill("old-transaction", ": no range of the outbox with a later id moves to the archive", 0, pool)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}

	many := login(t, db, func(cfg *pgxpool.Config) { cfg.MaxConns = 60 })
	var held []*pgxpool.Conn
	for range 48 {
		c, err := many.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	ill("connections", "of 57 connections are used, ", 0, pool)
	ill("connections", " of them by the login "+pool.Config().ConnConfig.User, 0, pool)
	for _, c := range held {
		c.Release()
	}
	many.Close()

	hog, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := hog.Exec(t.Context(), `SELECT count(pg_advisory_lock(n)) FROM generate_series(1, 3000) n`); err != nil {
		t.Fatal(err)
	}
	ill("lock-table", fmt.Sprintf("pg_terminate_backend(%d)", hog.PgConn().PID()), 0, pool)
	if err := hog.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "its locks to be gone", func() (bool, error) {
		_, still := found(t, pool, oldTransaction)["lock-table"]
		return !still, nil
	})

	exec(t, pool, `CREATE ROLE plain LOGIN PASSWORD 'plain';;CREATE SCHEMA shadow;;
		CREATE FUNCTION shadow.pg_is_in_recovery() RETURNS boolean LANGUAGE sql AS 'SELECT true';;
		CREATE FUNCTION shadow.current_setting(name text) RETURNS text LANGUAGE sql AS $$
		SELECT CASE name WHEN 'server_version_num' THEN '140099' ELSE pg_catalog.current_setting(name) END $$`)
	ill("hidden-sessions", "GRANT pg_monitor TO plain", 0,
		login(t, db, func(cfg *pgxpool.Config) { cfg.ConnConfig.User, cfg.ConnConfig.Password = "plain", "plain" }))
	plain := login(t, db, func(cfg *pgxpool.Config) {
		cfg.MaxConns, cfg.ConnConfig.User, cfg.ConnConfig.Password = 1, "plain", "plain"
	})
	for _, lock := range []string{"4097083626", "x'74647270'::bigint", "hashtext('versioned.upstreams'), 7"} {
		exec(t, plain, `SELECT pg_advisory_lock(`+lock+`), pg_advisory_lock(7), pg_advisory_lock(7, 7)`)
		ill("foreign-lock", "user plain", 0, pool)
		exec(t, plain, `SELECT pg_advisory_unlock(`+lock+`)`)
		if f, ok := found(t, pool, 0)["foreign-lock"]; ok {
			t.Errorf("a lock of somebody's own: %+v", f)
		}
	}
	exec(t, pool, `GRANT tidings_upstream TO plain`)
	if f, ok := found(t, pool, 0)["role-bypasses-row-security"]; ok {
		t.Errorf("the login of an upstream: %+v", f)
	}
	exec(t, pool, `ALTER ROLE plain SUPERUSER`)
	ill("role-bypasses-row-security", "the role plain is a superuser", 0, pool)
	exec(t, pool, `ALTER ROLE plain NOSUPERUSER;;REVOKE tidings_upstream FROM plain`)
	exec(t, pool, `CREATE VIEW shadow.pg_replication_slots AS
		SELECT 'standby2'::name AS slot_name, true AS active, '2'::xid AS xmin, NULL::xid AS catalog_xmin, NULL::pg_lsn AS restart_lsn`)
	shadowed := login(t, db, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["search_path"] = "shadow,pg_catalog,public" })
	ill("standby", "primary", 0, shadowed)
	ill("standby-horizon", "slot standby2 holds back 2147483647 transactions", 0, shadowed)
	ill("postgres-version", "older than 15", 0, shadowed)
	exec(t, pool, `ALTER ROLE plain SET synchronous_commit = off;;GRANT pg_monitor TO plain`)
	ill("synchronous-commit", "plain", 0, login(t, db,
		func(cfg *pgxpool.Config) { cfg.ConnConfig.User, cfg.ConnConfig.Password = "plain", "plain" }))

	careless := login(t, testkit.PostgresProcess(t, "fsync=off", "full_page_writes=off", "autovacuum=off").DB(t), nil)
	ill("fsync", "fsync = on", 0, careless)
	ill("full-page-writes", "full_page_writes = on", 0, careless)
	ill("autovacuum", "autovacuum = on", 0, careless)
	for _, c := range databaseRules {
		if !tested[c.Name] {
			t.Errorf("no case tests the check %s", c.Name)
		}
	}
}

func TestClocksThatDifferAreFound(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	for theirs, want := range map[time.Duration]int{0: 0, maxSkew: 0, 3 * time.Second: 0, 3*time.Second + maxSkew + 1: 1, -maxSkew - 1: 1} {
		if got := skew("there", now.Add(theirs), now, now.Add(3*time.Second)); len(got) != want {
			t.Errorf("a clock that is %s ahead, read within 3 s: %v", theirs, got)
		}
	}
}

func TestSeveralServersNeedASessionAttribute(t *testing.T) {
	for url, want := range map[string]string{
		"postgres://a/x":                                   "",
		"postgres://a/x?sslmode=prefer":                    "",
		"postgres://a:1,b:1/x":                             "names 2 servers",
		"postgres://a:1,b:1,a:2/x":                         "names 3 servers",
		"postgres://a,b/x?sslmode=allow":                   "names 2 servers",
		"postgres://a,b/x?target_session_attrs=any":        "names 2 servers",
		"postgres://a,b/x?target_session_attrs=read-write": "",
		"postgres://a,b/x?target_session_attrs=primary":    "",
	} {
		cfg, err := pgxpool.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		got := servers(&cfg.ConnConfig.Config, "here")
		if len(got) > 1 || (len(got) == 1) != (want != "") || len(got) == 1 && !strings.Contains(got[0].What, want) {
			t.Errorf("%s: %+v, want %q", url, got, want)
		}
	}
}
