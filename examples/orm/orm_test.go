package orm

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"net/url"
	"strings"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver pgx
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	pg "github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/migrations"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Each library pays an order once, with the login of an upstream. Its event has the new state, and
// only a commit appends it.
func TestAnOrderIsPaidOnce(t *testing.T) {
	db := testkit.EmptyPostgres(t)
	if _, err := migrations.UpIn(t.Context(), db.URL, migrations.Outbox, string(tidings), testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	owner := db.Pool(t, pg.RoleOwner)
	if _, err := owner.Exec(t.Context(), `CREATE TABLE orders (id bigint PRIMARY KEY, status text, version bigint)`); err != nil {
		t.Fatal(err)
	}
	if _, err := owner.Exec(t.Context(), `INSERT INTO orders VALUES (1, 'open', 1), (2, 'open', 1)`); err != nil {
		t.Fatal(err)
	}
	std, err := sql.Open("pgx", declare(t, db))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := std.Close(); err != nil {
			t.Error(err)
		}
	}()
	g, err := gorm.Open(postgres.New(postgres.Config{Conn: std}), &gorm.Config{})
	if err != nil {
		t.Fatal(err)
	}
	b := bun.NewDB(std, pgdialect.New())
	for range 2 {
		if err := errors.Join(PayWithGORM(t.Context(), g, 1), PayWithBun(t.Context(), b, 2)); err != nil {
			t.Fatal(err)
		}
	}
	var events string
	if err := owner.QueryRow(t.Context(), `SELECT string_agg(concat_ws(' ', aggregate_type, aggregate_id, event_type, payload), '; '
		ORDER BY aggregate_id) FROM tidings.outbox_messages`).Scan(&events); err != nil {
		t.Fatal(err)
	}
	const want = `order 1 paid {"id": 1, "status": "paid", "version": 2}; order 2 paid {"id": 2, "status": "paid", "version": 2}`
	if events != want {
		t.Errorf("%s", events)
	}
}

// declare declares the events of orders, and returns the URL of a login that may append them and
// change orders.
func declare(t *testing.T, db *testkit.DB) string {
	t.Helper()
	u, err := kindfile.ReadUpstream([]byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n" +
		"events: {paid: {versions: {1: {type: object, required: [id, status, version]}}}}"))
	if err != nil {
		t.Fatal(err)
	}
	login, in, owner := "orm_"+strings.ToLower(rand.Text()[:12]), db.In(t, string(tidings)), db.Pool(t, pg.RoleOwner)
	u.Logins = []string{login}
	if _, err := declared.Add(t.Context(), in.Pool(t, pg.RoleSystem),
		declared.Request{Upstream: *u, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	made := testkit.UpstreamLogin(t, in, login)
	t.Cleanup(func() { // logins belong to the server, not to the test's database
		for _, sql := range []string{"DROP OWNED BY ", "DROP ROLE "} {
			if _, err := owner.Exec(context.WithoutCancel(t.Context()), sql+login); err != nil {
				t.Error(err)
			}
		}
	})
	if _, err := owner.Exec(t.Context(), "GRANT SELECT, UPDATE ON orders TO "+login); err != nil {
		t.Fatal(err)
	}
	at, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	at.User = url.UserPassword(login, made.Password)
	return at.String()
}
