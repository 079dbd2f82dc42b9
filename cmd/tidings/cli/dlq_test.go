package cli

import (
	"encoding/json"
	"fmt"
	"os/user"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// buryRows writes dead messages with the ids 1 to n, each id hours ago: odd ids of tenant 1, even
// ids of tenant 2.
func buryRows(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at,
		       attempts, last_error, event_id, inserted_at, slot, dead_at)
		SELECT g, 2 - g % 2, 'post', 7, 'a b', 1, jsonb_build_object('n', g), now(), now(), 11, E'no\ttoken',
		       ('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid, now(), 0, now() - g * interval '1 hour'
		  FROM generate_series(1, $1) g`, n); err != nil {
		t.Fatal(err)
	}
}

// lines decodes JSON lines and returns their ids.
func lines(t *testing.T, out string) (ids []string, all []map[string]any) {
	t.Helper()
	for d := json.NewDecoder(strings.NewReader(out)); d.More(); {
		var v map[string]any
		if err := d.Decode(&v); err != nil {
			t.Fatalf("%v in %s", err, out)
		}
		ids, all = append(ids, v["id"].(string)), append(all, v)
	}
	return ids, all
}

// dlqState returns which messages are in the outbox and in the DLQ, and the recorded actions.
func dlqState(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `
		SELECT 'DLQ ' || id FROM outbox_messages_dlq UNION ALL SELECT 'outbox ' || (payload ->> 'n') FROM outbox_messages
		 UNION ALL SELECT concat_ws(' ', actor, action, dlq_id, reason) FROM outbox_dlq_actions ORDER BY 1`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestDLQOutboxListAndShow(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	buryRows(t, db.Pool(t, postgres.RoleSystem), 4)
	env := map[string]string{"DATABASE_URL": db.URL}
	for args, want := range map[string][]string{
		"":                        {"1", "2", "3", "4"},
		"--tenant 2":              {"2", "4"},
		"--until 150m":            {"3", "4"},
		"--since 150m":            {"1", "2"},
		"--aggregate-type thread": nil,
		"--aggregate-type post --aggregate-id 7 --limit 3": {"1", "2", "3"},
		"--all --tenant 1": {"1", "3"},
	} {
		code, stdout, stderr := run(t, env, "", append([]string{"dlq", "outbox", "list", "--json"}, strings.Fields(args)...)...)
		if ids, _ := lines(t, stdout); code != exitOK || !slices.Equal(ids, want) || strings.Contains(stdout, "payload") {
			t.Errorf("list %s: exit code %d, %v, want %v: %s%s", args, code, ids, want, stdout, stderr)
		}
		if more := strings.Contains(stderr, "There are more"); more != strings.Contains(args, "--limit") {
			t.Errorf("list %s says %q", args, stderr)
		}
	}
	if code, stdout, _ := run(t, env, "", "dlq", "outbox", "list", "--type", "a b", "--tenant", "1"); code != exitOK ||
		len(strings.Split(stdout, "\n")) != 4 || !strings.HasPrefix(stdout,
		"ID  TENANT  AGGREGATE  TYPE  ATTEMPTS  DEAD SINCE            ERROR\n1   1       post/7     a b   11  ") ||
		!strings.Contains(stdout, `"no\ttoken"`) {
		t.Errorf("the table, exit code %d:\n%s", code, stdout)
	}
	code, stdout, stderr := run(t, env, "", "dlq", "outbox", "show", "3", "--json")
	_, shown := lines(t, stdout)
	if code != exitOK || len(shown) != 1 || shown[0]["event_id"] != "00000000-0000-4000-8000-000000000003" ||
		shown[0]["payload"].(map[string]any)["n"] != 3.0 {
		t.Errorf("show: exit code %d: %s%s", code, stdout, stderr)
	}
	if code, stdout, _ := run(t, env, "", "dlq", "outbox", "show", "3"); code != exitOK ||
		!strings.Contains(stdout, `PAYLOAD     {"n": 3}`) {
		t.Errorf("show: exit code %d:\n%s", code, stdout)
	}
	if code, _, stderr := run(t, env, "", "dlq", "outbox", "show", "9"); code != exitError ||
		!strings.Contains(stderr, "message 9 is not in the DLQ") {
		t.Errorf("show of nothing: exit code %d: %s", code, stderr)
	}
}

func TestDLQOutboxRetryAndDiscard(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	buryRows(t, pool, 1206)
	env := map[string]string{"DATABASE_URL": db.URL}
	tidings := func(stdin string, args ...string) (int, string, string) {
		t.Helper()
		return run(t, env, stdin, append([]string{"dlq", "outbox"}, args...)...)
	}
	whole := dlqState(t, pool)
	for name, c := range map[string]struct {
		args  string
		stdin string
		code  int
		says  string
	}{
		"retry without a word":          {"retry", "", exitInput, "needs ids, a filter, or --all"},
		"discard without a word":        {"discard --yes", "", exitInput, "needs ids, a filter, or --all"},
		"an id that is none":            {"retry 1x", "", exitInput, `"1x" is not a decimal number`},
		"an empty aggregate id":         {"discard --tenant 1 --aggregate-id= --yes", "", exitInput, "--aggregate-id: \"\" is not an id"},
		"ids and a filter":              {"retry 1 --tenant 1", "", exitInput, "not both"},
		"a time that is none":           {"retry --until soon", "", exitInput, `"soon" is not a duration`},
		"no limit and one":              {"retry --all --limit 5", "", exitInput, "exclude each other"},
		"a limit of 0":                  {"list --limit 0", "", exitInput, "--limit"},
		"an id that is not there":       {"retry 5000", "", exitError, "not in the DLQ: 5000"},
		"a dry run of a retry":          {"retry --all --dry-run", "", exitOK, "would retry 1,206 messages"},
		"a dry run of a limited one":    {"retry --tenant 1 --limit 3 --dry-run", "", exitOK, "would retry 3 messages. 600 more"},
		"a dry run of a discard":        {"discard 1 2 --dry-run", "", exitOK, "would discard 2 messages"},
		"a discard that nobody answers": {"discard 1", "", exitInput, "nothing was changed"},
		"a discard that is denied": {"discard --all", "n\n", exitError,
			"1,206 messages to discard.\nTheir payloads are deleted permanently"},
	} {
		code, _, stderr := tidings(c.stdin, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit code %d, %q: want %d and %q", name, code, stderr, c.code, c.says)
		}
	}
	if diff := cmp.Diff(whole, dlqState(t, pool)); diff != "" {
		t.Fatalf("something changed (-before +after):\n%s", diff)
	}

	code, stdout, stderr := tidings("", "retry", "3", "1", "1", "5000", "--reason", "mended", "--actor", "ann")
	if code != exitError || !strings.Contains(stderr, "Retried 2 messages.") || !strings.Contains(stderr, "not in the DLQ: 5000") {
		t.Errorf("a retry: exit code %d: %s", code, stderr)
	}
	if got := strings.Split(stdout, "\n"); len(got) != 4 || !strings.HasPrefix(got[0], "ID  NEW ID  TENANT  AGGREGATE  TYPE  EVENT") ||
		!strings.HasPrefix(got[1], "1   1 ") {
		t.Errorf("a retry:\n%s", stdout)
	}
	code, stdout, _ = tidings("yes\n", "discard", "2", "--json")
	_, did := lines(t, stdout)
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	if code != exitOK || len(did) != 1 || did[0]["action"] != "discard" || did[0]["actor"] != me.Username || did[0]["dry_run"] != false ||
		did[0]["new_id"] != nil {
		t.Errorf("a discard: exit code %d: %s", code, stdout)
	}
	if code, _, stderr := tidings("", "discard", "--until", "1200h", "--yes", "--actor", "bob"); code != exitOK ||
		!strings.Contains(stderr, "Discarded 7 messages.") {
		t.Errorf("a discard by age: exit code %d: %s", code, stderr)
	}
	if code, _, stderr := tidings("", "retry", "--tenant", "2", "--limit", "2", "--actor", "bob"); code != exitOK ||
		!strings.Contains(stderr, "Retried 2 messages. 596 more match") {
		t.Errorf("a limited retry: exit code %d: %s", code, stderr)
	}
	code, stdout, stderr = tidings("", "retry", "--all", "--json", "--actor", "bob")
	if ids, _ := lines(t, stdout); code != exitOK || len(ids) != 1194 ||
		!slices.IsSortedFunc(ids, func(a, b string) int { return len(a) - len(b) }) {
		t.Errorf("a retry of all: exit code %d, %d ids: %s", code, len(ids), stderr)
	}
	var want []string
	for i := 1; i <= 1206; i++ {
		switch {
		case i == 1 || i == 3:
			want = append(want, fmt.Sprintf("ann retry %d mended", i), fmt.Sprintf("outbox %d", i))
		case i == 2:
			want = append(want, me.Username+" discard 2 ")
		case i >= 1200:
			want = append(want, fmt.Sprintf("bob discard %d ", i))
		default:
			want = append(want, fmt.Sprintf("bob retry %d ", i), fmt.Sprintf("outbox %d", i))
		}
	}
	slices.Sort(want)
	got := dlqState(t, pool)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseAge(t *testing.T) {
	now := time.Date(2030, 1, 2, 12, 0, 0, 0, time.UTC)
	for s, want := range map[string]time.Time{
		"36h": time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC), "0s": now, "2029-12-31": time.Date(2029, 12, 31, 0, 0, 0, 0, time.UTC),
		"2030-01-01T03:00:00+02:00": time.Date(2030, 1, 1, 1, 0, 0, 0, time.UTC),
	} {
		if got, err := parseAge(s, now); err != nil || !got.Equal(want) {
			t.Errorf("%q: %s, %v, want %s", s, got, err, want)
		}
	}
	for _, s := range []string{"-1h", "1d", "yesterday", ""} {
		if got, err := parseAge(s, now); err == nil {
			t.Errorf("%q: %s, want an error", s, got)
		}
	}
}

func TestCellsKeepATableInShape(t *testing.T) {
	for s, want := range map[string]string{
		"": "", "a b": "a b", "é": "é", "a\tb": `"a\tb"`, "a\nb": `"a\nb"`, "\x1b[31m": `"\x1b[31m"`, " a": `" a"`,
		"a\u202eb": `"a\u202eb"`, "\xff": `"\xff"`,
	} {
		if got := cell(s); got != want {
			t.Errorf("cell(%q) = %s, want %s", s, got, want)
		}
	}
}
