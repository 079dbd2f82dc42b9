package doctor

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// databaseRules are checked in the truth and in the projections. Their statements return a row for
// each finding: the problem and its remedy. Index: none, catalogs and a row per session. Locks:
// none.
var databaseRules = []Rule{
	{Name: "postgres-version", Severity: Error, sql: `
SELECT format('PostgreSQL %s is older than 15', current_setting('server_version')), 'upgrade the server to PostgreSQL 15 or newer'
 WHERE current_setting('server_version_num')::int < 150000`},
	{Name: "standby", Severity: Error, sql: `
SELECT 'the server is a standby, and refuses every write', 'connect to the primary, or promote this server' WHERE pg_is_in_recovery()`},
	{Name: "fsync", Severity: Error, sql: `
SELECT 'fsync is off: a crash of the machine loses or damages committed data', 'ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf()'
 WHERE current_setting('fsync') = 'off'`},
	{Name: "full-page-writes", Severity: Error, sql: `
SELECT 'full_page_writes is off: a crash of the machine can leave half-written pages',
       'ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf()'
 WHERE current_setting('full_page_writes') = 'off'`},
	{Name: "synchronous-commit", Severity: Warning, sql: `
SELECT format('synchronous_commit is off by default for %s: a crash loses the last commits of SQL writers (the API turns it on)',
              current_user),
       'ALTER SYSTEM SET synchronous_commit = on; SELECT pg_reload_conf(); also search for ALTER DATABASE and ALTER ROLE settings'
 WHERE current_setting('synchronous_commit') = 'off'`},
	{Name: "autovacuum", Severity: Error, sql: `
SELECT format('%s is off: tables with many writes grow without limit', name),
       format('ALTER SYSTEM SET %s = on; SELECT pg_reload_conf()', name)
  FROM pg_settings WHERE name IN ('autovacuum', 'track_counts') AND setting = 'off' ORDER BY name`},
	{Name: "table-autovacuum", Severity: Error, sql: `
SELECT format('autovacuum is off for the table %s', oid::regclass), format('ALTER TABLE %s RESET (autovacuum_enabled)', oid::regclass)
  FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'
   AND EXISTS (SELECT FROM unnest(reloptions) o WHERE o IN ('autovacuum_enabled=false', 'autovacuum_enabled=off', 'autovacuum_enabled=0'))
   ORDER BY 1`},
	{Name: "connections", Severity: Warning, sql: `
SELECT format('%s of %s connections are used, %s of them by the login %s', used, most, of_login, login),
       'close idle connections, lower POSTGRES_MAX_CONNS, ALTER ROLE ... CONNECTION LIMIT, or raise max_connections and restart the server'
  FROM (SELECT sum(n) AS used, max(n) AS of_login, (array_agg(usename ORDER BY n DESC))[1] AS login,
               current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int AS most
          FROM (SELECT usename, count(*) AS n FROM pg_stat_activity WHERE backend_type = 'client backend' GROUP BY 1) l) c
 WHERE used > 0.8 * most`},
	// Once the lock table is full, the server refuses most statements, and also logins: then nobody
	// can find out who filled it.
	{Name: "lock-table", Severity: Warning, sql: `
SELECT format('%s locks are held, %s of them by %s, and the lock table has room for %s: when it is full, the server refuses ' ||
              'statements and logins', used, n, CASE WHEN a.pid IS NULL THEN 'a prepared transaction' ELSE
                format('session %s (user %s, application %s)', a.pid, usename, coalesce(nullif(application_name, ''), 'unknown')) END,
              most),
       format('ask its owner to release them%s, or raise max_locks_per_transaction and restart the server',
              ', or SELECT pg_terminate_backend(' || a.pid || ')')
  FROM (SELECT pid, count(*) AS n, sum(count(*)) OVER () AS used FROM pg_locks WHERE NOT fastpath AND mode <> 'SIReadLock'
         GROUP BY pid ORDER BY n DESC LIMIT 1) l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
 CROSS JOIN (SELECT current_setting('max_locks_per_transaction')::int *
       (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int) AS most) room
 WHERE used > 0.5 * most`},
	// A transaction that has written holds the floors of the outbox in any database of the server.
	{Name: "old-transaction", Severity: Warning, sql: `
SELECT format('session %s (user %s, application %s, database %s, %s) has had a transaction open since %s: ', pid, usename,
              coalesce(nullif(application_name, ''), 'unknown'), datname, state, to_char(xact_start, 'YYYY-MM-DD HH24:MI:SS')) ||
       concat_ws(', and ', CASE WHEN here THEN 'VACUUM cannot remove rows that died later' END,
                 CASE WHEN outbox THEN 'no range of the outbox with a later id moves to the archive' END),
       format('ask its owner to commit or roll back, or SELECT pg_terminate_backend(%s)', pid)
  FROM pg_stat_activity a, LATERAL (SELECT datname = current_database() AS here,
         backend_xid IS NOT NULL AND to_regclass('outbox_partitions') IS NOT NULL AS outbox) holds
 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND xact_start < clock_timestamp() - make_interval(secs => @old)
   AND (here AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) OR outbox)
 ORDER BY xact_start`},
	// Every login may take any advisory lock of a database. Ours are that of migrations, those
	// whose keys begin with "td", and those of the tables of versioned objects.
	{Name: "foreign-lock", Severity: Warning, sql: `
SELECT format('session %s (user %s, application %s) holds an advisory lock of Tidings: what needs it waits or is refused, such as ' ||
              'a migration, a repair or a change of settings', pid, usename, coalesce(nullif(application_name, ''), 'unknown')),
       format('ask its owner to release it, or SELECT pg_terminate_backend(%s)', pid)
  FROM pg_stat_activity a
 WHERE pid IN (SELECT l.pid FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted
            AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND CASE l.objsubid WHEN 1 THEN l.classid = 0 AND (l.objid::bigint = 4097083626 OR l.objid::bigint >> 16 = x'7464'::int)
                ELSE l.classid::bigint IN (SELECT hashtext('versioned.' || relname)::bigint & x'ffffffff'::bigint FROM pg_class
                                            WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r') END)
   AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname LIKE 'tidings\_%' AND r.rolname NOT IN ('tidings_upstream', 'tidings_writer')
                      AND pg_has_role(a.usesysid, r.oid, 'MEMBER'))
 ORDER BY pid`},
	{Name: "hidden-sessions", Severity: Warning, sql: `
SELECT format('the login %s cannot see the sessions of other logins, so this report lacks their old transactions', current_user),
       format('GRANT pg_monitor TO %I', current_user)
 WHERE NOT pg_has_role(current_user, 'pg_read_all_stats', 'member')`},
	{Name: "prepared-transaction", Severity: Error, sql: `
SELECT format('the prepared transaction %s has been open since %s: it holds its locks, and VACUUM cannot remove rows that died later',
              quote_literal(gid), to_char(prepared, 'YYYY-MM-DD HH24:MI:SS')),
       format('find out whether it should commit, then ROLLBACK PREPARED %s or COMMIT PREPARED %s', quote_literal(gid), quote_literal(gid))
  FROM pg_prepared_xacts WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => @old)
  ORDER BY prepared`},
	{Name: "replication-slot", Severity: Warning, sql: `
SELECT format('no standby or client reads the replication slot %s, and the server keeps %s of WAL for it', slot_name,
              pg_size_pretty(coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0))),
       format('start its reader, or drop the slot: SELECT pg_drop_replication_slot(%L)', slot_name)
  FROM pg_replication_slots WHERE NOT active AND NOT pg_is_in_recovery() ORDER BY slot_name`},
	{Name: "standby-horizon", Severity: Warning, sql: `
SELECT format('%s holds back %s transactions: VACUUM cannot remove rows that died since', who, held),
       'end the long transaction on the standby, or turn hot_standby_feedback off there'
  FROM (SELECT format('the reader of the replication slot %s', slot_name) AS who, greatest(age(xmin), age(catalog_xmin)) AS held
          FROM pg_replication_slots WHERE active
         UNION ALL SELECT format('the standby %s', application_name), age(backend_xmin) FROM pg_stat_replication) h
 WHERE held > 10000000 ORDER BY who`},
	{Name: "dead-rows", Severity: Warning, sql: `
SELECT format('the table %s has %s dead rows and %s live ones', relid::regclass, n_dead_tup, n_live_tup),
       format('solve the findings old-transaction and replication-slot if there are any, then VACUUM %s', relid::regclass)
  FROM pg_stat_user_tables WHERE schemaname = current_schema() AND n_dead_tup > 20000 AND n_dead_tup > 2 * n_live_tup
  ORDER BY n_dead_tup DESC`},
	{Name: "invalid-index", Severity: Error, sql: `
SELECT format('the index %s is invalid: no query uses it, and every write maintains it', indexrelid::regclass),
       format('REINDEX INDEX CONCURRENTLY %s', indexrelid::regclass)
  FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE c.relnamespace = current_schema()::regnamespace AND NOT indisvalid ORDER BY 1`},
	// SQL writers connect as their logins, and the others set their role.
	{Name: "role-bypasses-row-security", Severity: Error, sql: `
SELECT format('the role %s %s: row security does not restrict it', rolname,
              CASE WHEN rolsuper THEN 'is a superuser' ELSE 'bypasses row security' END),
       format('ALTER ROLE %I NOSUPERUSER NOBYPASSRLS', rolname)
  FROM pg_roles r WHERE (rolsuper OR rolbypassrls) AND (rolname IN ('tidings_api', 'tidings_writer', 'tidings_upstream')
    OR EXISTS (SELECT FROM pg_auth_members m WHERE m.member = r.oid
                  AND m.roleid IN (to_regrole('tidings_writer'), to_regrole('tidings_upstream'))))
 ORDER BY rolname`},
	{Name: "row-security", Severity: Error, sql: `
SELECT format('row security is off for the table %s, which has rows of tenants', c.oid::regclass),
       format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', c.oid::regclass)
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped
 WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND NOT c.relrowsecurity
   AND EXISTS (SELECT FROM pg_roles WHERE rolname IN ('tidings_api', 'tidings_writer') AND has_any_column_privilege(oid, c.oid, 'SELECT'))
 ORDER BY 1`},
}

// oldTransaction is the age in seconds at which a transaction is a finding. Of Tidings'
// transactions only an export and a replay take longer.
const oldTransaction = 300

// maxSkew is the largest difference between the clocks of two servers that is no finding.
const maxSkew = time.Second

// Database checks one database as the login, not as a role of Tidings. where names the database in
// the findings.
func Database(ctx context.Context, pool *pgxpool.Pool, where string) ([]Finding, error) {
	return probe(ctx, pool, where, oldTransaction)
}

func probe(ctx context.Context, pool *pgxpool.Pool, where string, old float64) ([]Finding, error) {
	var all []Finding
	err := postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		all = nil
		if _, err := tx.Exec(ctx, `SELECT set_config('role', 'none', true)`); err != nil {
			return err
		}
		for _, r := range databaseRules {
			var what, repair string
			rows, _ := tx.Query(ctx, r.sql, pgx.NamedArgs{"old": old})
			if _, err := pgx.ForEachRow(rows, []any{&what, &repair}, func() error {
				all = append(all, finding(r.Name, where, what, repair))
				return nil
			}); err != nil {
				return fmt.Errorf("check %s: %w", r.Name, err)
			}
		}
		var now time.Time
		began := time.Now()
		if err := tx.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
			return err
		}
		all = append(all, skew(where, now, began, time.Now())...)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("run the checks of %s: %w", where, err)
	}
	return append(all, servers(&pool.Config().ConnConfig.Config, where)...), nil
}

// servers returns a finding if the connection string names several servers, and does not say which
// of them to use.
func servers(cfg *pgconn.Config, where string) []Finding {
	all := map[string]bool{net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port))): true}
	for _, f := range cfg.Fallbacks { // also the same server without TLS
		all[net.JoinHostPort(f.Host, strconv.Itoa(int(f.Port)))] = true
	}
	if len(all) == 1 || cfg.ValidateConnect != nil {
		return nil
	}
	return []Finding{finding("target-session-attrs", where, fmt.Sprintf("the connection string names %d servers without "+
		"target_session_attrs: a process may connect to a standby, which refuses every write", len(all)),
		"add target_session_attrs=read-write to it, and fence old primaries")}
}

// skew compares the clock of a server with ours. The server's clock was read between before and
// after.
func skew(where string, theirs, before, after time.Time) []Finding {
	by := max(before.Sub(theirs), theirs.Sub(after))
	if by <= maxSkew {
		return nil
	}
	return []Finding{finding("clock-skew", where, fmt.Sprintf(
		"its clock and this machine's differ by %s: lags and ages are wrong by as much", by.Round(time.Millisecond)),
		"run an NTP client (chrony) on both")}
}
