package cli

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMigrate(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleOwner)
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.TrimPrefix(u.Path, "/")
	var urls [2]string // an empty database for each schema
	for i, suffix := range []string{"_truth", "_projections"} {
		database := pgx.Identifier{name + suffix}.Sanitize()
		if _, err := pool.Exec(t.Context(), "CREATE DATABASE "+database); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := pool.Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+database+" WITH (FORCE)"); err != nil {
				t.Error(err)
			}
		})
		u.Path = "/" + name + suffix
		urls[i] = u.String()
	}
	env := map[string]string{"DATABASE_URL": urls[0], "PROJECTIONS_DATABASE_URL": urls[1]}
	files := func(set string) int {
		all, err := filepath.Glob("../../../migrations/" + set + "/*.sql")
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	want := fmt.Sprintf("{\"truth\":%d,\"projections\":%d}\n", files("outbox")+files("truth"), files("consumers")+files("projections"))
	if code, stdout, stderr := run(t, env, "", "migrate", "--json"); code != exitOK || stdout != want {
		t.Fatalf("exit code %d: %s%s", code, stdout, stderr)
	}
	if code, stdout, stderr := run(t, env, "", "migrate", "--json"); code != exitOK || stdout != "{\"truth\":0,\"projections\":0}\n" {
		t.Errorf("again: exit code %d: %s%s", code, stdout, stderr)
	}
	if code, _, stderr := run(t, map[string]string{"XDG_DATA_HOME": t.TempDir()}, "", "migrate", "--data",
		t.TempDir()); code != exitError ||
		!strings.Contains(stderr, "no `tidings dev` is running here. Start it, or name another directory with --data, or set "+
			"DATABASE_URL") {
		t.Errorf("without a database: exit code %d: %s", code, stderr)
	}
}
