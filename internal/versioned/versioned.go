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

// State is a version's place in the life of its object. There is no UNDEFINED: the tables and
// UnmarshalText refuse a version without a state.
type State string

// The states of a version. An object's head is LATEST or DELETED.
const (
	Latest   State = "LATEST"
	Archived State = "ARCHIVED"
	Deleted  State = "DELETED"
)

// UnmarshalText accepts only the three states.
func (s *State) UnmarshalText(b []byte) error {
	switch v := State(b); v {
	case Latest, Archived, Deleted:
		*s = v
		return nil
	}
	return fmt.Errorf("%q is not a version state", b)
}

// Metadata describes a version, beside its object.
type Metadata struct {
	VersionID      int64     `json:"version_id"` // unique in the table; a later version of an object has a higher id, except after Record
	VersionState   State     `json:"version_state"`
	CreatedBy      string    `json:"created_by"`       // the actor who made this version
	LastUpdateTime time.Time `json:"last_update_time"` // when this version was made
}

// Version is one version of an object.
type Version[T any] struct {
	Object   T        `json:"object"`
	Metadata Metadata `json:"metadata"`
	Position int64    `json:"-"` // the order of History
}

// Change is a write: the new object. At is its time; zero is now, by the database's clock.
type Change[T any] struct {
	TenantID int64
	Object   T
	By       string
	At       time.Time
}

// Errors of this package. A retry does not help: the caller must change the call.
var (
	ErrNotFound  = errors.New("versioned: no such object")
	ErrNoCreator = errors.New("versioned: a version has no creator")
)

// Column is a key column: its name, which is also its field in the object, and its type: bigint,
// uuid or text.
type Column struct{ Name, Type string }

// Definition describes a table of this shape. Its other columns are tenant_id, object, metadata,
// version_id and version_state. The last two are generated from metadata.
type Definition struct {
	Table    string
	Sequence string            // of version ids
	Key      []Column          // generated from the fields of the same names in the object
	Absent   map[string]string // by key column, the value for an object without the field; the column is generated likewise
	Version  string            // bigint column generated from the object's own version, unique per object; empty if it has none

	// Indexes lists the fields by which Query can select, besides the first columns of the key.
	// Each element is an index of the LATEST versions: (tenant_id, ((object ->> 'field')::type) for
	// each field, the key) WHERE version_state = 'LATEST'. An index on an expression can be added
	// to a table in use without a rewrite; a generated column cannot.
	Indexes [][]Column

	// Purged is the table of (tenant_id, the key, version, purged_at) that records the object's own
	// version at which it was purged. Record adds no version up to it, and the next version
	// continues from it. Empty if the table needs none.
	Purged string
}

// Key has the values of an object's key columns, in their order.
type Key []any

// Table is the data access layer of one table. It is immutable and safe for concurrent use. Its
// methods join the caller's transaction and never commit. At READ COMMITTED they see the writes of
// the writers for which they waited.
type Table[T any] struct {
	def                                                                                              Definition
	lockSQL, lockAllSQL, shareSQL, archiveSQL, insertSQL, deleteSQL, outdateSQL, adoptSQL, recordSQL string
	getSQL, historySQL, recentSQL, checkSQL, countSQL                                                string
	expireSQL, purgeSQL, headsSQL, headsAfterSQL                                                     string
}

var identifier = regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)

// New prepares the statements of a table. It panics if the definition has no key, an unknown type,
// or a name that is not a plain identifier: the calling code is wrong.
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

// buckets bounds the advisory locks of a transaction: the server's lock table has room for a few
// thousand in total.
const buckets = 1024

// Upsert makes each change's object the LATEST version; the previous head becomes ARCHIVED. Several
// changes of one object become several versions, in the slice's order. It returns the version ids
// in that order, or ErrNoCreator.
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

// Delete adds a DELETED version to each object that has a LATEST one. It keeps the object's last
// content; from the change's object it reads only the key fields. It returns the new version ids.
// An object that does not exist or is deleted gets none.
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

// Unrecorded is the creator of a version whose content is known but not its creator.
const Unrecorded = "unrecorded"

// Entry is a version that was made elsewhere and has its own number (the column
// Definition.Version). Deleted: it deletes the object.
type Entry[T any] struct {
	Change[T]
	Deleted bool
}

// Record adds the versions that are missing and were not purged, each in its place by the object's
// own version. A version with a successor is ARCHIVED from the start; the latest one is the head.
// Existing versions remain, except that a version by Unrecorded takes the content and creator of
// its entry. Record returns the number of versions added. A version that arrives late has a higher
// id than its successors, so History uses the object's version.
//
// Calls of Record wait for retention, but not for each other, however many objects they share. The
// caller makes sure that no two calls record the same object at the same time. A consumer does so
// by the offset that it holds until its transaction ends. A caller that cannot know calls LockAll
// before.
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

// Lock waits for other writers of the objects and keeps them out until the transaction ends. A
// caller whose decision depends on an object calls it before reading. Of the changes it uses only
// the tenants, the key fields and By.
func (t *Table[T]) Lock(ctx context.Context, tx pgx.Tx, changes []Change[T]) error {
	_, err := t.lock(ctx, tx, changes)
	return err
}

// LockAll waits for all calls of Record, and keeps others out until the transaction ends.
func (t *Table[T]) LockAll(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, t.lockAllSQL); err != nil {
		return fmt.Errorf("lock %s: %w", t.def.Table, err)
	}
	return nil
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
