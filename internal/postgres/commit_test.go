package postgres_test

import (
	"context"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// stalled is a database whose COMMITs wait for a standby that does not exist, until release.
type stalled struct {
	*testkit.DB
	owner *pgxpool.Pool
}

func stall(t *testing.T) stalled {
	t.Helper()
	db := testkit.PostgresProcess(t, "wal_level=replica", "max_wal_senders=2").DB(t)
	s := stalled{db, db.Pool(t, postgres.RoleOwner)}
	s.exec(t, `CREATE TABLE noted (n int PRIMARY KEY); GRANT ALL ON noted TO tidings_system`)
	s.exec(t, `CREATE TABLE probes (n int)`)
	s.exec(t, `ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
	s.reload(t, "nobody")
	testkit.Eventually(t, "the checkpointer to read the configuration", s.probe)
	return s
}

// probe reports whether a COMMIT waits. It does after the checkpointer, which reads the
// configuration later than a session may, has told all sessions in shared memory.
func (s stalled) probe() (waits bool, err error) {
	told := make(chan error, 1)
	go func() {
		_, err := s.owner.Exec(context.Background(), `INSERT INTO probes VALUES (1)`)
		told <- err
	}()
	for {
		select {
		case err := <-told:
			return waits, err
		case <-time.After(time.Millisecond):
		}
		var canceled int
		if err := s.owner.QueryRow(context.Background(), `SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity
			WHERE wait_event = 'SyncRep'`).Scan(&canceled); err != nil {
			return false, err
		}
		waits = waits || canceled > 0
	}
}

func (s stalled) release(t *testing.T) {
	s.exec(t, `ALTER SYSTEM RESET synchronous_standby_names`)
	s.reload(t, "")
}

func (s stalled) reload(t *testing.T, want string) {
	t.Helper()
	s.exec(t, `SELECT pg_reload_conf()`)
	testkit.Eventually(t, "the server to read its configuration", func() (bool, error) {
		var names string
		err := s.owner.QueryRow(t.Context(), `SELECT current_setting('synchronous_standby_names')`).Scan(&names)
		return names == want, err
	})
}

func (s stalled) exec(t *testing.T, sql string) {
	t.Helper()
	if _, err := s.owner.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func (s stalled) count(t *testing.T, sql string) (n int) {
	t.Helper()
	if err := s.owner.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

const waitingSQL = `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`

func (s stalled) awaitWaiting(t *testing.T, n int) {
	t.Helper()
	testkit.Eventually(t, "commits to wait for a standby", func() (bool, error) { return s.count(t, waitingSQL) == n, nil })
}

// note writes n.
func note(ctx context.Context, pool *pgxpool.Pool, n int) error {
	return postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO noted VALUES ($1)`, n)
		return err
	})
}

func TestACommitThatDidNotWaitForTheStandbyIsNoSuccess(t *testing.T) {
	s := stall(t)
	pool := s.Pool(t, postgres.RoleSystem)
	await := func() error {
		return pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error { return postgres.AwaitDurable(t.Context(), conn.Conn()) })
	}
	for what, write := range map[string]func() error{
		"a write": func() error { return note(t.Context(), pool, 1) },
		"what was seen": func() error {
			return postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return postgres.Durable(t.Context(), tx) })
		},
		"what a connection has seen": await,
		"a repeat": func() error {
			return postgres.WriteInTenants(t.Context(), pool, []int64{1, 2}, 0, func(pgx.Tx) (postgres.Landed, error) { return nil, nil })
		},
	} {
		told := make(chan error, 1)
		go func() { told <- write() }()
		s.awaitWaiting(t, 1)
		s.exec(t, `SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
		if err := <-told; !postgres.IsTransient(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	s.release(t)
	if err := errors.Join(note(t.Context(), pool, 2), await()); err != nil {
		t.Error(err) // the connections that warned are good again
	}
}

// A COMMIT whose caller stops waiting is left alone, so that the server does not show it before a
// standby has it.
func TestACommitIsNotCanceled(t *testing.T) {
	s := stall(t)
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	cert := testkit.NewCertificate(t)
	u.Host, u.RawQuery = encrypting(t, u.Host, cert), url.Values{"sslmode": {"verify-full"}, "sslrootcert": {cert.CertFile}}.Encode()
	n := 0
	for what, at := range map[string]string{"plain": s.URL, "encrypted": u.String()} {
		n++
		cfg := postgres.Config{MaxConns: 2, ConnectTimeout: 10 * time.Second}
		pool, err := postgres.Open(t.Context(), at, cfg, postgres.RoleSystem, "test")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := errors.New("the caller has gone")
		told := make(chan error, 1)
		go func() { told <- note(ctx, pool, n) }()
		s.awaitWaiting(t, n)
		cancel(gone)
		if err := <-told; !errors.Is(err, gone) {
			t.Errorf("%s: %v", what, err)
		}
		pool.Close() // waits for everything that pgx sends for a lost connection
		if waiting, shown := s.count(t, waitingSQL), s.count(t, `SELECT count(*) FROM noted`); waiting != n || shown != 0 {
			t.Errorf("%s: %d commits wait, and %d are shown early", what, waiting, shown)
		}
	}
	s.release(t)
	testkit.Eventually(t, "the commits to end",
		func() (bool, error) { return s.count(t, `SELECT count(*) FROM noted`) == n, nil })
}

// A statement before COMMIT is still canceled: its locks must not stay.
func TestAStatementIsCanceledWhenItsCallerStopsWaiting(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan error, 1)
	go func() {
		told <- postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT pg_sleep(3600)`)
			return err
		})
	}()
	sleeping := func() (n int, err error) {
		return n, owner.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE wait_event = 'PgSleep' AND datname = current_database()`).Scan(&n)
	}
	testkit.Eventually(t, "the statement to run", func() (bool, error) { n, err := sleeping(); return n == 1, err })
	cancel()
	if err := <-told; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	testkit.Eventually(t, "the statement to end", func() (bool, error) { n, err := sleeping(); return n == 0, err })
}

// While a standby is gone, clients retry. The pool must not fill the server with commits that wait.
func TestCommitsWithoutAnAnswerAreLimited(t *testing.T) {
	s := stall(t)
	cfg := postgres.Config{MaxConns: 3, ConnectTimeout: 10 * time.Second}
	pool, err := postgres.Open(t.Context(), s.URL, cfg, postgres.RoleSystem, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for n := range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		told := make(chan error, 1)
		go func() { told <- note(ctx, pool, n) }()
		s.awaitWaiting(t, n+1)
		cancel()
		if err := <-told; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if err := note(t.Context(), pool, 10); !errors.Is(err, postgres.ErrUnanswered) || !postgres.IsTransient(err) {
		t.Errorf("a further write: %v", err)
	}
	if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `SELECT`)
		return err
	}); err != nil {
		t.Errorf("a read: %v", err)
	}
	s.release(t)
	testkit.Eventually(t, "writes to be admitted", func() (bool, error) {
		err := note(t.Context(), pool, 11)
		return err == nil, err
	})
}
