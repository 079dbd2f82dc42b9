package store

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// Errors of creates.
var (
	// ErrParentUnknown reports a parent that is not a child of the same object.
	ErrParentUnknown = errors.New("store: the parent is not a child of this object")
	// ErrParentGone reports a parent that is not visible.
	ErrParentGone = errors.New("store: the parent is not visible")
	// ErrThreadLocked reports an object whose thread takes no new children.
	ErrThreadLocked = errors.New("store: the thread is locked")
	// ErrTooDeep reports a parent at MaxDepth.
	ErrTooDeep = fmt.Errorf("store: replies nest at most %d deep", MaxDepth)
	// ErrKeyReused reports an idempotency key that made another child.
	ErrKeyReused = errors.New("store: the idempotency key was used with another request")
	// ErrKeyOrphaned reports an idempotency key whose child is missing: somebody deleted the row
	// with SQL.
	ErrKeyOrphaned = errors.New("store: the child that the idempotency key made is missing")
)

// NewChild is a child to create.
type NewChild struct {
	Meta
	Object     event.ID // the object that the child belongs to
	AuthorID   event.ID
	ReplyTo    string          // in a threaded kind: the UUID, in lower case, of the child of the same object that this one replies to
	Body       string          // trimmed before it is stored
	Attributes json.RawMessage // validated, and stored in one form (kinds.Child.Check)

	// Key makes the create idempotent: a repeat with the same author and key returns the first
	// result. It has 1 to 255 visible ASCII characters, or is empty.
	Key string

	err error // why the attributes are invalid
}

// MaxKeyLen bounds an idempotency key.
const MaxKeyLen = 255

// ValidKey reports whether s can be an idempotency key: 1 to MaxKeyLen visible ASCII characters.
func ValidKey(s string) bool {
	for _, c := range []byte(s) {
		if c <= ' ' || c >= 0x7f {
			return false
		}
	}
	return s != "" && len(s) <= MaxKeyLen
}

// ChildOutcome is the result of one write of a child.
type ChildOutcome struct {
	Child    event.Child // the present state; for a replayed create, the first state
	Changed  bool        // this write changed it and made an event
	Replayed bool        // an earlier create with the same key had made it
	Err      error       // one of this package's errors: the write changed nothing
}

// creation is a NewChild with everything that its insert needs.
type creation struct {
	in       NewChild
	body     string
	id       string
	hash     []byte
	holdsKey bool // an attempt of this transaction took the key, but has not made the child
}

func (c *creation) prepare(k *childKind) error {
	in := &c.in
	if err := checkMeta(in.Meta); err != nil {
		return err
	}
	if err := cmp.Or(checkID(k.ParentIDs, in.Object), checkID(k.AuthorIDs, in.AuthorID)); err != nil {
		return err
	}
	if in.ReplyTo != "" {
		if !k.Threaded {
			return fmt.Errorf("%w: kind %s has no replies", ErrInvalid, k.Kind)
		}
		if err := checkUUID("parent", in.ReplyTo); err != nil {
			return err
		}
	}
	if in.Key != "" && !ValidKey(in.Key) {
		return fmt.Errorf("%w: idempotency key %.80q", ErrInvalid, in.Key)
	}
	var err error
	if c.body, err = trimBody(in.Body); err != nil {
		return err
	}
	if in.err != nil {
		return in.err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return fmt.Errorf("make an id: %w", err)
	}
	c.id = id.String()
	// attributes are a JSON object or empty, so the hash is unambiguous
	h := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%s%s", in.Object, in.ReplyTo, in.Attributes, c.body))
	c.hash = h[:]
	return nil
}

// child returns the child as its create made it: everything else equals the request.
func (c *creation) child(id string, slug, path *string, moderation string, at time.Time) event.Child {
	return event.Child{
		ID: id, Parent: c.in.Object, ReplyTo: c.in.ReplyTo, Slug: orEmpty(slug), Path: orEmpty(path),
		AuthorID: c.in.AuthorID, Body: c.body, Attributes: c.in.Attributes, AuthorState: event.AuthorActive,
		ModerationState: moderation, Version: 1, CreatedAt: wireTime(at), UpdatedAt: wireTime(at),
	}
}

// checkAttributes validates the attributes of a write and brings them into their one form.
func checkAttributes(k kinds.Child, attributes json.RawMessage) (json.RawMessage, error) {
	switch {
	case len(k.Attributes) > 0:
		return k.Check(attributes)
	case attributes != nil:
		return nil, fmt.Errorf("%w: kind %s has no attributes", ErrInvalid, k.Name)
	}
	return nil, nil
}

// CreateChildren makes children. A child of a premoderated thread starts PENDING. created_at is the
// database's clock, and later than the parent's.
//
// A create with a key takes its key row first. A concurrent equal create waits there and then
// returns the same result. In a kind that allows one child per author and object, a second one gets
// a *TakenError with the first one.
//
// CreateChildren brings a shelved thread back first, which may split a slice into several
// transactions. If that takes too long, the call or an outcome gets ErrThreadReturning, and the
// write did nothing.
func (s *Store) CreateChildren(ctx context.Context, tenant int64, k kinds.Child, children []NewChild) ([]ChildOutcome, error) {
	c, todo := s.children(k), slices.Clone(children)
	for i := range todo {
		todo[i].tenant = tenant
		todo[i].Attributes, todo[i].err = checkAttributes(k, todo[i].Attributes)
	}
	return withReturns(ctx, s, tenant, c, todo, c.create.do)
}

// entity returns what a create may have to wait for: the author's place with the object, or the
// key. nil: it never waits.
func (k *childKind) entity(c NewChild) any {
	switch {
	case k.OnePerAuthor:
		return c.place()
	case c.Key == "":
		return nil
	}
	return authorKey{c.tenant, c.AuthorID, c.Key}
}

type authorPlace struct {
	tenant         int64
	author, object event.ID
}

func (c NewChild) place() authorPlace { return authorPlace{c.tenant, c.AuthorID, c.Object} }

type authorKey struct {
	tenant int64
	author event.ID
	key    string
}

func (k *childKind) writeNew(ctx context.Context, children []NewChild, at place) ([]ChildOutcome, error) {
	todo := make([]creation, len(children))
	for i := range todo {
		todo[i].in = children[i]
	}
	type key struct {
		authorKey
		alone *creation // distinguishes items without a key
	}
	all := turns[creation, key, ChildOutcome]{write: k.createTurn, end: inOrder,
		check: func(c *creation, o *ChildOutcome) (key, any, bool) {
			o.Err = c.prepare(k)
			of := key{authorKey: authorKey{c.in.tenant, c.in.AuthorID, c.in.Key}}
			if of.key == "" {
				of.alone = c
			}
			if k.OnePerAuthor {
				return of, c.in.place(), o.Err == nil
			}
			return of, nil, o.Err == nil
		}}
	var out []ChildOutcome
	var err error
	for attempt := 1; ; attempt++ {
		out, err = inTurns(ctx, k.store, at, todo, all)
		if attempt == maxInserts || !postgres.IsUnique(err, "") {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("create %d children of the kind %s of tenants %d: %w", len(children), k.Kind, at.tenants, err)
	}
	return out, nil
}

func (k *childKind) createTurn(ctx context.Context, tx *unit, todo []creation, turn []int, out []ChildOutcome) error {
	for _, i := range turn {
		todo[i].holdsKey = false // a retry of the transaction
	}
	left := turn
	for attempt := 1; len(left) > 0; attempt++ {
		if attempt > maxInserts {
			return fmt.Errorf("insert %d children: no free slug in %d attempts", len(left), maxInserts)
		}
		var err error
		if left, err = k.tryCreate(ctx, tx, todo, left, out); err != nil {
			return err
		}
	}
	var release []int
	tx.events = slices.Grow(tx.events, len(turn))
	for _, i := range turn {
		if !out[i].Changed {
			if todo[i].holdsKey {
				release = append(release, i)
			}
			continue
		}
		e, err := k.event(todo[i].in.tenant, out[i].Child, event.Created, todo[i].in.Meta)
		if err != nil {
			return err
		}
		tx.events = append(tx.events, e)
	}
	return k.releaseKeys(ctx, tx, todo, release)
}

// childCreateSQL takes keys and inserts children. A child needs its key, and a thread and a parent
// that do not refuse it: the statement returns refused, NULL or a key of refusals. It inserts no
// child of a shelved thread: its transaction must have its id by now, because the shelver waits for
// transactions that have one (ADR 8). It also leaves out a child if the author already has one of
// the object. A slug that the object already has is an error.
//
// The statement looks at a thread and a parent before it waits for keys. It locks neither: if a
// parent is deleted meanwhile, the reply counts as written before the deletion.
//
// OFFSET 0 keeps each look-up a probe per item; PostgreSQL would plan a plain join as a scan of the
// tenant's children while the tables have no statistics. The subquery about @tenants hides from the
// planner how many items there are. Otherwise it plans the statement anew for each small group,
// which takes longer than to run it. The innermost query of made reads the clock once per child.
//
// All keys are taken before the first child of a kind with one child per author is inserted, and
// these in the order of their places: the statement waits for a key or a place that another
// transaction takes. Index: threads_head_idx, archived_threads_stub_idx, child_keys_pkey,
// children_KIND_pkey; threaded: children_KIND_slug_key, children_KIND_path_key, else
// children_KIND_object_idx; one per author: children_KIND_author_key. Locks: the keys, in key
// order; the new rows.
const childCreateSQL = `
WITH wanted AS (
  SELECT w.*, {{if .Threaded}}p.path AS parent_path, p.created_at AS parent_at,{{end}}
         {{if .Moderated}}CASE WHEN (t.object ->> 'premoderated')::boolean THEN 'PENDING' ELSE 'NONE' END
         {{- else}}'NONE'{{end}} AS moderation_state,
         CASE {{if .Moderated}}WHEN (t.object ->> 'locked')::boolean THEN 'locked' {{end -}}
              WHEN a.archived THEN 'shelved'
{{- if .Threaded}}
              WHEN w.reply_to IS NULL THEN NULL
              WHEN p.path IS NULL THEN 'parent unknown'
              WHEN p.author_state <> 'ACTIVE' OR p.moderation_state NOT IN ('NONE', 'APPROVED') THEN 'parent gone'
              WHEN length(p.path) >= {{.DeepestPath}} THEN 'too deep'
{{- end}} END AS refused
    FROM unnest((SELECT @tenants::bigint[]), @child_ids::text[]::uuid[], @object_ids::text[], @author_ids::text[], @bodies::text[],
                @keys::text[], @hashes::bytea[]
                {{- if .Threaded}}, @reply_tos::text[]::uuid[], @slugs::text[]{{end}}
                {{- if .Attributes}}, @attributes::text[]{{end}}) WITH ORDINALITY
      AS w(tenant_id, child_id, object_id, author_id, body, key, hash
           {{- if .Threaded}}, reply_to, slug{{end}}{{if .Attributes}}, attributes{{end}}, ord)
{{- if .Moderated}}
    LEFT JOIN LATERAL (SELECT object FROM threads
                        WHERE tenant_id = w.tenant_id AND post_id = w.object_id AND kind = '{{.Kind}}'
                          AND version_state = 'LATEST' OFFSET 0) t ON true
{{- end}}
    LEFT JOIN LATERAL (SELECT true AS archived FROM archived_threads
                        WHERE tenant_id = w.tenant_id AND kind = '{{.Kind}}' AND object_id = w.object_id
                          AND state <> 'RETURNED' OFFSET 0) a ON true
{{- if .Threaded}}
    LEFT JOIN LATERAL (SELECT * FROM {{.Table}} WHERE tenant_id = w.tenant_id AND child_id = w.reply_to OFFSET 0) p
      ON p.object_id = w.object_id
{{- end}}
), taken AS (
  INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id, moderation_state)
  SELECT tenant_id, '{{.Kind}}', author_id, key, hash, child_id, moderation_state FROM wanted WHERE key IS NOT NULL
   ORDER BY tenant_id, author_id COLLATE "C", key COLLATE "C"
  ON CONFLICT DO NOTHING
  RETURNING tenant_id, child_id
), made AS (
  INSERT INTO {{.Table}} AS c
         (tenant_id, child_id, object_id, {{if .Threaded}}parent_id, slug, path, {{end}}author_id, body,
          {{if .Attributes}}attributes, {{end}}moderation_state, created_at, updated_at)
  SELECT n.tenant_id, n.child_id, n.object_id,
         {{if .Threaded}}n.reply_to, n.slug,
         coalesce(n.parent_path || '/', '') || lpad(to_hex((extract(epoch FROM n.at) * 1000000)::bigint), 14, '0') || n.slug, {{end -}}
         n.author_id, n.body, {{if .Attributes}}n.attributes::jsonb, {{end}}n.moderation_state, n.at, n.at
    FROM (SELECT w.*, {{if .Threaded}}GREATEST(clock_timestamp(), w.parent_at + interval '1 microsecond')
                      {{- else}}clock_timestamp(){{end}} AS at
            FROM wanted w
           WHERE refused IS NULL AND (key IS NULL OR (tenant_id, child_id) IN (SELECT tenant_id, child_id FROM taken))) n
{{- if .OnePerAuthor}}
   ORDER BY n.tenant_id, n.object_id COLLATE "C", n.author_id COLLATE "C", n.ord
  ON CONFLICT DO NOTHING
{{- end}}
  RETURNING c.tenant_id, c.child_id, c.slug, c.path, c.created_at
)
SELECT /* store.child_create */ w.ord::int, w.refused,
       m.child_id IS NULL AND (w.tenant_id, w.child_id) IN (SELECT tenant_id, child_id FROM taken),
       w.moderation_state, m.tenant_id, m.slug, m.path, m.created_at
  FROM wanted w LEFT JOIN made m ON m.tenant_id = w.tenant_id AND m.child_id = w.child_id`

type createRow struct {
	Ord             int
	Refused         *string
	TookKey         bool // for a child that it did not insert
	ModerationState string
	TenantID        *int64 // of the child that it inserted, as the rest
	Slug            *string
	Path            *string
	CreatedAt       *time.Time
}

// DeepestPath returns the length of the path of a child at MaxDepth.
func (s childShape) DeepestPath() int { return MaxDepth*(segmentLen+1) - 1 }

// refusals are the reasons of childCreateSQL, except a shelved thread.
var refusals = map[string]error{
	"locked": ErrThreadLocked, "parent unknown": ErrParentUnknown, "parent gone": ErrParentGone, "too deep": ErrTooDeep,
}

// maxInserts bounds the transactions of a create that meets taken slugs, and the attempts of each
// to insert children that an earlier one left out. With 2^40 slugs, a thread of a million children
// needs a second transaction once in a million creates: too rarely for an ON CONFLICT, which takes
// PostgreSQL 3 us per child. An author's place, or a key that retention purged, may become free
// between attempts.
const maxInserts = 5

// tryCreate makes children with new slugs. It returns the items that are neither made, nor refused,
// nor made before.
func (k *childKind) tryCreate(ctx context.Context, tx pgx.Tx, todo []creation, turn []int, out []ChildOutcome) ([]int, error) {
	rows, _ := tx.Query(ctx, k.sql(childCreateSQL), k.createArgs(todo, turn))
	got, err := pgx.AppendRows(make([]createRow, 0, len(turn)), rows, pgx.RowToStructByPos[createRow])
	if err != nil {
		return nil, fmt.Errorf("insert %d children: %w", len(turn), err)
	}
	var known, left []int
	for _, r := range got {
		i := turn[r.Ord-1]
		c := &todo[i]
		switch {
		case r.TenantID != nil && *r.TenantID != c.in.tenant:
			return nil, fmt.Errorf("child %s of tenant %d: %w", c.id, *r.TenantID, errNotOfGroup)
		case r.TenantID != nil:
			out[i].Child, out[i].Changed = c.child(c.id, r.Slug, r.Path, r.ModerationState, *r.CreatedAt), true
			continue
		case c.in.Key != "" && !c.holdsKey && !r.TookKey:
			known = append(known, i)
			continue
		}
		c.holdsKey = c.in.Key != ""
		switch {
		case r.Refused == nil:
			left = append(left, i)
		case *r.Refused == "shelved":
			out[i].Err = &shelvedError{objects: []event.ID{c.in.Object}}
		default:
			out[i].Err = refusals[*r.Refused]
		}
	}
	purged, err := k.replay(ctx, tx, todo, known, out)
	if err != nil {
		return nil, err
	}
	taken, err := k.taken(ctx, tx, column(left, func(i int) int64 { return todo[i].in.tenant }),
		column(left, func(i int) event.ID { return todo[i].in.Object }), column(left, func(i int) event.ID { return todo[i].in.AuthorID }))
	if err != nil {
		return nil, err
	}
	left = slices.DeleteFunc(left, func(i int) bool {
		first, ok := taken[todo[i].in.place()]
		if ok {
			out[i].Err = &TakenError{Child: first}
		}
		return ok
	})
	left = append(left, purged...)
	slices.Sort(left)
	return left, nil
}

// createArgs are the arguments of childCreateSQL. An item that holds its key has none.
func (k *childKind) createArgs(todo []creation, turn []int) postgres.Args {
	args := postgres.Args{
		"tenants":    column(turn, func(i int) int64 { return todo[i].in.tenant }),
		"child_ids":  column(turn, func(i int) string { return todo[i].id }),
		"object_ids": column(turn, func(i int) string { return string(todo[i].in.Object) }),
		"author_ids": column(turn, func(i int) string { return string(todo[i].in.AuthorID) }),
		"bodies":     column(turn, func(i int) string { return todo[i].body }),
		"hashes":     column(turn, func(i int) []byte { return todo[i].hash }),
	}
	args["keys"] = column(turn, func(i int) *string {
		if todo[i].holdsKey {
			return nil
		}
		return postgres.IfSet(todo[i].in.Key)
	})
	if k.Threaded {
		args["slugs"] = column(turn, func(int) string { return k.store.slug() })
		args["reply_tos"] = column(turn, func(i int) *string { return postgres.IfSet(todo[i].in.ReplyTo) })
	}
	if k.Attributes {
		args["attributes"] = column(turn, func(i int) *string { return text(todo[i].in.Attributes) })
	}
	return args
}

// keyArgs are the arguments that name the keys of items.
func keyArgs(todo []creation, items []int) postgres.Args {
	return postgres.Args{
		"tenants":    column(items, func(i int) int64 { return todo[i].in.tenant }),
		"author_ids": column(items, func(i int) string { return string(todo[i].in.AuthorID) }),
		"keys":       column(items, func(i int) string { return todo[i].in.Key }),
	}
}

// childReplaySQL reads the children that keys made. It takes only columns that never change from
// the child's own row, shelved or not. Index: child_keys_pkey, children_KIND_pkey,
// children_archive_KIND_pkey. Locks: none.
const childReplaySQL = `
SELECT /* store.child_replay */ w.ord::int, k.request_hash, k.moderation_state, c.child_id::text, c.slug, c.path, c.created_at
  FROM unnest(@tenants::bigint[], @author_ids::text[], @keys::text[]) WITH ORDINALITY AS w(tenant_id, author_id, key, ord)
  JOIN child_keys k ON k.tenant_id = w.tenant_id AND k.kind = '{{.Kind}}' AND k.author_id = w.author_id AND k.idempotency_key = w.key
  LEFT JOIN {{.All}} c ON c.tenant_id = k.tenant_id AND c.child_id = k.child_id`

type replayRow struct {
	Ord             int
	RequestHash     []byte
	ModerationState string
	ID              *string
	Slug            *string
	Path            *string
	CreatedAt       *time.Time
}

// replay returns the first result of each key again: version 1 with the body and attributes of the
// request, which equals the first one. It returns the items whose key no longer exists.
func (s childShape) replay(ctx context.Context, tx pgx.Tx, todo []creation, known []int,
	out []ChildOutcome) (purged []int, err error) {
	if len(known) == 0 {
		return nil, nil
	}
	rows, _ := tx.Query(ctx, s.sql(childReplaySQL), keyArgs(todo, known))
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[replayRow])
	if err != nil {
		return nil, fmt.Errorf("read %d idempotency keys: %w", len(known), err)
	}
	missing := slices.Clone(known)
	for _, r := range got {
		i := known[r.Ord-1]
		missing[r.Ord-1] = -1
		c := &todo[i]
		switch {
		case !slices.Equal(r.RequestHash, c.hash):
			out[i].Err = ErrKeyReused
		case r.ID == nil:
			out[i].Err = fmt.Errorf("replay key %q of author %s: %w", c.in.Key, c.in.AuthorID, ErrKeyOrphaned)
		default:
			out[i].Replayed = true
			out[i].Child = c.child(*r.ID, r.Slug, r.Path, r.ModerationState, *r.CreatedAt)
		}
	}
	return slices.DeleteFunc(missing, func(i int) bool { return i < 0 }), nil
}

// childReleaseSQL releases the keys of refused creates, so that a retry can succeed.
// Index: child_keys_pkey. Locks: rows of this transaction.
const childReleaseSQL = `
DELETE /* store.child_release */ FROM child_keys k
 USING unnest(@tenants::bigint[], @author_ids::text[], @keys::text[]) AS w(tenant_id, author_id, key)
 WHERE k.tenant_id = w.tenant_id AND k.kind = '{{.Kind}}' AND k.author_id = w.author_id AND k.idempotency_key = w.key`

func (s childShape) releaseKeys(ctx context.Context, tx pgx.Tx, todo []creation, items []int) error {
	if len(items) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, s.sql(childReleaseSQL), keyArgs(todo, items)); err != nil {
		return fmt.Errorf("release %d idempotency keys: %w", len(items), err)
	}
	return nil
}

// childTakenSQL reads the children that hold the places that creates want.
// Index: children_KIND_author_key. Locks: none.
const childTakenSQL = `
SELECT /* store.child_taken */ c.tenant_id, ` + childColumns + `
  FROM unnest(@tenants::bigint[], @object_ids::text[], @author_ids::text[]) AS w(tenant_id, object_id, author_id)
 CROSS JOIN LATERAL (SELECT * FROM {{.Table}}
                      WHERE tenant_id = w.tenant_id AND object_id = w.object_id AND author_id = w.author_id
                        AND author_state = 'ACTIVE' OFFSET 0) c`

// taken returns the children that hold these places.
func (s childShape) taken(ctx context.Context, tx pgx.Tx, tenants []int64,
	objects, authors []event.ID) (map[authorPlace]event.Child, error) {
	if !s.OnePerAuthor || len(objects) == 0 {
		return nil, nil
	}
	rows, _ := tx.Query(ctx, s.sql(childTakenSQL),
		postgres.Args{"tenants": tenants, "object_ids": objects, "author_ids": authors})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[childState])
	if err != nil {
		return nil, fmt.Errorf("read the children in %d places: %w", len(objects), err)
	}
	by := make(map[authorPlace]event.Child, len(got))
	for _, r := range got {
		by[authorPlace{r.TenantID, r.AuthorID, r.Object}] = r.wire()
	}
	return by, nil
}

// text converts JSON to a statement's argument, nil to NULL.
func text(j json.RawMessage) *string {
	if j == nil {
		return nil
	}
	return new(string(j))
}
