package testkit

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/pglocal"
)

// Pair is a private PostgreSQL server of a test with a synchronous standby, both as processes of
// this machine.
type Pair struct {
	*PG            // the primary, also after the promotion
	Standby *PG    // refuses writes until FailOver
	Link    *Proxy // carries the replication. While it is stalled or cut, no COMMIT of the primary ends
}

// PostgresPair starts a primary and a standby that has everything that the primary has answered.
// The settings ("name=value") go to both. It needs local binaries, and ignores TEST_DATABASE_URL
// and TEST_SERVERS.
func PostgresPair(t testing.TB, settings ...string) *Pair {
	t.Helper()
	skipIfShort(t)
	s, err := startLocal(append([]string{"wal_level=replica", "max_wal_senders=4", "wal_keep_size=256MB", "hot_standby=on"},
		settings...)...)
	if err != nil {
		t.Fatalf("a primary for the test: %v", err)
	}
	stopAtEnd(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	p := &Pair{PG: &PG{s: s}}
	standby, err := p.clone(ctx, t)
	if err != nil {
		t.Fatalf("a standby for the test: %v", err)
	}
	stopAtEnd(t, standby)
	p.Standby = &PG{s: standby}
	for _, sql := range []string{`ALTER SYSTEM SET synchronous_standby_names = '*'`, `SELECT pg_reload_conf()`} {
		check(t, "make the standby synchronous", execute(ctx, s, sql))
	}
	p.awaitSync(t)
	return p
}

func stopAtEnd(t testing.TB, s server) {
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Errorf("stop the test's PostgreSQL: %v", err)
		}
	})
}

// clone starts a standby from a copy of the stopped primary, and the primary again.
func (p *Pair) clone(ctx context.Context, t testing.TB) (server, error) {
	primary := p.s.(*local)
	base, err := url.Parse(primary.url("postgres"))
	if err != nil {
		return nil, err
	}
	dir, err := scratch("standby")
	if err != nil {
		return nil, err
	}
	if err := errors.Join(primary.s.Stop(), copyTree(ctx, primary.cfg.Dir, dir), os.Remove(filepath.Join(dir, "port"))); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "data", "standby.signal"), nil, 0o644); err != nil {
		return nil, err
	}
	if err := primary.restart(ctx); err != nil {
		return nil, err
	}
	p.Link = NewProxy(t, base.Host)
	host, port, _ := strings.Cut(p.Link.Addr(), ":")
	password, _ := base.User.Password()
	cfg := pglocal.Config{Dir: dir, Unsafe: true, Settings: map[string]string{"wal_retrieve_retry_interval": "100ms",
		"primary_conninfo": fmt.Sprintf("host=%s port=%s user=postgres password=%s sslmode=disable", host, port, password)}}
	for name, value := range primary.cfg.Settings {
		cfg.Settings[name] = value
	}
	s, err := pglocal.Start(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &local{cfg: cfg, s: s}, nil
}

// awaitSync waits until the standby is connected and the primary waits for it.
func (p *Pair) awaitSync(t testing.TB) {
	t.Helper()
	Eventually(t, "the primary to have a synchronous standby", func() (is bool, err error) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		err = admin(ctx, p.s, func(conn *pgx.Conn) error {
			return conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')
				AND state = 'streaming' AND flush_lsn >= pg_current_wal_flush_lsn())`).Scan(&is)
		})
		return is, err
	})
}

// Async makes the primary answer without waiting for the standby.
func (p *Pair) Async(t testing.TB) {
	t.Helper()
	for _, sql := range []string{`ALTER SYSTEM SET synchronous_standby_names = ''`, `SELECT pg_reload_conf()`} {
		check(t, "make the standby asynchronous", execute(context.Background(), p.s, sql))
	}
}

// FailOver kills the primary and promotes the standby, which then waits for no other standby. It
// returns db on the new primary.
func (p *Pair) FailOver(t testing.TB, db *DB) *DB {
	t.Helper()
	p.PG.Kill(t)
	return p.Promote(t, db)
}

// Promote is FailOver that leaves the primary as it is. No COMMIT on it ends, so the end of the
// test kills it.
func (p *Pair) Promote(t testing.TB, db *DB) *DB {
	t.Helper()
	t.Cleanup(func() { p.PG.Kill(t) })
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	check(t, "promote the standby", execute(ctx, p.Standby.s, `SELECT pg_promote(true, 100)`))
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	return &DB{URL: p.Standby.s.url(strings.TrimPrefix(u.Path, "/"))}
}
