package store

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// Errors of single comments.
var (
	// ErrBodyEmpty reports a body of white space alone.
	ErrBodyEmpty = errors.New("store: the body is empty")
	// ErrBodyTooLong reports a body of more than MaxBodyBytes after trimming.
	ErrBodyTooLong = fmt.Errorf("store: the body is longer than %d bytes", MaxBodyBytes)
	// ErrBodyText reports a body that is not text: invalid UTF-8, or NUL, which PostgreSQL cannot keep.
	ErrBodyText = errors.New("store: the body is not valid UTF-8 without NUL")
)

// StaleError reports that the comment has another version than the write expected.
type StaleError struct{ Current event.Comment }

func (e *StaleError) Error() string {
	return fmt.Sprintf("store: comment %s is at version %d", e.Current.CommentID, e.Current.Version)
}

// StateError reports that the comment's state does not allow the write: it is deleted or erased or, for an edit, hidden or
// removed by a moderator.
type StateError struct{ Current event.Comment }

func (e *StateError) Error() string {
	return fmt.Sprintf("store: comment %s is %s", e.Current.CommentID, e.Current.State())
}

// MaxBodyBytes bounds a comment's body after trimming.
const MaxBodyBytes = 16 << 10

// trimBody returns the body as it is kept: without white space at its ends.
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

// A path is one segment per level, joined by '/': 14 hexadecimal digits of the microseconds since 1970 and the slug. Segments
// have one width, so paths sort as the thread reads, siblings by age; commentCreateSQL makes them.
const (
	slugLen    = 8
	segmentLen = 14 + slugLen

	// MaxDepth bounds how deep replies nest; a first comment has depth 1.
	MaxDepth = 64
)

// Depth is the depth of the comment with this path, from 1.
func Depth(path string) int { return (len(path) + 1) / (segmentLen + 1) }

// slugs are 40 random bits in Crockford's alphabet: lower case, no letters that look alike.
var slugEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

func newSlug() string {
	b := make([]byte, slugLen*5/8)
	rand.Read(b) // never fails
	return slugEncoding.EncodeToString(b)
}

// commentColumns are those of commentRow, of the table under the name c.
const commentColumns = `c.comment_id::text, c.post_id, c.parent_id::text, c.slug, c.path, c.author_id, c.body, c.author_state, c.moderation_state,
       c.version, c.created_at, c.updated_at`

type commentRow struct {
	CommentID       string
	PostID          int64
	ParentID        *string
	Slug            string
	Path            string
	AuthorID        int64
	Body            string
	AuthorState     string
	ModerationState string
	Version         int64
	CreatedAt       time.Time
	UpdatedAt       time.Time
}

func (r commentRow) wire() event.Comment {
	c := event.Comment{
		CommentID: r.CommentID, PostID: event.ID(r.PostID), Slug: r.Slug, Path: r.Path, AuthorID: event.ID(r.AuthorID), Body: r.Body,
		AuthorState: r.AuthorState, ModerationState: r.ModerationState, Version: r.Version,
		CreatedAt: wireTime(r.CreatedAt), UpdatedAt: wireTime(r.UpdatedAt),
	}
	if r.ParentID != nil {
		c.ParentID = *r.ParentID
	}
	return c
}

// commentEvent tells of the comment's state after a write.
func commentEvent(tenant int64, c event.Comment, eventType string, m Meta) (event.Event, error) {
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		c.Body = ""
	}
	c.Actor = m.Actor
	payload, err := json.Marshal(c)
	if err != nil {
		return event.Event{}, fmt.Errorf("encode comment %s: %w", c.CommentID, err)
	}
	return event.Event{
		TenantID: tenant, AggregateType: event.AggregateComment, AggregateID: int64(c.PostID), Type: eventType,
		OccurredAt: c.UpdatedAt.Time, TraceParent: m.TraceParent, Payload: payload,
	}, nil
}

// commentGetSQL reads comments, archived or not.
// Index: comments_pkey, comments_archive_pkey.   Locks: none.
const commentGetSQL = `
SELECT /* store.comment_get */ ` + commentColumns + `
  FROM all_comments c WHERE c.tenant_id = @tenant::bigint AND c.comment_id = ANY(@comment_ids::uuid[])`

func getComments(ctx context.Context, tx querier, tenant int64, ids []string) (map[string]commentRow, error) {
	rows, _ := tx.Query(ctx, commentGetSQL, pgx.StrictNamedArgs{"tenant": tenant, "comment_ids": ids})
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[commentRow])
	if err != nil {
		return nil, fmt.Errorf("read %d comments: %w", len(ids), err)
	}
	byID := make(map[string]commentRow, len(got))
	for _, r := range got {
		byID[r.CommentID] = r
	}
	return byID, nil
}

// GetComment returns the comment whatever its state, or ErrNotFound. id is a UUID in lower case. The body of a comment that is
// not visible is part of it: the caller decides who sees that. The Actor is not kept in the truth.
func (s *Store) GetComment(ctx context.Context, tenant int64, id string) (event.Comment, error) {
	var c event.Comment
	err := s.read(ctx, tenant, func(tx pgx.Tx) error {
		byID, err := getComments(ctx, tx, tenant, []string{id})
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
		return event.Comment{}, fmt.Errorf("read comment %s of tenant %d: %w", id, tenant, err)
	}
	return c, nil
}
