package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// publishedRows adds n messages of tenant 1 that were published ten days ago, in a range that is
// old enough for the archive, and one message of today.
func publishedRows(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	const insertSQL = `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, inserted_at, available_at,
		processed_at, stream_seq)
		SELECT 1, 'post', 7, 'created', '{"n": 1}', at, at, at, at, n
		FROM generate_series(1, $1::int) n, (SELECT now() - $2::interval AS at) x`
	for _, sql := range []struct {
		text string
		args []any
	}{{insertSQL, []any{n, 240 * time.Hour}}, {`SELECT outbox_range_cut(50000001)`, nil}, {insertSQL, []any{1, time.Duration(0)}},
		{`UPDATE outbox_partitions SET floor_id = 50000000`, nil},
		{`UPDATE outbox_ranges SET settled_at = now() - interval '10 d' WHERE from_id = 1`, nil}} {
		if _, err := pool.Exec(t.Context(), sql.text, sql.args...); err != nil {
			t.Fatal(err)
		}
	}
}

func TestArchiveRunSaysWhatItDoesAndDoesWhatItSaid(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	publishedRows(t, pool, 3000)
	env := map[string]string{"DATABASE_URL": db.URL}
	jobRunOf := func(args ...string) jobRun {
		t.Helper()
		code, stdout, stderr := run(t, env, "", append([]string{"archive", "run", "--json", "--job", "outbox-archive"}, args...)...)
		var r jobRun
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK {
			t.Fatalf("exit code %d, %v: %s%s", code, err, stdout, stderr)
		}
		return r
	}
	count := func(table string) (n int) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	dry := jobRunOf("--dry-run")
	if !dry.DryRun || dry.Counts["ranges archived"] != 1 || count("outbox_messages") != 3001 || count("outbox_messages_archive") != 0 ||
		count("job_runs") != 0 {
		t.Errorf("the dry run printed %+v: it changed rows, or counted wrong", dry)
	}
	did := jobRunOf()
	if did.DryRun || did.Counts["ranges archived"] != 1 || count("outbox_messages_archive") != 3000 {
		t.Errorf("the run printed %+v", did)
	}
	if code, stdout, _ := run(t, env, "", "archive", "run", "--job", "outbox-archive"); code != exitOK ||
		!strings.HasPrefix(stdout, "outbox-archive: nothing (") {
		t.Errorf("the second run: exit code %d, %s", code, stdout)
	}
	lease := func(expires string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `UPDATE leases SET owner = 'somebody', expires_at = now() + $1::interval WHERE kind = 'jobs'`,
			expires); err != nil {
			t.Error(err)
		}
	}
	lease("5 minutes")
	var said bytes.Buffer
	stderr := writerFunc(func(b []byte) (int, error) {
		if bytes.Contains(b, []byte("Waiting for somebody")) {
			lease("-1 s")
		}
		return said.Write(b)
	})
	ctx, cancel := context.WithTimeout(t.Context(), startWithin)
	defer cancel()
	if code := Execute(ctx, []string{"archive", "run", "--job", "outbox-archive"},
		Process{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: stderr, Env: envconfig.MapLookuper(env)}); code != exitOK ||
		!strings.Contains(said.String(), "Waiting for somebody") {
		t.Errorf("while another has the lease: exit code %d, %s", code, said.String())
	}
	if code, _, stderr := run(t, env, "", "archive", "run", "--job", "laundry"); code != exitInput ||
		!strings.Contains(stderr, "outbox-archive") {
		t.Errorf("an unknown job: exit code %d, %s", code, stderr)
	}
	for _, sql := range []string{`UPDATE leases SET owner = 'job-giant-host-1', expires_at = now() + interval '1 min' WHERE kind = 'jobs'`,
		`INSERT INTO lease_members (kind, owner, expires_at) VALUES ('jobs', 'job-giant-host-1', now() + interval '1 min'),
			('jobs', 'erase-host-2', now() + interval '1 min')`,
		`UPDATE job_runs SET owner = 'job-giant-host-1', started_at = '2026-01-02T03:04:05Z' WHERE job = 'outbox-archive'`} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	code, stdout, errs := run(t, env, "", "archive", "status")
	for _, want := range []string{"outbox-archive  2026-01-02T03:04:05Z  job-giant-host-1  erase-host-2\n", "RANGE FROM   TO",
		"1            50,000,001   archive", "50,000,001   100,000,001  outbox", "outbox-archive  20"} {
		if code != exitOK || !strings.Contains(stdout, want) {
			t.Errorf("status lacks %q, exit code %d:\n%s%s", want, code, stdout, errs)
		}
	}
}

func TestShelvedThreadsAreShownAndBroughtBack(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body, updated_at)
		SELECT 1, gen_random_uuid(), 1 + g % 3, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 1, 'x',
		CASE g WHEN 3 THEN now() ELSE now() - interval '2 hours' END
		  FROM generate_series(1, 30) g`); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DATABASE_URL": db.URL}
	if code, _, stderr := run(t, env, "", "archive", "settings", "comment_archive_after=1h", "--yes"); code != exitOK {
		t.Fatal(stderr)
	}
	want := func(code int, text string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, env, "", args...)
		if got != code || !strings.Contains(stdout+stderr, text) {
			t.Errorf("%v: exit code %d, want %d and %q:\n%s%s", args, got, code, text, stdout, stderr)
		}
	}
	want(exitOK, "comment_archive_after      1h0m0s", "archive", "settings", "comment_archive_after=1h") // no change, so no question
	archived := func(want int) {
		t.Helper()
		var n int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM children_archive`).Scan(&n); err != nil || n != want {
			t.Errorf("%d comments are shelved, want %d: %v", n, want, err)
		}
	}
	want(exitOK, "comment-archive (--dry-run): comments shelved 20, threads shelved 2 (", "archive", "run", "--job",
		"comment-archive", "--dry-run")
	archived(0)
	want(exitOK, "  settings: comment_archive_after=1h0m0s\n", "archive", "run", "--job", "comment-archive", "--dry-run")
	want(exitOK, "comment-archive: comments shelved 20, threads shelved 2 (", "archive", "run", "--job", "comment-archive")
	archived(20)
	want(exitOK, "2        20        0\n", "archive", "status")
	want(exitInput, "archive run with id 7", "archive", "undo", "--id", "7")
	want(exitInput, "--id", "archive", "undo")
	want(exitOK, "Archive 1: 2 threads with 20 comments returned.", "archive", "undo", "--id", "1")
	archived(0)
	want(exitOK, `{"archive_id":1,"threads":0,"comments":0}`, "archive", "undo", "--id", "1", "--json")
	want(exitOK, "comment-archive: nothing (", "archive", "run", "--job", "comment-archive")
	archived(0)
}

func TestArchiveHolds(t *testing.T) {
	t.Parallel()
	env := map[string]string{"DATABASE_URL": testkit.Postgres(t).URL}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"add --from 2026-01 --to 2026-03 --reason case-7 --actor ann", exitOK, "1     all     2026-01  2026-03  ann"},
		{"add --tenant 2 --reason audit --actor bob", exitOK, "2     2                 bob  "},
		{"add --tenant 2", exitInput, "needs a --reason"},
		{"add --from 2026-13 --reason x", exitInput, `--from is "2026-13": want a month`},
		{"add --from 2026-02 --to 2026-01 --reason x", exitInput, "not before --from"},
		{"release 1 --actor ann --yes", exitOK, "Hold 1 is released"},
		{"release 1 --actor ann", exitError, "or it was released"},
		{"release one", exitInput, "not the number of a hold"},
		{"list", exitOK, "audit"},
		{"list --all", exitOK, " by ann"},
	} {
		code, stdout, stderr := run(t, env, "", append([]string{"archive", "hold"}, strings.Fields(c.args)...)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("hold %s: exit code %d, want %d and %q:\n%s%s", c.args, code, c.code, c.says, stdout, stderr)
		}
	}
	if _, stdout, _ := run(t, env, "", "archive", "hold", "list"); strings.Contains(stdout, "case-7") {
		t.Errorf("a released hold is still in the list:\n%s", stdout)
	}
}

func TestEventsFind(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	publishedRows(t, db.Pool(t, postgres.RoleSystem), 3)
	env := map[string]string{"DATABASE_URL": db.URL}
	if code, _, stderr := run(t, env, "", "archive", "run"); code != exitOK {
		t.Fatal(stderr)
	}
	find := func(args string) (int, string, string) {
		t.Helper()
		return run(t, env, "", append([]string{"events", "find"}, strings.Fields(args)...)...)
	}
	_, stdout, _ := find("--id 2 --json --payload")
	ids, all := lines(t, stdout)
	if len(ids) != 1 || all[0]["where"] != "archive" || all[0]["payload"] == nil || all[0]["stream_seq"] != "2" {
		t.Fatalf("found %s", stdout)
	}
	for args, want := range map[string]string{
		"--id " + all[0]["event_id"].(string):            "2",
		"--aggregate post/7 --tenant 1":                  "1 2 3 50000001",
		"--aggregate post/8 --tenant 1":                  "",
		"--since 240h30m --limit 2":                      "1 2",
		"--since 1h":                                     "50000001",
		"--since 240h30m --type sold":                    "",
		"--id 2 --type " + all[0]["event_type"].(string): "2",
		"--since 240h30m --until 1h":                     "1 2 3",
		"--id 50000001":                                  "50000001",
		"--id 99":                                        "",
	} {
		code, stdout, stderr := find(args + " --json")
		ids, _ := lines(t, stdout)
		if got := strings.Join(ids, " "); got != want || code != exitOK || strings.Contains(stdout, "payload") {
			t.Errorf("find %s: exit code %d, %q, want %q: %s", args, code, got, want, stderr)
		}
		if more := strings.Contains(stderr, "There are more"); more != strings.Contains(args, "--limit") {
			t.Errorf("find %s printed %q", args, stderr)
		}
	}
	for args, want := range map[string]string{
		"--id 99": "Nothing was found.\n",
		"--id 00000000-0000-4000-8000-000000000000": "Nothing was found.\n",
	} {
		if code, _, stderr := find(args); code != exitOK || !strings.Contains(stderr, want) {
			t.Errorf("find %s: exit code %d, printed %q, want %q", args, code, stderr, want)
		}
	}
	if code, stdout, _ := find("--id 50000001"); code != exitOK || !strings.HasPrefix(stdout, "WHERE   ID        EVENT") ||
		!strings.Contains(stdout, "outbox  50000001  ") {
		t.Errorf("the table, exit code %d:\n%s", code, stdout)
	}
	for _, args := range []string{"", "--id x", "--aggregate post/7", "--aggregate post --tenant 1", "--id 1 --aggregate post/7 --tenant 1",
		"--since soon", "--since 1h --tenant 0", "--id 1 --limit 0", "--tenant 1", "--sequence 7", "--sequence EVENTS-0/x",
		"--id 1 --sequence EVENTS-0/1"} {
		if code, _, _ := find(args); code != exitInput {
			t.Errorf("find %q: exit code %d", args, code)
		}
	}
}
