package store

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
	"sync"
	"text/template"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// Errors of single children.
var (
	// ErrBodyEmpty reports a body that is only white space.
	ErrBodyEmpty = errors.New("store: the body is empty")
	// ErrBodyTooLong reports a body of more than MaxBodyBytes after trimming.
	ErrBodyTooLong = fmt.Errorf("store: the body is longer than %d bytes", MaxBodyBytes)
	// ErrBodyText reports a body that is not text: invalid UTF-8, or NUL, which PostgreSQL cannot
	// keep.
	ErrBodyText = errors.New("store: the body is not valid UTF-8 without NUL")
)

// StaleError reports that the child has another version than the write expects.
type StaleError struct{ Current event.Child }

func (e *StaleError) Error() string {
	return fmt.Sprintf("store: child %s is at version %d", e.Current.ID, e.Current.Version)
}

// StateError reports that the child's state does not allow the write. The child is deleted or
// erased; or, for an edit, a moderator hid or removed it.
type StateError struct{ Current event.Child }

func (e *StateError) Error() string {
	return fmt.Sprintf("store: child %s is %s", e.Current.ID, e.Current.State())
}

// TakenError reports that the author already has a child of the object, in a kind that allows one
// per author.
type TakenError struct{ Child event.Child }

func (e *TakenError) Error() string {
	return fmt.Sprintf("store: author %s already has child %s of object %s", e.Child.AuthorID, e.Child.ID, e.Child.Parent)
}

// MaxBodyBytes bounds a child's body after trimming.
const MaxBodyBytes = 16 << 10

// trimBody returns the body without white space at its ends, as the store keeps it.
func trimBody(body string) (string, error) {
	if !utf8.ValidString(body) || strings.IndexByte(body, 0) >= 0 {
		return "", ErrBodyText
	}
	body = strings.TrimSpace(body)
	if body == "" {
		return "", ErrBodyEmpty
	}
	if len(body) > MaxBodyBytes {
		return "", ErrBodyTooLong
	}
	return body, nil
}

// A path is one segment per level, joined by '/'. A segment is 14 hexadecimal digits of the
// microseconds since 1970, and the slug. All segments have one width, so paths sort in the order of
// the thread, siblings by age. childCreateSQL makes them.
const (
	slugLen    = 8
	segmentLen = 14 + slugLen

	// MaxDepth bounds the nesting of replies; a child of an object has depth 1.
	MaxDepth = 64
)

// Depth returns the depth of the child with this path, from 1.
func Depth(path string) int { return (len(path) + 1) / (segmentLen + 1) }

// slugEncoding encodes a slug's 40 random bits in Crockford's alphabet: lower case, without letters
// that look alike.
var slugEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

func newSlug() string {
	b := make([]byte, slugLen*5/8)
	rand.Read(b) // never fails
	return slugEncoding.EncodeToString(b)
}

// childShape has everything on which the statements about a kind of children depend. A statement is
// rendered from a template, which names the kind's tables and includes only the parts for its
// capabilities. So a capability that a kind lacks costs it nothing.
type childShape struct {
	Kind                                          string
	Names                                         event.ChildNames
	ParentIDs, AuthorIDs                          kinds.IDForm
	Threaded, Moderated, OnePerAuthor, Attributes bool
}

func shapeOf(k kinds.Child) childShape {
	return childShape{Kind: k.Name, Names: k.Names(), ParentIDs: k.ParentIDs, AuthorIDs: k.AuthorIDs,
		Threaded: k.Threaded, Moderated: k.Moderated, OnePerAuthor: k.OnePerAuthor, Attributes: len(k.Attributes) > 0}
}

// Table returns the kind's partition of children. Names of kinds are identifiers.
func (s childShape) Table() string { return "children_" + s.Kind }

// Shelf returns the kind's partition of children_archive.
func (s childShape) Shelf() string { return "children_archive_" + s.Kind }

// Order returns the column that orders the children of one object. It has an index.
func (s childShape) Order() string {
	if s.Threaded {
		return "path"
	}
	return "child_id"
}

// All returns a table expression of the kind's children, shelved or not.
func (s childShape) All() string {
	return "(SELECT * FROM " + s.Table() + " UNION ALL SELECT * FROM " + s.Shelf() + ")"
}

// statements has the rendered statements by text and shape.
var statements sync.Map

// sql renders a statement for the kind, once per process.
func (s childShape) sql(text string) string {
	type key struct {
		text  string
		shape childShape
	}
	if sql, ok := statements.Load(key{text, s}); ok {
		return sql.(string)
	}
	var b strings.Builder
	if err := template.Must(template.New("").Parse(text)).Execute(&b, s); err != nil {
		panic(err) // the texts are constants
	}
	statements.Store(key{text, s}, b.String())
	return b.String()
}

// childKind is a kind with its lanes for single writes.
type childKind struct {
	childShape
	store    *Store
	create   *lanes[NewChild, ChildOutcome]
	edit     *lanes[ChildEdit, ChildOutcome]
	delete   *lanes[ChildDelete, ChildOutcome]
	moderate *lanes[ChildModeration, ChildOutcome]
	settings *lanes[ThreadSettings, ThreadOutcome]
}

// children returns the kind. Its first use makes the kind's lanes.
func (s *Store) children(k kinds.Child) *childKind {
	shape := shapeOf(k)
	if got, ok := s.childKinds.Load(shape); ok {
		return got.(*childKind)
	}
	c := &childKind{childShape: shape, store: s}
	c.create = newLanes(s.slots, c.entity, c.writeNew)
	c.edit = newLanes(s.slots, func(w ChildEdit) any { return w.ID }, c.writeEdits)
	c.delete = newLanes(s.slots, func(w ChildDelete) any { return w.ID }, c.writeDeletes)
	c.moderate = newLanes(s.slots, func(w ChildModeration) any { return w.ID }, c.writeModerations)
	c.settings = newLanes(s.slots, func(w ThreadSettings) any { return w.Object }, c.writeSettings)
	c.create.shared, c.edit.shared, c.delete.shared, c.moderate.shared = true, true, true, true
	got, _ := s.childKinds.LoadOrStore(shape, c)
	return got.(*childKind)
}

// childColumns are the columns of childRow, from a table with the alias c.
const childColumns = `c.child_id::text, c.object_id, c.parent_id::text, c.slug, c.path, c.author_id, c.body, c.attributes,
       c.author_state, c.moderation_state, c.version, c.created_at, c.updated_at`

type childRow struct {
	ID              string
	Object          event.ID
	ReplyTo         *string
	Slug            *string
	Path            *string
	AuthorID        event.ID
	Body            string
	Attributes      []byte
	AuthorState     string
	ModerationState string
	Version         int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
}

func (r childRow) wire() event.Child {
	return event.Child{
		ID: r.ID, Parent: r.Object, ReplyTo: orEmpty(r.ReplyTo), Slug: orEmpty(r.Slug), Path: orEmpty(r.Path),
		AuthorID: r.AuthorID, Body: r.Body, Attributes: CanonicalAttributes(r.Attributes), AuthorState: r.AuthorState,
		ModerationState: r.ModerationState, Version: r.Version, CreatedAt: wireTime(r.CreatedAt), UpdatedAt: wireTime(r.UpdatedAt),
	}
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// event returns the event of the child's state after a write. If the body does not travel, the
// attributes do not either.
func (s childShape) event(tenant int64, c event.Child, eventType string, m Meta) (event.Event, error) {
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		c.Body, c.Attributes = "", nil
	}
	c.Actor = m.Actor
	payload, err := c.Encode(s.Names)
	if err != nil {
		return event.Event{}, err
	}
	return event.Event{
		TenantID: tenant, AggregateType: s.Kind, AggregateID: c.Parent, Type: eventType,
		OccurredAt: c.UpdatedAt.Time, TraceParent: m.TraceParent, Payload: payload,
	}, nil
}

// childGetSQL reads children, shelved or not. Plan: as childCreateSQL. Index: children_KIND_pkey,
// children_archive_KIND_pkey. Locks: none.
const childGetSQL = `
SELECT /* store.child_get */ c.tenant_id, ` + childColumns + `
  FROM unnest((SELECT @tenants::bigint[]), @child_ids::text[]::uuid[]) AS w(tenant_id, child_id)
 CROSS JOIN LATERAL (SELECT * FROM {{.All}} a WHERE tenant_id = w.tenant_id AND child_id = w.child_id OFFSET 0) c`

func (s childShape) get(ctx context.Context, tx postgres.Querier, tenant int64, ids []string) (map[string]childRow, error) {
	got, err := s.collect(ctx, tx, childGetSQL, postgres.Args{"tenants": sameTenant(tenant, len(ids)), "child_ids": ids})
	byID := make(map[string]childRow, len(got))
	for k, r := range got {
		byID[k.id] = r
	}
	return byID, err
}

// collect runs a statement that reads children by their ids.
func (s childShape) collect(ctx context.Context, q postgres.Querier, sql string, args postgres.Args) (map[childKey]childRow, error) {
	rows, _ := q.Query(ctx, s.sql(sql), args)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[childState])
	if err != nil {
		return nil, fmt.Errorf("read children: %w", err)
	}
	all := make(map[childKey]childRow, len(got))
	for _, r := range got {
		all[r.key()] = r.childRow
	}
	return all, nil
}

// GetChild returns the child in any state, or ErrNotFound. id is a UUID in lower case. The result
// has the body even if the child is not visible: the caller decides who sees it. It has no Actor,
// which the truth does not keep.
func (s *Store) GetChild(ctx context.Context, tenant int64, k kinds.Child, id string) (event.Child, error) {
	var c event.Child
	err := s.read(ctx, tenant, func(tx pgx.Tx) error {
		byID, err := shapeOf(k).get(ctx, tx, tenant, []string{id})
		if err != nil {
			return err
		}
		row, ok := byID[id]
		if !ok {
			return ErrNotFound
		}
		c = row.wire()
		return nil
	})
	if err != nil {
		return event.Child{}, fmt.Errorf("read %s %s of tenant %d: %w", k.Name, id, tenant, err)
	}
	return c, nil
}
