package migrations_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/migrations"
)

// home is a schema that has both sets.
type home struct {
	url    string
	schema string // quoted
	owner  *pgxpool.Pool
}

// operators is the schema of an operator who does not use the default one.
const operators = "An operator's"

// eachHome runs the test for the default schema and for another one.
func eachHome(t *testing.T, test func(*testing.T, home)) {
	t.Helper()
	for _, schema := range []string{"public", operators} {
		t.Run(schema, func(t *testing.T) { inHome(t, schema, test) })
	}
}

func inHome(t *testing.T, schema string, test func(*testing.T, home)) {
	t.Helper()
	h := home{schema: schema}
	if schema == "public" {
		h.url = testkit.Postgres(t).URL
	} else {
		h.url, h.schema = testkit.EmptyPostgres(t).URL, pgx.Identifier{schema}.Sanitize()
	}
	var err error
	h.owner, err = postgres.OpenWith(t.Context(), h.url, postgres.Config{MaxConns: 2, ConnectTimeout: 5e9},
		postgres.RoleOwner, "test", map[string]string{"search_path": h.schema})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.owner.Close)
	if schema != "public" {
		h.exec(t, `CREATE SCHEMA `+h.schema+`; GRANT CREATE ON SCHEMA `+h.schema+` TO PUBLIC`) // as public before PostgreSQL 15
		for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
			if _, err := migrations.UpIn(t.Context(), h.url, set, schema, testkit.Logger(t)); err != nil {
				t.Fatal(err)
			}
		}
		h.exec(t, `GRANT USAGE ON SCHEMA `+h.schema+` TO tidings_api, tidings_system, tidings_writer`)
	}
	test(t, h)
}

func (h home) exec(t *testing.T, sql string) {
	t.Helper()
	if _, err := h.owner.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// function is a function of the schema.
type function struct {
	Name      string
	Signature string
	Definer   bool // runs as its owner
	Bound     bool // its names are resolved when it is created
	Settings  []string
	Callers   []string // roles other than the owner that may call it
}

func (h home) functions(t *testing.T) []function {
	t.Helper()
	rows, _ := h.owner.Query(t.Context(), `
		SELECT p.proname::text AS name, p.oid::regprocedure::text AS signature, p.prosecdef AS definer, p.prosqlbody IS NOT NULL AS bound,
		coalesce(p.proconfig, '{}') AS settings,
		       array(SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
		               FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a WHERE a.grantee <> p.proowner
		               ORDER BY 1) AS callers
		  FROM pg_proc p WHERE p.pronamespace = $1::regnamespace ORDER BY 2`, h.schema)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[function])
	if err != nil || len(all) == 0 {
		t.Fatalf("%d functions, %v", len(all), err)
	}
	return all
}

// A caller could create objects that precede those that a function names. They would run with the
// owner's rights or return false data. The temporary schema is searched first unless the path names
// it; "$user" is the user who runs the function.
func TestFunctionsFindOnlyTheObjectsOfTheirSchema(t *testing.T) {
	t.Parallel()
	eachHome(t, func(t *testing.T, h home) {
		for _, f := range h.functions(t) {
			// The planner's settings do not resolve names.
			others := slices.DeleteFunc(slices.Clone(f.Settings), func(s string) bool { return strings.HasPrefix(s, "enable_") })
			if want := "search_path=" + h.schema + ", pg_temp"; !f.Bound && !slices.Equal(others, []string{want}) {
				t.Errorf("%s has the settings %q, want %q: its migration begins with the set_config of 00001_init.sql, and it wants SET "+
					"search_path FROM CURRENT", f.Signature, f.Settings, want)
			}
			if slices.Contains(f.Callers, "PUBLIC") {
				t.Errorf("%s: everybody may call it; its migration wants REVOKE ALL ON FUNCTION %[1]s FROM PUBLIC", f.Signature)
			}
		}
		var makers []string
		if err := h.owner.QueryRow(t.Context(), `
			SELECT coalesce(array_agg(rolname::text), '{}') FROM pg_roles
			 WHERE starts_with(rolname, 'tidings_') AND has_schema_privilege(oid, $1::regnamespace, 'CREATE')`,
			h.schema).Scan(&makers); err != nil || len(makers) > 0 {
			t.Errorf("roles that may make objects in the schema: %v, %v", makers, err)
		}
	})
}

func TestUpChangesNoRightOnTheDatabase(t *testing.T) {
	t.Parallel()
	migrated := testkit.EmptyPostgres(t).URL
	for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
		if _, err := migrations.Up(t.Context(), migrated, set, testkit.Logger(t)); err != nil {
			t.Fatal(err)
		}
	}
	var rights *string
	if err := pool(t, migrated, postgres.RoleOwner).QueryRow(t.Context(), `
		SELECT datacl::text FROM pg_database WHERE datname = current_database()`).Scan(&rights); err != nil || rights != nil {
		t.Errorf("the rights on the database are %q, %v; want those of a new database", *rights, err)
	}
}

// declareOrders declares the upstream order, which every superuser's session may append for.
const declareOrders = `INSERT INTO upstreams (tenant_id, object, metadata) VALUES (0,
	'{"name": "order", "logins": ["tidings_upstream"], "id": "string", "id_pattern": "^.+$", "max_payload": 1000, "events": {"created":
	{"checks": {"1": {"type": "object", "=names": "{a}", "properties": {"a": {"type": "integer", "maximum": 5}}}}}}}',
	'{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}')`

// calls has a call of each function that runs as its owner. Each call takes the function's longest
// path.
var calls = map[string]struct {
	setup   string
	args    string
	passing map[string]string // relations that exist only during the call, each with a similar one
}{
	"make_edge_kind": {args: `'visit', 'visits', 'user_id', 'place_id', true, 2`},
	"child_event_fits": {
		args: `1, 'comment', '2', '{"comment_id": "00000000-0000-7000-8000-000000000000", "post_id": "2", "author_id": "3"}'`, setup: `
		INSERT INTO children_archive_comment (tenant_id, child_id, object_id, slug, path, author_id, body, author_state, moderation_state,
		version, created_at, updated_at)
		  VALUES (1, '00000000-0000-7000-8000-000000000000', 2, 'aaaaaaaa', '00000000000001aaaaaaaa', 3, 'x', 'ACTIVE', 'NONE', 1, now(),
		  now())`},
	"make_child_kind": {args: `'answer', 'answers', 'answer_id', 'question_id', true, true, 2`},
	"is_kind":         {args: `'follow'`},
	"upstream_of":     {args: `'order'`, setup: declareOrders},
	"upstream_accepts": {args: `1, 'order', '7', 'created', 1::smallint, '{"a": 1}', 8,
		'00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'`},
	"let_api_lock_shelf":     {args: `'comment'`, setup: `REVOKE UPDATE (kind) ON children_archive_comment FROM tidings_api`},
	"make_edges_to_children": {args: `'stay'`, setup: `SELECT make_edge_kind('stay', 'stays', 'user_id', 'place_id', true, 2)`},
	"make_history":           {args: `'visit', '{user_id,place_id}', 'text', true`},
	"drop_history":           {args: `'visit'`, setup: `SELECT make_history('visit', '{user_id,place_id}', 'text', false)`},
	"drop_kind": {args: `'visit', 'visits'`,
		setup: `SELECT make_edge_kind('visit', 'visits', 'user_id', 'place_id', true, 2)`},
	"narrow_ids": {args: `'follow', 'uuid', 'integer'`},
	"find_token": {args: `sha256('x')`, setup: `INSERT INTO api_tokens (token_hash, tenant_id, name, roles)
		VALUES (sha256('x'), 1, 't', '{read}')`},
	"token_limits": {args: `sha256('x')`, setup: `INSERT INTO api_tokens (token_hash, tenant_id, name, roles)
		VALUES (sha256('x'), 1, 't', '{read}')`},
	"changed_tokens": {args: `0, 10`, setup: `INSERT INTO api_tokens (token_hash, tenant_id, name, roles)
		VALUES (sha256('y'), 1, 'u', '{read}'); UPDATE api_tokens SET revoked_at = now() WHERE name = 'u'`},
	"outbox_range_make": {args: `400000001, 450000001`, passing: map[string]string{"outbox_messages_400000001": "outbox_messages"}},
	"outbox_range_cut":  {args: `1`}, // not its longest path: setval survives the rollback
	"outbox_range_archive": {args: `1, 10`, setup: `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (1, 'follow', 2, 'created', '{}', now() + interval '1 day');
		SELECT setval('outbox_messages_id_seq', 50000000);
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, processed_at)
		  SELECT tenant, 'follow', 2, 'created', '{}', now() - interval '1 year' FROM generate_series(1, 2) tenant;
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (1, 'follow', 2, 'created', '{}', now() + interval '1 day');
		SELECT setval('outbox_messages_id_seq', 100000000);
		UPDATE outbox_partitions SET floor_id = 100000000;
		SELECT outbox_range_archive(50000001, 10)`},
	"outbox_range_return": {args: `50000001`},
	"outbox_range_index":  {args: `50000001`},
	"outbox_range_span":   {args: `50000001`},
	"outbox_range_drop": {args: `50000001`, setup: `
		INSERT INTO outbox_archive_holds (tenant_id, reason, created_by) VALUES (1, 'r', 'a');
		UPDATE outbox_ranges SET first_occurred = now(), last_occurred = now() WHERE from_id = 50000001`},
	// pending: the result depends on the time.
	"outbox_delivered": {args: `10`, setup: `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'follow', 2, 'created', '{}')`},
	"outbox_archive_late": {args: `now(), 10`, passing: map[string]string{"outbox_messages_200000001": "outbox_messages"}, setup: `
		INSERT INTO outbox_ranges (from_id, to_id, state) VALUES (200000001, 250000001, 'GONE');
		INSERT INTO outbox_messages (id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, processed_at)
		  VALUES (200000001, gen_random_uuid(), 1, 'follow', 2, 'created', '{}', now() - interval '1 day')`},
}

// relation is a table or view that an attacker shadows.
type relation struct{ Name, Columns string }

// relationsSQL lists the relations of the schema $1 with the definitions of their columns.
const relationsSQL = `
SELECT c.relname::text AS name, string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', '
	ORDER BY a.attnum) AS columns
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relnamespace = $1::regnamespace AND c.relkind IN ('r', 'p', 'v') GROUP BY c.relname ORDER BY 1`

// attacks create objects in the temporary schema, given all relations. If their code runs, it calls
// pg_temp.ran.
var attacks = map[string]func([]relation) string{
	"nothing": func([]relation) string { return "" },
	"views": func(relations []relation) string {
		var b strings.Builder
		b.WriteString(triggerSQL)
		for i, r := range relations { // PL/pgSQL is never inlined, so every query of the view runs it
			fmt.Fprintf(&b, `
				CREATE FUNCTION pg_temp.rows_%d() RETURNS TABLE (%s) LANGUAGE plpgsql AS $f$ BEGIN PERFORM pg_temp.ran('view %[3]s'); END
				$f$;
				CREATE TEMP VIEW %[3]s AS SELECT * FROM pg_temp.rows_%[1]d();
				CREATE TRIGGER t INSTEAD OF INSERT OR UPDATE OR DELETE ON pg_temp.%[3]s FOR EACH ROW EXECUTE FUNCTION
				pg_temp.trigger_ran();`,
				i, r.Columns, r.Name)
		}
		return b.String()
	},
	"tables": func(relations []relation) string {
		var b strings.Builder
		b.WriteString(triggerSQL)
		for _, r := range relations {
			fmt.Fprintf(&b, `
				CREATE TEMP TABLE %s (%s);
				CREATE TRIGGER t BEFORE INSERT OR UPDATE OR DELETE ON pg_temp.%[1]s FOR EACH STATEMENT EXECUTE FUNCTION
				pg_temp.trigger_ran();`, r.Name, r.Columns)
		}
		return b.String()
	},
	"functions and operators": func([]relation) string {
		return `
			CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE plpgsql AS
			$f$ BEGIN PERFORM pg_temp.ran('now'); RETURN NULL; END $f$;
			CREATE FUNCTION pg_temp.octet_length(text) RETURNS int LANGUAGE plpgsql AS
			$f$ BEGIN PERFORM pg_temp.ran('octet_length'); RETURN 0; END $f$;
			CREATE FUNCTION pg_temp.md5(text) RETURNS text LANGUAGE plpgsql AS
			$f$ BEGIN PERFORM pg_temp.ran('md5'); RETURN ''; END $f$;
			CREATE FUNCTION pg_temp.format(text, VARIADIC text[]) RETURNS text LANGUAGE plpgsql AS
			$f$ BEGIN PERFORM pg_temp.ran('format'); RETURN 'SELECT 1'; END $f$;
			CREATE FUNCTION pg_temp.nextval(regclass) RETURNS bigint LANGUAGE plpgsql AS
			$f$ BEGIN PERFORM pg_temp.ran('nextval'); RETURN 1; END $f$;
			CREATE FUNCTION pg_temp.child_event_fits(bigint, text, text, jsonb) RETURNS boolean LANGUAGE plpgsql AS
			$f$ BEGIN RETURN pg_temp.ran('child_event_fits'); END $f$;
			CREATE FUNCTION pg_temp.outbox_messages_columns() RETURNS text LANGUAGE plpgsql AS
			$f$ BEGIN PERFORM pg_temp.ran('outbox_messages_columns'); RETURN 'id'; END $f$;
			CREATE FUNCTION pg_temp.outbox_range_table(bigint, bigint) RETURNS text LANGUAGE plpgsql AS
			$f$ BEGIN PERFORM pg_temp.ran('outbox_range_table'); RETURN 'x'; END $f$;
			CREATE FUNCTION pg_temp.same(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $f$ BEGIN RETURN pg_temp.ran('='); END $f$;
			CREATE FUNCTION pg_temp.same(text, text) RETURNS boolean LANGUAGE plpgsql AS $f$ BEGIN RETURN pg_temp.ran('='); END $f$;
			CREATE OPERATOR pg_temp.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = pg_temp.same);
			CREATE OPERATOR pg_temp.= (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_temp.same);
			CREATE OPERATOR pg_temp.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_temp.same);
			CREATE OPERATOR pg_temp.~ (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_temp.same);`
	},
	// Functions and operators are never searched in the temporary schema. Types are: a domain's
	// check runs at every assignment.
	"types": func([]relation) string {
		return `
			DO $d$ DECLARE type name; BEGIN
			  FOR type IN SELECT typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b'
			  AND typcategory <> 'A' LOOP
			    EXECUTE format('CREATE DOMAIN pg_temp.%1$I AS pg_catalog.%1$I CHECK (pg_temp.ran(%2$L))', type, 'type ' || type);
			  END LOOP;
			END $d$`
	},
}

const (
	ranSQL = `
		CREATE FUNCTION pg_temp.ran(what text) RETURNS boolean LANGUAGE plpgsql AS
		$f$ BEGIN RAISE WARNING USING MESSAGE = format('%s of the caller ran as %s', what, current_user),
		CONSTRAINT = current_user; RETURN true; END $f$;`
	triggerSQL = `
		CREATE FUNCTION pg_temp.trigger_ran() RETURNS trigger LANGUAGE plpgsql AS
		$f$ BEGIN PERFORM pg_temp.ran('a trigger on ' || TG_TABLE_NAME); RETURN NULL; END $f$;`
)

func TestNoCallerHijacksAFunctionThatRunsAsItsOwner(t *testing.T) { hijack(t, "public") }

// hijack attacks each function that runs as its owner, in one schema.
func hijack(t *testing.T, schema string) {
	inHome(t, schema, func(t *testing.T, h home) {
		for _, name := range []string{"find_token", "changed_tokens", "child_event_fits", "outbox_range_archive",
			"outbox_range_drop", "outbox_archive_late", "outbox_delivered", "upstream_of",
			"let_api_lock_shelf", "make_edges_to_children"} { // in this order
			h.exec(t, calls[name].setup)
		}
		attacked := 0
		for _, f := range h.functions(t) {
			if !f.Definer {
				continue
			}
			if calls[f.Name].args == "" {
				t.Errorf("%s runs as its owner: add a call of it to calls, for the attack", f.Signature)
				continue
			}
			for _, caller := range f.Callers {
				attacked++
				h.attack(t, f, caller)
			}
		}
		if attacked < 3 {
			t.Errorf("%d attacks", attacked)
		}
	})
}

// A function that makes a table's name from its arguments finds no table of the caller's, also when
// the schema has no table of that name.
func TestNoCallerHijacksANameThatTheSchemaLacks(t *testing.T) {
	t.Parallel()
	eachHome(t, func(t *testing.T, h home) {
		h.exec(t, `SELECT make_child_kind('gone', 'gones', 'gone_id', 'place_id', false, false, 0)`)
		const (
			child = ` AS SELECT 1 AS tenant_id, '00000000-0000-7000-8000-000000000000'::uuid AS child_id, 'p' AS object_id,
				'a' AS author_id WHERE pg_temp.ran('a view')`
			message = ` AS SELECT m.* FROM (SELECT pg_temp.ran('a view')) r LEFT JOIN outbox_messages m ON true`
			take77  = `UPDATE outbox_ranges SET from_id = 77, to_id = 78, first_occurred = now(), last_occurred = now()
				WHERE from_id = 100000001;`
		)
		for name, c := range map[string]struct {
			caller      postgres.Role
			view        string // of the caller
			before      string // what the caller runs first
			meanwhile   string // what the owner runs then
			call, wants string // wants is the result, or "" if the function needs a table
		}{
			"a kind":            {postgres.RoleSystem, `edges_free` + child, ``, ``, `drop_kind('free', 'frees')`, "false"},
			"the ids of a kind": {postgres.RoleSystem, `children_free` + child, ``, ``, `narrow_ids('free', 'uuid', 'uuid')`, "false"},
			"a history":         {postgres.RoleSystem, `free_history` + child, ``, ``, `drop_history('free')`, "false"},
			"a range": {postgres.RoleSystem, `outbox_messages_77` + message,
				take77 + `UPDATE outbox_partitions SET floor_id = 100`, ``, `outbox_range_archive(77, 10)`, ""},
			"the span of a range": {postgres.RoleSystem, `outbox_messages_77` + message,
				take77 + `UPDATE outbox_ranges SET state = 'ARCHIVED', first_occurred = NULL`, ``, `outbox_range_span(77)`, ""},
			"a range with holds": {postgres.RoleSystem, `outbox_messages_77` + message,
				take77 + `UPDATE outbox_ranges SET state = 'ARCHIVED';
					INSERT INTO outbox_archive_holds (tenant_id, reason, created_by) VALUES (1, 'r', 'a')`, ``,
				`outbox_range_drop(77)`, ""},
			"a kind dropped since the snapshot": {postgres.RoleWriter, `children_gone` + child, `SELECT 1`,
				`SELECT drop_kind('gone', 'gones')`, `child_event_fits(1, 'gone', 'p',
				'{"gone_id": "00000000-0000-7000-8000-000000000000", "place_id": "p", "author_id": "a"}')`, ""},
		} {
			t.Run(name, func(t *testing.T) {
				cfg, err := pgx.ParseConfig(h.url)
				if err != nil {
					t.Fatal(err)
				}
				cfg.RuntimeParams["role"], cfg.RuntimeParams["search_path"] = string(c.caller), h.schema
				cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
					if n.ConstraintName != "" {
						t.Error(n.Message)
					}
				}
				conn, err := pgx.ConnectConfig(t.Context(), cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
				for _, sql := range []string{ranSQL + `CREATE TEMP VIEW ` + c.view, `BEGIN ISOLATION LEVEL REPEATABLE READ; ` + c.before} {
					if _, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
						t.Fatal(err)
					}
				}
				h.exec(t, c.meanwhile)
				var got string
				err = conn.QueryRow(t.Context(), `SELECT `+c.call+`::text`).Scan(&got)
				if got != c.wants || c.wants == "" && !postgres.IsUndefinedTable(err) || c.wants != "" && err != nil {
					t.Errorf("%s: %q, %v; want %q", c.call, got, err, c.wants)
				}
			})
		}
	})
}

// A writer's temporary objects do not change what its INSERT into the outbox does: the policies,
// the defaults and the constraints were bound to their objects when they were created.
func TestNoWriterHijacksItsOwnInsert(t *testing.T) {
	t.Parallel()
	const guest = "a guest"
	db := testkit.EmptyPostgres(t)
	if _, err := migrations.UpIn(t.Context(), db.URL, migrations.Outbox, guest, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	hijackInserts(t, db.In(t, `"`+guest+`"`).URL, `"`+guest+`"`)
	hijackInserts(t, testkit.Postgres(t).URL, "public")
}

func hijackInserts(t *testing.T, url, schema string) {
	owner := pool(t, url, postgres.RoleOwner)
	rows, _ := owner.Query(t.Context(), relationsSQL, schema)
	relations, err := pgx.CollectRows(rows, pgx.RowToStructByName[relation])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := owner.Exec(t.Context(), strings.Replace(declareOrders, "INTO ", "INTO "+schema+".", 1)); err != nil {
		t.Fatal(err)
	}
	for name, attack := range attacks {
		cfg, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		cfg.RuntimeParams["role"] = string(postgres.RoleWriter)
		cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { t.Errorf("%s, %s: %s", schema, name, n.Message) }
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		if _, err := conn.Exec(t.Context(), ranSQL+attack(relations)); err != nil {
			t.Fatalf("%s of the writer's: %v", name, err)
		}
		insert := func(aggregate string) error {
			_, err := conn.Exec(t.Context(), `INSERT INTO `+schema+`.outbox_messages
				(tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES (1, '`+aggregate+`', 'hijack', 'created', '{}')`)
			return err
		}
		if err := insert("order"); err != nil {
			t.Errorf("%s, %s: %v", schema, name, err)
		}
		if err := insert("heartbeat"); postgres.CheckName(err) != "outbox_messages_upstream" {
			t.Errorf("%s, %s: a heartbeat of a writer: %v", schema, name, err)
		}
	}
	var sound int
	if err := owner.QueryRow(t.Context(), `SELECT count(*) FROM `+schema+`.outbox_messages WHERE aggregate_id = 'hijack'
		AND event_id IS NOT NULL AND id < 1000 AND occurred_at > now() - interval '1 hour'`).Scan(&sound); err != nil ||
		sound != len(attacks) {
		t.Errorf("%s: %d events, %v; want %d", schema, sound, err, len(attacks))
	}
}

// attack calls the function with and without the caller's own objects in its path, and compares the
// results.
func (h home) attack(t *testing.T, f function, caller string) {
	t.Helper()
	rows, _ := h.owner.Query(t.Context(), relationsSQL, h.schema)
	before, err := pgx.CollectRows(rows, pgx.RowToStructByName[relation])
	if err != nil {
		t.Fatal(err)
	}
	want, after := h.call(t, f, caller, "nothing", before)
	if want == "" || strings.HasPrefix(want, "ERROR") {
		t.Fatalf("%s, called by %s: %q", f.Signature, caller, want)
	}
	relations := append(before, after...)
	for name, like := range calls[f.Name].passing {
		i := slices.IndexFunc(before, func(r relation) bool { return r.Name == like })
		relations = append(relations, relation{Name: name, Columns: before[i].Columns})
	}
	slices.SortFunc(relations, func(a, b relation) int { return cmp.Compare(a.Name, b.Name) })
	relations = slices.CompactFunc(relations, func(a, b relation) bool { return a.Name == b.Name })
	for name := range attacks {
		if got, _ := h.call(t, f, caller, name, relations); got != want {
			t.Errorf("%s, called by %s, behind %s of the caller's answers %s, want %s", f.Signature, caller, name, got, want)
		}
	}
}

// call returns the function's result for the caller after the attack, and the schema's relations
// after the call. It rolls back. It uses a connection of its own, because a compiled function or a
// planned statement does not resolve names again.
func (h home) call(t *testing.T, f function, caller, attack string, relations []relation) (answer string, after []relation) {
	t.Helper()
	ctx := t.Context()
	cfg, err := pgx.ParseConfig(h.url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["role"], cfg.RuntimeParams["timezone"] = caller, "GMT"
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if as := n.ConstraintName; as != "" && as != caller {
			t.Errorf("%s, called by %s: %s", f.Signature, caller, n.Message)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	tx, err := conn.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(ctx, ranSQL+attacks[attack](relations)); err != nil {
		t.Fatalf("%s of the caller's: %v", attack, err)
	}
	sql := fmt.Sprintf(`SELECT pg_catalog.concat('answer ', f::pg_catalog.text) FROM %s.%s(%s) f`, h.schema, f.Name, calls[f.Name].args)
	if err := tx.QueryRow(ctx, sql).Scan(&answer); err != nil {
		return "ERROR: " + err.Error(), nil
	}
	rows, _ := tx.Query(ctx, relationsSQL, h.schema)
	if after, err = pgx.CollectRows(rows, pgx.RowToStructByName[relation]); err != nil {
		t.Fatal(err)
	}
	return answer, after
}

func TestUpWithALoginThatOwnsNeitherDatabaseNorSchema(t *testing.T) {
	t.Parallel()
	db := testkit.EmptyPostgres(t).URL
	ctx, owner := t.Context(), pool(t, db, postgres.RoleOwner)
	login := "migrates_" + strings.ToLower(rand.Text()[:8])
	t.Cleanup(func() {
		if _, err := owner.Exec(context.WithoutCancel(ctx), `DROP OWNED BY `+login+`; DROP ROLE `+login); err != nil {
			t.Error(err)
		}
	})
	if _, err := owner.Exec(ctx, `CREATE ROLE `+login+` CREATEROLE; GRANT CREATE ON SCHEMA public TO `+login); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(db)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("role", login)
	u.RawQuery = q.Encode()
	for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
		if _, err := migrations.Up(ctx, u.String(), set, testkit.Logger(t)); err != nil {
			t.Errorf("%s: %v", set, err)
		}
	}
	var tables string
	if err := owner.QueryRow(ctx, `SELECT DISTINCT tableowner::text FROM pg_tables WHERE schemaname = 'public'`).Scan(
		&tables); err != nil || tables != login {
		t.Errorf("the tables are %s's, %v; want %s's", tables, err, login)
	}
}
