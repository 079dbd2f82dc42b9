package testkit

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
)

// bare removes the roles of Tidings, which the copied files of the server have, with the template.
func (p *PG) bare(ctx context.Context) error {
	return admin(ctx, p.s, func(conn *pgx.Conn) error {
		var sql []string
		for _, q := range []string{
			`SELECT format('ALTER DATABASE %I IS_TEMPLATE false', datname) FROM pg_database
				WHERE datname NOT IN (current_database(), 'template0', 'template1')`,
			`SELECT format('DROP DATABASE %I', datname) FROM pg_database
				WHERE datname NOT IN (current_database(), 'template0', 'template1')`,
			`SELECT format('DROP ROLE %I', rolname) FROM pg_roles WHERE rolname LIKE 'tidings\_%'`,
		} {
			rows, _ := conn.Query(ctx, q)
			found, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			sql = append(sql, found...)
		}
		for _, q := range append(sql, `CREATE DATABASE business`) {
			if _, err := conn.Exec(ctx, q); err != nil {
				return err
			}
		}
		return nil
	})
}

// As returns the same database for another login. The server of the tests trusts it.
func (db *DB) As(t testing.TB, login string) *DB {
	t.Helper()
	u, err := url.Parse(db.URL)
	check(t, "read the database's URL", err)
	u.User = url.UserPassword(login, login)
	return &DB{URL: u.String()}
}

// UpstreamLogin lets the role append events of upstreams, as `tidings upstream add --login` does.
func UpstreamLogin(t testing.TB, db *DB, name string) migrations.UpstreamLogin {
	t.Helper()
	made, err := migrations.MakeUpstreamLogins(t.Context(), db.URL, []string{name}, func([]migrations.UpstreamLogin) error { return nil })
	check(t, "make the login "+name, err)
	return made[0]
}

// businessSQL makes what a business has in its database: logins, groups, default privileges, row
// security, settings, an event trigger that records DDL, row triggers, views and publications.
const businessSQL = `
CREATE ROLE shop_owner NOLOGIN;
CREATE ROLE shop_app LOGIN PASSWORD 'shop_app';
CREATE ROLE report LOGIN PASSWORD 'report' CONNECTION LIMIT 5;
CREATE ROLE auditor NOLOGIN;
GRANT auditor TO report;
ALTER ROLE report SET statement_timeout = '30s';
CREATE EXTENSION pgcrypto;
CREATE SCHEMA shop AUTHORIZATION shop_owner;
CREATE SCHEMA audit;
GRANT USAGE ON SCHEMA shop TO shop_app, report;
SET ROLE shop_owner;
ALTER DEFAULT PRIVILEGES IN SCHEMA shop GRANT SELECT ON TABLES TO report;
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
CREATE TABLE shop.orders (id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, tenant_id bigint NOT NULL DEFAULT 1, customer text NOT NULL,
  total numeric NOT NULL CHECK (total >= 0), version bigint NOT NULL DEFAULT 1, changed_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE shop.lines (order_id bigint REFERENCES shop.orders, sku text, PRIMARY KEY (order_id, sku));
CREATE INDEX orders_customer_idx ON shop.orders (tenant_id, customer);
ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY;
CREATE POLICY app ON shop.orders TO shop_app USING (true) WITH CHECK (total < 1000000);
CREATE VIEW shop.large_orders AS SELECT id, customer FROM shop.orders WHERE total > 1000;
CREATE FUNCTION shop.touch() RETURNS trigger LANGUAGE plpgsql AS $f$ BEGIN NEW.changed_at := now(); RETURN NEW; END $f$;
CREATE TRIGGER touch BEFORE UPDATE ON shop.orders FOR EACH ROW EXECUTE FUNCTION shop.touch();
GRANT SELECT, INSERT, UPDATE ON shop.orders, shop.lines TO shop_app;
GRANT SELECT (id, total) ON shop.orders TO auditor;
INSERT INTO shop.orders (customer, total) SELECT 'customer ' || n, n FROM generate_series(1, 100) n;
RESET ROLE;
CREATE TABLE audit.ddl (at timestamptz NOT NULL DEFAULT now(), who text NOT NULL DEFAULT session_user, what text NOT NULL);
CREATE TABLE audit.rows (at timestamptz NOT NULL DEFAULT now(), what jsonb NOT NULL);
CREATE FUNCTION audit.record_ddl() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = audit, pg_temp AS
$f$ BEGIN INSERT INTO ddl (what) VALUES (tg_tag); END $f$;
CREATE EVENT TRIGGER record_ddl ON ddl_command_end EXECUTE FUNCTION audit.record_ddl();
CREATE FUNCTION audit.record_row() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = audit, pg_temp AS
$f$ BEGIN INSERT INTO rows (what) VALUES (to_jsonb(NEW)); RETURN NULL; END $f$;
CREATE TRIGGER record AFTER INSERT OR UPDATE ON shop.orders FOR EACH ROW EXECUTE FUNCTION audit.record_row();
CREATE PUBLICATION everything FOR ALL TABLES;
CREATE PUBLICATION orders FOR TABLE shop.orders WHERE (total > 10) WITH (publish = 'insert');
ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO auditor;
DO $$ BEGIN
  EXECUTE format('ALTER DATABASE %I SET search_path = shop, public', current_database());
  EXECUTE format('ALTER DATABASE %I SET lock_timeout = ''3s''', current_database());
  EXECUTE format('ALTER ROLE shop_app IN DATABASE %I SET work_mem = ''8MB''', current_database());
  EXECUTE format('REVOKE TEMPORARY ON DATABASE %I FROM PUBLIC', current_database());
  EXECUTE format('GRANT TEMPORARY ON DATABASE %I TO report', current_database());
END $$`

// Business returns the database of a business, on a server of its own that has no role of Tidings.
func Business(t testing.TB) *DB {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	p := PostgresProcess(t, "wal_level=logical", "max_wal_senders=5", "max_replication_slots=5")
	check(t, "create the database of the business", p.bare(ctx))
	db := &DB{URL: p.s.url("business")}
	_, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), businessSQL, pgx.QueryExecModeSimpleProtocol)
	check(t, "fill the database of the business", err)
	return db
}

// catalogs are the catalogs of PostgreSQL that Catalog reads, each with the condition of a row that
// belongs to the schema $1 or to a role tidings_*. The statistics of tables, which VACUUM writes,
// are not compared.
var catalogs = map[string]string{
	"pg_authid":                `x.rolname LIKE 'tidings\_%'`,
	"pg_auth_members":          `x.roleid IN (SELECT oid FROM pg_roles WHERE rolname LIKE 'tidings\_%')`,
	"pg_db_role_setting":       `false`,
	"pg_database":              `false`,
	"pg_tablespace":            `false`,
	"pg_parameter_acl":         `false`,
	"pg_default_acl":           `false`,
	"pg_namespace":             `x.nspname = $1`,
	"pg_class":                 ofSchema("x.oid"),
	"pg_attribute":             ofSchema("x.attrelid"),
	"pg_attrdef":               ofSchema("x.adrelid"),
	"pg_index":                 ofSchema("x.indrelid"),
	"pg_sequence":              ofSchema("x.seqrelid"),
	"pg_inherits":              ofSchema("x.inhrelid"),
	"pg_trigger":               ofSchema("x.tgrelid"),
	"pg_policy":                ofSchema("x.polrelid"),
	"pg_rewrite":               ofSchema("x.ev_class"),
	"pg_partitioned_table":     ofSchema("x.partrelid"),
	"pg_type":                  `x.typnamespace IN (to_regnamespace($1), 'pg_toast'::regnamespace)`,
	"pg_proc":                  `x.pronamespace = to_regnamespace($1)`,
	"pg_constraint":            `x.connamespace = to_regnamespace($1)`,
	"pg_operator":              `x.oprnamespace = to_regnamespace($1)`,
	"pg_collation":             `x.collnamespace = to_regnamespace($1)`,
	"pg_statistic_ext":         `x.stxnamespace = to_regnamespace($1)`,
	"pg_cast":                  `false`,
	"pg_language":              `false`,
	"pg_extension":             `false`,
	"pg_event_trigger":         `false`,
	"pg_publication":           `false`,
	"pg_publication_rel":       `false`,
	"pg_publication_namespace": `false`,
	"pg_subscription":          `false`,
	"pg_replication_slots":     `false`,
	"pg_foreign_server":        `false`,
	"pg_user_mapping":          `false`,
	"pg_largeobject_metadata":  `false`,
	"pg_seclabel":              `false`,
	"pg_description":           ofSchema("x.objoid"),
}

func ofSchema(relation string) string {
	return relation + ` IN (SELECT oid FROM pg_class WHERE relnamespace IN (to_regnamespace($1), 'pg_toast'::regnamespace))`
}

// Catalog returns every row of the server's catalogs, as text, that belongs neither to the schema
// nor to a role tidings_*: the tables, rights, roles, memberships, settings, triggers and
// publications of all others.
func (db *DB) Catalog(t testing.TB, schema string) (rows []string) {
	t.Helper()
	owner := db.Pool(t, postgres.RoleOwner)
	for name, ours := range catalogs {
		found, _ := owner.Query(t.Context(), fmt.Sprintf(`SELECT (to_jsonb(x) - ARRAY['relpages', 'reltuples', 'relallvisible',
			'relallfrozen', 'relfrozenxid', 'relminmxid', 'datfrozenxid', 'datminmxid', 'restart_lsn',
			'confirmed_flush_lsn', 'safe_wal_size'])::text
			FROM %s x WHERE (%s) IS NOT TRUE AND $1 <> ''`, name, ours), schema)
		all, err := pgx.CollectRows(found, pgx.RowTo[string])
		check(t, "read "+name, err)
		for _, row := range all {
			rows = append(rows, name+" "+row)
		}
	}
	return rows
}

// SameCatalog fails the test for every row that only one of two results of Catalog has.
func SameCatalog(t testing.TB, when string, before, after []string) {
	t.Helper()
	count := map[string]int{}
	for _, row := range before {
		count[row]--
	}
	for _, row := range after {
		count[row]++
	}
	for row, n := range count {
		switch {
		case n > 0:
			t.Errorf("%s: new or changed: %s", when, strings.TrimSpace(row))
		case n < 0:
			t.Errorf("%s: gone or changed: %s", when, strings.TrimSpace(row))
		}
	}
}
