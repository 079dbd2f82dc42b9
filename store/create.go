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
	in         NewChild
	body       string
	id         string
	hash       []byte
	moderation string // the first state
	parentPath string
	parentAt   *time.Time
}

func (c *creation) key() childKey { return childKey{c.in.tenant, c.id} }

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
	out, err := inTurns(ctx, k.store, at, todo, turns[creation, key, ChildOutcome]{write: k.createTurn, end: inOrder,
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
		}})
	if err != nil {
		return nil, fmt.Errorf("create %d children of the kind %s of tenants %d: %w", len(children), k.Kind, at.tenants, err)
	}
	return out, nil
}

func (k *childKind) createTurn(ctx context.Context, tx *unit, todo []creation, turn []int, out []ChildOutcome) error {
	// This read locks nothing: if a parent is deleted meanwhile, the reply counts as written before
	// the deletion.
	refused, err := k.surroundings(ctx, tx, todo, turn)
	if err != nil {
		return err
	}
	fresh, known, err := k.takeKeys(ctx, tx, todo, turn)
	if err != nil {
		return err
	}
	purged, err := k.replay(ctx, tx, todo, known, out)
	if err != nil {
		return err
	}
	if len(purged) > 0 { // retention purged these keys since takeKeys met them: they are free
		again, known, err := k.takeKeys(ctx, tx, todo, purged)
		if err != nil {
			return err
		}
		if purged, err = k.replay(ctx, tx, todo, known, out); err != nil {
			return err
		}
		if len(purged) > 0 { // a new key cannot be purged
			return fmt.Errorf("read %d idempotency keys: %d are missing", len(known), len(purged))
		}
		fresh = append(fresh, again...)
		slices.Sort(fresh)
	}
	var write, release []int
	for _, i := range fresh {
		if out[i].Err = refused[i]; out[i].Err == nil {
			write = append(write, i)
		} else if todo[i].in.Key != "" {
			release = append(release, i)
		}
	}
	if err := k.insert(ctx, tx, todo, write, out); err != nil {
		return err
	}
	for _, i := range write {
		if !out[i].Changed && todo[i].in.Key != "" {
			release = append(release, i)
		}
	}
	if err := k.releaseKeys(ctx, tx, todo, release); err != nil {
		return err
	}
	tx.events = slices.Grow(tx.events, len(write))
	for _, i := range write {
		if !out[i].Changed {
			continue
		}
		e, err := k.event(todo[i].in.tenant, out[i].Child, event.Created, todo[i].in.Meta)
		if err != nil {
			return err
		}
		tx.events = append(tx.events, e)
	}
	return nil
}

// childSurroundingsSQL reads everything that can refuse a create: the thread's settings, its
// stub, and the parent. OFFSET 0 keeps each look-up a probe per item; PostgreSQL would plan
// a plain join as a scan of the tenant's children while the tables have no statistics. The
// subquery about @tenants hides from the planner how many items there are. Otherwise it plans the
// statement anew for each small group, which takes longer than to run it. The statement gives the
// transaction its id before the insert, because the shelver waits for transactions that have an id
// (ADR 0008). Index: threads_head_idx, archived_threads_stub_idx,
// children_KIND_pkey. Locks: none.
const childSurroundingsSQL = `
SELECT /* store.child_surroundings */ w.ord::int,
       {{if .Moderated}}coalesce((t.object ->> 'locked')::boolean, false), coalesce((t.object ->> 'premoderated')::boolean, false)
       {{- else}}false, false{{end}},
       a.archived IS NOT NULL, {{if .Threaded}}p.path, p.created_at, p.author_state, p.moderation_state
       {{- else}}NULL::text, NULL::timestamptz, NULL::text, NULL::text{{end}}
  FROM unnest((SELECT @tenants::bigint[]), @object_ids::text[], @reply_tos::text[]::uuid[]) WITH ORDINALITY
    AS w(tenant_id, object_id, reply_to, ord)
 CROSS JOIN pg_current_xact_id()
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
{{- end}}`

type surroundingsRow struct {
	Ord             int
	Locked          bool
	Premoderated    bool
	Shelved         bool
	Path            *string
	CreatedAt       *time.Time
	AuthorState     *string
	ModerationState *string
}

// surroundings fills in the first moderation state and the parent's place. It returns the reason
// for each item that must be refused.
func (s childShape) surroundings(ctx context.Context, tx pgx.Tx, todo []creation, turn []int) (map[int]error, error) {
	tenants, objects, parents := make([]int64, len(turn)), make([]string, len(turn)), make([]*string, len(turn))
	for n, i := range turn {
		tenants[n], objects[n] = todo[i].in.tenant, string(todo[i].in.Object)
		if todo[i].in.ReplyTo != "" {
			parents[n] = &todo[i].in.ReplyTo
		}
	}
	rows, _ := tx.Query(ctx, s.sql(childSurroundingsSQL),
		postgres.Args{"tenants": tenants, "object_ids": objects, "reply_tos": parents})
	got, err := pgx.AppendRows(make([]surroundingsRow, 0, len(turn)), rows, pgx.RowToStructByPos[surroundingsRow])
	if err != nil {
		return nil, fmt.Errorf("read the surroundings of %d children: %w", len(turn), err)
	}
	refused := make(map[int]error)
	for _, r := range got {
		i := turn[r.Ord-1]
		c := &todo[i]
		c.moderation, c.parentPath, c.parentAt = event.ModerationNone, "", nil
		if r.Premoderated {
			c.moderation = event.ModerationPending
		}
		switch {
		case r.Locked:
			refused[i] = ErrThreadLocked
		case r.Shelved:
			refused[i] = &shelvedError{objects: []event.ID{c.in.Object}}
		case c.in.ReplyTo == "":
		case r.Path == nil:
			refused[i] = ErrParentUnknown
		case !event.Visible(*r.AuthorState, *r.ModerationState):
			refused[i] = ErrParentGone
		case Depth(*r.Path) >= MaxDepth:
			refused[i] = ErrTooDeep
		default:
			c.parentPath, c.parentAt = *r.Path, r.CreatedAt
		}
	}
	return refused, nil
}

// childKeysSQL takes the keys that are free. It waits for a transaction that is taking one of them.
// Index: child_keys_pkey. Locks: the keys, in key order.
const childKeysSQL = `
INSERT /* store.child_keys */ INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id, moderation_state)
SELECT w.tenant_id, '{{.Kind}}', w.author_id, w.key, w.hash, w.child_id, w.moderation_state
  FROM unnest(@tenants::bigint[], @author_ids::text[], @keys::text[], @hashes::bytea[], @child_ids::text[]::uuid[],
              @moderation_states::text[]) AS w(tenant_id, author_id, key, hash, child_id, moderation_state)
 ORDER BY w.tenant_id, w.author_id COLLATE "C", w.key COLLATE "C"
ON CONFLICT DO NOTHING
RETURNING tenant_id, child_id::text`

// takeKeys splits the items into fresh ones to write and known ones whose key has made a child
// before.
func (s childShape) takeKeys(ctx context.Context, tx pgx.Tx, todo []creation, turn []int) (fresh, known []int, err error) {
	var keyed []int
	for _, i := range turn {
		if todo[i].in.Key != "" {
			keyed = append(keyed, i)
		}
	}
	taken := make(map[childKey]bool, len(keyed))
	if len(keyed) > 0 {
		args := keyArgs(todo, keyed)
		args["hashes"] = column(keyed, func(i int) []byte { return todo[i].hash })
		args["child_ids"] = column(keyed, func(i int) string { return todo[i].id })
		args["moderation_states"] = column(keyed, func(i int) string { return todo[i].moderation })
		rows, _ := tx.Query(ctx, s.sql(childKeysSQL), args)
		var k childKey
		if _, err := pgx.ForEachRow(rows, []any{&k.tenant, &k.id}, func() error { taken[k] = true; return nil }); err != nil {
			return nil, nil, fmt.Errorf("take %d idempotency keys: %w", len(keyed), err)
		}
	}
	for _, i := range turn {
		if todo[i].in.Key == "" || taken[todo[i].key()] {
			fresh = append(fresh, i)
		} else {
			known = append(known, i)
		}
	}
	return fresh, known, nil
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

// childCreateSQL inserts children. It leaves out a child if the object already has the slug, the
// author already has a child of the object, or the thread is shelved. The inner query reads the
// clock once per child; the one about @tenants is that of childSurroundingsSQL. Inserts of a kind
// with one child per author are ordered by place, because a statement waits for a place that
// another transaction takes. Index: children_KIND_pkey, archived_threads_stub_idx; threaded:
// children_KIND_slug_key, children_KIND_path_key, else children_KIND_object_idx; one per author:
// children_KIND_author_key. Locks: none but the new rows.
const childCreateSQL = `
INSERT /* store.child_create */ INTO {{.Table}} AS c
       (tenant_id, child_id, object_id, {{if .Threaded}}parent_id, slug, path, {{end}}author_id, body,
        {{if .Attributes}}attributes, {{end}}moderation_state, created_at, updated_at)
SELECT n.tenant_id, n.child_id, n.object_id,
       {{if .Threaded}}n.reply_to, n.slug,
       n.parent_path || lpad(to_hex((extract(epoch FROM n.at) * 1000000)::bigint), 14, '0') || n.slug, {{end -}}
       n.author_id, n.body, {{if .Attributes}}n.attributes::jsonb, {{end}}n.moderation_state, n.at, n.at
  FROM (SELECT w.*,
               {{if .Threaded}}GREATEST(clock_timestamp(), w.parent_at + interval '1 microsecond')
               {{- else}}clock_timestamp(){{end}} AS at
          FROM unnest((SELECT @tenants::bigint[]), @child_ids::text[]::uuid[], @object_ids::text[], @author_ids::text[],
                      @bodies::text[], @moderation_states::text[]
                      {{- if .Threaded}}, @reply_tos::text[]::uuid[], @slugs::text[], @parent_paths::text[],
                      @parent_ats::timestamptz[]{{end}}
                      {{- if .Attributes}}, @attributes::text[]{{end}}) {{if .OnePerAuthor}}WITH ORDINALITY {{end -}}
            AS w(tenant_id, child_id, object_id, author_id, body, moderation_state
                 {{- if .Threaded}}, reply_to, slug, parent_path, parent_at{{end}}{{if .Attributes}}, attributes{{end}}
                 {{- if .OnePerAuthor}}, ord{{end}})) n
 WHERE NOT EXISTS (SELECT FROM archived_threads a
                    WHERE a.tenant_id = n.tenant_id AND a.kind = '{{.Kind}}' AND a.object_id = n.object_id
                      AND a.state <> 'RETURNED' OFFSET 0)
{{- if .OnePerAuthor}}
 ORDER BY n.tenant_id, n.object_id COLLATE "C", n.author_id COLLATE "C", n.ord
ON CONFLICT DO NOTHING
{{- else if .Threaded}}
ON CONFLICT (tenant_id, object_id, slug) DO NOTHING
{{- end}}
RETURNING c.tenant_id, c.child_id::text, c.slug, c.path, c.created_at`

type createRow struct {
	TenantID  int64
	ID        string
	Slug      *string
	Path      *string
	CreatedAt time.Time
}

// childTakenSQL reads the children that hold the places that creates want.
// Index: children_KIND_author_key. Locks: none.
const childTakenSQL = `
SELECT /* store.child_taken */ c.tenant_id, ` + childColumns + `
  FROM unnest(@tenants::bigint[], @object_ids::text[], @author_ids::text[]) AS w(tenant_id, object_id, author_id)
 CROSS JOIN LATERAL (SELECT * FROM {{.Table}}
                      WHERE tenant_id = w.tenant_id AND object_id = w.object_id AND author_id = w.author_id
                        AND author_state = 'ACTIVE' OFFSET 0) c`

// maxInserts bounds the attempts to insert children that an earlier attempt left out. With 2^40
// slugs, a thread of a million children needs a second attempt once in a million creates. An
// author's place may also have become free meanwhile.
const maxInserts = 5

func (k *childKind) insert(ctx context.Context, tx pgx.Tx, todo []creation, write []int, out []ChildOutcome) error {
	for attempt := 1; len(write) > 0; attempt++ {
		if attempt > maxInserts {
			return fmt.Errorf("insert %d children: no free slug in %d attempts", len(write), maxInserts)
		}
		left, err := k.tryInsert(ctx, tx, todo, write, out)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			break
		}
		tenants := column(left, func(i int) int64 { return todo[i].in.tenant })
		objects := column(left, func(i int) event.ID { return todo[i].in.Object })
		shelved, err := k.shelved(ctx, tx, tenants, objects)
		if err != nil {
			return err
		}
		taken, err := k.taken(ctx, tx, tenants, objects, column(left, func(i int) event.ID { return todo[i].in.AuthorID }))
		if err != nil {
			return err
		}
		write = slices.DeleteFunc(left, func(i int) bool {
			first, ok := taken[todo[i].in.place()]
			switch {
			case shelved[objectKey{todo[i].in.tenant, todo[i].in.Object}]:
				out[i].Err = &shelvedError{objects: []event.ID{todo[i].in.Object}}
			case ok:
				out[i].Err = &TakenError{Child: first}
			}
			return out[i].Err != nil
		})
	}
	return nil
}

// taken returns the children that hold these places.
func (s childShape) taken(ctx context.Context, tx pgx.Tx, tenants []int64,
	objects, authors []event.ID) (map[authorPlace]event.Child, error) {
	if !s.OnePerAuthor {
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

// tryInsert inserts children with new slugs, and returns the items that the statement left out.
func (k *childKind) tryInsert(ctx context.Context, tx pgx.Tx, todo []creation, write []int, out []ChildOutcome) ([]int, error) {
	n := len(write)
	index := make(map[childKey]int, n)
	for _, i := range write {
		index[todo[i].key()] = i
	}
	args := postgres.Args{
		"tenants":           column(write, func(i int) int64 { return todo[i].in.tenant }),
		"child_ids":         column(write, func(i int) string { return todo[i].id }),
		"object_ids":        column(write, func(i int) string { return string(todo[i].in.Object) }),
		"author_ids":        column(write, func(i int) string { return string(todo[i].in.AuthorID) }),
		"bodies":            column(write, func(i int) string { return todo[i].body }),
		"moderation_states": column(write, func(i int) string { return todo[i].moderation }),
	}
	if k.Threaded {
		slugs, parents, parentPaths, parentAts := make([]string, n), make([]*string, n), make([]string, n), make([]*time.Time, n)
		for m, i := range write {
			c := &todo[i]
			slugs[m] = k.store.slug()
			if c.in.ReplyTo != "" {
				parents[m], parentPaths[m], parentAts[m] = &c.in.ReplyTo, c.parentPath+"/", c.parentAt
			}
		}
		args["slugs"], args["reply_tos"], args["parent_paths"], args["parent_ats"] = slugs, parents, parentPaths, parentAts
	}
	if k.Attributes {
		args["attributes"] = column(write, func(i int) *string { return text(todo[i].in.Attributes) })
	}
	rows, _ := tx.Query(ctx, k.sql(childCreateSQL), args)
	got, err := pgx.AppendRows(make([]createRow, 0, n), rows, pgx.RowToStructByPos[createRow])
	if err != nil {
		return nil, fmt.Errorf("insert %d children: %w", n, err)
	}
	for _, r := range got {
		i, ok := index[childKey{r.TenantID, r.ID}]
		if !ok {
			return nil, fmt.Errorf("child %s of tenant %d: %w", r.ID, r.TenantID, errNotOfGroup)
		}
		out[i].Child, out[i].Changed = todo[i].child(r.ID, r.Slug, r.Path, todo[i].moderation, r.CreatedAt), true
	}
	return slices.DeleteFunc(slices.Clone(write), func(i int) bool { return out[i].Changed }), nil
}

// text converts JSON to a statement's argument, nil to NULL.
func text(j json.RawMessage) *string {
	if j == nil {
		return nil
	}
	return new(string(j))
}
