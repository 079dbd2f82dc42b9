package store

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// AnyVersion as IfVersion accepts any version of the child.
const AnyVersion = 0

// ChildEdit replaces a child's body, changes its attributes, or both.
type ChildEdit struct {
	Meta
	ID         string          // a UUID in lower case
	IfVersion  int64           // the version that the writer saw, or AnyVersion
	Body       *string         // trimmed before it is stored; nil leaves it
	Attributes json.RawMessage // changes as in RFC 7396: null removes an attribute or sets its default; nil changes none

	merge mergeAttributes // applies Attributes
}

// mergeAttributes returns the attributes of a child after a change of its present ones.
type mergeAttributes func(present json.RawMessage) (json.RawMessage, error)

// ChildDelete is the deletion of a child by its author. It is final.
type ChildDelete struct {
	Meta
	ID        string // a UUID in lower case
	IfVersion int64  // the version that the writer saw, or AnyVersion
}

// heldSQL lists the children of @child_ids with their new values, and locks the existing ones in
// key order. Without it, an UPDATE would lock in the order of its plan. It leaves out children of
// a shelved thread, even if the child itself has not moved yet: the thread must return first.
// Plans: the statements that change rows by their keys are planned once, as childCreateSQL
// is. A list of one tenant leaves PostgreSQL no join but a probe per item; with plain equality, a
// plan of an empty table walks an index and keeps doing so while the table grows. Guards do not
// say that author_state is ACTIVE for the same reason: the index children_KIND_author_key does.
// Index: children_KIND_pkey, archived_threads_stub_idx.
const heldSQL = `
WITH wanted AS (
  SELECT * FROM unnest((SELECT @tenants::bigint[]), @child_ids::text[]::uuid[], @if_versions::bigint[], @values::text[]
                       {{- if .Attributes}}, @attributes::text[]{{end}})
    AS w(tenant_id, child_id, if_version, value{{if .Attributes}}, attributes{{end}})
), held AS (
  SELECT w.*
    FROM {{.Table}} c JOIN wanted w ON c.tenant_id = ANY (ARRAY[w.tenant_id]) AND c.child_id = w.child_id
   WHERE NOT EXISTS (SELECT FROM archived_threads a WHERE a.tenant_id = c.tenant_id AND a.kind = '{{.Kind}}'
                        AND a.object_id = c.object_id AND a.state <> 'RETURNED' OFFSET 0)
   ORDER BY w.tenant_id, w.child_id
     FOR NO KEY UPDATE OF c
)`

// childEditSQL replaces bodies and attributes. It changes a child only if the version is the
// expected one, neither its author nor a moderator withdrew it, and something differs. Index:
// children_KIND_pkey. Locks: the children, in key order, changed or not.
const childEditSQL = heldSQL + `
UPDATE /* store.child_edit */ {{.Table}} c
   SET body = {{if .Attributes}}coalesce(h.value, c.body), attributes = coalesce(h.attributes::jsonb, c.attributes){{else}}h.value{{end}},
       version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = ANY (ARRAY[h.tenant_id]) AND c.child_id = h.child_id AND (h.if_version = 0 OR c.version = h.if_version)
   AND c.author_state NOT IN ('DELETED', 'ERASED') AND c.moderation_state NOT IN ('HIDDEN', 'REMOVED')
   AND {{if .Attributes}}(c.body <> h.value OR h.attributes IS NOT NULL AND c.attributes IS DISTINCT FROM h.attributes::jsonb)
       {{- else}}c.body <> h.value{{end}}
RETURNING c.tenant_id, ` + childColumns

// EditChildren replaces the bodies of children and changes their attributes. An outcome's error is
// ErrNotFound, a *StaleError, a *StateError, or describes an invalid body or attribute
// (*kinds.AttributeError). An edit that would not change the child makes no event.
func (s *Store) EditChildren(ctx context.Context, tenant int64, k kinds.Child, edits []ChildEdit) ([]ChildOutcome, error) {
	c, todo := s.children(k), slices.Clone(edits)
	for i := range todo {
		todo[i].tenant = tenant
		if change := todo[i].Attributes; change != nil {
			todo[i].merge = func(present json.RawMessage) (json.RawMessage, error) { return k.Patch(present, change) }
		}
	}
	return withReturns(ctx, s, tenant, c, todo, c.edit.do)
}

func (k *childKind) writeEdits(ctx context.Context, edits []ChildEdit, at place) ([]ChildOutcome, error) {
	changes := make([]change, len(edits))
	for i, e := range edits {
		c := change{meta: e.Meta, id: e.ID, ifVersion: e.IfVersion, merge: e.merge}
		switch {
		case e.merge != nil && !k.Attributes:
			c.err = fmt.Errorf("%w: kind %s has no attributes", ErrInvalid, k.Kind)
		case e.Body != nil:
			var body string
			body, c.err = trimBody(*e.Body)
			c.value = &body
		case e.merge == nil:
			c.err = fmt.Errorf("%w: an edit without a body or attributes", ErrInvalid)
		}
		changes[i] = c
	}
	return k.change(ctx, changes, at, changeKind{
		event: event.Edited, sql: childEditSQL,
		allowed: func(c event.Child) bool {
			return c.AuthorState == event.AuthorActive && c.ModerationState != event.ModerationHidden &&
				c.ModerationState != event.ModerationRemoved
		},
		has: func(c event.Child, to change) bool {
			return (to.value == nil || c.Body == *to.value) && (to.attributes == nil || bytes.Equal(c.Attributes, to.attributes))
		},
	})
}

// childDeleteSQL deletes children logically, if the version is the expected one and the author has
// not deleted them before. The row remains, because replies and the permalink refer to it. Index:
// children_KIND_pkey. Locks: the children, in key order, changed or not.
const childDeleteSQL = heldSQL + `
UPDATE /* store.child_delete */ {{.Table}} c
   SET author_state = 'DELETED', version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = ANY (ARRAY[h.tenant_id]) AND c.child_id = h.child_id AND (h.if_version = 0 OR c.version = h.if_version)
   AND c.author_state NOT IN ('DELETED', 'ERASED')
RETURNING c.tenant_id, ` + childColumns

// DeleteChildren deletes children for their author. An outcome's error is ErrNotFound, a
// *StaleError or a *StateError: a deleted or erased child cannot be deleted again. Authors can
// delete children in any moderation state.
func (s *Store) DeleteChildren(ctx context.Context, tenant int64, k kinds.Child, deletes []ChildDelete) ([]ChildOutcome, error) {
	c, todo := s.children(k), slices.Clone(deletes)
	for i := range todo {
		todo[i].tenant = tenant
	}
	return withReturns(ctx, s, tenant, c, todo, c.delete.do)
}

func (k *childKind) writeDeletes(ctx context.Context, deletes []ChildDelete, at place) ([]ChildOutcome, error) {
	changes := make([]change, len(deletes))
	for i, d := range deletes {
		changes[i] = change{meta: d.Meta, id: d.ID, ifVersion: d.IfVersion}
	}
	return k.change(ctx, changes, at, changeKind{
		event: event.Deleted, sql: childDeleteSQL,
		allowed: func(c event.Child) bool { return c.AuthorState == event.AuthorActive },
		has:     func(event.Child, change) bool { return false }, // allowed already refuses a deleted child
	})
}

// ChildModeration is a moderator's decision on a child.
type ChildModeration struct {
	Meta
	ID        string // a UUID in lower case
	IfVersion int64  // the version that the moderator saw, or AnyVersion
	// One of event.ModerationApproved, ModerationHidden, ModerationRemoved, and ModerationPending,
	// which waits for a moderator.
	State  string
	Reason string // for the event and the history; see ValidReason
}

// MaxReasonBytes bounds the reason of a moderation.
const MaxReasonBytes = 1000

// ValidReason reports whether s can be a reason: at most MaxReasonBytes of UTF-8 without control
// characters. It may be empty.
func ValidReason(s string) bool { return len(s) <= MaxReasonBytes && plainText(s) }

// plainText reports whether s is UTF-8 without control characters.
func plainText(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

// childModerateSQL changes moderation states, if the version is the expected one, the author has
// not deleted the child, and the state differs. Index: children_KIND_pkey. Locks: the children, in
// key order, changed or not.
const childModerateSQL = heldSQL + `
UPDATE /* store.child_moderate */ {{.Table}} c
   SET moderation_state = h.value, version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = ANY (ARRAY[h.tenant_id]) AND c.child_id = h.child_id AND (h.if_version = 0 OR c.version = h.if_version)
   AND c.author_state NOT IN ('DELETED', 'ERASED') AND c.moderation_state <> h.value
RETURNING c.tenant_id, ` + childColumns

// ModerateChildren approves, hides or removes children, or sets them to wait for a moderator, from
// any moderation state. Approval reverses earlier decisions. An outcome's error is ErrNotFound, a
// *StaleError or a *StateError: a child that its author deleted cannot be moderated. A child that
// already has the state does not change and makes no event, whatever the reason. The event has the
// reason; the truth does not keep it.
func (s *Store) ModerateChildren(ctx context.Context, tenant int64, k kinds.Child, moderations []ChildModeration) ([]ChildOutcome, error) {
	c, todo := s.children(k), slices.Clone(moderations)
	for i := range todo {
		todo[i].tenant = tenant
	}
	return withReturns(ctx, s, tenant, c, todo, c.moderate.do)
}

func (k *childKind) writeModerations(ctx context.Context, moderations []ChildModeration, at place) ([]ChildOutcome, error) {
	changes := make([]change, len(moderations))
	for i, m := range moderations {
		changes[i] = change{meta: m.Meta, id: m.ID, ifVersion: m.IfVersion, value: &m.State, reason: m.Reason}
		if !k.Moderated {
			changes[i].err = fmt.Errorf("%w: children of kind %s are not moderated", ErrInvalid, k.Kind)
		}
		switch m.State {
		case event.ModerationApproved, event.ModerationHidden, event.ModerationRemoved, event.ModerationPending:
		default:
			changes[i].err = fmt.Errorf("%w: moderation state %.80q", ErrInvalid, m.State)
		}
		if !ValidReason(m.Reason) {
			changes[i].err = fmt.Errorf("%w: reason of %d bytes", ErrInvalid, len(m.Reason))
		}
	}
	return k.change(ctx, changes, at, changeKind{
		event: event.Moderated, sql: childModerateSQL,
		allowed: func(c event.Child) bool { return c.AuthorState == event.AuthorActive },
		has:     func(c event.Child, to change) bool { return c.ModerationState == *to.value },
	})
}

type change struct {
	meta       Meta
	id         string
	ifVersion  int64
	value      *string // the new body or moderation state
	merge      mergeAttributes
	attributes json.RawMessage // the result of merge
	reason     string
	err        error
}

func (c change) check() error {
	if c.err != nil {
		return c.err
	}
	if err := checkMeta(c.meta); err != nil {
		return err
	}
	return checkUUID("child", c.id)
}

func (c change) key() childKey { return childKey{c.meta.tenant, c.id} }

// keysOf are the arguments that name the children of a turn.
func keysOf(changes []change, turn []int) postgres.Args {
	return postgres.Args{
		"tenants":   column(turn, func(i int) int64 { return changes[i].meta.tenant }),
		"child_ids": column(turn, func(i int) string { return changes[i].id }),
	}
}

// states runs a statement that reads the children of a turn.
func (s childShape) states(ctx context.Context, tx pgx.Tx, sql string, changes []change, turn []int) (map[childKey]childRow, error) {
	return s.collect(ctx, tx, sql, keysOf(changes, turn))
}

// changeKind is one kind of change: its guarded statement, and the conditions that explain why the
// guard refused an item.
type changeKind struct {
	event   string
	sql     string
	allowed func(c event.Child) bool            // the child's states allow the change
	has     func(c event.Child, to change) bool // the child already has what the change would set
}

// change runs one guarded transition.
func (k *childKind) change(ctx context.Context, changes []change, at place, kind changeKind) ([]ChildOutcome, error) {
	out, err := inTurns(ctx, k.store, at, changes, turns[change, childKey, ChildOutcome]{end: inOrder,
		check: func(c *change, o *ChildOutcome) (childKey, any, bool) {
			o.Err = c.check()
			return c.key(), nil, o.Err == nil
		},
		write: func(ctx context.Context, tx *unit, changes []change, turn []int, out []ChildOutcome) error {
			return k.changeTurn(ctx, tx, changes, turn, kind, out)
		}})
	if err != nil {
		return nil, fmt.Errorf("%s %s, %d of tenants %d: %w", k.Kind, kind.event, len(changes), at.tenants, err)
	}
	return out, nil
}

// childLockSQL locks children and reads them. Plan: as heldSQL. Index: children_KIND_pkey. Locks:
// the children, in key order.
const childLockSQL = `
SELECT /* store.child_lock */ c.tenant_id, ` + childColumns + `
  FROM unnest((SELECT @tenants::bigint[]), @child_ids::text[]::uuid[]) AS w(tenant_id, child_id)
  JOIN {{.Table}} c ON c.tenant_id = ANY (ARRAY[w.tenant_id]) AND c.child_id = w.child_id
 ORDER BY w.tenant_id, w.child_id
   FOR NO KEY UPDATE OF c`

// mergeTurn locks the children and merges the changed attributes into their present ones. An
// attribute that does not fit becomes the outcome of its change. mergeTurn returns the other
// changes. It leaves a change that the version or state forbids as it is, and the statement refuses
// it.
func (s childShape) mergeTurn(ctx context.Context, tx *unit, changes []change, turn []int, kind changeKind,
	out []ChildOutcome) (left []int, err error) {
	if !slices.ContainsFunc(turn, func(i int) bool { return changes[i].merge != nil }) {
		return turn, nil
	}
	// All of them: the statement then finds its locks taken, in key order.
	byID, err := s.states(ctx, tx, childLockSQL, changes, turn)
	if err != nil {
		return nil, fmt.Errorf("lock %d children: %w", len(turn), err)
	}
	if len(byID) < len(turn) { // some are shelved, or unknown
		all, err := s.states(ctx, tx, childGetSQL, changes, turn)
		if err != nil {
			return nil, err
		}
		maps.Copy(all, byID)
		byID = all
	}
	for _, i := range turn {
		c := &changes[i]
		row, ok := byID[c.key()]
		if now := row.wire(); ok && c.merge != nil && (c.ifVersion == AnyVersion || c.ifVersion == now.Version) && kind.allowed(now) {
			if c.attributes, out[i].Err = c.merge(now.Attributes); out[i].Err != nil {
				continue
			}
		}
		left = append(left, i)
	}
	return left, nil
}

func (s childShape) changeTurn(ctx context.Context, tx *unit, changes []change, turn []int, kind changeKind,
	out []ChildOutcome) error {
	turn, err := s.mergeTurn(ctx, tx, changes, turn, kind, out)
	if err != nil || len(turn) == 0 {
		return err
	}
	n := len(turn)
	index := make(map[childKey]int, n)
	for _, i := range turn {
		index[changes[i].key()] = i
	}
	args := keysOf(changes, turn)
	args["if_versions"] = column(turn, func(i int) int64 { return changes[i].ifVersion })
	args["values"] = column(turn, func(i int) *string { return changes[i].value })
	if s.Attributes {
		args["attributes"] = column(turn, func(i int) *string { return text(changes[i].attributes) })
	}
	rows, _ := tx.Query(ctx, s.sql(kind.sql), args)
	changed, err := pgx.CollectRows(rows, pgx.RowToStructByPos[childState])
	if err != nil {
		return fmt.Errorf("write %d children: %w", n, err)
	}
	for _, r := range changed {
		i, ok := index[r.key()]
		if !ok {
			return fmt.Errorf("child %s of tenant %d: %w", r.ID, r.TenantID, errNotOfGroup)
		}
		out[i] = ChildOutcome{Child: r.wire(), Changed: true}
		c := out[i].Child
		c.Reason = changes[i].reason
		e, err := s.event(r.TenantID, c, kind.event, changes[i].meta)
		if err != nil {
			return err
		}
		tx.events = append(tx.events, e)
	}
	if len(changed) == n {
		return nil
	}
	return s.explain(ctx, tx, changes, turn, kind, out)
}

// explain fills in the outcomes of the changes that the statement did not make.
func (s childShape) explain(ctx context.Context, tx *unit, changes []change, turn []int, kind changeKind, out []ChildOutcome) error {
	// The statement locked the existing rows, so these are the states that its guard saw. Shelved
	// children are the exception, even those that returned just now.
	current, err := s.states(ctx, tx, childGetSQL, changes, turn)
	if err != nil {
		return err
	}
	for _, i := range turn {
		if out[i].Changed {
			continue
		}
		row, ok := current[changes[i].key()]
		c := row.wire()
		switch {
		case !ok:
			out[i].Err = ErrNotFound
		case changes[i].ifVersion != AnyVersion && changes[i].ifVersion != c.Version:
			out[i].Err = &StaleError{Current: c}
		case !kind.allowed(c):
			out[i].Err = &StateError{Current: c}
		case kind.has(c, changes[i]):
			out[i].Child = c
		default: // only a shelved thread hides the child from the statement
			out[i].Err = &shelvedError{objects: []event.ID{row.Object}}
		}
	}
	return nil
}
