package docs_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
)

// TestTheYourTablesPageWorks runs the SQL of your-tables.md. The statements of an administrator let
// the migrations run, and the login that the page declares for its events appends them with SQL and
// JavaScript. The login for Tidings publishes them.
func TestTheYourTablesPageWorks(t *testing.T) {
	content, err := os.ReadFile("your-tables.md")
	if err != nil {
		t.Fatal(err)
	}
	suffix := "_" + strings.ToLower(rand.Text()[:12]) // logins belong to the server, not to the test's database
	page, logins := string(content), []string{"migrator", "shop_tidings", "shop_app"}
	for i, login := range logins {
		logins[i] = login + suffix
		page = strings.ReplaceAll(page, login, logins[i])
	}
	inSQL, inJS, inYAML := blocks(page, "sql"), blocks(page, "js"), blocks(page, "yaml")
	if len(inSQL) != 3 || len(inJS) != 1 || len(inYAML) != 1 {
		t.Fatalf("the page has %d blocks of SQL, %d of JavaScript and %d of YAML", len(inSQL), len(inJS), len(inYAML))
	}
	db := testkit.EmptyPostgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	exec := func(sql string) {
		t.Helper()
		if _, err := owner.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	exec(`CREATE ROLE ` + logins[0] + ` LOGIN PASSWORD 'x'; CREATE ROLE ` + logins[2] + ` LOGIN PASSWORD 'x'`)
	t.Cleanup(func() {
		for _, login := range logins {
			if _, err := owner.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+login+" CASCADE; DROP ROLE "+login,
				pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Error(err)
			}
		}
	})
	as := func(login string) string {
		u, err := url.Parse(db.URL)
		if err != nil {
			t.Fatal(err)
		}
		u.User = url.UserPassword(login, "x")
		return u.String()
	}

	_, err = migrations.UpIn(t.Context(), as(logins[0]), migrations.Outbox, "tidings", testkit.Logger(t))
	needs, ok := errors.AsType[*migrations.NeedsError](err)
	if !ok {
		t.Fatalf("without the administrator: %v", err)
	}
	for _, statement := range needs.Statements { // the server of the tests has the roles already
		if !strings.Contains(inSQL[0], statement+";\n") {
			t.Errorf("the page lacks %s", statement)
		}
	}
	for statement := range strings.Lines(inSQL[0]) {
		if !strings.HasPrefix(statement, "CREATE ROLE") {
			exec(statement)
		}
	}
	if _, err := migrations.UpIn(t.Context(), as(logins[0]), migrations.Outbox, "tidings", testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	exec(inSQL[1])
	exec(`ALTER ROLE ` + logins[1] + ` PASSWORD 'x'; ALTER ROLE ` + logins[1] + ` SET search_path = tidings`)
	open := func(role postgres.Role) *pgxpool.Pool {
		t.Helper()
		pool, err := postgres.Open(t.Context(), as(logins[1]), postgres.Config{MaxConns: 2, ConnectTimeout: 5e9}, role, "test")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		return pool
	}
	order, err := kindfile.ReadUpstream([]byte(inYAML[0]))
	if err != nil {
		t.Fatal(err)
	}
	order.Logins = []string{logins[2]}
	if _, err := declared.Add(t.Context(), open(postgres.RoleSystem),
		declared.Request{Upstream: *order, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	made := testkit.UpstreamLogin(t, &testkit.DB{URL: as(logins[1])}, logins[2])
	if len(made.SQL) != 1 || !strings.Contains(page, "`"+strings.NewReplacer(`"`, "", ";", "").Replace(made.SQL[0])+"`") {
		t.Fatalf("the statement for an administrator: %+v", made)
	}
	exec(made.SQL[0])
	exec(`CREATE TABLE orders (id bigint PRIMARY KEY, status text, version bigint); INSERT INTO orders VALUES (7, 'open', 1);
		GRANT SELECT, UPDATE ON orders TO ` + logins[2])
	app, err := pgx.Connect(t.Context(), as(logins[2]))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = app.Close(t.Context()) }()
	if _, err := app.PgConn().Exec(t.Context(), inSQL[2]).ReadAll(); err != nil {
		t.Error(err)
	}
	_, rest, _ := strings.Cut(inJS[0], "`")
	statement, _, _ := strings.Cut(rest, "`")
	if _, err := app.Exec(t.Context(), statement, 1, "order", "7", "paid", `{"id": 7, "status": "paid", "version": 2}`); err != nil {
		t.Error(err)
	}
	claimed, err := outbox.Exchange(t.Context(), open(postgres.RoleRelay),
		outbox.Round{LastSlot: event.Slots - 1, Limit: 10, MaxBytes: 1 << 20, MaxMessage: 1 << 20})
	if err != nil || len(claimed.Rows) != 2 {
		t.Fatalf("the relay finds %+v, %v: want two events of the order", claimed, err)
	}
	var payloads []string
	for _, r := range claimed.Rows {
		var p struct{ Version int }
		if err := errors.Join(r.Validate(outbox.MaxMessage), json.Unmarshal(r.Payload, &p)); err != nil || p.Version != 2 {
			t.Errorf("%s, %v", r.Payload, err)
		}
		payloads = append(payloads, string(r.Payload))
	}
	if slices.Sort(payloads); payloads[0] != payloads[1] {
		t.Errorf("SQL and JavaScript write %q", payloads)
	}
}
