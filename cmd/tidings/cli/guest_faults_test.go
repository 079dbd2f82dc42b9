//go:build faults

package cli

import (
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// A database of others is dumped and restored with the outbox in it. If the dump is older than the
// streams, the relay waits until somebody has decided about the events of the writes that are lost.
func TestADumpWithAGuestIsRestored(t *testing.T) {
	t.Parallel()
	binaries, err := pglocal.Find(0)
	if err != nil {
		t.Fatal(err)
	}
	program := func(name string, args ...string) {
		t.Helper()
		if out, err := binaries.Command(t.Context(), name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	db, restored, b := testkit.EmptyPostgres(t), testkit.EmptyPostgres(t), testkit.NATS(t)
	cfg := b.Config()
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": b.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
		"NATS_LIVE_PREFIX": cfg.LivePrefix}
	if code, _, stderr := run(t, env, "", "migrate", "--only", "outbox"); code != exitOK {
		t.Fatal(stderr)
	}
	publish := func(of *testkit.DB, from, to int) {
		t.Helper()
		in := of.In(t, "tidings")
		defer relayOf(t, in, cfg)()
		for id := from; id <= to; id++ {
			appendOrder(t, in, event.ID(fmt.Sprint(id)))
		}
		system := in.Pool(t, postgres.RoleSystem)
		testkit.Eventually(t, "the publish of all events", func() (done bool, err error) {
			err = system.QueryRow(t.Context(), `SELECT NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&done)
			return done, err
		})
	}
	publish(db, 1, 3)
	file := filepath.Join(t.TempDir(), "dump")
	program("pg_dump", "--format=custom", "--file="+file, db.URL)
	publish(db, 4, 5)

	u, err := url.Parse(restored.URL)
	if err != nil {
		t.Fatal(err)
	}
	program("pg_restore", "--exit-on-error", "--dbname="+u.String(), file)
	env["DATABASE_URL"] = restored.In(t, "tidings").URL
	for _, c := range []struct {
		args, says string
		code       int
	}{
		{"migrate --only outbox --json", `"outbox":0`, exitOK},
		{"repair stream --dry-run", "messages without a row", exitError},
		{"repair stream --delete-unknown --yes", "The streams are repaired", exitOK},
		{"repair stream --dry-run", "nothing to do", exitOK},
	} {
		code, stdout, stderr := run(t, env, "", strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit code %d\n%s%s", c.args, code, stdout, stderr)
		}
	}
	publish(restored, 6, 6)
	if code, stdout, _ := run(t, env, "", "events", "find", "--aggregate", "order/6", "--tenant", "1"); code != exitOK ||
		!strings.Contains(stdout, "paid") {
		t.Errorf("exit code %d\n%s", code, stdout)
	}
}
