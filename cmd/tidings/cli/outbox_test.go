package cli

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestOutboxListShowRetryAndKill(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts, last_error, available_at,
		behind, event_id)
		SELECT 2 - g % 2, 'post', 7, 'a b', jsonb_build_object('n', g), CASE WHEN g < 3 THEN 2 ELSE 0 END,
		CASE WHEN g < 3 THEN E'no\ttoken' END,
		       now() + CASE WHEN g < 4 THEN interval '1 hour' WHEN g = 4 THEN interval '1 microsecond' ELSE interval '0' END,
		       CASE WHEN g = 3 THEN 1 END,
		       ('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid
		  FROM generate_series(1, 5) g`); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DATABASE_URL": db.URL}
	tidings := func(args ...string) (int, string, string) {
		t.Helper()
		return run(t, env, "", append([]string{"outbox"}, args...)...)
	}
	for args, want := range map[string][]string{
		"":                              {"1", "2", "3", "4"},
		"--tenant 2":                    {"2", "4"},
		"--aggregate-type thread":       nil,
		"--aggregate-id 7 --limit 3":    {"1", "2", "3"},
		"--all --type created":          nil,
		"--all --aggregate-type post":   {"1", "2", "3", "4"},
		"--tenant 1 --aggregate-id 123": nil,
	} {
		code, stdout, stderr := tidings(append([]string{"list", "--json"}, strings.Fields(args)...)...)
		if ids, _ := lines(t, stdout); code != exitOK || !cmp.Equal(ids, want) || strings.Contains(stdout, "payload") ||
			strings.Contains(stderr, "There are more") != strings.Contains(args, "--limit") {
			t.Errorf("list %s: exit code %d, %v, want %v: %s%s", args, code, ids, want, stdout, stderr)
		}
	}
	_, stdout, _ := tidings("list", "--tenant", "1")
	if got := strings.Split(stdout, "\n"); len(got) != 4 || !strings.HasPrefix(got[0], "ID  EVENT ") ||
		!strings.Contains(got[0], "TENANT  AGGREGATE  TYPE  ATTEMPTS  DUE IN  ") ||
		!strings.Contains(got[1], `post/7     a b   2 `) || !strings.HasSuffix(got[1], `-       "no\ttoken"`) ||
		!strings.HasSuffix(strings.TrimSpace(got[2]), " 1") {
		t.Errorf("the table:\n%s", stdout)
	}
	code, stdout, _ := tidings("show", "1", "--json")
	if _, shown := lines(t, stdout); code != exitOK || len(shown) != 1 || shown[0]["payload"].(map[string]any)["n"] != 1.0 ||
		shown[0]["due_in_seconds"].(float64) < 3000 {
		t.Errorf("show: exit code %d: %s", code, stdout)
	}
	if code, stdout, _ := tidings("show", "1"); code != exitOK || !strings.Contains(stdout, `PAYLOAD     {"n": 1}`) {
		t.Errorf("show: exit code %d:\n%s", code, stdout)
	}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"show 5", exitError, "message 5 is not waiting: `tidings events find --id 5`"},
		{"list --aggregate-id a,b", exitInput, `"a,b" is not an id`},
		{"list --limit 0", exitInput, "--limit"},
		{"list --limit 1 --all", exitInput, "exclude each other"},
		{"kill 1", exitInput, "needs --reason"},
		{"retry 1x", exitInput, `"1x" is not a decimal number`},
		{"kill 4 --reason no --yes", exitError, "message 4 is due, and a relay may be publishing it"},
		{"kill 9 --reason no", exitError, "is not waiting"},
		{"retry 3", exitError, "message 1; retry or kill that one, and message 3 follows"},
		{"retry 4", exitOK, "Message 4 was already due."},
		{"retry 5 2 --actor ann --reason mended", exitError, "Message 2 is due now."},
		{"kill 1 --reason gone --actor bob --yes", exitOK, "Message 1 is in the DLQ"},
	} {
		if code, stdout, stderr := tidings(strings.Fields(c.args)...); code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit code %d, %q: want %d and %q", c.args, code, stdout+stderr, c.code, c.says)
		}
	}
	if diff := cmp.Diff([]string{"DLQ 1", "ann retry_waiting 2 mended", "bob kill 1 gone", "outbox 2", "outbox 3", "outbox 4", "outbox 5"},
		dlqState(t, pool)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, waits, _ := tidings("list", "--json"); strings.Contains(waits, "behind") {
		t.Errorf("message 3 is not free: %s", waits)
	}
}
