package migrations_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/migrations"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func pool(t *testing.T, url string, role postgres.Role) *pgxpool.Pool {
	t.Helper()
	p, err := postgres.Open(t.Context(), url, postgres.Config{MaxConns: 4, ConnectTimeout: 5e9}, role, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// TestTheFilesAreNumberedFromOneOn holds what apply relies on: a file's number is above those of
// all files that a database may have.
func TestTheFilesAreNumberedFromOneOn(t *testing.T) {
	for _, set := range []migrations.Set{migrations.Outbox, migrations.Truth, migrations.Consumers, migrations.Projections} {
		names, err := filepath.Glob(string(set) + "/*.sql")
		if err != nil || len(names) == 0 {
			t.Fatalf("%s: %d files, %v", set, len(names), err)
		}
		for i, name := range names {
			if !strings.HasPrefix(filepath.Base(name), fmt.Sprintf("%05d_", i+1)) {
				t.Errorf("%s is file %d of its set", name, i+1)
			}
		}
	}
}

func TestUp(t *testing.T) {
	t.Parallel()
	url := testkit.EmptyPostgres(t).URL
	ctx := t.Context()
	owner := pool(t, url, postgres.RoleOwner)
	for _, set := range []migrations.Set{migrations.Outbox, migrations.Truth, migrations.Projections} {
		if err := migrations.Check(ctx, owner, set); !errors.Is(err, migrations.ErrOutdated) {
			t.Errorf("check of an empty database, %s: %v, want ErrOutdated", set, err)
		}
	}
	// Two processes at once, each with both sets, in different orders.
	var wg sync.WaitGroup
	var mu sync.Mutex
	applied := 0
	for i := range 4 {
		wg.Go(func() {
			sets := []migrations.Set{migrations.Outbox, migrations.Truth, migrations.Projections}
			if i%2 == 1 {
				slices.Reverse(sets)
			}
			for _, set := range sets {
				n, err := migrations.Up(ctx, url, set, testkit.Logger(t))
				if err != nil {
					t.Errorf("up, %s: %v", set, err)
				}
				mu.Lock()
				applied += n
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	files, err := filepath.Glob("*/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	if want := len(files); applied != want {
		t.Errorf("applied %d migrations, want %d, each once", applied, want)
	}
	for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
		if n, err := migrations.Up(ctx, url, set, testkit.Logger(t)); n != 0 || err != nil {
			t.Errorf("up again, %s: %d applied, %v", set, n, err)
		}
		for _, role := range []postgres.Role{postgres.RoleOwner, postgres.RoleAPI, postgres.RoleSystem} {
			if err := migrations.Check(ctx, pool(t, url, role), set); err != nil {
				t.Errorf("check as %q, %s: %v", role, set, err)
			}
		}
	}
}

// A release with more tables per kind makes them for the kinds that were applied before it.
func TestUpMakesTheTablesOfEveryKindInForce(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx, system, owner := t.Context(), db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	const file = `edges: {visit: {plural: visits, from: user, to: group, forward: visits, reverse: visitors}}`
	if _, err := catalog.Apply(ctx, catalog.Databases{Truth: system, Projections: system},
		catalog.Request{Kinds: testkit.Kinds(t, file), Actor: "ann"}); err != nil {
		t.Fatal(err)
	}
	if _, err := owner.Exec(ctx, `DROP VIEW visits, likes; DROP TABLE edges_visit, edges_like`); err != nil {
		t.Fatal(err)
	}
	if _, err := migrations.Up(ctx, db.URL, migrations.Truth, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := owner.Exec(ctx, `INSERT INTO visits (tenant_id, user_id, group_id)
		VALUES (1, 2, 3); INSERT INTO likes (tenant_id, user_id, post_id) VALUES (1, 2, 2)`); err != nil {
		t.Error(err)
	}
	// If this program cannot read the kinds, Up returns an error.
	if _, err := owner.Exec(ctx,
		`UPDATE kinds SET object = '{"name": "installation", "kinds": {"edges": {"visit": {"speed": 3}}}}'`); err != nil {
		t.Fatal(err)
	}
	if _, err := migrations.Up(ctx, db.URL, migrations.Truth, testkit.Logger(t)); err == nil ||
		!strings.Contains(err.Error(), `cannot use the kinds in force: line 1: there is no member "speed"`) {
		t.Errorf("%v", err)
	}
}

type tenantTable struct {
	name      string
	readable  bool // by tidings_api
	writable  bool
	deletable bool
	column    string // one that tidings_api may update, or ""
}

// tenantTables are the tables of both sets that have a tenant_id. Of the partitions of tables, they
// are those that tidings_api reads or writes without their parents.
func tenantTables(t *testing.T, owner *pgxpool.Pool) []tenantTable {
	t.Helper()
	rows, _ := owner.Query(t.Context(), `
		SELECT k.relname::text, has_any_column_privilege('tidings_api', k.oid, 'SELECT'),
		       has_any_column_privilege('tidings_api', k.oid, 'INSERT'), has_table_privilege('tidings_api', k.oid, 'DELETE'),
		       coalesce((SELECT min(quote_ident(a.attname)) FROM pg_attribute a WHERE a.attrelid = k.oid AND a.attnum > 0
		         AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity = ''
		         AND has_column_privilege('tidings_api', k.oid, a.attnum, 'SELECT')
		         AND has_column_privilege('tidings_api', k.oid, a.attnum, 'UPDATE')), '')
		  FROM pg_class k JOIN pg_attribute t ON t.attrelid = k.oid AND t.attname = 'tenant_id'
		 WHERE k.relkind IN ('r', 'p') AND k.relnamespace = current_schema()::regnamespace
		   AND (NOT k.relispartition OR has_any_column_privilege('tidings_api', k.oid, 'SELECT, INSERT, UPDATE')
		     OR has_table_privilege('tidings_api', k.oid, 'DELETE')) ORDER BY 1`)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (tt tenantTable, err error) {
		return tt, row.Scan(&tt.name, &tt.readable, &tt.writable, &tt.deletable, &tt.column)
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// fillSQL inserts one row of tenant 1 into every tenant table.
var fillSQL = `
INSERT INTO edges (tenant_id, kind, from_id, to_id) VALUES (1, 'follow', 3, 4);
INSERT INTO edges_follow (tenant_id, from_id, to_id) VALUES (1, 1, 2);
INSERT INTO edges_like (tenant_id, from_id, to_id) VALUES (1, 1, 1);
INSERT INTO edges_membership (tenant_id, from_id, to_id) VALUES (1, 1, 2);
INSERT INTO edges_share (tenant_id, from_id, to_id) VALUES (1, 1, 2);
INSERT INTO edges_like_comment (tenant_id, from_id, to_id) VALUES (1, 1, '00000000-0000-7000-8000-000000000000');
INSERT INTO edges_vote (tenant_id, from_id, to_id) VALUES (1, 1, '00000000-0000-7000-8000-000000000000');
INSERT INTO children_comment (tenant_id, child_id, object_id, slug, path, author_id, body)
  VALUES (1, gen_random_uuid(), 1, 'aaaaaaaa', '00000000000001aaaaaaaa', 1, 'x');
INSERT INTO children_message (tenant_id, child_id, object_id, author_id, body) VALUES (1, gen_random_uuid(), 1, 1, 'x');
INSERT INTO children_review (tenant_id, child_id, object_id, author_id, body) VALUES (1, gen_random_uuid(), 1, 1, 'x');
INSERT INTO children_archive_comment (tenant_id, child_id, object_id, slug, path, author_id, body, author_state, moderation_state,
    version, created_at, updated_at)
  VALUES (1, gen_random_uuid(), 2, 'aaaaaaaa', '00000000000001aaaaaaaa', 1, 'x', 'ACTIVE', 'NONE', 1, now(), now());
INSERT INTO children_archive_message (tenant_id, child_id, object_id, author_id, body, author_state, moderation_state,
    version, created_at, updated_at)
  VALUES (1, gen_random_uuid(), 2, 1, 'x', 'ACTIVE', 'NONE', 1, now(), now());
INSERT INTO children_archive_review (tenant_id, child_id, object_id, author_id, body, author_state, moderation_state,
    version, created_at, updated_at)
  VALUES (1, gen_random_uuid(), 2, 1, 'x', 'ACTIVE', 'NONE', 1, now(), now());
INSERT INTO archived_threads (tenant_id, kind, object_id, archive_id, state) VALUES (1, 'comment', 2, 1, 'ARCHIVED');
INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id)
	VALUES (1, 'comment', 1, 'k', '', gen_random_uuid());
INSERT INTO threads (tenant_id, object, metadata)
  VALUES (1, '{"post_id": 1}',
    '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}');
INSERT INTO kinds (tenant_id, object, metadata)
  VALUES (1, '{"name": "x"}',
    '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}');
INSERT INTO projection_kinds (tenant_id, object, metadata)
  VALUES (1, '{"name": "x"}',
    '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}');
INSERT INTO api_tokens (token_hash, tenant_id, name, roles) VALUES (sha256('x'), 1, 't', '{read}');
INSERT INTO operator_acts (act_id, tenant_id, token_tenant, token_name, fingerprint, act, target, reason)
	VALUES (gen_random_uuid(), 1, 1, 't', '0123456789ab', 'a', 'b', 'c');
INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES (1, 'follow', 2, 'created', '{}');
INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
    available_at, attempts, event_id, inserted_at, slot)
  VALUES (1, 1, 'follow', 2, 'created', 1, '{}', now(), now(), 11, gen_random_uuid(), now(), 0);
INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type)
  VALUES ('a', 'discard', 1, gen_random_uuid(), 1, 'follow', 2, 'created');
CREATE TABLE outbox_messages_archive_1 PARTITION OF outbox_messages_archive FOR VALUES FROM (1) TO (10);
INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
    available_at, processed_at, attempts, event_id, inserted_at)
  VALUES (1, 1, 'follow', 2, 'created', 1, '{}', now(), now(), now(), 0, gen_random_uuid(), now());
INSERT INTO outbox_messages_kept (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
    available_at, processed_at, attempts, event_id, inserted_at)
  VALUES (1, 1, 'follow', 2, 'created', 1, '{}', now(), now(), now(), 0, gen_random_uuid(), now());
INSERT INTO outbox_archive_holds (tenant_id, reason, created_by) VALUES (1, 'r', 'a');
INSERT INTO edge_removals (tenant_id, object, object_id, kinds, direction, actor) VALUES (1, 'user', 1, '{follow}', 'both', 'a');
INSERT INTO erasures (tenant_id, author_id, requested_by) VALUES (1, 1, 'a');
INSERT INTO outbox_dlq_operations (operation_id, tenant_id, action, filter, actor, total)
	VALUES (gen_random_uuid(), 1, 'retry', '{}', 'a', 1);
INSERT INTO consumer_dead_letter_operations (operation_id, tenant_id, action, filter, actor, total)
	VALUES (gen_random_uuid(), 1, 'retry', '{}', 'a', 1);
INSERT INTO dead_letter_notes (tenant_id, group_id, note, actor) VALUES (1, gen_random_uuid(), 'n', 'a');
INSERT INTO archive_settings (tenant_id, object, metadata)
  VALUES (1, '{"name": "x"}',
    '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}');
INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id, event_type,
    event_version, headers, payload, error)
  VALUES ('c', 1, 'p00', 1, 'follow', 2, gen_random_uuid(), 'created', 1, '{}', '', 'x');
INSERT INTO consumer_dead_letter_actions (actor, action, dead_letter_id, consumer_name, stream_seq, tenant_id, aggregate_type,
    aggregate_id, event_id, event_type)
  VALUES ('a', 'discard', 1, 'c', 1, 1, 'follow', 2, gen_random_uuid(), 'created');
INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at) VALUES (1, 'follow', 1, 2, true, 1, now());
INSERT INTO edge_counts (tenant_id, kind, object_id) VALUES (1, 'follow', 2);
INSERT INTO edge_shards (tenant_id, kind, object_id, shards) VALUES (1, 'follow', 2, 2);
INSERT INTO edge_aggregates (tenant_id, kind, object_id, attribute, value, count, sum) VALUES (1, 'vote', 2, 'value', '', 1, 1);
INSERT INTO child_ranks (tenant_id, kind, child_id, score) VALUES (1, 'comment', gen_random_uuid(), 1);
INSERT INTO child_buckets (tenant_id, kind, object_id, level, first_at, first_id, visible)
	VALUES (1, 'comment', 1, 0, '-infinity', gen_random_uuid(), 1);
INSERT INTO child_totals (tenant_id, kind, object_id, total) VALUES (1, 'comment', 1, 1);
INSERT INTO child_aggregates (tenant_id, kind, object_id, attribute, count, sum) VALUES (1, 'review', 1, 'rating', 1, 5);
INSERT INTO child_settings (tenant_id, kind, object_id, locked, premoderated, title, version) VALUES (1, 'comment', 1, false, false, '', 1);
INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body, author_state, moderation_state, version,
    created_at, updated_at, visible, shown)
  VALUES (1, 'comment', gen_random_uuid(), 1, 'aaaaaaaa', 'p', 1, 'x', 'ACTIVE', 'NONE', 1, now(), now(), true, true);
INSERT INTO threads_purged (tenant_id, post_id, kind, version) VALUES (1, 2, 'comment', 3);
INSERT INTO upstreams (tenant_id, object, metadata) VALUES (1, '{"name": "order"}',
  '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}');
INSERT INTO tenant_cells (tenant_id, cell) VALUES (1, 'EVENTS-b')` + historiesSQL()

// historiesSQL does the same for the histories of the built-in kinds.
func historiesSQL() (sql string) {
	history := func(kind, values, object string, names ...string) {
		sql += fmt.Sprintf(`;
INSERT INTO %[1]s_history_purged (tenant_id, %[2]s, version) VALUES (1, %[3]s, 3);
INSERT INTO %[1]s_history (tenant_id, object, metadata)
  VALUES (1, '%[4]s', '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}')`, kind,
			strings.Join(names, ", "), values, object)
	}
	for _, e := range kinds.Builtin().AllEdges() {
		history(e.Name, "1, 2", fmt.Sprintf(`{%q: 1, %q: 2, "version": 1}`, e.Ends[0], e.Ends[1]), e.Ends[0], e.Ends[1])
	}
	for _, c := range kinds.Builtin().AllChildren() {
		history(c.Name, "gen_random_uuid()", fmt.Sprintf(`{%q: "00000000-0000-7000-8000-000000000000", "version": 1}`, c.Names().ID),
			c.Names().ID)
	}
	return sql
}

func TestNoTenantReadsOrWritesAnothersRows(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx := t.Context()
	owner, apiPool := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleAPI)
	if _, err := owner.Exec(ctx, fillSQL); err != nil {
		t.Fatal(err)
	}
	tables := tenantTables(t, owner)
	count := func(tx pgx.Tx, table string) (n int, err error) {
		return n, tx.QueryRow(ctx, "SELECT count(*) FROM "+table).Scan(&n)
	}
	checked, changed := 0, 0
	for _, table := range tables {
		t.Run(table.name, func(t *testing.T) {
			var n int
			if err := owner.QueryRow(ctx, "SELECT count(*) FROM "+table.name).Scan(&n); err != nil || n == 0 {
				t.Fatalf("the test filled no row in: %d, %v", n, err)
			}
			read := func(name string, tenant string, want int) {
				t.Helper()
				err := postgres.InTx(ctx, apiPool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					if tenant != "unset" {
						if _, err := tx.Exec(ctx, `SELECT set_config('tidings.tenant', $1, true)`, tenant); err != nil {
							return err
						}
					}
					got, err := count(tx, table.name)
					if err == nil && got != want {
						t.Errorf("%s: %d rows, want %d", name, got, want)
					}
					return err
				})
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			if table.readable { // a table that tidings_api may not read at all is closed completely
				checked++
				read("its tenant", "1", n)
				read("no tenant", "unset", 0)
				read("a tenant set to nothing", "", 0)
				read("another tenant", "2", 0)
			}
			change := func(sql string) {
				t.Helper()
				changed++
				if err := postgres.InTenant(ctx, apiPool, 2, pgx.TxOptions{}, func(tx pgx.Tx) error {
					tag, err := tx.Exec(ctx, sql)
					if err == nil && tag.RowsAffected() != 0 {
						t.Errorf("another tenant: %s", tag)
					}
					return err
				}); err != nil {
					t.Errorf("another tenant: %s: %v", sql, err)
				}
			}
			if table.column != "" {
				change("UPDATE " + table.name + " SET " + table.column + " = " + table.column)
			}
			if table.deletable {
				change("DELETE FROM " + table.name)
			}
			if !table.writable {
				return
			}
			for _, tenant := range []int64{2, 0} {
				err := postgres.InTx(ctx, apiPool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					if tenant != 0 {
						if _, err := tx.Exec(ctx, fmt.Sprint("SET LOCAL tidings.tenant = ", tenant)); err != nil {
							return err
						}
					}
					_, err := tx.Exec(ctx, insertSQL(table.name))
					return err
				})
				var pg *pgconn.PgError
				if !errors.As(err, &pg) || !strings.Contains(pg.Message, "row-level security") {
					t.Errorf("insert for tenant 1 as tenant %d: %v, want row-level security to refuse it", tenant, err)
				}
			}
		})
	}
	if checked < 15 || changed < 15 {
		t.Errorf("%d tables were read, and %d updates and deletions were tried: want 15 or more", checked, changed)
	}
	// Another tenant's UPDATE or DELETE affects no row of a view either.
	err := postgres.InTenant(ctx, apiPool, 2, pgx.TxOptions{}, func(tx pgx.Tx) error {
		for _, sql := range []string{`UPDATE follows SET version = 9`, `UPDATE comments SET body = 'theirs'`,
			`DELETE FROM outbox_messages_dlq`, `DELETE FROM child_keys`,
			`DELETE FROM children_archive_comment`, `UPDATE archived_threads SET state = 'RETURNED'`} {
			if tag, err := tx.Exec(ctx, sql); err != nil || tag.RowsAffected() != 0 {
				t.Errorf("%s: %s, %v", sql, tag, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// insertSQL returns fillSQL's statement for the table, with other keys if necessary: the policy
// refuses it first.
func insertSQL(table string) string {
	for _, sql := range strings.Split(fillSQL, ";") {
		if strings.Contains(sql, "INTO "+table+" ") {
			return sql
		}
	}
	panic("fillSQL has nothing for " + table)
}

// TestAShelvedThreadThatIsBackTellsWhenAndWhy: the row is the only record of a return.
func TestAShelvedThreadThatIsBackTellsWhenAndWhy(t *testing.T) {
	t.Parallel()
	owner := testkit.Postgres(t).Pool(t, postgres.RoleOwner)
	for n, c := range []struct {
		values  string
		refused bool
	}{
		{`'ARCHIVED', NULL, NULL`, false},
		{`'RETURNING', now(), 'write'`, false},
		{`'RETURNED', now(), 'undo'`, false},
		{`'RETURNING', now(), NULL`, true},
		{`'RETURNED', now(), NULL`, true},
		{`'RETURNED', NULL, 'write'`, true},
		{`'RETURNED', now(), 'somebody'`, true},
	} {
		_, err := owner.Exec(t.Context(), `INSERT INTO archived_threads (tenant_id, kind, object_id, archive_id, state, returned_at,
			returned_by) VALUES (1, 'comment', $1, 1, `+c.values+`)`, fmt.Sprint(n))
		if postgres.IsCheck(err) != c.refused || !c.refused && err != nil {
			t.Errorf("%s: %v, want that it is refused: %t", c.values, err, c.refused)
		}
	}
}

func TestEveryTenantTableHasRowLevelSecurity(t *testing.T) {
	t.Parallel()
	owner := testkit.Postgres(t).Pool(t, postgres.RoleOwner)
	rows, _ := owner.Query(t.Context(), `
		SELECT c.relname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant_id'
		 WHERE c.relkind IN ('r', 'p') AND c.relnamespace = current_schema()::regnamespace AND NOT c.relispartition
		   AND NOT (c.relrowsecurity AND EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid
		   AND p.polroles = ARRAY['tidings_api'::regrole::oid]))`)
	open, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(open) > 0 {
		t.Errorf("without row-level security for tidings_api: %v, %v", open, err)
	}
	rows, _ = owner.Query(t.Context(), `
		SELECT c.relname::text FROM pg_class c WHERE c.relispartition AND c.relkind IN ('r', 'p')
		AND has_table_privilege('tidings_api', c.oid, 'SELECT')
		   AND NOT (c.relrowsecurity AND EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid
		   AND p.polroles = ARRAY['tidings_api'::regrole::oid]))`)
	open, err = pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(open) > 0 {
		t.Errorf("partitions that tidings_api reads past a policy: %v, %v", open, err)
	}
}

// Every range is read and written only through its parent, whose policies apply. That includes
// ranges made later and archived ones.
func TestNobodyReadsOrWritesARangePastItsParent(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx, owner, system := t.Context(), db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleSystem)
	if _, err := system.Exec(ctx, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, processed_at)
		VALUES (1, 'follow', 2, 'created', '{}', now())`); err != nil {
		t.Fatal(err)
	}
	if _, err := owner.Exec(ctx, `UPDATE outbox_partitions SET floor_id = 50000000`); err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{`SELECT outbox_range_archive(1, 0)`, `SELECT outbox_range_make(150000001, 150001001)`,
		`SELECT outbox_range_cut(50000001)`} {
		if _, err := system.Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	rows, _ := owner.Query(ctx, `SELECT c.relname::text, c.relrowsecurity FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid
		WHERE i.inhparent IN ('outbox_messages'::regclass, 'outbox_messages_archive'::regclass) AND c.relkind = 'r' ORDER BY 1`)
	type partition struct {
		Name    string
		Secured bool
	}
	ranges, err := pgx.CollectRows(rows, pgx.RowToStructByPos[partition])
	if err != nil || len(ranges) != 5 {
		t.Fatalf("%v, %v; want four ranges and the default one", ranges, err)
	}
	roles := []string{"tidings_api", "tidings_system", "tidings_writer", "tidings_reader"}
	for _, r := range ranges {
		if !r.Secured {
			t.Errorf("%s: a role with a mistaken grant would see every tenant", r.Name)
		}
		for _, role := range roles {
			for _, right := range []string{"SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"} {
				var has bool
				if err := owner.QueryRow(ctx, `SELECT has_table_privilege($1, $2, $3) OR $3 IN ('SELECT', 'INSERT', 'UPDATE')
					AND has_any_column_privilege($1, $2, $3)`, role, r.Name, right).Scan(&has); err != nil || has {
					t.Errorf("%s has %s on %s, %v", role, right, r.Name, err)
				}
			}
		}
	}
	// Through the parents nothing changed: the new range accepts a writer's rows, and a tenant sees
	// only its own rows in both.
	for range 2 {
		if _, err := db.Pool(t, postgres.RoleWriter).Exec(ctx,
			`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
				VALUES (1, 'follow', 2, 'created', '{}')`); err != nil {
			t.Fatal(err)
		}
		if _, err := system.Exec(ctx, `SELECT outbox_range_cut(150000001)`); err != nil {
			t.Fatal(err)
		}
	}
	for tenant, want := range map[int64]string{1: "2 1", 2: "0 0"} {
		err := postgres.InTenant(ctx, db.Pool(t, postgres.RoleAPI), tenant, pgx.TxOptions{}, func(tx pgx.Tx) error {
			var got string
			err := tx.QueryRow(ctx, `SELECT concat_ws(' ', (SELECT count(*) FROM outbox_messages),
				(SELECT count(*) FROM outbox_messages_archive))`).Scan(&got)
			if got != want {
				t.Errorf("tenant %d sees %s, want %s", tenant, got, want)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// hidden are columns that tidings_reader may not read.
var hidden = map[string]bool{"api_tokens.token_hash": true, "api_tokens.made_by": true, "console_sessions.token_hash": true}

func TestTheReaderReadsEveryTableOfEveryTenantAndWritesNone(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx, owner := t.Context(), db.Pool(t, postgres.RoleOwner)
	if _, err := owner.Exec(ctx, fillSQL); err != nil {
		t.Fatal(err)
	}
	rows, _ := owner.Query(ctx, `
		SELECT t.table_name::text AS name, t.table_type = 'VIEW' AS view,
		       array_agg(c.column_name::text ORDER BY c.ordinal_position) AS columns,
		       array_agg(c.column_name::text ORDER BY c.ordinal_position) FILTER (WHERE NOT has_column_privilege('tidings_reader',
		       quote_ident(t.table_name), c.column_name, 'SELECT')) AS unread,
		       concat_ws(', ', VARIADIC array(SELECT p FROM unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES',
		       'TRIGGER']) p
		          WHERE has_table_privilege('tidings_reader', quote_ident(t.table_name), p))) AS rights
		  FROM information_schema.tables t JOIN information_schema.columns c USING (table_schema, table_name)
		  JOIN pg_class k ON k.oid = quote_ident(t.table_name)::regclass
		 WHERE t.table_schema = current_schema() AND NOT k.relispartition -- read through its parent
		 GROUP BY t.table_name, t.table_type ORDER BY 1`)
	type readable struct {
		Name            string
		View            bool
		Columns, Unread []string
		Rights          string
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByName[readable])
	if err != nil || len(tables) < 30 {
		t.Fatalf("%d tables, %v", len(tables), err)
	}
	page, err := os.ReadFile("../docs/runbook/looking-at-rows.md")
	if err != nil {
		t.Fatal(err)
	}
	tx, err := owner.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(ctx) }()
	counts := map[string]int{}
	for _, table := range tables {
		if !table.View {
			var n int
			if err := tx.QueryRow(ctx, `SELECT count(*) FROM `+table.Name).Scan(&n); err != nil {
				t.Fatal(err)
			}
			counts[table.Name] = n
		}
	}
	if _, err := tx.Exec(ctx, `SET LOCAL ROLE tidings_reader`); err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		open := slices.DeleteFunc(slices.Clone(table.Columns), func(c string) bool { return hidden[table.Name+"."+c] })
		var shut []string
		for _, c := range table.Unread {
			if !hidden[table.Name+"."+c] {
				shut = append(shut, c)
			}
		}
		if len(shut) > 0 || len(open)+len(table.Unread) != len(table.Columns) {
			t.Errorf("%s: tidings_reader may not read %v, or may read what is hidden; its migration wants GRANT SELECT ON "+
				"%[1]s TO tidings_reader", table.Name, shut)
			continue
		}
		name := table.Name
		for _, kind := range slices.Concat(slices.Collect(maps.Keys(kinds.Builtin().Edges)),
			slices.Collect(maps.Keys(kinds.Builtin().Children))) {
			name = strings.Replace(name, kind+"_history", "KIND_history", 1)
		}
		if !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("%s: docs/runbook/looking-at-rows.md does not describe it", table.Name)
		}
		if table.Rights != "" {
			t.Errorf("%s: tidings_reader has %s", table.Name, table.Rights)
		}
		var n int
		if err := tx.QueryRow(ctx, `SELECT count(*) FROM (SELECT `+strings.Join(open, ", ")+` FROM `+table.Name+
			`) x`).Scan(&n); err != nil {
			t.Fatalf("%s: %v", table.Name, err)
		}
		if !table.View && n != counts[table.Name] {
			t.Errorf("%s: tidings_reader sees %d of %d rows; its migration wants CREATE POLICY reader ON %[1]s FOR SELECT TO "+
				"tidings_reader USING (true)", table.Name, n, counts[table.Name])
		}
	}
	var sequences []string
	if err := tx.QueryRow(ctx, `SELECT coalesce(array_agg(sequencename::text), '{}') FROM pg_sequences WHERE schemaname = current_schema()
		AND has_sequence_privilege(schemaname || '.' || sequencename, 'USAGE, UPDATE')`).
		Scan(&sequences); err != nil || len(sequences) > 0 {
		t.Errorf("tidings_reader may take numbers of %v, %v", sequences, err)
	}
}

// TestATableThatNobodyMayReadYetIsOutdated revokes the right to read the versions, as in the moment
// before the first migration grants it. Processes wait, and do not take the database for one of a
// guest.
func TestATableThatNobodyMayReadYetIsOutdated(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`REVOKE SELECT ON tidings_truth_migrations FROM tidings_reader`); err != nil {
		t.Fatal(err)
	}
	reader := db.Pool(t, postgres.RoleReader)
	if err := migrations.Check(t.Context(), reader, migrations.Truth); !errors.Is(err, migrations.ErrOutdated) {
		t.Errorf("got %v, want ErrOutdated", err)
	}
	if alone, err := migrations.IsOutboxAlone(t.Context(), reader); err != nil || alone {
		t.Errorf("a guest: %t, %v", alone, err)
	}
}
