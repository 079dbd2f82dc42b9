package catalog

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
)

// RefusedError reports changes that would give existing rows another meaning. Apply has changed
// nothing.
type RefusedError struct{ Refused []Refusal }

// Refusal is a refused change. Rows names the rows that the change would give another meaning.
type Refusal struct {
	kinds.Change
	Rows string
}

func (e *RefusedError) Error() string {
	var all []string
	for _, r := range e.Refused {
		all = append(all, fmt.Sprintf("%s: %s: refused, because %s. Instead, %s", r.Path, r.What, r.Rows, r.Instead))
	}
	return strings.Join(all, "\n")
}

// Databases are the pools of both databases, which may be one. Their logins act as tidings_system.
type Databases struct{ Truth, Projections *pgxpool.Pool }

// Request has the kinds to apply.
type Request struct {
	Kinds  *kinds.Set // with the built-in ones
	Actor  string
	Reason string
	DryRun bool // report the changes without making them
}

// Applied is the result of Apply. With DryRun it is the result that Apply would have.
type Applied struct {
	Changes []kinds.Change `json:"changes"`
	Version int64          `json:"version"` // of the kinds in force; 0 if no kinds were ever applied
}

// Apply waits turnTimeout for another Apply, and lockTimeout for a lock that writers hold. It holds
// locks for idleTimeout at most while it waits for the other database.
const (
	turnTimeout = time.Minute
	lockTimeout = 5 * time.Second
	idleTimeout = 30 * time.Second
)

// Apply puts kinds in force, beside the built-in ones. It removes kinds that the set does not have.
//
//	truth        ── lock ── check ── tables ────────────────── ids, object ── commit
//	projections                        └── tables ── object ── commit ──┘
//
// The lock keeps other calls out until the end. A call that dies has changed nothing, or only the
// projections. Kinds that only the projections have are without effect, and the same call again
// completes them. Errors are *RefusedError, and errors of the databases, after which the call may
// be repeated.
func Apply(ctx context.Context, d Databases, r Request) (Applied, error) {
	return apply(ctx, d, r, func(string) error { return nil })
}

// errDry ends the transaction of a dry run without a commit.
var errDry = errors.New("dry run")

// apply calls step before each step. An error of step ends apply there, as a crash would.
func apply(ctx context.Context, d Databases, r Request, step func(name string) error) (Applied, error) {
	var done Applied
	to := r.Kinds
	// The transaction may run again. It then finds the changes to the projections already made.
	err := postgres.InTx(ctx, d.Truth, pgx.TxOptions{}, func(tx pgx.Tx) error {
		now, err := Truth.begin(ctx, tx, r)
		if err != nil {
			return err
		}
		if err := freeNames(ctx, tx, now.set, to); err != nil {
			return err
		}
		done = Applied{Changes: kinds.Changes(now.set, to), Version: now.version}
		if err := d.refuse(ctx, tx, done.Changes); err != nil {
			return err
		}
		if err := step("truth tables"); err != nil {
			return err
		}
		if err := Truth.recreateTables(ctx, tx, now.set, to); err != nil {
			return err
		}
		if err := step("projections"); err != nil {
			return err
		}
		if err := d.applyProjections(ctx, r, to); err != nil {
			return err
		}
		if err := step("truth object"); err != nil {
			return err
		}
		// Writers of a kind with other ids wait from here on, so not for the projections.
		if err := run(ctx, tx, Truth.narrow(to)); err != nil {
			return err
		}
		if done.Version, err = Truth.put(ctx, tx, r, now, to); err != nil {
			return err
		}
		if r.DryRun {
			done.Version = now.version
			return errDry
		}
		return step("truth commit")
	})
	if errors.Is(err, errDry) {
		err = nil
	}
	return done, err
}

func (d Databases) applyProjections(ctx context.Context, r Request, to *kinds.Set) error {
	err := postgres.InTx(ctx, d.Projections, pgx.TxOptions{}, func(tx pgx.Tx) error {
		now, err := Projections.begin(ctx, tx, r)
		if err != nil {
			return err
		}
		if err := Projections.recreateTables(ctx, tx, now.set, to); err != nil {
			return err
		}
		if _, err := Projections.put(ctx, tx, r, now, to); err != nil {
			return err
		}
		if r.DryRun {
			return errDry
		}
		return nil
	})
	if errors.Is(err, errDry) {
		return nil
	}
	return err
}

// begin waits for its turn and returns the kinds in force in that database.
func (w Database) begin(ctx context.Context, tx pgx.Tx, r Request) (inForce, error) {
	timeouts := func(lock time.Duration) string {
		return fmt.Sprintf(`SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = %d; `+
			`SET LOCAL idle_in_transaction_session_timeout = %d`, lock.Milliseconds(), idleTimeout.Milliseconds())
	}
	if _, err := tx.Exec(ctx, timeouts(turnTimeout)); err != nil {
		return inForce{}, fmt.Errorf("apply kinds: %w", err)
	}
	if err := w.table.Lock(ctx, tx, []versioned.Change[stored]{{TenantID: installation, Object: stored{Name: objectName},
		By: r.Actor}}); err != nil {
		return inForce{}, fmt.Errorf("apply kinds: wait for another call that applies kinds: %w", err)
	}
	if _, err := tx.Exec(ctx, timeouts(lockTimeout)); err != nil {
		return inForce{}, fmt.Errorf("apply kinds: %w", err)
	}
	return w.load(ctx, tx, nil)
}

// namesLockSQL makes calls that give away names of aggregate types wait for each other. Locks:
// "tdnm".
const namesLockSQL = `SELECT /* kinds.lock_names */ pg_advisory_xact_lock(x'74646e6d'::bigint)`

// LockNames makes its callers wait for each other until their transactions end: each checks that
// nobody has the names of aggregate types that it gives away.
func LockNames(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, namesLockSQL); err != nil {
		return fmt.Errorf("wait for another call that gives away names of aggregate types: %w", err)
	}
	return nil
}

// upstreamsSQL returns upstreams that have one of the names, removed ones too. Index:
// upstreams_head_idx. Locks: none.
const upstreamsSQL = `
SELECT /* kinds.upstreams */ name FROM upstreams
 WHERE tenant_id = 0 AND name = ANY(@names) AND version_state = 'LATEST' ORDER BY name`

// freeNames refuses new kinds with the name of an upstream.
func freeNames(ctx context.Context, tx pgx.Tx, from, to *kinds.Set) error {
	if err := LockNames(ctx, tx); err != nil {
		return err
	}
	added := slices.DeleteFunc(slices.AppendSeq(slices.Collect(maps.Keys(to.Edges)), maps.Keys(to.Children)), from.Has)
	rows, _ := tx.Query(ctx, upstreamsSQL, pgx.StrictNamedArgs{"names": added})
	taken, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("search for upstreams: %w", err)
	}
	if len(taken) > 0 {
		return fmt.Errorf("the upstream %s has events of that name: choose another name for the kind", strings.Join(taken, ", "))
	}
	return nil
}

// recreateTables drops the tables of kinds that were removed or whose tables change, and makes all
// missing tables.
func (w Database) recreateTables(ctx context.Context, tx pgx.Tx, from, to *kinds.Set) error {
	var all []Statement
	dropped := map[string]bool{}
	for _, c := range kinds.Changes(from, to) {
		if !c.Rebuilt || dropped[c.Kind] {
			continue
		}
		dropped[c.Kind] = true
		plural := from.Children[c.Kind].Plural
		if c.Edges {
			plural = from.Edges[c.Kind].Plural
		}
		all = append(all, w.drop(c.Kind, plural)...)
	}
	return run(ctx, tx, append(all, w.makeTables(to)...))
}

func run(ctx context.Context, tx pgx.Tx, all []Statement) error {
	for _, s := range all {
		if _, err := tx.Exec(ctx, s.SQL, s.Args...); err != nil {
			return fmt.Errorf("%s: %w", s.What, err)
		}
	}
	return nil
}

// put stores the set, unless it is already stored, and returns the version of the stored object.
func (w Database) put(ctx context.Context, tx pgx.Tx, r Request, now inForce, to *kinds.Set) (int64, error) {
	was, err1 := json.Marshal(now.set.Without(kinds.Builtin()))
	text, err2 := json.Marshal(to.Without(kinds.Builtin()))
	if err := errors.Join(err1, err2); err != nil {
		return 0, fmt.Errorf("encode kinds: %w", err)
	}
	if bytes.Equal(was, text) {
		return now.version, nil
	}
	ids, err := w.table.Upsert(ctx, tx, []versioned.Change[stored]{{TenantID: installation, By: r.Actor,
		Object: stored{Name: objectName, Kinds: text, Reason: r.Reason}}})
	if err != nil {
		return 0, fmt.Errorf("write kinds: %w", err)
	}
	return ids[0], nil
}

// refuse returns a *RefusedError if a change would give existing rows another meaning. It reads
// until it finds one row of the kind.
func (d Databases) refuse(ctx context.Context, truth pgx.Tx, changes []kinds.Change) error {
	var refused []Refusal
	rows := map[string]string{} // the table that has rows, by kind
	for _, c := range changes {
		if c.Kind == "" {
			continue
		}
		if c.Gone != nil {
			used, err := inUse(ctx, truth, c)
			if err != nil {
				return err
			}
			if used != "" {
				refused = append(refused, Refusal{c, fmt.Sprintf("%s rows have the value %s", c.Kind, used)})
			}
			continue
		}
		where, known := rows[c.Kind]
		if !known {
			var err error
			if where, err = anyRows(ctx, truth, Truth.rows, c.Kind); err == nil && where == "" {
				err = postgres.InTx(ctx, d.Projections, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
					where, err = anyRows(ctx, tx, Projections.rows, c.Kind)
					return err
				})
			}
			if err != nil {
				return err
			}
			rows[c.Kind] = where
		}
		if where != "" {
			refused = append(refused, Refusal{c, fmt.Sprintf("%s has rows in %s", c.Kind, where)})
		}
	}
	if len(refused) > 0 {
		return &RefusedError{refused}
	}
	return nil
}

// tableRows names a table, and the column that has the kind.
type tableRows struct{ table, column string }

func anyRows(ctx context.Context, tx pgx.Tx, tables []tableRows, kind string) (table string, err error) {
	for _, t := range tables {
		var found bool
		// Index: none begins with the kind; a scan of one partition of edges or children. Locks:
		// none.
		sql := fmt.Sprintf(`SELECT /* kinds.rows */ EXISTS (SELECT FROM %s WHERE %s = $1)`, t.table, t.column)
		if err := tx.QueryRow(ctx, sql, kind).Scan(&found); err != nil {
			return "", fmt.Errorf("search for rows of %s in %s: %w", kind, t.table, err)
		}
		if found {
			return t.table, nil
		}
	}
	return "", nil
}

// inUseSQL returns one of the values @gone that a row has. Index: none, a scan of one partition.
// Locks: none.
const inUseSQL = `
SELECT /* kinds.in_use */ attributes ->> @attribute FROM %s
 WHERE kind = @kind AND attributes ->> @attribute = ANY(@gone) LIMIT 1`

func inUse(ctx context.Context, tx pgx.Tx, c kinds.Change) (string, error) {
	tables := []string{"children", "children_archive"}
	if c.Edges {
		tables = []string{"edges"}
	}
	for _, table := range tables {
		var value string
		err := tx.QueryRow(ctx, fmt.Sprintf(inUseSQL, table),
			pgx.StrictNamedArgs{"kind": c.Kind, "attribute": c.Attribute, "gone": c.Gone}).Scan(&value)
		if err == nil {
			return value, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return "", fmt.Errorf("search for values of %s.%s: %w", c.Kind, c.Attribute, err)
		}
	}
	return "", nil
}

// Version is one version of the kinds that are not built in.
type Version struct {
	Version int64
	By      string
	At      time.Time
	Reason  string
	Changes []kinds.Change // from the previous version
}

// History returns every applied version of the kinds, oldest first.
func History(ctx context.Context, truth *pgxpool.Pool) (all []Version, err error) {
	err = postgres.InTx(ctx, truth, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		before, after := kinds.Builtin(), int64(0)
		all = nil
		for {
			const page = 100
			some, err := Truth.table.History(ctx, tx, installation, versioned.Key{objectName}, after, page)
			if err != nil {
				return err
			}
			for _, v := range some {
				set, err := kinds.Builtin().ExtendJSON(v.Object.Kinds)
				if err != nil { // an older release wrote them
					return fmt.Errorf("the kinds of version %d are not valid in this release: %w", v.Metadata.VersionID, err)
				}
				all = append(all, Version{v.Metadata.VersionID, v.Metadata.CreatedBy, v.Metadata.LastUpdateTime,
					v.Object.Reason, kinds.Changes(before, set)})
				before, after = set, v.Position
			}
			if len(some) < page {
				return nil
			}
		}
	})
	return slices.Clip(all), err
}
