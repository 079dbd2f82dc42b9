//go:build faults

package relayservice

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/migrations"
)

// A login of a managed service may make the roles, or an administrator runs the statements that
// Up names. Both ways, and while a relay publishes, only the schema and the roles are new.
func TestAGuestChangesNothingInTheDatabaseOfABusiness(t *testing.T) {
	for name, c := range map[string]struct {
		login string
		needs []string // the statements of an administrator
	}{
		"with CREATEROLE": {`CREATE ROLE migrator LOGIN CREATEROLE PASSWORD 'migrator';
			GRANT CREATE ON DATABASE business TO migrator`, nil},
		"without CREATEROLE": {`CREATE ROLE migrator LOGIN PASSWORD 'migrator'`, []string{
			`CREATE ROLE tidings_reader NOLOGIN`, `CREATE ROLE tidings_relay NOLOGIN`, `CREATE ROLE tidings_system NOLOGIN`,
			`CREATE ROLE tidings_upstream NOLOGIN`, `CREATE ROLE tidings_writer NOLOGIN`, `GRANT tidings_reader TO tidings_system`,
			`GRANT tidings_relay TO tidings_system`,
			`GRANT tidings_system TO migrator`, `CREATE SCHEMA tidings AUTHORIZATION migrator`}},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.DefaultLogger(t)
			db := testkit.Business(t)
			owner := db.Pool(t, postgres.RoleOwner)
			exec := func(sql string) {
				t.Helper()
				if _, err := owner.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
					t.Fatal(err)
				}
			}
			exec(c.login)
			before := db.Catalog(t, "tidings")
			up := func() error {
				_, err := migrations.UpIn(t.Context(), db.As(t, "migrator").URL, migrations.Outbox, "tidings", testkit.Logger(t))
				return err
			}
			err := up()
			if needs, ok := errors.AsType[*migrations.NeedsError](err); ok != (c.needs != nil) || !ok && err != nil {
				t.Fatalf("the first run: %v", err)
			} else if ok {
				if got := strings.Join(needs.Statements, "\n"); got != strings.Join(c.needs, "\n") {
					t.Errorf("the statements for an administrator: %s", got)
				}
				var ours int
				if err := owner.QueryRow(t.Context(), `SELECT count(*) FROM pg_roles
					WHERE rolname LIKE 'tidings\_%'`).Scan(&ours); err != nil || ours != 0 {
					t.Errorf("%d roles after the refused run, %v", ours, err)
				}
				testkit.SameCatalog(t, "after the refused run", before, db.Catalog(t, "tidings"))
				exec(strings.Join(needs.Statements, ";"))
				if err := up(); err != nil {
					t.Fatal(err)
				}
			}
			testkit.SameCatalog(t, "after migrate", before, db.Catalog(t, "tidings"))
			if err := up(); err != nil {
				t.Errorf("again: %v", err)
			}

			exec(`CREATE ROLE relay_login LOGIN IN ROLE tidings_relay PASSWORD 'relay_login'`)
			declareOrders(t, db.In(t, "tidings"), "shop_app")
			before = db.Catalog(t, "tidings")
			relayed := runRelay(t, db.As(t, "relay_login").In(t, "tidings"))
			app := db.As(t, "shop_app").Pool(t, postgres.RoleOwner)
			for range 20 {
				if err := pgx.BeginFunc(t.Context(), app, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), `UPDATE orders SET version = version + 1 WHERE id = 7`); err != nil {
						return err
					}
					_, err := tx.Exec(t.Context(), `INSERT INTO tidings.outbox_messages
						(tenant_id, aggregate_type, aggregate_id, event_type, payload)
						SELECT tenant_id, 'order', id::text, 'changed', to_jsonb(o) FROM orders o WHERE id = 7`)
					return err
				}); err != nil {
					t.Fatal(err)
				}
			}
			relayed(20)
			testkit.SameCatalog(t, "while a relay publishes", before, db.Catalog(t, "tidings"))
		})
	}
}

// declareOrders declares events of orders, and lets a login append them.
func declareOrders(t *testing.T, db *testkit.DB, login string) {
	t.Helper()
	u, err := kindfile.ReadUpstream([]byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n" +
		"events: {changed: {versions: {1: {type: object, required: [id, version]}}}}"))
	if err != nil {
		t.Fatal(err)
	}
	u.Logins = []string{login}
	if _, err := declared.Add(t.Context(), db.Pool(t, postgres.RoleSystem),
		declared.Request{Upstream: *u, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	if made := testkit.UpstreamLogin(t, db, login); made.Password != "" || len(made.SQL) > 0 {
		t.Fatalf("%+v", made)
	}
}

// runRelay runs a relay until the test ends. The function that it returns waits until so many
// events of orders are in the streams.
func runRelay(t *testing.T, db *testkit.DB) (published func(events uint64)) {
	t.Helper()
	nats := testkit.NATS(t)
	cfg := nats.Config()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, envconfig.MapLookuper(map[string]string{"DATABASE_URL": db.URL, "NATS_URL": nats.URL,
			"OPS_ADDR": testkit.FreeAddr(t), "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
			"NATS_LIVE_PREFIX": cfg.LivePrefix}))
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("the relay ended: %v", err)
		}
	})
	js, err := jetstream.New(nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	return func(events uint64) {
		t.Helper()
		testkit.Eventually(t, "the relay to publish", func() (bool, error) {
			var found uint64
			streams := js.ListStreams(t.Context())
			for s := range streams.Info() {
				stream, err := js.Stream(t.Context(), s.Config.Name)
				if err != nil {
					return false, err
				}
				info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter(cfg.Prefix+".>"))
				if err != nil {
					return false, err
				}
				for subject, n := range info.State.Subjects {
					if strings.Contains(subject, ".order.") {
						found += n
					}
				}
			}
			return found == events, streams.Err()
		})
	}
}

// A publication of all tables also has ours. Each has a primary key, so updates and deletes are
// published. Moving, returning and dropping a range publishes no row, and only delayed rows change
// their table.
func TestAPublicationOfAllTablesLetsRangesMove(t *testing.T) {
	db := testkit.Business(t)
	if _, err := migrations.UpIn(t.Context(), db.URL, migrations.Outbox, "tidings", testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	in := db.In(t, "tidings")
	owner, system := in.Pool(t, postgres.RoleOwner), in.Pool(t, postgres.RoleSystem)
	for _, step := range []struct{ sql, want string }{
		{`SELECT count(*)::text FROM pg_publication_tables WHERE pubname = 'everything' AND schemaname = 'tidings'
			AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = format('%I.%I', schemaname, tablename)::regclass AND indisprimary)`, "0"},
		{`SELECT slot_name::text FROM pg_create_logical_replication_slot('theirs', 'pgoutput')`, "theirs"},
		{`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
			SELECT 1, 'order', n::text, 'changed', '{}', now() + CASE WHEN n % 10 = 0 THEN interval '1 hour' ELSE interval '0' END
			  FROM generate_series(1, 100) n RETURNING 'written'`, "written"},
		{`UPDATE outbox_messages SET processed_at = now() WHERE NOT delayed RETURNING 'marked'`, "marked"},
		{`UPDATE outbox_partitions SET floor_id = 50000000 RETURNING 'past'`, "past"},
		{`SELECT outbox_range_cut(50000001)::text`, "true"},
		{`SELECT outbox_range_archive(1, 1000)`, "archived"},
		{`SELECT outbox_range_index(1)::text`, "true"},
		{`SELECT outbox_range_return(1)::text`, "true"},
		{`SELECT outbox_range_archive(1, 1000)`, "archived"},
		{`SELECT outbox_range_span(1)::text`, ""},
		{`SELECT outbox_range_drop(1)`, "dropped"},
		{`DELETE FROM outbox_messages RETURNING 'removed'`, "removed"},
	} {
		pool := system
		if strings.Contains(step.sql, "pg_") {
			pool = owner
		}
		var got string
		if err := pool.QueryRow(t.Context(), step.sql).Scan(&got); err != nil || got != step.want {
			t.Fatalf("%s: %q, %v; want %q", step.sql, got, err, step.want)
		}
	}
	// 100 inserts, 90 updates; 10 rows move out of the range, back and out again: a delete and an
	// insert each time, and the last delete.
	var changes, dropped int
	if err := owner.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE get_byte(data, 0) IN (68, 73, 85)),
		       count(*) FILTER (WHERE get_byte(data, 0) = 84)
		FROM pg_logical_slot_get_binary_changes('theirs', NULL, NULL, 'proto_version', '1', 'publication_names',
		     'everything')`).Scan(&changes, &dropped); err != nil || changes < 100+90+3*20 || dropped != 0 {
		t.Errorf("%d changes and %d truncations reach their subscriber, %v", changes, dropped, err)
	}
}
