package versioned

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// State is a version's place in the life of its object. There is no UNDEFINED: a version without a state cannot be written
// (the tables refuse it) or read.
type State string

// The states of a version. An object's head is LATEST or DELETED.
const (
	Latest   State = "LATEST"
	Archived State = "ARCHIVED"
	Deleted  State = "DELETED"
)

// UnmarshalText accepts the three states and nothing else.
func (s *State) UnmarshalText(b []byte) error {
	switch v := State(b); v {
	case Latest, Archived, Deleted:
		*s = v
		return nil
	}
	return fmt.Errorf("%q is not a version state", b)
}

// Metadata is what is known of a version besides its object.
type Metadata struct {
	VersionID      int64     `json:"version_id"` // unique in the table; of one object, later versions have higher ones, but see Record
	VersionState   State     `json:"version_state"`
	CreatedBy      string    `json:"created_by"`       // who made this version
	LastUpdateTime time.Time `json:"last_update_time"` // when
}

// Version is one version of an object.
type Version[T any] struct {
	Object   T        `json:"object"`
	Metadata Metadata `json:"metadata"`
	Position int64    `json:"-"` // what History is ordered by
}

// Change is a write: the object as it is to be. At is when it was made; the zero time is now, by the database's clock.
type Change[T any] struct {
	TenantID int64
	Object   T
	By       string
	At       time.Time
}

// Errors of this package. Both are the caller's to mend: a retry does not help.
var (
	ErrNotFound  = errors.New("versioned: no such object")
	ErrNoCreator = errors.New("versioned: a version must say who made it")
)

// Column is a key column: its name, which is also its field in the object, and its type: bigint, uuid or text.
type Column struct{ Name, Type string }

// Definition describes a table of this shape. Its other columns are tenant_id, object, metadata, version_id and version_state,
// the latter two generated from metadata.
type Definition struct {
	Table    string
	Sequence string            // of version ids
	Key      []Column          // generated from the object's fields of the same names
	Absent   map[string]string // by key column, what an object that lacks the field means: the column is generated likewise
	Version  string            // bigint column generated from the object's own version, unique per object; empty when there is none

	// Indexes is what Query may ask for besides the beginning of the key: for each, the object's fields of an index of the LATEST versions,
	// (tenant_id, ((object ->> 'field')::type) for each of them, the key) WHERE version_state = 'LATEST'. An index on an expression comes
	// to a table that is in use without a rewrite; a generated column would not.
	Indexes [][]Column

	// Purged is the table of (tenant_id, the key, version, purged_at) that notes up to which version (the object's own) an object was purged. Record
	// adds none of those any more, and whoever numbers the next version goes on from there. Empty when nothing needs it.
	Purged string
}

// Key is the values of an object's key columns, in their order.
type Key []any

// Table is the data access layer of one table. It is immutable and safe for concurrent use. Its methods join the caller's
// transaction and never commit; at READ COMMITTED they see what the writers they waited for have written.
type Table[T any] struct {
	def                                                                                  Definition
	lockSQL, shareSQL, archiveSQL, insertSQL, deleteSQL, outdateSQL, adoptSQL, recordSQL string
	getSQL, historySQL, recentSQL, checkSQL, countSQL                                    string
	expireSQL, purgeSQL, headsSQL, headsAfterSQL                                         string
}

var identifier = regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)

// New prepares the statements of a table. It panics when the definition has a name that is not a plain identifier, an unknown
// type or no key: that is a mistake in the code that calls it.
func New[T any](def Definition) *Table[T] {
	names := []string{def.Table, def.Sequence}
	if def.Version != "" {
		names = append(names, def.Version)
	}
	if def.Purged != "" {
		names = append(names, def.Purged)
	}
	for _, c := range slices.Concat(append([][]Column{def.Key}, def.Indexes...)...) {
		names = append(names, c.Name)
		if absent := def.Absent[c.Name]; absent != "" {
			names = append(names, absent)
		}
		if !slices.Contains([]string{"bigint", "uuid", "text"}, c.Type) {
			panic(fmt.Sprintf("versioned: column %s of %s has the type %q", c.Name, def.Table, c.Type))
		}
	}
	for _, n := range names {
		if !identifier.MatchString(n) {
			panic(fmt.Sprintf("versioned: %q is not an identifier", n))
		}
	}
	if len(def.Key) == 0 {
		panic("versioned: " + def.Table + " has no key")
	}
	t := &Table[T]{def: def}
	t.prepare()
	return t
}

// buckets bounds the advisory locks of a transaction: the server has room for some thousands in all.
const buckets = 1024

// Upsert makes each change's object the LATEST version of itself; what was its head becomes ARCHIVED. Several changes of one
// object are several versions, in the slice's order. It returns the version ids in that order, or ErrNoCreator.
func (t *Table[T]) Upsert(ctx context.Context, tx pgx.Tx, changes []Change[T]) ([]int64, error) {
	args, err := t.lock(ctx, tx, changes)
	if err != nil || len(changes) == 0 {
		return nil, err
	}
	if _, err := tx.Exec(ctx, t.archiveSQL, args); err != nil {
		return nil, fmt.Errorf("archive the heads of %d objects of %s: %w", len(changes), t.def.Table, err)
	}
	return t.write(ctx, tx, t.insertSQL, "upsert", args, len(changes))
}

// Delete gives each object that has a LATEST version a DELETED one, which keeps the object as it last was; of the change's
// object only the key fields are read. It returns the new version ids; objects that are not there, or deleted, add none.
func (t *Table[T]) Delete(ctx context.Context, tx pgx.Tx, changes []Change[T]) ([]int64, error) {
	args, err := t.lock(ctx, tx, changes)
	if err != nil || len(changes) == 0 {
		return nil, err
	}
	return t.write(ctx, tx, t.deleteSQL, "delete", args, len(changes))
}

func (t *Table[T]) write(ctx context.Context, tx pgx.Tx, sql, what string, args pgx.StrictNamedArgs, n int) ([]int64, error) {
	rows, _ := tx.Query(ctx, sql, args)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("%s %d objects of %s: %w", what, n, t.def.Table, err)
	}
	return ids, nil
}

// Unrecorded is who a version is by as long as only what it left behind is known, and not who made it.
const Unrecorded = "unrecorded"

// Entry is a version that was made elsewhere and has its own number there (the column Definition.Version). Deleted says
// that it is the deletion of the object.
type Entry[T any] struct {
	Change[T]
	Deleted bool
}

// Record adds the versions that are missing and were not purged, each in its place by the object's own version: one that a later version
// follows is ARCHIVED from the start, the latest is the head. What is there already is left as it is, but a version by Unrecorded becomes that of who
// made it. It returns how many it added.
// The ids of versions that came late are higher than those of their successors: History goes by the object's version.
//
// Calls of Record wait for no other Record, however many objects both have, but for retention. The caller makes sure that no two record the same
// object at a time: a consumer does, by the offset that it holds until its transaction ends.
func (t *Table[T]) Record(ctx context.Context, tx pgx.Tx, entries []Entry[T]) (int64, error) {
	if t.def.Version == "" {
		return 0, fmt.Errorf("record into %s: its objects have no version of their own", t.def.Table)
	}
	changes, deleted := make([]Change[T], len(entries)), make([]bool, len(entries))
	for i, e := range entries {
		changes[i], deleted[i] = e.Change, e.Deleted
	}
	args, err := t.arguments(changes, deleted)
	if err != nil || len(entries) == 0 {
		return 0, err
	}
	if _, err := tx.Exec(ctx, t.shareSQL); err != nil {
		return 0, fmt.Errorf("wait for the retention of %s: %w", t.def.Table, err)
	}
	if _, err := tx.Exec(ctx, t.outdateSQL, args); err != nil {
		return 0, fmt.Errorf("archive the heads of %d objects of %s: %w", len(entries), t.def.Table, err)
	}
	if _, err := tx.Exec(ctx, t.adoptSQL, args); err != nil {
		return 0, fmt.Errorf("adopt %d versions in %s: %w", len(entries), t.def.Table, err)
	}
	tag, err := tx.Exec(ctx, t.recordSQL, args)
	if err != nil {
		return 0, fmt.Errorf("record %d versions in %s: %w", len(entries), t.def.Table, err)
	}
	return tag.RowsAffected(), nil
}

// Lock waits for other writers of the objects and keeps them out until the transaction ends. A caller that decides by what an
// object is takes it before it reads; of the changes only the tenants, the key fields and By matter.
func (t *Table[T]) Lock(ctx context.Context, tx pgx.Tx, changes []Change[T]) error {
	_, err := t.lock(ctx, tx, changes)
	return err
}

// lock waits for other writers of the objects and returns the arguments that the statements share.
func (t *Table[T]) lock(ctx context.Context, tx pgx.Tx, changes []Change[T]) (pgx.StrictNamedArgs, error) {
	args, err := t.arguments(changes, make([]bool, len(changes)))
	if err != nil || len(changes) == 0 {
		return nil, err
	}
	return args, t.lockArguments(ctx, tx, args, len(changes))
}

func (t *Table[T]) lockArguments(ctx context.Context, tx pgx.Tx, args pgx.StrictNamedArgs, n int) error {
	if _, err := tx.Exec(ctx, t.lockSQL, args); err != nil {
		return fmt.Errorf("lock %d objects of %s: %w", n, t.def.Table, err)
	}
	return nil
}

// arguments returns the arguments that the statements share.
func (t *Table[T]) arguments(changes []Change[T], deleted []bool) (pgx.StrictNamedArgs, error) {
	n := len(changes)
	tenants, objects, bys, ats := make([]int64, n), make([]string, n), make([]string, n), make([]*time.Time, n)
	for i, c := range changes {
		if c.By == "" {
			return nil, fmt.Errorf("write %d objects of %s: %w", n, t.def.Table, ErrNoCreator)
		}
		b, err := json.Marshal(c.Object)
		if err != nil {
			return nil, fmt.Errorf("encode an object of %s: %w", t.def.Table, err)
		}
		tenants[i], objects[i], bys[i] = c.TenantID, string(b), c.By
		if !c.At.IsZero() {
			ats[i] = &changes[i].At
		}
	}
	return pgx.StrictNamedArgs{"tenants": tenants, "objects": objects, "bys": bys, "ats": ats, "deleteds": deleted}, nil
}
