package testkit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
)

// startTimeout limits the start of a server and the creation of a template, on a busy machine.
const startTimeout = 2 * time.Minute

// process is a server that a test may disturb.
type process interface {
	stop() error // ends and removes it
	kill() error // like a crash; returns when it has ended
	freeze() error
	thaw() error
	restart(ctx context.Context) error // ends it at once if it runs, and starts it with the same data and port
}

// server is a PostgreSQL server of any origin.
type server interface {
	process
	url(database string) string                    // for a login that may create databases and roles
	signalBackend(pid int, s syscall.Signal) error // sends it to one process, by the server's own id of it
}

// DB is a private database of a test, with all migrations of the truth and the projections. The end
// of the test drops it.
type DB struct {
	URL string // for the owner's login
}

// Postgres returns a private database on a server that the tests of this binary share.
func Postgres(t testing.TB) *DB {
	t.Helper()
	return cloneDB(t, sharedServer(t))
}

func sharedServer(t testing.TB) server {
	t.Helper()
	skipIfShort(t)
	shared.pgOnce.Do(func() { shared.pgErr = share() })
	if shared.pgErr != nil {
		t.Fatalf("PostgreSQL for the tests: %v", shared.pgErr)
	}
	return shared.pg
}

// share finds the server that the tests of this binary share.
func share() error {
	s, err := findServer()
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(context.Background(), s.url("postgres"))
	if err != nil {
		return errors.Join(err, s.stop())
	}
	shared.mu.Lock()
	defer shared.mu.Unlock()
	shared.pg, shared.admin = s, pool
	return nil
}

// kept returns the pool of the server's own database, or nil if it is not the shared server.
func kept(s server) *pgxpool.Pool {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if s == shared.pg {
		return shared.admin
	}
	return nil
}

// EmptyPostgres returns a private database without tables, on the server of Postgres. That has the
// roles of the migrations.
func EmptyPostgres(t testing.TB) *DB {
	t.Helper()
	s := sharedServer(t)
	return newDB(t, s, func(ctx context.Context, conn *pgx.Conn) (string, error) {
		_, err := ensureTemplate(ctx, s, conn)
		return "template0", err
	})
}

// Through returns the same database as clients reach it over p.
func (db *DB) Through(t testing.TB, p *Proxy) *DB {
	t.Helper()
	return &DB{URL: withHost(t, db.URL, p)}
}

// In returns the same database with the search_path of a schema.
func (db *DB) In(t testing.TB, schema string) *DB {
	t.Helper()
	u, err := url.Parse(db.URL)
	check(t, "read the database's URL", err)
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	return &DB{URL: u.String()}
}

// Pool returns a pool that acts as role. The end of the test closes it. The server does not end its
// idle transactions, because a test may hold one for as long as a busy machine needs for the rest.
func (db *DB) Pool(t testing.TB, role postgres.Role) *pgxpool.Pool {
	t.Helper()
	cfg := postgres.Config{MaxConns: 16, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute}
	pool, err := postgres.OpenWith(context.Background(), db.URL, cfg, role, "test",
		map[string]string{"idle_in_transaction_session_timeout": "0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// cachedSQL counts the pages of this database in the server's memory, by relation.
const cachedSQL = `
SELECT c.relname, count(*) FROM pg_buffercache b
  JOIN pg_class c ON b.relfilenode = pg_relation_filenode(c.oid)
  AND b.reldatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
 WHERE b.relforknumber = 0 GROUP BY 1`

// CachedPages returns how many pages of each table and index are in the server's memory. Some time
// after its start these are the pages that were read or written since. It needs the extension
// pg_buffercache.
func (db *DB) CachedPages(t testing.TB) map[string]int64 {
	t.Helper()
	owner := db.Pool(t, postgres.RoleOwner)
	_, err := owner.Exec(context.Background(), `CREATE EXTENSION IF NOT EXISTS pg_buffercache`)
	check(t, "create pg_buffercache", err)
	all := make(map[string]int64)
	var name string
	var n int64
	rows, _ := owner.Query(context.Background(), cachedSQL)
	_, err = pgx.ForEachRow(rows, []any{&name, &n}, func() error { all[name] = n; return nil })
	check(t, "count the pages in the server's memory", err)
	return all
}

// PG is a private PostgreSQL server of a test, as processes of this machine or in a container. It
// ends with the test.
type PG struct{ s server }

// PostgresProcess starts a server that the test may kill, freeze and restart. It does not sync to
// disk. Because the machine does not fail, a kill loses no committed data. The settings
// ("name=value") go to the server. It ignores TEST_DATABASE_URL.
func PostgresProcess(t testing.TB, settings ...string) *PG {
	t.Helper()
	skipIfShort(t)
	s, err := startServer(settings...)
	if err != nil {
		t.Fatalf("PostgreSQL for the test: %v", err)
	}
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Errorf("stop the test's PostgreSQL: %v", err)
		}
	})
	return &PG{s: s}
}

// DB returns a new migrated database on this server.
func (p *PG) DB(t testing.TB) *DB {
	t.Helper()
	return cloneDB(t, p.s)
}

// Kill ends the server and all its processes with SIGKILL, and returns when they have ended.
func (p *PG) Kill(t testing.TB) {
	t.Helper()
	check(t, "kill PostgreSQL", p.s.kill())
}

// KillBackend ends one process of the server with SIGKILL. The server then ends all others,
// recovers and continues.
func (p *PG) KillBackend(t testing.TB, pid int) {
	t.Helper()
	check(t, "kill a process of PostgreSQL", p.s.signalBackend(pid, syscall.SIGKILL))
}

// HoldWAL freezes the WAL writer until the server is killed. That process writes the commits that
// do not wait for the disk. So a crash loses these commits, unless a later commit waits for the
// disk. db is on this server.
func (p *PG) HoldWAL(t testing.TB, db *DB) {
	t.Helper()
	var pid int
	err := db.Pool(t, postgres.RoleOwner).QueryRow(context.Background(),
		`SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`).Scan(&pid)
	check(t, "find the WAL writer", err)
	if err == nil {
		check(t, "stop the WAL writer", p.s.signalBackend(pid, syscall.SIGSTOP))
	}
}

// Freeze stops the server and all its processes with SIGSTOP: connections stay open, and it answers
// nothing. The end of the test thaws it.
func (p *PG) Freeze(t testing.TB) {
	t.Helper()
	t.Cleanup(func() { check(t, "thaw PostgreSQL", p.s.thaw()) }) // registered first, because the freeze may fail half-way
	check(t, "freeze PostgreSQL", p.s.freeze())
}

// Thaw undoes Freeze. On a running server it does nothing.
func (p *PG) Thaw(t testing.TB) {
	t.Helper()
	check(t, "thaw PostgreSQL", p.s.thaw())
}

// Restart ends the server at once if it runs or is frozen, and starts it with the same data and
// port.
func (p *PG) Restart(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	check(t, "restart PostgreSQL", p.s.restart(ctx))
}

func check(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

func skipIfShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a server")
	}
}

// findServer returns the server that the tests of this binary share.
func findServer() (server, error) {
	if u := os.Getenv("TEST_DATABASE_URL"); u != "" {
		return newExternal(u)
	}
	return startServer()
}

// startServer starts a private server: from local binaries, or else in Docker.
func startServer(settings ...string) (server, error) {
	if forceDocker() {
		return startDockerPostgres(settings...)
	}
	s, err := startLocal(settings...)
	if errors.Is(err, pglocal.ErrNoBinaries) {
		s, derr := startDockerPostgres(settings...)
		if derr == nil {
			return s, nil
		}
		why, _, _ := strings.Cut(derr.Error(), "\n") // the error of the engine's client has several lines
		return nil, fmt.Errorf("%w (tests also use TEST_DATABASE_URL, or Docker, which is unavailable here: %s)", err, why)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// external is the server of TEST_DATABASE_URL.
type external struct {
	externalProcess
	base *url.URL
}

func newExternal(u string) (server, error) {
	base, err := url.Parse(u)
	if err != nil || !strings.HasPrefix(base.Scheme, "postgres") {
		return nil, errors.New("TEST_DATABASE_URL is not a URL: want postgres://user:password@host:port/database")
	}
	return external{base: base}, nil
}

func (e external) url(database string) string {
	u := *e.base
	if database != "postgres" { // for administration use the given database, which exists
		u.Path = "/" + database
	}
	return u.String()
}

var errNotOurs = errors.New("tests cannot disturb the server of TEST_DATABASE_URL")

// externalProcess is a process that tests must not disturb.
type externalProcess struct{}

func (externalProcess) stop() error                             { return nil }
func (externalProcess) kill() error                             { return errNotOurs }
func (externalProcess) freeze() error                           { return errNotOurs }
func (externalProcess) thaw() error                             { return errNotOurs }
func (externalProcess) restart(context.Context) error           { return errNotOurs }
func (externalProcess) signalBackend(int, syscall.Signal) error { return errNotOurs }

// templateLock keeps test binaries that share a server from creating the same template at the same
// time. The number is arbitrary.
const templateLock = 4_771_207_533

// ensureTemplate returns the name of a database with all migrations, and creates it if the server
// has none. It marks the database as a template only when it is complete.
func ensureTemplate(ctx context.Context, s server, conn *pgx.Conn) (name string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("create the template: %w", err)
		}
	}()
	name = "tidings_template_" + migrations.Hash()
	if _, kept := s.(*local); kept { // its files are kept by the hash
		name = databaseName
	}
	if whole, err := isTemplate(ctx, conn, name); err != nil || whole {
		return name, err
	}
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, int64(templateLock)); err != nil {
		return "", err
	}
	defer func() {
		_, uerr := conn.Exec(context.WithoutCancel(ctx), `SELECT pg_advisory_unlock($1)`, int64(templateLock))
		err = errors.Join(err, uerr)
	}()
	if whole, err := isTemplate(ctx, conn, name); err != nil || whole { // another binary has created it meanwhile
		return name, err
	}
	quoted := pgx.Identifier{name}.Sanitize()
	for _, sql := range []string{`DROP DATABASE IF EXISTS ` + quoted + ` WITH (FORCE)`, `CREATE DATABASE ` + quoted} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return "", err
		}
	}
	for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
		if _, err := migrations.Up(ctx, s.url(name), set, slog.Default()); err != nil {
			return "", err
		}
	}
	_, err = conn.Exec(ctx, `ALTER DATABASE `+quoted+` IS_TEMPLATE true`)
	return name, err
}

func isTemplate(ctx context.Context, conn *pgx.Conn, name string) (is bool, err error) {
	err = conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1 AND datistemplate)`, name).Scan(&is)
	return is, err
}

func cloneDB(t testing.TB, s server) *DB {
	t.Helper()
	return newDB(t, s, func(ctx context.Context, conn *pgx.Conn) (string, error) {
		return ensureTemplate(ctx, s, conn)
	})
}

// newDB returns a new database of s, a copy of the one that from names.
func newDB(t testing.TB, s server, from func(context.Context, *pgx.Conn) (string, error)) *DB {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	name := "tidings_test_" + strings.ToLower(rand.Text()[:12])
	if err := admin(ctx, s, func(conn *pgx.Conn) error {
		template, err := from(ctx, conn)
		if err != nil {
			return err
		}
		return clone(ctx, conn, template, name)
	}); err != nil {
		t.Fatalf("create the test's database: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := execute(ctx, s, `DROP DATABASE IF EXISTS `+name+` WITH (FORCE)`); err != nil && !ended(s) {
			t.Errorf("drop the test's database: %v", err)
		}
	})
	return &DB{URL: s.url(name)}
}

// clone copies files. That is half the work of the default strategy, which writes each page to the
// WAL.
func clone(ctx context.Context, conn *pgx.Conn, template, name string) error {
	_, err := conn.Exec(ctx, `CREATE DATABASE `+name+` TEMPLATE `+pgx.Identifier{template}.Sanitize()+` STRATEGY file_copy`)
	return err
}

// ended reports whether the test has killed the server. Its databases are then deleted with its
// directory.
func ended(s server) bool {
	e, ok := s.(interface{ ended() bool })
	return ok && e.ended()
}

// admin runs fn on a connection to the server's own database. The shared server's connections are
// kept, because each test needs two, and a new one costs as much as ten statements.
func admin(ctx context.Context, s server, fn func(*pgx.Conn) error) error {
	if pool := kept(s); pool != nil {
		return pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error { return fn(c.Conn()) })
	}
	conn, err := pgx.Connect(ctx, s.url("postgres"))
	if err != nil {
		return err
	}
	return errors.Join(fn(conn), conn.Close(ctx))
}

func execute(ctx context.Context, s server, sql string) error {
	return admin(ctx, s, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, sql)
		return err
	})
}

// copying serializes copies: two copies of one database would disturb each other.
var copying sync.Mutex

// Copy returns a copy of the database in its current state, like a backup. It ends the connections
// to the database, and refuses new ones meanwhile.
func (db *DB) Copy(t testing.TB) *DB {
	t.Helper()
	copying.Lock()
	defer copying.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	from, name := strings.TrimPrefix(u.Path, "/"), "tidings_test_"+strings.ToLower(rand.Text()[:12])
	terminate := `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '` + from + `'`
	if err := admin(ctx, shared.pg, func(conn *pgx.Conn) error {
		for _, sql := range []string{
			`ALTER DATABASE ` + from + ` ALLOW_CONNECTIONS false`,
			terminate,
			`CREATE DATABASE ` + name + ` TEMPLATE ` + from + ` STRATEGY file_copy`,
			`ALTER DATABASE ` + from + ` ALLOW_CONNECTIONS true`,
		} {
			_, err := conn.Exec(ctx, sql)
			if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "55006" { // object_in_use: by an older connection attempt
				if _, err = conn.Exec(ctx, terminate); err == nil {
					_, err = conn.Exec(ctx, sql)
				}
			}
			if err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatalf("copy a database: %v", err)
	}
	t.Cleanup(func() {
		if err := execute(context.Background(), shared.pg, `DROP DATABASE IF EXISTS `+name+` WITH (FORCE)`); err != nil &&
			!ended(shared.pg) {
			t.Errorf("drop a copy of a database: %v", err)
		}
	})
	return &DB{URL: shared.pg.url(name)}
}
