package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/proxy"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/migrations"
)

// The values of --broker-sync.
const (
	syncAlways  = "always"
	syncDefault = "default"
)

// tenant is the first tenant, and usually the only one.
const tenant = 1

// servers are a migrated database and a broker for one case or several, and the output of these.
type servers struct {
	url    string // for the owner of the tables
	broker broker.Config
	pool   *pgxpool.Pool // as the system role
	owner  *pgx.Conn     // as the owner of the tables, for one statement at a time
	js     jetstream.JetStream
	set    settings
	out    io.Writer
	say    func(format string, args ...any) // prints a line of progress to stderr; safe for concurrent use
	undo   []func() error                   // close calls them in reverse order
}

// onServers starts the servers, calls run, and stops the servers and all processes that run has
// started on them. brokerSync is syncAlways or syncDefault (two minutes). name is that of the case,
// or "" if there are several.
func onServers(cmd *cobra.Command, name, brokerSync string, run func(ctx context.Context, s *servers) error) (err error) {
	ctx, prefix, mu := cmd.Context(), "", sync.Mutex{}
	if name != "" {
		prefix = name + ": "
	}
	s := &servers{out: cmd.OutOrStdout(), set: settings{BrokerSync: brokerSync}, say: func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		cmd.PrintErrf(prefix+format+"\n", args...)
	}}
	defer func() {
		if err = errors.Join(err, s.close()); err != nil && name != "" {
			err = fmt.Errorf("%s: %w", name, err)
		}
	}()
	s.say("starting servers")
	if err := s.start(ctx); err != nil {
		return err
	}
	return run(ctx, s)
}

// onEach runs each of the cases on servers of its own.
func onEach(cmd *cobra.Command, brokerSync string, cases []string, run func(ctx context.Context, s *servers, name string) error) error {
	for _, name := range cases {
		if err := onServers(cmd, name, brokerSync, func(ctx context.Context, s *servers) error { return run(ctx, s, name) }); err != nil {
			return err
		}
	}
	return nil
}

func (s *servers) close() error {
	var errs []error
	for _, fn := range slices.Backward(s.undo) {
		errs = append(errs, fn())
	}
	return errors.Join(errs...)
}

func (s *servers) start(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "tidings-bench-")
	if err != nil {
		return err
	}
	s.undo = append(s.undo, func() error { return os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // if root runs this, PostgreSQL runs as another user and needs access
		return err
	}
	if s.set.FsyncUS, err = timeFsync(dir); err != nil {
		return err
	}
	if err := s.startPostgres(ctx, filepath.Join(dir, "postgres")); err != nil {
		return err
	}
	nats, err := natsserver.Start(natsserver.Config{Dir: filepath.Join(dir, "nats"), LazySync: s.set.BrokerSync != syncAlways,
		Log: slog.Default()})
	if err != nil {
		return err
	}
	s.undo = append(s.undo, func() error { nats.Shutdown(); return nil })
	s.broker = broker.Config{URL: nats.URL(), Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxAge: 24 * time.Hour,
		MaxBytes: -1, Timeout: 5 * time.Second, Ping: 2 * time.Second}
	nc, js, err := broker.Open(s.broker, "bench", slog.Default())
	if err != nil {
		return err
	}
	s.undo = append(s.undo, func() error { nc.Close(); return nil })
	s.js = js
	return nil
}

// startPostgres creates a migrated database, on a server of its own if DATABASE_URL is empty.
func (s *servers) startPostgres(ctx context.Context, dir string) error {
	admin := os.Getenv("DATABASE_URL")
	if admin == "" {
		pg, err := pglocal.Start(ctx, pglocal.Config{Dir: dir,
			Settings: map[string]string{"shared_buffers": "512MB", "max_wal_size": "4GB"}})
		if err != nil {
			return err
		}
		s.undo = append(s.undo, pg.Stop)
		admin = pg.URL("postgres")
	}
	if err := s.makeDatabase(ctx, admin); err != nil {
		return err
	}
	for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
		if _, err := migrations.Up(ctx, s.url, set, slog.Default()); err != nil {
			return err
		}
	}
	var err error
	if s.owner, err = s.connect(ctx); err != nil {
		return err
	}
	pg := postgres.Config{MaxConns: 32, ConnectTimeout: 5 * time.Second}
	if s.pool, err = postgres.Open(ctx, s.url, pg, postgres.RoleSystem, "bench"); err != nil {
		return err
	}
	s.undo = append(s.undo, func() error { s.pool.Close(); return nil })
	return s.pool.QueryRow(ctx, `SELECT current_setting('fsync'), current_setting('synchronous_commit'),
		current_setting('full_page_writes'), current_setting('shared_buffers')`).
		Scan(&s.set.Fsync, &s.set.SynchronousCommit, &s.set.FullPageWrites, &s.set.SharedBuffers)
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

// connect opens a connection as the owner of the tables. close closes it.
func (s *servers) connect(ctx context.Context) (*pgx.Conn, error) {
	conn, err := pgx.Connect(ctx, s.url)
	if err == nil {
		s.undo = append(s.undo, func() error { return conn.Close(context.WithoutCancel(ctx)) })
	}
	return conn, err
}

// exec runs statements as the owner of the tables, one after the other.
func (s *servers) exec(ctx context.Context, statements ...string) error {
	for _, sql := range statements {
		if _, err := s.owner.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// settings are the servers' settings, as the servers report them.
type settings struct {
	Fsync             string  `json:"fsync"`
	SynchronousCommit string  `json:"synchronous_commit"`
	FullPageWrites    string  `json:"full_page_writes"`
	SharedBuffers     string  `json:"shared_buffers"`
	BrokerSync        string  `json:"broker_sync"` // as requested
	FsyncUS           float64 `json:"fsync_us"`    // the median time of an fsync, in microseconds
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
	return median(times), nil
}

// declare creates the streams of some partitions. Without a relay nobody else creates them, and the
// API and consumers need them.
func (s *servers) declare(ctx context.Context, partitions int) error {
	for n := range partitions {
		p := broker.Partition{Number: n, FirstSlot: event.Slots * n / partitions, LastSlot: event.Slots*(n+1)/partitions - 1}
		if _, err := broker.Declare(ctx, s.js, s.broker, p, slog.Default()); err != nil {
			return err
		}
	}
	return nil
}

// checkRTT returns an error for a round trip that far does not offer.
func checkRTT(rtt time.Duration) error {
	if rtt != 0 && (rtt < 100*time.Microsecond || rtt > time.Second) {
		return fmt.Errorf("--rtt is %s: want 0, or 100us to 1s", rtt)
	}
	return nil
}

// far puts a network between both servers and the processes that start with the environment env: a
// message takes half of rtt each way. It returns the median time of a round trip to PostgreSQL, in
// milliseconds. With an rtt of 0 there is no network.
func (s *servers) far(ctx context.Context, rtt time.Duration) (env []string, ms *float64, err error) {
	if rtt == 0 {
		return nil, nil, nil
	}
	env = []string{"LEASE_TTL=15s"} // the default: leaseTTL is too short for the calls of a lease over a slow network
	for name, to := range map[string]string{"DATABASE_URL": s.url, "NATS_URL": s.broker.URL} {
		u, err := url.Parse(to)
		if err != nil {
			return nil, nil, err
		}
		p, err := proxy.Start(u.Host)
		if err != nil {
			return nil, nil, err
		}
		s.undo = append(s.undo, func() error { p.Close(); return nil })
		p.Slow(rtt / 2)
		u.Host = p.Addr()
		env = append(env, name+"="+u.String())
		if name != "DATABASE_URL" {
			continue
		}
		conn, err := pgx.Connect(ctx, u.String())
		if err != nil {
			return nil, nil, err
		}
		times := make([]float64, 21)
		for i := range times {
			start := time.Now()
			if err := conn.Ping(ctx); err != nil {
				return nil, nil, err
			}
			times[i] = time.Since(start).Seconds() * 1000
		}
		ms = ptr(round(median(times), 2))
		if err := conn.Close(ctx); err != nil {
			return nil, nil, err
		}
	}
	return env, ms, nil
}

// stored counts the messages on the streams, including the closing message of a closed stream.
func (s *servers) stored(ctx context.Context) (n int, err error) {
	streams, err := broker.Streams(ctx, s.js, s.broker)
	for _, stream := range streams {
		n += int(stream.Messages)
	}
	return n, err
}

// published reports whether every row of the outbox is marked as published. The floors spare it the
// published rows, of which a case may have millions.
func (s *servers) published(ctx context.Context) (all bool, err error) {
	err = s.pool.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM outbox_messages
		WHERE id > (SELECT min(floor_id) FROM outbox_partitions WHERE final_seq IS NULL) AND processed_at IS NULL)`).Scan(&all)
	return all, err
}

// hold runs the statements begin, which start a transaction, and keeps it open until the servers
// are closed.
func (s *servers) hold(ctx context.Context, begin string) error {
	conn, err := s.connect(ctx)
	if err == nil {
		_, err = conn.Exec(ctx, begin)
	}
	if err != nil {
		return fmt.Errorf("hold a transaction: %w", err)
	}
	return nil
}

// holdSnapshot keeps a snapshot open until the servers are closed. Vacuum cannot remove rows that
// the snapshot sees.
func (s *servers) holdSnapshot(ctx context.Context) error {
	return s.hold(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_partitions`)
}

// await calls done at intervals until it returns true or an error, ctx ends, or the time within has
// passed; 0 is no limit.
func await(ctx context.Context, interval, within time.Duration, done func() (bool, error)) error {
	for start := time.Now(); ; {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if within > 0 && time.Since(start) > within {
			return fmt.Errorf("not done after %s", within)
		}
		if err := work.Sleep(ctx, interval); err != nil {
			return err
		}
	}
}
