package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// Errors of creates.
var (
	// ErrParentUnknown reports a parent that is not a comment of that post.
	ErrParentUnknown = errors.New("store: the parent is not a comment of this post")
	// ErrParentGone reports a parent that is not visible.
	ErrParentGone = errors.New("store: the parent is not visible")
	// ErrThreadLocked reports a post whose thread takes no more comments.
	ErrThreadLocked = errors.New("store: the thread is locked")
	// ErrTooDeep reports a parent at MaxDepth.
	ErrTooDeep = fmt.Errorf("store: replies nest at most %d deep", MaxDepth)
	// ErrKeyReused reports an idempotency key that made another comment.
	ErrKeyReused = errors.New("store: the idempotency key was used with another request")
	// ErrKeyOrphaned reports an idempotency key whose comment is missing: somebody has deleted the row by hand.
	ErrKeyOrphaned = errors.New("store: the comment that the idempotency key made is missing")
)

// NewComment is a comment to create.
type NewComment struct {
	Meta
	PostID   int64
	AuthorID int64
	ParentID string // of a reply: the UUID, in lower case, of a comment of the same post
	Body     string // trimmed before it is kept

	// Key makes the create idempotent: with the same author and key the first result is given again. 1 to 255 visible ASCII
	// characters, or empty for none.
	Key string
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

// CommentOutcome is what became of one write of a comment.
type CommentOutcome struct {
	Comment  event.Comment // as it is now; of a replayed create, as it was first
	Changed  bool          // whether this write changed it, and so made an event
	Replayed bool          // whether an earlier create with the same key had made it
	Err      error         // one of this package's errors: nothing was written
}

// creation is a NewComment on its way.
type creation struct {
	in         NewComment
	body       string
	id         string
	hash       []byte
	moderation string // the first state
	parentPath string
	parentAt   *time.Time
}

func (c *creation) prepare() error {
	in := &c.in
	if err := checkMeta(in.Meta); err != nil {
		return err
	}
	if in.PostID <= 0 || in.AuthorID <= 0 {
		return fmt.Errorf("%w: post %d, author %d", ErrInvalid, in.PostID, in.AuthorID)
	}
	if in.ParentID != "" {
		if err := checkUUID("parent", in.ParentID); err != nil {
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
	id, err := uuid.NewV7()
	if err != nil {
		return fmt.Errorf("make a comment id: %w", err)
	}
	c.id = id.String()
	h := sha256.Sum256(fmt.Appendf(nil, "%d\n%s\n%s", in.PostID, in.ParentID, c.body))
	c.hash = h[:]
	return nil
}

// Create makes comments. A comment of a premoderated thread starts PENDING. created_at is the database's clock, and later than
// the parent's.
//
// A create with a key takes its key row first: a concurrent equal one waits there and then gives the same result.
//
// A thread that is archived is brought back first, which may part a slice into several transactions; ErrThreadReturning, of the call or of an
// outcome, says that nothing was written because that takes longer.
func (s *Store) Create(ctx context.Context, tenant int64, comments []NewComment) ([]CommentOutcome, error) {
	return bringingBack(ctx, s, tenant, comments, s.lanes.create.do)
}

// entity names the key: what has none waits for nobody.
func (c NewComment) entity() any {
	if c.Key == "" {
		return nil
	}
	return authorKey{c.AuthorID, c.Key}
}

type authorKey struct {
	author int64
	key    string
}

func (s *Store) create(ctx context.Context, tenant int64, comments []NewComment, lockTimeout time.Duration) ([]CommentOutcome, error) {
	todo := make([]creation, len(comments))
	out := make([]CommentOutcome, len(comments))
	type key struct {
		authorKey
		alone int // tells items without a key apart
	}
	turns := rounds(len(comments), func(i int) (key, bool) {
		todo[i].in = comments[i]
		out[i].Err = todo[i].prepare()
		k := key{authorKey: authorKey{comments[i].AuthorID, comments[i].Key}}
		if k.key == "" {
			k.alone = i
		}
		return k, out[i].Err == nil
	})
	if len(turns) == 0 {
		return out, nil
	}
	err := s.write(ctx, tenant, lockTimeout, func(tx *unit) error {
		for _, turn := range turns {
			for _, i := range turn {
				out[i] = CommentOutcome{} // a second attempt starts afresh
			}
			if err := s.createTurn(ctx, tx, tenant, todo, turn, out); err != nil {
				return err
			}
		}
		return inOrder(turns, out)
	})
	if err != nil {
		return nil, fmt.Errorf("create %d comments of tenant %d: %w", len(comments), tenant, err)
	}
	return out, nil
}

func (s *Store) createTurn(ctx context.Context, tx *unit, tenant int64, todo []creation, turn []int, out []CommentOutcome) error {
	// What the surroundings allow. Nothing is locked: a reply whose parent goes while it is being written counts as written before.
	refused, err := surroundings(ctx, tx, tenant, todo, turn)
	if err != nil {
		return err
	}
	fresh, known, err := takeKeys(ctx, tx, tenant, todo, turn)
	if err != nil {
		return err
	}
	if err := replay(ctx, tx, tenant, todo, known, out); err != nil {
		return err
	}
	var write, release []int
	for _, i := range fresh {
		if out[i].Err = refused[i]; out[i].Err == nil {
			write = append(write, i)
		} else if todo[i].in.Key != "" {
			release = append(release, i)
		}
	}
	if err := s.insert(ctx, tx, tenant, todo, write, out); err != nil {
		return err
	}
	for _, i := range write {
		if !out[i].Changed && todo[i].in.Key != "" {
			release = append(release, i)
		}
	}
	if err := releaseKeys(ctx, tx, tenant, todo, release); err != nil {
		return err
	}
	for _, i := range write {
		if !out[i].Changed {
			continue
		}
		e, err := commentEvent(tenant, out[i].Comment, event.Created, todo[i].in.Meta)
		if err != nil {
			return err
		}
		tx.events = append(tx.events, e)
	}
	return nil
}

// commentSurroundingsSQL reads what decides over creates: the thread's settings, whether it is archived, and the parent. OFFSET 0 keeps
// each look-up a probe per item: a plain join is planned as a scan of the tenant's comments while the tables have no statistics. The
// transaction gets its id here, before the statement that inserts: the archiver waits for the transactions that have one (ADR 0008).
// Index: threads_head_idx, archived_threads_stub_idx, comments_pkey.   Locks: none.
const commentSurroundingsSQL = `
SELECT /* store.comment_surroundings */ w.ord::int,
       coalesce((t.object ->> 'locked')::boolean, false), coalesce((t.object ->> 'premoderated')::boolean, false),
       a.archived IS NOT NULL, p.path, p.created_at, p.author_state, p.moderation_state
  FROM unnest(@post_ids::bigint[], @parent_ids::uuid[]) WITH ORDINALITY AS w(post_id, parent_id, ord)
 CROSS JOIN pg_current_xact_id()
  LEFT JOIN LATERAL (SELECT object FROM threads WHERE tenant_id = @tenant::bigint AND post_id = w.post_id AND version_state = 'LATEST' OFFSET 0) t ON true
  LEFT JOIN LATERAL (SELECT true AS archived FROM archived_threads WHERE tenant_id = @tenant::bigint AND post_id = w.post_id AND state <> 'RETURNED' OFFSET 0) a ON true
  LEFT JOIN LATERAL (SELECT * FROM comments WHERE tenant_id = @tenant::bigint AND comment_id = w.parent_id OFFSET 0) p ON p.post_id = w.post_id`

type surroundingsRow struct {
	Ord             int
	Locked          bool
	Premoderated    bool
	Archived        bool
	Path            *string
	CreatedAt       *time.Time
	AuthorState     *string
	ModerationState *string
}

// surroundings fills in the first moderation state and the parent's place, and returns why items cannot be written.
func surroundings(ctx context.Context, tx pgx.Tx, tenant int64, todo []creation, turn []int) (map[int]error, error) {
	posts, parents := make([]int64, len(turn)), make([]*string, len(turn))
	for n, i := range turn {
		posts[n] = todo[i].in.PostID
		if todo[i].in.ParentID != "" {
			parents[n] = &todo[i].in.ParentID
		}
	}
	rows, _ := tx.Query(ctx, commentSurroundingsSQL, pgx.StrictNamedArgs{"tenant": tenant, "post_ids": posts, "parent_ids": parents})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[surroundingsRow])
	if err != nil {
		return nil, fmt.Errorf("read the surroundings of %d comments: %w", len(turn), err)
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
		case r.Archived:
			refused[i] = &archivedError{posts: []int64{c.in.PostID}}
		case c.in.ParentID == "":
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

// commentKeysSQL takes the keys that nobody has. It waits for a transaction that is taking one of them.
// Index: comment_keys_pkey.   Locks: the keys, in key order.
const commentKeysSQL = `
INSERT /* store.comment_keys */ INTO comment_keys (tenant_id, author_id, idempotency_key, request_hash, comment_id, moderation_state)
SELECT @tenant::bigint, w.author_id, w.key, w.hash, w.comment_id, w.moderation_state
  FROM unnest(@author_ids::bigint[], @keys::text[], @hashes::bytea[], @comment_ids::uuid[], @moderation_states::text[])
    AS w(author_id, key, hash, comment_id, moderation_state)
 ORDER BY w.author_id, w.key COLLATE "C"
ON CONFLICT DO NOTHING
RETURNING comment_id::text`

// takeKeys parts the items into those that are to be written and those whose key has made a comment before.
func takeKeys(ctx context.Context, tx pgx.Tx, tenant int64, todo []creation, turn []int) (fresh, known []int, err error) {
	var keyed []int
	for _, i := range turn {
		if todo[i].in.Key != "" {
			keyed = append(keyed, i)
		}
	}
	taken := make(map[string]bool, len(keyed))
	if len(keyed) > 0 {
		authors, keys, hashes, ids, moderation := keyArgs(todo, keyed)
		rows, _ := tx.Query(ctx, commentKeysSQL, pgx.StrictNamedArgs{
			"tenant": tenant, "author_ids": authors, "keys": keys, "hashes": hashes, "comment_ids": ids, "moderation_states": moderation,
		})
		got, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, nil, fmt.Errorf("take %d idempotency keys: %w", len(keyed), err)
		}
		for _, id := range got {
			taken[id] = true
		}
	}
	for _, i := range turn {
		if todo[i].in.Key == "" || taken[todo[i].id] {
			fresh = append(fresh, i)
		} else {
			known = append(known, i)
		}
	}
	return fresh, known, nil
}

func keyArgs(todo []creation, items []int) (authors []int64, keys []string, hashes [][]byte, ids, moderation []string) {
	for _, i := range items {
		c := &todo[i]
		authors, keys, hashes = append(authors, c.in.AuthorID), append(keys, c.in.Key), append(hashes, c.hash)
		ids, moderation = append(ids, c.id), append(moderation, c.moderation)
	}
	return authors, keys, hashes, ids, moderation
}

// commentReplaySQL reads what keys made. The comment's own row, archived or not, tells only what never changes.
// Index: comment_keys_pkey, comments_pkey, comments_archive_pkey.   Locks: none.
const commentReplaySQL = `
SELECT /* store.comment_replay */ w.ord::int, k.request_hash, k.moderation_state, c.comment_id::text, c.slug, c.path, c.created_at
  FROM unnest(@author_ids::bigint[], @keys::text[]) WITH ORDINALITY AS w(author_id, key, ord)
  JOIN comment_keys k ON k.tenant_id = @tenant::bigint AND k.author_id = w.author_id AND k.idempotency_key = w.key
  LEFT JOIN all_comments c ON c.tenant_id = @tenant::bigint AND c.comment_id = k.comment_id`

type replayRow struct {
	Ord             int
	RequestHash     []byte
	ModerationState string
	CommentID       *string
	Slug            *string
	Path            *string
	CreatedAt       *time.Time
}

// replay gives the first result of each key again: version 1 with the body of the request, which is the same.
func replay(ctx context.Context, tx pgx.Tx, tenant int64, todo []creation, known []int, out []CommentOutcome) error {
	if len(known) == 0 {
		return nil
	}
	authors, keys, _, _, _ := keyArgs(todo, known)
	rows, _ := tx.Query(ctx, commentReplaySQL, pgx.StrictNamedArgs{"tenant": tenant, "author_ids": authors, "keys": keys})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[replayRow])
	if err != nil {
		return fmt.Errorf("read %d idempotency keys: %w", len(known), err)
	}
	if len(got) != len(known) {
		return fmt.Errorf("read %d idempotency keys: %d found", len(known), len(got))
	}
	for _, r := range got {
		i := known[r.Ord-1]
		c := &todo[i]
		switch {
		case !slices.Equal(r.RequestHash, c.hash):
			out[i].Err = ErrKeyReused
		case r.CommentID == nil:
			out[i].Err = fmt.Errorf("replay key %q of author %d: %w", c.in.Key, c.in.AuthorID, ErrKeyOrphaned)
		default:
			out[i].Replayed = true
			out[i].Comment = event.Comment{
				CommentID: *r.CommentID, PostID: event.ID(c.in.PostID), ParentID: c.in.ParentID, Slug: *r.Slug, Path: *r.Path,
				AuthorID: event.ID(c.in.AuthorID), Body: c.body, AuthorState: event.AuthorActive, ModerationState: r.ModerationState,
				Version: 1, CreatedAt: wireTime(*r.CreatedAt), UpdatedAt: wireTime(*r.CreatedAt),
			}
		}
	}
	return nil
}

// commentReleaseSQL gives back the keys of creates that were refused after all, so that a later try may succeed.
// Index: comment_keys_pkey.   Locks: rows of this transaction.
const commentReleaseSQL = `
DELETE /* store.comment_release */ FROM comment_keys k
 USING unnest(@author_ids::bigint[], @keys::text[]) AS w(author_id, key)
 WHERE k.tenant_id = @tenant::bigint AND k.author_id = w.author_id AND k.idempotency_key = w.key`

func releaseKeys(ctx context.Context, tx pgx.Tx, tenant int64, todo []creation, items []int) error {
	if len(items) == 0 {
		return nil
	}
	authors, keys, _, _, _ := keyArgs(todo, items)
	_, err := tx.Exec(ctx, commentReleaseSQL, pgx.StrictNamedArgs{"tenant": tenant, "author_ids": authors, "keys": keys})
	if err != nil {
		return fmt.Errorf("release %d idempotency keys: %w", len(items), err)
	}
	return nil
}

// commentCreateSQL inserts comments, but for those whose slug the post has or whose thread is archived. The subquery reads the clock once
// for each.
// Index: comments_pkey, comments_slug_key, comments_path_key, archived_threads_stub_idx.   Locks: none but the new rows.
const commentCreateSQL = `
INSERT /* store.comment_create */ INTO comments AS c
       (tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, moderation_state, created_at, updated_at)
SELECT @tenant::bigint, n.comment_id, n.post_id, n.parent_id, n.slug,
       n.parent_path || lpad(to_hex((extract(epoch FROM n.at) * 1000000)::bigint), 14, '0') || n.slug,
       n.author_id, n.body, n.moderation_state, n.at, n.at
  FROM (SELECT w.*, GREATEST(clock_timestamp(), w.parent_at + interval '1 microsecond') AS at
          FROM unnest(@comment_ids::uuid[], @post_ids::bigint[], @parent_ids::uuid[], @slugs::text[], @parent_paths::text[],
                      @parent_ats::timestamptz[], @author_ids::bigint[], @bodies::text[], @moderation_states::text[])
            AS w(comment_id, post_id, parent_id, slug, parent_path, parent_at, author_id, body, moderation_state)) n
 WHERE NOT EXISTS (SELECT FROM archived_threads a WHERE a.tenant_id = @tenant::bigint AND a.post_id = n.post_id AND a.state <> 'RETURNED' OFFSET 0)
ON CONFLICT ON CONSTRAINT comments_slug_key DO NOTHING
RETURNING ` + commentColumns

// maxSlugs is how often a comment gets another slug: with 2^40 of them a post of a million comments needs a second one once in
// a million creates.
const maxSlugs = 5

func (s *Store) insert(ctx context.Context, tx pgx.Tx, tenant int64, todo []creation, write []int, out []CommentOutcome) error {
	for attempt := 1; len(write) > 0; attempt++ {
		if attempt > maxSlugs {
			return fmt.Errorf("insert %d comments: no free slug in %d attempts", len(write), maxSlugs)
		}
		left, err := s.tryInsert(ctx, tx, tenant, todo, write, out)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			break
		}
		posts := make([]int64, len(left))
		for n, i := range left {
			posts[n] = todo[i].in.PostID
		}
		archived, err := archivedPosts(ctx, tx, tenant, posts)
		if err != nil {
			return err
		}
		write = slices.DeleteFunc(left, func(i int) bool {
			if !slices.Contains(archived, todo[i].in.PostID) {
				return false
			}
			out[i].Err = &archivedError{posts: []int64{todo[i].in.PostID}}
			return true
		})
	}
	return nil
}

// tryInsert inserts comments with new slugs and returns those whose slug was taken, or whose thread was archived just now.
func (s *Store) tryInsert(ctx context.Context, tx pgx.Tx, tenant int64, todo []creation, write []int, out []CommentOutcome) ([]int, error) {
	n := len(write)
	var (
		posts, authors               = make([]int64, n), make([]int64, n)
		ids, slugs, bodies, parentAt = make([]string, n), make([]string, n), make([]string, n), make([]*time.Time, n)
		parents, moderation          = make([]*string, n), make([]string, n)
		parentPaths                  = make([]string, n)
		index                        = make(map[string]int, n)
	)
	for k, i := range write {
		c := &todo[i]
		ids[k], posts[k], authors[k], slugs[k], bodies[k], moderation[k] = c.id, c.in.PostID, c.in.AuthorID, s.slug(), c.body, c.moderation
		if c.in.ParentID != "" {
			parents[k], parentPaths[k], parentAt[k] = &c.in.ParentID, c.parentPath+"/", c.parentAt
		}
		index[c.id] = i
	}
	rows, _ := tx.Query(ctx, commentCreateSQL, pgx.StrictNamedArgs{
		"tenant": tenant, "comment_ids": ids, "post_ids": posts, "parent_ids": parents, "slugs": slugs, "parent_paths": parentPaths,
		"parent_ats": parentAt, "author_ids": authors, "bodies": bodies, "moderation_states": moderation,
	})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[commentRow])
	if err != nil {
		return nil, fmt.Errorf("insert %d comments: %w", n, err)
	}
	for _, r := range got {
		i := index[r.CommentID]
		out[i].Comment, out[i].Changed = r.wire(), true
	}
	return slices.DeleteFunc(slices.Clone(write), func(i int) bool { return out[i].Changed }), nil
}
