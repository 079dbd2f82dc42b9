package migrations_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/migrations"
)

// lines is a log that several goroutines write and read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.b.String(), s)
}

// withNext returns the set's migrations plus one.
func withNext(t *testing.T, set migrations.Set, sql string) fs.FS {
	t.Helper()
	all := fstest.MapFS{"99999_next.sql": {Data: []byte("-- +goose Up\n" + sql)}}
	names, err := fs.Glob(set.FS(), "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := fs.ReadFile(set.FS(), name)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = &fstest.MapFile{Data: data}
	}
	return all
}

// TestAMigrationLetsOthersPassWhileItWaitsForAReader runs a reader of a busy table, a migration
// that changes the table, and other readers and writers.
func TestAMigrationLetsOthersPassWhileItWaitsForAReader(t *testing.T) {
	t.Parallel()
	db, ctx := testkit.Postgres(t), t.Context()
	pool := db.Pool(t, postgres.RoleSystem)
	reader, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if err := reader.QueryRow(ctx, `SELECT pg_backend_pid() FROM (SELECT count(*) FROM follows) f`).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	var log lines
	next := withNext(t, migrations.Truth, `ALTER TABLE edges ADD COLUMN note text;`)
	migrated := make(chan error, 1)
	go func() {
		_, err := migrations.UpFrom(ctx, db.URL, migrations.Truth, next, "", slog.New(slog.NewTextHandler(&log, nil)))
		migrated <- err
	}()
	var slowest time.Duration
	for tries := 0; ; tries++ { // others read and write until the migration has retried twice
		start := time.Now()
		if _, err := pool.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, 1000000)`,
			fmt.Sprint(tries+1)); err != nil {
			t.Fatal(err)
		}
		slowest = max(slowest, time.Since(start))
		if log.has("retrying") && log.has(fmt.Sprintf("pid=%d", pid)) {
			break
		}
		if len(migrated) > 0 {
			t.Fatalf("the migration did not wait: %v", <-migrated)
		}
	}
	if most := migrations.LockTimeout + 20*time.Second; slowest > most {
		t.Errorf("a write took %s", slowest)
	}
	if err := reader.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-migrated; err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(ctx, `SELECT note FROM edges`); err != nil {
		t.Error(err)
	}
}

func TestAMigrationNamesTheSessionThatHoldsTheLockOfMigrations(t *testing.T) {
	t.Parallel()
	db, ctx := testkit.Postgres(t), t.Context()
	holder, err := pgx.Connect(ctx, db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = holder.Close(context.Background()) }()
	if _, err := holder.Exec(ctx, `SELECT pg_advisory_lock(4097083626)`); err != nil {
		t.Fatal(err)
	}
	var log lines
	migrated := make(chan error, 1)
	go func() {
		_, err := migrations.Up(ctx, db.URL, migrations.Truth, slog.New(slog.NewTextHandler(&log, nil)))
		migrated <- err
	}()
	testkit.Eventually(t, "the holder in the log", func() (bool, error) {
		return log.has(fmt.Sprintf("pid=%d", holder.PgConn().PID())) && log.has("query_s="), nil
	})
	if err := holder.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-migrated; err != nil {
		t.Error(err)
	}
}

func TestAFileWithoutATransactionRunsItsStatementsOneByOne(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	next := withNext(t, migrations.Truth, `-- +goose NO TRANSACTION
CREATE INDEX CONCURRENTLY IF NOT EXISTS of_the_test ON edges_follow (created_at);
DROP INDEX CONCURRENTLY IF EXISTS of_the_test;
`)
	for _, want := range []int{1, 0} {
		if n, err := migrations.UpFrom(t.Context(), db.URL, migrations.Truth, next, "", testkit.Logger(t)); n != want || err != nil {
			t.Errorf("%d applied, %v, want %d", n, err, want)
		}
	}
}

func TestAMigrationThatWaitsCanBeStopped(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	reader, err := db.Pool(t, postgres.RoleSystem).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := reader.Exec(t.Context(), `SELECT count(*) FROM follows`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*migrations.LockTimeout)
	defer cancel()
	_, err = migrations.UpFrom(ctx, db.URL, migrations.Truth,
		withNext(t, migrations.Truth, `ALTER TABLE edges ADD COLUMN note text;`), "", testkit.Logger(t))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want the deadline", err)
	}
	if err := reader.Rollback(t.Context()); err != nil {
		t.Error(err)
	}
}

var (
	changes = regexp.MustCompile(`(?is)\b(?:alter table(?: if exists)?(?: only)?|create (?:or replace )?(?:constraint )?trigger .*? on|` +
		`drop trigger .*? on|create policy .*? on|drop policy .*? on|drop table(?: if exists)?|truncate(?: table)?|` +
		`lock table|partition of)\s+([a-z_0-9.]+)`)
	plainIndex = regexp.MustCompile(`(?i)\b(?:create (?:unique )?index|drop index)\s+(?:if (?:not )?exists\s+)?(concurrently)?`)
	creates    = regexp.MustCompile(`(?i)\bcreate table (?:if not exists )?([a-z_0-9.]+)`)
	ownTimeout = regexp.MustCompile(`(?i)\bset (?:local |session )?(?:lock_timeout|statement_timeout)|` +
		`set_config\('(?:lock|statement)_timeout`)
	checkedAtEnd = regexp.MustCompile(`(?i)\badd (?:constraint \S+ )?(?:check|foreign key)[^;]*;`)
)

// contracted is a statement that removes something which the previous release does not use,
// according to the comment above it.
var contracted = regexp.MustCompile(`(?m)^-- contract: [^\n]+\n[^;]*;`)

var (
	functionBody = regexp.MustCompile(`(?is)\bcreate (?:or replace )?(?:function|procedure)\b[^;]*?\bas (\$[a-z_]*\$).*?\$[a-z_]*\$`)
	newColumn    = regexp.MustCompile(`(?i)\badd column\b`)
)

// narrowing are statements that would stop the previous release, each with the reason.
var narrowing = map[string]*regexp.Regexp{
	"the previous release uses what is dropped": regexp.MustCompile(
		`(?i)\bdrop (?:table|column|constraint|view|function|procedure|schema|type|sequence|policy|trigger|default|` +
			`not null|expression|identity|role)\b`),
	"the previous release uses the old name": regexp.MustCompile(`(?i)\b(?:rename|set schema)\b`),
	"the previous release reads and writes the old type": regexp.MustCompile(
		`(?i)\balter (?:column )?[a-z_"]+ (?:set data )?type\b|\balter type\b`),
	"the previous release writes NULL": regexp.MustCompile(`(?i)\bset not null\b`),
	"the previous release writes what the index refuses": regexp.MustCompile(
		`(?i)\bcreate unique index\b|\badd (?:constraint \S+ )?(?:unique|primary key|exclude)\b`),
	"the previous release needs its rights": regexp.MustCompile(`(?i)\brevoke\b`),
	"the previous release reads these rows": regexp.MustCompile(`(?i)\btruncate\b|\bdelete from\b`),
}

// narrows returns the parts of a migration that would stop the previous release, which runs beside
// this one and returns in a rollback.
func narrows(sql string) (found []string) {
	sql = contracted.ReplaceAllString(sql, "")
	sql = functionBody.ReplaceAllString(sql, "")
	sql = regexp.MustCompile(`(?m)--[^\n]*`).ReplaceAllString(sql, "")
	made := map[string]bool{}
	for _, m := range creates.FindAllStringSubmatch(sql, -1) {
		made[m[1]] = true
	}
	for _, statement := range strings.Split(sql, ";") {
		if m := changed.FindStringSubmatch(statement); m != nil && made[m[1]] {
			continue // a table of the same file
		}
		for why, is := range narrowing {
			if is.MatchString(statement) {
				found = append(found, fmt.Sprintf("%s: %s", strings.TrimSpace(statement), why))
			}
		}
		for _, column := range newColumn.Split(strings.ToLower(statement), -1)[1:] {
			if strings.Contains(column, "not null") && !strings.Contains(column, "default") && !strings.Contains(column, "generated") {
				found = append(found, fmt.Sprintf("%s: the previous release writes no such column, so it needs a default",
					strings.TrimSpace(statement)))
			}
		}
	}
	return found
}

var changed = regexp.MustCompile(`(?i)\b(?:alter table(?: if exists)?(?: only)?|create unique index.*? on)\s+([a-z_0-9.]+)`)

// faults returns the parts of a migration that would stop the fleet. It matches text, because
// migrations are short.
func faults(sql string) (found []string) {
	sql = regexp.MustCompile(`(?m)--[^\n]*`).ReplaceAllStringFunc(sql, func(c string) string {
		if strings.Contains(c, "+goose") {
			return c
		}
		return ""
	})
	sql = functionBody.ReplaceAllString(sql, "") // it runs later, with the locks and timeouts of its callers
	made := map[string]bool{}
	for _, m := range creates.FindAllStringSubmatch(sql, -1) {
		made[m[1]] = true
	}
	tables := map[string]bool{}
	for _, m := range changes.FindAllStringSubmatch(sql, -1) {
		if !made[m[1]] {
			tables[m[1]] = true
		}
	}
	if len(tables) > 1 {
		found = append(found, fmt.Sprintf("it changes %d tables that are in use, and holds the lock of one while it waits for the "+
			"next: a file for each", len(tables)))
	}
	for _, m := range plainIndex.FindAllStringSubmatch(sql, -1) {
		if m[1] == "" && len(made) == 0 {
			found = append(found, "an index of a table in use is made and dropped CONCURRENTLY, in a file with -- +goose NO TRANSACTION")
		}
	}
	if ownTimeout.MatchString(sql) {
		found = append(found, "it sets a timeout: Up does")
	}
	for _, c := range checkedAtEnd.FindAllString(sql, -1) {
		if len(made) == 0 && !strings.Contains(strings.ToLower(c), "not valid") {
			found = append(found, "a constraint is added NOT VALID, and validated by a file of its own")
		}
	}
	return found
}

// TestMigrationsAreSafeBesideTheFleet reads every file except the first of each set, which creates
// everything.
func TestMigrationsAreSafeBesideTheFleet(t *testing.T) {
	files, err := filepath.Glob("*/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasPrefix(filepath.Base(file), "00001_") {
			continue
		}
		data, err := fs.ReadFile(migrations.Set(filepath.Dir(file)).FS(), filepath.Base(file))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range append(faults(string(data)), narrows(string(data))...) {
			t.Errorf("%s: %s", file, f)
		}
	}
	for sql, want := range map[string]string{
		"ALTER TABLE edges ADD COLUMN a int; ALTER TABLE children ADD COLUMN a int;":           "2 tables",
		"ALTER TABLE edges ADD COLUMN a int; CREATE POLICY p ON outbox_messages USING (true);": "2 tables",
		"CREATE INDEX i ON edges (a);": "CONCURRENTLY",
		"DROP INDEX i;":                "CONCURRENTLY",
		"SET LOCAL lock_timeout = 0; ALTER TABLE edges ADD COLUMN a int;":                              "timeout",
		"ALTER TABLE edges ADD CONSTRAINT c CHECK (a > 0);":                                            "NOT VALID",
		"ALTER TABLE edges ADD CONSTRAINT c CHECK (a > 0) NOT VALID;":                                  "",
		"-- +goose NO TRANSACTION\nCREATE INDEX CONCURRENTLY IF NOT EXISTS i ON edges (a);":            "",
		"CREATE TABLE n (a int); CREATE INDEX i ON n (a); ALTER TABLE n ENABLE ROW LEVEL SECURITY;":    "",
		"CREATE TABLE n (a int); ALTER TABLE n ENABLE ROW LEVEL SECURITY; ALTER TABLE edges ADD b int": "",
		"ALTER TABLE edges ADD COLUMN a int; -- ALTER TABLE children ADD COLUMN a int":                 "",
	} {
		got := strings.Join(faults(sql), "; ")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", sql, got, want)
		}
	}
}

// TestAMigrationThatStopsTheReleaseBeforeIsFound has statements, each of which is checked as a
// whole migration.
func TestAMigrationThatStopsTheReleaseBeforeIsFound(t *testing.T) {
	for sql, want := range map[string]string{
		"ALTER TABLE edges ADD COLUMN a int;":                                          "",
		"ALTER TABLE edges ADD COLUMN a int NOT NULL DEFAULT 0;":                       "",
		"ALTER TABLE edges ADD COLUMN a int NOT NULL;":                                 "needs a default",
		"ALTER TABLE edges ADD COLUMN a int DEFAULT 0, ADD COLUMN b int NOT NULL;":     "needs a default",
		"ALTER TABLE edges DROP COLUMN version;":                                       "uses what is dropped",
		"ALTER TABLE edges ALTER COLUMN version DROP DEFAULT;":                         "uses what is dropped",
		"DROP TABLE edge_lists;":                                                       "uses what is dropped",
		"DROP FUNCTION f(int);":                                                        "uses what is dropped",
		"DROP POLICY p ON edges;":                                                      "uses what is dropped",
		"ALTER TABLE edges RENAME COLUMN version TO v;":                                "uses the old name",
		"ALTER TABLE edges RENAME TO relations;":                                       "uses the old name",
		"ALTER TABLE edges ALTER COLUMN version TYPE text;":                            "old type",
		"ALTER TABLE edges ALTER version SET DATA TYPE text;":                          "old type",
		"ALTER TYPE t ADD VALUE 'x';":                                                  "old type",
		"ALTER TABLE edges ALTER COLUMN a SET NOT NULL;":                               "writes NULL",
		"-- +goose NO TRANSACTION\nCREATE UNIQUE INDEX CONCURRENTLY i ON edges (a);":   "the index refuses",
		"ALTER TABLE edges ADD CONSTRAINT c UNIQUE USING INDEX i;":                     "the index refuses",
		"REVOKE SELECT ON edges FROM tidings_api;":                                     "needs its rights",
		"DELETE FROM edge_lists;":                                                      "reads these rows",
		"DROP INDEX CONCURRENTLY IF EXISTS i;":                                         "",
		"CREATE TABLE n (a int); ALTER TABLE n ALTER COLUMN a SET NOT NULL;":           "",
		"CREATE TABLE n (a int); CREATE UNIQUE INDEX i ON n (a);":                      "",
		"CREATE FUNCTION f() RETURNS void LANGUAGE sql AS $$ DELETE FROM n; $$;":       "",
		"DO $$ BEGIN DROP TABLE edge_lists; END $$;":                                   "uses what is dropped",
		"-- we DROP TABLE nothing\nALTER TABLE edges ADD COLUMN a int;":                "",
		"-- contract: unused since v1.2\nALTER TABLE edges DROP COLUMN note;":          "",
		"-- contract: unused\nALTER TABLE edges DROP COLUMN note;\nDROP VIEW follows;": "uses what is dropped",
	} {
		got := strings.Join(narrows(sql), "\n")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", sql, got, want)
		}
	}
}
