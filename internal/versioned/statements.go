package versioned

import (
	"fmt"
	"strings"
)

// incoming is the slice of changes with their objects' keys.
const incoming = `
WITH incoming AS MATERIALIZED (
  SELECT u.ord, u.tenant_id, u.object, u.created_by, coalesce(u.at, now()) AS at, u.deleted, {key exprs}
    FROM unnest(@tenants::bigint[], @objects::jsonb[], @bys::text[], @ats::timestamptz[], @deleteds::boolean[])
         WITH ORDINALITY AS u(tenant_id, object, created_by, at, deleted, ord)
)`

// metadata is the metadata of a new version n.
const metadata = `jsonb_build_object('version_id', n.id, 'version_state', n.state, 'created_by', n.created_by,
         'last_update_time', to_char(n.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))`

// toArchived makes a version ARCHIVED.
const toArchived = `metadata = jsonb_set(t.metadata, '{version_state}', '"ARCHIVED"')`

// prepare renders the statements. It replaces placeholders, for example {table}, by names from the
// definition; all values are arguments.
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
	r := strings.NewReplacer(
		"{purged}", t.def.Purged, "{key texts}", strings.Join(texts, ", "), "{after}", strings.Join(after, ", "),
		"{table}", t.def.Table, "{sequence}", t.def.Sequence, "{keys}", strings.Join(names, ", "),
		"{same}", "t.tenant_id = i.tenant_id AND "+strings.Join(same, " AND "),
		"{key exprs}", strings.Join(exprs, ", "), "{key params}", "t.tenant_id = @tenant AND "+strings.Join(params, " AND "),
		"{keys of t}", "t."+strings.Join(names, ", t."), "{keys of i}", "i."+strings.Join(names, ", i."),
		"{at}", "(t.metadata ->> 'last_update_time')::timestamptz", "{version}", t.def.Version, "{position}", position,
		"{buckets}", fmt.Sprint(buckets),
	)
	t.prepareWrites(r)
	t.prepareRecords(r)
	t.prepareReads(r)
	t.prepareRetention(r)
	t.prepareScans(r)
}

// prepareWrites prepares the statements that change objects.
func (t *Table[T]) prepareWrites(r *strings.Replacer) {
	// Locks: one advisory lock per object, by its hash, in the order of the hashes; none if the
	// slice is empty. A table with recorded versions has one lock instead: a batch records
	// thousands of versions, so any two batches would share a hash.
	bucket := "hashtext(ROW(tenant_id, {keys})::text) & ({buckets} - 1)"
	if t.def.Version != "" {
		bucket = "{buckets}"
	}
	t.lockSQL = r.Replace(incoming + `
SELECT /* versioned.lock */ pg_advisory_xact_lock(hashtext('versioned.{table}'), bucket)
  FROM (SELECT DISTINCT ` + bucket + ` AS bucket FROM incoming ORDER BY 1) b`)

	// Locks: the table's advisory lock.
	t.lockAllSQL = r.Replace(`SELECT /* versioned.lock_all */ pg_advisory_xact_lock(hashtext('versioned.{table}'), {buckets})`)

	// Locks: the table's advisory lock, shared among the callers of Record.
	t.shareSQL = r.Replace(`SELECT /* versioned.share */ pg_advisory_xact_lock_shared(hashtext('versioned.{table}'), {buckets})`)

	// Index: the head index.   Locks: the heads.
	t.archiveSQL = r.Replace(incoming + `
UPDATE /* versioned.archive */ {table} t SET ` + toArchived + `
  FROM (SELECT DISTINCT tenant_id, {keys} FROM incoming) i
 WHERE {same} AND t.version_state IN ('LATEST', 'DELETED')`)

	// The last of several changes of one object is its head. A writer that waited for another one
	// has an earlier now(), so the time is raised to the predecessor's. Index: the primary key.
	// Locks: none but the new rows.
	t.insertSQL = r.Replace(incoming + `
INSERT /* versioned.insert */ INTO {table} (tenant_id, object, metadata)
SELECT n.tenant_id, n.object, ` + metadata + `
  FROM (SELECT o.tenant_id, o.object, o.created_by, o.state, o.at, nextval('{sequence}') AS id
          FROM (SELECT i.tenant_id, i.object, i.created_by,
                       CASE WHEN row_number() OVER (PARTITION BY i.tenant_id, {keys of i} ORDER BY i.ord DESC) = 1
                            THEN 'LATEST' ELSE 'ARCHIVED' END AS state,
                       greatest(last.at, max(i.at) OVER (PARTITION BY i.tenant_id, {keys of i} ORDER BY i.ord)) AS at
                  FROM incoming i
                  LEFT JOIN LATERAL (SELECT {at} AS at FROM {table} t WHERE {same} ORDER BY t.version_id DESC LIMIT 1) last ON true
                 ORDER BY i.ord) o) n
RETURNING version_id`)

	// The DELETED version keeps the object's last content. Index: the head index. Locks: the heads.
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
}

// prepareRecords prepares the statements that add versions made elsewhere.
func (t *Table[T]) prepareRecords(r *strings.Replacer) {
	purged := ""
	if t.def.Purged != "" {
		purged = " AND NOT EXISTS (SELECT FROM {purged} t WHERE {same} AND t.version >= i.{version})"
	}

	// A later version of an object makes its head ARCHIVED. Index: the head index. Locks: the
	// heads.
	t.outdateSQL = r.Replace(incoming + `
UPDATE /* versioned.outdate */ {table} t SET ` + toArchived + `
  FROM (SELECT tenant_id, {keys}, max((object ->> '{version}')::bigint) AS {version} FROM incoming GROUP BY tenant_id, {keys}) i
 WHERE {same} AND t.version_state IN ('LATEST', 'DELETED') AND t.{version} < i.{version}`)

	// A version's creator may become known after the version. Index: the version index. Locks: the
	// versions.
	t.adoptSQL = r.Replace(incoming + `
UPDATE /* versioned.adopt */ {table} t SET object = i.object, metadata = jsonb_set(t.metadata, '{created_by}', to_jsonb(i.created_by))
  FROM (SELECT DISTINCT ON (tenant_id, {keys}, {version}) * FROM (SELECT *, (object ->> '{version}')::bigint AS {version} FROM incoming) v
         WHERE created_by <> '` + Unrecorded + `' ORDER BY tenant_id, {keys}, {version}, ord) i
 WHERE {same} AND t.{version} = i.{version} AND t.metadata ->> 'created_by' = '` + Unrecorded + `'`)

	// Existing and purged versions do not change. A version without a successor is the head. Index:
	// the version index.
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
}

// prepareReads prepares the statements that read an object.
func (t *Table[T]) prepareReads(r *strings.Replacer) {
	// Index: the head index.   Locks: none.
	t.getSQL = r.Replace(`
SELECT /* versioned.get */ t.object, t.metadata, t.{position} FROM {table} t WHERE {key params} AND t.version_state = 'LATEST'`)

	// Index: the version index, or the primary key, one range.   Locks: none.
	t.historySQL = r.Replace(`
SELECT /* versioned.history */ t.object, t.metadata, t.{position} FROM {table} t
 WHERE {key params} AND t.{position} > @after ORDER BY t.{position} LIMIT @limit`)

	// Index: like historySQL, backward. Locks: none.
	t.recentSQL = r.Replace(`
SELECT /* versioned.recent */ t.object, t.metadata, t.{position} FROM {table} t
 WHERE {key params} AND t.{position} < @before ORDER BY t.{position} DESC LIMIT @limit`)
}

// prepareRetention prepares the statements that delete and purge objects.
func (t *Table[T]) prepareRetention(r *strings.Replacer) {
	bump, note := "", ""
	if t.def.Version != "" {
		bump = " || jsonb_build_object('{version}', t.{version} + 1)"
	}
	if t.def.Purged != "" {
		note = `, noted AS (
  INSERT INTO {purged} (tenant_id, {keys}, version) SELECT tenant_id, {keys}, version FROM gone
      ON CONFLICT (tenant_id, {keys}) DO UPDATE SET version = excluded.version, purged_at = excluded.purged_at
)`
	}

	// A head remains if it is no longer the given version, or was not made before the given time.
	// Index: the head index. Locks: the heads.
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

	// Like expireSQL, it leaves a head that has changed or is too young.
	// Index: the head index, then the primary key. Locks: every version of the objects.
	t.purgeSQL = r.Replace(incoming + `, gone AS MATERIALIZED (
  SELECT i.tenant_id, {keys of i}, (t.object ->> 'version')::bigint AS version
    FROM incoming i JOIN {table} t ON {same} AND t.version_state = 'DELETED' AND t.version_id = (@ids::bigint[])[i.ord] AND {at} < i.at
)` + note + `
DELETE /* versioned.purge */ FROM {table} t USING gone i WHERE {same} RETURNING t.version_state = 'DELETED'`)
}

// prepareScans prepares the statements that read a whole table.
func (t *Table[T]) prepareScans(r *strings.Replacer) {
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
SELECT /* versioned.check */ tenant_id, object, rule,
       CASE rule WHEN 'state of the last version' THEN 'LATEST or DELETED' WHEN 'state of an earlier version' THEN 'ARCHIVED'
                 ELSE 'not before ' || previous END,
       CASE rule WHEN 'last_update_time' THEN coalesce(at::text, 'absent') ELSE version_state END
  FROM (SELECT *, CASE WHEN next IS NULL AND version_state = 'ARCHIVED' THEN 'state of the last version'
                       WHEN next IS NOT NULL AND version_state <> 'ARCHIVED' THEN 'state of an earlier version'
                       WHEN at < previous THEN 'last_update_time' END AS rule
          FROM (SELECT t.tenant_id, t.object, t.version_state, {at} AS at, lag({at}) OVER object AS previous,
                       lead(t.version_id) OVER object AS next
                  FROM {table} t WINDOW object AS (PARTITION BY t.tenant_id, {keys of t} ORDER BY t.{position})) v) v
 WHERE rule IS NOT NULL`)

	// Index: any, all of it.   Locks: none.
	t.countSQL = r.Replace(`SELECT /* versioned.count */ count(*) FROM {table}`)
}

// statements returns the constant statements of the table, for tests that prepare them.
func (t *Table[T]) statements() []string {
	all := []string{t.lockSQL, t.archiveSQL, t.insertSQL, t.deleteSQL, t.getSQL, t.historySQL, t.recentSQL, t.expireSQL, t.purgeSQL,
		t.headsSQL, t.headsAfterSQL, t.checkSQL, t.countSQL}
	for _, fields := range append([][]Column{nil}, t.def.Indexes...) {
		all = append(all, t.selectSQL(fields, Latest, false), t.selectSQL(fields, Latest, true))
	}
	if t.def.Version != "" {
		all = append(all, t.lockAllSQL, t.shareSQL, t.outdateSQL, t.adoptSQL, t.recordSQL)
	}
	return all
}
