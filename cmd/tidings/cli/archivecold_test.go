package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestArchiveExportVerifyRestore(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at, inserted_at,
		processed_at)
		SELECT 1, 'post', 1, 'created', '{}', at, at, at, at FROM generate_series(1, 1500),
		(SELECT '2021-08-31 23:59:59+00'::timestamptz AS at) t`); err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{`SELECT outbox_range_cut(50000001)`, `UPDATE outbox_partitions SET floor_id = 50000000`,
		`SELECT outbox_range_archive(1, 0)`} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`UPDATE outbox_ranges SET archived_at = now() - interval '25 hours' WHERE archived_at IS NOT NULL`); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	env := map[string]string{"DATABASE_URL": db.URL}
	if code, _, stderr := run(t, env, "", "archive", "settings", "outbox_archive_export_url=file://"+dir, "--yes"); code != exitOK {
		t.Fatal(stderr)
	}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"status", exitOK, "1            50,000,001   archive"},
		{"export", exitInput, "--month or --all"},
		{"export --month 2021-8", exitInput, "such as 2026-08"},
		{"export --all --month 2021-08", exitInput, "--month or --all"},
		{"export --all --to gs://bucket", exitInput, "want file:///DIR"},
		{"restore", exitInput, "needs --month"},
		{"restore --month 2021-08 --from nowhere", exitInput, "--from: it is"},
		{"restore --month 2021-08", exitError, "no export of the month"},
		{"export --month 2021-09", exitError, "no rows in the archive"},
		{"DOCTOR", exitAgain, `tidings archive export --month 2021-08`},
		{"export --all", exitOK, "2021-08  1           1,500"},
		{"DOCTOR", exitAgain, "unheld-partition"},
		{"export --all", exitOK, "MONTH  RANGE FROM  ROWS  MIB  EXPORTED  VERIFIED  NOTE  EXPORT\n"},
		{"export --month 2021-08 --json", exitOK, `"rows":1500`},
		{"exports", exitOK, "2021-08  1           1,500"},
		{"verify", exitOK, "2021-08  1           1,500  ok     same "},
		{"verify --month 2021-08 --json", exitOK, `"table":"same"`},
	} {
		args := append([]string{"archive"}, strings.Fields(c.args)...)
		if c.args == "DOCTOR" {
			args = []string{"doctor"}
		}
		code, stdout, stderr := run(t, env, "", args...)
		if found := strings.Contains(stdout, "archive-export"); args[0] == "doctor" &&
			(found != strings.Contains(c.says, "export") || strings.Contains(stdout, "schema-newer")) {
			t.Errorf("doctor printed %s", stdout)
		}
		if code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit code %d, want %d and %q:\n%s%s", c.args, code, c.code, c.says, stdout, stderr)
		}
	}
	if _, err := pool.Exec(t.Context(), `DELETE FROM outbox_messages_archive`); err != nil {
		t.Fatal(err)
	}
	for _, want := range []float64{1500, 0} {
		code, stdout, stderr := run(t, env, "", "archive", "restore", "--month", "2021-08", "--json", "--actor", "ann")
		var r map[string]any
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK || r["rows_restored"] != want {
			t.Errorf("restore: exit code %d, %v, %s%s", code, err, stdout, stderr)
		}
	}
	var where, holds string
	if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*)::text FROM outbox_messages_kept),
		(SELECT string_agg(created_by || ' ' || reason || ' ' || from_month || ' ' || to_month, ',') FROM outbox_archive_holds)`).Scan(
		&where, &holds); err != nil ||
		where != "1500" || holds != "ann restored 2021-08-01 2021-08-01" {
		t.Errorf("%s rows are kept, the holds are %q, %v", where, holds, err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "2021-08", "*", "00001.ndjson.gz"))
	if err != nil || len(files) != 1 {
		t.Fatalf("segments: %v, %v", files, err)
	}
	if err := os.Truncate(files[0], 100); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, env, "", "archive", "verify"); code != exitError || !strings.Contains(stdout, "DAMAGED") ||
		!strings.Contains(stderr, "00001.ndjson.gz") {
		t.Errorf("verify of a damaged export: exit code %d: %s%s", code, stdout, stderr)
	}
}
