package versioned

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
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
	def                                                                        Definition
	lockSQL, archiveSQL, insertSQL, deleteSQL, outdateSQL, adoptSQL, recordSQL string
	getSQL, historySQL, recentSQL, checkSQL, countSQL                          string
	expireSQL, purgeSQL, headsSQL, headsAfterSQL                               string
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

// Buckets bounds the advisory locks of a transaction: the server has room for some thousands in all.
const buckets = 1024

// prepare writes the statements. {table} and the like stand for what the definition names; everything else is an argument.
func (t *Table[T]) prepare() {
	var names, same, exprs, params, texts, after []string
	for i, c := range t.def.Key {
		texts = append(texts, fmt.Sprintf("t.%s::text", c.Name))
		after = append(after, fmt.Sprintf("@key%d::text::%s", i, c.Type))
		names = append(names, c.Name)
		same = append(same, fmt.Sprintf("t.%[1]s = i.%[1]s", c.Name))
		field := fmt.Sprintf("(u.object ->> '%s')::%s", c.Name, c.Type)
		if absent := t.def.Absent[c.Name]; absent != "" {
			field = fmt.Sprintf("coalesce(%s, '%s')", field, absent)
		}
		exprs = append(exprs, field+" AS "+c.Name)
		params = append(params, fmt.Sprintf("t.%s = @key%d::%s", c.Name, i, c.Type))
	}
	position := "version_id"
	if t.def.Version != "" {
		position = t.def.Version
	}
	purged, note, bump := "", "", ""
	if t.def.Version != "" {
		bump = " || jsonb_build_object('{version}', t.{version} + 1)"
	}
	if t.def.Purged != "" {
		purged = " AND NOT EXISTS (SELECT FROM {purged} t WHERE {same} AND t.version >= i.{version})"
		note = `, noted AS (
  INSERT INTO {purged} (tenant_id, {keys}, version) SELECT tenant_id, {keys}, version FROM gone
      ON CONFLICT (tenant_id, {keys}) DO UPDATE SET version = excluded.version, purged_at = excluded.purged_at
)`
	}
	r := strings.NewReplacer(
		"{purged}", t.def.Purged, "{key texts}", strings.Join(texts, ", "), "{after}", strings.Join(after, ", "),
		"{table}", t.def.Table, "{sequence}", t.def.Sequence, "{keys}", strings.Join(names, ", "), "{same}", "t.tenant_id = i.tenant_id AND "+strings.Join(same, " AND "),
		"{key exprs}", strings.Join(exprs, ", "), "{key params}", "t.tenant_id = @tenant AND "+strings.Join(params, " AND "),
		"{keys of t}", "t."+strings.Join(names, ", t."), "{keys of i}", "i."+strings.Join(names, ", i."), "{at}", "(t.metadata ->> 'last_update_time')::timestamptz", "{version}", t.def.Version, "{position}", position, "{buckets}", fmt.Sprint(buckets),
	)
	// incoming is the slice of changes with its objects' keys.
	const incoming = `
WITH incoming AS MATERIALIZED (
  SELECT u.ord, u.tenant_id, u.object, u.created_by, coalesce(u.at, now()) AS at, u.deleted, {key exprs}
    FROM unnest(@tenants::bigint[], @objects::jsonb[], @bys::text[], @ats::timestamptz[], @deleteds::boolean[])
         WITH ORDINALITY AS u(tenant_id, object, created_by, at, deleted, ord)
)`
	const metadata = `jsonb_build_object('version_id', n.id, 'version_state', n.state, 'created_by', n.created_by,
         'last_update_time', to_char(n.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))`
	const toArchived = `metadata = jsonb_set(t.metadata, '{version_state}', '"ARCHIVED"')`

	// Locks: one advisory lock per object, by its hash, in the order of the hashes; nothing when the slice is empty.
	t.lockSQL = r.Replace(incoming + `
SELECT /* versioned.lock */ pg_advisory_xact_lock(hashtext('versioned.{table}'), bucket)
  FROM (SELECT DISTINCT hashtext(ROW(tenant_id, {keys})::text) & ({buckets} - 1) AS bucket FROM incoming ORDER BY 1) b`)

	// Index: the head index.   Locks: the heads.
	t.archiveSQL = r.Replace(incoming + `
UPDATE /* versioned.archive */ {table} t SET ` + toArchived + `
  FROM (SELECT DISTINCT tenant_id, {keys} FROM incoming) i
 WHERE {same} AND t.version_state IN ('LATEST', 'DELETED')`)

	// Of several changes of one object the last is its head. A writer that waited for another has an earlier now(): the time of a
	// version is never before its predecessor's.   Index: the primary key.   Locks: none but the new rows.
	t.insertSQL = r.Replace(incoming + `
INSERT /* versioned.insert */ INTO {table} (tenant_id, object, metadata)
SELECT n.tenant_id, n.object, ` + metadata + `
  FROM (SELECT o.tenant_id, o.object, o.created_by, o.state, o.at, nextval('{sequence}') AS id
          FROM (SELECT i.tenant_id, i.object, i.created_by,
                       CASE WHEN row_number() OVER (PARTITION BY i.tenant_id, {keys of i} ORDER BY i.ord DESC) = 1 THEN 'LATEST' ELSE 'ARCHIVED' END AS state,
                       greatest(last.at, max(i.at) OVER (PARTITION BY i.tenant_id, {keys of i} ORDER BY i.ord)) AS at
                  FROM incoming i
                  LEFT JOIN LATERAL (SELECT {at} AS at FROM {table} t WHERE {same} ORDER BY t.version_id DESC LIMIT 1) last ON true
                 ORDER BY i.ord) o) n
RETURNING version_id`)

	// The deleted version keeps the object as it last was.   Index: the head index.   Locks: the heads.
	t.deleteSQL = r.Replace(incoming + `, gone AS (
  UPDATE {table} t SET ` + toArchived + `
    FROM (SELECT DISTINCT ON (tenant_id, {keys}) * FROM incoming ORDER BY tenant_id, {keys}, ord) i
   WHERE {same} AND t.version_state = 'LATEST'
  RETURNING i.ord, t.tenant_id, t.object, i.created_by, greatest(i.at, {at}) AS at
)
INSERT /* versioned.delete */ INTO {table} (tenant_id, object, metadata)
SELECT n.tenant_id, n.object, ` + metadata + `
  FROM (SELECT o.*, nextval('{sequence}') AS id, 'DELETED' AS state FROM (SELECT * FROM gone ORDER BY ord) o) n
RETURNING version_id`)

	// A head is outdated by a later version of its object.   Index: the head index.   Locks: the heads.
	t.outdateSQL = r.Replace(incoming + `
UPDATE /* versioned.outdate */ {table} t SET ` + toArchived + `
  FROM (SELECT tenant_id, {keys}, max((object ->> '{version}')::bigint) AS {version} FROM incoming GROUP BY tenant_id, {keys}) i
 WHERE {same} AND t.version_state IN ('LATEST', 'DELETED') AND t.{version} < i.{version}`)

	// Who made a version may come to be known after it.   Index: the version index.   Locks: the versions.
	t.adoptSQL = r.Replace(incoming + `
UPDATE /* versioned.adopt */ {table} t SET object = i.object, metadata = jsonb_set(t.metadata, '{created_by}', to_jsonb(i.created_by))
  FROM (SELECT DISTINCT ON (tenant_id, {keys}, {version}) * FROM (SELECT *, (object ->> '{version}')::bigint AS {version} FROM incoming) v
         WHERE created_by <> '` + Unrecorded + `' ORDER BY tenant_id, {keys}, {version}, ord) i
 WHERE {same} AND t.{version} = i.{version} AND t.metadata ->> 'created_by' = '` + Unrecorded + `'`)

	// Versions that are there, and that were, are left alone; one that nothing is later than is the head.   Index: the version index.
	t.recordSQL = r.Replace(incoming + `, versions AS MATERIALIZED (
  SELECT DISTINCT ON (tenant_id, {keys}, {version}) * FROM (SELECT *, (object ->> '{version}')::bigint AS {version} FROM incoming) v
   ORDER BY tenant_id, {keys}, {version}, created_by = '` + Unrecorded + `', ord
), missing AS (
  SELECT i.*, CASE WHEN i.{version} < max(i.{version}) OVER (PARTITION BY i.tenant_id, {keys of i})
                     OR EXISTS (SELECT FROM {table} t WHERE {same} AND t.{version} > i.{version}) THEN 'ARCHIVED'
                   WHEN i.deleted THEN 'DELETED' ELSE 'LATEST' END AS state
    FROM versions i
   WHERE NOT EXISTS (SELECT FROM {table} t WHERE {same} AND t.{version} = i.{version})` + purged + `
)
INSERT /* versioned.record */ INTO {table} (tenant_id, object, metadata)
SELECT n.tenant_id, n.object, ` + metadata + `
  FROM (SELECT o.*, nextval('{sequence}') AS id FROM (SELECT * FROM missing ORDER BY ord) o) n`)

	// Index: the head index.   Locks: none.
	t.getSQL = r.Replace(`
SELECT /* versioned.get */ t.object, t.metadata, t.{position} FROM {table} t WHERE {key params} AND t.version_state = 'LATEST'`)

	// Index: the version index, or the primary key, one range.   Locks: none.
	t.historySQL = r.Replace(`
SELECT /* versioned.history */ t.object, t.metadata, t.{position} FROM {table} t
 WHERE {key params} AND t.{position} > @after ORDER BY t.{position} LIMIT @limit`)

	// Index: as history's, backwards.   Locks: none.
	t.recentSQL = r.Replace(`
SELECT /* versioned.recent */ t.object, t.metadata, t.{position} FROM {table} t
 WHERE {key params} AND t.{position} < @before ORDER BY t.{position} DESC LIMIT @limit`)

	// A head that is no longer the version that was looked at, or not made before the time, stays.   Index: the head index.   Locks: the heads.
	t.expireSQL = r.Replace(incoming + `, gone AS (
  UPDATE {table} t SET ` + toArchived + `
    FROM incoming i
   WHERE {same} AND t.version_state = 'LATEST' AND t.version_id = (@ids::bigint[])[i.ord] AND {at} < i.at
  RETURNING i.ord, t.tenant_id, t.object` + bump + ` AS object, i.created_by, greatest(now(), {at}) AS at
)
INSERT /* versioned.expire */ INTO {table} (tenant_id, object, metadata)
SELECT n.tenant_id, n.object, ` + metadata + `
  FROM (SELECT o.*, nextval('{sequence}') AS id, 'DELETED' AS state FROM (SELECT * FROM gone ORDER BY ord) o) n
RETURNING version_id`)

	// Likewise.   Index: the head index, then the primary key.   Locks: every version of the objects.
	t.purgeSQL = r.Replace(incoming + `, gone AS MATERIALIZED (
  SELECT i.tenant_id, {keys of i}, (t.object ->> 'version')::bigint AS version
    FROM incoming i JOIN {table} t ON {same} AND t.version_state = 'DELETED' AND t.version_id = (@ids::bigint[])[i.ord] AND {at} < i.at
)` + note + `
DELETE /* versioned.purge */ FROM {table} t USING gone i WHERE {same} RETURNING t.version_state = 'DELETED'`)

	// Index: the head index, one range.   Locks: none.
	t.headsSQL = r.Replace(`
SELECT /* versioned.heads */ t.tenant_id, ARRAY[{key texts}], t.object, t.metadata, t.{position} FROM {table} t
 WHERE t.version_state IN ('LATEST', 'DELETED') ORDER BY t.tenant_id, {keys of t} LIMIT @limit`)
	t.headsAfterSQL = r.Replace(`
SELECT /* versioned.heads */ t.tenant_id, ARRAY[{key texts}], t.object, t.metadata, t.{position} FROM {table} t
 WHERE t.version_state IN ('LATEST', 'DELETED') AND (t.tenant_id, {keys of t}) > (@tenant::bigint, {after})
 ORDER BY t.tenant_id, {keys of t} LIMIT @limit`)

	// Index: the version index, or the primary key, all of it.   Locks: none.
	t.checkSQL = r.Replace(`
SELECT /* versioned.check */ tenant_id, object, rule, CASE rule WHEN 'state of the last version' THEN 'LATEST or DELETED' WHEN 'state of an earlier version' THEN 'ARCHIVED'
       ELSE 'not before ' || previous END, CASE rule WHEN 'last_update_time' THEN coalesce(at::text, 'absent') ELSE version_state END
  FROM (SELECT *, CASE WHEN next IS NULL AND version_state = 'ARCHIVED' THEN 'state of the last version'
                       WHEN next IS NOT NULL AND version_state <> 'ARCHIVED' THEN 'state of an earlier version'
                       WHEN at < previous THEN 'last_update_time' END AS rule
          FROM (SELECT t.tenant_id, t.object, t.version_state, {at} AS at, lag({at}) OVER object AS previous, lead(t.version_id) OVER object AS next
                  FROM {table} t WINDOW object AS (PARTITION BY t.tenant_id, {keys of t} ORDER BY t.{position})) v) v
 WHERE rule IS NOT NULL`)

	// Index: any, all of it.   Locks: none.
	t.countSQL = r.Replace(`SELECT /* versioned.count */ count(*) FROM {table}`)
}

// statements are the constant texts of the table, for tests to prepare.
func (t *Table[T]) statements() []string {
	all := []string{t.lockSQL, t.archiveSQL, t.insertSQL, t.deleteSQL, t.getSQL, t.historySQL, t.recentSQL, t.expireSQL, t.purgeSQL,
		t.headsSQL, t.headsAfterSQL, t.checkSQL, t.countSQL}
	for _, fields := range append([][]Column{nil}, t.def.Indexes...) {
		all = append(all, t.selectSQL(fields, Latest, false), t.selectSQL(fields, Latest, true))
	}
	if t.def.Version != "" {
		all = append(all, t.outdateSQL, t.adoptSQL, t.recordSQL)
	}
	return all
}

// Upsert makes each change's object the LATEST version of itself; what was its head becomes ARCHIVED. Several changes of one
// object are several versions, in the slice's order. It returns the version ids in that order, or ErrNoCreator.
func (t *Table[T]) Upsert(ctx context.Context, tx pgx.Tx, changes []Change[T]) ([]int64, error) {
	args, err := t.lock(ctx, tx, changes, nil)
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
	args, err := t.lock(ctx, tx, changes, nil)
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
func (t *Table[T]) Record(ctx context.Context, tx pgx.Tx, entries []Entry[T]) (int64, error) {
	if t.def.Version == "" {
		return 0, fmt.Errorf("record into %s: its objects have no version of their own", t.def.Table)
	}
	changes, deleted := make([]Change[T], len(entries)), make([]bool, len(entries))
	for i, e := range entries {
		changes[i], deleted[i] = e.Change, e.Deleted
	}
	args, err := t.lock(ctx, tx, changes, deleted)
	if err != nil || len(entries) == 0 {
		return 0, err
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
	_, err := t.lock(ctx, tx, changes, nil)
	return err
}

// lock waits for other writers of the objects and returns the arguments that the statements share.
func (t *Table[T]) lock(ctx context.Context, tx pgx.Tx, changes []Change[T], deleted []bool) (pgx.StrictNamedArgs, error) {
	n := len(changes)
	if n == 0 {
		return nil, nil
	}
	tenants, objects, bys, ats := make([]int64, n), make([]string, n), make([]string, n), make([]*time.Time, n)
	if deleted == nil {
		deleted = make([]bool, n)
	}
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
	args := pgx.StrictNamedArgs{"tenants": tenants, "objects": objects, "bys": bys, "ats": ats, "deleteds": deleted}
	if _, err := tx.Exec(ctx, t.lockSQL, args); err != nil {
		return nil, fmt.Errorf("lock %d objects of %s: %w", n, t.def.Table, err)
	}
	return args, nil
}
