package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
)

// servers are a migrated database and a broker for one case.
type servers struct {
	url     string // for the owner of the tables
	broker  broker.Config
	nats    *natsserver.Server
	pool    *pgxpool.Pool  // as the system role
	sync    string         // the requested sync of the broker: always or default
	fsyncUS float64        // the median time of an fsync, in microseconds
	undo    []func() error // close calls them in reverse order
}

func (s *servers) close() error {
	var errs []error
	for _, fn := range slices.Backward(s.undo) {
		errs = append(errs, fn())
	}
	return errors.Join(errs...)
}

// startServers starts the servers of a case. brokerSync is "always" or "default" (two minutes).
func startServers(ctx context.Context, brokerSync string, log *slog.Logger) (_ *servers, err error) {
	s := &servers{sync: brokerSync}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	dir, err := os.MkdirTemp("", "tidings-bench-")
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error { return os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // if root runs this, PostgreSQL runs as another user and needs access
		return nil, err
	}
	if s.fsyncUS, err = timeFsync(dir); err != nil {
		return nil, err
	}
	admin := os.Getenv("DATABASE_URL")
	if admin == "" {
		pg, err := pglocal.Start(ctx, pglocal.Config{Dir: filepath.Join(dir, "postgres"),
			Settings: map[string]string{"shared_buffers": "512MB", "max_wal_size": "4GB"}})
		if err != nil {
			return nil, err
		}
		s.undo = append(s.undo, pg.Stop)
		admin = pg.URL("postgres")
	}
	if err := s.makeDatabase(ctx, admin); err != nil {
		return nil, err
	}
	for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
		if _, err := migrations.Up(ctx, s.url, set, slog.Default()); err != nil {
			return nil, err
		}
	}
	pg := postgres.Config{MaxConns: 32, ConnectTimeout: 5 * time.Second}
	if s.pool, err = postgres.Open(ctx, s.url, pg, postgres.RoleSystem, "bench"); err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error { s.pool.Close(); return nil })
	server := natsserver.Config{Dir: filepath.Join(dir, "nats"), LazySync: brokerSync != syncAlways, Log: log}
	if s.nats, err = natsserver.Start(server); err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error { s.nats.Shutdown(); return nil })
	s.broker = broker.Config{URL: s.nats.URL(), Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxAge: 24 * time.Hour,
		MaxBytes: -1, Timeout: 5 * time.Second, Ping: 2 * time.Second}
	return s, nil
}

// makeDatabase creates a database beside the one of the URL admin. close drops it.
func (s *servers) makeDatabase(ctx context.Context, admin string) error {
	u, err := url.Parse(admin)
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	name := "tidings_bench_" + strings.ToLower(rand.Text()[:8])
	exec := func(ctx context.Context, sql string) error {
		conn, err := pgx.Connect(ctx, admin)
		if err != nil {
			return fmt.Errorf("connect for %q: %w", sql, err)
		}
		_, err = conn.Exec(ctx, sql)
		return errors.Join(err, conn.Close(ctx))
	}
	if err := exec(ctx, "CREATE DATABASE "+name); err != nil {
		return err
	}
	s.undo = append(s.undo, func() error { return exec(context.WithoutCancel(ctx), "DROP DATABASE "+name+" WITH (FORCE)") })
	u.Path = "/" + name
	s.url = u.String()
	return nil
}

// settings are the servers' settings, as the servers report them.
type settings struct {
	Fsync             string  `json:"fsync"`
	SynchronousCommit string  `json:"synchronous_commit"`
	FullPageWrites    string  `json:"full_page_writes"`
	SharedBuffers     string  `json:"shared_buffers"`
	BrokerSync        string  `json:"broker_sync"`
	FsyncUS           float64 `json:"fsync_us"`
}

func (s *servers) settings(ctx context.Context) (c settings, err error) {
	err = s.pool.QueryRow(ctx, `SELECT current_setting('fsync'), current_setting('synchronous_commit'),
		current_setting('full_page_writes'), current_setting('shared_buffers')`).
		Scan(&c.Fsync, &c.SynchronousCommit, &c.FullPageWrites, &c.SharedBuffers)
	c.BrokerSync, c.FsyncUS = s.sync, s.fsyncUS
	return c, err
}

// timeFsync returns the median of 51 appends of 4 KiB with fsync, in microseconds.
func timeFsync(dir string) (us float64, err error) {
	f, err := os.CreateTemp(dir, "fsync")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	block := make([]byte, 4096)
	times := make([]float64, 51)
	for i := range times {
		start := time.Now()
		if _, err := f.Write(block); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		times[i] = float64(time.Since(start).Microseconds())
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// stream returns a JetStream handle with a connection of its own, and a function that closes the
// connection.
func (s *servers) stream(ctx context.Context, log *slog.Logger) (jetstream.JetStream, func(), error) {
	nc, err := broker.Connect(s.broker, "bench", log)
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return js, nc.Close, nil
}

// holdSnapshot keeps a snapshot open until the servers are closed. Vacuum cannot remove rows that
// the snapshot sees.
func (s *servers) holdSnapshot(ctx context.Context) error {
	return s.hold(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_partitions`)
}

// hold runs the statements begin, which start a transaction, and keeps it open until the servers
// are closed.
func (s *servers) hold(ctx context.Context, begin string) error {
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return fmt.Errorf("hold a transaction: %w", err)
	}
	s.undo = append(s.undo, func() error { return conn.Close(context.WithoutCancel(ctx)) })
	if _, err := conn.Exec(ctx, begin); err != nil {
		return fmt.Errorf("hold a transaction: %w", err)
	}
	return nil
}
