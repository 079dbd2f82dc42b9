//go:build faults

package cli

import (
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestDevUsesTheServersThatAreSet(t *testing.T) {
	t.Parallel()
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	cfg := nats.Config() // a shared server may have other tests' streams too
	d := newDev(t, "DATABASE_URL="+db.URL, "NATS_URL="+nats.URL, "NATS_STREAM="+cfg.Stream, "NATS_SUBJECT_PREFIX="+cfg.Prefix,
		"NATS_LIVE_PREFIX="+cfg.LivePrefix)
	d.start(t)
	if in := d.instance(t); in.DatabaseURL != db.URL || in.ProjectionsDatabaseURL != db.URL || in.NATSURL != nats.URL {
		t.Errorf("dev.json says %+v", in)
	}
	for _, own := range []string{"postgres", "nats"} {
		if _, err := os.Stat(filepath.Join(d.dir, own)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("dev made a %s of its own: %v", own, err)
		}
	}
	if status, _ := d.request(t, http.MethodPut, "/v1/follows/1/2", "", nil, nil); status != http.StatusCreated {
		t.Errorf("follow: status %d", status)
	}
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": nats.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
		"NATS_LIVE_PREFIX": cfg.LivePrefix}
	if code, stdout, stderr := run(t, env, "", "verify"); code != exitOK {
		t.Errorf("verify: exit code %d\n%s%s", code, stdout, stderr)
	}
	var n int
	if err := db.Pool(t, postgres.RoleSystem).QueryRow(t.Context(), `SELECT count(*) FROM edge_counts`).Scan(&n); err != nil || n != 2 {
		t.Errorf("%d counts in the database that was set, %v", n, err)
	}
	const waits = "waits for NATS"
	if strings.Contains(d.output(), waits) {
		t.Errorf("dev says that it waits:\n%s", d.output())
	}
	d.stop(t)
	alone := newDev(t, "DATABASE_URL="+db.URL, "NATS_URL=nats://"+testkit.FreeAddr(t))
	alone.start(t)
	if !strings.Contains(alone.output(), waits) {
		t.Errorf("dev does not say that it waits for NATS:\n%s", alone.output())
	}
}
