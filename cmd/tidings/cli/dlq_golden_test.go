package cli

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// varies matches the members of the output that differ from run to run.
var varies = regexp.MustCompile(`"(at|created_at|positioned_at|updated_at|due_in_seconds)": ?("[^"]+"|[0-9.e+]+)`)

// TestTheOutputOfDLQCommands compares every form of the output of `tidings dlq` and of `tidings
// outbox list` and show, which scripts read, with testdata/dlq.golden.
func TestTheOutputOfDLQCommands(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	buryRows(t, pool, 6)
	parkFollows(t, pool, 9)
	for _, sql := range []string{
		`UPDATE outbox_messages_dlq SET dead_at = '2030-01-01'::timestamptz - id * interval '1 hour 1 microsecond',
			occurred_at = '2029-01-01', inserted_at = '2029-01-02'`,
		`UPDATE outbox_messages_dlq SET trace_id = '00-00000000000000000000000000000001-0000000000000001-01', last_error = NULL
			WHERE id = 2`,
		`UPDATE consumer_dead_letters SET dead_at = '2030-01-01'::timestamptz - stream_seq * interval '1 hour 1 microsecond'`,
		`INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at, event_id,
			inserted_at, attempts, last_error)
		SELECT g, 1, 'post', 9, 'a b', '{"n": 1}', '2029-01-01', '2029-01-02', ('00000000-0000-4000-8000-0000000009' || g)::uuid,
			'2029-01-02', g - 10, CASE WHEN g > 10 THEN 'no stream' END FROM generate_series(10, 12) g`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	var got strings.Builder
	for _, args := range []string{
		"dlq outbox list", "dlq outbox list --json", "dlq outbox list --limit 2", "dlq outbox list --limit 6", "dlq outbox list --tenant 9",
		"dlq outbox list --tenant 9 --json", "dlq outbox show 2", "dlq outbox show 1 --json", "dlq outbox show 7",
		"dlq outbox retry 1 2 --dry-run", "dlq outbox retry --all --dry-run --json --actor ann --reason why",
		"dlq outbox retry 1 9 2 --actor ann", "dlq outbox retry --tenant 1 --limit 1 --json --actor ann --reason why",
		"dlq outbox discard 4 --yes --actor ann", "dlq outbox discard --tenant 2 --json --yes --actor ann",
		"dlq outbox discard --tenant 9 --yes",
		"dlq consumer list", "dlq consumer list --json", "dlq consumer list --first --limit 2", "dlq consumer list --limit 9",
		"dlq consumer list --tenant 9", "dlq consumer list --tenant 9 --json", "dlq consumer show 4", "dlq consumer show 3",
		"dlq consumer show 3 --json", "dlq consumer show 1 --json", "dlq consumer show 10", "dlq consumer retry 1 2 --dry-run --actor ann",
		"dlq consumer retry --all --dry-run --json --actor ann --reason why", "dlq consumer retry 1 50 4 --actor ann",
		"dlq consumer retry --consumer followercounts --limit 1 --actor ann", "dlq consumer retry --all --json --actor ann --reason why",
		"dlq consumer discard 3 6 --yes --actor ann", "dlq consumer discard --all --json --yes --actor ann",
		"dlq consumer discard --tenant 9 --yes", "outbox list --type nothing", "outbox list --json --limit 2", "outbox show 99",
	} {
		code, stdout, stderr := run(t, map[string]string{"DATABASE_URL": db.URL}, "", strings.Fields(args)...)
		got.WriteString("$ tidings " + args + "\n" + stdout + "stderr: " + stderr + "exit code " + strconv.Itoa(code) + "\n")
	}
	out := varies.ReplaceAllString(got.String(), `"$1":"varies"`)
	const file = "testdata/dlq.golden"
	if *update {
		if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(out, "\n")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
