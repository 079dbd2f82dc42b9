package replay

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
)

// schemaPrefix is the beginning of the name of every schema of a replay.
const schemaPrefix = "tidings_replay_"

// lockSQL makes this replay the consumer's only one until the connection ends.
const lockSQL = `SELECT /* replay.lock */ pg_try_advisory_lock(hashtextextended('tidings replay ' || $1, 0))`

// unlockSQL frees the lock at once. The server would notice the end of the connection some time
// later.
const unlockSQL = `SELECT /* replay.unlock */ pg_advisory_unlock_all()`

// liveSQL finds the schema of the live tables.
const liveSQL = `
SELECT /* replay.live */ n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = to_regclass('consumer_offsets')`

// lock opens the connection for everything but the events, and locks out other replays of the same
// consumer.
func (r *replay) lock(ctx context.Context) error {
	cfg, err := postgres.ParseConfig(r.deps.URL)
	if err != nil {
		return err
	}
	cfg.ConnectTimeout = r.deps.Postgres.ConnectTimeout
	cfg.RuntimeParams["application_name"] = "tidings " + r.name + suffix
	cfg.RuntimeParams["timezone"] = "GMT"
	cfg.RuntimeParams["idle_in_transaction_session_timeout"] = "10000" // ms: a frozen replay must not block the live consumer for long
	if r.conn, err = pgx.ConnectConfig(ctx, cfg); err != nil {
		return fmt.Errorf("connect to the projections: %w", err)
	}
	var got bool
	err = r.conn.QueryRow(ctx, lockSQL, r.name).Scan(&got)
	if err == nil && !got {
		err = ErrRunning
	}
	if err == nil {
		err = r.conn.QueryRow(ctx, liveSQL).Scan(&r.live)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("lock %s for a replay: %w", r.name, err), r.unlock(context.WithoutCancel(ctx)))
	}
	id := strings.ToLower(rand.Text()[:8])
	r.shadow = schemaPrefix + r.name + "_" + id
	r.old = r.shadow + "_old"
	return nil
}

const closeTimeout = 5 * time.Second

func (r *replay) unlock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	_, _ = r.conn.Exec(ctx, unlockSQL) // a lost connection no longer has the lock
	if err := r.conn.Close(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("close the connection: %w", err)
	}
	return nil
}

// schemasSQL finds the schemas of the consumer's earlier replays. This replay has the lock, so none
// of them is in use.
const schemasSQL = `SELECT /* replay.schemas */ nspname::text FROM pg_namespace WHERE starts_with(nspname, $1) ORDER BY nspname`

// makeShadow creates the schema of the new tables with the migrations of the live ones.
func (r *replay) makeShadow(ctx context.Context) error {
	if err := r.drop(ctx); err != nil {
		return err
	}
	schema := pgx.Identifier{r.shadow}.Sanitize()
	for _, sql := range []string{`CREATE SCHEMA ` + schema, `GRANT USAGE ON SCHEMA ` + schema + ` TO ` + string(postgres.RoleSystem)} {
		if _, err := r.conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("create schema %s: %w", r.shadow, err)
		}
	}
	if _, err := migrations.UpIn(ctx, r.deps.URL, migrations.Projections, r.shadow, r.deps.Log); err != nil {
		return err
	}
	r.opts.at(ctx, "made")
	if len(r.p.Tables()) == 0 {
		return r.hideCopies(ctx)
	}
	return r.copyGrants(ctx)
}

// hideCopiesSQL drops the tables of the new schema except the consumer's own ones (consumer_*,
// lease*).
const hideCopiesSQL = `
SELECT /* replay.hide_copies */ format('DROP TABLE %I.%I', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') AND NOT c.relispartition
   AND NOT starts_with(c.relname::text, 'consumer_') AND NOT starts_with(c.relname::text, 'lease')
 UNION ALL
SELECT format('DROP SEQUENCE %I.%I', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relkind = 'S' AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('a', 'i'))`

// hideCopies leaves only offsets, dead letters and leases in the schema, because the live record is
// used.
func (r *replay) hideCopies(ctx context.Context) error { return r.runAll(ctx, hideCopiesSQL, r.shadow) }

// grantsSQL returns the live tables' grants as statements. An operator may have added grants to
// those of the migrations.
const grantsSQL = `
SELECT /* replay.grants */ format('GRANT %s ON %I.%I TO %s', a.privilege_type, $2::text, c.relname,
	CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(c.relacl) a
 WHERE n.nspname = $1 AND c.relname = ANY ($3::text[]) AND a.grantee <> c.relowner`

func (r *replay) copyGrants(ctx context.Context) error {
	return r.runAll(ctx, grantsSQL, r.live, r.shadow, r.p.Tables())
}

// runAll runs the statements that sql returns.
func (r *replay) runAll(ctx context.Context, sql string, args ...any) error {
	rows, _ := r.conn.Query(ctx, sql, args...)
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("prepare the new tables of %s: %w", r.name, err)
	}
	for _, s := range statements {
		if _, err := r.conn.Exec(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// vacuum gives the planner statistics of the new tables before readers use them.
func (r *replay) vacuum(ctx context.Context) error {
	for _, t := range r.p.Tables() {
		if _, err := r.conn.Exec(ctx, `VACUUM (ANALYZE) `+pgx.Identifier{r.shadow, t}.Sanitize()); err != nil {
			return fmt.Errorf("vacuum the new %s: %w", t, err)
		}
	}
	return nil
}

// drop drops the schemas of this replay and of interrupted ones. It does not drop old live tables
// on which an operator's object, for example a view, depends: the error names it.
func (r *replay) drop(ctx context.Context) error {
	if r.conn.IsClosed() {
		return nil // the next replay drops them
	}
	rows, _ := r.conn.Query(ctx, schemasSQL, schemaPrefix+r.name+"_")
	schemas, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("find the schemas of interrupted replays: %w", err)
	}
	for _, s := range schemas {
		if strings.HasSuffix(s, "_old") {
			err = r.dropOld(ctx, s)
		} else {
			_, err = r.conn.Exec(ctx, `DROP SCHEMA `+pgx.Identifier{s}.Sanitize()+` CASCADE`)
		}
		if err != nil {
			return fmt.Errorf("drop schema %s: %w", s, err)
		}
	}
	return nil
}

func (r *replay) dropOld(ctx context.Context, schema string) error {
	return pgx.BeginFunc(ctx, r.conn, func(tx pgx.Tx) error {
		for _, t := range r.p.Tables() {
			if _, err := tx.Exec(ctx, `DROP TABLE IF EXISTS `+pgx.Identifier{schema, t}.Sanitize()); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, `DROP SCHEMA `+pgx.Identifier{schema}.Sanitize())
		return err
	})
}

// runningSQL finds the consumers whose lock a session holds, and which have new tables: an erasure
// and a plan hold the lock, too, and an interrupted replay leaves its tables.
//
// Index: none, the locks and the schemas of the cluster.   Locks: none.
const runningSQL = `
SELECT /* replay.running */ n FROM unnest(@consumers::text[]) AS c(n)
 WHERE EXISTS (SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
                WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                  AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('tidings replay ' || n, 0))
   AND EXISTS (SELECT FROM pg_namespace WHERE starts_with(nspname, @prefix || n || '_'))
 ORDER BY n`

// Running returns the consumers of these that are being replayed, by whatever process.
func Running(ctx context.Context, projections *pgxpool.Pool, consumers []string) ([]string, error) {
	rows, _ := projections.Query(ctx, runningSQL, pgx.StrictNamedArgs{"consumers": consumers, "prefix": schemaPrefix})
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read which replays run: %w", err)
	}
	return all, nil
}
