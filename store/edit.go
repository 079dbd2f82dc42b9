package store

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// AnyVersion as IfVersion writes whatever version the comment has.
const AnyVersion = 0

// CommentEdit replaces a comment's body.
type CommentEdit struct {
	Meta
	CommentID string // a UUID in lower case
	IfVersion int64  // the version that the writer saw, or AnyVersion
	Body      string // trimmed before it is kept
}

// CommentDelete is an author's withdrawal of a comment. It is final.
type CommentDelete struct {
	Meta
	CommentID string // a UUID in lower case
	IfVersion int64  // the version that the writer saw, or AnyVersion
}

// heldSQL names the comments of @comment_ids, with what each is to be given, and locks those that exist in key order: an UPDATE alone
// locks in the order of its plan. A thread that is archived has to be brought back first, even where the comment has not been moved.
// Index: comments_pkey, archived_threads_stub_idx.
const heldSQL = `
WITH wanted AS (
  SELECT * FROM unnest(@comment_ids::uuid[], @if_versions::bigint[], @values::text[]) AS w(comment_id, if_version, value)
), held AS (
  SELECT w.*
    FROM comments c JOIN wanted w ON c.tenant_id = @tenant::bigint AND c.comment_id = w.comment_id
   WHERE NOT EXISTS (SELECT FROM archived_threads a WHERE a.tenant_id = @tenant::bigint AND a.post_id = c.post_id AND a.state <> 'RETURNED' OFFSET 0)
   ORDER BY c.comment_id
     FOR NO KEY UPDATE OF c
)`

// commentEditSQL replaces bodies, where the version is the expected one, the author and moderation left the comment, and the
// body differs.
// Index: comments_pkey.   Locks: the comments, in key order, whether or not they change.
const commentEditSQL = heldSQL + `
UPDATE /* store.comment_edit */ comments c
   SET body = h.value, version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = @tenant::bigint AND c.comment_id = h.comment_id AND (h.if_version = 0 OR c.version = h.if_version)
   AND c.author_state = 'ACTIVE' AND c.moderation_state NOT IN ('HIDDEN', 'REMOVED') AND c.body <> h.value
RETURNING ` + commentColumns

// Edit replaces the bodies of comments. The outcome's error is ErrNotFound, a *StaleError, a *StateError, or says what is wrong
// with the body. An edit to the body that the comment has changes nothing and makes no event.
func (s *Store) Edit(ctx context.Context, tenant int64, edits []CommentEdit) ([]CommentOutcome, error) {
	return bringingBack(ctx, s, tenant, edits, s.lanes.edit.do)
}

func (s *Store) edit(ctx context.Context, tenant int64, edits []CommentEdit, lockTimeout time.Duration) ([]CommentOutcome, error) {
	changes := make([]change, len(edits))
	for i, e := range edits {
		body, err := trimBody(e.Body)
		changes[i] = change{meta: e.Meta, id: e.CommentID, ifVersion: e.IfVersion, value: body, err: err}
	}
	return s.change(ctx, tenant, changes, lockTimeout, changeKind{
		event: event.Edited, sql: commentEditSQL,
		allowed: func(c event.Comment) bool {
			return c.AuthorState == event.AuthorActive && c.ModerationState != event.ModerationHidden && c.ModerationState != event.ModerationRemoved
		},
		has: func(c event.Comment, value string) bool { return c.Body == value },
	})
}

// commentDeleteSQL withdraws comments, where the version is the expected one and the author had left it. The row stays: replies
// hang on it, and so does its permalink.
// Index: comments_pkey.   Locks: the comments, in key order, whether or not they change.
const commentDeleteSQL = heldSQL + `
UPDATE /* store.comment_delete */ comments c
   SET author_state = 'DELETED', version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = @tenant::bigint AND c.comment_id = h.comment_id AND (h.if_version = 0 OR c.version = h.if_version)
   AND c.author_state = 'ACTIVE'
RETURNING ` + commentColumns

// Delete withdraws comments for their author. The outcome's error is ErrNotFound, a *StaleError or a *StateError: deleted or
// erased comments cannot be deleted again. What moderation did to a comment does not keep its author from deleting it.
func (s *Store) Delete(ctx context.Context, tenant int64, deletes []CommentDelete) ([]CommentOutcome, error) {
	return bringingBack(ctx, s, tenant, deletes, s.lanes.delete.do)
}

func (s *Store) delete(ctx context.Context, tenant int64, deletes []CommentDelete, lockTimeout time.Duration) ([]CommentOutcome, error) {
	changes := make([]change, len(deletes))
	for i, d := range deletes {
		changes[i] = change{meta: d.Meta, id: d.CommentID, ifVersion: d.IfVersion}
	}
	return s.change(ctx, tenant, changes, lockTimeout, changeKind{
		event: event.Deleted, sql: commentDeleteSQL,
		allowed: func(c event.Comment) bool { return c.AuthorState == event.AuthorActive },
		has:     func(event.Comment, string) bool { return false }, // what is deleted is not allowed
	})
}

// CommentModeration is a moderator's decision on a comment.
type CommentModeration struct {
	Meta
	CommentID string // a UUID in lower case
	IfVersion int64  // the version that the moderator saw, or AnyVersion
	State     string // event.ModerationApproved, event.ModerationHidden or event.ModerationRemoved
	Reason    string // why, for the event and the history: see ValidReason
}

// MaxReasonBytes bounds the reason of a moderation.
const MaxReasonBytes = 1000

// ValidReason reports whether s can be a reason: at most MaxReasonBytes of UTF-8 without control characters. It may be empty.
func ValidReason(s string) bool { return len(s) <= MaxReasonBytes && plainText(s) }

// plainText reports whether s is UTF-8 without control characters.
func plainText(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

// commentModerateSQL moves comments on the moderator's axis, where the version is the expected one, the author left the comment,
// and the state is another.
// Index: comments_pkey.   Locks: the comments, in key order, whether or not they change.
const commentModerateSQL = heldSQL + `
UPDATE /* store.comment_moderate */ comments c
   SET moderation_state = h.value, version = c.version + 1, updated_at = GREATEST(now(), c.updated_at)
  FROM held h
 WHERE c.tenant_id = @tenant::bigint AND c.comment_id = h.comment_id AND (h.if_version = 0 OR c.version = h.if_version)
   AND c.author_state = 'ACTIVE' AND c.moderation_state <> h.value
RETURNING ` + commentColumns

// Moderate approves, hides or removes comments, whatever moderation state they have: approving undoes what moderation did. The
// outcome's error is ErrNotFound, a *StaleError or a *StateError: what its author withdrew is not moderated. The state that the
// comment has changes nothing and makes no event, whatever the reason. The event has the reason; the truth does not keep it.
func (s *Store) Moderate(ctx context.Context, tenant int64, moderations []CommentModeration) ([]CommentOutcome, error) {
	return bringingBack(ctx, s, tenant, moderations, s.lanes.moderate.do)
}

func (s *Store) moderate(ctx context.Context, tenant int64, moderations []CommentModeration, lockTimeout time.Duration) ([]CommentOutcome, error) {
	changes := make([]change, len(moderations))
	for i, m := range moderations {
		changes[i] = change{meta: m.Meta, id: m.CommentID, ifVersion: m.IfVersion, value: m.State, reason: m.Reason}
		switch m.State {
		case event.ModerationApproved, event.ModerationHidden, event.ModerationRemoved:
		default:
			changes[i].err = fmt.Errorf("%w: moderation state %.80q", ErrInvalid, m.State)
		}
		if !ValidReason(m.Reason) {
			changes[i].err = fmt.Errorf("%w: reason of %d bytes", ErrInvalid, len(m.Reason))
		}
	}
	return s.change(ctx, tenant, changes, lockTimeout, changeKind{
		event: event.Moderated, sql: commentModerateSQL,
		allowed: func(c event.Comment) bool { return c.AuthorState == event.AuthorActive },
		has:     func(c event.Comment, value string) bool { return c.ModerationState == value },
	})
}

type change struct {
	meta      Meta
	id        string
	ifVersion int64
	value     string // what the comment is to be given: a body, a moderation state
	reason    string
	err       error
}

func (c change) check() error {
	if c.err != nil {
		return c.err
	}
	if err := checkMeta(c.meta); err != nil {
		return err
	}
	return checkUUID("comment", c.id)
}

// changeKind is one kind of change: its guarded statement, and the parts of the guard that tell why it let nothing through.
type changeKind struct {
	event   string
	sql     string
	allowed func(c event.Comment) bool               // whether its states allow it
	has     func(c event.Comment, value string) bool // whether it is as it is to be
}

// change runs one guarded transition.
func (s *Store) change(ctx context.Context, tenant int64, changes []change, lockTimeout time.Duration, kind changeKind) ([]CommentOutcome, error) {
	out := make([]CommentOutcome, len(changes))
	turns := rounds(len(changes), func(i int) (string, bool) {
		out[i].Err = changes[i].check()
		return changes[i].id, out[i].Err == nil
	})
	if len(turns) == 0 {
		return out, nil
	}
	err := s.write(ctx, tenant, lockTimeout, func(tx *unit) error {
		for _, turn := range turns {
			for _, i := range turn {
				out[i] = CommentOutcome{} // a second attempt starts afresh
			}
			if err := changeTurn(ctx, tx, tenant, changes, turn, kind, out); err != nil {
				return err
			}
		}
		return inOrder(turns, out)
	})
	if err != nil {
		return nil, fmt.Errorf("comment %s, %d of tenant %d: %w", kind.event, len(changes), tenant, err)
	}
	return out, nil
}

func changeTurn(ctx context.Context, tx *unit, tenant int64, changes []change, turn []int, kind changeKind, out []CommentOutcome) error {
	n := len(turn)
	ids, versions, values := make([]string, n), make([]int64, n), make([]string, n)
	index := make(map[string]int, n)
	for k, i := range turn {
		ids[k], versions[k], values[k] = changes[i].id, changes[i].ifVersion, changes[i].value
		index[ids[k]] = i
	}
	rows, _ := tx.Query(ctx, kind.sql, pgx.StrictNamedArgs{"tenant": tenant, "comment_ids": ids, "if_versions": versions, "values": values})
	changed, err := pgx.CollectRows(rows, pgx.RowToStructByPos[commentRow])
	if err != nil {
		return fmt.Errorf("write %d comments: %w", n, err)
	}
	for _, r := range changed {
		i := index[r.CommentID]
		out[i] = CommentOutcome{Comment: r.wire(), Changed: true}
		c := out[i].Comment
		c.Reason = changes[i].reason
		e, err := commentEvent(tenant, c, kind.event, changes[i].meta)
		if err != nil {
			return err
		}
		tx.events = append(tx.events, e)
	}
	if len(changed) == n {
		return nil
	}
	// The statement locked what exists, so this is what its guard saw; but for what is archived, or was until just now.
	current, err := getComments(ctx, tx, tenant, ids)
	if err != nil {
		return err
	}
	for _, i := range turn {
		if out[i].Changed {
			continue
		}
		row, ok := current[changes[i].id]
		c := row.wire()
		switch {
		case !ok:
			out[i].Err = ErrNotFound
		case changes[i].ifVersion != AnyVersion && changes[i].ifVersion != c.Version:
			out[i].Err = &StaleError{Current: c}
		case !kind.allowed(c):
			out[i].Err = &StateError{Current: c}
		case kind.has(c, changes[i].value):
			out[i].Comment = c
		default: // nothing speaks against it but that the statement did not see it
			out[i].Err = &archivedError{posts: []int64{row.PostID}}
		}
	}
	return nil
}
