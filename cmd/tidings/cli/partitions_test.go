package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

// listed returns the partitions that `tidings partitions list` shows.
func (d *dev) listed(t *testing.T, args ...string) (all []status.Partition) {
	t.Helper()
	code, stdout, stderr := run(t, nil, "", append([]string{"partitions", "list", "--json", "--data", d.dir}, args...)...)
	if code != exitOK {
		t.Fatalf("partitions list: exit code %d\n%s", code, stderr)
	}
	for line := range strings.Lines(stdout) {
		var p status.Partition
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

func TestAResizeWaitsForTheOneBefore(t *testing.T) {
	t.Parallel()
	db, b := testkit.Postgres(t), testkit.NATS(t)
	cfg := b.Config()
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": b.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
		"NATS_LIVE_PREFIX": cfg.LivePrefix}
	for _, c := range []struct {
		args, says string
		code       int
	}{
		{"--to 3", "want 1, 2, 4, 8, 16 or 32", exitInput},
		{"--to 4 --wait 0", "The relays continue the resize", exitOK},
		{"--to 2", "the progress of the earlier resize", exitError}, // no relay runs
	} {
		code, stdout, stderr := run(t, env, "", append([]string{"partitions", "resize", "--yes"}, strings.Fields(c.args)...)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("resize %s: exit code %d\n%s%s", c.args, code, stdout, stderr)
		}
	}
	all, err := outbox.Partitions(t.Context(), db.Pool(t, postgres.RoleSystem))
	if err != nil || len(all) != 5 {
		t.Errorf("%+v, %v", all, err)
	}
	if code, stdout, _ := run(t, env, "", "partitions", "list"); code != exitOK || strings.Count(stdout, status.Waiting) != 4 ||
		strings.Count(stdout, status.Closing) != 1 {
		t.Errorf("list: exit code %d\n%s", code, stdout)
	}
}
