package kinds

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/versioned"
)

// FileError reports a file that is not one of kinds. Its text has a line for each thing that is wrong.
type FileError struct{ Err error }

func (e *FileError) Error() string { return e.Err.Error() }
func (e *FileError) Unwrap() error { return e.Err }

// RefusedError reports changes that would reinterpret rows. Nothing was changed.
type RefusedError struct{ Refused []Refusal }

// Refusal is a change that is refused: where the rows are that it would reinterpret.
type Refusal struct {
	Change
	Rows string
}

func (e *RefusedError) Error() string {
	var all []string
	for _, r := range e.Refused {
		all = append(all, fmt.Sprintf("%s: %s: refused, because %s. Instead: %s", r.Path, r.What, r.Rows, r.Instead))
	}
	return strings.Join(all, "\n")
}

// Databases are the pools of both databases, which may be one. Their logins act as tidings_system.
type Databases struct{ Truth, Projections *pgxpool.Pool }

// Request is a file to apply.
type Request struct {
	File   []byte
	Actor  string
	Reason string
	DryRun bool // find out what would happen, and change nothing
}

// Applied is what Apply did, or would do.
type Applied struct {
	Changes []Change `json:"changes"`
	Version int64    `json:"version"` // of the kinds in force; 0 when none were ever applied
}

// How long Apply waits for another Apply, and for a lock that writers hold; how long it may keep locks while the other database answers.
const (
	turnTimeout = time.Minute
	lockTimeout = 5 * time.Second
	idleTimeout = 30 * time.Second
)

// Apply makes the kinds of a file, beside those that are built in, the kinds in force. What the file leaves out is removed.
//
//	truth        ── lock ── check ── tables ────────────────────── object ── commit
//	projections                        └── tables ── object ── commit ──┘
//
// The lock keeps other calls out until the end. A call that dies changed nothing, or the projections alone, where kinds that nobody writes are of no
// effect: the same call completes it. Errors: *FileError, *RefusedError, and those of the databases, after which it may be repeated.
func Apply(ctx context.Context, d Databases, r Request) (Applied, error) {
	return apply(ctx, d, r, func(string) error { return nil })
}

// errDry ends a transaction that is not to commit.
var errDry = errors.New("dry run")

// apply calls step before each step; its error ends apply there, as a crash would.
func apply(ctx context.Context, d Databases, r Request, step func(name string) error) (Applied, error) {
	var done Applied
	to, err := Builtin().Extend(r.File)
	if err != nil {
		return done, &FileError{err}
	}
	// The transaction may run again: what it did to the projections by then, it finds done.
	err = postgres.InTx(ctx, d.Truth, pgx.TxOptions{}, func(tx pgx.Tx) error {
		now, err := Truth.begin(ctx, tx, r)
		if err != nil {
			return err
		}
		done = Applied{Changes: Changes(now.set, to), Version: now.version}
		if err := d.refuse(ctx, tx, done.Changes); err != nil {
			return err
		}
		if err := step("truth tables"); err != nil {
			return err
		}
		if err := Truth.remake(ctx, tx, now.set, to); err != nil {
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

func (d Databases) applyProjections(ctx context.Context, r Request, to *Set) error {
	err := postgres.InTx(ctx, d.Projections, pgx.TxOptions{}, func(tx pgx.Tx) error {
		now, err := Projections.begin(ctx, tx, r)
		if err != nil {
			return err
		}
		if err := Projections.remake(ctx, tx, now.set, to); err != nil {
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

// begin waits for its turn and returns what is in force in that database.
func (w Database) begin(ctx context.Context, tx pgx.Tx, r Request) (inForce, error) {
	timeouts := func(lock time.Duration) string {
		return fmt.Sprintf(`SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = %d; SET LOCAL idle_in_transaction_session_timeout = %d`, lock.Milliseconds(), idleTimeout.Milliseconds())
	}
	if _, err := tx.Exec(ctx, timeouts(turnTimeout)); err != nil {
		return inForce{}, fmt.Errorf("apply kinds: %w", err)
	}
	if err := w.table.Lock(ctx, tx, []versioned.Change[stored]{{TenantID: installation, Object: stored{Name: objectName}, By: r.Actor}}); err != nil {
		return inForce{}, fmt.Errorf("apply kinds: wait for another that applies kinds: %w", err)
	}
	if _, err := tx.Exec(ctx, timeouts(lockTimeout)); err != nil {
		return inForce{}, fmt.Errorf("apply kinds: %w", err)
	}
	return w.load(ctx, tx, nil)
}

// remake drops the tables of kinds that are gone or have other tables now, and makes those that are missing.
func (w Database) remake(ctx context.Context, tx pgx.Tx, from, to *Set) error {
	var all []Statement
	dropped := map[string]bool{}
	for _, c := range Changes(from, to) {
		if !c.rebuilt || dropped[c.Kind] {
			continue
		}
		dropped[c.Kind] = true
		plural := from.Children[c.Kind].Plural
		if c.edges {
			plural = from.Edges[c.Kind].Plural
		}
		all = append(all, w.drop(c.Kind, plural)...)
	}
	for _, s := range append(all, w.MakeTables(to)...) {
		if _, err := tx.Exec(ctx, s.SQL, s.Args...); err != nil {
			return fmt.Errorf("%s: %w", s.What, err)
		}
	}
	return nil
}

// put makes the set the object, if it is another, and returns the object's version.
func (w Database) put(ctx context.Context, tx pgx.Tx, r Request, now inForce, to *Set) (int64, error) {
	added := to.Without(Builtin())
	if same(now.set.Without(Builtin()), added) {
		return now.version, nil
	}
	text, err := json.Marshal(added)
	if err != nil {
		return 0, fmt.Errorf("encode kinds: %w", err)
	}
	ids, err := w.table.Upsert(ctx, tx, []versioned.Change[stored]{{TenantID: installation, By: r.Actor, Object: stored{Name: objectName, Kinds: text, Reason: r.Reason}}})
	if err != nil {
		return 0, fmt.Errorf("write kinds: %w", err)
	}
	return ids[0], nil
}

// refuse returns a *RefusedError if any change would reinterpret rows. It reads as much as it takes to find one row of the kind.
func (d Databases) refuse(ctx context.Context, truth pgx.Tx, changes []Change) error {
	var refused []Refusal
	rows := map[string]string{} // by kind: where there are any
	for _, c := range changes {
		if c.Kind == "" {
			continue
		}
		if c.gone != nil {
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

// tableRows are the rows of a kind in one table.
type tableRows struct{ table, column string }

func anyRows(ctx context.Context, tx pgx.Tx, tables []tableRows, kind string) (table string, err error) {
	for _, t := range tables {
		var found bool
		// Index: none begins with the kind; of edges and children, one partition.   Locks: none.
		sql := fmt.Sprintf(`SELECT /* kinds.rows */ EXISTS (SELECT FROM %s WHERE %s = $1)`, t.table, t.column)
		if err := tx.QueryRow(ctx, sql, kind).Scan(&found); err != nil {
			return "", fmt.Errorf("look for rows of %s in %s: %w", kind, t.table, err)
		}
		if found {
			return t.table, nil
		}
	}
	return "", nil
}

// inUseSQL returns one of the values @gone that a row has. Index: none; one partition.   Locks: none.
const inUseSQL = `SELECT /* kinds.in_use */ attributes ->> @attribute FROM %s WHERE kind = @kind AND attributes ->> @attribute = ANY(@gone) LIMIT 1`

func inUse(ctx context.Context, tx pgx.Tx, c Change) (string, error) {
	tables := []string{"children", "children_archive"}
	if c.edges {
		tables = []string{"edges"}
	}
	for _, table := range tables {
		var value string
		err := tx.QueryRow(ctx, fmt.Sprintf(inUseSQL, table), pgx.StrictNamedArgs{"kind": c.Kind, "attribute": c.attr, "gone": c.gone}).Scan(&value)
		if err == nil {
			return value, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return "", fmt.Errorf("look for values of %s.%s: %w", c.Kind, c.attr, err)
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
	Changes []Change // from the one before
}

// History returns every version that was applied, the oldest first.
func History(ctx context.Context, truth *pgxpool.Pool) (all []Version, err error) {
	err = postgres.InTx(ctx, truth, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		before, after := Builtin(), int64(0)
		all = nil
		for {
			const page = 100
			some, err := Truth.table.History(ctx, tx, installation, versioned.Key{objectName}, after, page)
			if err != nil {
				return err
			}
			for _, v := range some {
				set, err := Builtin().Extend(v.Object.Kinds)
				if err != nil { // an older release's
					return fmt.Errorf("the kinds of version %d do not go with this release: %w", v.Metadata.VersionID, err)
				}
				all = append(all, Version{v.Metadata.VersionID, v.Metadata.CreatedBy, v.Metadata.LastUpdateTime, v.Object.Reason, Changes(before, set)})
				before, after = set, v.Position
			}
			if len(some) < page {
				return nil
			}
		}
	})
	return slices.Clip(all), err
}
