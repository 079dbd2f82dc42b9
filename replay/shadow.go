package replay

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
)

// schemaPrefix begins the name of every schema of a replay.
const schemaPrefix = "tidings_replay_"

// lockSQL makes this the consumer's only replay for as long as the connection lives.
const lockSQL = `SELECT /* replay.lock */ pg_try_advisory_lock(hashtextextended('tidings replay ' || $1, 0))`

// unlockSQL frees the lock before the connection ends, which the server notices some time after we are gone.
const unlockSQL = `SELECT /* replay.unlock */ pg_advisory_unlock_all()`

// liveSQL finds the schema of the live tables.
const liveSQL = `
SELECT /* replay.live */ n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('consumer_offsets')`

// lock opens the connection that everything but the events goes through, and keeps others from replaying the same consumer.
func (r *replay) lock(ctx context.Context) error {
	cfg, err := postgres.ParseConfig(r.deps.URL)
	if err != nil {
		return err
	}
	cfg.ConnectTimeout = r.deps.Postgres.ConnectTimeout
	cfg.RuntimeParams["application_name"] = "tidings " + r.name + suffix
	cfg.RuntimeParams["timezone"] = "GMT"
	cfg.RuntimeParams["idle_in_transaction_session_timeout"] = "10000" // ms: a frozen replay must not hold up the live consumer for long
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
	_, _ = r.conn.Exec(ctx, unlockSQL) // a connection that is lost has lost the lock too
	if err := r.conn.Close(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("close the connection: %w", err)
	}
	return nil
}

// schemasSQL finds what replays of the consumer have left. Nobody else has any: the lock is ours.
const schemasSQL = `SELECT /* replay.schemas */ nspname::text FROM pg_namespace WHERE starts_with(nspname, $1) ORDER BY nspname`

// makeShadow makes the schema of the new tables by the migrations that made the live ones.
func (r *replay) makeShadow(ctx context.Context) error {
	if err := r.drop(ctx); err != nil {
		return err
	}
	schema := pgx.Identifier{r.shadow}.Sanitize()
	for _, sql := range []string{`CREATE SCHEMA ` + schema, `GRANT USAGE ON SCHEMA ` + schema + ` TO ` + string(postgres.RoleSystem)} {
		if _, err := r.conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("make schema %s: %w", r.shadow, err)
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

// hideCopiesSQL drops the new schema's tables but those that a consumer keeps for itself: consumer_offsets, leases and the like.
const hideCopiesSQL = `
SELECT /* replay.hide_copies */ format('DROP TABLE %I.%I', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') AND NOT c.relispartition
   AND NOT starts_with(c.relname::text, 'consumer_') AND NOT starts_with(c.relname::text, 'lease')
 UNION ALL
SELECT format('DROP SEQUENCE %I.%I', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relkind = 'S' AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('a', 'i'))`

// hideCopies leaves only offsets, dead letters and leases in the schema: the record itself is the live one.
func (r *replay) hideCopies(ctx context.Context) error { return r.runAll(ctx, hideCopiesSQL, r.shadow) }

// grantsSQL writes the grants that the live tables have; an operator may have added some to those of the migrations.
const grantsSQL = `
SELECT /* replay.grants */ format('GRANT %s ON %I.%I TO %s', a.privilege_type, $2::text, c.relname, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
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

// vacuum gives the planner what it needs to know of the new tables, before readers come.
func (r *replay) vacuum(ctx context.Context) error {
	for _, t := range r.p.Tables() {
		if _, err := r.conn.Exec(ctx, `VACUUM (ANALYZE) `+pgx.Identifier{r.shadow, t}.Sanitize()); err != nil {
			return fmt.Errorf("vacuum the new %s: %w", t, err)
		}
	}
	return nil
}

// drop drops the schemas of this replay and of interrupted ones. Old live tables that something of the operator's depends on,
// such as a view, are not dropped: the error names it.
func (r *replay) drop(ctx context.Context) error {
	if r.conn.IsClosed() {
		return nil // the next replay drops them
	}
	rows, _ := r.conn.Query(ctx, schemasSQL, schemaPrefix+r.name+"_")
	schemas, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("look for what an interrupted replay left: %w", err)
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
