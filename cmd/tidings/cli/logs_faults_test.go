//go:build faults

package cli

import (
	"net/http"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestNoLogLineOfAnOutageHasASecret also kills the servers.
func TestNoLogLineOfAnOutageHasASecret(t *testing.T) {
	t.Parallel()
	pg, nc := testkit.PostgresProcess(t), testkit.NATSProcess(t)
	db := pg.DB(t)
	if _, err := db.Pool(t, postgres.RoleSystem).Exec(t.Context(),
		`RESET ROLE; CREATE ROLE owner LOGIN SUPERUSER PASSWORD '`+secret+`-password'`); err != nil {
		t.Fatal(err)
	}
	b := beat(t, withPassword(t, db.URL), db, nc)
	for server, away := range map[string]struct{ kill, restart func(testing.TB) }{"PostgreSQL": {pg.Kill, pg.Restart},
		"NATS": {nc.Kill, nc.Restart}} {
		away.kill(t)
		b.write(8)
		b.await(map[string]string{"PostgreSQL": "lease heartbeat failed; retrying", "NATS": "lost NATS; reconnecting"}[server])
		away.restart(t)
	}
	testkit.Eventually(t, "writes are taken again", func() (bool, error) { return b.write(1) == http.StatusCreated, nil })
	b.useTheAPI()
	b.d.stop(t)
	b.read(time.Since(b.began))
}
