package migrations

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
)

// A statement that changes a table waits for all users of the table, and all later users wait for
// the statement. So it waits for at most lockTimeout, lets the others pass, and retries.
const (
	lockTimeout   = 500 * time.Millisecond
	retryInterval = time.Second
	watchInterval = 100 * time.Millisecond
	patience      = 3 * time.Second // with another migration, before it is named
	application   = "tidings migrate"
)

// upFrom is UpIn with the migrations of files.
func upFrom(ctx context.Context, url string, set Set, files fs.FS, schema string, log *slog.Logger) (applied int, err error) {
	cfg, err := postgres.ParseConfig(url)
	if err != nil {
		return 0, err
	}
	cfg.RuntimeParams["application_name"] = application
	cfg.RuntimeParams["lock_timeout"] = fmt.Sprint(lockTimeout.Milliseconds())
	if schema != "" {
		cfg.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	log = log.With("component", "migrations")
	for {
		watching, stop := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			watch(watching, cfg, conn.PgConn().PID(), log)
		}()
		n, err := up(ctx, conn, set, files, schema)
		stop()
		<-done
		if applied += n; !postgres.IsLockTimeout(err) {
			return applied, err
		}
		log.WarnContext(ctx, "a migration waited for a lock, retrying", "set", set, "waited", lockTimeout.String(),
			"next", retryInterval.String())
		if work.Sleep(ctx, retryInterval) != nil {
			return applied, fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// blockersSQL reads the sessions for whose locks the migration waits. With @all it includes the one
// that holds the lock of all migrations. It cuts their statements at the first quoted value, which
// may be a password or a comment's text.
const blockersSQL = `
SELECT b.pid, coalesce(b.usename::text, ''), coalesce(b.application_name, ''), coalesce(b.state, ''),
       coalesce(extract(epoch FROM clock_timestamp() - b.xact_start), 0)::float8,
       coalesce(extract(epoch FROM clock_timestamp() - b.query_start), 0)::float8,
       left(regexp_replace(regexp_replace(coalesce(b.query, ''), '[''$].*', '...'), '\s+', ' ', 'g'), 100)
  FROM pg_stat_activity b
 WHERE b.application_name <> @application
   AND b.pid IN (SELECT unnest(pg_blocking_pids(m.pid)) FROM pg_stat_activity m
                  WHERE m.application_name = @application AND m.datname = current_database())
    OR @all AND b.pid <> @own AND b.datname = current_database()
   AND b.pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid = 0
                    AND objid::bigint = ` + lockKey + `)`

// watch logs the sessions for which the migration in the session own waits, each once, until ctx
// ends. It connects only after watchInterval.
func watch(ctx context.Context, cfg *pgx.ConnConfig, own uint32, log *slog.Logger) {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close(context.WithoutCancel(ctx)) // it only reads
		}
	}()
	seen, began := map[int32]bool{}, time.Now()
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if conn == nil || conn.IsClosed() {
			var err error
			if conn, err = pgx.ConnectConfig(ctx, cfg); err != nil {
				conn = nil
				continue // the migration itself reports this error
			}
		}
		var (
			pid                       int32
			user, program, doing, sql string
			transaction, statement    float64
		)
		rows, _ := conn.Query(ctx, blockersSQL, pgx.StrictNamedArgs{"application": application, "own": int64(own),
			"all": time.Since(began) >= patience})
		// The migration itself reports a failure.
		_, _ = pgx.ForEachRow(rows, []any{&pid, &user, &program, &doing, &transaction, &statement, &sql}, func() error {
			if !seen[pid] {
				seen[pid] = true
				log.WarnContext(ctx, "the migration waits for another session; pg_terminate_backend(pid) would end it",
					"pid", pid, "user", user, "application", program, "state", doing, "transaction_s", transaction, "query_s", statement,
					"query", sql)
			}
			return nil
		})
	}
}
