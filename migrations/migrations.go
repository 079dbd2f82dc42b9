package migrations

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
)

//go:embed outbox/*.sql truth/*.sql consumers/*.sql projections/*.sql
var files embed.FS

// Set names one of the schemas. All may be in one database.
type Set string

// The sets. Truth includes Outbox, and Projections includes Consumers. Outbox alone is for a
// database that has events of others only. UpConsumers applies Consumers alone, for programs that
// build their own projections.
const (
	Outbox      Set = "outbox"
	Truth       Set = "truth"
	Projections Set = "projections"
	Consumers   Set = "consumers"
)

// ErrOutdated reports a database whose schema is older than this program. Run `tidings migrate`.
var ErrOutdated = errors.New("migrations: the schema is older than this program; run `tidings migrate`")

// included returns the set that s includes, or "".
func (s Set) included() Set {
	switch s {
	case Truth:
		return Outbox
	case Projections:
		return Consumers
	}
	return ""
}

// ErrElsewhere reports a connection string without the schema of the tables. Its text names the
// schema.
var ErrElsewhere = errors.New("migrations: the connection string lacks the schema of the tables")

func (s Set) table() string { return "tidings_" + string(s) + "_migrations" }

func (s Set) fs() fs.FS {
	sub, err := fs.Sub(files, string(s))
	if err != nil {
		panic(err) // the directory is embedded under this name
	}
	return sub
}

// Up applies the missing migrations of the set, after those of the set that it includes, under an
// advisory lock, and returns how many it applied. It makes the roles that are missing. It connects
// with the login of url, which must own the tables. If it may not make a role, Up returns a
// *NeedsError. If other sessions hold locks that it needs, it logs them and retries until ctx ends
// (locks.go).
func Up(ctx context.Context, url string, set Set, log *slog.Logger) (int, error) {
	return UpIn(ctx, url, set, "", log)
}

// UpIn is Up for tables in another schema, which it makes if it is missing; "" is the login's
// default schema.
func UpIn(ctx context.Context, url string, set Set, schema string, log *slog.Logger) (int, error) {
	n, err := upFrom(ctx, url, set, set.fs(), schema, log)
	if err != nil {
		return n, fmt.Errorf("migrate %s: %w", set, err)
	}
	return n, nil
}

func up(ctx context.Context, conn *pgx.Conn, set Set, files fs.FS, schema string) (n int, err error) {
	sets := []Set{set}
	if in := set.included(); in != "" {
		sets = []Set{in, set}
	}
	if err := prepare(ctx, conn, set.roles(), schema); err != nil {
		return 0, err
	}
	for _, s := range sets {
		of := s.fs()
		if s == set {
			of = files
		}
		applied, err := apply(ctx, conn, s, of)
		if n += applied; err != nil {
			return n, err
		}
	}
	if set != Outbox {
		if err := makeKinds(ctx, conn, set); err != nil {
			return n, err
		}
	}
	for _, s := range sets {
		if err := run(ctx, conn, fmt.Sprintf(rightsSQL, s.table(), list(set.readers()), list(set.roles()))); err != nil {
			return n, err
		}
	}
	return n, nil
}

// UpConsumers applies the missing migrations of the set Consumers with the login of pool, in the
// first schema of its search_path. It makes no roles and needs none. Several processes may call it
// at once.
func UpConsumers(ctx context.Context, pool *pgxpool.Pool) error {
	err := pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		_, err := apply(ctx, conn.Conn(), Consumers, Consumers.fs())
		return err
	})
	if err != nil {
		return fmt.Errorf("migrate %s: %w", Consumers, err)
	}
	return nil
}

// rightsSQL grants the rights that Check needs, and the use of the schema. If everybody may create
// objects in the schema (public, before PostgreSQL 15), it revokes that right, with which a login
// could put its own object before one that a function of the owner names. Rights on the database
// stay as they are: a temporary object comes last in the search_path of each function. Up runs it
// every time, because an administrator may have changed the rights. If the login does not own the
// schema, PostgreSQL warns and leaves its rights as they are. The lock serializes concurrent runs:
// PostgreSQL refuses the second of two concurrent changes.
const rightsSQL = `
DO $$ BEGIN
  PERFORM pg_advisory_xact_lock(x'74647267'::bigint); -- "tdrg"
  GRANT SELECT ON %[1]s TO %[2]s;
  EXECUTE format('REVOKE CREATE ON SCHEMA %%I FROM PUBLIC', current_schema());
  IF NOT (SELECT bool_and(has_schema_privilege(r, current_schema(), 'USAGE'))
            FROM unnest(string_to_array('%[3]s', ', ')) r) THEN
    EXECUTE format('GRANT USAGE ON SCHEMA %%I TO %[3]s', current_schema());
  END IF;
END $$`

// Latest returns the version of the set that this program needs.
func Latest(set Set) int64 {
	names, err := fs.Glob(set.fs(), "*.sql")
	if err != nil || len(names) == 0 {
		panic("migrations: none embedded for " + string(set))
	}
	return version(names[len(names)-1])
}

// elsewhereSQL finds the outbox in another schema than that of the connection string.
const elsewhereSQL = `
SELECT nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relname = $1 AND nspname <> coalesce(current_schema(), '') AND has_schema_privilege(n.oid, 'USAGE') ORDER BY 1 LIMIT 1`

// Check returns ErrOutdated unless the database has every migration of the set, and ErrElsewhere if
// it has the outbox only in a schema that the connection string does not name. It accepts a newer
// schema, because migrations expand first.
func Check(ctx context.Context, pool *pgxpool.Pool, set Set) error {
	if in := set.included(); in != "" {
		if err := Check(ctx, pool, in); err != nil {
			return err
		}
	}
	have, err := Version(ctx, pool, set)
	if postgres.IsPermission(err) { // the table exists before the first migration lets anybody read it
		return fmt.Errorf("%w: %w", ErrOutdated, err)
	}
	if err != nil {
		return err
	}
	if have == 0 && set == Outbox {
		var schema string
		switch err := pool.QueryRow(ctx, elsewhereSQL, set.table()).Scan(&schema); {
		case err == nil:
			return fmt.Errorf("%w: add search_path=%s to it, or run `tidings migrate` for tables of its own",
				ErrElsewhere, url.QueryEscape(schema))
		case !errors.Is(err, pgx.ErrNoRows):
			return fmt.Errorf("look for the tables of the %s: %w", set, err)
		}
	}
	if want := Latest(set); have < want {
		return fmt.Errorf("%s is at version %d, this program needs %d: %w", set, have, want, ErrOutdated)
	}
	return nil
}

// IsOutboxAlone reports whether the database has the outbox without the rest of the truth. While
// the first migration of the truth runs, it returns false to a pool that acts as a role of Tidings.
func IsOutboxAlone(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
	have, err := Version(ctx, pool, Outbox)
	if postgres.IsPermission(err) { // as in Check
		return false, nil
	}
	if err != nil || have == 0 {
		return false, err
	}
	truth, err := Version(ctx, pool, Truth)
	if postgres.IsPermission(err) {
		return false, nil
	}
	return truth == 0, err
}

// Version returns the last migration of the set that the database has, or 0.
func Version(ctx context.Context, pool *pgxpool.Pool, set Set) (have int64, err error) {
	err = pool.QueryRow(ctx, `SELECT coalesce(max(version_id), 0) FROM `+set.table()+` WHERE is_applied`).Scan(&have)
	if err != nil && !postgres.IsUndefinedTable(err) {
		return 0, fmt.Errorf("read the schema version of the %s: %w", set, err)
	}
	return have, nil
}

const (
	awaitInterval = time.Second      // between two checks
	awaitRemind   = 30 * time.Second // between two equal log lines
)

// Await waits until the database has every migration of the set, or ctx ends, and then returns nil.
// While it waits it logs why: the database is unavailable, for example during a restart or a
// failover, or its schema is older than this program. So a binary of a new release may start before
// `tidings migrate` has run, also on a server without the roles. It returns an error if the
// database refuses the login, or if the schema of Consumers is older, because the program itself
// migrates it (UpConsumers).
func Await(ctx context.Context, pool *pgxpool.Pool, set Set, log *slog.Logger) error {
	log = log.With("component", "migrations")
	var said string
	var at time.Time
	for {
		err := Check(ctx, pool, set)
		if ctx.Err() != nil || err == nil {
			return nil
		}
		outdated := set != Consumers && (errors.Is(err, ErrOutdated) || errors.Is(err, postgres.ErrUnmigrated))
		if !outdated && (!postgres.IsTransient(err) || postgres.IsLogin(err)) {
			return err
		}
		if err.Error() != said || time.Since(at) >= awaitRemind {
			log.WarnContext(ctx, "waiting for the database", "set", set, "err", err)
			said, at = err.Error(), time.Now()
		}
		work.Sleep(ctx, awaitInterval)
	}
}

// Ready returns a check for /readyz. It fails until the database has every migration of the set.
func Ready(pool *pgxpool.Pool, set Set) func(context.Context) error {
	var has atomic.Bool
	return func(ctx context.Context) error {
		if has.Load() {
			return nil
		}
		err := Check(ctx, pool, set)
		has.Store(err == nil)
		return err
	}
}

// Hash identifies the schemas that Up makes: equal hashes mean equal schemas. Test databases are
// cloned by it.
func Hash() string {
	h := sha256.New()
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := files.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%s\n%d\n", path, len(b))
		h.Write(b)
		return nil
	})
	if err != nil {
		panic(err) // embedded files are readable
	}
	builtin, err := json.Marshal(kinds.Builtin())
	if err != nil {
		panic(err) // it was parsed from a file
	}
	h.Write(builtin)
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// makeKinds makes the missing tables of every kind in force. In a new database these are the
// built-in kinds.
func makeKinds(ctx context.Context, conn *pgx.Conn, set Set) error {
	in := catalog.Truth
	if set == Projections {
		in = catalog.Projections
	}
	all := kinds.Builtin()
	var added []byte
	err := conn.QueryRow(ctx, in.StoredSQL()).Scan(&added)
	if err == nil {
		if all, err = all.ExtendJSON(added); err != nil {
			return fmt.Errorf("this release cannot use the kinds in force: %w", err)
		}
	} else if !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("read the kinds in force: %w", err)
	}
	for _, s := range in.MakeTables(all) {
		if _, err := conn.Exec(ctx, s.SQL, s.Args...); err != nil {
			return fmt.Errorf("%s: %w", s.What, err)
		}
	}
	return nil
}
