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

// withNext returns the set's migrations and one more.
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

// TestAMigrationLetsOthersPassWhileItWaitsForAReader has a reader of a busy table, a migration that changes the table, and everybody else.
func TestAMigrationLetsOthersPassWhileItWaitsForAReader(t *testing.T) {
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
	for tries := 0; ; tries++ { // others read and write all the while, until the migration has given way twice
		start := time.Now()
		if _, err := pool.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, 1000000)`, tries+1); err != nil {
			t.Fatal(err)
		}
		slowest = max(slowest, time.Since(start))
		if log.has("trying again") && log.has(fmt.Sprintf("pid=%d", pid)) {
			break
		}
		if len(migrated) > 0 {
			t.Fatalf("the migration did not wait: %v", <-migrated)
		}
	}
	if most := migrations.LockTimeout + 5*time.Second; slowest > most {
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

func TestAMigrationThatWaitsCanBeStopped(t *testing.T) {
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
	_, err = migrations.UpFrom(ctx, db.URL, migrations.Truth, withNext(t, migrations.Truth, `ALTER TABLE edges ADD COLUMN note text;`), "", testkit.Logger(t))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want the deadline", err)
	}
	if err := reader.Rollback(t.Context()); err != nil {
		t.Error(err)
	}
}

var (
	changes      = regexp.MustCompile(`(?is)\b(?:alter table(?: if exists)?(?: only)?|create (?:or replace )?(?:constraint )?trigger .*? on|drop trigger .*? on|create policy .*? on|drop policy .*? on|drop table(?: if exists)?|truncate(?: table)?|lock table|partition of)\s+([a-z_0-9.]+)`)
	plainIndex   = regexp.MustCompile(`(?i)\b(?:create (?:unique )?index|drop index)\s+(?:if (?:not )?exists\s+)?(concurrently)?`)
	creates      = regexp.MustCompile(`(?i)\bcreate table (?:if not exists )?([a-z_0-9.]+)`)
	ownTimeout   = regexp.MustCompile(`(?i)\bset (?:local |session )?(?:lock_timeout|statement_timeout)|set_config\('(?:lock|statement)_timeout`)
	checkedAtEnd = regexp.MustCompile(`(?i)\badd (?:constraint \S+ )?(?:check|foreign key)[^;]*;`)
)

// faults returns what in a migration would stop the fleet. It goes by text: a migration is short.
func faults(sql string) (found []string) {
	sql = regexp.MustCompile(`(?m)--[^\n]*`).ReplaceAllStringFunc(sql, func(c string) string {
		if strings.Contains(c, "+goose") {
			return c
		}
		return ""
	})
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
		found = append(found, fmt.Sprintf("it changes %d tables that are in use, and holds the lock of one while it waits for the next: a file for each", len(tables)))
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

// TestMigrationsAreSafeBesideTheFleet reads every file but the first of each set, which makes everything from nothing.
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
		for _, f := range faults(string(data)) {
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
