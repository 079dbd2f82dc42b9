package postgres_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestWhoBlocksWhomIsNamed: a person holds a lock that a writer of Tidings waits for. A login that
// may not see other sessions learns the person's name, and which grant shows the rest.
func TestWhoBlocksWhomIsNamed(t *testing.T) {
	db := testkit.Postgres(t)
	system, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	if all, err := postgres.ReadBlocked(t.Context(), system); err != nil || len(all) > 0 {
		t.Fatalf("without a wait: %v, %v", all, err)
	}
	cfg, err := pgx.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["application_name"] = "psql of ann"
	ann, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ann.Close(context.WithoutCancel(t.Context())) }() // the database is deleted too
	if _, err := ann.Exec(t.Context(), `BEGIN; LOCK TABLE outbox_partitions`); err != nil {
		t.Fatal(err)
	}
	waits := make(chan error, 1)
	go func() {
		_, err := system.Exec(t.Context(), `SELECT count(*) FROM outbox_partitions`)
		waits <- err
	}()
	var b postgres.Blocked
	testkit.Eventually(t, "the wait to be seen", func() (bool, error) {
		all, err := postgres.ReadBlocked(t.Context(), system)
		if len(all) > 0 {
			b = all[0]
		}
		return len(all) == 1, err
	})
	if b.By.PID != int(ann.PgConn().PID()) || b.By.Application != "psql of ann" || b.By.User != cfg.User ||
		b.By.State != "idle in transaction" || b.By.Transaction <= 0 || b.By.Query <= 0 ||
		b.By.Hidden || !strings.HasPrefix(b.Application, "tidings ") || b.Seconds < 0 {
		t.Errorf("got %+v", b)
	}
	if got := testutil.ToFloat64(postgres.NewBlockedCollector(system, testkit.Logger(t))); got != 1 {
		t.Errorf("tidings_postgres_blocked_sessions is %v, want 1", got)
	}

	login := fmt.Sprintf("blind_%d", time.Now().UnixNano()) // roles belong to the whole cluster
	if _, err := owner.Exec(t.Context(), `CREATE ROLE `+login+` LOGIN PASSWORD 'blind' IN ROLE tidings_system`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = owner.Exec(context.WithoutCancel(t.Context()), `DROP ROLE `+login) })
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(login, "blind")
	blind, err := postgres.Open(t.Context(), u.String(), postgres.Config{MaxConns: 2, ConnectTimeout: 5 * time.Second},
		postgres.RoleSystem, "blind")
	if err != nil {
		t.Fatal(err)
	}
	defer blind.Close()
	all, err := postgres.ReadBlocked(t.Context(), blind)
	if err != nil || len(all) != 1 || !all[0].By.Hidden || all[0].By.PID != b.By.PID || all[0].By.Application != "psql of ann" {
		t.Errorf("a login without pg_monitor reads %+v, %v", all, err)
	}
	if _, err := ann.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
	if err := <-waits; err != nil {
		t.Error(err)
	}
}

func TestABlockerIsSaidInWords(t *testing.T) {
	for want, b := range map[string]postgres.Blocked{
		`session 7 (tidings relay) has waited 1m15s for a lock of session 9, user "ann", application "psql", idle in transaction; its ` +
			`transaction began 1m20s ago and its last statement 1m18s ago; ask its owner, or end it: SELECT pg_terminate_backend(9)`: {
			PID: 7, Application: "tidings relay", Seconds: 75,
			By: postgres.Blocker{PID: 9, User: "ann", Application: "psql", State: "idle in transaction", Transaction: 80, Query: 78}},
		`session 7 (tidings api) has waited 6s for a lock of session 9, user "ann", application ""; the age of its transaction is ` +
			`hidden: GRANT pg_monitor to the login of this connection to see it; ` +
			`ask its owner, or end it: SELECT pg_terminate_backend(9)`: {
			PID: 7, Application: "tidings api", Seconds: 6, By: postgres.Blocker{PID: 9, User: "ann", Hidden: true}},
		`session 7 (tidings api) has waited 6s for a lock of a prepared transaction: see pg_prepared_xacts`: {PID: 7,
			Application: "tidings api", Seconds: 6},
	} {
		if got := b.String(); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	}
}
