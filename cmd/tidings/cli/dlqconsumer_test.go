package cli

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// parkFollows parks n events of followercounts with the ids 1 to n, each id hours ago, of three
// accounts in turn. Those of account 3 are unreadable.
func parkFollows(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	for _, sql := range []string{
		`INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ('followercounts', 'p05', 1000)`,
		fmt.Sprintf(`INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
			event_id, event_type,
		       event_version, headers, payload, error, dead_at)
		SELECT 'followercounts', 100 + g, 'p05', 1, 'follow', 1 + (g - 1) %% 3, id, 'created', 1,
		       jsonb_build_object('ce-id', ARRAY[id], 'ce-type', ARRAY['tidings.follow.created.v1'], 'ce-subject',
		       ARRAY[(1 + (g - 1) %% 3)::text],
		                          'ce-time', ARRAY['2030-01-01T00:00:00.000000Z'], 'Tidings-Outbox-Id', ARRAY[g::text]),
		       convert_to(CASE WHEN g %% 3 = 0 THEN 'a' || chr(9) || 'b' ELSE jsonb_build_object('follower_id', (1000 + g)::text,
		       'followee_id', (1 + (g - 1) %% 3)::text,
		         'status', 'ACTIVE', 'version', 1, 'created_at', now(), 'positioned_at', now(), 'updated_at', now(), 'actor',
		         'x')::text END, 'UTF8'),
		       'no idea', now() - g * interval '1 hour'
		  FROM (SELECT g, ('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid AS id FROM generate_series(1, %d) g) f ORDER BY g`,
			n),
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
}

// parkedState returns the dead letters, the counts, and the recorded actions.
func parkedState(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `
		SELECT 'parked ' || string_agg(id::text, ' ' ORDER BY id) FROM consumer_dead_letters GROUP BY aggregate_id
		 UNION ALL SELECT concat_ws(' ', 'followers of', object_id, incoming) FROM edge_counts WHERE incoming > 0
		 UNION ALL SELECT concat_ws(' ', actor, action, dead_letter_id, reason, left(error, 28)) FROM consumer_dead_letter_actions
		 ORDER BY 1`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}

func TestDLQConsumerListAndShow(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	parkFollows(t, db.Pool(t, postgres.RoleSystem), 6)
	env := map[string]string{"DATABASE_URL": db.URL}
	for args, want := range map[string][]string{
		"":                       {"1", "2", "3", "4", "5", "6"},
		"--first":                {"1", "2", "3"},
		"--consumer threadcache": nil,
		"--tenant 2":             nil,
		"--until 210m":           {"4", "5", "6"},
		"--since 210m --first":   {"1", "2", "3"},
		"--aggregate-type follow --aggregate-id 2 --all":               {"2", "5"},
		"--type created --consumer followercounts --limit 4":           {"1", "2", "3", "4"},
		"--type created --consumer followercounts --first --limit 500": {"1", "2", "3"},
	} {
		code, stdout, stderr := run(t, env, "", append([]string{"dlq", "consumer", "list", "--json"}, strings.Fields(args)...)...)
		if ids, _ := lines(t, stdout); code != exitOK || !slices.Equal(ids, want) || strings.Contains(stdout, "payload") {
			t.Errorf("list %s: exit code %d, %v, want %v: %s%s", args, code, ids, want, stdout, stderr)
		}
		if more := strings.Contains(stderr, "There are more"); more != strings.Contains(args, "--limit 4") {
			t.Errorf("list %s says %q", args, stderr)
		}
	}
	if code, stdout, _ := run(t, env, "", "dlq", "consumer", "list", "--aggregate-id", "1"); code != exitOK ||
		!strings.HasPrefix(stdout, "ID  FIRST  CONSUMER        TENANT  AGGREGATE  TYPE     DEAD SINCE            ERROR\n1   yes    "+
			"followercounts  1       follow/1   created  ") ||
		!strings.Contains(stdout, "\n4          followercounts") {
		t.Errorf("the table, exit code %d:\n%s", code, stdout)
	}
	code, stdout, stderr := run(t, env, "", "dlq", "consumer", "show", "4", "--json")
	_, shown := lines(t, stdout)
	if code != exitOK || len(shown) != 1 || shown[0]["first"] != false || shown[0]["payload"].(map[string]any)["follower_id"] != "1004" ||
		shown[0]["headers"].(map[string]any)["ce-subject"].([]any)[0] != "1" {
		t.Errorf("show: exit code %d: %s%s", code, stdout, stderr)
	}
	if code, stdout, _ := run(t, env, "", "dlq", "consumer", "show", "3"); code != exitOK ||
		!strings.Contains(stdout, `PAYLOAD     "a\tb"`) || !strings.Contains(stdout, "STREAM      103 in p05\n") {
		t.Errorf("show: exit code %d:\n%s", code, stdout)
	}
	if code, _, stderr := run(t, env, "", "dlq", "consumer", "show", "9"); code != exitError ||
		!strings.Contains(stderr, "there is no dead letter 9") {
		t.Errorf("show of nothing: exit code %d: %s", code, stderr)
	}
}

func TestDLQConsumerRetryAndDiscard(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	parkFollows(t, pool, 9)
	env := map[string]string{"DATABASE_URL": db.URL}
	tidings := func(stdin string, args ...string) (int, string, string) {
		t.Helper()
		return run(t, env, stdin, append([]string{"dlq", "consumer"}, args...)...)
	}
	whole := parkedState(t, pool)
	for name, c := range map[string]struct {
		args  string
		stdin string
		code  int
		says  string
	}{
		"retry without a word": {"retry", "", exitInput, "needs ids, a filter, or --all"},
		"ids and a filter":     {"retry 1 --consumer archiver", "", exitInput, "not both"},
		"a consumer that is none": {"retry --consumer archive", "", exitInput,
			`there is no consumer "archive": want one of followercounts, threadcache, archiver`},
		"an id that is not there":      {"retry 50", "", exitError, "there is no dead letter 50"},
		"one behind another":           {"retry 4", "", exitError, "dead letter 4 is behind dead letter 1"},
		"a dry run of a retry":         {"retry 1 2 --dry-run", "", exitOK, "Dry run: would apply 6 messages."},
		"a dry run of what would fail": {"retry --all --dry-run", "", exitError, "the consumer could not apply 1 message"},
		"a dry run of a limited one": {"retry --type created --limit 2 --dry-run", "", exitOK,
			"would apply 6 messages. More aggregates match"},
		"a dry run of a discard":        {"discard --all --dry-run", "", exitOK, "would discard 3 messages"},
		"a discard that nobody answers": {"discard 3", "", exitInput, "nothing was changed"},
		"a discard that is denied": {"discard --all", "n\n", exitError,
			"3 messages to discard.\nTheir payloads are deleted permanently"},
		"a discard of one behind others": {"discard 6 --yes", "", exitError, "dead letter 6 is behind dead letter 3"},
	} {
		code, _, stderr := tidings(c.stdin, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit code %d, %q: want %d and %q", name, code, stderr, c.code, c.says)
		}
	}
	if diff := cmp.Diff(whole, parkedState(t, pool)); diff != "" {
		t.Fatalf("something changed (-before +after):\n%s", diff)
	}
	code, stdout, stderr := tidings("", "retry", "1", "50", "--actor", "ann", "--reason", "mended")
	if code != exitError || !strings.Contains(stderr, "Applied 3 messages.") || !strings.Contains(stderr, "there is no dead letter 50") ||
		!strings.HasPrefix(stdout, "ID  CONSUMER        TENANT  AGGREGATE  TYPE     APPLIED  REMAINING  ERROR\n"+
			"1   followercounts  1       follow/1   created  3        0          \n") {
		t.Errorf("a retry: exit code %d: %s\n%s", code, stderr, stdout)
	}
	code, stdout, _ = tidings("", "retry", "--consumer", "followercounts", "--json", "--actor", "bob")
	_, did := lines(t, stdout)
	if code != exitError || len(did) != 2 || did[0]["gone"] != 3.0 || did[0]["next_id"] != "0" || did[1]["gone"] != 0.0 ||
		did[1]["left"] != 3.0 || did[1]["next_id"] != "3" || !strings.Contains(did[1]["error"].(string), "decode the payload") {
		t.Errorf("a retry: exit code %d: %s", code, stdout)
	}
	code, stdout, stderr = tidings("yes\n", "discard", "3", "--json", "--actor", "bob")
	if _, did := lines(t, stdout); code != exitOK || len(did) != 1 || did[0]["left"] != 2.0 || did[0]["next_id"] != "6" ||
		did[0]["error"] != nil {
		t.Errorf("a discard: exit code %d: %s%s", code, stdout, stderr)
	}
	want := []string{
		"ann retry 1 mended ", "ann retry 4 mended ", "ann retry 7 mended ", "bob retry 2  ", "bob retry 5  ", "bob retry 8  ",
		"bob retry 3  decode the payload of event ", "bob discard 3  ", "followers of 1 3", "followers of 2 3", "parked 6 9",
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, parkedState(t, pool)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
