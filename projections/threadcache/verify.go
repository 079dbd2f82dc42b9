package threadcache

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
)

type commentRow struct {
	TenantID, PostID             int64
	Path, CommentID, ParentID    string
	Slug                         string
	AuthorID                     int64
	Body                         string
	AuthorState, ModerationState string
	Version                      int64
	CreatedAt, UpdatedAt         time.Time
	Visible                      bool
	VisibleDescendants           int
	Shown                        bool
}

// truthSQL reads every comment of the truth in the order of its thread. What the projection derives is computed here, in Go.
// Index: comments_path_key, all of it.   Locks: none.
const truthSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, false, 0, false
  FROM comments ORDER BY tenant_id, post_id, path`

// rowsSQL reads every comment of the projection likewise.
// Index: thread_comments_path_idx, all of it.   Locks: none.
const rowsSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, visible, visible_descendants, shown
  FROM thread_comments ORDER BY tenant_id, post_id, path`

// Verify compares every comment with the truth's, and visible, visible_descendants and shown with what the truth makes them;
// it reports every difference and returns how many comments it compared. What has not been applied yet is a difference too, so
// it is run when the consumer's lag is 0. Both pools act as the system role. Memory is one row per level of one thread.
func Verify(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) (checked int64, err error) {
	f := fold{report: report}
	err = projections.Compare(ctx, truth, projection, truthSQL, rowsSQL,
		func(a, b *commentRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.PostID, b.PostID), cmp.Compare(a.Path, b.Path))
		},
		func(want, got *commentRow) error {
			checked++
			f.add(want, got)
			return nil
		})
	if err != nil {
		return checked, fmt.Errorf("verify threads: %w", err)
	}
	f.finish(nil)
	return checked, nil
}

// fold takes the comments in the order of their threads. The stack holds the ancestors of the last one: a comment is finished,
// its visible descendants known, when something comes that is not below it.
type fold struct {
	report func(projections.Difference)
	stack  []open
}

type open struct{ want, got *commentRow } // want.VisibleDescendants grows

func (f *fold) add(want, got *commentRow) {
	if want == nil {
		f.differ(got, "row", "absent", "present")
		return
	}
	f.finish(want)
	f.stack = append(f.stack, open{want, got})
}

// finish compares and pops what is not an ancestor of next.
func (f *fold) finish(next *commentRow) {
	for len(f.stack) > 0 {
		top := f.stack[len(f.stack)-1]
		w := top.want
		if next != nil && w.TenantID == next.TenantID && w.PostID == next.PostID && strings.HasPrefix(next.Path, w.Path+"/") {
			return
		}
		f.stack = f.stack[:len(f.stack)-1]
		w.Visible = event.Visible(w.AuthorState, w.ModerationState)
		w.Shown = w.Visible || w.VisibleDescendants > 0
		if len(f.stack) > 0 {
			parent := f.stack[len(f.stack)-1].want
			parent.VisibleDescendants += w.VisibleDescendants
			if w.Visible {
				parent.VisibleDescendants++
			}
		}
		f.compare(w, top.got)
	}
}

func (f *fold) compare(want, got *commentRow) {
	if got == nil {
		f.differ(want, "row", "present", "absent")
		return
	}
	at := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
	for _, c := range []struct {
		field     string
		want, got any
	}{
		{"comment_id", want.CommentID, got.CommentID},
		{"parent_id", want.ParentID, got.ParentID},
		{"slug", want.Slug, got.Slug},
		{"author_id", want.AuthorID, got.AuthorID},
		{"author_state", want.AuthorState, got.AuthorState},
		{"moderation_state", want.ModerationState, got.ModerationState},
		{"version", want.Version, got.Version},
		{"created_at", at(want.CreatedAt), at(got.CreatedAt)},
		{"updated_at", at(want.UpdatedAt), at(got.UpdatedAt)},
		{"visible", want.Visible, got.Visible},
		{"visible_descendants", want.VisibleDescendants, got.VisibleDescendants},
		{"shown", want.Shown, got.Shown},
	} {
		if c.want != c.got {
			f.differ(want, c.field, fmt.Sprint(c.want), fmt.Sprint(c.got))
		}
	}
	if !event.BodyTravels(want.AuthorState, want.ModerationState) {
		want.Body = "" // the truth keeps it, no event has it
	}
	if want.Body != got.Body { // a body is nobody's to print
		f.differ(want, "body", fmt.Sprintf("%d bytes", len(want.Body)), fmt.Sprintf("another %d bytes", len(got.Body)))
	}
}

func (f *fold) differ(of *commentRow, field, want, got string) {
	f.report(projections.Difference{
		Projection: Name, TenantID: of.TenantID, Entity: fmt.Sprintf("comment %s of post %d", of.CommentID, of.PostID), Field: field, Want: want, Got: got,
	})
}
